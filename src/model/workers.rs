//! The workers of a step: the kernels, the threads and the memory that each thread has for itself.
//! A forward pass lends them to its layers.

use sterna_kernels::{AttentionState, Kernels, PANEL_ROWS, QuantizedActivations, SavedSpans};
use sterna_scheduler::Batch;

use super::kv_store::KvStore;
use super::placement::Placement;
use super::pool::Pool;
use super::profile::Profile;
use super::recurrent_head::RecurrentScratch;

/// The number of input rows that a worker makes at once.
///
/// Products are panel-major, so the values of neighbouring tokens are neighbours in memory. Making
/// their rows together fetches those values together.
pub(super) const BLOCK_TOKENS: usize = 8;

/// The number of gate values that a worker computes before it multiplies them with their ups. They
/// fit its cache, and the kernels are called seldom.
const GATES_AT_ONCE: usize = 1 << 14;

/// The threads of a model, with what they compute with.
pub(super) struct Workers {
    pub(super) kernels: Kernels,
    pub(super) pool: Pool,
    pub(super) scratch: Vec<Scratch>, // [worker]
}

/// The memory of one worker. Stages reuse it; nothing in it outlives a stage.
pub(super) struct Scratch {
    pub(super) rows: Vec<f32>,
    pub(super) spare: Vec<f32>,
    /// Integer sums of one panel.
    pub(super) sums: Vec<i32>,
    /// Scale factors, by token, or by token and group of columns.
    pub(super) factors: Vec<f32>,
    pub(super) gates: Vec<f32>,
    pub(super) ups: Vec<f32>,
    /// Low-rank corrections of a product. Empty if the model has none.
    pub(super) corrections: Vec<f32>,
    /// The rows of one expert.
    pub(super) expert_rows: QuantizedActivations,
    pub(super) attention: AttentionState,
    /// Spans of a group of query heads that another worker begins.
    pub(super) saved_spans: SavedSpans,
    pub(super) recurrent: RecurrentScratch,
}

/// What the memory of a worker must have room for.
#[derive(Clone, Copy)]
pub(super) struct ScratchSizes {
    /// The values of the widest row.
    pub(super) max_width: usize,
    /// The tokens of the largest step.
    pub(super) max_tokens: usize,
    /// The scale factors of a token.
    pub(super) factors: usize,
    /// Whether linears have low-rank corrections.
    pub(super) has_corrections: bool,
    /// The values of the widest input row of an expert; 0 without experts.
    pub(super) expert_width: usize,
}

impl Scratch {
    /// Allocates the memory of a worker.
    pub(super) fn new(
        sizes: ScratchSizes,
        (attention, saved_spans): (AttentionState, SavedSpans),
        recurrent: RecurrentScratch,
    ) -> Scratch {
        let ScratchSizes {
            max_width,
            max_tokens,
            factors,
            has_corrections,
            expert_width,
        } = sizes;
        let values = GATES_AT_ONCE.max(max_tokens * PANEL_ROWS);
        Scratch {
            rows: vec![0.0; BLOCK_TOKENS * max_width],
            spare: vec![0.0; BLOCK_TOKENS * max_width.next_multiple_of(PANEL_ROWS)],
            sums: vec![0; max_tokens * PANEL_ROWS],
            factors: Vec::with_capacity(max_tokens * factors),
            corrections: vec![0.0; if has_corrections { values } else { 0 }],
            gates: vec![0.0; values],
            ups: vec![0.0; values],
            expert_rows: match expert_width {
                0 => QuantizedActivations::new(0, 1),
                width => QuantizedActivations::new(max_tokens, width),
            },
            attention,
            saved_spans,
            recurrent,
        }
    }

    /// Returns how many panels of gates fit the memory of gates, for `tokens` tokens.
    pub(super) fn panels_at_once(&self, tokens: usize) -> usize {
        self.gates.len() / (tokens * PANEL_ROWS)
    }
}

/// What the layers of a forward pass share.
pub(super) struct ForwardContext<'a> {
    pub(super) workers: &'a mut Workers,
    pub(super) batch: &'a Batch,
    pub(super) placement: &'a Placement,
    pub(super) kv: &'a mut KvStore,
    pub(super) profile: &'a mut Profile,
}
