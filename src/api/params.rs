//! The parameters that both completion endpoints share: names, types, limits and defaults.
//!
//! Invariant: the server never ignores a field silently that it knows but does not support; it
//! returns an error that names the field. It ignores fields that it does not know, because routers
//! add their own.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};

use super::app::ModelCard;
use super::error::ApiError;
use super::fields::{
    Bool, Float, Given, Integer, JsonField, JsonText, Object, Scalar, Seed, count_rest,
    deserialize_fields, may_contain, must_be,
};
use super::request_id::random_u64;
use super::token_ids::{LogitBias, TokenList};
use crate::engine::{SamplingParams, TokenId};

const MAX_STOP_STRINGS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_TOKENS: usize = 256;

/// An integer whose limits depend on other values.
type AnyInteger = Integer<{ i64::MIN }, { i64::MAX }>;

/// The fields that both endpoints have, except their prompt and log-probabilities.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CommonFields {
    model: Option<JsonText>,
    max_tokens: Option<Integer<1, { i64::MAX }>>,
    max_completion_tokens: Option<Integer<1, { i64::MAX }>>,
    min_tokens: Option<AnyInteger>,
    temperature: Option<Float<0, 200>>,
    top_p: Option<Float<0, 100>>,
    top_k: Option<Integer<-1, { u32::MAX as i64 }>>,
    min_p: Option<Float<0, 100>>,
    seed: Option<Seed>,
    /// A penalty outside these limits can turn logits into infinities.
    repetition_penalty: Option<Float<1, 10_000>>,
    frequency_penalty: Option<Float<-200, 200>>,
    presence_penalty: Option<Float<-200, 200>>,
    logit_bias: Option<LogitBias>,
    stop: Option<StopStrings>,
    stop_token_ids: Option<TokenList>,
    ignore_eos: Option<Bool>,
    include_stop_str_in_output: Option<Bool>,
    skip_special_tokens: Option<Bool>,
    return_token_ids: Option<Bool>,
    n: Option<Integer<1, 8>>,
    stream: Option<Bool>,
    stream_options: Option<Object<StreamOptions>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<Bool>,
    continuous_usage_stats: Option<Bool>,
}

/// A string, or an array of at most `MAX_STOP_STRINGS` strings.
#[derive(Debug)]
struct StopStrings(Vec<String>);

impl StopStrings {
    fn new<E: Error>(stops: Vec<Given>) -> Result<StopStrings, E> {
        let stop = |stop| match stop {
            Given::Text(text) if text.is_empty() => {
                Err(E::custom("must not contain an empty string."))
            }
            Given::Text(text) if text.len() > MAX_STOP_BYTES => Err(E::custom(format_args!(
                "A string in 'stop' may have at most {MAX_STOP_BYTES} bytes; got {}.",
                text.len()
            ))),
            Given::Text(text) => Ok(text),
            other => Err(must_be(Self::EXPECTED, other)),
        };
        let stops: Result<_, E> = stops.into_iter().map(stop).collect();
        Ok(StopStrings(stops?))
    }
}

impl<'de> JsonField<'de> for StopStrings {
    const EXPECTED: &'static str = "a string or an array of strings";

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<StopStrings, E> {
        StopStrings::new(vec![Given::scalar(value)?])
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<StopStrings, A::Error> {
        let mut stops = Vec::new();
        while stops.len() < MAX_STOP_STRINGS
            && let Some(stop) = items.next_element::<Given>()?
        {
            stops.push(stop);
        }
        match count_rest(&mut items)? {
            0 => StopStrings::new(stops),
            more => {
                let count = stops.len() + more;
                Err(may_contain(MAX_STOP_STRINGS, "strings", count))
            }
        }
    }
}

deserialize_fields!(StopStrings);

/// The parameters of a request, without its prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Params {
    pub(super) sampling: SamplingParams,
    /// The number of choices.
    pub(super) n: u32,
    /// If `None`, the endpoint's default applies.
    pub(super) max_tokens: Option<MaxTokens>,
    pub(super) min_tokens: u32,
    /// The client's stop tokens and, unless the client ignores them, the model's.
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) stop: Vec<String>,
    pub(super) include_stop: bool,
    pub(super) skip_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) response_mode: ResponseMode,
}

/// The maximum output length that a client gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaxTokens {
    /// The field that holds it.
    pub(super) field: &'static str,
    pub(super) tokens: u32,
}

/// How the server sends the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponseMode {
    /// As one JSON object.
    Whole,
    /// As server-sent events.
    Stream(StreamUsage),
}

/// Where a stream reports token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamUsage {
    /// Nowhere.
    Omitted,
    /// In a chunk of its own at the end; all other chunks have `"usage": null`.
    AtEnd,
    /// In every chunk, and in a chunk of its own at the end.
    InEveryChunk,
}

impl CommonFields {
    /// Returns the name of the model that the client wants.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_ref().map(|JsonText(name)| name.as_str())
    }

    /// Checks what depends on the model or on several fields, and sets defaults.
    pub(super) fn check(self, model: &ModelCard) -> Result<Params, ApiError> {
        let max_tokens = self.max_tokens();
        let min_tokens = self.min_tokens(max_tokens, model)?;
        let stop_token_ids = self.stop_token_ids.unwrap_or_default();
        if stop_token_ids.len() > MAX_STOP_TOKENS {
            let message = format!(
                "'stop_token_ids' may contain at most {MAX_STOP_TOKENS} token ids; got {}.",
                stop_token_ids.len()
            );
            return Err(ApiError::invalid_value("stop_token_ids", message));
        }
        let mut stop_tokens = stop_token_ids.check("stop_token_ids", model)?;
        if !is_set(self.ignore_eos) {
            stop_tokens.extend(&model.stop_tokens);
        }
        let top_k = self.top_k.map_or(0, |Integer(top_k)| top_k);
        let biases = self.logit_bias.map(|biases| biases.check(model));
        let or_zero = |number: Option<f32>| number.unwrap_or(0.0);
        Ok(Params {
            sampling: SamplingParams {
                temperature: self.temperature.map_or(1.0, |Float(number)| number),
                top_k: u32::try_from(top_k).unwrap_or(0),
                top_p: self.top_p.map_or(1.0, |Float(number)| number),
                min_p: or_zero(self.min_p.map(|Float(number)| number)),
                seed: self.seed.map_or_else(random_u64, |Seed(seed)| seed),
                repetition_penalty: self.repetition_penalty.map_or(1.0, |Float(number)| number),
                frequency_penalty: or_zero(self.frequency_penalty.map(|Float(number)| number)),
                presence_penalty: or_zero(self.presence_penalty.map(|Float(number)| number)),
                logit_bias: biases.transpose()?.unwrap_or_default(),
                logprobs: None,
            },
            n: self.n.map_or(1, |Integer(n)| n as u32),
            max_tokens,
            min_tokens,
            stop_tokens,
            stop: self.stop.map_or_else(Vec::new, |StopStrings(stop)| stop),
            include_stop: is_set(self.include_stop_str_in_output),
            skip_special_tokens: self.skip_special_tokens.is_none_or(|Bool(skip)| skip),
            return_token_ids: is_set(self.return_token_ids),
            response_mode: response_mode(is_set(self.stream), self.stream_options)?,
        })
    }

    /// Returns the maximum output length. `max_completion_tokens` takes precedence.
    fn max_tokens(&self) -> Option<MaxTokens> {
        let (field, Integer(tokens)) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(tokens), _) => ("max_completion_tokens", tokens),
            (None, Some(tokens)) => ("max_tokens", tokens),
            (None, None) => return None,
        };
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        Some(MaxTokens { field, tokens })
    }

    fn min_tokens(&self, max: Option<MaxTokens>, model: &ModelCard) -> Result<u32, ApiError> {
        let Some(Integer(min)) = self.min_tokens else {
            return Ok(0);
        };
        let invalid = |message: String| Err(ApiError::invalid_value("min_tokens", message));
        let limit = model.max_model_len;
        match (u32::try_from(min), max) {
            (Ok(min), Some(max)) if min <= limit && min > max.tokens => {
                let max = max.tokens;
                invalid(format!(
                    "'min_tokens' must be at most 'max_tokens' ({max}); got {min}."
                ))
            }
            (Ok(min), _) if min <= limit => Ok(min),
            _ => invalid(format!(
                "'min_tokens' must be from 0 to {limit}; got {min}."
            )),
        }
    }
}

/// Returns whether a field that is off by default is on.
pub(super) fn is_set(field: Option<Bool>) -> bool {
    field.is_some_and(|Bool(is_set)| is_set)
}

/// Returns how the server sends the answer. Options that ask for nothing need no stream.
fn response_mode(
    stream: bool,
    options: Option<Object<StreamOptions>>,
) -> Result<ResponseMode, ApiError> {
    let Object(options) = options.unwrap_or(Object(StreamOptions::default()));
    let usage = is_set(options.include_usage);
    let in_every_chunk = is_set(options.continuous_usage_stats);
    if !stream && (usage || in_every_chunk) {
        let message = "'stream_options' requires 'stream': true.";
        return Err(ApiError::invalid_value("stream_options", message));
    }
    Ok(match (stream, usage, in_every_chunk) {
        (false, _, _) => ResponseMode::Whole,
        (true, false, _) => ResponseMode::Stream(StreamUsage::Omitted),
        (true, true, false) => ResponseMode::Stream(StreamUsage::AtEnd),
        (true, true, true) => ResponseMode::Stream(StreamUsage::InEveryChunk),
    })
}
