//! One row of logits to one token.
//!
//! Order: logit bias, minimum length, repetition penalty, frequency and presence penalties, temperature, top-k, top-p, min-p, draw.
//!
//! Nothing is sorted but what top-k and top log-probabilities ask for; see `weights.rs` for the rest.
//! Invariant: the answer depends only on the row, the parameters and the sequence's own tokens. A draw is a hash of the seed and
//! the position, so neither batch nor preemption nor the order of calls can change it.

mod weights;

use sterna_kernels::{Kernels, LOGITS_BLOCK};

use super::{SamplingParams, TokenId, TokenOutput};
use weights::{Scan, Weights, scale, scan};

/// The most `SamplingParams::logprobs` may ask for.
pub(super) const MOST_LOGPROBS: u32 = 20;

/// Everything a token depends on, beside the logits.
pub(super) struct Draw<'a> {
    pub(super) params: &'a SamplingParams,
    /// Prompt and output so far, drafts that held among it; its length is the position of the drawn token.
    pub(super) history: &'a [TokenId],
    pub(super) prompt_tokens: usize,
    /// Tokens that may not be drawn now: the stop tokens of an output that is still too short.
    pub(super) forbidden: &'a [TokenId],
}

/// Why a row has no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsampleable {
    /// The model computed an infinity or NaN.
    NotFinite,
    /// Bias and minimum length forbid every token, or push one beyond all bounds.
    NothingAllowed,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: TokenId,
    logit: f32,
    weight: f32, // Relative to the most likely token's 1.
}

/// Scratch memory for rows of one vocabulary; holds nothing between calls.
pub(super) struct Sampler {
    kernels: Kernels,
    adjusted: Vec<f32>,
    counts: Vec<u32>, // All zero between uses.
    peaks: Vec<f32>,  // The largest logit of each block.
    weights: Weights,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Reserves for rows of `vocabulary` logits.
    pub(super) fn new(kernels: Kernels, vocabulary: usize) -> Sampler {
        Sampler {
            kernels,
            adjusted: Vec::with_capacity(vocabulary),
            counts: vec![0; vocabulary],
            peaks: Vec::with_capacity(vocabulary.div_ceil(LOGITS_BLOCK)),
            weights: Weights::with_capacity(kernels, vocabulary),
            candidates: Vec::new(),
        }
    }

    /// The token after `draw.history`, given the model's `logits`, one for each token of the vocabulary.
    ///
    /// # Errors
    /// `Unsampleable` when no token can be drawn; the row's request is then over.
    pub(super) fn sample(
        &mut self,
        logits: &[f32],
        draw: &Draw<'_>,
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
        let top = match draw.params.logprobs {
            // The most likely ones first, while `peaks` are those of the model's own logits.
            Some(top) => self.most_likely(logits, raw.most, top as usize),
            None => LogProbs::default(),
        };
        let token = if changes_logits(draw) {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(&mut adjusted, draw);
            let scan = scan(self.kernels, &adjusted, &mut self.peaks);
            let token = self.choose(&adjusted, &scan, draw);
            self.adjusted = adjusted;
            token?
        } else {
            self.choose(logits, &raw, draw)?
        };
        Ok(TokenOutput {
            token,
            logprob: top
                .log_sum
                .map(|log_sum| logprob(logits[token as usize], raw.most, log_sum)),
            top: top.tokens,
        })
    }

    fn adjust(&mut self, logits: &mut [f32], draw: &Draw<'_>) {
        let params = draw.params;
        for &(token, bias) in &params.logit_bias {
            logits[token as usize] += bias;
        }
        for &token in draw.forbidden {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        if params.repetition_penalty != 1.0 {
            self.for_each_distinct(draw.history, |token, _| {
                let logit = &mut logits[token as usize];
                *logit = if *logit > 0.0 {
                    *logit / params.repetition_penalty
                } else {
                    *logit * params.repetition_penalty
                };
            });
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            self.for_each_distinct(&draw.history[draw.prompt_tokens..], |token, count| {
                logits[token as usize] -=
                    params.frequency_penalty * count as f32 + params.presence_penalty;
            });
        }
    }

    /// Calls `visit` once with each distinct token of `tokens` and how often it stands there.
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
        scan: &Scan,
        draw: &Draw<'_>,
    ) -> Result<TokenId, Unsampleable> {
        let (params, most) = (draw.params, scan.most);
        if !most.is_finite() {
            return Err(Unsampleable::NothingAllowed);
        }
        if params.temperature == 0.0 || params.top_k == 1 {
            return Ok(scan.best);
        }
        let point = uniform(params.seed, draw.history.len() as u64);
        let top_k = params.top_k as usize;
        if top_k > 0 && top_k < logits.len() {
            largest(logits, &self.peaks, top_k, &mut self.candidates);
            keep_likely(&mut self.candidates, most, params);
            return Ok(pick(&self.candidates, point));
        }
        let scale = scale(most, params.temperature);
        if params.top_p < 1.0 || params.min_p > 0.0 {
            self.weights.weigh(logits, scale);
            self.weights.keep(params.top_p, params.min_p.min(1.0));
            return Ok(self.weights.pick(point));
        }
        Ok(self.weights.draw(logits, scale, point))
    }

    /// The `count` most likely tokens, and what every log-probability of the row is made with.
    fn most_likely(&mut self, logits: &[f32], most: f32, count: usize) -> LogProbs {
        let log_sum = self.weights.sum(logits, scale(most, 1.0)).ln();
        largest(
            logits,
            &self.peaks,
            count.min(logits.len()),
            &mut self.candidates,
        );
        let tokens = self.candidates.iter();
        LogProbs {
            log_sum: Some(log_sum),
            tokens: tokens
                .map(|c| (c.token, logprob(c.logit, most, log_sum)))
                .collect(),
        }
    }
}

/// What is told of a row beside its token.
#[derive(Default)]
struct LogProbs {
    log_sum: Option<f64>, // ln of the sum of e^(logit - largest).
    tokens: Vec<(TokenId, f32)>,
}

/// The largest is subtracted before the logarithm, not after: so nothing of a large logit is rounded away.
fn logprob(logit: f32, most: f32, log_sum: f64) -> f32 {
    (f64::from(logit) - f64::from(most) - log_sum) as f32
}

/// Of what top-k left, largest first, that which top-p and min-p leave; each with its weight.
fn keep_likely(candidates: &mut Vec<Candidate>, most: f32, params: &SamplingParams) {
    let scale = scale(most, params.temperature);
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

fn changes_logits(draw: &Draw<'_>) -> bool {
    let params = draw.params;
    !params.logit_bias.is_empty()
        || !draw.forbidden.is_empty()
        || params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}

fn likelier_first(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The `count` largest logits, largest first, the lowest id first on a tie. One pass that keeps a few times `count`
/// contenders, not a sort of the vocabulary; blocks whose peak cannot be among them are passed over.
fn largest(logits: &[f32], peaks: &[f32], count: usize, found: &mut Vec<Candidate>) {
    found.clear();
    if count == 0 {
        return;
    }
    let room = (4 * count).max(64);
    found.reserve(room);
    let mut bar = None; // Once `count` logits are known, one must beat the least of them: later ids lose ties.
    let is_below = |logit: f32, bar: Option<f32>| bar.is_some_and(|bar| logit <= bar);
    for ((first, block), &peak) in (0..)
        .step_by(LOGITS_BLOCK)
        .zip(logits.chunks(LOGITS_BLOCK))
        .zip(peaks)
    {
        if is_below(peak, bar) {
            continue;
        }
        for (token, &logit) in (first..).zip(block) {
            if is_below(logit, bar) {
                continue;
            }
            found.push(Candidate {
                token,
                logit,
                weight: 0.0,
            });
            if found.len() == room {
                let (_, least, _) = found.select_nth_unstable_by(count - 1, likelier_first);
                bar = Some(least.logit);
                found.truncate(count);
            }
        }
    }
    found.sort_unstable_by(likelier_first);
    found.truncate(count);
}

fn total_weight(candidates: &[Candidate]) -> f64 {
    candidates
        .iter()
        .map(|candidate| f64::from(candidate.weight))
        .sum()
}

/// Keeps the first candidates that together weigh `enough`, at least one.
fn keep_nucleus(candidates: &mut Vec<Candidate>, enough: f64) {
    let mut weight = 0.0;
    let inside = candidates.iter().position(|candidate| {
        weight += f64::from(candidate.weight);
        weight >= enough
    });
    if let Some(last) = inside {
        candidates.truncate(last + 1);
    }
}

/// The candidate at `point` (0 to 1) of the line on which each takes its weight.
fn pick(candidates: &[Candidate], point: f64) -> TokenId {
    let target = point * total_weight(candidates);
    let mut passed = 0.0;
    let mut last = None;
    for candidate in candidates.iter().filter(|candidate| candidate.weight > 0.0) {
        passed += f64::from(candidate.weight);
        last = Some(candidate.token);
        if passed > target {
            break;
        }
    }
    last.expect("the most likely token weighs 1 and is always kept")
}

/// A number in 0..1 for one position of one seed: SplitMix64 by counter.
fn uniform(seed: u64, position: u64) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let key = mix(seed.wrapping_add(GOLDEN));
    let bits = mix(key.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// SplitMix64's finalizer: every bit of the input moves every bit of the output.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests;
