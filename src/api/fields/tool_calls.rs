//! Calls of tools on the wire: in earlier messages of a conversation, and in answers.

use serde::Deserialize;
use serde::Serialize;
use serde::de::SeqAccess;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::json_field::{JsonField, JsonText, Object, at_most, deserialize_fields};
use super::tool_fields::{FunctionKind, check_name};
use crate::api::error::ApiError;
use crate::api::ids::random_id;
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::tools::{CallDelta, CalledTool};

const MAX_CALLS: usize = 128;
const MAX_ID_BYTES: usize = 256;

/// The calls of an earlier message.
#[derive(Debug)]
pub(super) struct EarlierCalls(Vec<Object<EarlierCall>>);

impl EarlierCalls {
    /// Returns the calls of the message `param`.
    ///
    /// # Errors
    /// If the arguments of a call are no JSON object.
    pub(in crate::api) fn check(self, param: &str) -> Result<Vec<CalledTool>, ApiError> {
        let call = |(index, Object(call)): (usize, Object<EarlierCall>)| {
            let path = format!("{param}.tool_calls[{index}]");
            let JsonText(id) = call.id.unwrap_or_else(|| JsonText(String::new()));
            check_id(&id, &format!("{path}.id"))?;
            let Object(function) = call.function;
            let JsonText(name) = function.name;
            check_name(&name, &format!("{path}.function.name"))?;
            let arguments = function.arguments.map(|JsonText(text)| text);
            let param = format!("{path}.function.arguments");
            let arguments = arguments_object(&arguments.unwrap_or_default(), &param)?;
            Ok(CalledTool {
                id,
                name,
                arguments,
            })
        };
        self.0.into_iter().enumerate().map(call).collect()
    }
}

/// Checks the length of a call's id.
pub(in crate::api) fn check_id(id: &str, param: &str) -> Result<(), ApiError> {
    if id.len() <= MAX_ID_BYTES {
        return Ok(());
    }
    let message = format!(
        "'{param}' may have at most {MAX_ID_BYTES} bytes; got {}.",
        id.len()
    );
    Err(ApiError::invalid_value(param, message))
}

/// Reads the arguments of a call, which are JSON in a string. An empty string has none.
pub(in crate::api) fn arguments_object(
    text: &str,
    param: &str,
) -> Result<Map<String, Value>, ApiError> {
    let text = if text.trim().is_empty() { "{}" } else { text };
    serde_json::from_str(text).map_err(|_| {
        let message = format!("'{param}' must be a JSON object in a string.");
        ApiError::invalid_value(param, message)
    })
}

/// A call of a tool in an earlier message.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = MessageToolCall)]
struct EarlierCall {
    /// The id of the call. The result names it.
    id: Option<JsonText>,
    /// What the tool is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: Option<FunctionKind>,
    /// The function that the model called.
    #[schema(value_type = EarlierFunction)]
    function: Object<EarlierFunction>,
}

/// A function that the model called.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = MessageFunctionCall)]
struct EarlierFunction {
    /// The name of the function.
    name: JsonText,
    /// The arguments: a JSON object in a string.
    arguments: Option<JsonText>,
}

impl<'de> JsonField<'de> for EarlierCalls {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        json!({"type": "array", "items": reference::<EarlierCall>(), "maxItems": MAX_CALLS})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<EarlierCall>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<EarlierCalls, A::Error> {
        at_most(MAX_CALLS, "calls", &mut items).map(EarlierCalls)
    }
}

deserialize_fields!(EarlierCalls);

/// A call of a tool, or in a chunk a part of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct ToolCall {
    /// The number of the call, in a chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    /// The id of the call. In chunks, only the first of a call has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// `function`, beside the id.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// The function.
    function: FunctionCall,
}

/// A call of a function, or in a chunk a part of one.
#[derive(Clone, Debug, Serialize, ToSchema)]
struct FunctionCall {
    /// The name of the function, beside the id.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The arguments: a JSON object in a string. In chunks, the next part of it.
    arguments: String,
}

impl ToolCall {
    /// Returns the part of a call that a chunk has. `begun` counts the calls that have begun.
    pub(in crate::api) fn of_delta(delta: CallDelta, begun: &mut u32) -> ToolCall {
        let (id, name, arguments) = match delta {
            CallDelta::Begins(name) => {
                *begun += 1;
                (Some(random_id("call_")), Some(name), String::new())
            }
            CallDelta::Arguments(arguments) => (None, None, arguments),
        };
        ToolCall {
            index: Some(*begun - 1),
            kind: id.is_some().then_some("function"),
            id,
            function: FunctionCall { name, arguments },
        }
    }

    /// Returns the whole calls.
    pub(in crate::api) fn whole(deltas: Vec<CallDelta>) -> Vec<ToolCall> {
        whole_calls(deltas)
            .into_iter()
            .map(|(name, arguments)| ToolCall {
                index: None,
                id: Some(random_id("call_")),
                kind: Some("function"),
                function: FunctionCall {
                    name: Some(name),
                    arguments,
                },
            })
            .collect()
    }
}

/// Returns the name and the arguments of each call.
pub(in crate::api) fn whole_calls(deltas: Vec<CallDelta>) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in deltas {
        match delta {
            CallDelta::Begins(name) => calls.push((name, String::new())),
            CallDelta::Arguments(part) => {
                let last = calls.last_mut();
                last.expect("a call begins before its arguments").1 += &part;
            }
        }
    }
    calls
}
