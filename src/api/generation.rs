//! One choice on its way through the engine: tokens in, pieces of text out, and one end.
//!
//! Invariants: streamed or not, the text is made here, token by token, so both are the same; the stop token and the stop string are
//! no text unless asked for; a log-probability comes with the piece that holds the beginning of its token's text.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::authentication::Caller;
use super::error::ApiError;
use super::params::Params;
use super::{ModelCard, Serving};
use crate::engine::{
    EventStream, FinishReason, GenerationRequest, SamplingParams, StreamEvent, TokenId, TokenOutput,
};
use crate::text::{Detokenizer, TextOptions, Tokenizer};

/// A request that has been understood.
#[derive(Clone)]
pub(super) struct ParsedRequest {
    pub(super) prompt: Vec<TokenId>,
    pub(super) max_new_tokens: u32,
    pub(super) params: Params,
    /// It shares its request with a choice that was submitted before.
    pub(super) is_another_choice: bool,
}

impl ParsedRequest {
    /// Settles how long the answer may be. `default` is the endpoint's own limit, if it has one; `param` holds the prompt.
    ///
    /// # Errors
    /// When the model's context is too short for what was asked.
    pub(super) fn new(
        prompt: Vec<TokenId>,
        params: Params,
        model: &ModelCard,
        default: Option<u32>,
        param: &str,
    ) -> Result<ParsedRequest, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::invalid_value(param, "The prompt has no tokens."));
        }
        let limit = model.max_model_len;
        let left = limit.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        let too_long = |asked: String| {
            let message = format!(
                "This model's maximum context length is {limit} tokens. However, you requested {asked}. Please reduce the \
                 length of the prompt or of the answer."
            );
            Err(ApiError::context_length(param, message))
        };
        match params.max_tokens {
            _ if left == 0 => too_long(format!("{} tokens in the prompt", prompt.len())),
            Some(most) if most > left => too_long(format!(
                "{} tokens ({} in the prompt, {most} in the answer)",
                prompt.len() + most as usize,
                prompt.len()
            )),
            asked => {
                let max_new_tokens =
                    asked.unwrap_or_else(|| default.map_or(left, |default| left.min(default)));
                if params.min_tokens > max_new_tokens {
                    let message = format!(
                        "'min_tokens' is more than the {max_new_tokens} tokens the answer may have."
                    );
                    return Err(ApiError::invalid_value("min_tokens", message));
                }
                Ok(ParsedRequest {
                    prompt,
                    max_new_tokens,
                    params,
                    is_another_choice: false,
                })
            }
        }
    }
}

/// A text that can't fit, however it is cut into tokens, is not worth tokenising.
///
/// # Errors
/// When `bytes` bytes of text are too many.
pub(super) fn check_length(bytes: usize, serving: &Serving, param: &str) -> Result<(), ApiError> {
    let limit = serving.model.max_model_len;
    let least_tokens = bytes / serving.tokenizer.longest_token();
    if least_tokens <= limit as usize {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, the prompt has {bytes} bytes, which are more than \
         {least_tokens} tokens. Please reduce the length of the prompt."
    );
    Err(ApiError::context_length(param, message))
}

/// Part of an answer.
#[derive(Debug, Default)]
pub(super) struct Piece {
    pub(super) text: String,
    /// Empty unless asked for.
    pub(super) logprobs: Vec<TokenLogprob>,
    /// The tokens drawn since the last piece, a stop token included.
    pub(super) tokens: Vec<TokenId>,
    /// Tokens drawn so far.
    pub(super) completion_tokens: u32,
}

impl Piece {
    /// Adds the piece that comes next.
    pub(super) fn extend(&mut self, next: Piece) {
        self.text += &next.text;
        self.logprobs.extend(next.logprobs);
        self.tokens.extend(next.tokens);
        self.completion_tokens = next.completion_tokens;
    }
}

/// A token of the answer with its log-probability.
#[derive(Debug)]
pub(super) struct TokenLogprob {
    /// Where its text begins, in characters of the answer.
    pub(super) start: usize,
    pub(super) token: TokenId,
    pub(super) logprob: f32,
    pub(super) top: Vec<(TokenId, f32)>,
}

/// How an answer ended, and what it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChoiceEnd {
    pub(super) finish_reason: &'static str,
    /// Tokens of the prompt that came from the prefix cache.
    pub(super) cached_tokens: u32,
    pub(super) completion_tokens: u32,
}

/// The next thing of an answer.
pub(super) enum ChoiceOutput {
    Piece(Piece),
    End(ChoiceEnd),
}

/// A choice that is being made. Dropping it cancels it, as a client does that leaves.
pub(super) struct ChoiceGeneration {
    events: EventStream,
    caller: Caller,
    detokenizer: Detokenizer,
    stop_tokens: Vec<TokenId>,
    include_stop: bool,
    wants_tokens: bool,
    completion_tokens: u32,
    waiting: VecDeque<TokenLogprob>, // Their text has not been released yet.
    tokens: Vec<TokenId>,            // Drawn since the last piece.
    stopped: bool,                   // A stop string has ended the text.
    ending: Option<ChoiceEnd>,       // Known, and told after the last piece.
}

impl ChoiceGeneration {
    /// Submits `call`.
    ///
    /// # Errors
    /// When the engine refuses it at once.
    pub(super) fn start(
        serving: &Serving,
        call: ParsedRequest,
        caller: Caller,
        arrived: Instant,
    ) -> Result<ChoiceGeneration, ApiError> {
        let ParsedRequest {
            prompt,
            max_new_tokens,
            params,
            is_another_choice,
        } = call;
        let options = TextOptions {
            stop: params.stop,
            include_stop: params.include_stop,
            skip_special_tokens: params.skip_special_tokens,
            min_tokens: params.min_tokens,
        };
        let wants_tokens = params.return_token_ids;
        let events = serving.engine.submit(GenerationRequest {
            prompt,
            sampling: params.sampling,
            max_new_tokens,
            min_new_tokens: params.min_tokens,
            stop_tokens: params.stop_tokens.clone(),
            tenant: caller.tenant.number,
            arrived,
            is_another_choice,
            first_token_within: caller.tenant.deadlines.first_token,
            ends_within: caller.tenant.deadlines.total,
        })?;
        Ok(ChoiceGeneration {
            events,
            caller,
            detokenizer: Detokenizer::new(Arc::clone(&serving.tokenizer), options),
            stop_tokens: params.stop_tokens,
            include_stop: params.include_stop,
            wants_tokens,
            completion_tokens: 0,
            waiting: VecDeque::new(),
            tokens: Vec::new(),
            stopped: false,
            ending: None,
        })
    }

    /// Ends it early although its client is still there.
    pub(super) fn cancel(mut self) {
        self.events.finish(FinishReason::Cancelled);
    }

    /// Waits until the engine has taken the request. May be given up and left to `next`.
    ///
    /// # Errors
    /// When the engine refuses it.
    pub(super) async fn accepted(&mut self) -> Result<(), ApiError> {
        match self.event().await {
            Some(StreamEvent::Accepted) => Ok(()),
            Some(StreamEvent::Refused(refusal)) => Err(refusal.into()),
            other => Err(ApiError::internal(&format!(
                "the engine began with {other:?}"
            ))),
        }
    }

    /// The next piece, or the end, after which it is not called again. May be given up and called again.
    ///
    /// # Errors
    /// When the engine refuses the request, can't go on, or shuts down. It is over then.
    pub(super) async fn next(&mut self) -> Result<ChoiceOutput, ApiError> {
        if let Some(ending) = self.ending.take() {
            return Ok(ChoiceOutput::End(ending));
        }
        loop {
            match self.event().await {
                Some(StreamEvent::Accepted) => {}
                Some(StreamEvent::Token(output)) => {
                    if let Some(piece) = self.token(output) {
                        return Ok(ChoiceOutput::Piece(piece));
                    }
                }
                Some(StreamEvent::Finished {
                    reason,
                    cached_tokens,
                    completion_tokens,
                    ..
                }) => {
                    let ending = ChoiceEnd {
                        finish_reason: finish_reason(reason)?,
                        cached_tokens,
                        completion_tokens,
                    };
                    return Ok(self.finished(ending));
                }
                Some(StreamEvent::Refused(refusal)) => return Err(refusal.into()),
                Some(StreamEvent::Failed(why)) => return Err(ApiError::internal(&why)),
                None => {
                    return Err(ApiError::internal(
                        "the engine ended a stream without a word",
                    ));
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

    fn token(&mut self, output: TokenOutput) -> Option<Piece> {
        let TokenOutput {
            token,
            logprob,
            top,
        } = output;
        self.completion_tokens += 1;
        self.tokens.push(token);
        if self.stop_tokens.contains(&token) && !self.include_stop {
            return None;
        }
        let start = self.detokenizer.decoded_chars();
        if let Some(logprob) = logprob {
            self.waiting.push_back(TokenLogprob {
                start,
                token,
                logprob,
                top,
            });
        }
        let delta = self.detokenizer.push(token);
        if delta.stopped {
            self.stopped = true;
            self.events.finish(FinishReason::Stop);
        }
        let piece = self.piece(delta.text);
        let worth = !piece.text.is_empty() || !piece.logprobs.is_empty();
        if !worth {
            self.tokens = piece.tokens;
            return None;
        }
        Some(piece)
    }

    /// A piece with `text` and what belongs to it.
    fn piece(&mut self, text: String) -> Piece {
        let released = self.detokenizer.released_chars();
        let ready = self
            .waiting
            .iter()
            .take_while(|entry| entry.start < released)
            .count();
        Piece {
            text,
            logprobs: self.waiting.drain(..ready).collect(),
            tokens: std::mem::take(&mut self.tokens),
            completion_tokens: self.completion_tokens,
        }
    }

    fn finished(&mut self, mut ending: ChoiceEnd) -> ChoiceOutput {
        let mut piece = Piece {
            completion_tokens: self.completion_tokens,
            ..Piece::default()
        };
        piece.tokens = std::mem::take(&mut self.tokens);
        if !self.stopped {
            let delta = self.detokenizer.finish();
            piece.text = delta.text;
            if delta.stopped {
                ending.finish_reason = "stop";
            }
            // With nothing left to come, tokens without text of their own count as released.
            piece.logprobs = self.waiting.drain(..).collect();
        }
        let tokens_matter = self.wants_tokens && !piece.tokens.is_empty();
        if piece.text.is_empty() && piece.logprobs.is_empty() && !tokens_matter {
            return ChoiceOutput::End(ending);
        }
        self.ending = Some(ending);
        ChoiceOutput::Piece(piece)
    }
}

/// Asks for log-probabilities, with so many alternatives.
pub(super) fn with_logprobs(sampling: SamplingParams, top: Option<i64>) -> SamplingParams {
    SamplingParams {
        logprobs: top.and_then(|top| u32::try_from(top).ok()),
        ..sampling
    }
}

/// A token as a string: its text, or `prefix` and its bytes in hexadecimal when they are no whole characters.
pub(super) fn spelled(tokenizer: &Tokenizer, token: TokenId, prefix: &str) -> String {
    let bytes = tokenizer.token_bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(prefix.to_owned(), |text, byte| {
            text + &format!("\\x{byte:02x}")
        }),
    }
}

/// JSON has no infinity.
pub(super) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// # Errors
/// Endings that are no answer.
fn finish_reason(reason: FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Shutdown => Err(ApiError::draining()),
        FinishReason::Cancelled => Err(ApiError::internal(
            "a request was cancelled while its client waited",
        )),
        FinishReason::Deadline => Err(ApiError::too_slow()),
        FinishReason::Error => Err(ApiError::internal("the engine gave up on a request")),
    }
}
