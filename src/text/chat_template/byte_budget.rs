//! Counts the bytes that a template builds, and stops it before it builds too many.
//!
//! Each operation is charged before it runs, for what its result can take: strings by their bytes,
//! lists by their items. Nothing is given back when a value is dropped, so the time that building
//! takes is bounded too. The time of reading is not: a template that compares long texts in a loop
//! takes long. Templates come with the model, and nobody else can change them.
//!
//! Invariant: what a rendering builds is charged, up to a constant factor for each item.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

/// The number of bytes that one rendering may build.
pub(super) const MAX_BYTES: usize = 64 << 20;

/// What an item of a list is charged, besides its own text. A value takes 24 bytes, and lists grow
/// ahead of their items.
const ITEM_BYTES: usize = 48;

/// The number of containers that can be inside each other. A deeper value could overflow the stack
/// when it is printed or dropped.
const MAX_DEPTH: usize = 64;

/// A filter that replaces one byte by up to six.
const ESCAPED: usize = 6;

/// The bytes that a rendering has left.
struct ByteBudget(usize);

/// Charges the budget for an operation and returns its operands, the last one first: the
/// instruction that unpacks them reverses their order.
pub(super) fn charge(state: &mut State, operands: Value, operation: &str) -> Result<Value, Error> {
    let operands: Vec<Value> = operands.try_iter()?.collect();
    budget(state).charge_operation(operation, &operands)?;
    Ok(operands.into_iter().rev().collect())
}

/// Charges the budget for a value that becomes output.
pub(super) fn charge_output(state: &mut State, value: &Value) -> Result<(), Error> {
    budget(state).charge_text(value)
}

fn budget<'state>(state: &'state mut State<'_, '_>) -> &'state mut ByteBudget {
    state.get_or_insert_extension(ByteBudget(MAX_BYTES))
}

fn failed(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

impl ByteBudget {
    fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        let exceeded = || failed(format!("the template builds more than {MAX_BYTES} bytes"));
        self.0 = self.0.checked_sub(bytes).ok_or_else(exceeded)?;
        Ok(())
    }

    fn charge_operation(&mut self, operation: &str, operands: &[Value]) -> Result<(), Error> {
        match (operation, operands) {
            ("~", [left, right]) => {
                self.charge_text(left)?;
                self.charge_text(right)
            }
            ("+", [left, right]) => {
                self.charge_copy(left)?;
                self.charge_copy(right)
            }
            ("*", [value, times]) => match times.as_usize() {
                Some(times) => self.charge_repeated(value, times),
                None => self.charge_repeated(times, value.as_usize().unwrap_or(1)),
            },
            ("in", [needle, text]) if text.as_str().is_some() => self.charge_container(needle),
            ("in", _) => Ok(()),
            ("==", [left, right, ..]) => match (is_container(left), is_container(right)) {
                (true, true) => {
                    self.charge_text(left)?;
                    self.charge_text(right)
                }
                _ => Ok(()),
            },
            ("==", _) => Ok(()),
            ("[:]" | "for", [value, ..]) => self.charge_copy(value),
            ("[]", items) => {
                self.charge(items.len() * ITEM_BYTES)?;
                items
                    .iter()
                    .try_for_each(|item| self.charge_container(item))
            }
            ("set", [value, _]) => {
                self.charge_container(value)?;
                if contains_namespace(value, MAX_DEPTH) {
                    return Err(failed("a namespace cannot be stored in a namespace"));
                }
                Ok(())
            }
            ("()", arguments) => arguments
                .iter()
                .filter(|argument| is_container(argument))
                .try_for_each(|argument| self.charge_copy(argument)),
            (name, [value, arguments @ ..]) => match name.strip_prefix('.') {
                Some(method) => self.charge_method(method, value, arguments),
                None => self.charge_filter(name, value, arguments),
            },
            (name, []) => Err(failed(format!("{name} has no operands"))),
        }
    }

    fn charge_filter(&mut self, name: &str, value: &Value, rest: &[Value]) -> Result<(), Error> {
        match name {
            "length" | "count" | "default" | "d" | "first" | "last" | "int" | "float" | "abs"
            | "round" | "bool" | "attr" | "min" | "max" => Ok(()),
            "trim" | "string" | "safe" => self.charge_text(value),
            "upper" | "lower" | "title" | "capitalize" => self.charge_times(value, 3),
            "escape" | "e" | "urlencode" | "pprint" => self.charge_times(value, ESCAPED),
            "sum" => self.charge_times(value, value.len().unwrap_or(1)),
            "list" | "reverse" | "unique" | "sort" | "items" | "dictsort" | "groupby" | "chain"
            | "zip" | "select" | "reject" | "selectattr" | "rejectattr" => {
                self.charge_copy(value)?;
                rest.iter()
                    .try_for_each(|other| self.charge_container(other))
            }
            "batch" | "slice" => {
                self.charge_copy(value)?;
                self.charge(largest_number(rest).saturating_mul(ITEM_BYTES))
            }
            "split" => self.charge_split(value, rest),
            "lines" => self.charge_split(value, &["\n".into()]),
            "map" => self.charge_map(value, rest),
            "replace" => self.charge_replace(value, rest),
            "join" => self.charge_join(value, rest),
            "format" => self.charge_format(value, rest),
            "indent" => {
                let lines = value.as_str().map_or(1, |text| text.lines().count() + 1);
                self.charge_text(value)?;
                self.charge(largest_number(rest).max(4).saturating_mul(lines))
            }
            "tojson" => self.charge_times(value, ESCAPED + largest_number(rest)),
            _ => Err(failed(format!("the filter {name:?} is not supported"))),
        }
    }

    fn charge_method(&mut self, name: &str, value: &Value, rest: &[Value]) -> Result<(), Error> {
        match (name, rest) {
            ("upper" | "lower" | "title" | "capitalize", _) => self.charge_times(value, 3),
            ("strip" | "lstrip" | "rstrip", _) => self.charge_text(value),
            ("split", _) => self.charge_split(value, rest),
            ("splitlines", _) => self.charge_split(value, &["\n".into()]),
            ("replace", _) => self.charge_replace(value, rest),
            ("join", [items, ..]) => self.charge_join(items, std::slice::from_ref(value)),
            ("format", _) => self.charge_format(value, rest),
            _ => Ok(()), // The others return numbers, or parts of the value.
        }
    }

    /// Charges for all text of a value.
    fn charge_text(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.charge(text.len()),
            None => self.charge_tree(value, MAX_DEPTH),
        }
    }

    fn charge_tree(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if let Some(text) = value.as_str() {
            return self.charge(ITEM_BYTES + text.len());
        }
        self.charge(ITEM_BYTES)?;
        if !is_container(value) {
            return Ok(());
        }
        let too_deep = || failed(format!("a value nests more than {MAX_DEPTH} levels deep"));
        let depth = depth.checked_sub(1).ok_or_else(too_deep)?;
        children(value).try_for_each(|child| self.charge_tree(&child, depth))
    }

    /// Charges for all text of a value that has items, and nothing for any other value.
    fn charge_container(&mut self, value: &Value) -> Result<(), Error> {
        if is_container(value) {
            self.charge_text(value)
        } else {
            Ok(())
        }
    }

    fn charge_times(&mut self, value: &Value, times: usize) -> Result<(), Error> {
        let before = self.0;
        self.charge_text(value)?;
        self.charge((before - self.0).saturating_mul(times.saturating_sub(1)))
    }

    /// Charges for a copy of a value: the bytes of a string, or the items of a list without what
    /// they contain.
    fn charge_copy(&mut self, value: &Value) -> Result<(), Error> {
        self.charge_repeated(value, 1)
    }

    fn charge_repeated(&mut self, value: &Value, times: usize) -> Result<(), Error> {
        let bytes = match value.as_str() {
            Some(text) => text.len(),
            None if is_container(value) => self.items(value)?.saturating_mul(ITEM_BYTES),
            None => 0,
        };
        self.charge(bytes.saturating_mul(times))
    }

    /// Counts the items of a list. A list that does not know its length is read.
    fn items(&self, value: &Value) -> Result<usize, Error> {
        match value.len() {
            Some(items) => Ok(items),
            None => Ok(value.try_iter()?.take(self.0 / ITEM_BYTES + 1).count()),
        }
    }

    fn charge_split(&mut self, value: &Value, rest: &[Value]) -> Result<(), Error> {
        let text = value.as_str().unwrap_or_default();
        let parts = match rest.first().and_then(Value::as_str) {
            Some(separator) => text.matches(separator).count(),
            None => text.split_whitespace().count(),
        };
        self.charge(text.len() + (parts + 1) * ITEM_BYTES)
    }

    fn charge_replace(&mut self, value: &Value, rest: &[Value]) -> Result<(), Error> {
        self.charge_text(value)?;
        let [from, to, ..] = rest else {
            return Ok(()); // The filter itself reports the missing argument.
        };
        // A value that is no text is printed first. Its text is not known before.
        let (Some(text), Some(from), Some(to)) = (value.as_str(), from.as_str(), to.as_str())
        else {
            return Err(failed("replace needs strings"));
        };
        self.charge(text.matches(from).count().saturating_mul(to.len()))
    }

    fn charge_join(&mut self, items: &Value, rest: &[Value]) -> Result<(), Error> {
        self.charge_text(items)?;
        let between: usize = rest.iter().map(text_bytes).sum();
        let count = match items.as_str() {
            Some(text) => text.len(),
            None if is_container(items) => self.items(items)?,
            None => 0,
        };
        self.charge(count.saturating_mul(between))
    }

    /// Charges for the operands and for every width that the format names.
    fn charge_format(&mut self, format: &Value, rest: &[Value]) -> Result<(), Error> {
        self.charge_text(format)?;
        let format = format.as_str().unwrap_or_default();
        let fields = format.matches(['%', '{']).count();
        let before = self.0;
        rest.iter()
            .try_for_each(|operand| self.charge_text(operand))?;
        let operands = before - self.0;
        let widths = format.split(|char: char| !char.is_ascii_digit());
        let widths = widths.filter(|digits| !digits.is_empty());
        let widths: usize = widths
            .map(|digits| digits.parse().unwrap_or(MAX_BYTES))
            .fold(largest_number(rest), usize::saturating_add);
        // The format can name each operand several times.
        self.charge(fields.saturating_mul(operands.saturating_add(widths)))
    }

    /// Charges for a filter that is applied to each item. Only filters whose result is no longer
    /// than six times their operand are accepted.
    fn charge_map(&mut self, value: &Value, rest: &[Value]) -> Result<(), Error> {
        self.charge_copy(value)?;
        match rest.first().and_then(Value::as_str) {
            None => Ok(()), // `map(attribute=…)` returns what is there.
            Some(
                "trim" | "string" | "upper" | "lower" | "title" | "capitalize" | "escape" | "e"
                | "length" | "count" | "first" | "last" | "int" | "float" | "abs" | "round",
            ) => self.charge_times(value, ESCAPED),
            Some(name) => Err(failed(format!("map({name:?}) is not supported"))),
        }
    }
}

fn is_container(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
    )
}

/// Returns the items of a list, or the keys and values of a map.
fn children(value: &Value) -> impl Iterator<Item = Value> {
    let items = is_container(value).then(|| value.try_iter().ok()).flatten();
    let is_map = value.kind() == ValueKind::Map;
    items.into_iter().flatten().flat_map(move |item| {
        let of_key = is_map.then(|| value.get_item(&item).unwrap_or_default());
        [Some(item), of_key].into_iter().flatten()
    })
}

/// Returns the bytes of a text, or of the texts directly in a value.
fn text_bytes(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => children(value)
            .map(|child| child.as_str().map_or(ITEM_BYTES, str::len))
            .fold(ITEM_BYTES, usize::saturating_add),
    }
}

/// Returns the largest number among the arguments of a call, named ones included.
fn largest_number(arguments: &[Value]) -> usize {
    let of_one = |value: &Value| {
        let named = children(value).filter_map(|child| child.as_usize());
        named.chain(value.as_usize()).max().unwrap_or(0)
    };
    arguments.iter().map(of_one).max().unwrap_or(0)
}

/// Returns whether a value is a namespace or contains one. A namespace in itself would never be
/// freed.
fn contains_namespace(value: &Value, depth: usize) -> bool {
    let Some(object) = value.as_object() else {
        return false;
    };
    if object.type_name().ends_with("::Namespace") || depth == 0 {
        return true;
    }
    children(value).any(|child| contains_namespace(&child, depth - 1))
}
