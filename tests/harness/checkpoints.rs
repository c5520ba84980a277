//! Checkpoints of the fixtures, and the bits that a model computes.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::{Path, PathBuf};

use sterna::checkpoint::Source;
use sterna::model::{AlternatingSlabs, LoadOptions, Model};
use sterna_kernels::Kernels;
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

/// The tokens that models are compared on.
const TOKENS: usize = 40;

/// Returns the path of a fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

pub(crate) fn load(source: &Source) -> Result<Model, String> {
    load_with(source, Kernels::best())
}

fn load_with(source: &Source, kernels: Kernels) -> Result<Model, String> {
    let options = LoadOptions::new(kernels, 2);
    Model::load(source, options).map_err(|error| error.to_string())
}

/// Returns the bits of the logits after each of some tokens. Without an output head, returns the
/// bits of the hidden states.
pub(crate) fn computed_bits(source: &Source) -> Vec<Vec<u32>> {
    computed_bits_with(source, Kernels::best())
}

/// Returns what [`computed_bits`] does, as other kernels compute it.
pub(crate) fn computed_bits_with(source: &Source, kernels: Kernels) -> Vec<Vec<u32>> {
    bits_of(load_with(source, kernels).unwrap())
}

/// Returns what [`computed_bits`] does, of a loaded model.
pub(crate) fn bits_of(mut model: Model) -> Vec<Vec<u32>> {
    let vocab = model.config().vocab;
    let tokens: Vec<TokenId> = (0..TOKENS).map(|i| (i * i % vocab) as TokenId).collect();
    let pages = (0..).map(Page::new).take(TOKENS.div_ceil(PAGE_TOKENS));
    let pages: Vec<Page> = pages.collect();
    let mut batch = Batch::new();
    batch.push_row(SequenceId::new(0, 0), 0, &tokens, &pages, TOKENS);
    batch.set_states(AlternatingSlabs::new(0).next_row());
    let mut kv = model.new_kv_store(pages.len()).unwrap();
    let bits = |row: &[f32]| row.iter().map(|value| value.to_bits()).collect();
    if !model.config().has_head {
        return model
            .forward_states(&batch, &mut kv)
            .iter()
            .map(bits)
            .collect();
    }
    let logits = model.forward(&batch, &mut kv);
    let mut row = vec![0.0; vocab];
    let rows = (0..TOKENS).map(|index| {
        logits.copy_row(index, &mut row);
        bits(&row)
    });
    rows.collect()
}
