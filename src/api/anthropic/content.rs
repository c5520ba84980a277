//! Reads the `messages` and the `system` of a request.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::error::{ApiError, quoted};
use crate::api::fields::json_field::{
    Bool, JsonField, JsonText, Object, Scalar, at_most, deserialize_fields, must_be, unsupported,
};
use crate::api::fields::tool_calls::{arguments_object, check_id};
use crate::api::fields::tool_fields::check_name;
use crate::api::fields::turn_list::{BETWEEN, TurnList, join};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::text::Message;
use crate::tools::{CalledTool, Turn};

const MAX_MESSAGES: usize = 1024;
/// The maximum number of blocks of one message.
const MAX_BLOCKS: usize = 1024;

/// The field `messages`.
#[derive(Debug, Default)]
pub(super) struct AnthropicMessages(Vec<Object<AnthropicTurn>>);

impl AnthropicMessages {
    /// Returns the conversation: `turns`, and then the messages.
    ///
    /// # Errors
    /// If there is no message, or one is not valid.
    pub(super) fn check(self, mut turns: TurnList) -> Result<Vec<Turn>, ApiError> {
        if self.0.is_empty() {
            let message = "'messages' must contain at least one message.";
            return Err(ApiError::invalid_value("messages", message));
        }
        for (index, Object(message)) in self.0.into_iter().enumerate() {
            let parts = message.parts(&format!("messages[{index}]"))?;
            parts.add_to(&mut turns);
        }
        Ok(turns.finish())
    }
}

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicTurn {
    /// The writer of the message.
    role: TurnRole,
    /// What the message says.
    content: BlockContent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnRole {
    System,
    User,
    Assistant,
}

impl TurnRole {
    fn name(self) -> &'static str {
        match self {
            TurnRole::System => "system",
            TurnRole::User => "user",
            TurnRole::Assistant => "assistant",
        }
    }
}

impl JsonField<'_> for TurnRole {
    const EXPECTED: &'static str = "'user', 'assistant' or 'system'";

    fn schema() -> Value {
        json!({"enum": ["user", "assistant", "system"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<TurnRole, E> {
        match value {
            Scalar::Text("system") => Ok(TurnRole::System),
            Scalar::Text("user") => Ok(TurnRole::User),
            Scalar::Text("assistant") => Ok(TurnRole::Assistant),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// A string, or an array of blocks.
#[derive(Debug)]
enum BlockContent {
    Text(String),
    Blocks(Vec<Object<AnthropicBlock>>),
}

impl<'de> JsonField<'de> for BlockContent {
    const EXPECTED: &'static str = "a string or an array of blocks";

    fn schema() -> Value {
        let blocks = json!({
            "type": "array", "items": reference::<AnthropicBlock>(), "maxItems": MAX_BLOCKS,
        });
        json!({"anyOf": [{"type": "string"}, blocks]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<AnthropicBlock>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<BlockContent, E> {
        match value {
            Scalar::Text(text) => Ok(BlockContent::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<BlockContent, A::Error> {
        at_most(MAX_BLOCKS, "blocks", &mut items).map(BlockContent::Blocks)
    }
}

/// A string, or an array of blocks of text.
#[derive(Debug)]
pub(super) enum TextContent {
    Text(String),
    Blocks(Vec<Object<TextBlock>>),
}

impl TextContent {
    /// Returns the text.
    pub(super) fn text(self) -> String {
        match self {
            TextContent::Text(text) => text,
            TextContent::Blocks(blocks) => {
                let texts = blocks.into_iter().map(|Object(block)| block.text.0);
                texts.collect::<Vec<_>>().join(BETWEEN)
            }
        }
    }
}

impl<'de> JsonField<'de> for TextContent {
    const EXPECTED: &'static str = "a string or an array of text blocks";

    fn schema() -> Value {
        let blocks = json!({
            "type": "array", "items": reference::<TextBlock>(), "maxItems": MAX_BLOCKS,
        });
        json!({"anyOf": [{"type": "string"}, blocks]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<TextBlock>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<TextContent, E> {
        match value {
            Scalar::Text(text) => Ok(TextContent::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<TextContent, A::Error> {
        at_most(MAX_BLOCKS, "blocks", &mut items).map(TextContent::Blocks)
    }
}

/// A block of text.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct TextBlock {
    /// What the block is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: TextKind,
    /// The text.
    text: JsonText,
}

#[derive(Debug)]
struct TextKind;

impl JsonField<'_> for TextKind {
    const EXPECTED: &'static str = "'text'";

    fn schema() -> Value {
        json!({"enum": ["text"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<TextKind, E> {
        match value {
            Scalar::Text("text") => Ok(TextKind),
            Scalar::Text(kind) => Err(no_block(kind)),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

fn no_block<E: Error>(kind: &str) -> E {
    unsupported(format_args!(
        "Blocks of type {} are not supported here: this server reads text only.",
        quoted(kind)
    ))
}

/// A block of a message.
#[derive(Debug, Deserialize, ToSchema)]
struct AnthropicBlock {
    /// What the block is.
    #[serde(rename = "type")]
    kind: BlockType,
    /// The text of a block of type `text`.
    text: Option<JsonText>,
    /// The reasoning in a block of type `thinking`.
    thinking: Option<JsonText>,
    /// The id of a call.
    id: Option<JsonText>,
    /// The tool that a block of type `tool_use` calls.
    name: Option<JsonText>,
    /// The arguments of the call.
    input: Option<CallInput>,
    /// The id of the call whose result a block of type `tool_result` is.
    tool_use_id: Option<JsonText>,
    /// The result.
    content: Option<TextContent>,
    /// Whether the call failed. The model reads the result either way.
    #[expect(dead_code, reason = "only its type is checked")]
    is_error: Option<Bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockType {
    Text,
    Thinking,
    RedactedThinking,
    ToolUse,
    ToolResult,
}

impl JsonField<'_> for BlockType {
    const EXPECTED: &'static str = "a string";

    fn schema() -> Value {
        json!({"enum": ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<BlockType, E> {
        match value {
            Scalar::Text("text") => Ok(BlockType::Text),
            Scalar::Text("thinking") => Ok(BlockType::Thinking),
            Scalar::Text("redacted_thinking") => Ok(BlockType::RedactedThinking),
            Scalar::Text("tool_use") => Ok(BlockType::ToolUse),
            Scalar::Text("tool_result") => Ok(BlockType::ToolResult),
            Scalar::Text(kind) => Err(no_block(kind)),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// The arguments of a call: the text of a JSON object.
#[derive(Debug)]
struct CallInput(String);

impl<'de> Deserialize<'de> for CallInput {
    fn deserialize<D: serde::Deserializer<'de>>(value: D) -> Result<CallInput, D::Error> {
        let text = <&RawValue>::deserialize(value)?.get();
        match text.starts_with('{') {
            true => Ok(CallInput(text.to_owned())),
            false => Err(D::Error::custom("must be an object.")),
        }
    }
}

impl utoipa::PartialSchema for CallInput {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        crate::api::openapi::schema::embedded(json!({"type": "object"}))
    }
}

impl ToSchema for CallInput {
    fn name() -> std::borrow::Cow<'static, str> {
        std::any::type_name::<CallInput>().into()
    }
}

deserialize_fields!(
    AnthropicMessages,
    TurnRole,
    BlockContent,
    TextContent,
    TextKind,
    BlockType,
);

impl<'de> JsonField<'de> for AnthropicMessages {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        let message = reference::<AnthropicTurn>();
        json!({"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<AnthropicTurn>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<AnthropicMessages, A::Error> {
        at_most(MAX_MESSAGES, "messages", &mut items).map(AnthropicMessages)
    }
}

/// The parts of a message, by what they become.
struct MessageParts {
    role: TurnRole,
    text: String,
    reasoning: Option<String>,
    calls: Vec<CalledTool>,
    results: Vec<Turn>,
}

impl AnthropicTurn {
    /// Returns the parts of the message at `param`.
    fn parts(self, param: &str) -> Result<MessageParts, ApiError> {
        let mut parts = MessageParts {
            role: self.role,
            text: String::new(),
            reasoning: None,
            calls: Vec::new(),
            results: Vec::new(),
        };
        match self.content {
            BlockContent::Text(text) => parts.text = text,
            BlockContent::Blocks(blocks) => {
                for (index, Object(block)) in blocks.into_iter().enumerate() {
                    block.add_to(&mut parts, &format!("{param}.content[{index}]"))?;
                }
            }
        }
        Ok(parts)
    }
}

impl MessageParts {
    /// Adds the message. Results of calls come before the text beside them.
    fn add_to(self, turns: &mut TurnList) {
        let has_results = !self.results.is_empty();
        turns.turns().extend(self.results);
        if has_results && self.text.is_empty() {
            return;
        }
        match self.role {
            TurnRole::System => return turns.instruct(self.text),
            TurnRole::User => return turns.user_says(self.text),
            TurnRole::Assistant => {}
        }
        let message = Message {
            role: self.role.name().to_owned(),
            content: self.text,
            reasoning: self.reasoning,
            ..Message::default()
        };
        turns.turns().push(if self.calls.is_empty() {
            Turn::Said(message)
        } else {
            Turn::Called(message, self.calls)
        });
    }
}

impl AnthropicBlock {
    fn add_to(self, parts: &mut MessageParts, param: &str) -> Result<(), ApiError> {
        let role = match self.kind {
            BlockType::Text => parts.role,
            BlockType::ToolResult => TurnRole::User,
            BlockType::Thinking | BlockType::RedactedThinking | BlockType::ToolUse => {
                TurnRole::Assistant
            }
        };
        if parts.role != role {
            let param = format!("{param}.type");
            let role = role.name();
            let message =
                format!("'{param}': blocks of this type stand in messages of the {role}.");
            return Err(ApiError::invalid_value(param, message));
        }
        let required = |field: Option<JsonText>, name: &str| match field {
            Some(JsonText(text)) => Ok(text),
            None => {
                let param = format!("{param}.{name}");
                let message = format!("'{param}' is missing.");
                Err(ApiError::invalid_value(param, message))
            }
        };
        match self.kind {
            BlockType::Text => {
                join(&mut parts.text, &required(self.text, "text")?);
            }
            BlockType::Thinking => {
                let thinking = required(self.thinking, "thinking")?;
                *parts.reasoning.get_or_insert_default() += &thinking;
            }
            BlockType::RedactedThinking => {} // Only the server that wrote it can read it.
            BlockType::ToolUse => {
                let id = required(self.id, "id")?;
                check_id(&id, &format!("{param}.id"))?;
                let name = required(self.name, "name")?;
                check_name(&name, &format!("{param}.name"))?;
                let input = self.input.map(|CallInput(text)| text).unwrap_or_default();
                let arguments: Map<String, Value> =
                    arguments_object(&input, &format!("{param}.input"))?;
                parts.calls.push(CalledTool {
                    id,
                    name,
                    arguments,
                });
            }
            BlockType::ToolResult => {
                let id = required(self.tool_use_id, "tool_use_id")?;
                check_id(&id, &format!("{param}.tool_use_id"))?;
                let text = self.content.map(TextContent::text).unwrap_or_default();
                parts.results.push(Turn::Result(id, text));
            }
        }
        Ok(())
    }
}
