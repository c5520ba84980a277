//! Writes JSON as `transformers` does in chat templates: with a space after commas and colons, and
//! without escapes for HTML.
//!
//! Invariant: the JSON in a template is as long as the output may be, at most. Indentation makes
//! numbers that a request nests deeply a hundred times as long.

use std::io;

use minijinja::value::{Kwargs, Value as JinjaValue};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::output::LimitedOutput;

/// The deepest indentation that a template may ask for.
const MAX_INDENT: usize = 16;

/// Returns a JSON value as text, with one space after each comma and colon.
pub fn spaced_json(value: &Value) -> String {
    let mut text = Vec::new();
    let written = write(value, Spaced, &mut text);
    written.expect("a JSON value can be written to memory");
    String::from_utf8(text).expect("JSON is UTF-8")
}

/// The filter `tojson`.
pub(super) fn to_json(
    value: &JinjaValue,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<JinjaValue, Error> {
    let failed = |why: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"));
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(failed("ensure_ascii is not supported"));
    }
    options.assert_all_used()?;
    let value = serde_json::to_value(value).map_err(|error| failed(&error.to_string()))?;
    let mut output = LimitedOutput::default();
    let written = match indent {
        None => write(&value, Spaced, &mut output),
        Some(indent) if indent <= MAX_INDENT => {
            let indent = " ".repeat(indent);
            let format = PrettyFormatter::with_indent(indent.as_bytes());
            write(&value, format, &mut output)
        }
        Some(_) => return Err(failed("the indentation is too deep")),
    };
    match written {
        Ok(()) => Ok(output.into_text().into()),
        Err(error) => Err(failed(&output.error().unwrap_or_else(|| error.to_string()))),
    }
}

fn write(value: &Value, format: impl Formatter, output: impl io::Write) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(output, format))
}

/// Writes one line.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

fn separate<W: io::Write + ?Sized>(writer: &mut W, first: bool) -> io::Result<()> {
    if first {
        Ok(())
    } else {
        writer.write_all(b", ")
    }
}
