//! The fields of requests to Anthropic's API.

use serde::Deserialize;
use serde::de::{Error, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::answer::TokenCount;
use super::content::{AnthropicMessages, TextContent};
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::fields::conversation::Conversation;
use crate::api::fields::json_field::{
    Bool, Float, Integer, JsonField, JsonText, Object, Scalar, at_most, deserialize_fields, must_be,
};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{BasicFields, StopStrings, is_set};
use crate::api::fields::reasoning::{ENABLE_THINKING, Effort, ReasoningWish};
use crate::api::fields::structure::{JsonSchema, check_end};
use crate::api::fields::tool_fields::{
    ChoiceField, MAX_TOOLS, NewTool, ToolSchema, skip, tool_use,
};
use crate::api::fields::turn_list::TurnList;
use crate::api::fields::unsupported::{self as refused, UnsupportedField};
use crate::api::generation::request::{FieldGrammar, MaxTokens, ParsedRequest, ResponseMode};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::tenants::Tenant;
use crate::text::{ConversationEnd, TemplateArguments, TemplateValue};
use crate::tools::{Tool, ToolChoice, ToolUse, Turn};

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
    /// How much the model reasons, and the format of the answer.
    #[schema(value_type = Option<OutputConfig>)]
    output_config: Option<Object<OutputConfig>>,
    /// The same as `output_config.format`, which takes precedence.
    #[schema(value_type = Option<OutputFormat>)]
    output_format: Option<Object<OutputFormat>>,
    /// Changes nothing: the server removes no part of a conversation.
    #[expect(dead_code, reason = "only its type is checked")]
    #[schema(value_type = Option<ContextManagement>)]
    context_management: Option<Object<ContextManagement>>,
}

/// How much the model reasons, and the format of the answer.
#[derive(Default, Deserialize, ToSchema)]
struct OutputConfig {
    /// The variable `reasoning_effort` of the chat template.
    effort: Option<Effort>,
    /// The format of the answer. Default: text.
    #[schema(value_type = Option<OutputFormat>)]
    format: Option<Object<OutputFormat>>,
}

/// The format of the answer.
#[derive(Deserialize, ToSchema)]
struct OutputFormat {
    /// What the answer follows.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: OutputFormatKind,
    /// The schema of the JSON that the answer is.
    schema: JsonSchema,
}

struct OutputFormatKind;

impl JsonField<'_> for OutputFormatKind {
    const EXPECTED: &'static str = "'json_schema'";

    fn schema() -> Value {
        json!({"enum": ["json_schema"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<OutputFormatKind, E> {
        match value {
            Scalar::Text("json_schema") => Ok(OutputFormatKind),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// Which parts of a long conversation Anthropic's server would remove.
#[derive(Deserialize, ToSchema)]
struct ContextManagement {}

/// The fields of a request for a message.
#[derive(Deserialize, ToSchema)]
pub(super) struct MessagesFields {
    /// Maximum number of output tokens. If the context has less room, the answer may use that.
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
    /// The reasoning is ended after this many tokens.
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
    /// What the tool is: `custom`. Tools of other types are skipped: the server does not run them.
    #[serde(rename = "type")]
    kind: Option<JsonText>,
    /// The name: letters, digits, `_`, `-` and `.`, at most 128.
    name: JsonText,
    /// What the tool does. The model reads it.
    description: Option<JsonText>,
    /// The JSON schema of the arguments.
    input_schema: Option<ToolSchema>,
    /// Whether a keyword of the schema that the server cannot enforce is an error.
    strict: Option<Bool>,
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
    OutputFormatKind,
    ThinkingKind,
    AnthropicTools,
    AnthropicChoiceKind,
);

const NO_MCP: &str = "this server connects to no other servers";
const STATELESS: &str = "this server keeps no state between requests";

/// The fields of Anthropic's API that the server does not support.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("mcp_servers", refused::Harmless::Empty, NO_MCP),
    ("container", refused::Harmless::Nothing, STATELESS),
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
    let params = params.check(&serving.model, &serving.defaults)?;
    let mut params = params.with_unmasking(serving.model.unmasking(name));
    // Claude Code asks for more tokens than small models have.
    params.max_tokens = params.max_tokens.map(|max| MaxTokens {
        is_cut_to_fit: true,
        ..max
    });
    params.shape.mode = ResponseMode::of_stream(is_stream);
    let asked = shared.asked(serving)?;
    if let Some(FieldGrammar { field, .. }) = &asked.format {
        check_end(field, &params)?;
    }
    params.grammar = asked.format;
    (asked.conversation).request(serving, params, asked.tools, asked.reasoning)
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
    let asked = fields.asked(serving)?;
    let (mut conversation, tools) = (asked.conversation, asked.tools);
    if tools.is_none() {
        conversation.tools.clear();
    }
    let choice = tools.map_or(ToolChoice::Auto, |tools| tools.choice);
    let prompt = conversation.prompt(serving, choice)?;
    Ok(TokenCount {
        input_tokens: prompt.tokens.len(),
    })
}

/// The message that a request asks for.
struct AskedMessage {
    conversation: Conversation,
    /// How the answer may call tools.
    tools: Option<ToolUse>,
    reasoning: ReasoningWish,
    /// The format of the answer.
    format: Option<FieldGrammar>,
}

impl CountFields {
    fn asked(self, serving: &Serving) -> Result<AskedMessage, ApiError> {
        let tools = self.tools.unwrap_or_default().check()?;
        let tool_use = choice(self.tool_choice, &tools)?;
        let thinking = self.thinking.map(|Object(field)| field);
        let is_thinking = thinking.as_ref().is_some_and(|field| field.kind.is_on);
        let budget = thinking.and_then(|field| field.budget_tokens);
        let budget = budget.map(|Integer(tokens)| {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            (tokens, "thinking.budget_tokens")
        });
        let Object(output) = self
            .output_config
            .unwrap_or(Object(OutputConfig::default()));
        let format = match (output.format, self.output_format) {
            (Some(Object(format)), _) => Some(("output_config.format.schema", format.schema)),
            (None, Some(Object(format))) => Some(("output_format.schema", format.schema)),
            (None, None) => None,
        };
        let format = format.map(|(field, schema)| FieldGrammar::json_schema(field, schema, true));
        let system = self.system.map(TextContent::text).unwrap_or_default();
        // As in Anthropic's API, messages of the user that follow each other are one.
        let turns = TurnList::new(system, serving.chat_template.as_ref(), true);
        let turns = self.messages.check(turns)?;
        let end = match turns.last() {
            Some(Turn::Said(last)) if last.role == "assistant" => ConversationEnd::Continued,
            _ => ConversationEnd::NextMessage,
        };
        let mut arguments = TemplateArguments::new();
        // A template without reasoning does not know the variable.
        if serving.tokenizer.reasoning_tags().is_some() {
            let is_thinking = TemplateValue::Bool(is_thinking);
            arguments.insert(ENABLE_THINKING.to_owned(), is_thinking);
        }
        if let Some(effort) = output.effort {
            effort.set(&mut arguments);
        }
        let conversation = Conversation {
            turns,
            tools,
            arguments,
            end,
            param: "messages",
        };
        Ok(AskedMessage {
            conversation,
            tools: tool_use,
            reasoning: ReasoningWish {
                is_shown: is_thinking,
                budget: budget.filter(|_| is_thinking),
            },
            format: format.transpose()?,
        })
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
            if let Some(JsonText(kind)) = &tool.kind
                && kind != "custom"
            {
                skip(index, kind);
                continue;
            }
            let schema = tool.input_schema.ok_or_else(|| {
                let param = format!("tools[{index}].input_schema");
                let message = format!("'{param}' is missing.");
                ApiError::invalid_value(param, message)
            })?;
            let tool = NewTool {
                name: tool.name,
                description: tool.description,
                parameters: Some(schema),
                strict: tool.strict,
            };
            tool.add_to(&mut tools, &format!("tools[{index}]"), "input_schema")?;
        }
        Ok(tools)
    }
}
