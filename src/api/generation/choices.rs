//! The choices of one request: `n` independent generations of each of its prompts.
//!
//! Invariant: all choices succeed or fail together. The engine accepts, rejects or displaces all of
//! them. If it fails one choice, the server cancels the others.
//!
//! Invariant: choice `i` of a prompt draws with the request's seed plus `i`, wrapping. So choice 0
//! is the answer of a request with `n` = 1, and a client can repeat each choice alone. The choices
//! of the first prompt come first.
//!
//! Invariant: the usage counts each prompt once.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::select_all;
use serde::Serialize;
use utoipa::ToSchema;

use super::choice::{ChoiceGeneration, ChoiceOutput};
use super::logprobs::{SpelledTokens, TokenLogprob, TokenSpelling};
use super::prompt_logprobs::PromptLogprobs;
use super::request::ParsedRequest;
use super::running::Registration;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::middleware::authentication::Caller;
use crate::api::middleware::request_log::RequestLog;
use crate::engine::{ScoredToken, TokenId};
use crate::text::Tokenizer;

/// The token counts of all choices together.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(in crate::api) struct Usage {
    /// The tokens of the prompts, each counted once.
    prompt_tokens: u32,
    /// The output tokens of all choices. A stop token counts.
    completion_tokens: u32,
    /// The sum of both.
    total_tokens: u32,
    /// Details of the prompt, once they are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
}

/// Details of a prompt.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct PromptDetails {
    /// The tokens of the prompt that came from the prefix cache.
    cached_tokens: u32,
}

impl Usage {
    /// Returns the tokens of the prompts.
    pub(in crate::api) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Returns the tokens of the prompts that came from the prefix cache, as far as is known.
    pub(in crate::api) fn cached_tokens(&self) -> u32 {
        let details = self.prompt_tokens_details;
        details.map_or(0, |details| details.cached_tokens)
    }

    /// Returns the output tokens.
    pub(in crate::api) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }
}

/// The running choices of a request. Dropping them cancels them.
pub(in crate::api) struct Choices {
    running: Vec<(u32, ChoiceGeneration)>, // Ordered by their last output, the oldest first.
    tokenizer: Arc<Tokenizer>,
    prompts: Option<Vec<Vec<TokenId>>>, // Kept only if the client wants token ids.
    wants_logprobs: bool,
    prompt_alternatives: Option<u32>, // `None` if the client wants no `prompt_logprobs`.
    spelling: TokenSpelling,
    prompt_tokens: u32,
    choices_per_prompt: u32,
    /// The cached tokens of the first choice of each prompt, known when it has ended. Later choices
    /// may have found pages in the cache that the first choice computed.
    cached_tokens: Vec<Option<u32>>,
    completion_tokens: Vec<u32>, // By choice.
    arrived: Instant,
    registration: Registration,
    log: RequestLog,
}

impl Choices {
    /// Submits `request` with all its choices.
    ///
    /// # Errors
    /// If the engine rejects the request at once.
    pub(in crate::api) fn start(
        serving: &Serving,
        request: ParsedRequest,
        caller: &Caller,
        arrived: Instant,
    ) -> Result<Choices, ApiError> {
        serving.model.check_generates()?;
        let (params, prompts) = (&request.params, &request.prompts);
        let count = prompts.len() * params.n as usize;
        let registration = caller.running().register(&caller.request_id);
        let tokens = prompts.iter().map(|prompt| prompt.tokens.clone());
        let mut choices = Choices {
            running: Vec::with_capacity(count),
            tokenizer: Arc::clone(&serving.tokenizer),
            prompts: params.shape.has_token_ids.then(|| tokens.collect()),
            wants_logprobs: params.sampling.logprobs.is_some(),
            prompt_alternatives: params.shape.prompt_logprobs,
            spelling: if params.shape.shows_token_ids {
                TokenSpelling::Id
            } else {
                TokenSpelling::Text
            },
            prompt_tokens: prompts
                .iter()
                .map(|prompt| prompt.tokens.len() as u32)
                .sum(),
            choices_per_prompt: params.n,
            cached_tokens: vec![None; prompts.len()],
            completion_tokens: vec![0; count],
            arrived,
            registration,
            log: caller.log.clone(),
        };
        let submitted = Instant::now();
        let generations = ChoiceGeneration::start_all(serving, request, caller, arrived)?;
        choices.log.submit(submitted);
        let enders = generations.iter().map(ChoiceGeneration::ender);
        choices.registration.add_enders(enders);
        choices.running.extend((0..).zip(generations));
        Ok(choices)
    }

    /// Gives the request a further id, under which the operator can end it.
    pub(in crate::api) fn also_called(&mut self, id: &str) {
        self.registration.add_id(id);
    }

    /// Returns when the request arrived.
    pub(in crate::api) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Returns the number of choices, running and ended.
    pub(in crate::api) fn count(&self) -> u32 {
        self.completion_tokens.len() as u32
    }

    /// Returns whether all choices have ended.
    pub(in crate::api) fn all_ended(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns the tokens of the prompt of choice `index` if the client wants token ids.
    pub(in crate::api) fn prompt(&self, index: u32) -> Option<&[TokenId]> {
        let prompts = self.prompts.as_ref()?;
        Some(&prompts[(index / self.choices_per_prompt) as usize])
    }

    /// Returns whether the client wants token ids.
    pub(in crate::api) fn wants_token_ids(&self) -> bool {
        self.prompts.is_some()
    }

    /// Writes log-probabilities with `write` if the client wants them.
    pub(in crate::api) fn logprobs<T>(
        &self,
        logprobs: &[TokenLogprob],
        write: fn(&[TokenLogprob], SpelledTokens<'_>) -> T,
    ) -> Option<T> {
        let spelled = SpelledTokens {
            tokenizer: &self.tokenizer,
            spelling: self.spelling,
        };
        self.wants_logprobs.then(|| write(logprobs, spelled))
    }

    /// Writes the log-probabilities of a prompt if the client wants them.
    pub(in crate::api) fn prompt_logprobs(&self, scores: &[ScoredToken]) -> Option<PromptLogprobs> {
        let count = self.prompt_alternatives?;
        Some(PromptLogprobs::new(scores, count as usize, &self.tokenizer))
    }

    /// Returns the token counts up to the last output that `next` returned.
    pub(in crate::api) fn usage(&self) -> Usage {
        let completion_tokens = self.completion_tokens.iter().sum();
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens,
            total_tokens: self.prompt_tokens + completion_tokens,
            prompt_tokens_details: (self.cached_tokens.iter().copied().sum::<Option<u32>>())
                .map(|cached_tokens| PromptDetails { cached_tokens }),
        }
    }

    /// Waits until the engine has accepted every choice. Called before `next`.
    ///
    /// The caller may drop the future early; `next` then waits instead.
    ///
    /// # Errors
    /// If the engine rejects one of the choices.
    pub(in crate::api) async fn accepted(&mut self) -> Result<(), ApiError> {
        for (_, generation) in &mut self.running {
            if let Err(error) = generation.accepted().await {
                return Err(self.fail(error));
            }
        }
        Ok(())
    }

    /// Waits for the next output of any choice and returns it with the choice's index.
    ///
    /// If several choices have output, they take turns. The caller may drop the future early and
    /// call again, but must not call after all choices have ended.
    ///
    /// # Errors
    /// As `ChoiceGeneration::next`. All choices have then ended.
    pub(in crate::api) async fn next(&mut self) -> Result<(u32, ChoiceOutput), ApiError> {
        let running = self.running.iter_mut();
        let nexts = running.map(|(_, generation)| Box::pin(generation.next()));
        let (output, at, _) = select_all(nexts).await;
        let (index, generation) = self.running.remove(at);
        let output = output.map_err(|error| self.fail(error))?;
        match &output {
            ChoiceOutput::Piece(piece) => {
                self.completion_tokens[index as usize] = piece.completion_tokens;
                self.running.push((index, generation));
            }
            ChoiceOutput::End(end) => {
                self.completion_tokens[index as usize] = end.completion_tokens;
                if index % self.choices_per_prompt == 0 {
                    let prompt = index / self.choices_per_prompt;
                    self.cached_tokens[prompt as usize] = Some(end.cached_tokens);
                }
            }
        }
        Ok((index, output))
    }

    /// Cancels all running choices and returns `error`.
    fn fail(&mut self, error: ApiError) -> ApiError {
        self.log.fail(error.code());
        for (_, generation) in self.running.drain(..) {
            generation.cancel();
        }
        error
    }
}
