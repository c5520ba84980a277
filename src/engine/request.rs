//! Requests to the engine, the events that answer them, and the reasons for a refusal.

use std::time::{Duration, Instant};

use sterna_scheduler::{Band, FinishReason, Refusal, SubTenant, TenantId, TenantsError, TokenId};

use super::sampling_params::{SamplingParams, ScoredToken, TokenOutput};
use crate::metrics::RejectionReason;

/// A request for generated tokens.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The prompt; at least one token.
    pub prompt: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// The maximum number of generated tokens, at least 1.
    pub max_new_tokens: u32,
    /// Whether the client asked for `max_new_tokens`: see `Request::is_length_given`.
    pub is_length_given: bool,
    /// Stop tokens are not drawn before the output has this many tokens.
    pub min_new_tokens: u32,
    /// Tokens that end the output: end of text, end of turn, the client's own. If empty, no token
    /// ends it.
    pub stop_tokens: Vec<TokenId>,
    /// The tenant that the request is charged to.
    pub tenant: TenantId,
    /// The client of the tenant that the request is for, if the tenant tells them apart.
    pub sub_tenant: Option<SubTenant>,
    /// The priority of the request, if it is lower than its tenant's.
    pub band: Option<Band>,
    /// When the first byte of the request reached the server. Latencies and deadlines count from
    /// here.
    pub arrived: Instant,
    /// The request ends with `FinishReason::Deadline` if it has no token by then.
    pub first_token_within: Option<Duration>,
    /// The request ends with `FinishReason::Deadline` if it is still running by then.
    pub ends_within: Option<Duration>,
}

impl GenerationRequest {
    /// Checks everything that a step relies on: token ids are in the vocabulary, parameters are
    /// valid.
    pub(super) fn check(&self, vocabulary: usize) -> Result<(), SubmitError> {
        let biased = self.sampling.logit_bias.iter().map(|(token, _)| token);
        let mut tokens = self.prompt.iter().chain(&self.stop_tokens).chain(biased);
        if let Some(token) = tokens.find(|token| **token as usize >= vocabulary) {
            return Err(SubmitError::UnknownToken(*token));
        }
        if self.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt.into());
        }
        if let Some(name) = self.sampling.invalid() {
            return Err(SubmitError::InvalidSampling(name));
        }
        if self.max_new_tokens == 0 {
            return Err(Refusal::NothingToGenerate.into());
        }
        Ok(())
    }
}

/// An event of a request. The first event is `Accepted` or `Refused`; the last is `Refused`,
/// `Finished`, `DeadEnd` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    /// The scheduler has queued the request. It will run unless the queue fills up and another
    /// tenant has less of it than its share: then `Refused` follows. Sent at the end of the first
    /// step that begins after the submission.
    Accepted,
    /// The next token of the prompt after its first one, if `prompt_logprobs` is set. All come
    /// before the first `Token`.
    Scored(ScoredToken),
    /// The embedding of the prompt, if `pooling` is set. No `Token` comes then.
    Embedding(Vec<f32>),
    /// The next token.
    Token(TokenOutput),
    /// The request has ended.
    Finished {
        /// Why it ended: `Stop` after a stop token or `EventStream::finish`, `Length` at
        /// `max_new_tokens`.
        reason: FinishReason,
        /// The length of the prompt.
        prompt_tokens: u32,
        /// The number of prompt tokens that came from the prefix cache.
        cached_tokens: u32,
        /// The number of generated tokens, a final stop token included. After
        /// `EventStream::finish`, the number of tokens received before it.
        completion_tokens: u32,
    },
    /// The engine refused the request, or displaced it before it ran.
    Refused(SubmitError),
    /// The output follows a grammar, and no token can follow. The text says why.
    DeadEnd(String),
    /// The engine failed after it had accepted the request. The text names no internals.
    Failed(String),
}

/// Why the tenants' policies stay unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantsRefused {
    /// The scheduler cannot grant the policies.
    Impossible(TenantsError),
    /// The engine has ended.
    Gone,
}

/// Why a request was refused before it began.
#[derive(Clone, Debug, PartialEq)]
pub enum SubmitError {
    /// The scheduler refused it, or the engine refused it earlier for one of the same reasons.
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
