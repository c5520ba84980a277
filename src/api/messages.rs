//! Reads the `messages` of a chat request.

use serde_json::Value;

use super::error::{ApiError, quoted};
use super::fields::{Fields, check_count, described, wrong_type};
use crate::text::Message;

const MAX_MESSAGES: usize = 1024;

/// Reads all messages.
///
/// # Errors
/// If there is no message or there are too many, or if one of them is invalid.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let items = fields.array("messages")?.unwrap_or_default();
    if items.is_empty() {
        let message = "'messages' must contain at least one message.";
        return Err(ApiError::invalid_value("messages", message));
    }
    check_count("messages", "messages", items.len(), MAX_MESSAGES)?;
    let message = |(index, item)| message(item, &format!("messages[{index}]"));
    items.iter().enumerate().map(message).collect()
}

fn message(item: &Value, param: &str) -> Result<Message, ApiError> {
    if !item.is_object() {
        return Err(wrong_type(param, "an object", item));
    }
    let role = role(&item["role"], format!("{param}.role"))?;
    let calls = &item["tool_calls"];
    if !calls.is_null() && calls.as_array().is_none_or(|calls| !calls.is_empty()) {
        let message = "Tool calls are not supported: this server does not call tools.";
        let param = format!("{param}.tool_calls");
        return Err(ApiError::unsupported(param, message));
    }
    let content = match &item["content"] {
        Value::Null if role == "assistant" => String::new(), // As in a message that calls a tool.
        value => content(value, role, &format!("{param}.content"))?,
    };
    Ok(Message {
        role: role.to_owned(),
        content,
    })
}

fn role(value: &Value, param: String) -> Result<&str, ApiError> {
    match value.as_str() {
        Some(role @ ("system" | "user" | "assistant")) => Ok(role),
        Some("developer") => Ok("system"),
        Some(role @ ("tool" | "function")) => {
            let message =
                format!("The role '{role}' is not supported: this server does not call tools.");
            Err(ApiError::unsupported(param, message))
        }
        _ => {
            let message = format!(
                "'{param}' must be 'system', 'developer', 'user' or 'assistant'; got {}.",
                described(value)
            );
            Err(ApiError::invalid_value(param, message))
        }
    }
}

/// Returns the text of a message's content: a string, or an array of text parts.
fn content(value: &Value, role: &str, param: &str) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            let expected = "a string or an array of text parts";
            return Err(wrong_type(param, expected, other));
        }
    };
    let text = |(index, part)| text_part(part, role, &format!("{param}[{index}]"));
    parts.iter().enumerate().map(text).collect()
}

fn text_part<'a>(part: &'a Value, role: &str, param: &str) -> Result<&'a str, ApiError> {
    let string = |field: &str| {
        let value = &part[field];
        let wrong = || wrong_type(&format!("{param}.{field}"), "a string", value);
        value.as_str().ok_or_else(wrong)
    };
    match string("type")? {
        "text" => string("text"),
        "refusal" if role == "assistant" => string("refusal"),
        kind => {
            let message = format!(
                "Content parts of type {} are not supported: this server reads text only.",
                quoted(kind)
            );
            Err(ApiError::unsupported(format!("{param}.type"), message))
        }
    }
}
