//! Which properties an object may have beside those that its schema lists.

use serde_json::{Map, Value};

/// Keywords that say which properties an object may have beside `properties`.
const OPENING: [&str; 8] = [
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
];

pub(super) fn lists_properties(keywords: &Map<String, Value>) -> bool {
    keywords.get("properties").is_some_and(Value::is_object)
}

/// Returns whether a schema says itself which other properties there may be.
pub(super) fn speaks_of_others(keywords: &Map<String, Value>) -> bool {
    OPENING.iter().any(|key| keywords.contains_key(*key))
}

/// Returns the properties of a schema of objects, if there are no others once it is closed.
pub(super) fn all_properties(schema: &Value) -> Option<&Map<String, Value>> {
    let keywords = schema.as_object()?;
    let is_closed = match keywords.get("additionalProperties") {
        Some(others) => *others == false && !keywords.contains_key("patternProperties"),
        None => !speaks_of_others(keywords),
    };
    let listed = keywords.get("properties")?.as_object();
    listed.filter(|_| is_closed && schema["type"] == "object")
}
