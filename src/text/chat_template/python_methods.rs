//! The methods of Python's texts, lists and dictionaries that `minijinja` lacks, or has otherwise.

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python_text::is_printable;

/// Calls a method of a value.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let own = match value.kind() {
        ValueKind::String => of_text(value.as_str().unwrap_or_default(), name, arguments)?,
        ValueKind::Seq | ValueKind::Iterable if name == "index" => {
            let (what,): (&Value,) = from_args(arguments)?;
            let place = value.try_iter()?.position(|item| item == *what);
            Some(Value::from(place.ok_or_else(|| not_found(name))?))
        }
        ValueKind::Seq | ValueKind::Map if name == "copy" && arguments.is_empty() => {
            Some(value.clone())
        }
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, name, arguments),
    }
}

fn not_found(name: &str) -> Error {
    let why = format!("{name}: there is no such part");
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Calls a method of a text. Returns `None` if `minijinja` has the same.
fn of_text(text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let none = || from_args::<()>(arguments);
    let is_all = |accepts: fn(char) -> bool| -> Result<Value, Error> {
        none()?;
        Ok(Value::from(!text.is_empty() && text.chars().all(accepts)))
    };
    let result = match name {
        "split" | "rsplit" => split(text, name, arguments)?,
        "partition" | "rpartition" => partition(text, name, arguments)?,
        "strip" | "lstrip" | "rstrip" => strip(text, name, arguments)?,
        "find" | "rfind" | "index" | "rindex" => find(text, name, arguments)?,
        "startswith" | "endswith" if arguments.len() > 1 => affix(text, name, arguments)?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, name, arguments)?,
        "splitlines" => lines(text, arguments)?,
        "swapcase" => Value::from(by_word(text, |char, _| match char.is_uppercase() {
            true => char.to_lowercase().collect(),
            false => char.to_uppercase().collect(),
        })),
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        "title" => Value::from(by_word(text, |char, is_first| match is_first {
            true => char.to_uppercase().collect(),
            false => char.to_lowercase().collect(),
        })),
        "expandtabs" => expand_tabs(text, arguments)?,
        "isdecimal" | "isdigit" => is_all(|char| {
            let is_superscript = matches!(char, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉');
            is_superscript || (char.is_numeric() && is_decimal(char))
        })?,
        "isprintable" => {
            none()?;
            Value::from(text.chars().all(is_printable))
        }
        "isspace" => is_all(is_space)?,
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// Returns whether a character is a digit of a decimal number, in the scripts in use.
fn is_decimal(char: char) -> bool {
    const ZEROS: [char; 12] = [
        '0', '\u{660}', '\u{6f0}', '\u{7c0}', '\u{966}', '\u{9e6}', '\u{a66}', '\u{e50}',
        '\u{ed0}', '\u{f20}', '\u{1040}', '\u{ff10}',
    ];
    let number = u32::from(char);
    ZEROS
        .iter()
        .any(|zero| (0..10).contains(&number.wrapping_sub(u32::from(*zero))))
}

/// White space as Python has it.
fn is_space(char: char) -> bool {
    char.is_whitespace() || ('\x1c'..='\x1f').contains(&char)
}

/// Returns the values of parameters that are given in order or by name.
fn given<const N: usize>(arguments: &[Value], names: [&str; N]) -> Result<[Value; N], Error> {
    let (positional, named): (Rest<Value>, Kwargs) = from_args(arguments)?;
    if positional.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut values = [const { Value::UNDEFINED }; N];
    for (index, name) in names.into_iter().enumerate() {
        let by_name = named.get::<Option<Value>>(name)?;
        let value = positional.get(index).cloned().or(by_name);
        values[index] = value.filter(|value| !value.is_none()).unwrap_or_default();
    }
    named.assert_all_used()?;
    Ok(values)
}

fn split(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [separator, most] = given(arguments, ["sep", "maxsplit"])?;
    let most = most.as_i64().and_then(|most| usize::try_from(most).ok());
    let most = most.unwrap_or(usize::MAX);
    let is_from_right = name == "rsplit";
    let parts: Vec<&str> = match separator.as_str() {
        Some("") => {
            let why = "split: the separator is empty";
            return Err(Error::new(ErrorKind::InvalidOperation, why));
        }
        Some(separator) if is_from_right => {
            let mut parts: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            parts
        }
        Some(separator) => text.splitn(most.saturating_add(1), separator).collect(),
        None if is_from_right => {
            let mut parts = words(text, most, |rest| {
                let rest = rest.trim_end_matches(is_space);
                let cut = rest.rfind(is_space).map(|at| {
                    let space = rest[at..].chars().next().map_or(0, char::len_utf8);
                    at + space
                });
                (&rest[..cut.unwrap_or(0)], &rest[cut.unwrap_or(0)..])
            });
            if let Some(last) = parts.last_mut() {
                *last = last.trim_end_matches(is_space);
            }
            parts.reverse();
            parts
        }
        None => {
            let mut parts = words(text, most, |rest| {
                let rest = rest.trim_start_matches(is_space);
                let cut = rest.find(is_space).unwrap_or(rest.len());
                (&rest[cut..], &rest[..cut])
            });
            if let Some(last) = parts.last_mut() {
                *last = last.trim_start_matches(is_space);
            }
            parts
        }
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits at white space, at most `most` times. `take` returns the rest and the next word.
fn words<'t>(
    text: &'t str,
    most: usize,
    take: impl Fn(&'t str) -> (&'t str, &'t str),
) -> Vec<&'t str> {
    let (mut rest, mut parts) = (text, Vec::new());
    while !rest.trim_matches(is_space).is_empty() {
        if parts.len() == most {
            parts.push(rest);
            break;
        }
        let (next, word) = take(rest);
        parts.push(word);
        rest = next;
    }
    parts
}

fn partition(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    let is_first = name == "partition";
    let parts = match is_first {
        true => text.split_once(separator),
        false => text.rsplit_once(separator),
    };
    let parts = match parts {
        Some((before, after)) => [before, separator, after],
        None if is_first => [text, "", ""],
        None => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn strip(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [chars] = given(arguments, ["chars"])?;
    let chars = chars.as_str();
    let is_cut = |char: char| chars.map_or_else(|| is_space(char), |chars| chars.contains(char));
    let text = match name {
        "lstrip" => text.trim_start_matches(is_cut),
        "rstrip" => text.trim_end_matches(is_cut),
        _ => text.trim_matches(is_cut),
    };
    Ok(Value::from(text))
}

/// Returns the part of a text between two places, which count characters as slices do, and the
/// number of characters before.
fn between<'t>(text: &'t str, [start, end]: [&Value; 2]) -> (&'t str, usize) {
    let count = text.chars().count() as i64;
    let place = |value: &Value, default: i64| {
        let place = value.as_i64().unwrap_or(default);
        let place = if place < 0 { place + count } else { place };
        place.clamp(0, count) as usize
    };
    let (start, end) = (place(start, 0), place(end, count));
    let byte = |place: usize| {
        text.char_indices()
            .nth(place)
            .map_or(text.len(), |(at, _)| at)
    };
    (text.get(byte(start)..byte(end)).unwrap_or_default(), start)
}

fn find(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [what, start, end] = given(arguments, ["sub", "start", "end"])?;
    let what = what.as_str().ok_or_else(|| not_found(name))?;
    let (part, before) = between(text, [&start, &end]);
    let found = match name {
        "rfind" | "rindex" => part.rfind(what),
        _ => part.find(what),
    };
    let place = found.map(|at| before + part[..at].chars().count());
    match place {
        Some(place) => Ok(Value::from(place)),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(not_found(name)),
    }
}

fn affix(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [affix, start, end] = given(arguments, ["affix", "start", "end"])?;
    let (part, _) = between(text, [&start, &end]);
    let has = |affix: &str| match name {
        "startswith" => part.starts_with(affix),
        _ => part.ends_with(affix),
    };
    Ok(Value::from(match affix.as_str() {
        Some(affix) => has(affix),
        None => affix.try_iter()?.any(|one| one.as_str().is_some_and(has)),
    }))
}

fn pad(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    const MAX_WIDTH: usize = 1 << 16;
    let (width, fill): (usize, Option<char>) = from_args(arguments)?;
    if width > MAX_WIDTH {
        let why = format!("{name}: the width is too large");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let missing = width.saturating_sub(text.chars().count());
    let fill = fill.unwrap_or(' ').to_string();
    Ok(Value::from(match name {
        "ljust" => text.to_owned() + &fill.repeat(missing),
        "rjust" => fill.repeat(missing) + text,
        "zfill" => {
            let digits = text.trim_start_matches(['+', '-']);
            let sign = &text[..text.len() - digits.len()];
            format!("{sign}{}{digits}", "0".repeat(missing))
        }
        _ => {
            // As Python does: an odd space stands left if the width is odd.
            let left = missing / 2 + (missing & width & 1);
            fill.repeat(left) + text + &fill.repeat(missing - left)
        }
    }))
}

fn lines(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [keeps_ends] = given(arguments, ["keepends"])?;
    let is_end = |char: char| {
        matches!(
            char,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}'
        ) || matches!(char, '\u{2028}' | '\u{2029}')
    };
    let (mut rest, mut lines) = (text, Vec::new());
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let length = match rest[end..].strip_prefix("\r\n") {
            Some(_) => 2,
            None => rest[end..].chars().next().map_or(0, char::len_utf8),
        };
        let kept = if keeps_ends.is_true() {
            end + length
        } else {
            end
        };
        lines.push(Value::from(&rest[..kept]));
        rest = &rest[end + length..];
    }
    Ok(Value::from(lines))
}

/// Returns a text whose letters are changed. The first letter of each run of letters is a first.
fn by_word(text: &str, change: impl Fn(char, bool) -> String) -> String {
    let mut is_first = true;
    let change = |char: char| {
        let changed = change(char, is_first);
        is_first = !char.is_alphabetic();
        changed
    };
    text.chars().map(change).collect()
}

fn expand_tabs(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let [size] = given(arguments, ["tabsize"])?;
    let size = size.as_i64().map_or(8, |size| size.clamp(0, 64) as usize);
    let (mut expanded, mut column) = (String::new(), 0);
    for char in text.chars() {
        match char {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                expanded.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            _ => {
                expanded.push(char);
                column = if matches!(char, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    Ok(Value::from(expanded))
}
