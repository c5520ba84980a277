//! The model: it takes tokens and pages, and returns logits.
//!
//! [`Model::forward`] computes one step for a batch of rows of many sequences, with prefill chunks
//! and decodes mixed. All tokens of all rows go through each matrix together. Only attention works
//! on each sequence by itself.
//!
//! Where to read on:
//! - `forward.rs` and `layer.rs` are the forward pass.
//! - `activations.rs` shows how the memory of a step goes from stage to stage.
//! - The layer follows `checkpoint/architecture.rs`, which describes the model families.
//! - `text_embedding.rs` pools hidden states into the embedding of a text.
//! - `load/` packs the tensors of a checkpoint into weights.
//! - `toy.rs` makes a tiny random model for tests.
//!
//! Invariant: the logits of a row depend only on its own sequence, bit for bit. Other rows, the
//! cuts between the chunks of its prompt, and the number of threads do not change them.
//!
//! Invariant: the model has no notion of requests, tenants or text.

mod activations;
mod attention;
mod embedding;
mod forward;
mod gelu;
mod inputs;
mod kv_store;
mod layer;
mod linear;
mod load;
mod logits;
mod low_rank;
mod mixture;
mod norm;
mod options;
mod output_head;
mod placement;
mod pool;
mod product;
mod profile;
mod recurrent;
mod recurrent_head;
mod rotation;
mod self_test;
mod state_store;
#[cfg(test)]
mod tests;
mod text_embedding;
pub mod toy;
mod wanted;
mod weights;
mod workers;

pub use forward::{HiddenStates, Model};
pub use kv_store::KvStore;
pub use logits::{Logits, StepLogits};
pub use mixture::ExpertUse;
pub use options::{HeadChoice, LoadOptions};
pub use output_head::LikelyUse;
pub use profile::{Profile, Stage};
pub use self_test::{ComparedPart, ComparedStage, KernelDifference, SelfTestError};
pub use state_store::AlternatingSlabs;
pub use text_embedding::TextEmbedding;
pub use wanted::{Deciding, LogitChange, WantedDraw, WantedLogits};
pub use weights::Sizes;
