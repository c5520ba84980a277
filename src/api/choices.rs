//! The choices of one request: `n` independent generations of one prompt.
//!
//! Invariant: all choices succeed or fail together. The engine accepts, rejects or displaces all of
//! them. If it fails one choice, the server cancels the others.
//!
//! Invariant: choice `i` draws with the request's seed plus `i`, wrapping. So choice 0 is the
//! answer of a request with `n` = 1, and a client can repeat each choice alone.
//!
//! Invariant: the usage counts the prompt once.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::select_all;
use serde::Serialize;

use super::app::Serving;
use super::authentication::Caller;
use super::error::ApiError;
use super::generation::{ChoiceGeneration, ChoiceOutput, Piece};
use super::logprobs::TokenLogprob;
use super::parsed_request::ParsedRequest;
use crate::engine::TokenId;
use crate::text::Tokenizer;

/// The token counts of all choices together.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

/// The complete output of one choice.
#[derive(Default)]
pub(super) struct FinishedChoice {
    pub(super) output: Piece,
    /// `None` until the choice has ended.
    pub(super) finish_reason: Option<&'static str>,
}

/// The running choices of a request. Dropping them cancels them.
pub(super) struct Choices {
    running: Vec<(u32, ChoiceGeneration)>, // Ordered by their last output, the oldest first.
    tokenizer: Arc<Tokenizer>,
    prompt: Option<Vec<TokenId>>, // Kept only if the client wants token ids.
    wants_logprobs: bool,
    prompt_tokens: u32,
    /// The cached tokens of choice 0, known when it has ended. What the other choices found in the
    /// cache may be the work of choice 0.
    cached_tokens: Option<u32>,
    completion_tokens: Vec<u32>, // By choice.
}

impl Choices {
    /// Submits `request` with all its choices.
    ///
    /// # Errors
    /// If the engine rejects the request at once.
    pub(super) fn start(
        serving: &Serving,
        request: ParsedRequest,
        caller: &Caller,
        arrived: Instant,
    ) -> Result<Choices, ApiError> {
        let params = &request.params;
        let count = params.n;
        let mut choices = Choices {
            running: Vec::with_capacity(count as usize),
            tokenizer: Arc::clone(&serving.tokenizer),
            prompt: params.return_token_ids.then(|| request.prompt.clone()),
            wants_logprobs: params.sampling.logprobs.is_some(),
            prompt_tokens: request.prompt.len() as u32,
            cached_tokens: None,
            completion_tokens: vec![0; count as usize],
        };
        let generations = ChoiceGeneration::start_all(serving, request, caller, arrived)?;
        choices.running.extend((0..).zip(generations));
        Ok(choices)
    }

    /// Returns the number of choices, running and ended.
    pub(super) fn count(&self) -> u32 {
        self.completion_tokens.len() as u32
    }

    /// Returns whether all choices have ended.
    pub(super) fn all_ended(&self) -> bool {
        self.running.is_empty()
    }

    /// Returns the tokens of the prompt if the client wants token ids.
    pub(super) fn prompt(&self) -> Option<&[TokenId]> {
        self.prompt.as_deref()
    }

    /// Returns whether the client wants token ids.
    pub(super) fn wants_token_ids(&self) -> bool {
        self.prompt.is_some()
    }

    /// Writes log-probabilities with `write` if the client wants them.
    pub(super) fn logprobs<T>(
        &self,
        logprobs: &[TokenLogprob],
        write: fn(&[TokenLogprob], &Tokenizer) -> T,
    ) -> Option<T> {
        self.wants_logprobs
            .then(|| write(logprobs, &self.tokenizer))
    }

    /// Returns the token counts up to the last output that `next` returned.
    pub(super) fn usage(&self) -> Usage {
        let completion_tokens = self.completion_tokens.iter().sum();
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens,
            total_tokens: self.prompt_tokens + completion_tokens,
            prompt_tokens_details: self
                .cached_tokens
                .map(|cached_tokens| PromptDetails { cached_tokens }),
        }
    }

    /// Waits until the engine has accepted every choice. Called before `next`.
    ///
    /// The caller may drop the future early; `next` then waits instead.
    ///
    /// # Errors
    /// If the engine rejects one of the choices.
    pub(super) async fn accepted(&mut self) -> Result<(), ApiError> {
        for (_, generation) in &mut self.running {
            if let Err(error) = generation.accepted().await {
                return Err(self.fail(error));
            }
        }
        Ok(())
    }

    /// Waits until all choices have ended and returns them, ordered by index.
    ///
    /// # Errors
    /// As `next`.
    pub(super) async fn finished(&mut self) -> Result<Vec<FinishedChoice>, ApiError> {
        let mut finished = Vec::new();
        finished.resize_with(self.completion_tokens.len(), FinishedChoice::default);
        while !self.all_ended() {
            let (index, output) = self.next().await?;
            let choice = &mut finished[index as usize];
            match output {
                ChoiceOutput::Piece(piece) => choice.output.extend(piece),
                ChoiceOutput::End(end) => choice.finish_reason = Some(end.finish_reason),
            }
        }
        Ok(finished)
    }

    /// Waits for the next output of any choice and returns it with the choice's index.
    ///
    /// If several choices have output, they take turns. The caller may drop the future early and
    /// call again, but must not call after all choices have ended.
    ///
    /// # Errors
    /// As `ChoiceGeneration::next`. All choices have then ended.
    pub(super) async fn next(&mut self) -> Result<(u32, ChoiceOutput), ApiError> {
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
                if index == 0 {
                    self.cached_tokens = Some(end.cached_tokens);
                }
            }
        }
        Ok((index, output))
    }

    /// Cancels all running choices and returns `error`.
    fn fail(&mut self, error: ApiError) -> ApiError {
        for (_, generation) in self.running.drain(..) {
            generation.cancel();
        }
        error
    }
}
