//! One choice: receives its tokens from the engine and turns them into pieces of text and one end.
//!
//! Invariant: streamed and whole responses get the same text, because both are made here, token by
//! token.
//!
//! Invariant: the text contains neither the stop token nor the stop string, unless the client asks
//! for them.
//!
//! Invariant: reasoning and the text after it are the parts of one text. Stop strings are searched
//! for in all of it, tags included.
//!
//! Invariant: a token's log-probability comes with the piece that holds the start of its text.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::app::Serving;
use super::authentication::Caller;
use super::error::ApiError;
use super::logprobs::TokenLogprob;
use super::parsed_request::{ParsedRequest, ReasoningField};
use crate::engine::{
    EventStream, FinishReason, GenerationRequest, StreamEvent, TokenId, TokenOutput,
};
use crate::text::{Detokenizer, ReasoningSplitter, SplitText, TextOptions};

/// A part of a choice's output.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub(super) text: String,
    /// The reasoning before the text, if the model reasons.
    pub(super) reasoning: String,
    /// Empty unless the client wants log-probabilities.
    pub(super) logprobs: Vec<TokenLogprob>,
    /// The tokens since the previous piece, including a stop token.
    pub(super) tokens: Vec<TokenId>,
    /// The number of tokens so far.
    pub(super) completion_tokens: u32,
}

impl Piece {
    /// Appends the piece that follows this one.
    pub(super) fn extend(&mut self, next: Piece) {
        self.text += &next.text;
        self.reasoning += &next.reasoning;
        self.logprobs.extend(next.logprobs);
        self.tokens.extend(next.tokens);
        self.completion_tokens = next.completion_tokens;
    }
}

/// How a choice ended, and its token counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChoiceEnd {
    pub(super) finish_reason: &'static str,
    /// The prompt tokens that came from the prefix cache.
    pub(super) cached_tokens: u32,
    pub(super) completion_tokens: u32,
}

/// The next output of a choice.
pub(super) enum ChoiceOutput {
    Piece(Piece),
    End(ChoiceEnd),
}

/// A choice that the engine is generating. Dropping it cancels it, as a client that leaves does.
pub(super) struct ChoiceGeneration {
    events: EventStream,
    caller: Caller,
    detokenizer: Detokenizer,
    reasoning: Option<ReasoningSplitter>,
    wants_reasoning: bool,
    stop_tokens: Vec<TokenId>,
    include_stop: bool,
    wants_tokens: bool,
    completion_tokens: u32,
    pending_logprobs: VecDeque<TokenLogprob>, // The detokenizer still holds their text back.
    pending_tokens: Vec<TokenId>,             // The tokens since the last piece.
    stopped: bool,                            // A stop string has ended the text.
    end: Option<ChoiceEnd>,                   // `next` returns it after the last piece.
}

impl ChoiceGeneration {
    /// Submits `request` to the engine, with all its choices.
    ///
    /// # Errors
    /// If the engine rejects the request at once.
    pub(super) fn start_all(
        serving: &Serving,
        request: ParsedRequest,
        caller: &Caller,
        arrived: Instant,
    ) -> Result<Vec<ChoiceGeneration>, ApiError> {
        let params = request.params;
        let submitted = GenerationRequest {
            prompt: request.prompt,
            sampling: params.sampling,
            max_new_tokens: request.max_new_tokens,
            min_new_tokens: params.min_tokens,
            stop_tokens: params.stop_tokens.clone(),
            tenant: caller.tenant.number,
            arrived,
            first_token_within: caller.tenant.deadlines.first_token,
            ends_within: caller.tenant.deadlines.total,
        };
        let options = TextOptions {
            stop: params.stop,
            include_stop: params.include_stop,
            skip_special_tokens: params.skip_special_tokens,
            min_tokens: params.min_tokens,
        };
        let reasoning = request.reasoning;
        let splitter = |field: ReasoningField| ReasoningSplitter::new(field.tags, field.is_opened);
        let streams = serving.engine.submit_choices(submitted, params.n)?;
        let generations = streams.into_iter().map(|events| ChoiceGeneration {
            events,
            caller: caller.clone(),
            detokenizer: Detokenizer::new(Arc::clone(&serving.tokenizer), options.clone()),
            reasoning: reasoning.map(splitter),
            wants_reasoning: reasoning.is_some_and(|field| field.is_wanted),
            stop_tokens: params.stop_tokens.clone(),
            include_stop: params.include_stop,
            wants_tokens: params.return_token_ids,
            completion_tokens: 0,
            pending_logprobs: VecDeque::new(),
            pending_tokens: Vec::new(),
            stopped: false,
            end: None,
        });
        Ok(generations.collect())
    }

    /// Ends the generation early while the client is still connected.
    pub(super) fn cancel(mut self) {
        self.events.finish(FinishReason::Cancelled);
    }

    /// Waits until the engine has accepted the request.
    ///
    /// The caller may drop the future early; `next` then waits instead.
    ///
    /// # Errors
    /// If the engine rejects the request.
    pub(super) async fn accepted(&mut self) -> Result<(), ApiError> {
        match self.event().await {
            Some(StreamEvent::Accepted) => Ok(()),
            Some(StreamEvent::Refused(refusal)) => Err(refusal.into()),
            other => Err(ApiError::internal(&format!(
                "the engine's first event was {other:?}"
            ))),
        }
    }

    /// Waits for the next piece or the end. Must not be called after the end.
    ///
    /// The caller may drop the future early and call again.
    ///
    /// # Errors
    /// If the engine rejects or fails the request, or shuts down. The generation has then ended.
    pub(super) async fn next(&mut self) -> Result<ChoiceOutput, ApiError> {
        if let Some(end) = self.end.take() {
            return Ok(ChoiceOutput::End(end));
        }
        loop {
            match self.event().await {
                Some(StreamEvent::Accepted) => {}
                Some(StreamEvent::Token(output)) => {
                    if let Some(piece) = self.push(output) {
                        return Ok(ChoiceOutput::Piece(piece));
                    }
                }
                Some(StreamEvent::Finished {
                    reason,
                    cached_tokens,
                    completion_tokens,
                    ..
                }) => {
                    let end = ChoiceEnd {
                        finish_reason: finish_reason(reason)?,
                        cached_tokens,
                        completion_tokens,
                    };
                    return Ok(self.finish(end));
                }
                Some(StreamEvent::Refused(refusal)) => return Err(refusal.into()),
                Some(StreamEvent::Failed(why)) => return Err(ApiError::internal(&why)),
                None => {
                    let why = "the engine closed a stream without a final event";
                    return Err(ApiError::internal(why));
                }
            }
        }
    }

    async fn event(&mut self) -> Option<StreamEvent> {
        let event = self.events.recv().await;
        if let Some(rates) = self.events.rates() {
            self.caller.set_rates(rates);
        }
        event
    }

    /// Adds a token. Returns a piece if the token releases text or log-probabilities.
    fn push(&mut self, output: TokenOutput) -> Option<Piece> {
        let token = output.token;
        self.completion_tokens += 1;
        self.pending_tokens.push(token);
        if self.stop_tokens.contains(&token) && !self.include_stop {
            return None;
        }
        let start = self.detokenizer.decoded_chars();
        if let Some(logprob) = output.logprob {
            self.pending_logprobs.push_back(TokenLogprob {
                start,
                token,
                logprob,
                top: output.top,
            });
        }
        let delta = self.detokenizer.push(token);
        if delta.stopped {
            self.stopped = true;
            self.events.finish(FinishReason::Stop);
        }
        let end = self.detokenizer.decoded_chars();
        if let Some(splitter) = &mut self.reasoning {
            splitter.token(token, start..end);
        }
        let SplitText { reasoning, answer } = self.split(&delta.text, delta.stopped);
        let held = self
            .reasoning
            .as_ref()
            .map_or(0, |splitter| splitter.held_chars());
        let released = self.detokenizer.released_chars() - held;
        let ready = self
            .pending_logprobs
            .iter()
            .take_while(|entry| entry.start < released)
            .count();
        if answer.is_empty() && reasoning.is_empty() && ready == 0 {
            return None;
        }
        Some(Piece {
            text: answer,
            reasoning,
            logprobs: self.pending_logprobs.drain(..ready).collect(),
            tokens: std::mem::take(&mut self.pending_tokens),
            completion_tokens: self.completion_tokens,
        })
    }

    /// Splits the next part of the text, which may be the last. Reasoning that the client does not
    /// want is dropped.
    fn split(&mut self, text: &str, is_last: bool) -> SplitText {
        let Some(splitter) = &mut self.reasoning else {
            return SplitText {
                answer: text.to_owned(),
                ..SplitText::default()
            };
        };
        let mut split = splitter.push(text);
        if is_last {
            let rest = splitter.finish();
            split.reasoning += &rest.reasoning;
            split.answer += &rest.answer;
        }
        if !self.wants_reasoning {
            split.reasoning.clear();
        }
        split
    }

    /// Ends the generation. Returns the last piece if something is left for it, otherwise the end.
    fn finish(&mut self, mut end: ChoiceEnd) -> ChoiceOutput {
        let mut piece = Piece {
            completion_tokens: self.completion_tokens,
            tokens: std::mem::take(&mut self.pending_tokens),
            ..Piece::default()
        };
        if !self.stopped {
            let delta = self.detokenizer.finish();
            let SplitText { reasoning, answer } = self.split(&delta.text, true);
            (piece.text, piece.reasoning) = (answer, reasoning);
            if delta.stopped {
                end.finish_reason = "stop";
            }
            // No text follows, so the log-probabilities of tokens without text are due now.
            piece.logprobs = self.pending_logprobs.drain(..).collect();
        }
        let has_tokens = self.wants_tokens && !piece.tokens.is_empty();
        let has_text = !piece.text.is_empty() || !piece.reasoning.is_empty();
        if !has_text && piece.logprobs.is_empty() && !has_tokens {
            return ChoiceOutput::End(end);
        }
        self.end = Some(end);
        ChoiceOutput::Piece(piece)
    }
}

/// Returns the `finish_reason` for the client.
///
/// # Errors
/// If the generation ended without an answer.
fn finish_reason(reason: FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Shutdown => Err(ApiError::draining()),
        FinishReason::Cancelled => Err(ApiError::internal(
            "the engine cancelled a request whose client was still connected",
        )),
        FinishReason::Deadline => Err(ApiError::too_slow()),
        FinishReason::Error => Err(ApiError::internal("the engine failed a request")),
    }
}
