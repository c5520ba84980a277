//! The references of a JSON schema to its own parts.
//!
//! The compiler follows `#/` and names. It reads neither the percent-encoding of URIs nor the
//! escapes of JSON pointers, which generators write for names with spaces and slashes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use serde_json::{Map, Value};

/// Keywords whose value names schemas.
pub(super) const OF_MAP: [&str; 5] = [
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
];

/// Keywords whose value is no schema, whatever it looks like.
const OF_VALUE: [&str; 4] = ["const", "enum", "default", "examples"];

/// The most parts that get a name of their own.
const MAX_ALIASES: usize = 64;

/// The most bytes of JSON in the parts that get a name of their own. Parts are copied for their
/// names, and they may contain each other.
const MAX_COPIED: usize = 64 << 10;

/// Gives each part that a reference with escapes means a plain name in `$defs`.
pub(super) fn simplify(schema: &mut Value) {
    let mut found = Vec::new();
    collect(schema, &mut found);
    let mut aliases: BTreeMap<String, String> = BTreeMap::new(); // By the decoded reference.
    let (mut parts, mut copied) = (Vec::new(), 0);
    for reference in found {
        if !reference.contains(['~', '%', ' ']) || aliases.len() == MAX_ALIASES {
            continue;
        }
        let Some(part) = target(schema, &reference) else {
            continue;
        };
        let Entry::Vacant(entry) = aliases.entry(decoded(&reference)) else {
            continue;
        };
        copied += part.to_string().len();
        if copied > MAX_COPIED {
            break; // The compiler does not find what the other references mean.
        }
        let alias = (parts.len()..)
            .map(|number| format!("escaped-{number}"))
            .find(|name| schema["$defs"].get(name).is_none());
        let alias = alias.expect("numbers do not end");
        parts.push((entry.insert(alias).clone(), part.clone()));
    }
    if aliases.is_empty() {
        return;
    }
    let Some(definitions) = schema
        .as_object_mut()
        .map(|own| own.entry("$defs").or_insert_with(|| Map::new().into()))
    else {
        return;
    };
    if let Some(definitions) = definitions.as_object_mut() {
        definitions.extend(parts);
        rename(schema, &aliases);
    }
}

/// Returns the part of `root` that a reference means.
pub(super) fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    root.pointer(decoded(reference).strip_prefix('#')?)
}

/// Adds the references in a schema.
fn collect(schema: &Value, found: &mut Vec<String>) {
    match schema {
        Value::Object(keywords) => {
            let reference = keywords.get("$ref").and_then(Value::as_str);
            found.extend(reference.map(str::to_owned));
            for (keyword, value) in keywords {
                match value {
                    Value::Object(named) if OF_MAP.contains(&keyword.as_str()) => {
                        named.values().for_each(|schema| collect(schema, found));
                    }
                    _ if OF_VALUE.contains(&keyword.as_str()) => {}
                    _ => collect(value, found),
                }
            }
        }
        Value::Array(schemas) => schemas.iter().for_each(|schema| collect(schema, found)),
        _ => {}
    }
}

fn rename(schema: &mut Value, aliases: &BTreeMap<String, String>) {
    match schema {
        Value::Object(keywords) => {
            if let Some(Value::String(reference)) = keywords.get_mut("$ref")
                && let Some(alias) = aliases.get(&decoded(reference))
            {
                *reference = format!("#/$defs/{alias}");
            }
            for (keyword, value) in keywords {
                match value {
                    Value::Object(named) if OF_MAP.contains(&keyword.as_str()) => {
                        named
                            .values_mut()
                            .for_each(|schema| rename(schema, aliases));
                    }
                    _ if OF_VALUE.contains(&keyword.as_str()) => {}
                    _ => rename(value, aliases),
                }
            }
        }
        Value::Array(schemas) => schemas
            .iter_mut()
            .for_each(|schema| rename(schema, aliases)),
        _ => {}
    }
}

/// Returns a reference without the percent-encoding of URIs.
pub(super) fn decoded(reference: &str) -> String {
    let mut bytes = Vec::with_capacity(reference.len());
    let mut rest = reference.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..2)
            .and_then(|code| std::str::from_utf8(code).ok());
        let byte = code.and_then(|code| u8::from_str_radix(code, 16).ok());
        match byte {
            Some(byte) if first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_part_has_one_name_however_it_is_spelled() {
        let to = |reference: &str| json!({ "$ref": reference });
        let mut schema = json!({
            "items": [to("#/$defs/a%20b"), to("#/%24defs/a%20b"), to("#/$defs/%61%20b")],
            "const": to("#/$defs/a%20b"),
            "properties": {"const": to("#/$defs/a%20b")},
            "$defs": {"a b": {"type": "null"}},
        });
        simplify(&mut schema);
        let alias = to("#/$defs/escaped-0");
        assert_eq!(schema["items"], json!([alias, alias, alias]));
        assert_eq!(schema["properties"]["const"], alias);
        assert_eq!(
            schema["const"],
            to("#/$defs/a%20b"),
            "a constant is no schema"
        );
        assert_eq!(schema["$defs"].as_object().unwrap().len(), 2);
    }

    #[test]
    fn names_do_not_multiply_a_schema() {
        let nested = (0..60).fold(json!("x".repeat(40_000)), |inner, _| json!({"a b": inner}));
        let references =
            (1..60).map(|depth| json!({"$ref": format!("#{}", "/a%20b".repeat(depth))}));
        let references: Vec<Value> = references.collect();
        let mut schema = json!({"a b": nested, "anyOf": references});
        let before = schema.to_string().len();
        simplify(&mut schema);
        assert!(schema.to_string().len() < before + 2 * MAX_COPIED);
    }
}
