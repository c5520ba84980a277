//! Reads the fields of a request's body one by one.
//!
//! Invariant: `null` means the same as an absent field.
//!
//! Invariant: a value of the wrong type is an error that names its field.
//!
//! Invariant: every number that is returned lies within the limits that the caller gave.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::{ApiError, quoted};

/// The fields of a JSON object.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Returns the fields of a whole body.
    pub(super) fn of_body(body: &'a Value) -> Result<Fields<'a>, ApiError> {
        match body {
            Value::Object(object) => Ok(Fields { object }),
            other => Err(ApiError::invalid_json(format!(
                "The request body must be a JSON object; got {}.",
                described(other)
            ))),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "a boolean", Value::as_bool)
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    pub(super) fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "an array", |value| {
            value.as_array().map(Vec::as_slice)
        })
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.read(name, "an object", |value| {
            value.as_object().map(|object| Fields { object })
        })
    }

    pub(super) fn entries(&self) -> impl ExactSizeIterator<Item = (&'a String, &'a Value)> {
        self.object.iter()
    }

    /// Returns an integer. A number such as `2.0` is an integer too.
    pub(super) fn integer(
        &self,
        name: &str,
        limits: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(number) = self.read(name, "an integer", integer)? else {
            return Ok(None);
        };
        match i64::try_from(number) {
            Ok(number) if limits.contains(&number) => Ok(Some(number)),
            _ => {
                let message = format!("'{name}' must be {}; got {number}.", range(&limits));
                Err(ApiError::invalid_value(name, message))
            }
        }
    }

    /// Returns an integer that is not negative.
    pub(super) fn count(
        &self,
        name: &str,
        limits: RangeInclusive<u32>,
    ) -> Result<Option<u32>, ApiError> {
        let (min, max) = limits.into_inner();
        let number = self.integer(name, i64::from(min)..=i64::from(max))?;
        Ok(number.map(|number| number as u32))
    }

    pub(super) fn number(
        &self,
        name: &str,
        limits: RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let as_number = |value: &'a Value| Some((value.as_f64()?, value));
        let Some((number, value)) = self.read(name, "a number", as_number)? else {
            return Ok(None);
        };
        if !limits.contains(&number) {
            let (min, max) = limits.into_inner();
            let message = format!("'{name}' must be from {min} to {max}; got {value}.");
            return Err(ApiError::invalid_value(name, message));
        }
        Ok(Some(number as f32))
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let checked = |value| read(value).ok_or_else(|| wrong_type(name, expected, value));
        self.get(name).map(checked).transpose()
    }
}

/// Returns the error for a `param` whose `value` is not what is `expected`.
pub(super) fn wrong_type(param: &str, expected: &str, value: &Value) -> ApiError {
    let message = format!("'{param}' must be {expected}; got {}.", described(value));
    ApiError::invalid_value(param, message)
}

/// Checks that `param` contains at most `limit` items. `items` names them in the error message.
pub(super) fn check_count(
    param: &str,
    items: &str,
    count: usize,
    limit: usize,
) -> Result<(), ApiError> {
    if count <= limit {
        return Ok(());
    }
    let message = format!("'{param}' may contain at most {limit} {items}; got {count}.");
    Err(ApiError::invalid_value(param, message))
}

/// Returns the integer of a JSON number, which may be larger than 64 bits can hold.
pub(super) fn integer(value: &Value) -> Option<i128> {
    let whole =
        |number: f64| (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i128);
    value
        .as_i64()
        .map(i128::from)
        .or_else(|| value.as_u64().map(i128::from))
        .or_else(|| value.as_f64().and_then(whole))
}

fn range(limits: &RangeInclusive<i64>) -> String {
    match (*limits.start(), *limits.end()) {
        (min, i64::MAX) => format!("at least {min}"),
        (min, max) => format!("from {min} to {max}"),
    }
}

/// Returns a short description of `value` for an error message.
pub(super) fn described(value: &Value) -> String {
    match value {
        Value::Null => "null or no value".to_owned(),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}
