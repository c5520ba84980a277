//! The grammar of an answer with calls, in the Lark of `llguidance`.
//!
//! A rule that is lazy ends at the first place where it can. So free text before a call ends where
//! the call begins, and what follows has to be the call.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::frame::{CallFrame, TagTokens};
use super::tool::{Tool, ToolChoice, ToolUse};
use super::xml_arguments::{VALUE_END, XmlArguments, XmlValue};
use crate::constraint::GrammarSource;

/// The largest number of calls in an answer. A model that repeats itself ends there.
const MAX_CALLS: usize = 16;

/// The largest number of arguments of a call that its schema does not list.
const MAX_OTHERS: usize = 32;

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
/// may be text without a call too, and may have text before the first call.
pub(super) fn of_calls(
    (frame, add_call): (&CallFrame, AddCall),
    tokens: &TagTokens,
    tools: &ToolUse,
    has_text: bool,
) -> String {
    let mut lark = String::new();
    let more = match tools.choice {
        ToolChoice::Auto | ToolChoice::Required if tools.is_parallel => MAX_CALLS - 1,
        _ => 0,
    };
    let is_free = tools.choice == ToolChoice::Auto && has_text;
    let first = if is_free { "text | first" } else { "first" };
    let _ = writeln!(lark, "start: {first}");
    match frame.open {
        "" => untagged(&mut lark, frame, tokens, tools, more),
        _ => tagged(&mut lark, frame, tokens, (is_free, more)),
    }
    let mut names = Vec::new();
    for (index, tool) in tools.callable() {
        add_call(&mut lark, frame, index, tool);
        names.push(format!("call_{index}"));
    }
    let _ = writeln!(lark, "call: {}", names.join(" | "));
    lark += "text: TEXT\nTEXT: /(?s:.*)/\n";
    lark
}

/// Adds the rules of a call of a tool: its name and its arguments.
type AddCall = fn(&mut String, &CallFrame, usize, &Tool);

/// Adds the rules of a call that is JSON.
pub(super) fn json_call(lark: &mut String, frame: &CallFrame, index: usize, tool: &Tool) {
    let text = json!(format!(", \"{}\": ", frame.arguments));
    let head = json!(format!("{{\"name\": \"{}\"", tool.name));
    let _ = writeln!(lark, "call_{index}: {head} {text} args_{index} \"}}\"");
    let _ = writeln!(lark, "args_{index}: %json {}", arguments(tool));
}

/// Adds the rules of a call that is XML. Its arguments are in the order of the schema.
pub(super) fn xml_call(lark: &mut String, _: &CallFrame, index: usize, tool: &Tool) {
    let arguments = XmlArguments::of(tool);
    let head = json!(format!("<function={}>\n", tool.name));
    let mut call = format!("call_{index}: {head}");
    let end = json!(format!("{VALUE_END}\n"));
    for (place, argument) in arguments.listed.iter().enumerate() {
        if GrammarSource::is_too_long(lark) {
            return; // It is refused, however much longer it is.
        }
        let rule = format!("argument_{index}_{place}");
        let value = match &argument.value {
            XmlValue::Text { .. } | XmlValue::Any => format!("value_{index}"),
            XmlValue::Choice { texts, is_nullable } => {
                let null = is_nullable.then_some("null");
                let texts = texts.iter().map(String::as_str).chain(null);
                let texts: Vec<String> = texts.map(|text| json!(text).to_string()).collect();
                format!("({}) {end}", texts.join(" | "))
            }
            XmlValue::Json(schema) => {
                let schema = arguments.with_definitions(schema);
                let schema = GrammarSource::with_json_style(schema, !tool.is_strict);
                let _ = writeln!(lark, "json_{index}_{place}: %json {schema}");
                format!("json_{index}_{place} {end}")
            }
        };
        let open = json!(format!("<parameter={}>\n", argument.name));
        let _ = writeln!(lark, "{rule}: {open} {value}");
        let optional = if argument.is_required { "" } else { "?" };
        let _ = write!(call, " {rule}{optional}");
    }
    let _ = writeln!(lark, "value_{index}[suffix={end}]: /(?s:.*)/");
    if arguments.is_open {
        let name = "/[^>\\n]{1,64}/";
        let _ = writeln!(
            lark,
            "other_{index}: \"<parameter=\" {name} \">\\n\" value_{index}"
        );
        let _ = write!(call, " other_{index}{{0,{MAX_OTHERS}}}");
    }
    let _ = writeln!(lark, "{call} \"</function>\"");
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
    let given = tool.parameters.as_ref();
    let speaks_of_others = OPENING
        .iter()
        .any(|keyword| given.is_some_and(|schema| schema.get(keyword).is_some()));
    let mut schema = tool.schema();
    if !speaks_of_others {
        schema.entry("type").or_insert_with(|| json!("object"));
        if schema.contains_key("properties") || tool.parameters.is_none() {
            schema.entry("properties").or_insert_with(|| json!({}));
            schema.insert("additionalProperties".to_owned(), false.into());
        }
    }
    GrammarSource::with_json_style(schema, !tool.is_strict)
}
