//! The fields of requests to Anthropic's API.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::answer::TokenCount;
use super::content::{AnthropicMessages, TextContent};
use crate::api::app::Serving;
use crate::api::error::{ApiError, quoted};
use crate::api::fields::conversation::Conversation;
use crate::api::fields::json_field::{
    Bool, Float, Integer, JsonField, JsonText, Object, Scalar, at_most, deserialize_fields,
    must_be, unsupported,
};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{BasicFields, StopStrings, is_set};
use crate::api::fields::tool_fields::{ChoiceField, MAX_TOOLS, NewTool, ToolSchema, tool_use};
use crate::api::fields::unsupported::{self as refused, UnsupportedField};
use crate::api::generation::request::{ParsedRequest, ResponseMode};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::tenants::Tenant;
use crate::text::{ConversationEnd, Message, TemplateArguments, TemplateValue};
use crate::tools::{Tool, ToolUse, Turn};

/// The fields of both endpoints.
#[derive(Deserialize, ToSchema)]
pub(super) struct CountFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// The conversation. If the assistant wrote the final message, the answer continues it.
    messages: AnthropicMessages,
    /// What the model is told before the conversation.
    system: Option<TextContent>,
    /// Functions that the model may call.
    tools: Option<AnthropicTools>,
    /// Which tools the model has to call. Default: `auto`.
    #[schema(value_type = Option<AnthropicChoice>)]
    tool_choice: Option<Object<AnthropicChoice>>,
    /// Whether the model reasons before it answers. Default: disabled.
    #[schema(value_type = Option<ThinkingField>)]
    thinking: Option<Object<ThinkingField>>,
}

/// The fields of a request for a message.
#[derive(Deserialize, ToSchema)]
pub(super) struct MessagesFields {
    /// Maximum number of output tokens.
    max_tokens: Integer<1, { i64::MAX }>,
    /// Randomness of the draw. 0 always takes the most likely token. Default: 1.
    temperature: Option<Float<0, 200>>,
    /// Draw from the most likely tokens with this total probability. Default: 1.
    top_p: Option<Float<0, 100>>,
    /// Draw from this many most likely tokens. 0 and -1 are off.
    top_k: Option<Integer<-1, { u32::MAX as i64 }>>,
    /// Strings that end the output.
    stop_sequences: Option<StopStrings>,
    /// Whether the answer is a stream of server-sent events.
    stream: Option<Bool>,
}

/// Whether the model reasons before it answers.
#[derive(Deserialize, ToSchema)]
struct ThinkingField {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    kind: ThinkingKind,
    /// Checked, but no limit: the server does not limit how long a model reasons.
    #[expect(dead_code, reason = "only its type is checked")]
    budget_tokens: Option<Integer<1, { i64::MAX }>>,
}

struct ThinkingKind {
    is_on: bool,
}

impl JsonField<'_> for ThinkingKind {
    const EXPECTED: &'static str = "'enabled', 'adaptive' or 'disabled'";

    fn schema() -> Value {
        json!({"enum": ["enabled", "adaptive", "disabled"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<ThinkingKind, E> {
        match value {
            Scalar::Text("enabled" | "adaptive") => Ok(ThinkingKind { is_on: true }),
            Scalar::Text("disabled") => Ok(ThinkingKind { is_on: false }),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// The field `tools`.
#[derive(Default)]
struct AnthropicTools(Vec<Object<AnthropicTool>>);

/// A tool that the model may call.
#[derive(Deserialize, ToSchema)]
struct AnthropicTool {
    /// What the tool is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: Option<CustomKind>,
    /// The name: letters, digits, `_`, `-` and `.`, at most 128.
    name: JsonText,
    /// What the tool does. The model reads it.
    description: Option<JsonText>,
    /// The JSON schema of the arguments.
    input_schema: ToolSchema,
    /// Whether a keyword of the schema that the server cannot enforce is an error.
    strict: Option<Bool>,
}

struct CustomKind;

impl JsonField<'_> for CustomKind {
    const EXPECTED: &'static str = "'custom'";

    fn schema() -> Value {
        json!({"enum": ["custom"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<CustomKind, E> {
        match value {
            Scalar::Text("custom") => Ok(CustomKind),
            Scalar::Text(kind) => Err(unsupported(format_args!(
                "Tools of type {} are not supported: the model can call your own tools only.",
                quoted(kind)
            ))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

impl<'de> JsonField<'de> for AnthropicTools {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        json!({"type": "array", "items": reference::<AnthropicTool>(), "maxItems": MAX_TOOLS})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<AnthropicTool>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<AnthropicTools, A::Error> {
        at_most(MAX_TOOLS, "tools", &mut items).map(AnthropicTools)
    }
}

/// Which tools the model has to call.
#[derive(Deserialize, ToSchema)]
struct AnthropicChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    kind: AnthropicChoiceKind,
    /// The name of the tool, with the type `tool`.
    name: Option<JsonText>,
    /// Whether an answer has at most one call.
    disable_parallel_tool_use: Option<Bool>,
}

#[derive(Clone, Copy)]
enum AnthropicChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

impl JsonField<'_> for AnthropicChoiceKind {
    const EXPECTED: &'static str = "'auto', 'any', 'tool' or 'none'";

    fn schema() -> Value {
        json!({"enum": ["auto", "any", "tool", "none"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<AnthropicChoiceKind, E> {
        match value {
            Scalar::Text("auto") => Ok(AnthropicChoiceKind::Auto),
            Scalar::Text("any") => Ok(AnthropicChoiceKind::Any),
            Scalar::Text("tool") => Ok(AnthropicChoiceKind::Tool),
            Scalar::Text("none") => Ok(AnthropicChoiceKind::None),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

deserialize_fields!(
    ThinkingKind,
    AnthropicTools,
    CustomKind,
    AnthropicChoiceKind,
);

const NO_MCP: &str = "this server connects to no other servers";
const STATELESS: &str = "this server keeps no state between requests";
const NO_FORMAT: &str = "use POST /v1/chat/completions with 'response_format' instead";

/// The fields of Anthropic's API that the server does not support.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("mcp_servers", refused::Harmless::Empty, NO_MCP),
    ("container", refused::Harmless::Nothing, STATELESS),
    ("context_management", refused::Harmless::Empty, STATELESS),
    ("output_format", refused::Harmless::Empty, NO_FORMAT),
    ("output_config", refused::Harmless::Empty, NO_FORMAT),
];

/// Returns the schemas of the fields that the server does not support, by name.
pub(super) fn refused_fields() -> impl Iterator<Item = (&'static str, Value)> {
    refused::schemas(UNSUPPORTED)
}

/// Reads a request for a message.
pub(super) fn read_messages(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ParsedRequest, ApiError> {
    let shared: CountFields = body.read()?;
    let own: MessagesFields = body.read()?;
    let name = shared.model.as_ref().map(|JsonText(name)| name.as_str());
    serving.model.check(name, tenant)?;
    refused::check(body, UNSUPPORTED)?;
    let is_stream = is_set(own.stream);
    let params = BasicFields {
        max_tokens: Some(("max_tokens", own.max_tokens)),
        temperature: own.temperature,
        top_p: own.top_p,
        top_k: own.top_k,
        stop: own.stop_sequences,
    };
    let mut params = params.check(&serving.model, &serving.defaults)?;
    params.shape.mode = ResponseMode::of_stream(is_stream);
    let (conversation, tools, is_thinking) = shared.conversation(serving)?;
    conversation.request(serving, params, tools, is_thinking)
}

/// Reads a request for the number of tokens of its prompt.
pub(super) fn read_count(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<TokenCount, ApiError> {
    let fields: CountFields = body.read()?;
    let name = fields.model.as_ref().map(|JsonText(name)| name.as_str());
    serving.model.check(name, tenant)?;
    refused::check(body, UNSUPPORTED)?;
    let (mut conversation, tools, _) = fields.conversation(serving)?;
    if tools.is_none() {
        conversation.tools.clear();
    }
    let prompt = conversation.prompt(serving)?;
    Ok(TokenCount {
        input_tokens: prompt.tokens.len(),
    })
}

impl CountFields {
    /// Returns the conversation, how the answer may call tools, and whether the client wants the
    /// reasoning.
    fn conversation(
        self,
        serving: &Serving,
    ) -> Result<(Conversation, Option<ToolUse>, bool), ApiError> {
        let tools = self.tools.unwrap_or_default().check()?;
        let tool_use = choice(self.tool_choice, &tools)?;
        let is_thinking = self.thinking.is_some_and(|Object(field)| field.kind.is_on);
        let system = self.system.map(TextContent::text);
        let system = system.filter(|text| !text.is_empty()).map(|content| {
            Turn::Said(Message {
                role: "system".to_owned(),
                content,
                ..Message::default()
            })
        });
        let turns = self.messages.check(system.into_iter().collect())?;
        let end = match turns.last() {
            Some(Turn::Said(last)) if last.role == "assistant" => ConversationEnd::Continued,
            _ => ConversationEnd::NextMessage,
        };
        // A template without reasoning does not know the variable.
        let has_reasoning = serving.tokenizer.reasoning_tags().is_some();
        let thinking = (
            "enable_thinking".to_owned(),
            TemplateValue::Bool(is_thinking),
        );
        let arguments = has_reasoning.then_some(thinking).into_iter();
        let conversation = Conversation {
            turns,
            tools,
            arguments: arguments.collect::<TemplateArguments>(),
            end,
            param: "messages",
        };
        Ok((conversation, tool_use, is_thinking))
    }
}

fn choice(
    field: Option<Object<AnthropicChoice>>,
    tools: &[Tool],
) -> Result<Option<ToolUse>, ApiError> {
    let Some(Object(field)) = field else {
        return tool_use(tools, &ChoiceField::Auto, true, "tool_choice");
    };
    let choice = match (field.kind, field.name) {
        (AnthropicChoiceKind::Auto, _) => ChoiceField::Auto,
        (AnthropicChoiceKind::Any, _) => ChoiceField::Required,
        (AnthropicChoiceKind::None, _) => ChoiceField::None,
        (AnthropicChoiceKind::Tool, Some(JsonText(name))) => ChoiceField::Named(name),
        (AnthropicChoiceKind::Tool, None) => {
            let message = "'tool_choice.name' is missing.";
            return Err(ApiError::invalid_value("tool_choice.name", message));
        }
    };
    let is_parallel = !is_set(field.disable_parallel_tool_use);
    tool_use(tools, &choice, is_parallel, "tool_choice")
}

impl AnthropicTools {
    fn check(self) -> Result<Vec<Tool>, ApiError> {
        let mut tools = Vec::with_capacity(self.0.len());
        for (index, Object(tool)) in self.0.into_iter().enumerate() {
            let tool = NewTool {
                name: tool.name,
                description: tool.description,
                parameters: Some(tool.input_schema),
                strict: tool.strict,
            };
            tool.add_to(&mut tools, &format!("tools[{index}]"), "input_schema")?;
        }
        Ok(tools)
    }
}
