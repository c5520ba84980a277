//! Draws one token from one row of logits.
//!
//! The order is: logit bias, minimum length, repetition penalty, frequency and presence penalties,
//! the mask of a grammar, temperature, top-k, top-p, min-p, draw. From the temperature on,
//! `weights.rs` does the steps without top-k, this file the steps with a small top-k, and
//! `ranked.rs` the steps with a large top-k. Nothing sorts more than a few thousand tokens.
//!
//! Invariant: the token depends only on the row, the parameters and the sequence's own tokens. The
//! random number is a hash of the seed and the position, so no batch, preemption or order of calls
//! changes it.

mod candidate;
mod ranked;
mod weights;

use sterna_kernels::{Kernels, LOGITS_BLOCK};
use sterna_random::{GOLDEN, mix};
use sterna_scheduler::TokenId;

use super::sampling_params::{SamplingParams, ScoredToken, TokenOutput};
use crate::constraint::Mask;
use crate::fault::{self, Place};
use candidate::{Candidate, likelier_first};
use ranked::{Filters, RankedDraw, WeightedRow};
use weights::{LogitScan, TokenWeights, scale, scan};

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

/// The largest top-k whose tokens are sorted. A larger one is drawn from without sorting.
pub(super) const MAX_SORTED_TOP_K: usize = 2048;

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
    adjusted: Vec<f32>,
    counts: Vec<u32>, // All zero between uses.
    peaks: Vec<f32>,  // The largest logit of each block.
    weights: TokenWeights,
    candidates: Vec<Candidate>,
    ranked: RankedDraw,
}

impl Sampler {
    /// Returns a sampler for rows of `vocabulary` logits.
    pub(super) fn new(kernels: Kernels, vocabulary: usize) -> Sampler {
        Sampler {
            kernels,
            adjusted: Vec::with_capacity(vocabulary),
            counts: vec![0; vocabulary],
            peaks: Vec::with_capacity(vocabulary.div_ceil(LOGITS_BLOCK)),
            weights: TokenWeights::with_capacity(kernels, vocabulary),
            candidates: Vec::new(),
            ranked: RankedDraw::with_capacity(vocabulary),
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
            self.counts.len(),
            "a row has one logit for each token"
        );
        let raw = scan(self.kernels, logits, &mut self.peaks);
        if !raw.is_finite {
            return Err(Unsampleable::NotFinite);
        }
        fault::pass(Place::LogitsScanned);
        let top = match context.params.logprobs {
            // Before `adjust`, while `peaks` still belong to the model's own logits.
            Some(count) => self.most_likely(logits, raw.max, count as usize),
            None => RowLogprobs::default(),
        };
        let token = if changes_logits(context) {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted, context);
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

    fn adjust(&mut self, logits: &mut [f32], context: &DrawContext<'_>) {
        let params = context.params;
        for &(token, bias) in &params.logit_bias {
            logits[token as usize] += bias;
            fault::pass(Place::BiasAdded);
        }
        for &token in context.forbidden {
            logits[token as usize] = f32::NEG_INFINITY;
            fault::pass(Place::StopTokensForbidden);
        }
        if params.repetition_penalty != 1.0 {
            self.for_each_distinct(context.history, |token, _| {
                let logit = &mut logits[token as usize];
                *logit = if *logit > 0.0 {
                    *logit / params.repetition_penalty
                } else {
                    *logit * params.repetition_penalty
                };
                fault::pass(Place::RepetitionPenalized);
            });
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            let output = &context.history[context.prompt_tokens..];
            self.for_each_distinct(output, |token, count| {
                logits[token as usize] -=
                    params.frequency_penalty * count as f32 + params.presence_penalty;
                fault::pass(Place::OutputPenalized);
            });
        }
        if let Some(mask) = context.mask {
            mask.apply(logits);
        }
    }

    /// Calls `visit` once with each distinct token of `tokens` and its number of occurrences.
    fn for_each_distinct(&mut self, tokens: &[TokenId], mut visit: impl FnMut(TokenId, u32)) {
        for &token in tokens {
            self.counts[token as usize] += 1;
        }
        for &token in tokens {
            let count = std::mem::take(&mut self.counts[token as usize]);
            if count > 0 {
                visit(token, count);
            }
        }
    }

    fn choose(
        &mut self,
        logits: &[f32],
        scan: &LogitScan,
        context: &DrawContext<'_>,
    ) -> Result<TokenId, Unsampleable> {
        let (params, max) = (context.params, scan.max);
        if !max.is_finite() {
            return Err(Unsampleable::NothingAllowed);
        }
        if params.temperature == 0.0 || params.top_k == 1 {
            return Ok(scan.best);
        }
        let point = uniform(params.seed, context.history.len() as u64);
        let top_k = params.top_k as usize;
        if top_k > MAX_SORTED_TOP_K && top_k < logits.len() {
            let scale = scale(max, params.temperature);
            self.weights.weigh(logits, scale);
            fault::pass(Place::TokensWeighed);
            let filters = Filters {
                top_k,
                top_p: params.top_p,
                likely: self.weights.count_from(params.min_p.min(1.0)),
            };
            let row = WeightedRow {
                logits,
                weights: self.weights.values(),
                scale,
            };
            return Ok(self.ranked.draw(row, filters, point));
        }
        if top_k > 0 && top_k < logits.len() {
            largest(logits, &self.peaks, top_k, &mut self.candidates);
            fault::pass(Place::LargestFound);
            keep_likely(&mut self.candidates, max, params);
            fault::pass(Place::LargestFiltered);
            return Ok(pick(&self.candidates, point));
        }
        let scale = scale(max, params.temperature);
        if params.top_p < 1.0 || params.min_p > 0.0 {
            self.weights.weigh(logits, scale);
            fault::pass(Place::TokensWeighed);
            self.weights.keep(params.top_p, params.min_p.min(1.0));
            fault::pass(Place::NucleusKept);
            return Ok(self.weights.pick(point));
        }
        Ok(self.weights.draw(logits, scale, point))
    }

    /// Returns the `count` most likely tokens, and the sum that every log-probability of the row
    /// needs.
    fn most_likely(&mut self, logits: &[f32], max: f32, count: usize) -> RowLogprobs {
        let log_sum = self.weights.sum(logits, scale(max, 1.0)).ln();
        fault::pass(Place::LogprobsSummed);
        let count = count.min(logits.len());
        largest(logits, &self.peaks, count, &mut self.candidates);
        fault::pass(Place::LogprobsRanked);
        let tokens = self.candidates.iter();
        RowLogprobs {
            log_sum: Some(log_sum),
            tokens: tokens
                .map(|c| (c.token, logprob(c.logit, max, log_sum)))
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

/// Weighs the candidates of top-k, largest first, and keeps the candidates that top-p and min-p
/// allow.
fn keep_likely(candidates: &mut Vec<Candidate>, max: f32, params: &SamplingParams) {
    let scale = scale(max, params.temperature);
    for candidate in candidates.iter_mut() {
        candidate.weight = scale.weight(candidate.logit);
    }
    if params.top_p < 1.0 {
        let total = total_weight(candidates);
        keep_nucleus(candidates, f64::from(params.top_p) * total);
    }
    if params.min_p > 0.0 {
        candidates.retain(|candidate| candidate.weight >= params.min_p.min(1.0));
    }
}

/// Returns how many of the largest logits of a row a draw needs, if it needs no others: the first
/// of a greedy draw, or those of top-k. A draw without top-k needs the sum over all tokens.
pub(super) fn largest_needed(params: &SamplingParams) -> Option<u32> {
    if params.logprobs.is_some() || change_logits(params) {
        return None;
    }
    match params.top_k {
        _ if params.temperature == 0.0 => Some(1),
        0 => None,
        top_k => Some(top_k),
    }
}

fn changes_logits(context: &DrawContext<'_>) -> bool {
    !context.forbidden.is_empty() || context.mask.is_some() || change_logits(context.params)
}

fn change_logits(params: &SamplingParams) -> bool {
    !params.logit_bias.is_empty()
        || params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

/// Finds the `count` largest logits, largest first, the lowest token id first on a tie.
///
/// One pass keeps a few times `count` candidates instead of sorting the vocabulary. It skips blocks
/// whose peak is too small.
fn largest(logits: &[f32], peaks: &[f32], count: usize, found: &mut Vec<Candidate>) {
    found.clear();
    if count == 0 {
        return;
    }
    let capacity = (4 * count).max(64);
    found.reserve(capacity);
    // Once `count` candidates are known, a logit must exceed the smallest of them: on a tie, the
    // earlier token id wins.
    let mut bound = None;
    let is_too_small = |logit: f32, bound: Option<f32>| bound.is_some_and(|bound| logit <= bound);
    for ((first, block), &peak) in (0..)
        .step_by(LOGITS_BLOCK)
        .zip(logits.chunks(LOGITS_BLOCK))
        .zip(peaks)
    {
        if is_too_small(peak, bound) {
            continue;
        }
        for (token, &logit) in (first..).zip(block) {
            if is_too_small(logit, bound) {
                continue;
            }
            found.push(Candidate {
                token,
                logit,
                weight: 0.0,
            });
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
    found.sort_unstable_by(likelier_first);
}

fn total_weight(candidates: &[Candidate]) -> f64 {
    candidates
        .iter()
        .map(|candidate| f64::from(candidate.weight))
        .sum()
}

/// Keeps the first candidates whose weights add up to at least `mass`; at least one.
fn keep_nucleus(candidates: &mut Vec<Candidate>, mass: f64) {
    let mut sum = 0.0;
    let last = candidates.iter().position(|candidate| {
        sum += f64::from(candidate.weight);
        sum >= mass
    });
    if let Some(last) = last {
        candidates.truncate(last + 1);
    }
}

/// Returns the token at `point`, 0 to 1. The weights lie end to end on a line of length 1.
fn pick(candidates: &[Candidate], point: f64) -> TokenId {
    let target = point * total_weight(candidates);
    let mut sum = 0.0;
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        sum += f64::from(candidate.weight);
        last = Some(candidate.token);
        if sum > target {
            break;
        }
    }
    last.expect("the most likely token weighs 1 and is always kept")
}

/// Returns a number in 0..1 for one position of one seed: SplitMix64 in counter mode.
fn uniform(seed: u64, position: u64) -> f64 {
    let key = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(key.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
