//! Reads the `input` of a request: a text, or the items of a conversation.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::error::{ApiError, quoted};
use crate::api::fields::json_field::{
    JsonField, JsonText, Object, Scalar, at_most, deserialize_fields, must_be, unsupported,
};
use crate::api::fields::tool_calls::{arguments_object, check_id};
use crate::api::fields::tool_fields::check_name;
use crate::api::fields::turn_list::TurnList;
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::text::Message;
use crate::tools::{CalledTool, Turn};

const ASSISTANT: &str = "assistant";

const MAX_ITEMS: usize = 1024;
/// The maximum number of parts of one item.
const MAX_PARTS: usize = 1024;

/// The field `input`.
#[derive(Debug)]
pub(super) enum InputField {
    Text(String),
    Items(Vec<Object<InputItem>>),
}

impl InputField {
    /// Returns the conversation: `turns`, and then the input.
    ///
    /// # Errors
    /// If an item lacks something that its type requires.
    pub(super) fn check(self, mut turns: TurnList) -> Result<Vec<Turn>, ApiError> {
        let items = match self {
            InputField::Text(text) => {
                turns.user_says(text);
                return Ok(turns.finish());
            }
            InputField::Items(items) if items.is_empty() => {
                let message = "'input' must contain at least one item.";
                return Err(ApiError::invalid_value("input", message));
            }
            InputField::Items(items) => items,
        };
        let mut reasoning = None;
        for (index, Object(item)) in items.into_iter().enumerate() {
            item.add_to(&mut turns, &mut reasoning, &format!("input[{index}]"))?;
        }
        Ok(turns.finish())
    }
}

/// An item of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct InputItem {
    /// What the item is. Default: `message`.
    #[serde(rename = "type")]
    kind: Option<ItemType>,
    /// The writer of a message, which requires it.
    role: Option<ItemRole>,
    /// What a message says, or the reasoning of an item of this type.
    content: Option<PartsField>,
    /// The summary of reasoning.
    summary: Option<PartsField>,
    /// The id of a call, which a call and its output require.
    call_id: Option<JsonText>,
    /// The function that the model called.
    name: Option<JsonText>,
    /// The arguments of a call: a JSON object in a string.
    arguments: Option<JsonText>,
    /// The output of a call.
    output: Option<PartsField>,
}

impl InputItem {
    /// Adds the item at `param`. `reasoning` belongs to the assistant's next message.
    fn add_to(
        self,
        turns: &mut TurnList,
        reasoning: &mut Option<String>,
        param: &str,
    ) -> Result<(), ApiError> {
        let missing = |name: &str| {
            let param = format!("{param}.{name}");
            let message = format!("'{param}' is missing.");
            ApiError::invalid_value(param, message)
        };
        match self.kind.unwrap_or(ItemType::Message) {
            ItemType::Message => {
                let role = self.role.ok_or_else(|| missing("role"))?;
                let text = self.content.ok_or_else(|| missing("content"))?.text();
                let own = reasoning.take();
                match role {
                    ItemRole::System => turns.instruct(text),
                    ItemRole::User => turns.user_says(text),
                    ItemRole::Assistant => turns.turns().push(Turn::Said(Message {
                        role: ASSISTANT.to_owned(),
                        content: text,
                        reasoning: own,
                        ..Message::default()
                    })),
                }
            }
            ItemType::Reasoning => {
                let text = self.content.map(PartsField::text);
                let text = text.filter(|text| !text.is_empty());
                *reasoning = text.or_else(|| self.summary.map(PartsField::text));
            }
            ItemType::Call => {
                let JsonText(id) = self.call_id.ok_or_else(|| missing("call_id"))?;
                check_id(&id, &format!("{param}.call_id"))?;
                let JsonText(name) = self.name.ok_or_else(|| missing("name"))?;
                check_name(&name, &format!("{param}.name"))?;
                let arguments = self.arguments.map(|JsonText(text)| text);
                let path = format!("{param}.arguments");
                let arguments = arguments_object(&arguments.unwrap_or_default(), &path)?;
                let call = CalledTool {
                    id,
                    name,
                    arguments,
                };
                add_call(turns.turns(), call, reasoning.take());
            }
            ItemType::Output => {
                let JsonText(id) = self.call_id.ok_or_else(|| missing("call_id"))?;
                check_id(&id, &format!("{param}.call_id"))?;
                let text = self.output.ok_or_else(|| missing("output"))?.text();
                turns.turns().push(Turn::Result(id, text));
            }
        }
        Ok(())
    }
}

/// Adds a call to the assistant's message at the end, or begins one.
fn add_call(turns: &mut Vec<Turn>, call: CalledTool, reasoning: Option<String>) {
    match turns.pop() {
        Some(Turn::Called(message, mut calls)) => {
            calls.push(call);
            turns.push(Turn::Called(message, calls));
        }
        Some(Turn::Said(message)) if message.role == ASSISTANT => {
            turns.push(Turn::Called(message, vec![call]));
        }
        last => {
            turns.extend(last);
            let message = Message {
                role: ASSISTANT.to_owned(),
                reasoning,
                ..Message::default()
            };
            turns.push(Turn::Called(message, vec![call]));
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum ItemType {
    Message,
    Reasoning,
    Call,
    Output,
}

impl JsonField<'_> for ItemType {
    const EXPECTED: &'static str = "a string";

    fn schema() -> Value {
        json!({"enum": ["message", "reasoning", "function_call", "function_call_output"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<ItemType, E> {
        match value {
            Scalar::Text("message") => Ok(ItemType::Message),
            Scalar::Text("reasoning") => Ok(ItemType::Reasoning),
            Scalar::Text("function_call") => Ok(ItemType::Call),
            Scalar::Text("function_call_output") => Ok(ItemType::Output),
            Scalar::Text(kind) => Err(unsupported(format_args!(
                "Items of type {} are not supported.",
                quoted(kind)
            ))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemRole {
    System,
    User,
    Assistant,
}

impl JsonField<'_> for ItemRole {
    const EXPECTED: &'static str = "'system', 'developer', 'user' or 'assistant'";

    fn schema() -> Value {
        json!({"enum": ["system", "developer", "user", "assistant"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<ItemRole, E> {
        match value {
            Scalar::Text("system" | "developer") => Ok(ItemRole::System),
            Scalar::Text("user") => Ok(ItemRole::User),
            Scalar::Text("assistant") => Ok(ItemRole::Assistant),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// A string, or an array of parts.
#[derive(Debug)]
enum PartsField {
    Text(String),
    Parts(Vec<Object<ItemPart>>),
}

impl PartsField {
    fn text(self) -> String {
        match self {
            PartsField::Text(text) => text,
            PartsField::Parts(parts) => {
                let texts = parts
                    .into_iter()
                    .filter_map(|Object(part)| part.text.or(part.refusal));
                texts.map(|JsonText(text)| text).collect()
            }
        }
    }
}

/// A part of an item.
#[derive(Debug, Deserialize, ToSchema)]
struct ItemPart {
    /// What the part is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: ItemPartType,
    /// The text.
    text: Option<JsonText>,
    /// The text of a part of type `refusal`.
    refusal: Option<JsonText>,
}

#[derive(Debug)]
struct ItemPartType;

const PART_TYPES: [&str; 6] = [
    "input_text",
    "output_text",
    "text",
    "refusal",
    "summary_text",
    "reasoning_text",
];

impl JsonField<'_> for ItemPartType {
    const EXPECTED: &'static str = "a string";

    fn schema() -> Value {
        json!({ "enum": PART_TYPES })
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<ItemPartType, E> {
        match value {
            Scalar::Text(kind) if PART_TYPES.contains(&kind) => Ok(ItemPartType),
            Scalar::Text(kind) => Err(unsupported(format_args!(
                "Parts of type {} are not supported: this server reads text only.",
                quoted(kind)
            ))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

impl<'de> JsonField<'de> for PartsField {
    const EXPECTED: &'static str = "a string or an array of parts";

    fn schema() -> Value {
        let parts = json!({
            "type": "array", "items": reference::<ItemPart>(), "maxItems": MAX_PARTS,
        });
        json!({"anyOf": [{"type": "string"}, parts]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<ItemPart>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<PartsField, E> {
        match value {
            Scalar::Text(text) => Ok(PartsField::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<PartsField, A::Error> {
        at_most(MAX_PARTS, "parts", &mut items).map(PartsField::Parts)
    }
}

impl<'de> JsonField<'de> for InputField {
    const EXPECTED: &'static str = "a string or an array of items";

    fn schema() -> Value {
        let items = json!({
            "type": "array", "items": reference::<InputItem>(), "minItems": 1,
            "maxItems": MAX_ITEMS,
        });
        json!({"anyOf": [{"type": "string"}, items]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<InputItem>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<InputField, E> {
        match value {
            Scalar::Text(text) => Ok(InputField::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<InputField, A::Error> {
        at_most(MAX_ITEMS, "items", &mut items).map(InputField::Items)
    }
}

deserialize_fields!(ItemType, ItemRole, ItemPartType, PartsField, InputField);
