//! Fields that the server knows but does not support, and their harmless values.

use serde_json::Value;

use super::error::{ApiError, quoted};
use super::fields::{Fields, integer};

/// A field that the server does not support.
struct UnsupportedField {
    name: &'static str,
    /// Returns whether a value asks only for what the server does anyway.
    is_harmless: fn(&Value) -> bool,
    reason: &'static str,
}

const fn unsupported(
    name: &'static str,
    is_harmless: fn(&Value) -> bool,
    reason: &'static str,
) -> UnsupportedField {
    UnsupportedField {
        name,
        is_harmless,
        reason,
    }
}

const NO_TOOLS: &str = "this server does not call tools";
const NO_STRUCTURED_OUTPUT: &str = "this server does not constrain the structure of the output";
const TEXT_ONLY: &str = "this server reads and writes text only";
const OWN_TEMPLATE: &str = "this server always uses the model's own chat template";
const NOT_SUPPORTED: &str = "this server does not implement the field";

/// The fields that the server does not support. `null` is not checked: it means an absent field.
const UNSUPPORTED: &[UnsupportedField] = &[
    unsupported(
        "best_of",
        |value| integer(value) == Some(1),
        "this server returns every answer that it generates; set 'n' instead",
    ),
    unsupported("echo", is_false, "this server does not echo the prompt"),
    unsupported(
        "suffix",
        is_empty,
        "this server does not fill in text before a suffix",
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
        NO_STRUCTURED_OUTPUT,
    ),
    unsupported("structured_outputs", is_empty, NO_STRUCTURED_OUTPUT),
    unsupported("guided_json", never, NO_STRUCTURED_OUTPUT),
    unsupported("guided_regex", never, NO_STRUCTURED_OUTPUT),
    unsupported("guided_choice", never, NO_STRUCTURED_OUTPUT),
    unsupported("guided_grammar", never, NO_STRUCTURED_OUTPUT),
    unsupported("audio", is_empty, TEXT_ONLY),
    unsupported(
        "modalities",
        |value| *value == serde_json::json!(["text"]),
        TEXT_ONLY,
    ),
    unsupported("web_search_options", never, NOT_SUPPORTED),
    unsupported("prediction", never, NOT_SUPPORTED),
    unsupported("reasoning_effort", |value| value == "none", NOT_SUPPORTED),
    unsupported("use_beam_search", is_false, NOT_SUPPORTED),
    unsupported(
        "length_penalty",
        |value| value.as_f64() == Some(1.0),
        NOT_SUPPORTED,
    ),
    unsupported("prompt_logprobs", never, NOT_SUPPORTED),
    unsupported("allowed_token_ids", is_empty, NOT_SUPPORTED),
    unsupported("bad_words", is_empty, NOT_SUPPORTED),
    unsupported("logits_processors", is_empty, NOT_SUPPORTED),
    unsupported("truncate_prompt_tokens", never, NOT_SUPPORTED),
    unsupported(
        "priority",
        |value| value.as_f64() == Some(0.0),
        NOT_SUPPORTED,
    ),
    unsupported("chat_template", never, OWN_TEMPLATE),
    unsupported("chat_template_kwargs", is_empty, OWN_TEMPLATE),
    unsupported("documents", is_empty, OWN_TEMPLATE),
    unsupported("add_generation_prompt", is_true, OWN_TEMPLATE),
    unsupported("continue_final_message", is_false, OWN_TEMPLATE),
];

/// Checks that a request uses no unsupported field.
///
/// # Errors
/// If an unsupported field has a value that is not harmless.
pub(super) fn check(body: &Fields<'_>) -> Result<(), ApiError> {
    let rejected = UNSUPPORTED.iter().find_map(|field| {
        let value = body.get(field.name)?;
        (!(field.is_harmless)(value)).then_some((field, value))
    });
    let Some((UnsupportedField { name, reason, .. }, value)) = rejected else {
        return Ok(());
    };
    let value = quoted(&value.to_string());
    let message = format!("'{name}' does not support the value {value}: {reason}. Omit the field.");
    Err(ApiError::unsupported(*name, message))
}

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
