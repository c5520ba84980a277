//! Writes JSON as `transformers` does in chat templates, which is as Python's `json.dumps` does.
//!
//! Invariant: the JSON in a template is as long as the output may be, at most. Indentation makes
//! numbers that a request nests deeply a hundred times as long.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Rest, Serde, Value as JinjaValue, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value;

use super::output::LimitedOutput;
use super::python_text::{float, float_text};

/// The deepest indentation that a template may ask for.
const MAX_INDENT: usize = 16;

/// The deepest nesting of values. A body nests less deeply, but a template can nest more.
const MAX_DEPTH: usize = 256;

/// The parameters of `tojson` behind the value, in the order of `transformers`.
const PARAMETERS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];

/// Returns a JSON value as text, with one space after each comma and colon.
pub fn spaced_json(value: &Value) -> String {
    let mut text = Vec::new();
    let value = JinjaValue::from(Serde(value));
    let written = Style::default().write(&value, 0, &mut text);
    written.expect("a JSON value can be written to memory");
    String::from_utf8(text).expect("JSON is UTF-8")
}

/// The filter `tojson`.
pub(super) fn to_json(
    value: &JinjaValue,
    positional: Rest<JinjaValue>,
    options: Kwargs,
) -> Result<JinjaValue, Error> {
    let style = Style::new(&positional, &options)?;
    options.assert_all_used()?;
    let mut output = LimitedOutput::default();
    match style.write(value, 0, &mut output) {
        Ok(()) => Ok(output.into_text().into()),
        Err(error) => Err(failed(&output.error().unwrap_or_else(|| error.to_string()))),
    }
}

fn failed(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"))
}

/// How JSON is written.
struct Style {
    is_ascii: bool,
    /// What stands before a member for each level. Without it, all members are on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sorts_keys: bool,
}

impl Default for Style {
    fn default() -> Style {
        Style {
            is_ascii: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            sorts_keys: false,
        }
    }
}

impl Style {
    fn new(positional: &[JinjaValue], options: &Kwargs) -> Result<Style, Error> {
        if positional.len() > PARAMETERS.len() {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let given = |index: usize| -> Result<JinjaValue, Error> {
            let named = options.get::<Option<JinjaValue>>(PARAMETERS[index])?;
            let value = positional.get(index).cloned().or(named);
            Ok(value.unwrap_or_default())
        };
        let mut style = Style {
            is_ascii: given(0)?.is_true(),
            indent: indent(&given(1)?)?,
            sorts_keys: given(3)?.is_true(),
            ..Style::default()
        };
        if style.indent.is_some() {
            style.item_separator = ",".to_owned();
        }
        let separators = given(2)?;
        if !separators.is_none() && !separators.is_undefined() {
            let texts = separators
                .try_iter()?
                .map(|text| text.as_str().map(str::to_owned));
            let texts: Option<Vec<String>> = texts.collect();
            let Some(Ok([item, key])) = texts.map(<[String; 2]>::try_from) else {
                return Err(failed("the separators must be two texts"));
            };
            (style.item_separator, style.key_separator) = (item, key);
        }
        Ok(style)
    }

    fn write(&self, value: &JinjaValue, depth: usize, out: &mut dyn Write) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other("the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.write_all(b"null"),
            ValueKind::Bool if value.is_true() => out.write_all(b"true"),
            ValueKind::Bool => out.write_all(b"false"),
            ValueKind::Number => out.write_all(number_text(value).as_bytes()),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter().map_err(io::Error::other)?;
                self.write_members(*b"[]", depth, out, items.map(|item| (None, item)))
            }
            ValueKind::Map => {
                let keys = value.try_iter().map_err(io::Error::other)?;
                let mut keys: Vec<JinjaValue> = keys.collect();
                if self.sorts_keys {
                    keys.sort();
                }
                let members = keys.into_iter().map(|key| {
                    let member = value.get_item(&key).unwrap_or_default();
                    (Some(key), member)
                });
                self.write_members(*b"{}", depth, out, members)
            }
            kind => {
                let why = format!("a value of the type '{kind}' is no JSON");
                Err(io::Error::other(why))
            }
        }
    }

    fn write_members(
        &self,
        [open, close]: [u8; 2],
        depth: usize,
        out: &mut dyn Write,
        members: impl Iterator<Item = (Option<JinjaValue>, JinjaValue)>,
    ) -> io::Result<()> {
        out.write_all(&[open])?;
        let mut is_empty = true;
        for (key, value) in members {
            if !is_empty {
                out.write_all(self.item_separator.as_bytes())?;
            }
            is_empty = false;
            self.begin_line(depth + 1, out)?;
            if let Some(key) = key {
                self.write_key(&key, out)?;
                out.write_all(self.key_separator.as_bytes())?;
            }
            self.write(&value, depth + 1, out)?;
        }
        if !is_empty {
            self.begin_line(depth, out)?;
        }
        out.write_all(&[close])
    }

    fn begin_line(&self, depth: usize, out: &mut dyn Write) -> io::Result<()> {
        let Some(indent) = &self.indent else {
            return Ok(());
        };
        out.write_all(b"\n")?;
        (0..depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }

    /// Writes a key. Python makes texts of numbers, booleans and `none`.
    fn write_key(&self, key: &JinjaValue, out: &mut dyn Write) -> io::Result<()> {
        match (key.as_str(), key.kind()) {
            (Some(text), _) => self.write_text(text, out),
            (None, ValueKind::None | ValueKind::Bool | ValueKind::Number) => {
                out.write_all(b"\"")?;
                self.write(key, 0, out)?;
                out.write_all(b"\"")
            }
            _ => Err(io::Error::other(
                "a key must be a text, a number, a boolean or none",
            )),
        }
    }

    fn write_text(&self, text: &str, out: &mut dyn Write) -> io::Result<()> {
        if !self.is_ascii {
            return serde_json::to_writer(out, text).map_err(io::Error::from);
        }
        let quoted = serde_json::to_string(text).map_err(io::Error::from)?;
        for char in quoted.chars() {
            if (' '..='~').contains(&char) {
                out.write_all(&[char as u8])?;
                continue;
            }
            for unit in char.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }
}

/// Returns the indentation of a level: a text, or a number of spaces.
fn indent(value: &JinjaValue) -> Result<Option<String>, Error> {
    if value.is_none() || value.is_undefined() {
        return Ok(None);
    }
    let indent = match (value.as_str(), value.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(count)) if count > MAX_INDENT as i64 => {
            return Err(failed("the indentation is too deep"));
        }
        (None, Some(count)) => " ".repeat(usize::try_from(count).unwrap_or(0)),
        (None, None) => return Err(failed("the indentation must be a number or a text")),
    };
    if indent.len() > MAX_INDENT {
        return Err(failed("the indentation is too deep"));
    }
    Ok(Some(indent))
}

fn number_text(value: &JinjaValue) -> String {
    match float(value) {
        None => value.to_string(),
        Some(number) if number.is_nan() => "NaN".to_owned(),
        Some(number) if number.is_infinite() => {
            format!("{}Infinity", if number < 0.0 { "-" } else { "" })
        }
        Some(number) => float_text(number),
    }
}
