//! A request that has been read and fits the model's context length: what the engine gets, and the
//! shape of the answer.
//!
//! The fields of every endpoint become this, and it knows none of them.

use std::sync::Arc;

use super::prompt_logprobs::Echo;
use crate::api::app::{ModelCard, Serving};
use crate::api::error::ApiError;
use crate::constraint::{GrammarError, GrammarSource};
use crate::engine::{SamplingParams, TenantId, TokenId, Unmasking};
use crate::text::ReasoningTags;
use crate::tools::CallParser;
use crate::traces::RequestParameters;

/// The largest number of log-probabilities of prompt tokens in an answer, alternatives included, so
/// that its memory is bounded.
const MAX_PROMPT_LOGPROBS: u64 = 1 << 19;

/// A parsed request.
#[derive(Clone)]
pub(in crate::api) struct ParsedRequest {
    pub(in crate::api) prompts: Vec<ParsedPrompt>, // At least one.
    pub(in crate::api) params: Params,
}

/// The parameters of a request, without its prompt: what the engine needs, and beside it the shape
/// of the answer.
#[derive(Clone, Debug)]
pub(in crate::api) struct Params {
    pub(in crate::api) sampling: SamplingParams,
    /// The grammar that the output follows, until it is compiled.
    pub(in crate::api) grammar: Option<FieldGrammar>,
    /// The number of choices.
    pub(in crate::api) n: u32,
    /// If `None`, the endpoint's default applies.
    pub(in crate::api) max_tokens: Option<MaxTokens>,
    pub(in crate::api) min_tokens: u32,
    /// The client's stop tokens and, unless the client ignores them, the model's.
    pub(in crate::api) stop_tokens: Vec<TokenId>,
    /// How much of a prompt is used. `None` uses all of it.
    pub(in crate::api) truncation: Option<Truncation>,
    pub(in crate::api) shape: AnswerShape,
}

/// The shape of an answer: what becomes of the tokens. The engine sees none of it.
#[derive(Clone, Debug)]
pub(in crate::api) struct AnswerShape {
    pub(in crate::api) mode: ResponseMode,
    /// The strings that end the text.
    pub(in crate::api) stop: Vec<String>,
    pub(in crate::api) include_stop: bool,
    pub(in crate::api) skip_special_tokens: bool,
    /// Whether the text begins with the text of the prompt.
    pub(in crate::api) echo: bool,
    /// Whether the answer has the ids of its tokens.
    pub(in crate::api) has_token_ids: bool,
    /// The number of alternatives in `prompt_logprobs`. `None` leaves the field out.
    pub(in crate::api) prompt_logprobs: Option<u32>,
    /// Whether log-probabilities show the ids of tokens instead of their texts.
    pub(in crate::api) shows_token_ids: bool,
    /// How the answer is split, if it is.
    pub(in crate::api) reasoning: Option<ReasoningField>,
    /// The parser of calls, if the answer may call tools.
    pub(in crate::api) calls: Option<CallParser>,
}

/// The maximum output length that a client gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct MaxTokens {
    /// The field that holds it.
    pub(in crate::api) field: &'static str,
    pub(in crate::api) tokens: u64,
    /// More than the context has room for means all of that room, and is no error.
    pub(in crate::api) is_cut_to_fit: bool,
}

/// How much of a prompt is used, from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Truncation {
    /// At most this many tokens.
    Tokens(u32),
    /// As many tokens as leave room for the output.
    ToFit,
}

/// How the server sends the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum ResponseMode {
    /// As one JSON object.
    Whole,
    /// As server-sent events.
    Stream(StreamUsage),
}

impl ResponseMode {
    /// Returns the mode of an API whose streams always report token counts in the same place.
    pub(in crate::api) fn of_stream(is_stream: bool) -> ResponseMode {
        if is_stream {
            ResponseMode::Stream(StreamUsage::Omitted)
        } else {
            ResponseMode::Whole
        }
    }
}

/// Where a stream reports token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum StreamUsage {
    /// Nowhere.
    Omitted,
    /// In a chunk of its own at the end; all other chunks have `"usage": null`.
    AtEnd,
    /// In every chunk, and in a chunk of its own at the end.
    InEveryChunk,
}

impl Params {
    /// Returns whether the answer is about the prompt only.
    pub(in crate::api) fn is_prompt_only(&self) -> bool {
        self.max_tokens.is_some_and(|max| max.tokens == 0)
    }

    /// Returns what a trace says of the parameters.
    pub(in crate::api) fn traced(&self) -> RequestParameters {
        let sampling = &self.sampling;
        RequestParameters {
            max_tokens: self.max_tokens.map(|max| max.tokens),
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            choices: self.n,
            is_stream: self.is_stream(),
        }
    }

    /// Returns whether the answer is a stream.
    pub(in crate::api) fn is_stream(&self) -> bool {
        self.shape.mode != ResponseMode::Whole
    }

    /// Lets blocks of masked tokens be filled, if `unmasking` says how.
    #[must_use]
    pub(in crate::api) fn with_unmasking(mut self, unmasking: Option<Unmasking>) -> Params {
        if let Some(unmasking) = unmasking {
            self.sampling = self.sampling.by_diffusion(unmasking);
        }
        self
    }

    /// Checks that an answer by block diffusion can have what the request asks for.
    fn check_diffusion(&self, model: &ModelCard) -> Result<(), ApiError> {
        if self.sampling.unmasking.is_none() {
            return Ok(());
        }
        let scored = match self.shape.prompt_logprobs {
            Some(_) => "prompt_logprobs",
            None => "echo", // With `logprobs`.
        };
        let fields = [
            self.grammar.as_ref().map(|grammar| grammar.field),
            self.sampling.prompt_logprobs.map(|_| scored),
            (self.sampling.thinking.as_ref()).map(|_| "thinking_token_budget"),
        ];
        match fields.into_iter().flatten().next() {
            Some(field) => {
                let only = model.diffusion.is_some_and(|diffusion| diffusion.is_only);
                let advice = match only {
                    true => "This model answers in no other way.",
                    false => "Use the model's name with ':autoregressive'.",
                };
                let message = format!("'{field}' is not supported by block diffusion. {advice}");
                Err(ApiError::unsupported(field, message))
            }
            None => Ok(()),
        }
    }

    /// Checks that the request asks for one choice and for nothing about its prompt, for endpoints
    /// whose answers have only that.
    pub(in crate::api) fn check_plain(&self) -> Result<(), ApiError> {
        if self.n != 1 {
            let message = format!("'n' must be 1 for this endpoint; got {}.", self.n);
            return Err(ApiError::unsupported("n", message));
        }
        if self.shape.prompt_logprobs.is_some() {
            let message = "'prompt_logprobs' is not supported by this endpoint. Use \
                           POST /v1/completions.";
            return Err(ApiError::unsupported("prompt_logprobs", message));
        }
        Ok(())
    }
}

/// A grammar, and the field that gives it.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::api) struct FieldGrammar {
    pub(in crate::api) field: &'static str,
    pub(in crate::api) source: GrammarSource,
    /// The parts of the grammar, by the path of their fields. If the grammar cannot be compiled,
    /// the error names the first part that cannot.
    pub(in crate::api) parts: Vec<(String, GrammarSource)>,
}

/// A prompt of a request, and how long its output may be.
#[derive(Clone)]
pub(in crate::api) struct ParsedPrompt {
    pub(in crate::api) tokens: Vec<TokenId>,
    /// At least 1. The token of a request that is about the prompt only is not part of the answer.
    pub(in crate::api) max_new_tokens: u32,
    /// The text of the prompt, if the answer begins with it.
    pub(in crate::api) echo: Option<Arc<Echo>>,
}

/// How an answer is split into reasoning and the text after it.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct ReasoningField {
    pub(in crate::api) tags: ReasoningTags,
    /// Whether the prompt ends inside of reasoning.
    pub(in crate::api) is_opened: bool,
    /// Whether the client wants the reasoning.
    pub(in crate::api) is_wanted: bool,
}

impl ParsedRequest {
    /// Sets the maximum output length of each prompt from the request, the endpoint's default and
    /// the context.
    ///
    /// Without `default`, the output may use the rest of the context. `param` names the field that
    /// holds the prompts.
    ///
    /// # Errors
    /// If the model's context is too short for a prompt, or a prompt is empty.
    pub(in crate::api) fn new(
        prompts: Vec<Vec<TokenId>>,
        params: Params,
        serving: &Serving,
        default: Option<u32>,
        param: &str,
    ) -> Result<ParsedRequest, ApiError> {
        check_prompt_only(&params)?;
        let (model, defaults) = (&serving.model, &serving.defaults);
        params.check_diffusion(model)?;
        let default = defaults.max_tokens().or(default);
        let is_only = prompts.len() == 1;
        let prompt = |(index, tokens): (usize, Vec<TokenId>)| {
            let tokens = truncated(tokens, &params, default, model);
            let skips_special = params.shape.skip_special_tokens;
            let echo = (params.shape.echo)
                .then(|| Arc::new(Echo::new(&tokens, &serving.tokenizer, skips_special)));
            let param = if is_only {
                param.to_owned()
            } else {
                format!("{param}[{index}]")
            };
            let parsed = ParsedPrompt::new(tokens, &params, model, default, &param);
            parsed.map(|parsed| ParsedPrompt { echo, ..parsed })
        };
        let prompts: Result<Vec<_>, _> = prompts.into_iter().enumerate().map(prompt).collect();
        let prompts = prompts?;
        check_prompt_logprobs(&prompts, &params)?;
        Ok(ParsedRequest { prompts, params })
    }

    /// Compiles the grammar of the request, if it has one.
    ///
    /// # Errors
    /// If it cannot be compiled.
    pub(in crate::api) async fn compile(
        mut self,
        serving: &Serving,
        tenant: TenantId,
    ) -> Result<ParsedRequest, ApiError> {
        let Some(grammar) = self.params.grammar.take() else {
            return Ok(self);
        };
        match serving.grammars.compile(tenant.0, grammar.source).await {
            Ok(compiled) => {
                self.params.sampling.grammar = Some(compiled);
                Ok(self)
            }
            // The parts would only wait in the full queue too.
            Err(error @ GrammarError::Busy) => Err(ApiError::grammar(grammar.field, &error)),
            Err(of_whole) => {
                for (path, source) in grammar.parts {
                    if let Err(error) = serving.grammars.compile(tenant.0, source).await {
                        return Err(ApiError::grammar(&path, &error));
                    }
                }
                Err(ApiError::grammar(grammar.field, &of_whole))
            }
        }
    }
}

/// Checks that a request without output asks for something about its prompt.
fn check_prompt_only(params: &Params) -> Result<(), ApiError> {
    match params.max_tokens {
        Some(MaxTokens {
            field, tokens: 0, ..
        }) if !params.shape.echo && params.shape.prompt_logprobs.is_none() => {
            let message = format!(
                "'{field}' must be at least 1; got 0. It may be 0 with 'echo' or 'prompt_logprobs'."
            );
            Err(ApiError::invalid_value(field, message))
        }
        _ => Ok(()),
    }
}

/// Checks that the log-probabilities of the prompts are not too many.
fn check_prompt_logprobs(prompts: &[ParsedPrompt], params: &Params) -> Result<(), ApiError> {
    let Some(alternatives) = params.sampling.prompt_logprobs else {
        return Ok(());
    };
    let tokens = prompts.iter().map(|prompt| prompt.tokens.len() as u64);
    let count = tokens.sum::<u64>() * u64::from(params.n) * (1 + u64::from(alternatives));
    if count <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let field = match params.shape.prompt_logprobs {
        Some(_) => "prompt_logprobs",
        None => "logprobs",
    };
    let message = format!(
        "'{field}' asks for {count} log-probabilities of prompt tokens, alternatives included; an \
         answer may have at most {MAX_PROMPT_LOGPROBS}. Send fewer prompts in a request, or ask \
         for fewer alternatives."
    );
    Err(ApiError::invalid_value(field, message))
}

/// Returns the part of a prompt that the request wants to use.
fn truncated(
    mut tokens: Vec<TokenId>,
    params: &Params,
    default: Option<u32>,
    model: &ModelCard,
) -> Vec<TokenId> {
    let kept = match params.truncation {
        None => return tokens,
        Some(Truncation::Tokens(kept)) => kept,
        Some(Truncation::ToFit) => {
            let given = params.max_tokens.map(|max| max.tokens);
            let wanted = given.or(default.map(u64::from)).unwrap_or(1);
            let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
            let context = model.context_of(params.sampling.unmasking);
            context.saturating_sub(wanted.max(1))
        }
    };
    let left_out = tokens.len().saturating_sub(kept as usize);
    tokens.drain(..left_out);
    tokens
}

impl ParsedPrompt {
    fn new(
        prompt: Vec<TokenId>,
        params: &Params,
        model: &ModelCard,
        default: Option<u32>,
        param: &str,
    ) -> Result<ParsedPrompt, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::empty_prompt(param));
        }
        let limit = model.context_of(params.sampling.unmasking);
        let left = limit.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
        let max_new_tokens = match params.max_tokens {
            _ if left == 0 => {
                let found = format!(
                    "The prompt has {} tokens, which leaves none for the output. \
                     Shorten the prompt.",
                    prompt.len()
                );
                return Err(ApiError::context_length(param, limit, &found));
            }
            Some(max) if max.tokens > u64::from(left) && max.is_cut_to_fit => left,
            Some(MaxTokens { field, tokens, .. }) if tokens > u64::from(left) => {
                let found = format!(
                    "Your request needs {} tokens: {} for the prompt and {tokens} for the \
                     output. Shorten the prompt or reduce '{field}'.",
                    tokens.saturating_add(prompt.len() as u64),
                    prompt.len()
                );
                return Err(ApiError::context_length(field, limit, &found));
            }
            Some(MaxTokens { tokens, .. }) => (tokens as u32).max(1), // At most `left`.
            None => default.map_or(left, |default| left.min(default)),
        };
        let min_tokens = params.min_tokens;
        if min_tokens > max_new_tokens {
            let message = format!(
                "'min_tokens' must be at most {max_new_tokens}, the maximum output length of this \
                 request; got {min_tokens}."
            );
            return Err(ApiError::invalid_value("min_tokens", message));
        }
        Ok(ParsedPrompt {
            tokens: prompt,
            max_new_tokens,
            echo: None,
        })
    }
}
