//! The fields by which a request asks for an answer of a certain structure, in the names of OpenAI,
//! vLLM, SGLang and llama.cpp.
//!
//! Invariant: at most one of them constrains an answer.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::json_field::{
    Bool, Given, JsonField, JsonText, Object, Scalar, deserialize_fields, must_be, unsupported,
};
use crate::api::error::ApiError;
use crate::api::generation::request::{FieldGrammar, Params};
use crate::constraint::{GrammarSource, SourceError};

/// The structure of an answer. At most one field may be given.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct StructureFields {
    /// The format of the answer.
    #[schema(value_type = Option<ResponseFormat>)]
    response_format: Option<Object<ResponseFormat>>,
    /// The structure of the answer, in the names of vLLM.
    #[schema(value_type = Option<StructuredOutputs>)]
    structured_outputs: Option<Object<StructuredOutputs>>,
    /// The same as `structured_outputs.json`.
    guided_json: Option<JsonSchema>,
    /// The same as `structured_outputs.regex`.
    guided_regex: Option<JsonText>,
    /// The same as `structured_outputs.choice`.
    guided_choice: Option<ChoiceTexts>,
    /// The same as `structured_outputs.grammar`.
    guided_grammar: Option<JsonText>,
    /// A JSON schema, as SGLang and llama.cpp name it. An empty text is none.
    json_schema: Option<JsonSchema>,
    /// A regular expression, as SGLang names it. An empty text is none.
    regex: Option<JsonText>,
    /// A grammar in GBNF or Lark, as SGLang names it. An empty text is none.
    ebnf: Option<JsonText>,
    /// A grammar in GBNF or Lark, as llama.cpp names it. An empty text is none.
    grammar: Option<JsonText>,
}

/// The format of an answer.
#[derive(Deserialize, ToSchema)]
struct ResponseFormat {
    /// Text, any JSON object, or JSON that a schema describes.
    #[serde(rename = "type")]
    format: FormatType,
    /// The schema, if the type is `json_schema`.
    #[schema(value_type = Option<NamedSchema>)]
    json_schema: Option<Object<NamedSchema>>,
    /// A schema for the type `json_object`, as llama.cpp reads it.
    schema: Option<JsonSchema>,
}

/// A JSON schema with a name.
#[derive(Deserialize, ToSchema)]
#[expect(
    dead_code,
    reason = "the types of these fields are checked; nothing else needs them"
)]
struct NamedSchema {
    /// The schema that the answer follows.
    schema: Option<JsonSchema>,
    /// The name of the schema. It does not change the answer.
    name: Option<JsonText>,
    /// What the schema is for. It does not change the answer.
    description: Option<JsonText>,
    /// The answer always follows the schema, whatever this says.
    strict: Option<Bool>,
}

/// The structure of an answer, in the names of vLLM. At most one field may be given.
#[derive(Deserialize, ToSchema)]
struct StructuredOutputs {
    /// A JSON schema, as an object or as its text.
    json: Option<JsonSchema>,
    /// A regular expression that matches the whole answer.
    regex: Option<JsonText>,
    /// The texts of which the answer is one.
    choice: Option<ChoiceTexts>,
    /// A grammar in GBNF, if it has `::=`, and otherwise in Lark.
    grammar: Option<JsonText>,
    /// Whether the answer is any JSON object.
    json_object: Option<Bool>,
    /// Whether objects have only the properties that a schema lists, where the schema says nothing
    /// of `additionalProperties`. It holds for schemas in other fields of the request too. Default:
    /// true.
    disable_additional_properties: Option<Bool>,
    /// Not supported.
    #[expect(dead_code, reason = "reading it is an error")]
    structural_tag: Option<NotSupported>,
    /// Not supported: JSON has one space after each comma and colon.
    #[expect(dead_code, reason = "reading it is an error")]
    whitespace_pattern: Option<NotSupported>,
}

#[derive(Clone, Copy)]
pub(in crate::api) enum FormatType {
    Text,
    JsonObject,
    JsonSchema,
}

impl JsonField<'_> for FormatType {
    const EXPECTED: &'static str = "'text', 'json_object' or 'json_schema'";

    fn schema() -> Value {
        json!({"type": "string", "enum": ["text", "json_object", "json_schema"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<FormatType, E> {
        match value {
            Scalar::Text("text") => Ok(FormatType::Text),
            Scalar::Text("json_object") => Ok(FormatType::JsonObject),
            Scalar::Text("json_schema") => Ok(FormatType::JsonSchema),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// A JSON schema, or its text.
pub(in crate::api) struct JsonSchema(Value);

impl JsonSchema {
    fn is_empty(&self) -> bool {
        self.0 == Value::Null
    }
}

impl<'de> JsonField<'de> for JsonSchema {
    const EXPECTED: &'static str = "a JSON schema: an object, a boolean or the text of one";

    fn schema() -> Value {
        json!({"type": ["object", "boolean", "string"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<JsonSchema, E> {
        match value {
            Scalar::Bool(value) => Ok(JsonSchema(value.into())),
            Scalar::Text("") => Ok(JsonSchema(Value::Null)),
            Scalar::Text(text) => serde_json::from_str(text).map(JsonSchema).map_err(|error| {
                E::custom(format_args!("must be the text of a JSON schema: {error}."))
            }),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<JsonSchema, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(entries)).map(JsonSchema)
    }
}

/// The texts of which an answer is one.
struct ChoiceTexts(Vec<String>);

impl<'de> JsonField<'de> for ChoiceTexts {
    const EXPECTED: &'static str = "an array of strings";

    fn schema() -> Value {
        json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1})
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<ChoiceTexts, A::Error> {
        let mut texts = Vec::new();
        while let Some(item) = items.next_element::<Given>()? {
            match item {
                Given::Text(text) => texts.push(text),
                other => return Err(must_be(Self::EXPECTED, other)),
            }
        }
        Ok(ChoiceTexts(texts))
    }
}

/// A field that the server knows but does not support.
struct NotSupported;

impl<'de> JsonField<'de> for NotSupported {
    const EXPECTED: &'static str = "null";

    fn schema() -> Value {
        json!({"type": "null"})
    }

    fn scalar<E: Error>(_: Scalar<'_>) -> Result<NotSupported, E> {
        Err(not_supported())
    }

    fn array<A: SeqAccess<'de>>(_: A) -> Result<NotSupported, A::Error> {
        Err(not_supported())
    }

    fn object<A: MapAccess<'de>>(_: A) -> Result<NotSupported, A::Error> {
        Err(not_supported())
    }
}

fn not_supported<E: Error>() -> E {
    unsupported("This server supports 'json', 'regex', 'choice' and 'grammar' only.")
}

deserialize_fields!(FormatType, JsonSchema, ChoiceTexts, NotSupported);

impl FieldGrammar {
    /// Returns the grammar of JSON objects, which `field` asks for.
    pub(in crate::api) fn json_object(field: &'static str) -> FieldGrammar {
        FieldGrammar {
            field,
            source: GrammarSource::json_object(),
            parts: Vec::new(),
        }
    }

    /// Returns the grammar of a schema in `field`. `is_closed` says whether objects have only the
    /// properties that it lists.
    ///
    /// # Errors
    /// If the schema is over a budget.
    pub(in crate::api) fn json_schema(
        field: &'static str,
        schema: JsonSchema,
        is_closed: bool,
    ) -> Result<FieldGrammar, ApiError> {
        let source = Wanted::Schema(schema).source(is_closed);
        Ok(FieldGrammar {
            field,
            source: source
                .map_err(|why| ApiError::invalid_value(field, format!("'{field}' {why}.")))?,
            parts: Vec::new(),
        })
    }
}

/// What a field asks for, before its budget is checked.
enum Wanted {
    Schema(JsonSchema),
    JsonObject,
    Regex(String),
    Choice(Vec<String>),
    Grammar(String),
}

impl StructureFields {
    /// Returns the grammar that the request asks for, if any.
    ///
    /// # Errors
    /// If it asks for several, one is over a budget, or no token ends the answer.
    pub(in crate::api) fn check(self, params: &Params) -> Result<Option<FieldGrammar>, ApiError> {
        let grammar = self.grammar()?;
        if let Some(FieldGrammar { field, .. }) = &grammar {
            check_end(field, params)?;
        }
        Ok(grammar)
    }

    fn grammar(self) -> Result<Option<FieldGrammar>, ApiError> {
        let mut wanted = Vec::new();
        let outputs = self.structured_outputs.as_ref();
        let is_closed = outputs
            .and_then(|Object(outputs)| outputs.disable_additional_properties.as_ref())
            .is_none_or(|Bool(is_closed)| *is_closed);
        if let Some(Object(format)) = self.response_format {
            wanted.extend(format.wanted()?);
        }
        if let Some(Object(outputs)) = self.structured_outputs {
            wanted.extend(outputs.wanted());
        }
        let text = |field, text: Option<JsonText>, wanted: fn(String) -> Wanted| {
            text.map(|JsonText(text)| (field, wanted(text)))
        };
        let schema = |field, schema: Option<JsonSchema>| {
            schema.map(|schema| (field, Wanted::Schema(schema)))
        };
        let choice = self.guided_choice;
        let guided = [
            schema("guided_json", self.guided_json),
            text("guided_regex", self.guided_regex, Wanted::Regex),
            choice.map(|ChoiceTexts(texts)| ("guided_choice", Wanted::Choice(texts))),
            text("guided_grammar", self.guided_grammar, Wanted::Grammar),
        ];
        let is_given = |field: &Option<JsonText>| {
            field
                .as_ref()
                .is_some_and(|JsonText(text)| !text.is_empty())
        };
        let own_schema = self.json_schema.filter(|schema| !schema.is_empty());
        let of_others = [
            schema("json_schema", own_schema),
            text(
                "regex",
                Some(self.regex).filter(is_given).flatten(),
                Wanted::Regex,
            ),
            text(
                "ebnf",
                Some(self.ebnf).filter(is_given).flatten(),
                Wanted::Grammar,
            ),
            text(
                "grammar",
                Some(self.grammar).filter(is_given).flatten(),
                Wanted::Grammar,
            ),
        ];
        wanted.extend(guided.into_iter().chain(of_others).flatten());
        let mut wanted = wanted.into_iter();
        let Some((field, first)) = wanted.next() else {
            return Ok(None);
        };
        if let Some((other, _)) = wanted.next() {
            let message = format!(
                "'{field}' and '{other}' both constrain the answer. Send only one of them."
            );
            return Err(ApiError::invalid_value(other, message));
        }
        let source = first
            .source(is_closed)
            .map_err(|why| ApiError::invalid_value(field, format!("'{field}' {why}.")))?;
        Ok(Some(FieldGrammar {
            field,
            source,
            parts: Vec::new(),
        }))
    }
}

impl ResponseFormat {
    fn wanted(self) -> Result<Option<(&'static str, Wanted)>, ApiError> {
        let field = "response_format.json_schema.schema";
        let named = self.json_schema.and_then(|Object(named)| named.schema);
        match (self.format, self.schema, named) {
            (FormatType::Text, ..) => Ok(None),
            (FormatType::JsonObject, Some(schema), _) => {
                Ok(Some(("response_format.schema", Wanted::Schema(schema))))
            }
            (FormatType::JsonObject, None, _) => Ok(Some(("response_format", Wanted::JsonObject))),
            (FormatType::JsonSchema, _, Some(schema)) => Ok(Some((field, Wanted::Schema(schema)))),
            (FormatType::JsonSchema, _, None) => {
                let message = format!("'{field}' is missing.");
                Err(ApiError::invalid_value(field, message))
            }
        }
    }
}

impl StructuredOutputs {
    fn wanted(self) -> impl Iterator<Item = (&'static str, Wanted)> {
        let text = |JsonText(text): JsonText| text;
        let is_object = self.json_object.is_some_and(|Bool(is_object)| is_object);
        let wanted = [
            self.json
                .map(|schema| ("structured_outputs.json", Wanted::Schema(schema))),
            self.regex
                .map(|regex| ("structured_outputs.regex", Wanted::Regex(text(regex)))),
            self.choice
                .map(|choice| ("structured_outputs.choice", Wanted::Choice(choice.0))),
            self.grammar
                .map(|grammar| ("structured_outputs.grammar", Wanted::Grammar(text(grammar)))),
            is_object.then_some(("structured_outputs.json_object", Wanted::JsonObject)),
        ];
        wanted.into_iter().flatten()
    }
}

impl Wanted {
    fn source(self, is_closed: bool) -> Result<GrammarSource, SourceError> {
        match self {
            Wanted::Schema(JsonSchema(schema)) if is_closed => GrammarSource::json_schema(&schema),
            Wanted::Schema(JsonSchema(schema)) => GrammarSource::open_json_schema(&schema),
            Wanted::JsonObject => Ok(GrammarSource::json_object()),
            Wanted::Regex(pattern) => GrammarSource::regex(&pattern),
            Wanted::Choice(texts) => GrammarSource::choice(&texts),
            Wanted::Grammar(text) => GrammarSource::grammar(&text),
        }
    }
}

/// Checks that a token can end an answer that `field` constrains.
///
/// # Errors
/// If none can.
pub(in crate::api) fn check_end(field: &str, params: &Params) -> Result<(), ApiError> {
    if !params.stop_tokens.is_empty() {
        return Ok(());
    }
    let message = format!(
        "'{field}' needs a token that ends the answer, and the request has none. \
         Omit 'ignore_eos' or set 'stop_token_ids'."
    );
    Err(ApiError::invalid_value(field, message))
}
