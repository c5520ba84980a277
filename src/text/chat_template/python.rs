//! Jinja as Python has it, where `minijinja` differs. `tests/jinja` compares the two.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, escape_formatter, filters};

use super::python_methods::call_method;
use super::python_text::{float, text_of, write_text};
use super::syntax::{EACH, MODULO};
use super::to_json::to_json;

/// The longest text over whose characters a loop goes. A longer loop would run out of fuel.
const MAX_CHARS: usize = 1_000_000;

/// Makes an environment read templates as Python does.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(call_method);
    environment.set_formatter(|out, state, value| match state.auto_escape() {
        AutoEscape::None => {
            write_text(out, value).map_err(|_| Error::from(ErrorKind::WriteFailure))
        }
        _ => escape_formatter(out, state, value),
    });
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| text_of(value));
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("replace", replace);
    environment.add_filter("int", int);
    environment.add_filter("attr", |_: &Value, _: &str| Value::UNDEFINED);
    environment.add_filter(EACH, each);
    environment.add_filter(MODULO, modulo);
}

fn wrong(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Python iterates over an undefined variable, which is empty, but not over `none`.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// A sequence of Python has a length and items: a text, an object and an undefined variable too.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), String | Map | Seq | Undefined)
}

/// Returns the length of a value. An undefined variable is empty.
fn length(value: &Value) -> Result<usize, Error> {
    match value.is_undefined() {
        true => Ok(0),
        false => filters::length(value),
    }
}

fn default(value: &Value, given: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let named = |name| options.get::<Option<Value>>(name);
    let (other, boolean) = (named("default_value")?, named("boolean")?);
    options.assert_all_used()?;
    let other = given.first().cloned().or(other);
    let takes_false = given
        .get(1)
        .cloned()
        .or(boolean)
        .unwrap_or_default()
        .is_true();
    if value.is_undefined() || (takes_false && !value.is_true()) {
        return Ok(other.unwrap_or_else(|| Value::from("")));
    }
    Ok(value.clone())
}

/// Returns a value as an integer, or `default` if it is none.
fn int(state: &State<'_, '_>, value: &Value, given: Rest<Value>, options: Kwargs) -> Value {
    let named = |name| options.get::<Option<Value>>(name).ok().flatten();
    let default = given.first().cloned().or_else(|| named("default"));
    let base = given.get(1).cloned().or_else(|| named("base"));
    let base = base.and_then(|base| u32::try_from(base).ok());
    let none = Kwargs::from_iter([("default", Value::from(0))]);
    let converted = filters::int(state, value, None, base, none);
    converted.unwrap_or_else(|_| default.unwrap_or_else(|| Value::from(0)))
}

fn replace(value: &Value, old: &str, new: &str, count: Option<i64>) -> String {
    let text = text_of(value);
    match count.map(usize::try_from) {
        Some(Ok(count)) => text.replacen(old, new, count),
        _ => text.replace(old, new),
    }
}

/// Returns what a loop goes over. The characters of a text become a list, so that the loop knows
/// its last one.
fn each(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            if text.chars().nth(MAX_CHARS).is_some() {
                return Err(Error::from(ErrorKind::OutOfFuel));
            }
            Ok(text
                .chars()
                .map(|char| Value::from(char.to_string()))
                .collect())
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            let why = format!(
                "a loop cannot go over a value of the type '{}'",
                value.kind()
            );
            Err(wrong(why))
        }
        _ => Ok(value.clone()),
    }
}

/// The operator `%`: it formats a text, and divides numbers.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let arguments: Vec<Value> = match right.kind() {
            ValueKind::Map => {
                let keys = right.try_iter()?;
                let members = keys.map(|key| Ok((text_of(&key), right.get_item(&key)?)));
                vec![members.collect::<Result<Kwargs, Error>>()?.into()]
            }
            _ if right.is_tuple() => right.try_iter()?.collect(),
            _ => vec![right.clone()],
        };
        return format(FormatStyle::Printf, text, &arguments).map(Value::from);
    }
    let number = |value: &Value| match value.kind() {
        ValueKind::Number => Some(value.clone()),
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        _ => None,
    };
    let (Some(left), Some(right)) = (number(left), number(right)) else {
        let kinds = (left.kind(), right.kind());
        return Err(wrong(format!(
            "'%' has no meaning for '{}' and '{}'",
            kinds.0, kinds.1
        )));
    };
    if !right.is_true() {
        return Err(wrong("division by zero".to_owned()));
    }
    if float(&left).is_some() || float(&right).is_some() {
        let (left, right) = (f64::try_from(left)?, f64::try_from(right)?);
        return Ok(Value::from(left - right * (left / right).floor()));
    }
    let (left, right) = (i128::try_from(left)?, i128::try_from(right)?);
    let rest = left.wrapping_rem(right);
    let is_other_side = rest != 0 && (rest < 0) != (right < 0);
    let rest = if is_other_side { rest + right } else { rest };
    Ok(i64::try_from(rest).map_or_else(|_| Value::from(rest), Value::from))
}
