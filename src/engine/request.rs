//! The words of the door: what may be asked, what comes back, why a request is turned away.

use std::time::{Duration, Instant};

use sterna_scheduler::{FinishReason, Refusal, TenantId, TenantsError, TokenId};

use super::sampler::MOST_LOGPROBS;
use crate::metrics::RejectionReason;

/// Beyond these a division or a product can push a model's logits out of the finite numbers, and so fail the request.
const REPETITION_PENALTIES: std::ops::RangeInclusive<f32> = 0.01..=100.0;

/// How tokens are drawn. The defaults are plain sampling at temperature 1 with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the largest logit, the lowest id on a tie.
    pub temperature: f32,
    /// Keep only this many of the most likely tokens; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens with at least this probability; 1 is off.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 is off.
    pub min_p: f32,
    /// With the position, the only source of randomness.
    pub seed: u64,
    /// Divides (or multiplies, when negative) the logits of tokens in prompt and output; 0.01 to 100, and 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each time a token stands in the output; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once from every token that stands in the output; 0 is off.
    pub presence_penalty: f32,
    /// Added to single logits before everything else. Negative infinity forbids a token.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Report the log-probability of each token and of this many most likely ones (0: only the chosen one).
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }
}

/// What a client asks of the engine: tokens in, tokens out.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The prompt; never empty.
    pub prompt: Vec<TokenId>,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Most tokens to generate, at least 1.
    pub max_new_tokens: u32,
    /// Stop tokens are not drawn before this many tokens exist.
    pub min_new_tokens: u32,
    /// Tokens that end the output (end of text, end of turn, the client's own); empty to ignore them all.
    pub stop_tokens: Vec<TokenId>,
    /// Who pays.
    pub tenant: TenantId,
    /// It is another answer to the request submitted just before, and counts as no request of its own in the tenant's rates.
    pub is_another_choice: bool,
    /// When the request reached the server; latencies and deadlines count from here.
    pub arrived: Instant,
    /// Ends with `FinishReason::Deadline` if no token has come by then.
    pub first_token_within: Option<Duration>,
    /// Ends with `FinishReason::Deadline` if it has not ended by then.
    pub ends_within: Option<Duration>,
}

impl GenerationRequest {
    /// Everything a step relies on: token ids within the vocabulary, numbers that are numbers.
    pub(super) fn check(&self, vocabulary: usize) -> Result<(), SubmitError> {
        let sampling = &self.sampling;
        let biased = sampling.logit_bias.iter().map(|(token, _)| token);
        let mut tokens = self.prompt.iter().chain(&self.stop_tokens).chain(biased);
        if let Some(token) = tokens.find(|token| **token as usize >= vocabulary) {
            return Err(SubmitError::UnknownToken(*token));
        }
        if self.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt.into());
        }
        if self.max_new_tokens == 0 {
            return Err(Refusal::NothingToGenerate.into());
        }
        let not_negative = |number: f32| number.is_finite() && number >= 0.0;
        let bias_is_usable = |bias: f32| bias.is_finite() || bias == f32::NEG_INFINITY;
        let rules = [
            ("temperature", not_negative(sampling.temperature)),
            ("top_p", not_negative(sampling.top_p)),
            ("min_p", not_negative(sampling.min_p)),
            (
                "repetition_penalty",
                REPETITION_PENALTIES.contains(&sampling.repetition_penalty),
            ),
            ("frequency_penalty", sampling.frequency_penalty.is_finite()),
            ("presence_penalty", sampling.presence_penalty.is_finite()),
            (
                "logit_bias",
                sampling
                    .logit_bias
                    .iter()
                    .all(|(_, bias)| bias_is_usable(*bias)),
            ),
            (
                "logprobs",
                sampling.logprobs.is_none_or(|top| top <= MOST_LOGPROBS),
            ),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((name, _)) => Err(SubmitError::InvalidSampling(name)),
            None => Ok(()),
        }
    }
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOutput {
    /// The token; the last one may be a stop token, which is not text.
    pub token: TokenId,
    /// Its raw log-probability (before bias, penalties and temperature) if `logprobs` was asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens with their raw log-probabilities, most likely first; as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// What happens to a request. The first event is `Accepted` or `Refused`; the last is
/// `Refused`, `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    /// The request is queued and will run. Comes at the end of the first step that begins after the submission.
    Accepted,
    /// The next token.
    Token(TokenOutput),
    /// The request is over.
    Finished {
        /// Why it ended. `Stop` after a stop token or `EventStream::finish`, `Length` at `max_new_tokens`.
        reason: FinishReason,
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Those of them that came from the prefix cache.
        cached_tokens: u32,
        /// Generated tokens, a final stop token included; after `EventStream::finish` those received before it.
        completion_tokens: u32,
    },
    /// The engine will not run it.
    Refused(SubmitError),
    /// It began, and the engine could not go on; the text names no internals.
    Failed(String),
}

/// Why tenants keep what they had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantsRefused {
    /// It can't be had.
    Impossible(TenantsError),
    /// The engine has ended.
    Gone,
}

/// Why a request was rejected before it began.
#[derive(Clone, Debug, PartialEq)]
pub enum SubmitError {
    /// The scheduler refused it, or the engine did so for a reason that the scheduler knows too.
    Refused(Refusal),
    /// The prompt, the stop tokens or the bias contain this token id, which the model does not
    /// have.
    UnknownToken(TokenId),
    /// The sampling parameter of this name has an invalid value.
    InvalidSampling(&'static str),
    /// The engine has stopped after a bug. It serves nothing until a restart.
    Dead,
}

impl From<Refusal> for SubmitError {
    fn from(refusal: Refusal) -> SubmitError {
        SubmitError::Refused(refusal)
    }
}

impl SubmitError {
    /// Returns the label under which the metrics count it.
    pub(super) fn label(&self) -> RejectionReason {
        match self {
            SubmitError::Refused(refusal) => match refusal {
                Refusal::Overloaded { .. } => RejectionReason::QueueFull,
                Refusal::RateLimited { .. } => RejectionReason::RateLimited,
                Refusal::TenantQueueFull { .. } => RejectionReason::TenantQueueFull,
                Refusal::Deadline { .. } => RejectionReason::Deadline,
                Refusal::TooLong { .. } => RejectionReason::TooLong,
                Refusal::EmptyPrompt | Refusal::NothingToGenerate => RejectionReason::Invalid,
                Refusal::Draining => RejectionReason::Draining,
            },
            SubmitError::UnknownToken(_) | SubmitError::InvalidSampling(_) => {
                RejectionReason::Invalid
            }
            SubmitError::Dead => RejectionReason::Dead,
        }
    }
}
