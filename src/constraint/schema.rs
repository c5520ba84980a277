//! What a JSON schema means before it is compiled.
//!
//! Schemas of pydantic and zod have keywords that describe a value without limiting it. The
//! compiler refuses these keywords, so they are removed here. It computes with numbers of 64-bit
//! floating point, so larger integers are refused here: the compiler would round them. It reads no
//! escapes in references (`references.rs`), and does not see which schemas exclude each other
//! (`disjoint.rs`).

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::closing::{lists_properties, speaks_of_others};
use super::disjoint::SchemaComparison;
use super::references::{self, OF_MAP};

/// The largest integer up to which floating point holds all integers.
const MAX_EXACT: i128 = 1 << 53;

/// The formats that the compiler enforces. All others are annotations.
const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Keywords whose value is a schema.
const OF_SCHEMA: [&str; 12] = [
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "contains",
    "contentSchema",
    "not",
    "if",
    "then",
    "else",
];

/// Keywords whose value is an array of schemas. `items` is one in old drafts.
const OF_ARRAY: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];

/// Keywords that limit a value, and that the compiler cannot enforce.
const UNENFORCEABLE: [&str; 17] = [
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
    "$dynamicRef",
    "$recursiveRef",
    "contentSchema",
];

/// The largest bound of an integer that the compiler takes, and that is exact.
const MAX_BOUND: i128 = 9_200_000_000_000_000_000;

/// Keywords that apply other schemas to the same value.
const COMBINING: [&str; 6] = ["allOf", "anyOf", "oneOf", "if", "then", "else"];

/// Whether an object may have properties that its schema does not speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undeclared {
    Refused,
    Allowed,
}

/// Why a schema is refused: the path and the keyword, and what to do.
pub(super) type SchemaFault = String;

/// What becomes of keywords that the compiler cannot enforce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unenforceable {
    Refused,
    /// The compiler is told to ignore them.
    Ignored,
}

/// Prepares a schema for the compiler.
///
/// An object that lists its properties has no others, unless its schema speaks of them or
/// `undeclared` allows them: a model that makes up properties may never end. A schema that is
/// combined with others stays open, because the others may list more.
///
/// # Errors
/// If a number is not exact in the compiler, or a keyword is `unenforceable`.
pub(super) fn prepare(
    schema: &mut Value,
    undeclared: Undeclared,
    unenforceable: Unenforceable,
) -> Result<(), SchemaFault> {
    references::simplify(schema);
    let mut combined = BTreeSet::new();
    referenced_in_combinations(schema, false, &mut combined);
    let preparation = Preparation {
        undeclared,
        unenforceable,
        combined,
        comparison: SchemaComparison::new(schema.clone()),
    };
    preparation.visit(schema, "#", false)
}

struct Preparation {
    undeclared: Undeclared,
    unenforceable: Unenforceable,
    comparison: SchemaComparison,
    combined: BTreeSet<String>, // References from schemas that are combined with others.
}

impl Preparation {
    fn visit(&self, schema: &mut Value, path: &str, is_combined: bool) -> Result<(), SchemaFault> {
        let Value::Object(keywords) = schema else {
            return Ok(());
        };
        tighten_bounds(keywords);
        check_numbers(keywords, path)?;
        remove_annotations(keywords);
        self.check_keywords(keywords, path)?;
        let is_combined = is_combined || self.combined.contains(path);
        let combines = is_combined || combines(keywords);
        self.choose_any(keywords, combines);
        for (keyword, value) in keywords.iter_mut() {
            let below = format!("{path}/{}", escaped(keyword));
            // The compiler would take the members of this `oneOf` as closed, and then as exclusive.
            let is_left = keyword == "oneOf" && self.unenforceable == Unenforceable::Refused;
            let is_combined = combines && COMBINING.contains(&keyword.as_str()) || is_left;
            match value {
                Value::Object(named) if OF_MAP.contains(&keyword.as_str()) => {
                    for (name, schema) in named.iter_mut() {
                        self.visit(schema, &format!("{below}/{}", escaped(name)), false)?;
                    }
                }
                Value::Array(schemas) if OF_ARRAY.contains(&keyword.as_str()) => {
                    for (index, schema) in schemas.iter_mut().enumerate() {
                        self.visit(schema, &format!("{below}/{index}"), is_combined)?;
                    }
                }
                Value::Object(_) if OF_SCHEMA.contains(&keyword.as_str()) => {
                    self.visit(value, &below, is_combined)?;
                }
                _ => {}
            }
        }
        let is_closed = self.undeclared == Undeclared::Refused && !is_combined;
        if is_closed && lists_properties(keywords) && !speaks_of_others(keywords) {
            keywords.insert("additionalProperties".to_owned(), false.into());
        }
        Ok(())
    }
}

impl Preparation {
    fn check_keywords(&self, keywords: &Map<String, Value>, path: &str) -> Result<(), SchemaFault> {
        let mut known = UNENFORCEABLE
            .iter()
            .filter(|key| keywords.contains_key(**key));
        match known.next() {
            Some(keyword) if self.unenforceable == Unenforceable::Refused => Err(format!(
                "has the keyword '{keyword}' at '{path}/{keyword}', which cannot be enforced; \
                 remove it, and check the answer instead"
            )),
            _ => Ok(()),
        }
    }

    /// Makes one of several schemas any of them, if no value fits two of them.
    fn choose_any(&self, keywords: &mut Map<String, Value>, combines: bool) {
        let one = keywords.get("oneOf").and_then(Value::as_array);
        let close = self.undeclared == Undeclared::Refused && !combines;
        let is_any = one.is_some_and(|schemas| self.comparison.are_disjoint(schemas, close));
        if is_any
            && !keywords.contains_key("anyOf")
            && let Some(schemas) = keywords.remove("oneOf")
        {
            keywords.insert("anyOf".to_owned(), schemas);
        }
    }
}

/// Adds the references that stand in a combination with other schemas of the same value.
fn referenced_in_combinations(schema: &Value, is_combined: bool, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(keywords) => {
            let reference = keywords.get("$ref").and_then(Value::as_str);
            if let Some(reference) = reference
                && (is_combined || lists_properties(keywords))
            {
                found.insert(references::decoded(reference));
            }
            let combines = is_combined || combines(keywords);
            for (keyword, value) in keywords {
                let is_combined = combines && COMBINING.contains(&keyword.as_str());
                referenced_in_combinations(value, is_combined, found);
            }
        }
        Value::Array(values) => {
            for value in values {
                referenced_in_combinations(value, is_combined, found);
            }
        }
        _ => {}
    }
}

/// Returns whether several schemas speak of the properties of one object.
fn combines(keywords: &Map<String, Value>) -> bool {
    let all = keywords.get("allOf").and_then(Value::as_array);
    let parts = COMBINING.iter().filter(|key| keywords.contains_key(**key));
    lists_properties(keywords) || all.is_some_and(|all| all.len() > 1) || parts.count() > 1
}

/// Removes keywords that limit nothing.
fn remove_annotations(keywords: &mut Map<String, Value>) {
    let format = keywords.get("format").and_then(Value::as_str);
    if format.is_some_and(|format| !FORMATS.contains(&format)) {
        keywords.remove("format");
    }
    let names = keywords.get("propertyNames").cloned();
    let is_plain = match names {
        Some(Value::Object(names)) => {
            names.is_empty() || names.len() == 1 && names.get("type") == Some(&"string".into())
        }
        Some(Value::Bool(any)) => any,
        _ => false,
    };
    if is_plain {
        keywords.remove("propertyNames");
    }
    if keywords.get("uniqueItems") == Some(&Value::Bool(false)) {
        keywords.remove("uniqueItems");
    }
}

/// Moves bounds that only exclude what no integer of 64 bits is to where the compiler is exact. The
/// answers are still in the bounds.
fn tighten_bounds(keywords: &mut Map<String, Value>) {
    for (keyword, sign) in [
        ("maximum", 1),
        ("exclusiveMaximum", 1),
        ("minimum", -1),
        ("exclusiveMinimum", -1),
    ] {
        let Some(Value::Number(bound)) = keywords.get_mut(keyword) else {
            continue;
        };
        // A number beyond 64 bits has become floating point.
        let float = || bound.as_f64().map(|float| float.clamp(-1e30, 1e30) as i128);
        let Some(value) = bound.as_i128().or_else(float) else {
            continue;
        };
        let outer = value * sign;
        let inward = if outer > MAX_BOUND {
            MAX_BOUND
        } else if outer.abs() > MAX_EXACT && outer >= -MAX_BOUND {
            // The next number inside that floating point has.
            let spacing = 1 << (127 - outer.abs().leading_zeros() - 52);
            outer.div_euclid(spacing) * spacing
        } else {
            continue;
        };
        *bound = (inward as i64 * sign as i64).into();
    }
}

/// Checks the numbers of the keywords that take numbers or values.
fn check_numbers(keywords: &Map<String, Value>, path: &str) -> Result<(), SchemaFault> {
    const BOUNDS: [&str; 4] = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
    let values = ["const", "enum", "multipleOf"];
    let values = values.iter().map(|keyword| (keyword, MAX_EXACT));
    // Bounds that are not exact have been moved, or bound nothing that the compiler can write.
    let bounds = BOUNDS.iter().map(|keyword| (keyword, MAX_BOUND));
    for (keyword, largest) in values.chain(bounds) {
        let value = keywords.get(*keyword);
        if let Some(number) = value.and_then(|value| inexact_number(value, largest)) {
            return Err(format!(
                "has the number {number} at '{path}/{keyword}'; integers beyond 2^53 are not \
                 exact here, so use a smaller one, or texts"
            ));
        }
    }
    Ok(())
}

/// Returns the first number that floating point may have rounded.
fn inexact_number(value: &Value, largest: i128) -> Option<String> {
    match value {
        Value::Number(number) => {
            let is_exact = match number.as_i128() {
                Some(integer) => integer.abs() <= largest,
                // A larger integer has become floating point already.
                None => number
                    .as_f64()
                    .is_some_and(|float| float.fract() != 0.0 || float.abs() <= largest as f64),
            };
            (!is_exact).then(|| number.to_string())
        }
        Value::Array(values) => values
            .iter()
            .find_map(|value| inexact_number(value, largest)),
        Value::Object(members) => members
            .values()
            .find_map(|value| inexact_number(value, largest)),
        _ => None,
    }
}

/// Returns a name as a JSON pointer writes it.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn prepared(mut schema: Value) -> Result<Value, SchemaFault> {
        prepare(&mut schema, Undeclared::Refused, Unenforceable::Refused).map(|()| schema)
    }

    #[test]
    fn an_object_that_lists_properties_has_no_others_at_any_level() {
        let inner = json!({"properties": {"b": {"type": "integer"}}});
        let open = json!({"properties": {"c": {}}, "additionalProperties": true});
        let schema = json!({"properties": {"a": {"items": inner}, "o": open, "r": {"$ref":
            "#/$defs/D"}}, "$defs": {"D": inner}});
        let closed = prepared(schema.clone()).unwrap();
        assert_eq!(closed["additionalProperties"], false);
        let items = &closed["properties"]["a"]["items"];
        assert_eq!(items["additionalProperties"], false);
        assert_eq!(closed["properties"]["o"]["additionalProperties"], true);
        assert_eq!(closed["$defs"]["D"]["additionalProperties"], false);
        let mut left = schema.clone();
        prepare(&mut left, Undeclared::Allowed, Unenforceable::Refused).unwrap();
        assert_eq!(left, schema);
        let free = prepared(json!({"type": "object"})).unwrap();
        assert_eq!(free, json!({"type": "object"}));
    }

    #[test]
    fn schemas_that_are_combined_stay_open() {
        let part = |name: &str| json!({"properties": {name: {}}, "required": [name]});
        let both = json!({"allOf": [part("a"), {"$ref": "#/$defs/a%20b"}],
            "$defs": {"a b": part("b")}});
        let simple = prepared(both.clone()).unwrap();
        assert_eq!(simple["allOf"][0], both["allOf"][0]);
        let named = simple["allOf"][1]["$ref"].as_str().unwrap();
        assert_eq!(
            super::super::references::target(&simple, named),
            Some(&part("b"))
        );
        let base = json!({"properties": {"a": {}}, "anyOf": [part("b"), part("c")]});
        assert_eq!(prepared(base.clone()).unwrap(), base);
        let either = prepared(json!({"anyOf": [part("a"), part("b")]})).unwrap();
        assert_eq!(either["anyOf"][1]["additionalProperties"], false);
    }

    #[test]
    fn annotations_limit_nothing() {
        let schema = json!({"items": {"type": "string", "format": "password"},
            "propertyNames": {"type": "string"}, "uniqueItems": false});
        assert_eq!(
            prepared(schema).unwrap(),
            json!({"items": {"type": "string"}})
        );
        let uuid = json!({"format": "uuid", "properties": {"format": {"type": "string"}},
            "additionalProperties": false});
        assert_eq!(prepared(uuid.clone()).unwrap(), uuid);
    }

    #[test]
    fn integers_that_would_be_rounded_are_refused() {
        for (keyword, value) in [
            ("enum", "[1, 2512292042121000001]"),
            ("minimum", "18446744073709551610"),
            ("const", "-9223372036854775808"),
            ("const", "{\"a\": [9007199254740993]}"),
        ] {
            let text = format!("{{\"properties\": {{\"n\": {{\"{keyword}\": {value}}}}}}}");
            let refused = prepared(serde_json::from_str(&text).unwrap()).unwrap_err();
            let path = format!("'#/properties/n/{keyword}'");
            assert!(refused.contains(&path), "{refused}");
        }
        assert!(prepared(json!({"maximum": 9_007_199_254_740_991_i64})).is_ok());
        assert!(prepared(json!({"minimum": 1e300})).is_err());
        assert!(prepared(json!({"exclusiveMaximum": i64::MIN})).is_err());
        assert!(prepared(json!({"minimum": 0.1, "default": u64::MAX})).is_ok());
    }

    #[test]
    fn bounds_move_inward_to_what_floating_point_has() {
        const LARGEST: i64 = MAX_BOUND as i64;
        let odd = (1_i64 << 53) + 1;
        for (keyword, bound, expected) in [
            ("maximum", json!(i64::MAX), LARGEST),
            ("maximum", json!(u64::MAX), LARGEST),
            ("exclusiveMaximum", json!(1e300), LARGEST),
            ("minimum", json!(i64::MIN), -LARGEST),
            ("minimum", json!(f64::MIN), -LARGEST),
            ("exclusiveMinimum", json!(-3.4e38), -LARGEST),
            ("maximum", json!(odd), odd - 1),
            ("minimum", json!(odd), odd + 1),
            ("maximum", json!(-odd), -odd - 1),
            ("exclusiveMinimum", json!(-odd), 1 - odd),
            ("maximum", json!(odd - 2), odd - 2),
            ("minimum", json!(-3), -3),
        ] {
            let moved = prepared(json!({ keyword: bound })).unwrap();
            assert_eq!(moved, json!({ keyword: expected }));
        }
    }
}
