//! The parameters that both completion endpoints share: names, types, limits and defaults.
//!
//! Invariant: the server never ignores a field silently that it knows but does not support; it
//! returns an error that names the field. It ignores fields that it does not know, because routers
//! add their own.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::json_field::{
    Bool, Float, Given, Integer, JsonField, JsonText, Object, Scalar, Seed, count_rest,
    deserialize_fields, may_contain, must_be,
};
use super::sampling_defaults::SamplingDefaults;
use super::token_ids::{LogitBias, TokenList};
use crate::api::app::ModelCard;
use crate::api::error::ApiError;
use crate::api::generation::request::{
    AnswerShape, MaxTokens, Params, ResponseMode, StreamUsage, Truncation,
};
use crate::api::ids::random_u64;
use crate::engine::SamplingParams;

const MAX_STOP_STRINGS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_TOKENS: usize = 256;

/// An integer whose limits depend on other values.
type AnyInteger = Integer<{ i64::MIN }, { i64::MAX }>;

/// The fields that both endpoints have, except their prompt and log-probabilities.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(in crate::api) struct CommonFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// Maximum number of output tokens. Prompt and output must fit the model's context. 0 returns
    /// what `echo` or `prompt_logprobs` ask for, and needs one of them.
    max_tokens: Option<Integer<0, { i64::MAX }>>,
    /// The same as `max_tokens`, and takes precedence over it.
    max_completion_tokens: Option<Integer<0, { i64::MAX }>>,
    /// The output does not stop before it has this many tokens; at most the maximum output length.
    min_tokens: Option<AnyInteger>,
    /// Randomness of the draw. 0 always takes the most likely token. Default: 1.
    temperature: Option<Float<0, 200>>,
    /// Draw from the most likely tokens with this total probability. Default: 1.
    top_p: Option<Float<0, 100>>,
    /// Draw from this many most likely tokens. 0 and -1 are off.
    top_k: Option<Integer<-1, { u32::MAX as i64 }>>,
    /// Drop tokens below this fraction of the probability of the most likely token. 0 is off.
    min_p: Option<Float<0, 100>>,
    /// The same request and seed give the same answer. Default: random.
    seed: Option<Seed>,
    /// Above 1, tokens of prompt and output become less likely. 1 is off.
    // A penalty outside these limits can turn logits into infinities.
    repetition_penalty: Option<Float<1, 10_000>>,
    /// Subtracted from a token's logit for each occurrence in the output.
    frequency_penalty: Option<Float<-200, 200>>,
    /// Subtracted once from the logit of a token that is in the output.
    presence_penalty: Option<Float<-200, 200>>,
    /// Added to the logits of single tokens: token id to bias.
    logit_bias: Option<LogitBias>,
    /// Strings that end the output.
    stop: Option<StopStrings>,
    /// Token ids that end the output, at most 256.
    stop_token_ids: Option<TokenList>,
    /// Whether the model's own stop tokens do not end the answer.
    ignore_eos: Option<Bool>,
    /// Whether the text keeps the stop string or stop token that ends it.
    include_stop_str_in_output: Option<Bool>,
    /// Whether the text leaves out special tokens. Default: true.
    skip_special_tokens: Option<Bool>,
    /// Whether the answer has `prompt_token_ids` and `token_ids`.
    return_token_ids: Option<Bool>,
    /// Return the log-probability of each token of the prompt after the first, and this many
    /// alternatives. The prompt is then computed whole. Needs an answer in one piece.
    prompt_logprobs: Option<Integer<0, 20>>,
    /// Whether log-probabilities show tokens as `token_id:` and their id.
    return_tokens_as_token_ids: Option<Bool>,
    /// Use only so many tokens from the end of the prompt. -1 uses as many as leave room for the
    /// output. A text of far more than twice `max_model_len` tokens is an error all the same.
    /// Default: a prompt that is too long is an error.
    truncate_prompt_tokens: Option<Integer<-1, { u32::MAX as i64 }>>,
    /// Number of choices. Choice `i` draws with `seed` + `i`. Default: 1.
    n: Option<Integer<1, 8>>,
    /// Whether the answer is a stream of server-sent events.
    stream: Option<Bool>,
    /// What a stream reports. An option that is true needs `stream`.
    #[schema(value_type = Option<StreamOptions>)]
    stream_options: Option<Object<StreamOptions>>,
}

/// What a stream reports.
#[derive(Debug, Default, Deserialize, ToSchema)]
struct StreamOptions {
    /// Whether the stream ends with a chunk that has the token counts.
    include_usage: Option<Bool>,
    /// Whether every chunk has the token counts so far.
    continuous_usage_stats: Option<Bool>,
}

/// A string, or an array of at most `MAX_STOP_STRINGS` strings.
#[derive(Debug)]
pub(in crate::api) struct StopStrings(Vec<String>);

impl StopStrings {
    fn new<E: Error>(stops: Vec<Given>) -> Result<StopStrings, E> {
        let stop = |stop| match stop {
            Given::Text(text) if text.is_empty() => {
                Err(E::custom("must not contain an empty string."))
            }
            Given::Text(text) if text.len() > MAX_STOP_BYTES => Err(E::custom(format_args!(
                "may contain strings of at most {MAX_STOP_BYTES} bytes; got one of {}.",
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

    fn schema() -> Value {
        // The limit counts bytes, and a string has at most as many characters.
        let stop = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES});
        json!({"anyOf": [stop, {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS}]})
    }

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

/// The fields that the endpoints of other APIs have too, in the limits of their names here.
pub(in crate::api) struct BasicFields {
    /// The name of the field with the maximum output length, and that length.
    pub(in crate::api) max_tokens: Option<(&'static str, Integer<1, { i64::MAX }>)>,
    pub(in crate::api) temperature: Option<Float<0, 200>>,
    pub(in crate::api) top_p: Option<Float<0, 100>>,
    pub(in crate::api) top_k: Option<Integer<-1, { u32::MAX as i64 }>>,
    pub(in crate::api) stop: Option<StopStrings>,
}

impl BasicFields {
    /// Sets defaults for everything else.
    pub(in crate::api) fn check(
        self,
        model: &ModelCard,
        defaults: &SamplingDefaults,
    ) -> Result<Params, ApiError> {
        let common = CommonFields {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: self.stop,
            ..CommonFields::default()
        };
        let params = common.check(model, defaults)?;
        let max_tokens = self.max_tokens.map(|(field, Integer(tokens))| MaxTokens {
            field,
            tokens: u64::try_from(tokens).unwrap_or(u64::MAX),
            is_cut_to_fit: false,
        });
        Ok(Params {
            max_tokens,
            ..params
        })
    }
}

impl CommonFields {
    /// Returns the name of the model that the client wants.
    pub(in crate::api) fn model(&self) -> Option<&str> {
        self.model.as_ref().map(|JsonText(name)| name.as_str())
    }

    /// Checks what depends on the model or on several fields, and sets defaults.
    pub(in crate::api) fn check(
        self,
        model: &ModelCard,
        defaults: &SamplingDefaults,
    ) -> Result<Params, ApiError> {
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
        let is_stream = is_set(self.stream);
        let prompt_logprobs = self.prompt_logprobs.map(|Integer(count)| count as u32);
        if is_stream && prompt_logprobs.is_some() {
            let message = "'prompt_logprobs' requires 'stream': false.";
            return Err(ApiError::invalid_value("prompt_logprobs", message));
        }
        let top_k = self
            .top_k
            .or(defaults.top_k)
            .map_or(0, |Integer(top_k)| top_k);
        let biases = self.logit_bias.map(|biases| biases.check(model));
        let or_zero = |number: Option<f32>| number.unwrap_or(0.0);
        let or_one = |number: Option<f32>| number.unwrap_or(1.0);
        let min_p = self.min_p.or(defaults.min_p).map(|Float(number)| number);
        let top_p = self.top_p.or(defaults.top_p).map(|Float(number)| number);
        let temperature = self.temperature.or(defaults.temperature);
        let repetition_penalty = self.repetition_penalty.or(defaults.repetition_penalty);
        Ok(Params {
            sampling: SamplingParams {
                temperature: or_one(temperature.map(|Float(number)| number)),
                top_k: u32::try_from(top_k).unwrap_or(0),
                top_p: or_one(top_p),
                min_p: or_zero(min_p),
                seed: self.seed.map_or_else(random_u64, |Seed(seed)| seed),
                repetition_penalty: or_one(repetition_penalty.map(|Float(number)| number)),
                frequency_penalty: or_zero(self.frequency_penalty.map(|Float(number)| number)),
                presence_penalty: or_zero(self.presence_penalty.map(|Float(number)| number)),
                logit_bias: biases.transpose()?.unwrap_or_default(),
                logprobs: None,
                grammar: None,
                thinking: None,
                prompt_logprobs,
                unmasking: None,
                pooling: None,
            },
            grammar: None,
            n: self.n.map_or(1, |Integer(n)| n as u32),
            max_tokens,
            min_tokens,
            stop_tokens,
            truncation: self.truncate_prompt_tokens.map(truncation).transpose()?,
            shape: AnswerShape {
                mode: response_mode(is_stream, self.stream_options)?,
                stop: self.stop.map_or_else(Vec::new, |StopStrings(stop)| stop),
                include_stop: is_set(self.include_stop_str_in_output),
                skip_special_tokens: self.skip_special_tokens.is_none_or(|Bool(skip)| skip),
                echo: false,
                has_token_ids: is_set(self.return_token_ids),
                prompt_logprobs,
                shows_token_ids: is_set(self.return_tokens_as_token_ids),
                reasoning: None,
                calls: None,
            },
        })
    }

    /// Returns the maximum output length that the client gave. `max_completion_tokens` takes
    /// precedence.
    fn max_tokens(&self) -> Option<MaxTokens> {
        let (field, Integer(tokens)) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(tokens), _) => ("max_completion_tokens", tokens),
            (None, Some(tokens)) => ("max_tokens", tokens),
            (None, None) => return None,
        };
        let tokens = u64::try_from(tokens).unwrap_or(u64::MAX); // Never negative.
        Some(MaxTokens {
            field,
            tokens,
            is_cut_to_fit: false,
        })
    }

    fn min_tokens(&self, max: Option<MaxTokens>, model: &ModelCard) -> Result<u32, ApiError> {
        let Some(Integer(min)) = self.min_tokens else {
            return Ok(0);
        };
        let invalid = |message: String| Err(ApiError::invalid_value("min_tokens", message));
        let limit = model.max_model_len;
        match (u32::try_from(min), max) {
            (Ok(min), Some(max)) if min <= limit && u64::from(min) > max.tokens => {
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

fn truncation(Integer(tokens): Integer<-1, { u32::MAX as i64 }>) -> Result<Truncation, ApiError> {
    match u32::try_from(tokens) {
        Ok(0) => {
            let message = "'truncate_prompt_tokens' must be -1 or at least 1; got 0.";
            Err(ApiError::invalid_value("truncate_prompt_tokens", message))
        }
        Ok(tokens) => Ok(Truncation::Tokens(tokens)),
        Err(_) => Ok(Truncation::ToFit),
    }
}

/// Returns whether a field that is off by default is on.
pub(in crate::api) fn is_set(field: Option<Bool>) -> bool {
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
