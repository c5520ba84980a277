//! Loading: the files of a checkpoint become the weights of a model.

mod checkpoint;
mod packing;
mod statistics;
mod weights;

pub use checkpoint::{FileBytes, LoadError, Source};
pub(super) use weights::Weights;
