//! Whether the schemas of a `oneOf` exclude each other.
//!
//! If no value fits two of them, one of them is the same as any of them, which the compiler can
//! enforce. The unions of pydantic and zod are such: their objects differ in one constant.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ptr;

use serde_json::Value;

use super::closing::all_properties;
use super::references::target;

/// The deepest nesting that is compared.
const MAX_DEPTH: usize = 4;

/// The most references to references that are followed.
const MAX_HOPS: usize = 8;

/// The most schemas that are compared, each with each other.
const MAX_SCHEMAS: usize = 64;

/// The most work of all comparisons of a schema: steps of a few nanoseconds.
const MAX_WORK: usize = 1 << 19;

/// The work of looking at two schemas, beside what they list.
const WORK_OF_TWO: usize = 64;

/// The work for each name of a required property.
const WORK_OF_A_NAME: usize = 16;

/// Compares the schemas in a root schema. It is certain of less after a lot of work: a few names
/// and references can stand for any number of comparisons.
pub(super) struct SchemaComparison {
    root: Value,
    work_left: Cell<usize>,
}

impl SchemaComparison {
    /// Starts the comparisons of schemas that refer to parts of `root`.
    pub(super) fn new(root: Value) -> SchemaComparison {
        let work_left = Cell::new(MAX_WORK);
        SchemaComparison { root, work_left }
    }

    /// Returns whether it is certain that no value fits two of `schemas`. If they `close`, no
    /// answer has a property that its schema does not list.
    pub(super) fn are_disjoint(&self, schemas: &[Value], close: bool) -> bool {
        let pair = |(index, one): (usize, &Value)| {
            let others = &schemas[index + 1..];
            others.iter().all(|other| {
                close && self.each_requires_what_the_other_lacks(one, other)
                    || self.exclude([one, other], MAX_DEPTH)
            })
        };
        schemas.len() <= MAX_SCHEMAS && schemas.iter().enumerate().all(pair)
    }

    /// Takes this much of the work that is left. Returns whether there was as much.
    fn has_work_left(&self, work: usize) -> bool {
        let left = self.work_left.get().checked_sub(work);
        self.work_left.set(left.unwrap_or(0));
        left.is_some()
    }

    /// Returns whether it is certain that no value fits both schemas.
    fn exclude(&self, schemas: [&Value; 2], depth: usize) -> bool {
        let schemas = schemas.map(|schema| resolved(schema, &self.root));
        if !self.has_work_left(WORK_OF_TWO) || ptr::eq(schemas[0], schemas[1]) {
            return false;
        }
        let constants = schemas.map(constants);
        if let [Some(one), Some(other)] = &constants {
            let work = one.len().saturating_mul(other.len());
            return self.has_work_left(work)
                && !one
                    .iter()
                    .any(|value| other.iter().any(|more| equal(value, more)));
        }
        let kinds = [0, 1].map(|side| match &constants[side] {
            Some(values) => Some(values.iter().map(|value| kind(value)).collect()),
            None => types(schemas[side]),
        });
        if let [Some(one), Some(other)] = &kinds
            && self.has_work_left(one.len().saturating_mul(other.len()))
            && !one.iter().any(|kind| other.contains(kind))
        {
            return true;
        }
        // Two objects that both have a certain property, with values that exclude each other.
        let are_objects = kinds
            .iter()
            .all(|kinds| kinds.as_deref() == Some(&["object"]));
        let names = are_objects && depth > 0;
        let Some([own, also]) = names.then(|| self.required(schemas)).flatten() else {
            return false;
        };
        own.intersection(&also).any(|name| {
            let own = schemas.map(|schema| schema["properties"].get(name));
            matches!(own, [Some(one), Some(other)] if self.exclude([one, other], depth - 1))
        })
    }

    /// Returns whether each of two objects requires a property that the other cannot have once it
    /// is closed.
    fn each_requires_what_the_other_lacks(&self, one: &Value, other: &Value) -> bool {
        let Some([own, also]) = self.required([one, other]) else {
            return false;
        };
        let lacks = |schema: &Value, names: BTreeSet<&str>| {
            let listed = all_properties(schema);
            listed.is_some_and(|listed| names.iter().any(|name| !listed.contains_key(*name)))
        };
        lacks(one, also) && lacks(other, own)
    }

    /// Returns the names of the properties that two objects must have, unless it is too much work.
    fn required<'a>(&self, schemas: [&'a Value; 2]) -> Option<[BTreeSet<&'a str>; 2]> {
        let lists = schemas.map(|schema| schema["required"].as_array());
        let names: usize = lists.iter().flatten().map(|list| list.len()).sum();
        self.has_work_left(WORK_OF_A_NAME * names).then(|| {
            lists.map(|list| {
                let names = list.into_iter().flatten();
                names.filter_map(Value::as_str).collect()
            })
        })
    }
}

/// Returns what a schema refers to, if it does.
fn resolved<'a>(mut schema: &'a Value, root: &'a Value) -> &'a Value {
    for _ in 0..MAX_HOPS {
        let reference = schema.get("$ref").and_then(Value::as_str);
        match reference.and_then(|reference| target(root, reference)) {
            Some(part) => schema = part,
            None => break,
        }
    }
    schema
}

/// Returns the only values that fit a schema, if it lists them.
fn constants(schema: &Value) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(only), _) => Some(vec![only]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Returns the types that a schema allows, if it says so. Integers are numbers.
fn types(schema: &Value) -> Option<Vec<&str>> {
    let number = |name| if name == "integer" { "number" } else { name };
    match schema.get("type")? {
        Value::String(name) => Some(vec![number(name)]),
        Value::Array(names) => {
            let names: Option<Vec<&str>> = names.iter().map(Value::as_str).collect();
            Some(names?.into_iter().map(number).collect())
        }
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns whether JSON schema takes two values as equal: 1 is 1.0.
fn equal(one: &Value, other: &Value) -> bool {
    match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        // Numbers inside of arrays and objects may be equal too.
        _ => kind(one) == kind(other) && (one == other || one.is_array() || one.is_object()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_exclude_each_other_by_type_constants_or_a_required_constant() {
        let cat = json!({"type": "object", "required": ["kind", "n"],
            "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}});
        let dog = json!({"type": "object", "required": ["kind"],
            "properties": {"kind": {"enum": ["dog", "wolf"]}}});
        let root = json!({"$defs": {"cat": cat, "dog": dog}});
        let comparison = SchemaComparison::new(root);
        let (to_cat, to_dog) = (
            json!({"$ref": "#/$defs/cat"}),
            json!({"$ref": "#/$defs/dog"}),
        );
        let check = |one: &Value, other: &Value, expected: bool| {
            let schemas = [one.clone(), other.clone()];
            assert_eq!(
                comparison.are_disjoint(&schemas, false),
                expected,
                "{schemas:?}"
            );
            let schemas = [other.clone(), one.clone()];
            assert_eq!(
                comparison.are_disjoint(&schemas, false),
                expected,
                "{schemas:?}"
            );
        };
        check(&to_cat, &to_dog, true);
        check(&to_cat, &json!({"type": "null"}), true);
        check(&to_cat, &cat, false);
        check(&json!({"const": 1}), &json!({"const": 2}), true);
        check(&json!({"const": 1}), &json!({"enum": [3, 1.0]}), false);
        check(&json!({"const": [1]}), &json!({"const": [1.0]}), false);
        check(
            &json!({"type": "integer"}),
            &json!({"type": "number"}),
            false,
        );
        check(
            &json!({"type": ["string", "null"]}),
            &json!({"type": "integer"}),
            true,
        );
        check(&json!({"const": "a"}), &json!({"type": "integer"}), true);
        check(&json!({"minimum": 1}), &json!({"type": "string"}), false);
        // A property that an object may lack decides nothing.
        let open = json!({"type": "object", "properties": {"kind": {"const": "x"}}});
        check(&to_cat, &open, false);
        // Values that are no objects fit both.
        let untyped = json!({"required": ["kind"], "properties": {"kind": {"const": "x"}}});
        check(&to_cat, &untyped, false);
        // References in a circle end.
        let circle = json!({"$ref": "#/$defs/a"});
        let comparison = SchemaComparison::new(json!({"$defs": {"a": circle}}));
        assert!(!comparison.are_disjoint(&[circle.clone(), circle], false));
    }

    #[test]
    fn objects_that_close_exclude_each_other_if_each_requires_what_the_other_lacks() {
        let part = |listed: &[&str], required: &[&str]| {
            let listed: serde_json::Map<String, Value> = listed
                .iter()
                .map(|name| ((*name).to_owned(), json!({})))
                .collect();
            json!({"type": "object", "properties": listed, "required": required})
        };
        let comparison = SchemaComparison::new(Value::Null);
        let are_disjoint = |one: &Value, other: &Value, close| {
            comparison.are_disjoint(&[one.clone(), other.clone()], close)
        };
        let (a, b) = (part(&["a"], &["a"]), part(&["b"], &["b"]));
        assert!(are_disjoint(&a, &b, true));
        assert!(!are_disjoint(&a, &b, false), "an open object may have both");
        // {"a": 1} fits both as the client wrote them.
        assert!(!are_disjoint(&a, &part(&["b"], &[]), true));
        assert!(!are_disjoint(&a, &part(&["a", "b"], &["b"]), true));
        let mut open = b;
        open["additionalProperties"] = true.into();
        assert!(!are_disjoint(&a, &open, true));
    }

    #[test]
    fn comparisons_end_after_a_lot_of_work() {
        let names: Vec<String> = (0..300).map(|number| format!("p{number}")).collect();
        let object = |definition: &str| {
            let reference = json!({"$ref": format!("#/$defs/{definition}")});
            let names = names.iter().cloned();
            let properties: serde_json::Map<String, Value> =
                names.clone().zip(std::iter::repeat(reference)).collect();
            let required: Vec<String> = names.collect();
            json!({"type": "object", "required": required, "properties": properties})
        };
        let comparison =
            SchemaComparison::new(json!({"$defs": {"a": object("a"), "b": object("b")}}));
        // 300^4 pairs of names, then one that decides.
        let (mut one, mut other) = (object("a"), object("b"));
        one["properties"]["p99"] = json!({"const": 1});
        other["properties"]["p99"] = json!({"const": 2});
        assert!(!comparison.are_disjoint(&[one, other], true));
        assert_eq!(comparison.work_left.get(), 0);
    }
}
