//! Reads the `messages` of a chat request.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::json_field::{
    Given, JsonField, JsonText, Object, Scalar, at_most, count_rest, deserialize_fields, must_be,
    unsupported,
};
use super::tool_calls::{EarlierCalls, check_id};
use crate::api::error::{ApiError, quoted};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::text::Message;
use crate::tools::Turn;

const MAX_MESSAGES: usize = 1024;
/// The maximum number of parts of one message.
const MAX_PARTS: usize = 1024;

/// The field `messages`: at most `MAX_MESSAGES` messages.
#[derive(Debug, Default)]
pub(super) struct Messages(Vec<Object<MessageFields>>);

impl Messages {
    /// Returns the messages of the conversation.
    ///
    /// # Errors
    /// If there is no message, or if a message lacks something that its role requires.
    pub(in crate::api) fn check(self) -> Result<Vec<Turn>, ApiError> {
        if self.0.is_empty() {
            let message = "'messages' must contain at least one message.";
            return Err(ApiError::invalid_value("messages", message));
        }
        let message = |(index, Object(message)): (usize, Object<MessageFields>)| {
            message.check(&format!("messages[{index}]"))
        };
        self.0.into_iter().enumerate().map(message).collect()
    }
}

impl<'de> JsonField<'de> for Messages {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        let message = reference::<MessageFields>();
        json!({"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<MessageFields>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Messages, A::Error> {
        at_most(MAX_MESSAGES, "messages", &mut items).map(Messages)
    }
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = Message)]
struct MessageFields {
    /// The writer of the message. `developer` means the same as `system`.
    role: Role,
    /// The text of the message. Only an assistant's message may lack it.
    content: Option<MessageContent>,
    /// The reasoning of an earlier answer. The chat template decides whether the model reads it.
    reasoning_content: Option<JsonText>,
    /// The newer name of `reasoning_content`.
    reasoning: Option<JsonText>,
    /// The tools that the assistant called.
    tool_calls: Option<EarlierCalls>,
    /// The id of the call whose result a message of the role `tool` is, which requires it.
    tool_call_id: Option<JsonText>,
    /// Not supported: `tool_calls` has taken its place.
    function_call: Option<CallsFunction>,
}

impl MessageFields {
    fn check(self, param: &str) -> Result<Turn, ApiError> {
        let role = self.role;
        if let Some(CallsFunction) = self.function_call {
            let param = format!("{param}.function_call");
            let message = "Function calls of this form are not supported. Use 'tool_calls'.";
            return Err(ApiError::unsupported(param, message));
        }
        let calls = match self.tool_calls {
            Some(calls) => calls.check(param)?,
            None => Vec::new(),
        };
        if !calls.is_empty() && role != Role::Assistant {
            let param = format!("{param}.tool_calls");
            let message = format!("'{param}' must stand in a message of the assistant.");
            return Err(ApiError::invalid_value(param, message));
        }
        let content = match self.content {
            None if role == Role::Assistant => String::new(), // As in a message that calls a tool.
            None => {
                return Err(missing(
                    &format!("{param}.content"),
                    MessageContent::EXPECTED,
                ));
            }
            Some(MessageContent::Text(text)) => text,
            Some(MessageContent::Parts(parts)) => {
                let text = |(index, part): (usize, Part)| {
                    part.check(role, &format!("{param}.content[{index}]"))
                };
                parts
                    .into_iter()
                    .enumerate()
                    .map(text)
                    .collect::<Result<_, _>>()?
            }
        };
        if role == Role::Tool {
            let param = format!("{param}.tool_call_id");
            let id = self.tool_call_id;
            let JsonText(id) = id.ok_or_else(|| missing(&param, JsonText::EXPECTED))?;
            check_id(&id, &param)?;
            return Ok(Turn::Result(id, content));
        }
        let reasoning = self.reasoning_content.or(self.reasoning);
        let message = Message {
            role: role.name().to_owned(),
            content,
            reasoning: reasoning
                .filter(|_| role == Role::Assistant)
                .map(|JsonText(text)| text),
            ..Message::default()
        };
        Ok(if calls.is_empty() {
            Turn::Said(message)
        } else {
            Turn::Called(message, calls)
        })
    }
}

/// Returns the error for a field that is absent or `null`.
fn missing(param: &str, expected: &str) -> ApiError {
    let message = format!("'{param}' must be {expected}; got {}.", Given::Null);
    ApiError::invalid_value(param, message)
}

/// The writer of a message. `developer` is another name of `system`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
    Tool,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

impl JsonField<'_> for Role {
    const EXPECTED: &'static str = "'system', 'developer', 'user', 'assistant' or 'tool'";

    fn schema() -> Value {
        json!({"enum": ["system", "developer", "user", "assistant", "tool"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Role, E> {
        match value {
            Scalar::Text("system" | "developer") => Ok(Role::System),
            Scalar::Text("user") => Ok(Role::User),
            Scalar::Text("assistant") => Ok(Role::Assistant),
            Scalar::Text("tool") => Ok(Role::Tool),
            Scalar::Text("function") => Err(unsupported(
                "The role 'function' is not supported. Use the role 'tool'.",
            )),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// The field `function_call`, whatever it has.
#[derive(Clone, Copy, Debug)]
struct CallsFunction;

impl<'de> JsonField<'de> for CallsFunction {
    const EXPECTED: &'static str = "null";

    fn schema() -> Value {
        json!({"type": "null"})
    }

    fn scalar<E: Error>(_: Scalar<'_>) -> Result<CallsFunction, E> {
        Ok(CallsFunction)
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<CallsFunction, A::Error> {
        count_rest(&mut items).map(|_| CallsFunction)
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<CallsFunction, A::Error> {
        Given::object(entries).map(|_| CallsFunction)
    }
}

/// What a message says: a string, or an array of at most `MAX_PARTS` parts.
#[derive(Debug)]
enum MessageContent {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> JsonField<'de> for MessageContent {
    const EXPECTED: &'static str = "a string or an array of text parts";

    fn schema() -> Value {
        let parts = json!({
            "type": "array", "items": reference::<PartFields>(), "maxItems": MAX_PARTS,
        });
        json!({"anyOf": [{"type": "string"}, parts]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<PartFields>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<MessageContent, E> {
        match value {
            Scalar::Text(text) => Ok(MessageContent::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<MessageContent, A::Error> {
        at_most(MAX_PARTS, "parts", &mut items).map(MessageContent::Parts)
    }
}

/// A part of a message. A value that is no object counts as a part without fields.
#[derive(Debug, Default)]
struct Part(PartFields);

/// A part of a message.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = MessagePart)]
struct PartFields {
    /// What the part is.
    #[serde(rename = "type")]
    #[schema(required)]
    kind: Option<PartKind>,
    /// The text of a part of type `text`, which requires it.
    text: Option<JsonText>,
    /// The text of a part of type `refusal`, which only an assistant's message may have.
    refusal: Option<JsonText>,
}

impl Part {
    /// Returns the text of a part of a message with this role.
    fn check(self, role: Role, param: &str) -> Result<String, ApiError> {
        let (name, text) = match self.0.kind {
            Some(PartKind::Text) => ("text", self.0.text),
            Some(PartKind::Refusal) if role == Role::Assistant => ("refusal", self.0.refusal),
            Some(PartKind::Refusal) => {
                let message = not_text("refusal");
                return Err(ApiError::unsupported(format!("{param}.type"), message));
            }
            None => return Err(missing(&format!("{param}.type"), JsonText::EXPECTED)),
        };
        match text {
            Some(JsonText(text)) => Ok(text),
            None => Err(missing(&format!("{param}.{name}"), JsonText::EXPECTED)),
        }
    }
}

impl<'de> JsonField<'de> for Part {
    const EXPECTED: &'static str = "an object";

    fn schema() -> Value {
        reference::<PartFields>()
    }

    fn scalar<E: Error>(_: Scalar<'_>) -> Result<Part, E> {
        Ok(Part::default())
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Part, A::Error> {
        count_rest(&mut items)?;
        Ok(Part::default())
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<Part, A::Error> {
        PartFields::deserialize(MapAccessDeserializer::new(entries)).map(Part)
    }
}

#[derive(Clone, Copy, Debug)]
enum PartKind {
    Text,
    Refusal,
}

impl JsonField<'_> for PartKind {
    const EXPECTED: &'static str = "a string";

    fn schema() -> Value {
        json!({"enum": ["text", "refusal"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<PartKind, E> {
        match value {
            Scalar::Text("text") => Ok(PartKind::Text),
            Scalar::Text("refusal") => Ok(PartKind::Refusal),
            Scalar::Text(kind) => Err(unsupported(not_text(kind))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

fn not_text(kind: &str) -> String {
    format!(
        "Content parts of type {} are not supported: this server reads text only.",
        quoted(kind)
    )
}

deserialize_fields!(
    Messages,
    Role,
    CallsFunction,
    MessageContent,
    Part,
    PartKind
);
