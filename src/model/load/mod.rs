//! Loading: the tensors of a checkpoint become the weights of a model.
//!
//! Invariant: the result is anonymous memory. Files are mapped only while loading, so truncating a
//! file later cannot hurt a running server.
//!
//! Invariant: every tensor has the shape that the configuration asks for, and every value is
//! finite.

mod loader;
mod packing;

pub(super) use loader::load_weights;
