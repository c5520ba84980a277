//! The arguments of a call in XML: which there are, and how each is written.
//!
//! A value that is a text stands in XML as it is, as models are trained to write it. All other
//! values are JSON.

use serde_json::{Map, Value, json};

use super::tool::Tool;

/// What ends a value.
pub(super) const VALUE_END: &str = "\n</parameter>";

/// Keywords that allow arguments beside `properties`, or describe them elsewhere.
const OPENING: [&str; 6] = ["patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if"];

/// The deepest chain of references that is followed.
const MAX_REFERENCES: usize = 8;

/// The arguments of a tool.
#[derive(Clone, Debug)]
pub(super) struct XmlArguments {
    /// In the order of the schema.
    pub(super) listed: Vec<XmlArgument>,
    /// Whether there may be others, whose values are texts or JSON.
    pub(super) is_open: bool,
    definitions: Map<String, Value>, // What references in the schemas of arguments mean.
}

/// An argument of a tool.
#[derive(Clone, Debug)]
pub(super) struct XmlArgument {
    pub(super) name: String,
    pub(super) is_required: bool,
    pub(super) value: XmlValue,
}

/// How a value is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum XmlValue {
    /// As a text. If it may be `null`, this word means that.
    Text { is_nullable: bool },
    /// As one of these texts.
    Choice {
        texts: Vec<String>,
        is_nullable: bool,
    },
    /// As JSON of this schema, which may refer to definitions beside it.
    Json(Map<String, Value>),
    /// As JSON if it can be read as JSON, and otherwise as a text.
    Any,
}

impl XmlArguments {
    /// Reads the schema of a tool.
    pub(super) fn of(tool: &Tool) -> XmlArguments {
        let root = &tool.schema();
        let required: Vec<&str> = root
            .get("required")
            .and_then(Value::as_array)
            .map_or_else(Vec::new, |names| {
                names.iter().filter_map(Value::as_str).collect()
            });
        let properties = root.get("properties").and_then(Value::as_object);
        let listed = properties
            .into_iter()
            .flatten()
            .map(|(name, schema)| XmlArgument {
                name: name.clone(),
                is_required: required.contains(&name.as_str()),
                value: XmlValue::of(schema, root),
            });
        let mut listed: Vec<XmlArgument> = listed.collect();
        for name in required {
            if !listed.iter().any(|one| one.name == name) {
                listed.push(XmlArgument {
                    name: name.to_owned(),
                    is_required: true,
                    value: XmlValue::Any,
                });
            }
        }
        listed.retain(|one| !one.name.contains(['>', '\n']));
        let allows_others = match root.get("additionalProperties") {
            Some(allowed) => *allowed != Value::Bool(false),
            None => properties.is_none() && tool.parameters.is_some(),
        };
        let is_open = allows_others || OPENING.iter().any(|keyword| root.contains_key(*keyword));
        let definitions = ["$defs", "definitions"].iter();
        let definitions = definitions
            .filter_map(|keyword| Some(((*keyword).to_owned(), root.get(*keyword)?.clone())));
        XmlArguments {
            listed,
            is_open,
            definitions: definitions.collect(),
        }
    }

    /// Returns the schema of an argument, with what its references mean.
    pub(super) fn with_definitions(&self, schema: &Map<String, Value>) -> Map<String, Value> {
        let mut schema = schema.clone();
        schema.extend(self.definitions.clone());
        schema
    }

    /// Returns how the value of an argument is written.
    pub(super) fn value_of(&self, name: &str) -> XmlValue {
        let found = self.listed.iter().find(|one| one.name == name);
        found.map_or(XmlValue::Any, |one| one.value.clone())
    }
}

impl XmlValue {
    fn of(schema: &Value, root: &Map<String, Value>) -> XmlValue {
        let mut kinds = TextKinds::default();
        if kinds.add(schema, root, MAX_REFERENCES).is_some() && kinds.has_text {
            let is_nullable = kinds.has_null;
            return match kinds.choices {
                Some(texts) => XmlValue::Choice { texts, is_nullable },
                None => XmlValue::Text { is_nullable },
            };
        }
        XmlValue::Json(schema.as_object().cloned().unwrap_or_default())
    }
}

/// What values a schema allows, if they are texts and `null` only.
#[derive(Default)]
struct TextKinds {
    has_text: bool,
    has_null: bool,
    choices: Option<Vec<String>>,
}

impl TextKinds {
    /// Adds what a schema allows. Returns `None` if this is more than texts and `null`.
    fn add(&mut self, schema: &Value, root: &Map<String, Value>, hops: usize) -> Option<()> {
        if let Some(pointer) = schema["$ref"].as_str() {
            let root = Value::Object(root.clone());
            let target = root.pointer(pointer.strip_prefix('#')?)?;
            return self.add(target, root.as_object()?, hops.checked_sub(1)?);
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(variants) = schema[keyword].as_array() {
                let hops = hops.checked_sub(1)?;
                return variants
                    .iter()
                    .try_for_each(|one| self.add(one, root, hops));
            }
        }
        let listed = match (&schema["const"], schema["enum"].as_array()) {
            (Value::Null, None) => None,
            (Value::Null, Some(listed)) => Some(listed.clone()),
            (one, _) => Some(vec![one.clone()]),
        };
        if let Some(listed) = listed {
            return listed.iter().try_for_each(|value| match value {
                Value::String(text) if !text.contains(VALUE_END) => {
                    self.has_text = true;
                    self.choices.get_or_insert_default().push(text.clone());
                    Some(())
                }
                Value::Null => {
                    self.has_null = true;
                    Some(())
                }
                _ => None,
            });
        }
        let single = [schema["type"].clone()];
        let types = schema["type"]
            .as_array()
            .map_or(single.as_slice(), Vec::as_slice);
        types.iter().try_for_each(|kind| match kind.as_str()? {
            "string" => {
                // Any text is more than those that another variant lists.
                self.has_text = true;
                self.choices = None;
                Some(())
            }
            "null" => {
                self.has_null = true;
                Some(())
            }
            _ => None,
        })
    }
}

/// Returns a text as a part of a JSON text.
pub(super) fn escaped(text: &str) -> String {
    let quoted = json!(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
