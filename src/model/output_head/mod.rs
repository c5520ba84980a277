//! The output head: from normed hidden states to logits.

mod drawn;
mod known;
mod likely;
mod narrow;
mod screened;
mod top;
mod trials;

use sterna_kernels::PANEL_ROWS;

use super::inputs::{InputFormat, Inputs};
use super::linear::Projections;
use super::wanted::WantedLogits;
use super::workers::Workers;

pub use likely::LikelyUse;
pub(super) use screened::ScreenedHead;

/// The output head of a model.
pub(super) enum OutputHead {
    /// One linear, ternary or float, that computes every logit in its own precision.
    Exact(Projections),
    /// A large float matrix that computes most logits in 8 bits.
    Screened(Box<ScreenedHead>),
}

impl OutputHead {
    /// Returns the number of rows: the logits of a token.
    pub(super) fn rows(&self) -> usize {
        match self {
            OutputHead::Exact(head) => head.linears()[0].rows(),
            OutputHead::Screened(head) => head.rows(),
        }
    }

    /// Returns the most tokens of a step that may compute only wanted logits.
    pub(super) fn max_wanted_tokens(&self) -> usize {
        match self {
            OutputHead::Exact(_) => 0,
            OutputHead::Screened(_) => narrow::MAX_INPUTS,
        }
    }

    /// Returns how often only the likely rows were computed.
    pub(super) fn likely_use(&self) -> LikelyUse {
        match self {
            OutputHead::Exact(_) => LikelyUse::default(),
            OutputHead::Screened(head) => head.likely_use(),
        }
    }

    /// Returns the number of weights.
    pub(super) fn weights(&self) -> usize {
        self.rows() * self.input_format().columns
    }

    /// Returns the bytes that a step reads that computes all logits: of the 8-bit weights if the
    /// head is screened.
    pub(super) fn bytes(&self) -> usize {
        match self {
            OutputHead::Exact(head) => head.linears()[0].bytes(),
            OutputHead::Screened(head) => head.screen_bytes(),
        }
    }

    /// Returns the bytes that [`prepare`](Self::prepare) takes.
    pub(super) fn later_bytes(&self) -> usize {
        match self {
            OutputHead::Exact(_) => 0,
            OutputHead::Screened(head) => head.later_bytes(),
        }
    }

    /// Returns the number of logits of a token, padded to whole panels.
    pub(super) fn padded_rows(&self) -> usize {
        self.rows().next_multiple_of(PANEL_ROWS)
    }

    /// Returns the form of the input rows.
    pub(super) fn input_format(&self) -> InputFormat<'_> {
        match self {
            OutputHead::Exact(head) => head.input_format(),
            OutputHead::Screened(head) => head.input_format(),
        }
    }

    /// Writes the logits of all rows of `inputs`, panel-major, `[panel][row][PANEL_ROWS]`. Unless
    /// all are `wanted`, it says which logits of each row are wanted. The others may be lower
    /// then.
    pub(super) fn multiply(
        &mut self,
        workers: &mut Workers,
        inputs: &Inputs,
        wanted: &WantedLogits,
        logits: &mut [f32],
    ) {
        match self {
            OutputHead::Exact(head) => head.multiply(workers, inputs, logits),
            OutputHead::Screened(head) => head.multiply(workers, inputs, wanted, logits),
        }
    }

    /// Does the next part of the work that makes later products faster, in some milliseconds.
    /// Returns whether there is more to do.
    pub(super) fn prepare(&mut self, workers: &mut Workers) -> bool {
        match self {
            OutputHead::Exact(_) => false,
            OutputHead::Screened(head) => head.prepare(workers),
        }
    }
}

#[cfg(test)]
mod tests;
