//! The fields of a request for a response.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::items::InputField;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::fields::conversation::Conversation;
use crate::api::fields::json_field::{
    Bool, Float, Integer, JsonField, JsonText, Object, Scalar, at_most, deserialize_fields,
};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{BasicFields, is_set};
use crate::api::fields::reasoning::{Effort, ReasoningWish};
use crate::api::fields::structure::{FormatType, JsonSchema, check_end};
use crate::api::fields::tool_fields::{
    ChoiceField, FunctionKind, MAX_TOOLS, NewTool, ToolSchema, skip, tool_use,
};
use crate::api::fields::turn_list::TurnList;
use crate::api::fields::unsupported::{self as refused, Harmless, UnsupportedField};
use crate::api::generation::request::{FieldGrammar, ParsedRequest, ResponseMode};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::tenants::Tenant;
use crate::text::{ConversationEnd, TemplateArguments};
use crate::tools::{Tool, ToolChoice, ToolUse};

/// The fields of a request for a response.
#[derive(Deserialize, ToSchema)]
pub(super) struct ResponsesFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// A text of the user, or the items of a conversation.
    input: InputField,
    /// What the model is told before the conversation.
    instructions: Option<JsonText>,
    /// Functions that the model may call.
    tools: Option<FlatTools>,
    /// `none`, `auto`, `required`, or an object that names a function. Default: `auto`.
    tool_choice: Option<FlatChoice>,
    /// Whether an answer may have several calls. Default: true.
    parallel_tool_calls: Option<Bool>,
    /// The format of the text.
    #[schema(value_type = Option<TextField>)]
    text: Option<Object<TextField>>,
    /// How much the model reasons.
    #[schema(value_type = Option<ReasoningEffort>)]
    reasoning: Option<Object<ReasoningEffort>>,
    /// Maximum number of output tokens. Prompt and output must fit the model's context.
    max_output_tokens: Option<Integer<1, { i64::MAX }>>,
    /// Randomness of the draw. 0 always takes the most likely token. Default: 1.
    temperature: Option<Float<0, 200>>,
    /// Draw from the most likely tokens with this total probability. Default: 1.
    top_p: Option<Float<0, 100>>,
    /// Whether the answer is a stream of server-sent events.
    stream: Option<Bool>,
    /// Changes nothing: the server keeps no answers.
    #[expect(dead_code, reason = "only its type is checked")]
    store: Option<Bool>,
}

/// The format of the text.
#[derive(Deserialize, ToSchema)]
struct TextField {
    /// The format. Default: text.
    #[schema(value_type = Option<TextFormat>)]
    format: Option<Object<TextFormat>>,
}

/// The format of the text.
#[derive(Deserialize, ToSchema)]
struct TextFormat {
    /// Text, any JSON object, or JSON that a schema describes.
    #[serde(rename = "type")]
    kind: FormatType,
    /// The schema, if the type is `json_schema`. The answer always follows it.
    schema: Option<JsonSchema>,
    /// Whether objects have only the properties that the schema lists, where it says nothing of
    /// `additionalProperties`. Default: true.
    disable_additional_properties: Option<Bool>,
    /// The name of the schema. It does not change the answer.
    #[expect(dead_code, reason = "only its type is checked")]
    name: Option<JsonText>,
}

/// How much the model reasons.
#[derive(Deserialize, ToSchema)]
struct ReasoningEffort {
    /// The variable `reasoning_effort` of the chat template. `none` also sets `enable_thinking` to
    /// false.
    effort: Option<Effort>,
}

/// The field `tools`.
#[derive(Default)]
struct FlatTools(Vec<Object<FlatTool>>);

/// A tool. The model may call functions only.
#[derive(Deserialize, ToSchema)]
#[schema(as = ResponsesTool)]
struct FlatTool {
    /// What the tool is: `function`. Tools of other types are skipped: the server does not run
    /// them.
    #[serde(rename = "type")]
    kind: JsonText,
    /// The name of a function: letters, digits, `_`, `-` and `.`, at most 128.
    name: Option<JsonText>,
    /// What the function does. The model reads it.
    description: Option<JsonText>,
    /// The JSON schema of the arguments. Without one, the function has no arguments.
    parameters: Option<ToolSchema>,
    /// Whether a keyword of the schema that the server cannot enforce is an error.
    strict: Option<Bool>,
}

impl<'de> JsonField<'de> for FlatTools {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        json!({"type": "array", "items": reference::<FlatTool>(), "maxItems": MAX_TOOLS})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<FlatTool>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<FlatTools, A::Error> {
        at_most(MAX_TOOLS, "tools", &mut items).map(FlatTools)
    }
}

impl FlatTools {
    /// Returns the functions.
    fn check(self) -> Result<Vec<Tool>, ApiError> {
        let mut tools = Vec::with_capacity(self.0.len());
        for (index, Object(tool)) in self.0.into_iter().enumerate() {
            if tool.kind.0 != "function" {
                skip(index, &tool.kind.0);
                continue;
            }
            let name = tool.name.ok_or_else(|| {
                let param = format!("tools[{index}].name");
                let message = format!("'{param}' is missing.");
                ApiError::invalid_value(param, message)
            })?;
            let tool = NewTool {
                name,
                description: tool.description,
                parameters: tool.parameters,
                strict: tool.strict,
            };
            tool.add_to(&mut tools, &format!("tools[{index}]"), "parameters")?;
        }
        Ok(tools)
    }
}

/// Which tool the model has to call.
struct FlatChoice(ChoiceField);

/// A function that the model has to call.
#[derive(Deserialize, ToSchema)]
#[schema(as = ResponsesNamedTool)]
struct FlatNamed {
    /// What the tool is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: FunctionKind,
    /// The name of a function in `tools`.
    name: JsonText,
}

impl<'de> JsonField<'de> for FlatChoice {
    const EXPECTED: &'static str = <ChoiceField as JsonField<'de>>::EXPECTED;

    fn schema() -> Value {
        json!({"anyOf": [{"enum": ["none", "auto", "required"]}, reference::<FlatNamed>()]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<FlatNamed>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<FlatChoice, E> {
        ChoiceField::scalar(value).map(FlatChoice)
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<FlatChoice, A::Error> {
        let FlatNamed { name, .. } = FlatNamed::deserialize(MapAccessDeserializer::new(entries))?;
        Ok(FlatChoice(ChoiceField::Named(name.0)))
    }
}

deserialize_fields!(FlatTools, FlatChoice);

const STATELESS: &str = "this server keeps no state between requests";

/// The fields of OpenAI's responses that the server does not support.
const UNSUPPORTED: &[UnsupportedField] = &[
    ("previous_response_id", Harmless::Nothing, STATELESS),
    ("conversation", Harmless::Nothing, STATELESS),
    ("prompt", Harmless::Nothing, STATELESS),
    ("background", Harmless::Is(&["false"]), STATELESS),
    (
        "truncation",
        Harmless::Is(&[r#""disabled""#]),
        "this server does not shorten a conversation",
    ),
    (
        "top_logprobs",
        Harmless::Is(&["0"]),
        "use POST /v1/chat/completions instead",
    ),
    (
        "max_tool_calls",
        Harmless::Nothing,
        "the client runs the tools",
    ),
];

/// Returns the schemas of the fields that the server does not support, by name.
pub(super) fn refused_fields() -> impl Iterator<Item = (&'static str, Value)> {
    refused::schemas(UNSUPPORTED)
}

/// What an answer repeats of its request.
#[derive(Clone)]
pub(super) struct RequestEcho {
    pub(super) instructions: Option<String>,
    pub(super) max_output_tokens: Option<u64>,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) is_parallel: bool,
    pub(super) tools: Vec<Value>,
    pub(super) tool_choice: Value,
    pub(super) format: Value,
}

/// Reads a request. Returns what the answer repeats of it, too.
pub(super) fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<(ParsedRequest, RequestEcho), ApiError> {
    let mut fields = read_fields(serving, tenant, body)?;
    let basic = BasicFields {
        max_tokens: (fields.max_output_tokens).map(|tokens| ("max_output_tokens", tokens)),
        temperature: fields.temperature,
        top_p: fields.top_p,
        top_k: None,
        stop: None,
    };
    let name = fields.model.as_ref().map(|JsonText(name)| name.as_str());
    let unmasking = serving.model.unmasking(name);
    let params = basic.check(&serving.model, &serving.defaults)?;
    let mut params = params.with_unmasking(unmasking);
    let format = fields.text.take().and_then(|Object(text)| text.format);
    let (format, grammar) = grammar(format)?;
    if let Some(FieldGrammar { field, .. }) = &grammar {
        check_end(field, &params)?;
    }
    params.grammar = grammar;
    params.shape.mode = ResponseMode::of_stream(is_set(fields.stream.take()));
    let asked = fields.asked(serving)?;
    let echo = RequestEcho {
        instructions: asked.instructions,
        max_output_tokens: params.max_tokens.map(|max| max.tokens),
        temperature: params.sampling.temperature,
        top_p: params.sampling.top_p,
        is_parallel: asked.is_parallel,
        tools: asked.conversation.tools.iter().map(echoed_tool).collect(),
        tool_choice: echoed_choice(&asked.choice),
        format,
    };
    let reasoning = ReasoningWish {
        is_shown: true,
        budget: None,
    };
    let request = (asked.conversation).request(serving, params, asked.tool_use, reasoning)?;
    Ok((request, echo))
}

/// Reads a request for the number of tokens of its prompt, and returns it.
pub(super) fn read_count(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<usize, ApiError> {
    let Asked {
        mut conversation,
        tool_use,
        ..
    } = read_fields(serving, tenant, body)?.asked(serving)?;
    if tool_use.is_none() {
        conversation.tools.clear();
    }
    let choice = tool_use.map_or(ToolChoice::Auto, |tools| tools.choice);
    let prompt = conversation.prompt(serving, choice)?;
    Ok(prompt.tokens.len())
}

fn read_fields(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ResponsesFields, ApiError> {
    let fields: ResponsesFields = body.read()?;
    let name = fields.model.as_ref().map(|JsonText(name)| name.as_str());
    serving.model.check(name, tenant)?;
    refused::check(body, UNSUPPORTED)?;
    Ok(fields)
}

/// What a request asks the model.
struct Asked {
    conversation: Conversation,
    instructions: Option<String>,
    choice: ChoiceField,
    is_parallel: bool,
    /// How the answer may call tools.
    tool_use: Option<ToolUse>,
}

impl ResponsesFields {
    fn asked(self, serving: &Serving) -> Result<Asked, ApiError> {
        let is_parallel = self.parallel_tool_calls.is_none_or(|Bool(several)| several);
        let tools = self.tools.unwrap_or_default().check()?;
        let FlatChoice(choice) = self.tool_choice.unwrap_or(FlatChoice(ChoiceField::Auto));
        let tool_use = tool_use(&tools, &choice, is_parallel, "tool_choice")?;
        let instructions = self.instructions.map(|JsonText(text)| text);
        let system = instructions.clone().unwrap_or_default();
        let turns = TurnList::new(system, serving.chat_template.as_ref(), false);
        let mut arguments = TemplateArguments::new();
        if let Some(effort) = self.reasoning.and_then(|Object(own)| own.effort) {
            effort.set(&mut arguments);
        }
        let conversation = Conversation {
            turns: self.input.check(turns)?,
            tools,
            arguments,
            end: ConversationEnd::NextMessage,
            param: "input",
        };
        Ok(Asked {
            conversation,
            instructions,
            choice,
            is_parallel,
            tool_use,
        })
    }
}

/// Returns a format as answers repeat it, and its grammar.
fn grammar(format: Option<Object<TextFormat>>) -> Result<(Value, Option<FieldGrammar>), ApiError> {
    let Some(Object(format)) = format else {
        return Ok((json!({"type": "text"}), None));
    };
    let own = match (format.kind, format.schema) {
        (FormatType::Text, _) => return Ok((json!({"type": "text"}), None)),
        (FormatType::JsonObject, _) => FieldGrammar::json_object("text.format"),
        (FormatType::JsonSchema, Some(schema)) => {
            let is_closed =
                (format.disable_additional_properties).is_none_or(|Bool(is_closed)| is_closed);
            FieldGrammar::json_schema("text.format.schema", schema, is_closed)?
        }
        (FormatType::JsonSchema, None) => {
            let message = "'text.format.schema' is missing.";
            return Err(ApiError::invalid_value("text.format.schema", message));
        }
    };
    let kind = match format.kind {
        FormatType::JsonSchema => "json_schema",
        _ => "json_object",
    };
    Ok((json!({ "type": kind }), Some(own)))
}

fn echoed_tool(tool: &Tool) -> Value {
    json!({
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.is_strict,
    })
}

fn echoed_choice(choice: &ChoiceField) -> Value {
    match choice {
        ChoiceField::None => "none".into(),
        ChoiceField::Auto => "auto".into(),
        ChoiceField::Required => "required".into(),
        ChoiceField::Named(name) => json!({"type": "function", "name": name}),
    }
}
