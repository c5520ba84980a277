//! The answers to one request: `n` independent generations of one prompt, each piece with the index of its choice.
//!
//! Invariants: they stand or fall together, so when one is refused or fails the others are cancelled; choice `i` draws with the
//! request's seed plus `i`, wrapping, so choice 0 is the answer of `n` = 1 and each can be had alone; the prompt counts once.

use std::iter::repeat_n;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::select_all;
use serde::Serialize;

use super::Serving;
use super::authentication::Caller;
use super::error::ApiError;
use super::generation::{ChoiceGeneration, ChoiceOutput, ParsedRequest, Piece};
use crate::engine::TokenId;
use crate::text::Tokenizer;

/// What all choices took, so far or altogether.
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

/// All of one choice.
#[derive(Default)]
pub(super) struct FinishedChoice {
    pub(super) answer: Piece,
    /// None until it has ended.
    pub(super) finish_reason: Option<&'static str>,
}

/// The running choices of a request. Dropping them cancels them.
pub(super) struct Choices {
    running: Vec<(u32, ChoiceGeneration)>, // Whoever spoke last stands last.
    tokenizer: Arc<Tokenizer>,
    prompt: Option<Vec<TokenId>>, // Kept only for those who want it back.
    prompt_tokens: u32,
    cached_tokens: Option<u32>, // Of choice 0, once it has ended: what the others found may be its own work.
    completion_tokens: Vec<u32>, // Of each choice, so far.
}

impl Choices {
    /// Submits `call` once for each choice.
    ///
    /// # Errors
    /// When the engine refuses one of them at once.
    pub(super) fn start(
        serving: &Serving,
        call: ParsedRequest,
        caller: Caller,
        arrived: Instant,
    ) -> Result<Choices, ApiError> {
        let count = call.params.n;
        let mut choices = Choices {
            running: Vec::with_capacity(count as usize),
            tokenizer: Arc::clone(&serving.tokenizer),
            prompt: call.params.return_token_ids.then(|| call.prompt.clone()),
            prompt_tokens: call.prompt.len() as u32,
            cached_tokens: None,
            completion_tokens: vec![0; count as usize],
        };
        for (index, mut call) in (0..count).zip(repeat_n(call, count as usize)) {
            call.is_another_choice = index > 0;
            let sampling = &mut call.params.sampling;
            sampling.seed = sampling.seed.wrapping_add(u64::from(index));
            match ChoiceGeneration::start(serving, call, caller.clone(), arrived) {
                Ok(generation) => choices.running.push((index, generation)),
                Err(error) => return Err(choices.fail(error)),
            }
        }
        Ok(choices)
    }

    /// How many there are, ended ones included.
    pub(super) fn count(&self) -> u32 {
        self.completion_tokens.len() as u32
    }

    /// All of them have ended.
    pub(super) fn over(&self) -> bool {
        self.running.is_empty()
    }

    /// The tokenizer that spells their tokens.
    pub(super) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The prompt's tokens, if token ids were asked for.
    pub(super) fn prompt(&self) -> Option<&[TokenId]> {
        self.prompt.as_deref()
    }

    /// What they have taken, up to the last thing that `next` told.
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

    /// Waits until the engine has taken every choice. Comes before `next`, and may be given up and left to it.
    ///
    /// # Errors
    /// When the engine refuses one.
    pub(super) async fn accepted(&mut self) -> Result<(), ApiError> {
        for (_, generation) in &mut self.running {
            if let Err(error) = generation.accepted().await {
                return Err(self.fail(error));
            }
        }
        Ok(())
    }

    /// Every choice at its index, once all have ended.
    ///
    /// # Errors
    /// As `next`.
    pub(super) async fn whole(&mut self) -> Result<Vec<FinishedChoice>, ApiError> {
        let mut wholes = Vec::new();
        wholes.resize_with(self.completion_tokens.len(), FinishedChoice::default);
        while !self.over() {
            let (index, output) = self.next().await?;
            let whole = &mut wholes[index as usize];
            match output {
                ChoiceOutput::Piece(piece) => whole.answer.extend(piece),
                ChoiceOutput::End(ending) => whole.finish_reason = Some(ending.finish_reason),
            }
        }
        Ok(wholes)
    }

    /// The next piece or end of any choice, with its index; in turn, when several have one. Not called once all are over. May be
    /// given up and called again.
    ///
    /// # Errors
    /// As `ChoiceGeneration::next`. All are over then.
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
            ChoiceOutput::End(ending) => {
                self.completion_tokens[index as usize] = ending.completion_tokens;
                if index == 0 {
                    self.cached_tokens = Some(ending.cached_tokens);
                }
            }
        }
        Ok((index, output))
    }

    /// Cancels what still runs, because of `error`.
    fn fail(&mut self, error: ApiError) -> ApiError {
        for (_, generation) in self.running.drain(..) {
            generation.cancel();
        }
        error
    }
}
