//! Loading: the tensors of a checkpoint become the weights of a model.
//!
//! Invariant: the result is anonymous memory. Files are mapped only while loading, so truncating a
//! file later cannot hurt a running server.
//!
//! Invariant: every tensor has the shape that the configuration asks for, and every value is
//! finite.

mod groups;
mod loader;
mod packing;
mod statistics;
mod ternary;

pub(super) use groups::{RowMemory, group_of_values, is_ternary, of_model};
pub(super) use loader::load_weights;
pub(super) use packing::{one_float, read_floats, take_codes};
pub(super) use statistics::WeightStatistics;
pub(super) use ternary::{TernaryForm, TernaryScales, TernaryTensor};
