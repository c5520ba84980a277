//! Reads the `messages` of a chat request.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess};

use super::error::{ApiError, quoted};
use super::fields::{
    Given, JsonField, JsonText, Object, Scalar, count_rest, deserialize_fields, may_contain,
    must_be, unsupported,
};
use crate::text::Message;

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
    pub(super) fn check(self) -> Result<Vec<Message>, ApiError> {
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

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Messages, A::Error> {
        at_most(MAX_MESSAGES, "messages", &mut items).map(Messages)
    }
}

/// Reads the items of an array, which may be `limit`. An error calls them `what`.
fn at_most<'de, T, A>(limit: usize, what: &str, items: &mut A) -> Result<Vec<T>, A::Error>
where
    T: Deserialize<'de>,
    A: SeqAccess<'de>,
{
    let mut read = Vec::new();
    while read.len() < limit
        && let Some(item) = items.next_element()?
    {
        read.push(item);
    }
    match count_rest(items)? {
        0 => Ok(read),
        more => Err(may_contain(limit, what, limit + more)),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MessageFields {
    role: Option<Role>,
    content: Option<MessageContent>,
    /// The server's own name of reasoning that a client sends back.
    reasoning_content: Option<JsonText>,
    /// The newer name of the same field.
    reasoning: Option<JsonText>,
    tool_calls: Option<CallsTools>,
    function_call: Option<CallsTools>,
}

impl MessageFields {
    fn check(self, param: &str) -> Result<Message, ApiError> {
        let Some(role) = self.role else {
            return Err(missing(&format!("{param}.role"), Role::EXPECTED));
        };
        for (name, calls) in [
            ("tool_calls", self.tool_calls),
            ("function_call", self.function_call),
        ] {
            if let Some(CallsTools(true)) = calls {
                let message = "Tool calls are not supported: this server does not call tools.";
                return Err(ApiError::unsupported(format!("{param}.{name}"), message));
            }
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
        let reasoning = self.reasoning_content.or(self.reasoning);
        Ok(Message {
            role: role.name().to_owned(),
            content,
            reasoning: reasoning
                .filter(|_| role == Role::Assistant)
                .map(|JsonText(text)| text),
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
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

impl JsonField<'_> for Role {
    const EXPECTED: &'static str = "'system', 'developer', 'user' or 'assistant'";

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Role, E> {
        match value {
            Scalar::Text("system" | "developer") => Ok(Role::System),
            Scalar::Text("user") => Ok(Role::User),
            Scalar::Text("assistant") => Ok(Role::Assistant),
            Scalar::Text(role @ ("tool" | "function")) => Err(unsupported(format_args!(
                "The role '{role}' is not supported: this server does not call tools."
            ))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// Whether a message calls tools. An empty array calls none.
#[derive(Clone, Copy, Debug)]
struct CallsTools(bool);

impl<'de> JsonField<'de> for CallsTools {
    const EXPECTED: &'static str = "an empty array";

    fn scalar<E: Error>(_: Scalar<'_>) -> Result<CallsTools, E> {
        Ok(CallsTools(true))
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<CallsTools, A::Error> {
        Ok(CallsTools(count_rest(&mut items)? > 0))
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<CallsTools, A::Error> {
        Given::object(entries).map(|_| CallsTools(true))
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

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PartFields {
    #[serde(rename = "type")]
    kind: Option<PartKind>,
    text: Option<JsonText>,
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

deserialize_fields!(Messages, Role, CallsTools, MessageContent, Part, PartKind);
