//! Reads a request's body, one JSON object, into typed structs.
//!
//! Invariant: the server never builds a tree of a body. It checks the whole text first and keeps
//! nothing of it. Then it finds the text of each field, and each typed struct reads the texts of
//! its own fields only. So every field is read once, and the structs can be read one after the
//! other, with checks between them.
//!
//! Invariant: nesting and the number of values are limited before anything is kept. JSON that
//! stands in a string of the body counts as if it stood in the body itself.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::error::Category;
use serde_json::value::RawValue;
use serde_path_to_error::{Deserializer as PathDeserializer, Path, Track};

use super::json_field::{Given, UNSUPPORTED};
use crate::api::error::ApiError;

/// The maximum number of values in a body. A string that names a field counts. The numbers of a
/// prompt do not count, because each token id needs only four bytes.
const MAX_VALUES: usize = 1 << 16;
/// The fields that may hold JSON in a string, which the server parses later.
const HOLD_JSON: [&str; 5] = ["arguments", "guided_json", "json", "json_schema", "schema"];

/// The fields of a JSON object, nested in at most 128 levels, with at most `MAX_VALUES` values.
pub(in crate::api) struct JsonObject<'a> {
    fields: Vec<(Name<'a>, &'a RawValue)>,
    place: &'static str, // The field that holds the object; empty for a whole body.
}

/// The name of a field.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> JsonObject<'a> {
    /// Checks that `text` is a JSON object within the limits. `serde_json` limits the nesting.
    pub(in crate::api) fn check(text: &'a [u8]) -> Result<JsonObject<'a>, ApiError> {
        if text.is_empty() {
            let message = "The request body is empty. Send a JSON object.";
            return Err(ApiError::invalid_json(message));
        }
        let values_left = Cell::new(MAX_VALUES);
        let mut json = serde_json::Deserializer::from_slice(text);
        let skimmed = Skim::new(&values_left, SkimmedPlace::Body).deserialize(&mut json);
        match skimmed.and_then(|is_object| json.end().map(|()| is_object)) {
            Ok(true) => JsonObject::split(text, ""),
            Ok(false) => {
                let given: Given =
                    serde_json::from_slice(text).map_err(|error| not_json(&error))?;
                let message = format!("The request body must be a JSON object; got {given}.");
                Err(ApiError::invalid_json(message))
            }
            Err(error) if error.classify() == Category::Data => {
                Err(ApiError::too_many_values(MAX_VALUES))
            }
            Err(error) => Err(not_json(&error)),
        }
    }

    /// Returns the object in the field `place` of a checked body.
    ///
    /// # Errors
    /// If `text` is another value.
    pub(in crate::api) fn nested(
        text: &'a str,
        place: &'static str,
    ) -> Result<JsonObject<'a>, ApiError> {
        if text.starts_with('{') {
            return JsonObject::split(text.as_bytes(), place);
        }
        let given: Given = serde_json::from_str(text).map_err(|error| not_json(&error))?;
        let message = format!("'{place}' must be an object; got {given}.");
        Err(ApiError::invalid_value(place, message))
    }

    /// Finds the fields of a checked object.
    fn split(text: &'a [u8], place: &'static str) -> Result<JsonObject<'a>, ApiError> {
        let mut json = serde_json::Deserializer::from_slice(text);
        let fields = json
            .deserialize_map(Split)
            .map_err(|error| not_json(&error))?;
        Ok(JsonObject { fields, place })
    }

    /// Returns the name and the text of each field.
    pub(super) fn fields(&self) -> impl Iterator<Item = (&str, &'a str)> {
        let fields = self.fields.iter();
        fields.map(|(Name(name), value)| (name.as_ref(), value.get()))
    }

    /// Returns the path of a field, for errors.
    pub(super) fn path(&self, field: &str) -> String {
        match self.place {
            "" => field.to_owned(),
            place => format!("{place}.{field}"),
        }
    }

    /// Reads the fields of `T`.
    ///
    /// # Errors
    /// If a field has the wrong type or exceeds its limits. The error names the field by its path,
    /// such as `messages[1].role`.
    pub(in crate::api) fn read<T: Deserialize<'a>>(&self) -> Result<T, ApiError> {
        let mut track = Track::new();
        let read = T::deserialize(PathDeserializer::new(self, &mut track));
        read.map_err(|error| field_error(self.place, &track.path(), &error))
    }
}

/// Gives a struct its own fields.
impl<'de> Deserializer<'de> for &JsonObject<'de> {
    type Error = serde_json::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, serde_json::Error> {
        let own = self.fields.iter().filter_map(|(Name(name), value)| {
            let name = names.iter().find(|own| *own == name)?;
            Some((*name, *value))
        });
        visitor.visit_map(MapDeserializer::new(own))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, serde_json::Error> {
        let all = self
            .fields
            .iter()
            .map(|(Name(name), value)| (name.as_ref(), *value));
        visitor.visit_map(MapDeserializer::new(all))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Reads an object, and keeps the text of each field.
struct Split;

impl<'de> Visitor<'de> for Split {
    type Value = Vec<(Name<'de>, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = entries.next_entry()? {
            fields.push(field);
        }
        Ok(fields)
    }
}

fn not_json(error: &serde_json::Error) -> ApiError {
    ApiError::invalid_json(format!("The request body is not valid JSON: {error}."))
}

/// Returns the error of a field. The text of a serde error is one of these:
///
/// - `must …` or `may …`, which continues the field's name;
/// - a sentence;
/// - a sentence after `UNSUPPORTED`;
/// - serde's own text for a field that appears twice, or that is missing.
fn field_error(place: &str, path: &Path, error: &serde_json::Error) -> ApiError {
    if error.classify() != Category::Data {
        return not_json(error);
    }
    let path = match (place, path.iter().len()) {
        ("", 0) => String::new(),
        (place, 0) => place.to_owned(),
        ("", _) => path.to_string(),
        (place, _) => format!("{place}.{path}"),
    };
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    if let Some(sentence) = text.strip_prefix(UNSUPPORTED) {
        return ApiError::unsupported(path, sentence);
    }
    let inside = |start: &str| text.strip_prefix(start)?.strip_suffix('`');
    let of_object = |name: &str| match path.as_str() {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    };
    if let Some(name) = inside("duplicate field `") {
        let field = of_object(name);
        let message = format!("'{field}' appears more than once. Send each field once.");
        return ApiError::invalid_value(field, message);
    }
    if let Some(name) = inside("missing field `") {
        let field = of_object(name);
        let message = format!("'{field}' is missing.");
        return ApiError::invalid_value(field, message);
    }
    if text.starts_with("must ") || text.starts_with("may ") {
        let message = format!("'{path}' {text}");
        return ApiError::invalid_value(path, message);
    }
    ApiError::invalid_value(path, text)
}

/// Reads a JSON value and keeps nothing of it. Returns whether it is an object.
///
/// `IgnoredAny` is faster, but it limits neither the nesting nor the size of numbers, and it does
/// not look at the characters of strings.
struct Skim<'a> {
    values_left: &'a Cell<usize>,
    place: SkimmedPlace,
    holds_json: bool, // If it is a string.
}

/// The place of a value in a body.
#[derive(Clone, Copy, PartialEq)]
enum SkimmedPlace {
    Body,
    Field,  // The value of a field of the body.
    Prompt, // In arrays of such a field: token ids may stand here.
    Inside, // Anywhere else.
}

impl SkimmedPlace {
    fn of_items(self) -> SkimmedPlace {
        match self {
            SkimmedPlace::Field | SkimmedPlace::Prompt => SkimmedPlace::Prompt,
            SkimmedPlace::Body | SkimmedPlace::Inside => SkimmedPlace::Inside,
        }
    }

    fn of_members(self) -> SkimmedPlace {
        match self {
            SkimmedPlace::Body => SkimmedPlace::Field,
            SkimmedPlace::Field | SkimmedPlace::Prompt | SkimmedPlace::Inside => {
                SkimmedPlace::Inside
            }
        }
    }
}

impl<'a> Skim<'a> {
    fn new(values_left: &'a Cell<usize>, place: SkimmedPlace) -> Skim<'a> {
        Skim {
            values_left,
            place,
            holds_json: false,
        }
    }

    fn count<E: de::Error>(&self) -> Result<(), E> {
        match self.values_left.get().checked_sub(1) {
            Some(left) => {
                self.values_left.set(left);
                Ok(())
            }
            None => Err(E::custom("too many values")),
        }
    }

    fn count_number<E: de::Error>(&self) -> Result<bool, E> {
        if self.place != SkimmedPlace::Prompt {
            self.count()?;
        }
        Ok(false)
    }
}

impl<'de> DeserializeSeed<'de> for Skim<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<bool, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Skim<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<bool, E> {
        self.count_number()
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<bool, E> {
        self.count_number()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<bool, E> {
        self.count_number()
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<bool, E> {
        self.count_number()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<bool, E> {
        self.count_number()
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<bool, E> {
        self.count()?;
        if self.holds_json {
            let inside = Skim::new(self.values_left, SkimmedPlace::Inside);
            let skimmed = inside.deserialize(&mut serde_json::Deserializer::from_str(text));
            // What is no JSON is an error of its field.
            if skimmed.is_err_and(|error| error.classify() == Category::Data) {
                return Err(E::custom("too many values"));
            }
        }
        Ok(false)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<bool, A::Error> {
        self.count()?;
        let place = self.place.of_items();
        let item = || Skim::new(self.values_left, place);
        while items.next_element_seed(item())?.is_some() {}
        Ok(false)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<bool, A::Error> {
        self.count()?;
        let place = self.place.of_members();
        while let Some(name) = entries.next_key::<Name<'de>>()? {
            self.count()?;
            let holds_json = HOLD_JSON.contains(&&*name.0);
            entries.next_value_seed(Skim {
                holds_json,
                ..Skim::new(self.values_left, place)
            })?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1_900_000;

    /// Returns as many copies of `item` as fit a large body, with commas between them.
    fn many(item: &str) -> String {
        let count = BYTES / (item.len() + 1);
        vec![item; count].join(",")
    }

    fn in_text(json: &str) -> String {
        serde_json::to_string(json).unwrap()
    }

    #[test]
    fn json_in_a_string_counts_as_the_body_does() {
        let objects = format!("[{}]", many("{\"\":1}"));
        let numbers = format!("{{\"enum\":[{}]}}", many("1"));
        let small = format!("[{}]", ["{}"; 40_000].join(","));
        let calls = |arguments: &str| {
            let call = format!("{{\"function\":{{\"arguments\":{}}}}}", in_text(arguments));
            format!("{{\"messages\":[{{\"tool_calls\":[{call},{call}]}}]}}")
        };
        for body in [
            format!("{{\"guided_json\":{objects}}}"),
            format!("{{\"guided_json\":{}}}", in_text(&objects)),
            format!("{{\"guided_json\":{numbers}}}"),
            format!("{{\"guided_json\":{}}}", in_text(&numbers)),
            format!("{{\"gu\\u0069ded_json\":{}}}", in_text(&numbers)),
            format!(
                "{{\"response_format\":{{\"schema\":{}}}}}",
                in_text(&objects)
            ),
            format!(
                "{{\"guided_json\":{}}}",
                in_text(&format!("{objects} and more"))
            ),
            format!("{{\"input\":{{\"a\":[{}]}}}}", many("null")),
            calls(&objects),
            calls(&small),
        ] {
            let refused = JsonObject::check(body.as_bytes()).err().expect("too much");
            assert_eq!(refused.code(), ApiError::too_many_values(0).code());
        }
    }

    #[test]
    fn token_ids_and_plain_text_do_not_count() {
        let quoted = in_text(&format!("[{}]", many("{\"\":1}")));
        for body in [
            format!("{{\"prompt\":[{}]}}", many("1")),
            format!("{{\"prompt\":[[1],[{}]]}}", many("1")),
            format!("{{\"prompt\":{quoted}}}"),
            format!("{{\"guided_json\":{}}}", in_text(&"{".repeat(100_000))),
        ] {
            assert!(JsonObject::check(body.as_bytes()).is_ok());
        }
    }
}
