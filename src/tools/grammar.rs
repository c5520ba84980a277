//! The grammar of an answer with calls, in the Lark of `llguidance`.
//!
//! A rule that is lazy ends at the first place where it can. So free text before a call ends where
//! the call begins, and what follows has to be the call.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::frame::{CallFrame, TagTokens};
use super::tool::{Tool, ToolChoice, ToolUse};
use crate::constraint::GrammarSource;
use crate::text::ReasoningTags;

/// The largest number of calls in an answer. A model that repeats itself ends there.
const MAX_CALLS: usize = 16;

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

/// Returns the grammar of an answer that calls tools. With `ToolChoice::Auto` and `has_text`, it
/// may be text without a call too, and may have text before the first call. `reasoning` are the
/// tags of reasoning that may come first.
pub(super) fn of_calls(
    frame: &CallFrame,
    tokens: &TagTokens,
    tools: &ToolUse,
    reasoning: Option<ReasoningTags>,
    has_text: bool,
) -> String {
    let mut lark = String::new();
    let think = match reasoning {
        Some(ReasoningTags::Tokens { open, close }) => {
            lark += &format!("think: <[{open}]> text <[{close}]> /[ \\n]{{0,2}}/\n");
            "think? "
        }
        Some(ReasoningTags::Text) => {
            lark += "think: think_open think_close /[ \\n]{0,2}/\n\
                think_open[lazy]: /\\s{0,8}<think>/\n\
                think_close[lazy]: TEXT \"</think>\"\n";
            "think? "
        }
        None => "",
    };
    let more = match tools.choice {
        ToolChoice::Auto | ToolChoice::Required if tools.is_parallel => MAX_CALLS - 1,
        _ => 0,
    };
    let is_free = tools.choice == ToolChoice::Auto && has_text;
    let first = if is_free { "text | first" } else { "first" };
    let _ = writeln!(lark, "start: {think}({first})");
    match frame.open {
        "" => untagged(&mut lark, frame, tokens, tools, more),
        _ => tagged(&mut lark, frame, tokens, (is_free, more)),
    }
    let text = json!(format!(", \"{}\": ", frame.arguments));
    let mut names = Vec::new();
    for (index, tool) in tools.callable() {
        let head = json!(format!("{{\"name\": \"{}\"", tool.name));
        let _ = writeln!(lark, "call_{index}: {head} {text} args_{index} \"}}\"");
        let _ = writeln!(lark, "args_{index}: %json {}", arguments(tool));
        names.push(format!("call_{index}"));
    }
    let _ = writeln!(lark, "call: {}", names.join(" | "));
    lark += "text: TEXT\nTEXT: /(?s:.*)/\n";
    lark
}

impl Tool {
    /// Returns the grammar of the arguments alone, and the path of the field that holds the schema.
    pub fn own_grammar(&self) -> Option<(String, GrammarSource)> {
        let lark = format!("start: %json {}", arguments(self));
        let source = GrammarSource::calls(lark, None).ok()?;
        Some((self.path.clone(), source))
    }
}

/// Adds the rules of calls in tags.
fn tagged(lark: &mut String, frame: &CallFrame, tokens: &TagTokens, limits: (bool, usize)) {
    let (is_free, more) = limits;
    let tag = |text: &str, token: Option<u32>| match token {
        Some(token) => format!("<[{token}]>"),
        None => json!(text).to_string(),
    };
    let (open, close) = (tag(frame.open, tokens.open), tag(frame.close, tokens.close));
    let gap = json!(frame.gap);
    let body = match frame.separator {
        None => format!("{gap} call {gap}"),
        Some(separator) => {
            let begin = json!(format!("{}{}{}", frame.gap, frame.begin, frame.between));
            let next = json!(format!("{separator}{}", frame.between));
            let end = json!(format!("{}{}{}", frame.gap, frame.end, frame.gap));
            format!(
                "{begin} call{} {end}",
                repeated(&format!("{next} call"), more)
            )
        }
    };
    let _ = writeln!(lark, "body: {body} {close}");
    let again = match frame.separator {
        None => repeated(&format!("{} {open} body", json!(frame.between)), more),
        Some(_) => String::new(),
    };
    if !is_free {
        let _ = writeln!(lark, "first: {open} body{again}");
        return;
    }
    // A model can also spell the tag in other tokens.
    let spelled = json!(frame.open);
    let _ = writeln!(lark, "spelled[lazy]: TEXT {spelled}");
    let before = match tokens.open {
        Some(token) => format!("(spelled | text <[{token}]>)"),
        None => "spelled".to_owned(),
    };
    let _ = writeln!(lark, "first: {before} body{again}");
}

/// Adds the rules of calls without tags, at the beginning of an answer.
fn untagged(
    lark: &mut String,
    frame: &CallFrame,
    tokens: &TagTokens,
    tools: &ToolUse,
    more: usize,
) {
    let separator = frame.separator.unwrap_or_default();
    let next = json!(format!("{separator}{}", frame.between));
    let python = match tokens.python {
        Some(token) => format!("<[{token}]>? "),
        None => String::new(),
    };
    let mut heads = Vec::new();
    for (index, tool) in tools.callable() {
        let name = tool.name.replace('.', "\\.");
        let key = frame.arguments;
        let space = "\\s{0,4}";
        let head = format!(
            "{space}\\{{{space}\"name\"{space}:{space}\"{name}\"{space},{space}\"{key}\"{space}:"
        );
        let _ = writeln!(lark, "head_{index}[lazy]: /{head}/");
        heads.push(format!("head_{index} \" \"? args_{index} \"}}\""));
    }
    let heads = heads.join(" | ");
    let again = repeated(&format!("{next} call"), more);
    let _ = writeln!(lark, "first: {python}({heads}){again}");
}

/// Returns what matches `rule` up to `times` times.
fn repeated(rule: &str, times: usize) -> String {
    match times {
        0 => String::new(),
        _ => format!(" ({rule}){{0,{times}}}"),
    }
}

/// Returns the schema of a tool's arguments, as `llguidance` reads it. An object that lists its
/// properties has no others, unless its schema speaks of them: a model that makes up arguments
/// would not end.
fn arguments(tool: &Tool) -> Value {
    let mut schema = match &tool.parameters {
        Some(Value::Object(schema)) => schema.clone(),
        _ => serde_json::Map::new(),
    };
    if !OPENING.iter().any(|keyword| schema.contains_key(*keyword)) {
        schema.entry("type").or_insert_with(|| json!("object"));
        let properties = schema.entry("properties").or_insert_with(|| json!({}));
        let is_listed = properties
            .as_object()
            .is_some_and(|listed| !listed.is_empty());
        if is_listed || tool.parameters.is_none() {
            schema.insert("additionalProperties".to_owned(), false.into());
        }
    }
    GrammarSource::with_json_style(schema, !tool.is_strict)
}
