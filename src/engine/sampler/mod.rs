//! Draws one token from one row of logits.
//!
//! The order is: logit bias, minimum length, repetition penalty, frequency and presence penalties,
//! the mask of a grammar, temperature, top-k, top-p, min-p, draw. From the temperature on,
//! `draw.rs` does the steps. Nothing sorts the vocabulary.
//!
//! Invariant: the token depends only on the row, the parameters and the sequence's own tokens. The
//! random numbers are a hash of the seed, the position and the token, so no batch, preemption or
//! order of calls changes them.

mod changes;
mod draw;
mod row;

use sterna_kernels::{Kernels, LOGITS_BLOCK, LogitScale, Rank};
use sterna_scheduler::TokenId;

use super::sampling_params::{SamplingParams, ScoredToken, TokenOutput};
use crate::constraint::Mask;
use crate::fault::{self, Place};
use crate::model::{Deciding, WantedDraw};
pub(super) use changes::LogitChanges;
use draw::{DrawMemory, draw, noise};
use row::{LogitScan, ScannedRow, likelier_first, scan};

/// Everything that a draw depends on besides the logits.
pub(super) struct DrawContext<'a> {
    pub(super) params: &'a SamplingParams,
    /// The prompt and the output so far, accepted draft tokens included. Its length is the position
    /// of the drawn token.
    pub(super) history: &'a [TokenId],
    pub(super) prompt_tokens: usize,
    /// Tokens that must not be drawn.
    pub(super) forbidden: &'a [TokenId],
    /// The tokens that the grammar of the answer allows.
    pub(super) mask: Option<Mask<'a>>,
}

/// Why no token can be drawn from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsampleable {
    /// The model computed an infinity or NaN.
    NotFinite,
    /// The bias, the minimum length and the grammar forbid every token, or the bias makes a logit
    /// infinite.
    NothingAllowed,
    /// The grammar of the answer allows no token here.
    DeadEnd,
}

/// Draws from rows of one vocabulary. Its fields are buffers, without meaning between calls.
pub(super) struct Sampler {
    kernels: Kernels,
    vocabulary: usize,
    adjusted: Vec<f32>,
    changes: LogitChanges,
    peaks: Vec<f32>, // The largest logit of each block.
    memory: DrawMemory,
}

impl Sampler {
    /// Returns a sampler for rows of `vocabulary` logits.
    pub(super) fn new(kernels: Kernels, vocabulary: usize) -> Sampler {
        Sampler {
            kernels,
            vocabulary,
            adjusted: Vec::with_capacity(vocabulary),
            changes: LogitChanges::new(vocabulary),
            peaks: Vec::with_capacity(vocabulary.div_ceil(LOGITS_BLOCK)),
            memory: DrawMemory::default(),
        }
    }

    /// Draws the token after `context.history` from the model's `logits`, one for each token of the
    /// vocabulary.
    ///
    /// # Errors
    /// If no token can be drawn.
    pub(super) fn sample(
        &mut self,
        logits: &[f32],
        context: &DrawContext<'_>,
    ) -> Result<TokenOutput, Unsampleable> {
        assert_eq!(
            logits.len(),
            self.vocabulary,
            "a row has one logit for each token"
        );
        let raw = scan(self.kernels, logits, &mut self.peaks);
        if !raw.is_finite {
            return Err(Unsampleable::NotFinite);
        }
        fault::pass(Place::LogitsScanned);
        let top = match context.params.logprobs {
            // Before the changes, while `peaks` still belong to the model's own logits.
            Some(count) => self.most_likely(logits, raw.max, count as usize),
            None => RowLogprobs::default(),
        };
        let token = if changes_logits(context) {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            for change in self.changes.of(context) {
                let logit = &mut adjusted[change.token as usize];
                *logit = change.apply(*logit);
            }
            if let Some(mask) = context.mask {
                mask.apply(&mut adjusted);
            }
            let scan = scan(self.kernels, &adjusted, &mut self.peaks);
            let token = self.choose(&adjusted, &scan, context);
            self.adjusted = adjusted;
            token?
        } else {
            self.choose(logits, &raw, context)?
        };
        fault::pass(Place::TokenDrawn);
        Ok(TokenOutput {
            token,
            logprob: top
                .log_sum
                .map(|log_sum| logprob(logits[token as usize], raw.max, log_sum)),
            top: top.tokens,
        })
    }

    /// Scores `token` in a row of the model's `logits`, and reports the `count` most likely tokens.
    ///
    /// # Errors
    /// If the model computed an infinity or NaN.
    pub(super) fn score(
        &mut self,
        logits: &[f32],
        token: TokenId,
        count: u32,
    ) -> Result<ScoredToken, Unsampleable> {
        let raw = scan(self.kernels, logits, &mut self.peaks);
        if !raw.is_finite {
            return Err(Unsampleable::NotFinite);
        }
        let row = self.most_likely(logits, raw.max, count as usize);
        let own = logits[token as usize];
        let likelier = logits.iter().filter(|logit| **logit > own).count();
        let log_sum = row.log_sum.expect("it was just computed");
        Ok(ScoredToken {
            token,
            logprob: logprob(own, raw.max, log_sum),
            rank: 1 + likelier as u32,
            top: row.tokens,
        })
    }

    fn choose(
        &mut self,
        logits: &[f32],
        scan: &LogitScan,
        context: &DrawContext<'_>,
    ) -> Result<TokenId, Unsampleable> {
        let params = context.params;
        if !scan.max.is_finite() {
            return Err(Unsampleable::NothingAllowed);
        }
        if params.temperature == 0.0 || params.top_k == 1 {
            return Ok(scan.best);
        }
        let row = ScannedRow {
            kernels: self.kernels,
            logits,
            peaks: &self.peaks,
            max: scan.max,
        };
        let noise = noise(params.seed, context.history.len() as u64);
        Ok(draw(row, params, noise, &mut self.memory))
    }

    /// Returns the `count` most likely tokens, and the sum that every log-probability of the row
    /// needs.
    fn most_likely(&mut self, logits: &[f32], max: f32, count: usize) -> RowLogprobs {
        let row = ScannedRow {
            kernels: self.kernels,
            logits,
            peaks: &self.peaks,
            max,
        };
        let DrawMemory { masses, largest } = &mut self.memory;
        let log_sum = row
            .mass_before(Rank::END, LogitScale::new(max, 1.0), masses)
            .ln();
        fault::pass(Place::LogprobsSummed);
        row.largest(count.min(logits.len()), largest);
        largest.sort_unstable_by(likelier_first);
        fault::pass(Place::LogprobsRanked);
        let tokens = largest.iter();
        RowLogprobs {
            log_sum: Some(log_sum),
            tokens: tokens
                .map(|rank| (rank.token, logprob(rank.logit, max, log_sum)))
                .collect(),
        }
    }
}

/// The log-probabilities of a row, if the request wants them.
#[derive(Default)]
struct RowLogprobs {
    log_sum: Option<f64>, // ln of the sum of e^(logit - max).
    tokens: Vec<(TokenId, f32)>,
}

/// Returns a token's log-probability. The maximum is subtracted before the logarithm, not after, so
/// that a large logit loses no digits.
fn logprob(logit: f32, max: f32, log_sum: f64) -> f32 {
    (f64::from(logit) - f64::from(max) - log_sum) as f32
}

/// Up to this top-k, a draw wants the largest logits: usually fewer rows of an output head are
/// computed for them than for a draw among all tokens.
const FEW: u32 = 64;

/// Returns the logits that decide a draw after its changes, unless all logits do.
pub(super) fn deciding(context: &DrawContext<'_>) -> Option<Deciding> {
    let params = context.params;
    if params.logprobs.is_some() || context.mask.is_some() {
        return None;
    }
    match params.top_k {
        _ if params.temperature == 0.0 => Some(Deciding::Largest(1)),
        1..=FEW => Some(Deciding::Largest(params.top_k)),
        // Top-p refers to the weight of the tokens that top-k keeps.
        top_k if top_k > FEW && params.top_p < 1.0 => None,
        top_k => Some(Deciding::Draw(WantedDraw {
            noise: noise(params.seed, context.history.len() as u64),
            temperature: params.temperature,
            top_k,
            top_p: params.top_p,
            min_p: params.min_p,
        })),
    }
}

fn changes_logits(context: &DrawContext<'_>) -> bool {
    let params = context.params;
    !context.forbidden.is_empty()
        || context.mask.is_some()
        || !params.logit_bias.is_empty()
        || params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

#[cfg(test)]
mod tests;
