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

use serde::Serialize;
use utoipa::ToSchema;

use super::answer_parts::{AnswerParts, AnswerSplitter};
use super::logprobs::TokenLogprob;
use super::prompt_logprobs::PromptPart;
use super::request::ParsedRequest;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::middleware::authentication::Caller;
use crate::engine::{
    EventStream, FinishReason, GenerationRequest, RequestEnder, ScoredToken, StreamEvent, TokenId,
    TokenOutput,
};
use crate::text::{Detokenizer, TextOptions};
use crate::tools::CallDelta;

/// A part of a choice's output.
#[derive(Debug, Default)]
pub(in crate::api) struct Piece {
    pub(in crate::api) text: String,
    /// The reasoning before the text, if the model reasons.
    pub(in crate::api) reasoning: String,
    /// The calls of tools after the text.
    pub(in crate::api) calls: Vec<CallDelta>,
    /// Empty unless the client wants log-probabilities.
    pub(in crate::api) logprobs: Vec<TokenLogprob>,
    /// The tokens since the previous piece, including a stop token.
    pub(in crate::api) tokens: Vec<TokenId>,
    /// The scores of the prompt, in the first piece, if they are wanted.
    pub(in crate::api) scores: Vec<ScoredToken>,
    /// The number of tokens so far.
    pub(in crate::api) completion_tokens: u32,
}

impl Piece {
    /// Appends the piece that follows this one.
    pub(in crate::api) fn extend(&mut self, next: Piece) {
        self.text += &next.text;
        self.reasoning += &next.reasoning;
        self.calls.extend(next.calls);
        self.logprobs.extend(next.logprobs);
        self.tokens.extend(next.tokens);
        self.scores.extend(next.scores);
        self.completion_tokens = next.completion_tokens;
    }
}

/// Why a choice ended: `stop` after a stop token or stop string, `length` at the maximum output
/// length or the end of the context, `tool_calls` after a call of a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FinishReason)]
pub(in crate::api) enum AnswerEnd {
    Stop,
    Length,
    ToolCalls,
}

impl AnswerEnd {
    /// Returns its name, as in the JSON of answers.
    fn name(self) -> &'static str {
        match self {
            AnswerEnd::Stop => "stop",
            AnswerEnd::Length => "length",
            AnswerEnd::ToolCalls => "tool_calls",
        }
    }
}

/// What a text stopped at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) enum Stopper {
    /// A stop token.
    Token(TokenId),
    /// A stop string.
    Text(String),
}

/// How a choice ended, and its token counts. Each endpoint translates it, and decides nothing.
#[derive(Clone, Debug)]
pub(in crate::api) struct ChoiceEnd {
    pub(in crate::api) finish_reason: AnswerEnd,
    /// What the text stopped at. A stop string can end it at the maximum output length too.
    pub(in crate::api) stopped_at: Option<Stopper>,
    /// The prompt tokens that came from the prefix cache.
    pub(in crate::api) cached_tokens: u32,
    pub(in crate::api) completion_tokens: u32,
}

/// The next output of a choice.
pub(in crate::api) enum ChoiceOutput {
    Piece(Piece),
    End(ChoiceEnd),
}

/// A choice that the engine is generating. Dropping it cancels it, as a client that leaves does.
pub(super) struct ChoiceGeneration {
    events: EventStream,
    caller: Caller,
    detokenizer: Detokenizer,
    splitter: AnswerSplitter,
    stop_tokens: Vec<TokenId>,
    include_stop: bool,
    wants_tokens: bool,
    prompt: PromptPart,
    is_prompt_only: bool, // The answer has no output.
    is_first: bool,       // Of the choices of its prompt.
    completion_tokens: u32,
    pending_logprobs: VecDeque<TokenLogprob>, // The detokenizer still holds their text back.
    pending_tokens: Vec<TokenId>,             // The tokens since the last piece.
    stopped_at: Option<Stopper>,
    end: Option<ChoiceEnd>,      // `next` returns it after the last piece.
    ended: Option<&'static str>, // Why it ended, for the log.
}

impl ChoiceGeneration {
    /// Submits `request` to the engine: each prompt with all its choices.
    ///
    /// # Errors
    /// If the engine rejects the request at once.
    pub(super) fn start_all(
        serving: &Serving,
        request: ParsedRequest,
        caller: &Caller,
        arrived: Instant,
    ) -> Result<Vec<ChoiceGeneration>, ApiError> {
        let (prompts, params, shape) = (&request.prompts, &request.params, &request.params.shape);
        let parser = shape.calls.as_ref();
        let spelled = parser.map_or_else(Vec::new, |parser| parser.tag_tokens().to_vec());
        let is_prompt_only = params.is_prompt_only();
        let options = TextOptions {
            stop: shape.stop.clone(),
            include_stop: shape.include_stop,
            skip_special_tokens: shape.skip_special_tokens,
            min_tokens: params.min_tokens,
        };
        let submitted = prompts.iter().map(|prompt| GenerationRequest {
            prompt: prompt.tokens.clone(),
            sampling: params.sampling.clone(),
            max_new_tokens: prompt.max_new_tokens,
            is_length_given: params.max_tokens.is_some(),
            min_new_tokens: params.min_tokens,
            stop_tokens: params.stop_tokens.clone(),
            tenant: caller.tenant.number,
            sub_tenant: caller.precedence.sub_tenant,
            band: caller.precedence.band,
            arrived,
            first_token_within: caller.tenant.deadlines.first_token,
            ends_within: caller.tenant.deadlines.total,
        });
        let streams = serving
            .engine
            .submit_prompts(submitted.collect(), params.n)?;
        let of_prompt = params.n as usize;
        let generations = streams.into_iter().enumerate().map(|(index, events)| {
            let prompt = &prompts[index / of_prompt];
            ChoiceGeneration {
                events,
                caller: caller.clone(),
                detokenizer: Detokenizer::new(Arc::clone(&serving.tokenizer), options.clone())
                    .spelling(spelled.clone()),
                splitter: AnswerSplitter::new(shape),
                stop_tokens: params.stop_tokens.clone(),
                include_stop: shape.include_stop,
                wants_tokens: shape.has_token_ids,
                prompt: PromptPart::new(
                    prompt.echo.clone(),
                    shape.prompt_logprobs.is_some(),
                    params.sampling.logprobs.is_some(),
                ),
                is_prompt_only,
                is_first: index % of_prompt == 0,
                completion_tokens: 0,
                pending_logprobs: VecDeque::new(),
                pending_tokens: Vec::new(),
                stopped_at: None,
                end: None,
                ended: None,
            }
        });
        Ok(generations.collect())
    }

    /// Ends the generation early while the client is still connected.
    pub(in crate::api) fn cancel(mut self) {
        self.events.finish(FinishReason::Cancelled);
    }

    /// Returns a handle that can end the generation while it is elsewhere.
    pub(in crate::api) fn ender(&self) -> RequestEnder {
        self.events.ender()
    }

    /// Waits until the engine has accepted the request.
    ///
    /// The caller may drop the future early; `next` then waits instead.
    ///
    /// # Errors
    /// If the engine rejects the request.
    pub(in crate::api) async fn accepted(&mut self) -> Result<(), ApiError> {
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
    pub(in crate::api) async fn next(&mut self) -> Result<ChoiceOutput, ApiError> {
        if let Some(end) = self.end.take() {
            return Ok(ChoiceOutput::End(end));
        }
        loop {
            match self.event().await {
                Some(StreamEvent::Accepted) => {}
                Some(StreamEvent::Scored(score)) => self.prompt.push(score),
                Some(StreamEvent::Token(output)) => {
                    let of_prompt = self.of_prompt();
                    let of_token = if self.is_prompt_only {
                        None
                    } else {
                        self.push(output)
                    };
                    if let Some(piece) = joined(of_prompt, of_token) {
                        return Ok(ChoiceOutput::Piece(piece));
                    }
                }
                Some(StreamEvent::Finished {
                    reason,
                    cached_tokens,
                    completion_tokens,
                    ..
                }) => {
                    let (finish_reason, completion_tokens) = match finish_reason(reason)? {
                        _ if self.is_prompt_only => (AnswerEnd::Length, 0),
                        finish_reason => (finish_reason, completion_tokens),
                    };
                    return Ok(self.finish(ChoiceEnd {
                        finish_reason,
                        stopped_at: None,
                        cached_tokens,
                        completion_tokens,
                    }));
                }
                Some(StreamEvent::Embedding(_)) => {
                    let why = "a request for text got an embedding";
                    return Err(ApiError::internal(why));
                }
                Some(StreamEvent::Refused(refusal)) => return Err(refusal.into()),
                Some(StreamEvent::DeadEnd(why)) => return Err(ApiError::dead_end(&why)),
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
        let start = self.detokenizer.decoded_chars();
        let is_stop = self.stop_tokens.contains(&token);
        if is_stop {
            self.stopped_at.get_or_insert(Stopper::Token(token));
        }
        let is_hidden = is_stop && !self.include_stop;
        if is_hidden && !self.prompt.echoes_logprobs() {
            return None;
        }
        if let Some(logprob) = output.logprob {
            self.pending_logprobs.push_back(TokenLogprob {
                start,
                token,
                logprob: Some(logprob),
                top: output.top,
            });
        }
        if is_hidden {
            return None;
        }
        let delta = self.detokenizer.push(token);
        if delta.stopped {
            let stop = self.stop_string();
            self.stopped_at = self.stopped_at.take().or(stop);
            self.events.finish(FinishReason::Stop);
        }
        let end = self.detokenizer.decoded_chars();
        self.splitter.token(token, start..end);
        let parts = self.splitter.push(&delta.text, delta.stopped);
        let released = self.detokenizer.released_chars() - self.splitter.held_chars();
        let ready = self
            .pending_logprobs
            .iter()
            .take_while(|entry| entry.start < released)
            .count();
        if parts.is_empty() && ready == 0 {
            return None;
        }
        let AnswerParts {
            reasoning,
            text,
            calls,
        } = parts;
        Some(Piece {
            text,
            reasoning,
            calls,
            logprobs: self.take_logprobs(ready),
            tokens: std::mem::take(&mut self.pending_tokens),
            scores: Vec::new(),
            completion_tokens: self.completion_tokens,
        })
    }

    /// Returns the stop string that has ended the text.
    fn stop_string(&self) -> Option<Stopper> {
        (self.detokenizer.stop()).map(|stop| Stopper::Text(stop.to_owned()))
    }

    /// Takes the first pending log-probabilities.
    fn take_logprobs(&mut self, count: usize) -> Vec<TokenLogprob> {
        let text_start = self.prompt.chars();
        let taken = self.pending_logprobs.drain(..count);
        let moved = taken.map(|entry| TokenLogprob {
            start: entry.start + text_start,
            ..entry
        });
        moved.collect()
    }

    /// Returns what the first piece says about the prompt, and nothing later.
    fn of_prompt(&mut self) -> Option<Piece> {
        let prompt = self.prompt.take()?;
        Some(Piece {
            text: prompt.text,
            logprobs: prompt.logprobs,
            scores: prompt.scores,
            completion_tokens: self.completion_tokens,
            ..Piece::default()
        })
    }

    /// Ends the generation. Returns the last piece if something is left for it, otherwise the end.
    fn finish(&mut self, mut end: ChoiceEnd) -> ChoiceOutput {
        let mut piece = Piece {
            completion_tokens: self.completion_tokens,
            tokens: std::mem::take(&mut self.pending_tokens),
            ..Piece::default()
        };
        if self.detokenizer.stop().is_none() {
            let delta = self.detokenizer.finish();
            let parts = self.splitter.push(&delta.text, true);
            (piece.text, piece.reasoning) = (parts.text, parts.reasoning);
            piece.calls = parts.calls;
            if delta.stopped {
                end.finish_reason = AnswerEnd::Stop;
                self.stopped_at = self.stop_string();
            }
            // No text follows, so the log-probabilities of tokens without text are due now.
            piece.logprobs = self.take_logprobs(self.pending_logprobs.len());
        }
        end.stopped_at = self.stopped_at.take();
        if end.finish_reason == AnswerEnd::Stop && self.splitter.has_calls() {
            end.finish_reason = AnswerEnd::ToolCalls;
        }
        self.ended = Some(end.finish_reason.name());
        let has_tokens = self.wants_tokens && !piece.tokens.is_empty();
        let has_text = !piece.text.is_empty() || !piece.reasoning.is_empty();
        let has_text = has_text || !piece.calls.is_empty();
        if !has_text && piece.logprobs.is_empty() && !has_tokens {
            return ChoiceOutput::End(end);
        }
        self.end = Some(end);
        ChoiceOutput::Piece(piece)
    }
}

impl Drop for ChoiceGeneration {
    fn drop(&mut self) {
        let (log, account) = (&self.caller.log, self.events.account());
        if self.is_first {
            log.add_prompt(&account);
        }
        log.add_output(&account, self.completion_tokens, self.ended);
    }
}

/// Joins two pieces, either of which may be missing.
fn joined(first: Option<Piece>, second: Option<Piece>) -> Option<Piece> {
    match (first, second) {
        (Some(mut first), Some(second)) => {
            first.extend(second);
            Some(first)
        }
        (first, second) => first.or(second),
    }
}

/// Returns the `finish_reason` for the client.
///
/// # Errors
/// If the generation ended without an answer.
pub(in crate::api) fn finish_reason(reason: FinishReason) -> Result<AnswerEnd, ApiError> {
    match reason {
        FinishReason::Stop => Ok(AnswerEnd::Stop),
        FinishReason::Length => Ok(AnswerEnd::Length),
        FinishReason::Shutdown => Err(ApiError::draining()),
        FinishReason::Cancelled => Err(ApiError::aborted()), // Its client is still there.
        FinishReason::Deadline => Err(ApiError::too_slow()),
        FinishReason::Error => Err(ApiError::internal("the engine failed a request")),
    }
}
