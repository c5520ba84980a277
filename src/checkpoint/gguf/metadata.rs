//! The metadata of a GGUF file: values by key.
//!
//! Source: the GGUF specification, versions 2 and 3.

use std::collections::BTreeMap;

use super::entries::{MetadataEntries, MetadataValue};
use crate::checkpoint::cursor::Cursor;
use crate::checkpoint::error::{LoadError, LoadResult};

/// The maximum number of keys. Published files have less than a hundred.
const MAX_KEYS: u64 = 1 << 16;

/// The maximum number of elements in all arrays together. The largest published vocabularies and
/// their merges have about a million.
const MAX_ELEMENTS: usize = 1 << 22;

/// The key of a whole `tokenizer.json`.
pub(super) const HUGGING_FACE_TOKENIZER: &str = "tokenizer.huggingface.json";

/// The longest `tokenizer.json` in the metadata. One with 128 K tokens has 9 MB.
const MAX_TOKENIZER_BYTES: u64 = 32 << 20;

/// The key of all stop tokens, in files that Sterna wrote. Other keys name at most three.
pub(crate) const STOP_TOKENS: &str = "sterna.stop_token_ids";

/// The key of the order of I2_S weights, in files that Sterna wrote.
pub(crate) const STATED_I2S_ORDER: &str = "sterna.i2s_order";

/// How deep arrays may lie in arrays.
const MAX_NESTING: usize = 4;

/// The value of a key.
#[derive(Debug, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(Box<str>),
    Texts(Vec<Box<str>>),
    /// An array of integers, floats or booleans.
    Numbers(Vec<f64>),
    /// An array of arrays. No key that this engine reads has one.
    Nested,
}

/// The types of values, by their numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Unsigned(usize),
    Signed(usize),
    Float32,
    Float64,
    Bool,
    Text,
    Array,
}

impl Kind {
    fn read(cursor: &mut Cursor<'_>, what: &str) -> Result<Kind, String> {
        Ok(match cursor.u32(what)? {
            0 => Kind::Unsigned(1),
            1 => Kind::Signed(1),
            2 => Kind::Unsigned(2),
            3 => Kind::Signed(2),
            4 => Kind::Unsigned(4),
            5 => Kind::Signed(4),
            6 => Kind::Float32,
            7 => Kind::Bool,
            8 => Kind::Text,
            9 => Kind::Array,
            10 => Kind::Unsigned(8),
            11 => Kind::Signed(8),
            12 => Kind::Float64,
            other => return Err(format!("{what}: unknown value type {other}")),
        })
    }

    /// Returns the fewest bytes that a value takes.
    fn min_bytes(self) -> usize {
        match self {
            Kind::Unsigned(bytes) | Kind::Signed(bytes) => bytes,
            Kind::Bool => 1,
            Kind::Float32 => 4,
            Kind::Float64 | Kind::Text => 8,
            Kind::Array => 12,
        }
    }
}

/// Values by key.
#[derive(Debug)]
pub(crate) struct Metadata {
    /// The file, for errors.
    file: String,
    values: BTreeMap<Box<str>, Value>,
}

impl Metadata {
    /// Reads `count` keys with their values.
    pub(super) fn read(file: &str, cursor: &mut Cursor<'_>, count: u64) -> LoadResult<Metadata> {
        let values = read_values(cursor, count).map_err(|why| LoadError::file(file, why))?;
        let file = file.to_owned();
        Ok(Metadata { file, values })
    }

    /// Returns the keys that begin with `prefix`.
    pub(crate) fn keys_with_prefix(&self, prefix: &str) -> impl Iterator<Item = &str> {
        let keys = self.values.keys().map(|key| &**key);
        keys.filter(move |key| key.starts_with(prefix))
    }

    /// Returns the error that `key` has `problem`.
    pub(crate) fn error(&self, key: &str, problem: impl std::fmt::Display) -> LoadError {
        LoadError::file(&self.file, format!("metadata {key:?}: {problem}"))
    }

    fn missing(&self, key: &str) -> LoadError {
        self.error(key, "missing")
    }

    fn wrong(&self, key: &str, expected: &str, value: &Value) -> LoadError {
        let found = match value {
            Value::Integer(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::Text(_) => "a string".to_owned(),
            Value::Texts(_) => "an array of strings".to_owned(),
            Value::Numbers(_) => "an array of numbers".to_owned(),
            Value::Nested => "an array of arrays".to_owned(),
        };
        self.error(key, format!("must be {expected}; got {found}"))
    }

    /// Returns a size or an id.
    pub(crate) fn size(&self, key: &str) -> LoadResult<Option<usize>> {
        let integer = |value: &Value| match value {
            Value::Integer(value) => usize::try_from(*value).ok(),
            _ => None,
        };
        self.get(key, "an integer that is not negative", integer)
    }

    /// Returns a size that must be present.
    pub(crate) fn require_size(&self, key: &str) -> LoadResult<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns a float, or an integer as one.
    pub(crate) fn float(&self, key: &str) -> LoadResult<Option<f64>> {
        let float = |value: &Value| match value {
            Value::Float(value) => Some(*value),
            Value::Integer(value) => Some(*value as f64),
            _ => None,
        };
        self.get(key, "a number", float)
    }

    pub(crate) fn bool(&self, key: &str) -> LoadResult<Option<bool>> {
        let bool = |value: &Value| match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        };
        self.get(key, "true or false", bool)
    }

    pub(crate) fn text(&self, key: &str) -> LoadResult<Option<&str>> {
        let text = |value: &Value| matches!(value, Value::Text(_)).then_some(());
        self.get(key, "a string", text)?;
        Ok(self.values.get(key).and_then(|value| match value {
            Value::Text(text) => Some(&**text),
            _ => None,
        }))
    }

    /// Returns a string that must be present.
    pub(crate) fn require_text(&self, key: &str) -> LoadResult<&str> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns an array of strings that must be present.
    pub(crate) fn require_texts(&self, key: &str) -> LoadResult<&[Box<str>]> {
        match self.values.get(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            Some(other) => Err(self.wrong(key, "an array of strings", other)),
            None => Err(self.missing(key)),
        }
    }

    /// Returns an array of numbers.
    pub(crate) fn numbers(&self, key: &str) -> LoadResult<Option<&[f64]>> {
        match self.values.get(key) {
            Some(Value::Numbers(numbers)) => Ok(Some(numbers)),
            Some(other) => Err(self.wrong(key, "an array of numbers", other)),
            None => Ok(None),
        }
    }

    /// Returns the keys about the tokenizer, except chat templates, to write them again.
    ///
    /// # Errors
    /// If a value is of a kind that no tokenizer has.
    pub(crate) fn tokenizer_entries(&self) -> LoadResult<MetadataEntries> {
        let keys = self.values.iter().filter(|(key, _)| {
            key.starts_with("tokenizer.") && !key.starts_with("tokenizer.chat_template")
        });
        let entries = keys.map(|(key, value)| {
            let strings = |texts: &[Box<str>]| texts.iter().map(|text| text.to_string()).collect();
            let value = match value {
                Value::Integer(integer) => u32::try_from(*integer).ok().map(MetadataValue::Size),
                Value::Float(float) => Some(MetadataValue::Float(*float as f32)),
                Value::Bool(bool) => Some(MetadataValue::Bool(*bool)),
                Value::Text(text) => Some(MetadataValue::Text(text.to_string())),
                Value::Texts(texts) => Some(MetadataValue::Texts(strings(texts))),
                Value::Numbers(numbers) if key.ends_with("scores") => {
                    let scores = numbers.iter().map(|score| *score as f32);
                    Some(MetadataValue::Floats(scores.collect()))
                }
                Value::Numbers(numbers) => {
                    let is_integer = |number: &f64| f64::from(*number as i32) == *number;
                    let integers = || numbers.iter().map(|number| *number as i32).collect();
                    let are_integers = numbers.iter().all(is_integer);
                    are_integers.then(|| MetadataValue::Integers(integers()))
                }
                Value::Nested => None,
            };
            let problem = || self.error(key, "a tokenizer has no value of this kind");
            Ok((key.to_string(), value.ok_or_else(problem)?))
        });
        entries.collect()
    }

    fn get<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> LoadResult<Option<T>> {
        let value = self.values.get(key).map(|value| {
            let wrong = || self.wrong(key, expected, value);
            convert(value).ok_or_else(wrong)
        });
        value.transpose()
    }
}

fn read_values(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<Box<str>, Value>, String> {
    if count > MAX_KEYS {
        return Err(format!(
            "{count} metadata keys are too many; the limit is {MAX_KEYS}"
        ));
    }
    let mut elements_left = MAX_ELEMENTS;
    let mut values = BTreeMap::new();
    for index in 0..count {
        let key = cursor.text(&format!("metadata key {index}"))?;
        let what = format!("metadata {key:?}");
        let kind = Kind::read(cursor, &what)?;
        let value = if kind == Kind::Text && key == HUGGING_FACE_TOKENIZER {
            let text = cursor.text_within(&what, MAX_TOKENIZER_BYTES)?;
            Value::Text(text.into())
        } else {
            read_value(cursor, kind, &what, &mut elements_left)?
        };
        if values.insert(Box::from(key), value).is_some() {
            return Err(format!("{what}: the key occurs twice"));
        }
    }
    Ok(values)
}

fn read_value(
    cursor: &mut Cursor<'_>,
    kind: Kind,
    what: &str,
    elements_left: &mut usize,
) -> Result<Value, String> {
    match kind {
        Kind::Text => cursor.text(what).map(|text| Value::Text(text.into())),
        Kind::Array => read_array(cursor, what, elements_left, 1),
        _ => read_scalar(cursor, kind, what),
    }
}

fn read_scalar(cursor: &mut Cursor<'_>, kind: Kind, what: &str) -> Result<Value, String> {
    Ok(match kind {
        Kind::Unsigned(1) => Value::Integer(u8::from_le_bytes(cursor.take(what)?).into()),
        Kind::Unsigned(2) => Value::Integer(u16::from_le_bytes(cursor.take(what)?).into()),
        Kind::Unsigned(4) => Value::Integer(u32::from_le_bytes(cursor.take(what)?).into()),
        Kind::Unsigned(_) => Value::Integer(u64::from_le_bytes(cursor.take(what)?).into()),
        Kind::Signed(1) => Value::Integer(i8::from_le_bytes(cursor.take(what)?).into()),
        Kind::Signed(2) => Value::Integer(i16::from_le_bytes(cursor.take(what)?).into()),
        Kind::Signed(4) => Value::Integer(i32::from_le_bytes(cursor.take(what)?).into()),
        Kind::Signed(_) => Value::Integer(i64::from_le_bytes(cursor.take(what)?).into()),
        Kind::Float32 => Value::Float(f32::from_le_bytes(cursor.take(what)?).into()),
        Kind::Float64 => Value::Float(f64::from_le_bytes(cursor.take(what)?)),
        Kind::Bool => match cursor.take::<1>(what)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [other] => return Err(format!("{what}: a boolean must be 0 or 1; got {other}")),
        },
        Kind::Text | Kind::Array => unreachable!("strings and arrays are not scalars"),
    })
}

/// Reads an array. `depth` is 1 for an array that lies in no other one.
fn read_array(
    cursor: &mut Cursor<'_>,
    what: &str,
    elements_left: &mut usize,
    depth: usize,
) -> Result<Value, String> {
    if depth > MAX_NESTING {
        return Err(format!(
            "{what}: arrays are nested deeper than {MAX_NESTING}"
        ));
    }
    let kind = Kind::read(cursor, what)?;
    let length = cursor.u64(what)?;
    let fits = |length: &usize| *length <= cursor.left() / kind.min_bytes();
    let length = usize::try_from(length).ok().filter(fits).ok_or_else(|| {
        format!("{what}: an array of {length} elements goes beyond the end of the file")
    })?;
    *elements_left = elements_left.checked_sub(length).ok_or_else(|| {
        format!("{what}: the arrays have more than {MAX_ELEMENTS} elements together")
    })?;
    match kind {
        Kind::Text => {
            let texts = (0..length).map(|_| cursor.text(what).map(Box::from));
            Ok(Value::Texts(texts.collect::<Result<_, _>>()?))
        }
        Kind::Array => {
            for _ in 0..length {
                read_array(cursor, what, elements_left, depth + 1)?;
            }
            Ok(Value::Nested)
        }
        _ => {
            let number = |value| match value {
                Value::Integer(value) => value as f64,
                Value::Float(value) => value,
                Value::Bool(value) => f64::from(u8::from(value)),
                _ => unreachable!("the elements are scalars"),
            };
            let mut numbers = Vec::with_capacity(length);
            for _ in 0..length {
                numbers.push(number(read_scalar(cursor, kind, what)?));
            }
            Ok(Value::Numbers(numbers))
        }
    }
}
