//! The parameters that chat and completions share: what is known, within which limits, with which defaults.
//!
//! Invariant: a field that the server knows but can't honour is an error that names it; it is never silently ignored. Fields that
//! nobody knows are ignored, because routers inject some.

use serde_json::Value;

use super::ModelCard;
use super::error::{ApiError, quoted};
use super::fields::{Fields, integer, wrong_kind};
use crate::engine::{SamplingParams, TokenId};

const MAX_STOP_STRINGS: usize = 4;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_TOKENS: usize = 256;
const MAX_LOGIT_BIASES: usize = 1024;
const MAX_CHOICES: i64 = 8;

/// What a request asks for beside its prompt.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Params {
    pub(super) sampling: SamplingParams,
    /// Choices; see `Choices` for what each draws with.
    pub(super) n: u32,
    /// `None`: the endpoint's own default.
    pub(super) max_tokens: Option<u32>,
    pub(super) min_tokens: u32,
    /// The client's stop tokens and, unless they are ignored, the model's.
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) stop: Vec<String>,
    pub(super) include_stop: bool,
    pub(super) skip_special_tokens: bool,
    pub(super) return_token_ids: bool,
    pub(super) stream: Option<Streaming>,
}

/// How an answer is streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Streaming {
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
}

/// A field that is known, what of it the server can do, and why not more.
struct Unsupported {
    name: &'static str,
    harmless: fn(&Value) -> bool,
    why: &'static str,
}

const fn unsupported(
    name: &'static str,
    harmless: fn(&Value) -> bool,
    why: &'static str,
) -> Unsupported {
    Unsupported {
        name,
        harmless,
        why,
    }
}

const NO_TOOLS: &str = "this server does not call tools";
const NO_STRUCTURE: &str = "this server does not constrain the output's structure";
const TEXT_ONLY: &str = "this server reads and writes text only";
const OWN_TEMPLATE: &str = "this server uses the model's own chat template as it is";
const NOT_HERE: &str = "this server does not support it";

/// `null` never gets here: it is the same as absent.
const UNSUPPORTED: &[Unsupported] = &[
    unsupported(
        "best_of",
        |value| integer(value) == Some(1),
        "this server returns every answer that it makes; 'n' says how many",
    ),
    unsupported("echo", is_false, "this server does not repeat the prompt"),
    unsupported(
        "suffix",
        is_empty,
        "this server does not fill in the middle",
    ),
    unsupported("tools", is_empty, NO_TOOLS),
    unsupported("functions", is_empty, NO_TOOLS),
    unsupported(
        "tool_choice",
        |value| value == "none" || value == "auto",
        NO_TOOLS,
    ),
    unsupported(
        "function_call",
        |value| value == "none" || value == "auto",
        NO_TOOLS,
    ),
    unsupported(
        "response_format",
        |value| value["type"] == "text",
        NO_STRUCTURE,
    ),
    unsupported("structured_outputs", is_empty, NO_STRUCTURE),
    unsupported("guided_json", never, NO_STRUCTURE),
    unsupported("guided_regex", never, NO_STRUCTURE),
    unsupported("guided_choice", never, NO_STRUCTURE),
    unsupported("guided_grammar", never, NO_STRUCTURE),
    unsupported("audio", is_empty, TEXT_ONLY),
    unsupported(
        "modalities",
        |value| *value == serde_json::json!(["text"]),
        TEXT_ONLY,
    ),
    unsupported("web_search_options", never, NOT_HERE),
    unsupported("prediction", never, NOT_HERE),
    unsupported("reasoning_effort", |value| value == "none", NOT_HERE),
    unsupported("use_beam_search", is_false, NOT_HERE),
    unsupported(
        "length_penalty",
        |value| value.as_f64() == Some(1.0),
        NOT_HERE,
    ),
    unsupported("prompt_logprobs", never, NOT_HERE),
    unsupported("allowed_token_ids", is_empty, NOT_HERE),
    unsupported("bad_words", is_empty, NOT_HERE),
    unsupported("logits_processors", is_empty, NOT_HERE),
    unsupported("truncate_prompt_tokens", never, NOT_HERE),
    unsupported("priority", |value| value.as_f64() == Some(0.0), NOT_HERE),
    unsupported("chat_template", never, OWN_TEMPLATE),
    unsupported("chat_template_kwargs", is_empty, OWN_TEMPLATE),
    unsupported("documents", is_empty, OWN_TEMPLATE),
    unsupported("add_generation_prompt", is_true, OWN_TEMPLATE),
    unsupported("continue_final_message", is_false, OWN_TEMPLATE),
];

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    value == false
}

fn is_true(value: &Value) -> bool {
    value == true
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

impl Params {
    /// Reads everything but the prompt and what each endpoint calls logprobs.
    pub(super) fn read(body: &Fields<'_>, model: &ModelCard) -> Result<Params, ApiError> {
        for field in UNSUPPORTED {
            check_supported(body, field)?;
        }
        let max_tokens = match body.integer("max_completion_tokens", 1..=i64::MAX)? {
            Some(tokens) => Some(tokens),
            None => body.integer("max_tokens", 1..=i64::MAX)?,
        };
        let max_tokens = max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        let min_tokens = body
            .integer("min_tokens", 0..=i64::from(model.max_model_len))?
            .unwrap_or(0) as u32;
        if max_tokens.is_some_and(|most| min_tokens > most) {
            return Err(ApiError::invalid_value(
                "min_tokens",
                "'min_tokens' is more than 'max_tokens'.",
            ));
        }
        let mut stop_tokens = token_list(body, "stop_token_ids", model)?;
        if !body.bool("ignore_eos")?.unwrap_or(false) {
            stop_tokens.extend(&model.stop_tokens);
        }
        Ok(Params {
            sampling: sampling(body, model)?,
            n: body.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1) as u32,
            max_tokens,
            min_tokens,
            stop_tokens,
            stop: stop_strings(body)?,
            include_stop: body.bool("include_stop_str_in_output")?.unwrap_or(false),
            skip_special_tokens: body.bool("skip_special_tokens")?.unwrap_or(true),
            return_token_ids: body.bool("return_token_ids")?.unwrap_or(false),
            stream: streaming(body)?,
        })
    }
}

fn check_supported(body: &Fields<'_>, field: &Unsupported) -> Result<(), ApiError> {
    let Some(value) = body
        .get(field.name)
        .filter(|value| !(field.harmless)(value))
    else {
        return Ok(());
    };
    let name = field.name;
    let given = quoted(&value.to_string());
    Err(ApiError::unsupported(
        name,
        format!("'{name}' can't be {given}: {}.", field.why),
    ))
}

fn sampling(body: &Fields<'_>, model: &ModelCard) -> Result<SamplingParams, ApiError> {
    let seed = match body.get("seed") {
        None => super::random_u64(),
        Some(value) => {
            let seed = integer(value).ok_or_else(|| wrong_kind("seed", "an integer", value))?;
            seed as u64 // Any 64 bits will do, of either sign.
        }
    };
    let top_k = body
        .integer("top_k", -1..=i64::from(u32::MAX))?
        .unwrap_or(0);
    // Further from 1 than this, logits leave what a float can hold.
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
    let Some(biases) = body.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    if biases.len() > MAX_LOGIT_BIASES {
        return Err(ApiError::invalid_value(
            "logit_bias",
            format!("'logit_bias' may have {MAX_LOGIT_BIASES} entries."),
        ));
    }
    let entry = |(key, value): (&String, &Value)| {
        let token = key
            .parse()
            .ok()
            .filter(|token| *token < model.vocabulary)
            .ok_or_else(|| {
                let message = format!(
                    "'logit_bias' names {}; the model's tokens are 0 to {}.",
                    quoted(key),
                    model.vocabulary - 1
                );
                ApiError::invalid_value("logit_bias", message)
            })?;
        match value.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias as f32)),
            _ => Err(ApiError::invalid_value(
                "logit_bias",
                "The values of 'logit_bias' must be numbers from -100 to 100.",
            )),
        }
    };
    biases.entries().map(entry).collect()
}

fn token_list(body: &Fields<'_>, name: &str, model: &ModelCard) -> Result<Vec<TokenId>, ApiError> {
    let items = body.array(name)?.unwrap_or_default();
    if items.len() > MAX_STOP_TOKENS {
        return Err(ApiError::invalid_value(
            name,
            format!("'{name}' may have {MAX_STOP_TOKENS} entries."),
        ));
    }
    items
        .iter()
        .map(|item| token_id(item, name, model))
        .collect()
}

/// A token that the model has.
pub(super) fn token_id(value: &Value, param: &str, model: &ModelCard) -> Result<TokenId, ApiError> {
    let token = integer(value)
        .and_then(|number| u32::try_from(number).ok())
        .filter(|token| *token < model.vocabulary);
    token.ok_or_else(|| {
        let given = quoted(&value.to_string());
        let message = format!(
            "'{param}' has {given}; the model's tokens are integers from 0 to {}.",
            model.vocabulary - 1
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
    if items.len() > MAX_STOP_STRINGS {
        return Err(invalid(format!(
            "'stop' may have {MAX_STOP_STRINGS} strings."
        )));
    }
    let stop = |item: &Value| match item.as_str() {
        None => Err(wrong_kind("stop", "a string or an array of strings", item)),
        Some("") => Err(invalid("'stop' can't be an empty string.".into())),
        Some(text) if text.len() > MAX_STOP_BYTES => Err(invalid(format!(
            "A string of 'stop' may have {MAX_STOP_BYTES} bytes."
        ))),
        Some(text) => Ok(text.to_owned()),
    };
    items.iter().map(stop).collect()
}

fn streaming(body: &Fields<'_>) -> Result<Option<Streaming>, ApiError> {
    let stream = body.bool("stream")?.unwrap_or(false);
    let options = body.object("stream_options")?;
    if options.is_some() && !stream {
        return Err(ApiError::invalid_value(
            "stream_options",
            "'stream_options' needs 'stream': true.",
        ));
    }
    if !stream {
        return Ok(None);
    }
    let option = |name| match &options {
        Some(options) => options.bool(name).map(|value| value.unwrap_or(false)),
        None => Ok(false),
    };
    let include_usage = option("include_usage")?;
    let continuous_usage = option("continuous_usage_stats")? && include_usage;
    Ok(Some(Streaming {
        include_usage,
        continuous_usage,
    }))
}
