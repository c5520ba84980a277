//! A row of logits, scanned once.
//!
//! Invariant: every sum has a fixed order, so a result depends on the row alone.

use std::cmp::Ordering;

use sterna_kernels::{Kernels, LOGITS_BLOCK, LogitScale, Rank};
use sterna_scheduler::TokenId;

/// The result of one pass over a row of logits.
pub(super) struct LogitScan {
    /// No logit is NaN or infinite.
    pub(super) is_finite: bool,
    /// The token with the largest logit, the lowest id on a tie.
    pub(super) best: TokenId,
    /// The largest logit.
    pub(super) max: f32,
}

/// A row of logits, and the largest logit of each block of [`LOGITS_BLOCK`].
#[derive(Clone, Copy)]
pub(super) struct ScannedRow<'a> {
    pub(super) kernels: Kernels,
    pub(super) logits: &'a [f32],
    pub(super) peaks: &'a [f32],
    /// The largest logit.
    pub(super) max: f32,
}

/// Scans a row once, and stores the largest logit of each block in `peaks`.
pub(super) fn scan(kernels: Kernels, logits: &[f32], peaks: &mut Vec<f32>) -> LogitScan {
    peaks.resize(logits.len().div_ceil(LOGITS_BLOCK), 0.0);
    let is_finite = kernels.scan_logits(logits, peaks);
    let larger = |a, b| if b > a { b } else { a };
    let max = peaks.iter().copied().fold(f32::NEG_INFINITY, larger);
    let block = peaks.iter().position(|&peak| peak == max).unwrap_or(0);
    let first = block * LOGITS_BLOCK;
    let inside = logits[first..].iter().position(|&logit| logit == max);
    LogitScan {
        is_finite,
        best: (first + inside.unwrap_or(0)) as TokenId,
        max,
    }
}

impl ScannedRow<'_> {
    /// Returns the sum of the weights of the tokens before `end`. `masses` is memory.
    pub(super) fn mass_before(self, end: Rank, scale: LogitScale, masses: &mut Vec<f32>) -> f64 {
        masses.resize(self.peaks.len(), 0.0);
        (self.kernels).sum_weights(self.logits, scale, end, self.peaks, masses);
        masses.iter().copied().map(f64::from).sum()
    }

    /// Finds the `count` largest logits, in no order; on a tie, those of the lowest token ids.
    ///
    /// One pass keeps a few times `count` tokens instead of sorting the vocabulary. It skips blocks
    /// whose peak is too small.
    pub(super) fn largest(self, count: usize, found: &mut Vec<Rank>) {
        found.clear();
        if count == 0 {
            return;
        }
        let capacity = (4 * count).max(64);
        found.reserve(capacity.min(self.logits.len()));
        // Once `count` tokens are known, a logit must exceed the smallest of them: on a tie, the
        // earlier token id wins.
        let mut bound = None;
        let is_too_small =
            |logit: f32, bound: Option<f32>| bound.is_some_and(|bound| logit <= bound);
        for ((first, block), &peak) in (0..)
            .step_by(LOGITS_BLOCK)
            .zip(self.logits.chunks(LOGITS_BLOCK))
            .zip(self.peaks)
        {
            if is_too_small(peak, bound) {
                continue;
            }
            for (token, &logit) in (first..).zip(block) {
                if is_too_small(logit, bound) {
                    continue;
                }
                found.push(Rank { logit, token });
                if found.len() == capacity {
                    let (_, smallest, _) = found.select_nth_unstable_by(count - 1, likelier_first);
                    bound = Some(smallest.logit);
                    found.truncate(count);
                }
            }
        }
        if found.len() > count {
            found.select_nth_unstable_by(count - 1, likelier_first);
            found.truncate(count);
        }
    }
}

/// Orders tokens by their logits, largest first, and on a tie by their ids, lowest first.
pub(super) fn likelier_first(a: &Rank, b: &Rank) -> Ordering {
    let [a_logit, b_logit] = [a, b].map(|rank| rank.logit + 0.0); // −0 becomes 0.
    b_logit.total_cmp(&a_logit).then(a.token.cmp(&b.token))
}
