//! Model families, as descriptions that the one transformer layer follows.
//!
//! To add a family: write a file beside `llama.rs` with its [`Architecture`], and list it in
//! [`ALL`]. If the family computes something new, add a field to the description and let the layer
//! follow that field.

mod bitnet;
mod description;
mod llama;
mod rotary;

pub use bitnet::BITNET;
pub use description::{Activation, Architecture, LayerModules, ScaleDirection};
pub use llama::LLAMA;
pub use rotary::Rotary;

/// All families that this engine computes.
pub(super) const ALL: [&Architecture; 2] = [&BITNET, &LLAMA];
