//! The fields of a request's body, read one by one.
//!
//! Invariants: null is the same as absent; a value of the wrong kind is an error that names its field; a number that leaves here
//! lies within the limits that were asked for.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// A JSON object whose fields are asked for by name.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The fields of a whole body.
    pub(super) fn of_body(body: &'a Value) -> Result<Fields<'a>, ApiError> {
        match body {
            Value::Object(object) => Ok(Fields { object }),
            other => Err(ApiError::invalid_json(format!(
                "The body must be a JSON object, not {}.",
                kind_of(other)
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

    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.object.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.object.len()
    }

    /// A whole number, also one written like `2.0`.
    pub(super) fn integer(
        &self,
        name: &str,
        limits: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(number) = self.read(name, "an integer", integer)? else {
            return Ok(None);
        };
        match i64::try_from(number)
            .ok()
            .filter(|number| limits.contains(number))
        {
            Some(number) => Ok(Some(number)),
            None => Err(ApiError::invalid_value(
                name,
                format!("'{name}' must be {}.", span(&limits)),
            )),
        }
    }

    pub(super) fn number(
        &self,
        name: &str,
        limits: RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let Some(number) = self.read(name, "a number", Value::as_f64)? else {
            return Ok(None);
        };
        if !limits.contains(&number) {
            let (least, most) = limits.into_inner();
            return Err(ApiError::invalid_value(
                name,
                format!("'{name}' must be from {least} to {most}."),
            ));
        }
        Ok(Some(number as f32))
    }

    fn read<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(wrong_kind(name, expected, value)),
            },
        }
    }
}

/// `param` holds something else than `expected`.
pub(super) fn wrong_kind(param: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid_value(
        param,
        format!("'{param}' must be {expected}, not {}.", kind_of(value)),
    )
}

/// A whole number of any size that JSON has here.
pub(super) fn integer(value: &Value) -> Option<i128> {
    let whole =
        |number: f64| (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i128);
    match value {
        Value::Number(number) => number
            .as_i64()
            .map(i128::from)
            .or_else(|| number.as_u64().map(i128::from))
            .or_else(|| number.as_f64().and_then(whole)),
        _ => None,
    }
}

fn span(limits: &RangeInclusive<i64>) -> String {
    match (*limits.start(), *limits.end()) {
        (least, i64::MAX) => format!("at least {least}"),
        (least, most) => format!("from {least} to {most}"),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
