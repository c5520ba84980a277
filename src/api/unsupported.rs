//! Fields that the server knows but does not support, and their harmless values.

use serde_json::Value;

use super::error::{ApiError, quoted};
use super::fields::{Fields, integer};

/// A field that the server does not support: its name, whether a value asks only for what the
/// server does anyway, and the reason.
type UnsupportedField = (&'static str, fn(&Value) -> bool, &'static str);

const ONE_ANSWER: &str = "this server returns every answer that it generates; set 'n' instead";
const NO_ECHO: &str = "this server does not echo the prompt";
const NO_SUFFIX: &str = "this server does not fill in text before a suffix";
const NO_TOOLS: &str = "this server does not call tools";
const NO_STRUCTURED_OUTPUT: &str = "this server does not constrain the structure of the output";
const TEXT_ONLY: &str = "this server reads and writes text only";
const OWN_TEMPLATE: &str = "this server always uses the model's own chat template";
const NOT_SUPPORTED: &str = "this server does not implement the field";

/// The fields that the server does not support. `null` is not checked: it means an absent field.
#[rustfmt::skip] // One field, one line, so that the list reads as a table.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("best_of", |value| integer(value) == Some(1), ONE_ANSWER),
    ("echo", is_false, NO_ECHO),
    ("suffix", is_empty, NO_SUFFIX),
    ("tools", is_empty, NO_TOOLS),
    ("functions", is_empty, NO_TOOLS),
    ("tool_choice", |value| value == "none" || value == "auto", NO_TOOLS),
    ("function_call", |value| value == "none" || value == "auto", NO_TOOLS),
    ("response_format", |value| value["type"] == "text", NO_STRUCTURED_OUTPUT),
    ("structured_outputs", is_empty, NO_STRUCTURED_OUTPUT),
    ("guided_json", never, NO_STRUCTURED_OUTPUT),
    ("guided_regex", never, NO_STRUCTURED_OUTPUT),
    ("guided_choice", never, NO_STRUCTURED_OUTPUT),
    ("guided_grammar", never, NO_STRUCTURED_OUTPUT),
    ("audio", is_empty, TEXT_ONLY),
    ("modalities", |value| *value == serde_json::json!(["text"]), TEXT_ONLY),
    ("web_search_options", never, NOT_SUPPORTED),
    ("prediction", never, NOT_SUPPORTED),
    ("reasoning_effort", |value| value == "none", NOT_SUPPORTED),
    ("use_beam_search", is_false, NOT_SUPPORTED),
    ("length_penalty", |value| value.as_f64() == Some(1.0), NOT_SUPPORTED),
    ("prompt_logprobs", never, NOT_SUPPORTED),
    ("allowed_token_ids", is_empty, NOT_SUPPORTED),
    ("bad_words", is_empty, NOT_SUPPORTED),
    ("logits_processors", is_empty, NOT_SUPPORTED),
    ("truncate_prompt_tokens", never, NOT_SUPPORTED),
    ("priority", |value| value.as_f64() == Some(0.0), NOT_SUPPORTED),
    ("chat_template", never, OWN_TEMPLATE),
    ("chat_template_kwargs", is_empty, OWN_TEMPLATE),
    ("documents", is_empty, OWN_TEMPLATE),
    ("add_generation_prompt", |value| value == true, OWN_TEMPLATE),
    ("continue_final_message", is_false, OWN_TEMPLATE),
];

/// Checks that a request uses no unsupported field.
///
/// # Errors
/// If an unsupported field has a value that is not harmless.
pub(super) fn check(body: &Fields<'_>) -> Result<(), ApiError> {
    for (name, is_harmless, reason) in UNSUPPORTED {
        if let Some(value) = body.get(name)
            && !is_harmless(value)
        {
            let value = quoted(&value.to_string());
            let message =
                format!("'{name}' does not support the value {value}: {reason}. Omit the field.");
            return Err(ApiError::unsupported(*name, message));
        }
    }
    Ok(())
}

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    value == false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
