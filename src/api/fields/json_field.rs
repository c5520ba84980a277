//! The types of a request's fields: how each is read from JSON, and which values it may have.
//!
//! Invariant: a value of the wrong type is an error that says what the field must be and what the
//! client sent. `json_object.rs` adds the name of the field.
//!
//! Invariant: a number lies within the limits of its type.
//!
//! Invariant: the type that reads a value also documents it: `schema` stands beside the code that
//! reads, and both use the same limits.
//!
//! `Option` around such a type makes `null` mean the same as an absent field.

use std::fmt::{self, Display};
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Number as JsonNumber, Value, json};
use utoipa::ToSchema;

use crate::api::error::quoted;
use crate::api::openapi::schema::{NamedSchemas, reference};

/// The beginning of a serde error about a field that the server knows but does not support. A
/// sentence follows.
pub(in crate::api) const UNSUPPORTED: &str = "unsupported: ";

/// A value that is neither an array nor an object.
pub(in crate::api) enum Scalar<'a> {
    Null,
    Bool(bool),
    Number(JsonNumber),
    Text(&'a str),
}

impl Display for Scalar<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Null => f.write_str("null or no value"),
            Scalar::Bool(value) => write!(f, "the boolean {value}"),
            Scalar::Number(number) => write!(f, "the number {number}"),
            Scalar::Text(text) => write!(f, "the string {}", quoted(text)),
        }
    }
}

/// A type that is read from a JSON value. Whatever it does not read is an error.
pub(in crate::api) trait JsonField<'de>: Sized {
    /// What the value must be, for error messages, such as `a number`.
    const EXPECTED: &'static str;

    /// Returns the JSON Schema of the value.
    fn schema() -> Value;

    /// Adds the schemas that `schema` refers to.
    fn add_referenced(_: &mut NamedSchemas) {}

    /// Reads a value that is neither an array nor an object.
    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Self, E> {
        Err(must_be(Self::EXPECTED, value))
    }

    fn array<A: SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(must_be(Self::EXPECTED, Given::Array))
    }

    fn object<A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(must_be(Self::EXPECTED, Given::Object))
    }
}

/// Returns the error for a value that is not what is `expected`.
pub(in crate::api) fn must_be<E: Error>(expected: &str, got: impl Display) -> E {
    E::custom(format_args!("must be {expected}; got {got}."))
}

/// Returns the error for an array that has `count` items, and may have `limit`.
pub(super) fn may_contain<E: Error>(limit: usize, items: &str, count: usize) -> E {
    E::custom(format_args!(
        "may contain at most {limit} {items}; got {count}."
    ))
}

/// Returns the error for a value that the server knows but does not support.
pub(in crate::api) fn unsupported<E: Error>(sentence: impl Display) -> E {
    E::custom(format_args!("{UNSUPPORTED}{sentence}"))
}

/// Skips the rest of an array and returns the number of its items.
pub(in crate::api) fn count_rest<'de, A: SeqAccess<'de>>(items: &mut A) -> Result<usize, A::Error> {
    let mut count = 0;
    while items.next_element::<IgnoredAny>()?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// Reads the items of an array, which may be `limit`. An error calls them `what`.
pub(in crate::api) fn at_most<'de, T, A>(
    limit: usize,
    what: &str,
    items: &mut A,
) -> Result<Vec<T>, A::Error>
where
    T: Deserialize<'de>,
    A: SeqAccess<'de>,
{
    let mut read = Vec::new();
    while read.len() < limit
        && let Some(item) = items.next_element()?
    {
        read.push(item);
    }
    match count_rest(items)? {
        0 => Ok(read),
        more => Err(may_contain(limit, what, limit + more)),
    }
}

/// Calls the function of `T` for the type of a JSON value.
pub(in crate::api) struct FieldVisitor<T>(PhantomData<T>);

impl<T> FieldVisitor<T> {
    pub(in crate::api) fn new() -> FieldVisitor<T> {
        FieldVisitor(PhantomData)
    }
}

impl<'de, T: JsonField<'de>> Visitor<'de> for FieldVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_unit<E: Error>(self) -> Result<T, E> {
        T::scalar(Scalar::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
        T::scalar(Scalar::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        T::scalar(Scalar::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        T::scalar(Scalar::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
        let number = JsonNumber::from_f64(value).expect("JSON has only finite numbers");
        T::scalar(Scalar::Number(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::scalar(Scalar::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<T, A::Error> {
        T::array(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<T, A::Error> {
        T::object(entries)
    }
}

/// Implements `Deserialize` and `ToSchema` for types that implement `JsonField`. The parameters of
/// a generic type stand before it in braces.
macro_rules! deserialize_fields {
    ($($({$($generics:tt)*})? $type:ty),* $(,)?) => {
        $(
            impl<'de, $($($generics)*)?> serde::Deserialize<'de> for $type {
                fn deserialize<D: serde::Deserializer<'de>>(value: D) -> Result<$type, D::Error> {
                    value.deserialize_any($crate::api::fields::json_field::FieldVisitor::new())
                }
            }

            impl<$($($generics)*)?> utoipa::PartialSchema for $type {
                fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                    use $crate::api::fields::json_field::JsonField;
                    $crate::api::openapi::schema::embedded(<$type as JsonField<'_>>::schema())
                }
            }

            impl<$($($generics)*)?> utoipa::ToSchema for $type {
                fn name() -> std::borrow::Cow<'static, str> {
                    std::any::type_name::<$type>().into() // With the limits, if it has parameters.
                }

                fn schemas(schemas: &mut $crate::api::openapi::schema::NamedSchemas) {
                    use $crate::api::fields::json_field::JsonField;
                    <$type as JsonField<'_>>::add_referenced(schemas);
                }
            }
        )*
    };
}
pub(in crate::api) use deserialize_fields;

/// A boolean.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Bool(pub(in crate::api) bool);

impl JsonField<'_> for Bool {
    const EXPECTED: &'static str = "a boolean";

    fn schema() -> Value {
        json!({"type": "boolean"})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Bool, E> {
        match value {
            Scalar::Bool(value) => Ok(Bool(value)),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// A string.
#[derive(Debug)]
pub(in crate::api) struct JsonText(pub(in crate::api) String);

impl JsonField<'_> for JsonText {
    const EXPECTED: &'static str = "a string";

    fn schema() -> Value {
        json!({"type": "string"})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<JsonText, E> {
        match value {
            Scalar::Text(text) => Ok(JsonText(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

/// An integer from `MIN` to `MAX`. A limit that is the limit of `i64` means no limit.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Integer<const MIN: i64, const MAX: i64>(pub(in crate::api) i128);

impl<const MIN: i64, const MAX: i64> JsonField<'_> for Integer<MIN, MAX> {
    const EXPECTED: &'static str = "an integer";

    fn schema() -> Value {
        let mut schema = json!({"type": "integer"});
        if MIN > i64::MIN {
            schema["minimum"] = MIN.into();
        }
        if MAX < i64::MAX {
            schema["maximum"] = MAX.into();
        }
        schema
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Self, E> {
        let Some(number) = integer(&value) else {
            return Err(must_be(Self::EXPECTED, value));
        };
        let nearest = number.clamp(i64::MIN.into(), i64::MAX.into()) as i64;
        if (MIN..=MAX).contains(&nearest) {
            return Ok(Integer(number));
        }
        let limits = match MAX {
            i64::MAX => format!("at least {MIN}"),
            _ => format!("from {MIN} to {MAX}"),
        };
        Err(must_be(&limits, shown(&value, number)))
    }
}

/// A number from `MIN` to `MAX`. Both are in hundredths, because no constant parameter of a type
/// can be a fraction.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Float<const MIN: i32, const MAX: i32>(pub(in crate::api) f32);

impl<const MIN: i32, const MAX: i32> Float<MIN, MAX> {
    const LIMITS: (f64, f64) = (MIN as f64 / 100.0, MAX as f64 / 100.0);
}

impl<const MIN: i32, const MAX: i32> JsonField<'_> for Float<MIN, MAX> {
    const EXPECTED: &'static str = "a number";

    fn schema() -> Value {
        let (minimum, maximum) = Self::LIMITS;
        json!({"type": "number", "minimum": minimum, "maximum": maximum})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Self, E> {
        let Scalar::Number(given) = &value else {
            return Err(must_be(Self::EXPECTED, value));
        };
        let (min, max) = Self::LIMITS;
        match given.as_f64() {
            Some(number) if (min..=max).contains(&number) => Ok(Float(number as f32)),
            _ => Err(must_be(&format!("from {min} to {max}"), given)),
        }
    }
}

/// An integer of 64 bits, with or without a sign, which does not matter.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Seed(pub(in crate::api) u64);

impl JsonField<'_> for Seed {
    const EXPECTED: &'static str = "an integer";

    fn schema() -> Value {
        json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Seed, E> {
        let (min, max) = (i128::from(i64::MIN), i128::from(u64::MAX));
        match integer(&value) {
            None => Err(must_be(Self::EXPECTED, value)),
            Some(seed) if (min..=max).contains(&seed) => Ok(Seed(seed as u64)),
            Some(seed) => Err(must_be(
                &format!("from {min} to {max}"),
                shown(&value, seed),
            )),
        }
    }
}

/// Returns the integer in a value. A number such as `2.0` or `1e16` is an integer too. One that
/// needs more than 128 bits becomes the nearest that does not.
fn integer(value: &Scalar<'_>) -> Option<i128> {
    let Scalar::Number(number) = value else {
        return None;
    };
    let whole = |number: f64| (number.fract() == 0.0).then_some(number as i128);
    (number.as_i64().map(i128::from))
        .or_else(|| number.as_u64().map(i128::from))
        .or_else(|| number.as_f64().and_then(whole))
}

/// Returns the integer in a value for an error message. One that is not exact is shown as the
/// client wrote it, such as `1e300`.
fn shown(value: &Scalar<'_>, integer: i128) -> String {
    match value {
        Scalar::Number(number) if integer.unsigned_abs() > u64::MAX.into() => number.to_string(),
        _ => integer.to_string(),
    }
}

/// An object with the fields of `T`.
#[derive(Debug)]
pub(in crate::api) struct Object<T>(pub(in crate::api) T);

impl<'de, T: Deserialize<'de> + ToSchema> JsonField<'de> for Object<T> {
    const EXPECTED: &'static str = "an object";

    fn schema() -> Value {
        reference::<T>()
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<Self, A::Error> {
        T::deserialize(MapAccessDeserializer::new(entries)).map(Object)
    }
}

impl<'de, T: Deserialize<'de> + ToSchema> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(FieldVisitor::new())
    }
}

/// A value of any type, for a place where the type decides what follows. What is inside an array or
/// an object is skipped.
#[derive(Debug)]
pub(in crate::api) enum Given {
    Null,
    Bool(bool),
    Number(JsonNumber),
    Text(String),
    Array,
    Object,
}

impl Given {
    /// Returns the integer in the value, if it is one.
    pub(in crate::api) fn integer(&self) -> Option<i128> {
        match self {
            Given::Number(number) => integer(&Scalar::Number(number.clone())),
            _ => None,
        }
    }
}

impl Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Given::Null => Scalar::Null.fmt(f),
            Given::Bool(value) => Scalar::Bool(*value).fmt(f),
            Given::Number(number) => Scalar::Number(number.clone()).fmt(f),
            Given::Text(text) => Scalar::Text(text).fmt(f),
            Given::Array => f.write_str("an array"),
            Given::Object => f.write_str("an object"),
        }
    }
}

impl<'de> JsonField<'de> for Given {
    const EXPECTED: &'static str = "a value";

    fn schema() -> Value {
        json!({})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Given, E> {
        Ok(match value {
            Scalar::Null => Given::Null,
            Scalar::Bool(value) => Given::Bool(value),
            Scalar::Number(number) => Given::Number(number),
            Scalar::Text(text) => Given::Text(text.to_owned()),
        })
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Given, A::Error> {
        count_rest(&mut items)?;
        Ok(Given::Array)
    }

    fn object<A: MapAccess<'de>>(mut entries: A) -> Result<Given, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Given::Object)
    }
}

deserialize_fields!(
    Bool,
    JsonText,
    Seed,
    Given,
    {const MIN: i64, const MAX: i64} Integer<MIN, MAX>,
    {const MIN: i32, const MAX: i32} Float<MIN, MAX>,
);
