//! The field `chat_template_kwargs`: variables that the client sets in the model's chat template.

use serde::de::{Error, IgnoredAny, MapAccess};
use serde_json::{Value, json};

use super::json_field::{Bool, Given, JsonField, deserialize_fields};
use super::reasoning::{ENABLE_THINKING, Effort};
use crate::api::error::quoted;
use crate::text::{TemplateArguments, TemplateValue};

const MAX_KWARGS: usize = 16;
/// The longest name and the longest text of a variable.
const MAX_BYTES: usize = 256;

/// The variables that the server sets itself, beside the names of tokens.
const RESERVED: [&str; 6] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
];

/// The variables of a request. A variable that is `null` is absent.
#[derive(Debug, Default)]
pub(super) struct TemplateKwargs(TemplateArguments);

impl TemplateKwargs {
    /// Returns the variables. `enable_thinking` and `effort` are fields beside them, which some
    /// clients send instead.
    pub(super) fn with_thinking(
        self,
        enable_thinking: Option<Bool>,
        effort: Option<Effort>,
    ) -> TemplateArguments {
        let TemplateKwargs(mut arguments) = self;
        if let Some(Bool(value)) = enable_thinking {
            let name = ENABLE_THINKING.to_owned();
            arguments.entry(name).or_insert(TemplateValue::Bool(value));
        }
        if let Some(effort) = effort {
            effort.set(&mut arguments);
        }
        arguments
    }
}

impl<'de> JsonField<'de> for TemplateKwargs {
    const EXPECTED: &'static str = "an object";

    fn schema() -> Value {
        let value =
            json!({"type": ["boolean", "number", "string", "null"], "maxLength": MAX_BYTES});
        json!({
            "type": "object",
            "propertyNames": {"maxLength": MAX_BYTES},
            "additionalProperties": value,
            "maxProperties": MAX_KWARGS,
        })
    }

    fn object<A: MapAccess<'de>>(mut entries: A) -> Result<TemplateKwargs, A::Error> {
        let mut arguments = TemplateArguments::new();
        let mut count = 0;
        while count < MAX_KWARGS
            && let Some((name, value)) = entries.next_entry::<String, Given>()?
        {
            count += 1;
            check_name(&name)?;
            let Some(value) = template_value(&name, value)? else {
                continue;
            };
            if arguments.insert(name.clone(), value).is_some() {
                let name = quoted(&name);
                return Err(Error::custom(format_args!("has the key {name} twice.")));
            }
        }
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            count += 1;
        }
        if count > MAX_KWARGS {
            return Err(Error::custom(format_args!(
                "may contain at most {MAX_KWARGS} entries; got {count}."
            )));
        }
        Ok(TemplateKwargs(arguments))
    }
}

fn check_name<E: Error>(name: &str) -> Result<(), E> {
    if name.len() > MAX_BYTES {
        let bytes = name.len();
        return Err(E::custom(format_args!(
            "must have keys of at most {MAX_BYTES} bytes; got one of {bytes}."
        )));
    }
    if RESERVED.contains(&name) || name.ends_with("_token") {
        let name = quoted(name);
        return Err(E::custom(format_args!(
            "must not set {name}, which the server sets itself."
        )));
    }
    Ok(())
}

/// Returns the value of a variable; `None` if it is `null`.
fn template_value<E: Error>(name: &str, value: Given) -> Result<Option<TemplateValue>, E> {
    let value = match value {
        Given::Null => return Ok(None),
        Given::Bool(value) => TemplateValue::Bool(value),
        Given::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(integer), _) => TemplateValue::Integer(integer),
            (None, Some(float)) => TemplateValue::Float(float),
            (None, None) => return Err(must_be_scalar(name, &Given::Number(number))),
        },
        Given::Text(text) if text.len() > MAX_BYTES => {
            let (name, bytes) = (quoted(name), text.len());
            return Err(E::custom(format_args!(
                "may have strings of at most {MAX_BYTES} bytes; {name} has {bytes}."
            )));
        }
        Given::Text(text) => TemplateValue::Text(text),
        other => return Err(must_be_scalar(name, &other)),
    };
    Ok(Some(value))
}

fn must_be_scalar<E: Error>(name: &str, got: &Given) -> E {
    let name = quoted(name);
    E::custom(format_args!(
        "must map names to booleans, numbers and strings; {name} is {got}."
    ))
}

deserialize_fields!(TemplateKwargs);
