//! Writes values as Python's `str` and `repr` do.

use std::fmt::{self, Write};

use minijinja::value::{Value, ValueKind};

/// Writes a value as `{{ … }}` does: a text as it is, other values as Python's `repr`.
pub(super) fn write_text(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => write_repr(out, value),
    }
}

/// Returns a value as `{{ … }}` writes it.
pub(super) fn text_of(value: &Value) -> String {
    let mut text = String::new();
    write_text(&mut text, value).expect("a text can be written to memory");
    text
}

fn write_repr(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.kind() {
        ValueKind::Number => match float(value) {
            Some(number) => out.write_str(&float_text(number)),
            None => write!(out, "{value}"),
        },
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.is_tuple();
            let [open, close] = if is_tuple { ["(", ")"] } else { ["[", "]"] };
            out.write_str(open)?;
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                out.write_str(if count == 0 { "" } else { ", " })?;
                write_repr(out, &item)?;
                count += 1;
            }
            out.write_str(if is_tuple && count == 1 { "," } else { "" })?;
            out.write_str(close)
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if index == 0 { "" } else { ", " })?;
                write_repr(out, &key)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default())?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value}"),
    }
}

/// Returns a number that is a float.
pub(super) fn float(value: &Value) -> Option<f64> {
    let is_float = value.is_number() && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok())?
}

/// Returns a float as Python writes it: the shortest digits that name it, with an exponent below
/// 0.0001 and from 1e16 on.
pub(super) fn float_text(number: f64) -> String {
    if !number.is_finite() {
        let text = if number.is_nan() { "nan" } else { "inf" };
        return format!("{}{text}", if number < 0.0 { "-" } else { "" });
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Writes a text in quotation marks, as in a list.
fn write_quoted(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for char in text.chars() {
        match char {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            _ if char == quote => write!(out, "\\{char}")?,
            _ if is_printable(char) => out.write_char(char)?,
            '\0'..='\u{ff}' => write!(out, "\\x{:02x}", u32::from(char))?,
            '\u{100}'..='\u{ffff}' => write!(out, "\\u{:04x}", u32::from(char))?,
            _ => write!(out, "\\U{:08x}", u32::from(char))?,
        }
    }
    out.write_char(quote)
}

/// Returns whether Python writes a character as it is. Characters that Unicode has not assigned are
/// taken for printable.
pub(super) fn is_printable(char: char) -> bool {
    let is_space = char.is_whitespace() && char != ' ';
    let is_format = matches!(
        char,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}'
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e000}'..='\u{f8ff}'
            | '\u{e0001}'..='\u{e007f}' | '\u{f0000}'..='\u{10ffff}'
    );
    !(char.is_control() || is_space || is_format)
}
