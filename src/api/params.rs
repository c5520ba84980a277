//! The parameters that both completion endpoints share: names, limits and defaults.
//!
//! Invariant: the server never ignores a field silently that it knows but does not support; it
//! returns an error that names the field. It ignores fields that it does not know, because routers
//! add their own.

use serde_json::Value;

use super::app::ModelCard;
use super::error::{ApiError, quoted};
use super::fields::{Fields, check_count, described, integer, wrong_type};
use super::request_id::random_u64;
use super::unsupported;
use crate::engine::{SamplingParams, TokenId};

const MAX_STOP_STRINGS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_TOKENS: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
const MAX_CHOICES: u32 = 8;

/// The parameters of a request, without its prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Params {
    pub(super) sampling: SamplingParams,
    /// The number of choices.
    pub(super) n: u32,
    /// If `None`, the endpoint's default applies.
    pub(super) max_tokens: Option<u32>,
    pub(super) min_tokens: u32,
    /// The client's stop tokens and, unless the client ignores them, the model's.
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) stop: Vec<String>,
    pub(super) include_stop: bool,
    pub(super) skip_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) response_mode: ResponseMode,
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

impl Params {
    /// Reads all parameters except the prompt and the log-probabilities, which differ by endpoint.
    pub(super) fn read(body: &Fields<'_>, model: &ModelCard) -> Result<Params, ApiError> {
        unsupported::check(body)?;
        let max_tokens = match body.integer("max_completion_tokens", 1..=i64::MAX)? {
            Some(tokens) => Some(tokens),
            None => body.integer("max_tokens", 1..=i64::MAX)?,
        };
        let max_tokens = max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        let min_tokens = body
            .count("min_tokens", 0..=model.max_model_len)?
            .unwrap_or(0);
        if let Some(max) = max_tokens
            && min_tokens > max
        {
            let message =
                format!("'min_tokens' must be at most 'max_tokens' ({max}); got {min_tokens}.");
            return Err(ApiError::invalid_value("min_tokens", message));
        }
        let mut stop_tokens = token_list(body, "stop_token_ids", model)?;
        if !body.bool("ignore_eos")?.unwrap_or(false) {
            stop_tokens.extend(&model.stop_tokens);
        }
        Ok(Params {
            sampling: sampling(body, model)?,
            n: body.count("n", 1..=MAX_CHOICES)?.unwrap_or(1),
            max_tokens,
            min_tokens,
            stop_tokens,
            stop: stop_strings(body)?,
            include_stop: body.bool("include_stop_str_in_output")?.unwrap_or(false),
            skip_special_tokens: body.bool("skip_special_tokens")?.unwrap_or(true),
            return_token_ids: body.bool("return_token_ids")?.unwrap_or(false),
            response_mode: response_mode(body)?,
        })
    }
}

fn sampling(body: &Fields<'_>, model: &ModelCard) -> Result<SamplingParams, ApiError> {
    let seed = match body.get("seed") {
        None => random_u64(),
        Some(value) => {
            let seed = integer(value).ok_or_else(|| wrong_type("seed", "an integer", value))?;
            seed as u64 // The lower 64 bits; the sign does not matter.
        }
    };
    let top_k = body
        .integer("top_k", -1..=i64::from(u32::MAX))?
        .unwrap_or(0);
    // A penalty outside these limits can turn logits into infinities.
    let repetition_penalty = body
        .number("repetition_penalty", 0.01..=100.0)?
        .unwrap_or(1.0);
    Ok(SamplingParams {
        temperature: body.number("temperature", 0.0..=2.0)?.unwrap_or(1.0),
        top_k: u32::try_from(top_k).unwrap_or(0),
        top_p: body.number("top_p", 0.0..=1.0)?.unwrap_or(1.0),
        min_p: body.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        seed,
        repetition_penalty,
        frequency_penalty: body.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        presence_penalty: body.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(body, model)?,
        logprobs: None,
    })
}

fn logit_bias(body: &Fields<'_>, model: &ModelCard) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let invalid = |message: String| ApiError::invalid_value("logit_bias", message);
    let Some(biases) = body.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    let count = biases.entries().len();
    check_count("logit_bias", "entries", count, MAX_LOGIT_BIASES)?;
    let entry = |(key, value): (&String, &Value)| {
        let token = key.parse().ok().filter(|token| *token < model.vocabulary);
        let Some(token) = token else {
            return Err(invalid(format!(
                "'logit_bias' has the key {}; its keys must be token ids from 0 to {}.",
                quoted(key),
                model.vocabulary - 1
            )));
        };
        match value.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias as f32)),
            _ => Err(invalid(format!(
                "'logit_bias' must map token ids to numbers from -100 to 100; \
                 token {token} has {}.",
                described(value)
            ))),
        }
    };
    biases.entries().map(entry).collect()
}

fn token_list(body: &Fields<'_>, name: &str, model: &ModelCard) -> Result<Vec<TokenId>, ApiError> {
    let items = body.array(name)?.unwrap_or_default();
    check_count(name, "token ids", items.len(), MAX_STOP_TOKENS)?;
    let token = |item| token_id(item, name, model);
    items.iter().map(token).collect()
}

/// Returns the token id in `value`, which is part of `param`.
///
/// # Errors
/// If `value` is no token id of the model.
pub(super) fn token_id(value: &Value, param: &str, model: &ModelCard) -> Result<TokenId, ApiError> {
    let token = integer(value)
        .and_then(|number| u32::try_from(number).ok())
        .filter(|token| *token < model.vocabulary);
    token.ok_or_else(|| {
        let message = format!(
            "'{param}' must contain token ids, integers from 0 to {}; got {}.",
            model.vocabulary - 1,
            described(value)
        );
        ApiError::invalid_value(param, message)
    })
}

fn stop_strings(body: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| ApiError::invalid_value("stop", message);
    let items = match body.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    check_count("stop", "strings", items.len(), MAX_STOP_STRINGS)?;
    let stop = |item: &Value| match item.as_str() {
        None => Err(wrong_type("stop", "a string or an array of strings", item)),
        Some("") => Err(invalid("'stop' must not contain an empty string.".into())),
        Some(text) if text.len() > MAX_STOP_BYTES => Err(invalid(format!(
            "A string in 'stop' may have at most {MAX_STOP_BYTES} bytes; got {}.",
            text.len()
        ))),
        Some(text) => Ok(text.to_owned()),
    };
    items.iter().map(stop).collect()
}

fn response_mode(body: &Fields<'_>) -> Result<ResponseMode, ApiError> {
    let stream = body.bool("stream")?.unwrap_or(false);
    let options = body.object("stream_options")?;
    if options.is_some() && !stream {
        let message = "'stream_options' requires 'stream': true.";
        return Err(ApiError::invalid_value("stream_options", message));
    }
    if !stream {
        return Ok(ResponseMode::Whole);
    }
    let option = |name| match &options {
        Some(options) => options.bool(name).map(|value| value.unwrap_or(false)),
        None => Ok(false),
    };
    let usage = match (option("include_usage")?, option("continuous_usage_stats")?) {
        (false, _) => StreamUsage::Omitted,
        (true, false) => StreamUsage::AtEnd,
        (true, true) => StreamUsage::InEveryChunk,
    };
    Ok(ResponseMode::Stream(usage))
}
