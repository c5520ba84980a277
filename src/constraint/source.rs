//! What a request constrains its answer to, within budgets.
//!
//! The budgets are on the text of a grammar: its length and its depth. `grammars.rs` has the
//! budgets on the work of compiling it.

use std::fmt;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::gbnf;
use super::schema::{Undeclared, Unenforceable, prepare};
use crate::text::{ReasoningStart, ReasoningTags};

/// The longest grammar in bytes.
pub(super) const MAX_BYTES: usize = 64 << 10;

/// The deepest nesting of objects, arrays, groups and brackets.
const MAX_DEPTH: usize = 64;

/// The lowest number of a schema. `llguidance` negates integers of 64 bits, so it recurses without
/// an end at the lowest one, and it turns all lower numbers into that.
const LOWEST: f64 = -9.2e18;

/// What stands before a schema in Lark.
const LARK_SCHEMA: &str = "%json";

/// The keyword by which a schema changes how `llguidance` reads it.
const OPTIONS: &str = "x-guidance";

/// A grammar as a request gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarSource {
    kind: SourceKind,
    text: String,
    reasoning: Option<(ReasoningTags, ReasoningStart)>, // Free reasoning before the answer.
    otherwise: Option<(SourceKind, String)>,            // What the answer may follow instead.
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceKind {
    JsonSchema,
    Regex,
    Lark,
}

/// Why a grammar is refused before it is compiled. The text goes on after the name of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceError {
    /// It has this many bytes.
    TooLong(usize),
    /// It is nested too deeply.
    TooDeep,
    /// A schema has a number that is too far below zero.
    TooLow,
    /// It allows nothing: no text, or no choices.
    Empty,
    /// A schema has the keyword `x-guidance`.
    Options,
    /// A schema is neither an object nor a boolean.
    NotASchema,
    /// A schema has something that cannot be enforced exactly.
    Schema(String),
    /// A GBNF grammar cannot be read, for this reason.
    Gbnf(String),
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceError::TooLong(bytes) => {
                write!(f, "has {bytes} bytes; at most {MAX_BYTES} are allowed")
            }
            SourceError::TooDeep => {
                write!(f, "is nested more than {MAX_DEPTH} levels deep")
            }
            SourceError::TooLow => write!(f, "must not have a number below {LOWEST:e}"),
            SourceError::Empty => f.write_str("must not be empty"),
            SourceError::Options => write!(f, "must not have the keyword '{OPTIONS}'"),
            SourceError::NotASchema => f.write_str("must be a JSON schema: an object or a boolean"),
            SourceError::Schema(why) => f.write_str(why),
            SourceError::Gbnf(why) => write!(f, "is no valid GBNF grammar: {why}"),
        }
    }
}

impl GrammarSource {
    /// Returns the grammar of JSON texts that a schema accepts. An object that lists its properties
    /// has no others, unless its schema speaks of them.
    ///
    /// # Errors
    /// If the schema is over a budget, cannot be enforced exactly, or is no schema.
    pub fn json_schema(schema: &Value) -> Result<GrammarSource, SourceError> {
        GrammarSource::of_schema(schema, Undeclared::Refused, Unenforceable::Refused)
    }

    /// Returns the grammar of JSON texts that a schema accepts. Objects may have more properties
    /// than it lists.
    ///
    /// # Errors
    /// As [`json_schema`](Self::json_schema).
    pub fn open_json_schema(schema: &Value) -> Result<GrammarSource, SourceError> {
        GrammarSource::of_schema(schema, Undeclared::Allowed, Unenforceable::Refused)
    }

    /// As [`json_schema`](Self::json_schema), for a grammar in which
    /// [`with_json_style`](Self::with_json_style) ignores what cannot be enforced.
    ///
    /// # Errors
    /// If the schema is over a budget, or is no schema.
    pub fn lenient_json_schema(schema: &Value) -> Result<GrammarSource, SourceError> {
        GrammarSource::of_schema(schema, Undeclared::Refused, Unenforceable::Ignored)
    }

    fn of_schema(
        schema: &Value,
        undeclared: Undeclared,
        unenforceable: Unenforceable,
    ) -> Result<GrammarSource, SourceError> {
        let text = match schema {
            Value::Bool(true) => "{}".to_owned(),
            Value::Bool(false) => r#"{"not":{}}"#.to_owned(),
            Value::Object(keywords) if keywords.contains_key(OPTIONS) => {
                return Err(SourceError::Options);
            }
            Value::Object(_) => {
                if depth_of(schema, MAX_DEPTH).is_none() {
                    return Err(SourceError::TooDeep);
                }
                // Else what prepares it would have a lot to do for nothing.
                check_length(schema.to_string().len())?;
                let mut schema = schema.clone();
                prepare(&mut schema, undeclared, unenforceable).map_err(SourceError::Schema)?;
                schema.to_string()
            }
            _ => return Err(SourceError::NotASchema),
        };
        GrammarSource::new(SourceKind::JsonSchema, text)
    }

    /// Returns the grammar of JSON objects.
    pub fn json_object() -> GrammarSource {
        GrammarSource {
            kind: SourceKind::JsonSchema,
            text: json!({"type": "object"}).to_string(),
            reasoning: None,
            otherwise: None,
        }
    }

    /// Returns whether a grammar is over the budget of its length.
    pub fn is_too_long(text: &str) -> bool {
        text.len() > MAX_BYTES
    }

    /// Returns the grammar of an answer that calls tools, in Lark, or follows `otherwise`.
    ///
    /// # Errors
    /// If the grammar of the calls is over a budget.
    pub fn calls(
        lark: String,
        otherwise: Option<GrammarSource>,
    ) -> Result<GrammarSource, SourceError> {
        let calls = GrammarSource::new(SourceKind::Lark, lark)?;
        Ok(GrammarSource {
            otherwise: otherwise.map(|source| (source.kind, source.text)),
            ..calls
        })
    }

    /// Returns a schema as the compiler gets it. If it is `lenient`, keywords that a grammar cannot
    /// express are left in it. `json_schema` has accepted the whole schema, or
    /// `lenient_json_schema`.
    pub fn prepared(schema: Map<String, Value>, lenient: bool) -> Map<String, Value> {
        let mut schema = Value::Object(schema);
        let unenforceable = if lenient {
            Unenforceable::Ignored
        } else {
            Unenforceable::Refused
        };
        let prepared = prepare(&mut schema, Undeclared::Refused, unenforceable);
        prepared.expect("a schema that was refused is not compiled");
        match schema {
            Value::Object(prepared) => prepared,
            _ => unreachable!("it stays an object"),
        }
    }

    /// Returns a prepared schema for a grammar in Lark, which writes JSON as all answers have it.
    /// If it is `lenient`, keywords that a grammar cannot express are ignored.
    pub fn with_json_style(prepared: Map<String, Value>, lenient: bool) -> Value {
        let mut style = json_style();
        style["lenient"] = lenient.into();
        let mut schema = Value::Object(prepared);
        schema[OPTIONS] = style;
        schema
    }

    /// Returns the grammar of the texts that a regular expression matches from their beginning to
    /// their end.
    ///
    /// # Errors
    /// If the expression is over a budget or empty.
    pub fn regex(pattern: &str) -> Result<GrammarSource, SourceError> {
        let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
        let pattern = match pattern.strip_suffix('$') {
            Some(rest) if trailing_backslashes(rest).is_multiple_of(2) => rest,
            _ => pattern,
        };
        check_brackets(pattern)?;
        GrammarSource::new(SourceKind::Regex, pattern.to_owned())
    }

    /// Returns the grammar of these texts.
    ///
    /// # Errors
    /// If there is none, one of them is empty, or they are over a budget.
    pub fn choice(choices: &[String]) -> Result<GrammarSource, SourceError> {
        if choices.is_empty() || choices.iter().any(String::is_empty) {
            return Err(SourceError::Empty);
        }
        let quoted = choices.iter().map(|choice| json!(choice).to_string());
        let quoted: Vec<String> = quoted.collect();
        // One terminal is one automaton: an alternative of the parser for each text would be over
        // its budget with two thousand of them.
        let lark = format!("start: CHOICE\nCHOICE: {}", quoted.join(" | "));
        GrammarSource::new(SourceKind::Lark, lark)
    }

    /// Returns a grammar in Lark, as `llguidance` reads it, or in GBNF. A grammar with `::=` is in
    /// GBNF.
    ///
    /// # Errors
    /// If the grammar is over a budget or empty, or its GBNF is not valid.
    pub fn grammar(text: &str) -> Result<GrammarSource, SourceError> {
        check_length(text.len())?;
        check_brackets(text)?;
        let lark = match text.contains("::=") {
            true => gbnf::to_lark(text).map_err(SourceError::Gbnf)?,
            false => text.to_owned(),
        };
        GrammarSource::new(SourceKind::Lark, lark)
    }

    fn new(kind: SourceKind, text: String) -> Result<GrammarSource, SourceError> {
        if text.trim().is_empty() {
            return Err(SourceError::Empty);
        }
        check_length(text.len())?;
        let is_low = match kind {
            SourceKind::JsonSchema => serde_json::from_str(&text).is_ok_and(|all| has_low(&all)),
            SourceKind::Lark => lark_schemas(&text).any(|schema| has_low(&schema)),
            SourceKind::Regex => false,
        };
        if is_low {
            return Err(SourceError::TooLow);
        }
        Ok(GrammarSource {
            kind,
            text,
            reasoning: None,
            otherwise: None,
        })
    }

    /// Returns the grammar of an answer of a model that reasons. The model reasons freely until it
    /// writes the closing tag, and what follows is in this grammar. Unless the prompt has opened
    /// the reasoning, the model may do without.
    #[must_use]
    pub fn after_reasoning(self, tags: ReasoningTags, start: ReasoningStart) -> GrammarSource {
        GrammarSource {
            reasoning: Some((tags, start)),
            ..self
        }
    }

    /// Returns the grammar for the compiler.
    ///
    /// JSON is written with one space after each comma and colon and no other white space. More
    /// would be valid too, but a model that repeats white space would never end.
    pub(super) fn top_level(&self) -> TopLevelGrammar {
        let mut grammars = self.grammars();
        let (opened, tags) = match self.reasoning {
            None | Some((_, ReasoningStart::Over)) => return top_level(grammars),
            Some((tags, ReasoningStart::Opened)) => ("", tags),
            Some((tags, ReasoningStart::Possible)) => ("open", tags),
        };
        let rules = match tags {
            ReasoningTags::Tokens { open, close } => {
                format!("open: <[{open}]>\nclosed: free <[{close}]>\nfree: /(?s:.*)/\n")
            }
            ReasoningTags::Text => "open[lazy]: /\\s{0,8}<think>/\n\
                closed[suffix=\"</think>\"]: /(?s:.*)/\n"
                .to_owned(),
        };
        let reasoning = format!("{opened} closed (\"\\n\" | \"\\n\\n\")?");
        let start = match opened {
            "" => format!("start: {reasoning} @answer\n"),
            _ => format!("start: ({reasoning})? @answer\n"),
        };
        let whole = start + &rules;
        grammars[0].name = Some("answer".to_owned());
        grammars.insert(0, GrammarWithLexer::from_lark(whole));
        top_level(grammars)
    }

    /// Returns the grammars of the answer. The first refers to the others.
    fn grammars(&self) -> Vec<GrammarWithLexer> {
        let mut own = self.kind.grammar(&self.text);
        let Some((kind, text)) = &self.otherwise else {
            return vec![own];
        };
        let mut other = kind.grammar(text);
        own.name = Some("calls".to_owned());
        other.name = Some("otherwise".to_owned());
        let either = "start: @calls | @otherwise".to_owned();
        vec![GrammarWithLexer::from_lark(either), own, other]
    }
}

impl SourceKind {
    fn grammar(self, text: &str) -> GrammarWithLexer {
        match self {
            SourceKind::JsonSchema => {
                let mut schema: Value =
                    serde_json::from_str(text).expect("the text was a JSON value");
                schema[OPTIONS] = json_style();
                GrammarWithLexer::from_json_schema(schema)
            }
            SourceKind::Regex => GrammarWithLexer::from_regex(text),
            SourceKind::Lark => GrammarWithLexer::from_lark(text.to_owned()),
        }
    }
}

fn top_level(grammars: Vec<GrammarWithLexer>) -> TopLevelGrammar {
    TopLevelGrammar {
        grammars,
        max_tokens: None,
    }
}

/// Returns the options of schemas: one space after each comma and colon.
fn json_style() -> Value {
    json!({
        "whitespace_flexible": false,
        "item_separator": ", ",
        "key_separator": ": ",
    })
}

/// Returns whether a schema has a number below [`LOWEST`].
fn has_low(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|number| number < LOWEST),
        Value::Array(values) => values.iter().any(has_low),
        Value::Object(members) => members.values().any(has_low),
        _ => false,
    }
}

/// Returns the schemas in a Lark grammar.
fn lark_schemas(text: &str) -> impl Iterator<Item = Value> + '_ {
    let parts = text.match_indices(LARK_SCHEMA);
    parts.filter_map(|(place, marker)| {
        let rest = &text[place + marker.len()..];
        let mut values = serde_json::Deserializer::from_str(rest).into_iter();
        values.next()?.ok()
    })
}

/// Returns the depth of a JSON value, or `None` if it is over `limit`.
fn depth_of(value: &Value, limit: usize) -> Option<usize> {
    let deepest = |values: &mut dyn Iterator<Item = &Value>| -> Option<usize> {
        let below = limit.checked_sub(1)?;
        let depths: Option<Vec<usize>> = values.map(|value| depth_of(value, below)).collect();
        Some(1 + depths?.into_iter().max().unwrap_or(0))
    };
    match value {
        Value::Array(values) => deepest(&mut values.iter()),
        Value::Object(members) => deepest(&mut members.values()),
        _ => Some(0),
    }
}

fn check_length(bytes: usize) -> Result<(), SourceError> {
    if bytes > MAX_BYTES {
        return Err(SourceError::TooLong(bytes));
    }
    Ok(())
}

/// Checks how deeply brackets are nested. The parsers of grammars recurse into them.
fn check_brackets(text: &str) -> Result<(), SourceError> {
    let (mut depth, mut is_escaped) = (0_usize, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => {}
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        is_escaped = byte == b'\\' && !is_escaped;
        if depth > MAX_DEPTH {
            return Err(SourceError::TooDeep);
        }
    }
    Ok(())
}

fn trailing_backslashes(text: &str) -> usize {
    text.len() - text.trim_end_matches('\\').len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_bound_length_and_depth() {
        let nested = |levels: usize| {
            let inner = json!({"type": "integer"});
            (1..levels).fold(inner, |inner, _| json!({"items": inner}))
        };
        assert!(GrammarSource::json_schema(&nested(64)).is_ok());
        let deep = GrammarSource::json_schema(&nested(65));
        assert_eq!(deep, Err(SourceError::TooDeep));
        let groups = |levels: usize| "(".repeat(levels) + "a" + &")".repeat(levels);
        assert!(GrammarSource::regex(&groups(64)).is_ok());
        assert_eq!(GrammarSource::regex(&groups(65)), Err(SourceError::TooDeep));
        let long = vec!["abcdefgh".to_owned(); 8000];
        let refused = GrammarSource::choice(&long);
        assert!(matches!(refused, Err(SourceError::TooLong(_))));
    }

    #[test]
    fn numbers_that_the_library_cannot_negate_are_refused() {
        let lowest = json!({"properties": {"a": {"enum": [1, i64::MIN]}}});
        assert!(GrammarSource::json_schema(&lowest).is_err());
        assert!(GrammarSource::json_schema(&json!({"maximum": -1e30})).is_err());
        let lark = |schema: &Value| GrammarSource::grammar(&format!("start: %json {schema}\n"));
        assert_eq!(lark(&lowest), Err(SourceError::TooLow));
        let low = json!({"const": -9_000_000_000_000_000_000_i64});
        assert!(lark(&low).is_ok());
    }

    #[test]
    fn what_is_no_grammar_is_refused() {
        let schema = |value| GrammarSource::json_schema(&value);
        assert_eq!(schema(json!([])), Err(SourceError::NotASchema));
        assert_eq!(schema(json!({"x-guidance": {}})), Err(SourceError::Options));
        assert_eq!(GrammarSource::choice(&[]), Err(SourceError::Empty));
        assert_eq!(GrammarSource::grammar(" \n"), Err(SourceError::Empty));
        assert_eq!(GrammarSource::regex("^$"), Err(SourceError::Empty));
    }

    #[test]
    fn anchors_around_a_pattern_change_nothing() {
        let plain = GrammarSource::regex("a+b").unwrap();
        assert_eq!(GrammarSource::regex("^a+b$").unwrap(), plain);
        let dollar = GrammarSource::regex(r"a\$").unwrap();
        assert_eq!(dollar.text, r"a\$", "an escaped dollar sign is a character");
    }
}
