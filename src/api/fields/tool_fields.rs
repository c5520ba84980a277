//! The fields of a chat request about tools: which there are, and which the model has to call.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::json_field::{
    Bool, Given, JsonField, JsonText, Object, Scalar, at_most, deserialize_fields, must_be,
    unsupported,
};
use crate::api::error::{ApiError, quoted};
use crate::api::openapi::schema::{NamedSchemas, collect, reference};
use crate::constraint::GrammarSource;
use crate::tools::{Tool, ToolChoice, ToolUse};

pub(in crate::api) const MAX_TOOLS: usize = 128;
const MAX_NAME_BYTES: usize = 128;
/// The longest schema of one tool. All together may be as long.
const MAX_SCHEMA_BYTES: usize = 64 << 10;

/// Which tools the model has to call.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct ToolChoiceFields {
    /// `none`, `auto`, `required`, or an object that names a tool. Default: `auto`.
    tool_choice: Option<ChoiceField>,
    /// Whether an answer may have several calls. Default: true.
    parallel_tool_calls: Option<Bool>,
}

impl ToolChoiceFields {
    /// Returns how the answer may call `tools`; `None` if it may call none.
    ///
    /// # Errors
    /// If the choice needs a tool that there is not.
    pub(in crate::api) fn check(self, tools: &[Tool]) -> Result<Option<ToolUse>, ApiError> {
        let is_parallel = self.parallel_tool_calls.is_none_or(|Bool(several)| several);
        let choice = self.tool_choice.unwrap_or(ChoiceField::Auto);
        tool_use(tools, &choice, is_parallel, "tool_choice")
    }
}

/// Returns how the answer may call `tools`; `None` if it may call none. `param` names the field of
/// the choice.
///
/// # Errors
/// If the choice needs a tool that there is not.
pub(in crate::api) fn tool_use(
    tools: &[Tool],
    choice: &ChoiceField,
    is_parallel: bool,
    param: &str,
) -> Result<Option<ToolUse>, ApiError> {
    let choice = match choice {
        ChoiceField::None => return Ok(None),
        ChoiceField::Auto if tools.is_empty() => return Ok(None),
        ChoiceField::Required | ChoiceField::Named(_) if tools.is_empty() => {
            let message = format!("'{param}' needs a tool, but 'tools' has none.");
            return Err(ApiError::invalid_value(param, message));
        }
        ChoiceField::Auto => ToolChoice::Auto,
        ChoiceField::Required => ToolChoice::Required,
        ChoiceField::Named(name) => {
            let index = tools.iter().position(|tool| tool.name == *name);
            let Some(index) = index else {
                let name = quoted(name);
                let message = format!("'{param}' names the tool {name}, which 'tools' lacks.");
                return Err(ApiError::invalid_value(param, message));
            };
            ToolChoice::Named(index)
        }
    };
    Ok(Some(ToolUse {
        tools: tools.to_vec(),
        choice,
        is_parallel,
    }))
}

/// The field `tools`.
#[derive(Debug, Default)]
pub(in crate::api) struct Tools(Vec<Object<ToolField>>);

impl Tools {
    /// Returns the tools.
    ///
    /// # Errors
    /// If a name is not valid or appears twice, or a schema is over a budget.
    pub(in crate::api) fn check(self) -> Result<Vec<Tool>, ApiError> {
        let mut tools: Vec<Tool> = Vec::with_capacity(self.0.len());
        for (index, Object(tool)) in self.0.into_iter().enumerate() {
            if let Some(JsonText(kind)) = &tool.kind
                && kind != FUNCTION
            {
                skip(index, kind);
                continue;
            }
            let Object(function) = tool.function.ok_or_else(|| {
                let param = format!("tools[{index}].function");
                let message = format!("'{param}' is missing.");
                ApiError::invalid_value(param, message)
            })?;
            let path = format!("tools[{index}].function");
            let function = NewTool {
                name: function.name,
                description: function.description,
                parameters: function.parameters,
                strict: function.strict,
            };
            function.add_to(&mut tools, &path, "parameters")?;
        }
        Ok(tools)
    }
}

/// Says in the log that a tool is skipped. Codex and Claude Code send tools that a server would
/// run with every request.
pub(in crate::api) fn skip(index: usize, kind: &str) {
    let kind = quoted(kind);
    tracing::warn!(index, %kind, "skipping a tool that the client does not run");
}

/// A tool as one of the APIs describes it.
pub(in crate::api) struct NewTool {
    pub(in crate::api) name: JsonText,
    pub(in crate::api) description: Option<JsonText>,
    pub(in crate::api) parameters: Option<ToolSchema>,
    pub(in crate::api) strict: Option<Bool>,
}

impl NewTool {
    /// Checks the tool at `path`, and adds it. `schema` is the name of the field with its schema.
    pub(in crate::api) fn add_to(
        self,
        tools: &mut Vec<Tool>,
        path: &str,
        schema: &str,
    ) -> Result<(), ApiError> {
        let JsonText(name) = self.name;
        check_name(&name, &format!("{path}.name"))?;
        if tools.iter().any(|other| other.name == name) {
            let param = format!("{path}.name");
            let message = format!("'{param}' is the name of another tool too.");
            return Err(ApiError::invalid_value(param, message));
        }
        let parameters = self.parameters.map(|ToolSchema(schema)| schema);
        let is_strict = self.strict.is_some_and(|Bool(strict)| strict);
        if let Some(parameters) = &parameters {
            let source = match is_strict {
                true => GrammarSource::json_schema(parameters),
                false => GrammarSource::lenient_json_schema(parameters),
            };
            source.map_err(|why| {
                let param = format!("{path}.{schema}");
                let message = format!("'{param}' {why}.");
                ApiError::invalid_value(param, message)
            })?;
        }
        tools.push(Tool {
            name,
            description: self.description.map(|JsonText(text)| text),
            parameters,
            path: format!("{path}.{schema}"),
            is_strict,
        });
        Ok(())
    }
}

/// Checks the name of a tool.
///
/// # Errors
/// If it is empty, too long, or has other characters than letters, digits, `_`, `-` and `.`.
pub(in crate::api) fn check_name(name: &str, param: &str) -> Result<(), ApiError> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if (1..=MAX_NAME_BYTES).contains(&name.len()) && name.bytes().all(is_valid) {
        return Ok(());
    }
    let message = format!(
        "'{param}' must have 1 to {MAX_NAME_BYTES} characters: letters, digits, '_', '-' and '.'; \
         got {}.",
        quoted(name)
    );
    Err(ApiError::invalid_value(param, message))
}

/// A tool that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = Tool)]
struct ToolField {
    /// What the tool is: `function`. Tools of other types are skipped: the server does not run
    /// them.
    #[serde(rename = "type")]
    kind: Option<JsonText>,
    /// The function that the tool is.
    #[schema(value_type = Option<FunctionField>)]
    function: Option<Object<FunctionField>>,
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ToolFunction)]
struct FunctionField {
    /// The name: letters, digits, `_`, `-` and `.`, at most 128.
    name: JsonText,
    /// What the function does. The model reads it.
    description: Option<JsonText>,
    /// The JSON schema of the arguments. Without one, the function has no arguments.
    parameters: Option<ToolSchema>,
    /// Whether a keyword of the schema that the server cannot enforce is an error.
    strict: Option<Bool>,
}

/// The only type of a tool that a client runs.
const FUNCTION: &str = "function";

/// The type of a tool that the model has to call.
#[derive(Debug)]
pub(in crate::api) struct FunctionKind;

impl JsonField<'_> for FunctionKind {
    const EXPECTED: &'static str = "'function'";

    fn schema() -> Value {
        json!({"enum": ["function"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<FunctionKind, E> {
        match value {
            Scalar::Text("function") => Ok(FunctionKind),
            Scalar::Text(kind) => Err(unsupported(format_args!(
                "Tools of type {} are not supported: the model can call functions only.",
                quoted(kind)
            ))),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// The schema of a tool's arguments.
#[derive(Debug)]
pub(in crate::api) struct ToolSchema(pub(in crate::api) Value);

impl ToolSchema {
    const EXPECTED: &'static str = "a JSON schema: an object";
}

impl<'de> Deserialize<'de> for ToolSchema {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<ToolSchema, D::Error> {
        let text = <&RawValue>::deserialize(value)?.get();
        if text.len() > MAX_SCHEMA_BYTES {
            return Err(D::Error::custom(format_args!(
                "may have at most {MAX_SCHEMA_BYTES} bytes; got {}.",
                text.len()
            )));
        }
        match serde_json::from_str(text) {
            Ok(schema @ Value::Object(_)) => Ok(ToolSchema(schema)),
            _ => {
                let given: Given = serde_json::from_str(text).map_err(D::Error::custom)?;
                Err(must_be(ToolSchema::EXPECTED, given))
            }
        }
    }
}

impl utoipa::PartialSchema for ToolSchema {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        crate::api::openapi::schema::embedded(json!({"type": "object"}))
    }
}

impl ToSchema for ToolSchema {
    fn name() -> std::borrow::Cow<'static, str> {
        std::any::type_name::<ToolSchema>().into()
    }
}

impl<'de> JsonField<'de> for Tools {
    const EXPECTED: &'static str = "an array";

    fn schema() -> Value {
        json!({"type": "array", "items": reference::<ToolField>(), "maxItems": MAX_TOOLS})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<ToolField>(schemas);
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Tools, A::Error> {
        at_most(MAX_TOOLS, "tools", &mut items).map(Tools)
    }
}

/// Which tool the model has to call.
#[derive(Debug)]
pub(in crate::api) enum ChoiceField {
    None,
    Auto,
    Required,
    Named(String),
}

/// A tool that the model has to call.
#[derive(Deserialize, ToSchema)]
#[schema(as = NamedTool)]
struct NamedToolField {
    /// What the tool is.
    #[serde(rename = "type")]
    #[expect(dead_code, reason = "a type that is not supported is an error")]
    kind: Option<FunctionKind>,
    /// The function to call.
    #[schema(value_type = NamedFunctionField)]
    function: Object<NamedFunctionField>,
}

/// The name of a function.
#[derive(Deserialize, ToSchema)]
#[schema(as = NamedFunction)]
struct NamedFunctionField {
    /// The name of a function in `tools`.
    name: JsonText,
}

impl<'de> JsonField<'de> for ChoiceField {
    const EXPECTED: &'static str = "'none', 'auto', 'required' or an object that names a function";

    fn schema() -> Value {
        let named = reference::<NamedToolField>();
        json!({"anyOf": [{"enum": ["none", "auto", "required"]}, named]})
    }

    fn add_referenced(schemas: &mut NamedSchemas) {
        collect::<NamedToolField>(schemas);
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<ChoiceField, E> {
        match value {
            Scalar::Text("none") => Ok(ChoiceField::None),
            Scalar::Text("auto") => Ok(ChoiceField::Auto),
            Scalar::Text("required") => Ok(ChoiceField::Required),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<ChoiceField, A::Error> {
        let named = NamedToolField::deserialize(MapAccessDeserializer::new(entries))?;
        let Object(NamedFunctionField {
            name: JsonText(name),
        }) = named.function;
        Ok(ChoiceField::Named(name))
    }
}

deserialize_fields!(FunctionKind, Tools, ChoiceField);
