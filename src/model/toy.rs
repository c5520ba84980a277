//! A tiny model with seeded random weights, for fast tests of the code above the model. It is
//! loaded like any other model.

use sterna_kernels::{Isa, Kernels};

use super::forward::Model;
use super::options::LoadOptions;
use crate::checkpoint::BITNET;
use crate::checkpoint::Source;
use crate::checkpoint::synthetic::Shape;

/// The shape of the toy: two layers of width 64, 512 tokens.
pub const SHAPE: Shape = Shape {
    name: "toy",
    architecture: &BITNET,
    vocab: 512,
    hidden: 64,
    intermediate: 96,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    max_position: 1024,
    rope_theta: 10_000.0,
    tied: true,
    group: None,
    recurrent: None,
    experts: None,
};

/// Returns the checkpoint of the toy.
pub fn source() -> Source {
    SHAPE.in_memory(1)
}

/// Loads the toy for `threads` threads and the best instruction set.
pub fn model(threads: usize) -> Model {
    let kernels = Kernels::new(Isa::best()).expect("the best instruction set is available");
    Model::load(&source(), LoadOptions::new(kernels, threads)).expect("the toy is well-formed")
}
