//! Fields that the server knows but does not support, and their harmless values.
//!
//! The list has the fields of OpenAI, vLLM, SGLang and llama.cpp that would change the text, its
//! length or its log-probabilities. The list omits fields that only another field of the list gives
//! a meaning, and fields about speed, caches and identities: ignoring them changes no answer.

use serde_json::{Value, json};

use super::json_object::JsonObject;
use crate::api::error::{ApiError, quoted};

/// A field that the server does not support: its name, the values that ask only for what the server
/// does anyway, and the reason.
pub(in crate::api) type UnsupportedField = (&'static str, Harmless, &'static str);

/// No harmless value is as long as this, as JSON.
const MAX_HARMLESS_BYTES: usize = 256;

const ONE_ANSWER: &str = "this server returns every answer that it generates; set 'n' instead";
const NO_ECHO: &str = "this endpoint does not echo the conversation";
const NO_SUFFIX: &str = "this server does not fill in text before a suffix";
const TOOLS: &str = "set 'tools' and 'tool_choice' of a chat instead";
const NO_TOOLS: &str = "only chats call tools";
const FREE_TEXT: &str = "set 'structured_outputs' instead";
const TEXT_ONLY: &str = "this server reads and writes text only";
const OWN_TEMPLATE: &str = "this server always uses the model's own chat template";
const OWN_TOKENS: &str = "the chat template writes the special tokens itself";
const MAX_TOKENS: &str = "set 'max_tokens' instead";
const REPETITION: &str = "set 'repetition_penalty' instead";
const KEEPS_STOP: &str = "set 'include_stop_str_in_output' instead";
const LOGPROBS: &str = "set 'logprobs' instead";
const NO_REASONING: &str = "this endpoint has no reasoning";
const SEPARATE: &str = "this server returns reasoning in a field of its own";
const NO_TEMPLATE: &str = "this endpoint uses no chat template";
const ONE_MODEL: &str = "this server serves one model, without adapters";
const NOT_SUPPORTED: &str = "this server does not implement the field";

/// The values of an unsupported field that the server accepts, beside `null`.
#[derive(Clone, Copy)]
pub(in crate::api) enum Harmless {
    Nothing,
    /// These, as JSON. A number may be written in another way.
    Is(&'static [&'static str]),
    /// An empty string, array or object.
    Empty,
    AtMostZero,
    Negative,
}

use Harmless::{AtMostZero, Empty, Is, Negative, Nothing};

impl Harmless {
    fn allows(self, value: &Value) -> bool {
        match self {
            _ if value.is_null() => true,
            Nothing => false,
            Is(texts) => texts.iter().any(|text| equal(&known(text), value)),
            Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(items) => items.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                _ => false,
            },
            AtMostZero => value.as_f64().is_some_and(|number| number <= 0.0),
            Negative => value.as_f64().is_some_and(|number| number < 0.0),
        }
    }

    fn schema(self) -> Value {
        match self {
            Nothing => json!({"type": "null"}),
            Is(texts) => {
                let values = texts.iter().map(|text| known(text));
                json!({"enum": values.chain([Value::Null]).collect::<Vec<_>>()})
            }
            Empty => json!({
                "type": ["string", "array", "object", "null"],
                "maxLength": 0,
                "maxItems": 0,
                "maxProperties": 0,
            }),
            AtMostZero => json!({"type": ["number", "null"], "maximum": 0}),
            Negative => json!({"type": ["number", "null"], "exclusiveMaximum": 0}),
        }
    }
}

fn known(text: &str) -> Value {
    serde_json::from_str(text).expect("the list and a checked body are JSON")
}

fn equal(known: &Value, value: &Value) -> bool {
    match (known.as_f64(), value.as_f64()) {
        (Some(known), Some(value)) => known == value,
        _ => known == value,
    }
}

/// The fields that neither endpoint supports. `null` is not checked: it means an absent field.
#[rustfmt::skip] // One field, one line, so that the list reads as a table.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("best_of", Is(&["1"]), ONE_ANSWER),
    ("suffix", Empty, NO_SUFFIX),
    ("functions", Empty, TOOLS),
    ("function_call", Is(&[r#""none""#, r#""auto""#]), TOOLS),
    ("structural_tag", Empty, FREE_TEXT),
    ("guided_decoding", Empty, FREE_TEXT),
    ("audio", Empty, TEXT_ONLY),
    ("modalities", Is(&[r#"["text"]"#]), TEXT_ONLY),
    ("image_data", Empty, TEXT_ONLY),
    ("audio_data", Empty, TEXT_ONLY),
    ("video_data", Empty, TEXT_ONLY),
    ("multi_modal_data", Empty, TEXT_ONLY),
    ("mm_processor_kwargs", Empty, TEXT_ONLY),
    ("prompt_embeds", Empty, TEXT_ONLY),
    ("input_embeds", Empty, TEXT_ONLY),
    ("web_search_options", Nothing, NOT_SUPPORTED),
    ("prediction", Nothing, NOT_SUPPORTED),
    ("verbosity", Is(&[r#""medium""#]), NOT_SUPPORTED),
    ("reasoning_effort", Is(&[r#""none""#]), NO_REASONING),
    ("thinking_token_budget", Is(&["-1"]), NO_REASONING),
    ("thinking_budget_tokens", Is(&["-1"]), NO_REASONING),
    ("separate_reasoning", Is(&["true"]), SEPARATE),
    ("stream_reasoning", Is(&["true"]), SEPARATE),
    ("reasoning_format", Is(&[r#""auto""#, r#""deepseek""#]), SEPARATE),
    ("use_beam_search", Is(&["false"]), NOT_SUPPORTED),
    ("length_penalty", Is(&["1"]), NOT_SUPPORTED),
    ("logprob_token_ids", Empty, NOT_SUPPORTED),
    ("allowed_token_ids", Empty, NOT_SUPPORTED),
    ("bad_words", Empty, NOT_SUPPORTED),
    ("repetition_detection", Empty, NOT_SUPPORTED),
    ("watermarking", Is(&["false"]), NOT_SUPPORTED),
    ("logits_processors", Empty, NOT_SUPPORTED),
    ("custom_logit_processor", Empty, NOT_SUPPORTED),
    ("custom_params", Empty, NOT_SUPPORTED),
    ("vllm_xargs", Empty, NOT_SUPPORTED),
    ("priority", Is(&["0"]), NOT_SUPPORTED),
    ("stop_regex", Empty, NOT_SUPPORTED),
    ("no_stop_trim", Is(&["false"]), KEEPS_STOP),
    ("session_params", Empty, NOT_SUPPORTED),
    ("return_hidden_states", Is(&["false"]), NOT_SUPPORTED),
    ("lora_path", Empty, ONE_MODEL),
    ("lora", Empty, ONE_MODEL),
    ("n_predict", Is(&["-1"]), MAX_TOKENS),
    ("max_new_tokens", Nothing, MAX_TOKENS),
    ("n_cmpl", Is(&["1"]), ONE_ANSWER),
    ("n_probs", Is(&["0"]), LOGPROBS),
    ("post_sampling_probs", Is(&["false"]), LOGPROBS),
    ("repeat_penalty", Is(&["1"]), REPETITION),
    ("typical_p", Is(&["1"]), NOT_SUPPORTED),
    ("tfs_z", Is(&["1"]), NOT_SUPPORTED),
    ("top_a", Is(&["0"]), NOT_SUPPORTED),
    ("top_n_sigma", AtMostZero, NOT_SUPPORTED),
    ("min_keep", Is(&["0"]), NOT_SUPPORTED),
    ("mirostat", Is(&["0"]), NOT_SUPPORTED),
    ("dynatemp_range", Is(&["0"]), NOT_SUPPORTED),
    ("xtc_probability", Is(&["0"]), NOT_SUPPORTED),
    ("dry_multiplier", Is(&["0"]), NOT_SUPPORTED),
    ("adaptive_target", Negative, NOT_SUPPORTED),
    ("samplers", Empty, NOT_SUPPORTED),
    ("n_indent", Is(&["0"]), NOT_SUPPORTED),
    ("t_max_predict_ms", AtMostZero, NOT_SUPPORTED),
    ("chat_template", Nothing, OWN_TEMPLATE),
    ("documents", Empty, OWN_TEMPLATE),
];

/// The fields of the list that `/v1/chat/completions` supports.
pub(in crate::api) const SUPPORTED_BY_CHAT: &[&str] = &[
    "reasoning_effort",
    "thinking_token_budget",
    "thinking_budget_tokens",
];

/// The fields that `/v1/chat/completions` does not support either. A chat template writes the
/// special tokens itself.
pub(in crate::api) const OF_CHAT: &[UnsupportedField] = &[
    ("add_special_tokens", Is(&["false"]), OWN_TOKENS),
    ("echo", Is(&["false"]), NO_ECHO),
];

/// The fields that text without a conversation does not support.
pub(in crate::api) const OF_TEXT: &[UnsupportedField] = &[
    ("tools", Empty, NO_TOOLS),
    ("tool_choice", Is(&[r#""none""#, r#""auto""#]), NO_TOOLS),
];

/// The fields that `/v1/completions` does not support either.
pub(in crate::api) const OF_COMPLETIONS: &[UnsupportedField] = &[
    ("tools", Empty, NO_TOOLS),
    ("tool_choice", Is(&[r#""none""#, r#""auto""#]), NO_TOOLS),
    ("add_generation_prompt", Is(&["true"]), NO_TEMPLATE),
    ("continue_final_message", Is(&["false"]), NO_TEMPLATE),
    ("chat_template_kwargs", Empty, NO_TEMPLATE),
    ("enable_thinking", Is(&["false"]), NO_TEMPLATE),
];

/// The fields that `/completion` and `/generate` do not support either.
pub(in crate::api) const OF_NATIVE: &[UnsupportedField] = &[
    ("add_generation_prompt", Is(&["true"]), NO_TEMPLATE),
    ("continue_final_message", Is(&["false"]), NO_TEMPLATE),
    ("chat_template_kwargs", Empty, NO_TEMPLATE),
    ("enable_thinking", Is(&["false"]), NO_TEMPLATE),
    ("echo", Is(&["false"]), "use POST /v1/completions"),
    (
        "stream_options",
        Empty,
        "the end of a stream always has the token counts",
    ),
];

/// Returns the schemas of the unsupported fields, by name. `own` are the fields that one endpoint
/// adds to the list.
pub(in crate::api) fn schemas(
    own: &[UnsupportedField],
) -> impl Iterator<Item = (&'static str, Value)> {
    schemas_except(own, &[])
}

/// As `schemas`, without the fields that an endpoint supports.
pub(in crate::api) fn schemas_except(
    own: &[UnsupportedField],
    supported: &'static [&'static str],
) -> impl Iterator<Item = (&'static str, Value)> {
    UNSUPPORTED
        .iter()
        .chain(own)
        .filter(|(name, _, _)| !supported.contains(name))
        .map(|(name, harmless, reason)| {
            let mut schema = harmless.schema();
            schema["description"] = format!("Not supported: {reason}.").into();
            (*name, schema)
        })
}

/// Checks that a request uses no unsupported field. `own` are the fields that the endpoint adds to
/// the list.
///
/// # Errors
/// If an unsupported field has a value that is not harmless.
pub(in crate::api) fn check(
    body: &JsonObject<'_>,
    own: &[UnsupportedField],
) -> Result<(), ApiError> {
    check_except(body, own, &[])
}

/// As `check`, for an endpoint that supports some of the fields.
///
/// # Errors
/// As `check`.
pub(in crate::api) fn check_except(
    body: &JsonObject<'_>,
    own: &[UnsupportedField],
    supported: &[&str],
) -> Result<(), ApiError> {
    for (field, text) in body.fields() {
        let mut refused = UNSUPPORTED.iter().chain(own);
        let Some((name, harmless, reason)) = refused.find(|(name, _, _)| *name == field) else {
            continue;
        };
        let is_short = text.len() <= MAX_HARMLESS_BYTES;
        if supported.contains(name) || is_short && harmless.allows(&known(text)) {
            continue;
        }
        let message = format!(
            "'{name}' does not support the value {}: {reason}. Omit the field.",
            quoted(text)
        );
        return Err(ApiError::unsupported(body.path(name), message));
    }
    Ok(())
}
