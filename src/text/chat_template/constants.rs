//! Limits what a template's compiler builds.
//!
//! The compiler evaluates operators between constants, before the byte budget exists: for
//! `'x' * 90000000` the compiled template holds 90 MB. Only `*` makes constants that are larger
//! than the source.

use minijinja::machinery::parse;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};
use serde_json::Value;

/// The number of bytes that all constant products of a template may have.
const MAX_BYTES: u64 = 1 << 20;

/// What a list is charged for an item, besides its text.
const ITEM_BYTES: u64 = 48;

/// Refuses a template whose constant products are too large.
pub(super) fn check_constants(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let tree = serde_json::to_value(parse(source, "chat_template", syntax)?);
    let tree = tree.map_err(|error| Error::new(ErrorKind::SyntaxError, error.to_string()))?;
    if products(&tree) > MAX_BYTES {
        let why = format!("its constants have more than {MAX_BYTES} bytes; use fewer '*'");
        return Err(Error::new(ErrorKind::SyntaxError, why));
    }
    Ok(())
}

/// Returns an upper bound of the bytes of all constant products below `node`.
fn products(node: &Value) -> u64 {
    let own = match node["inner"][0]["op"].as_str() {
        Some("Mul") => constant(node).map_or(0, |constant| constant.bytes),
        _ => 0,
    };
    let below: u64 = match node {
        Value::Array(items) => items.iter().map(products).fold(0, u64::saturating_add),
        Value::Object(fields) => fields.values().map(products).fold(0, u64::saturating_add),
        _ => 0,
    };
    own.saturating_add(below)
}

/// Upper bounds of a constant: its bytes as text or list, and its value as a number.
struct Constant {
    bytes: u64,
    number: u64,
}

/// Returns the bounds of an expression, or `None` if it is not constant.
fn constant(expr: &Value) -> Option<Constant> {
    let node = &expr["inner"][0];
    let of_items = |items: &Value| {
        let items = items.as_array().into_iter().flatten();
        let bytes = items.map(|item| Some(constant(item)?.bytes.saturating_add(ITEM_BYTES)));
        bytes.sum::<Option<u64>>()
    };
    let (bytes, number) = match expr["expr"].as_str()? {
        "Const" => match &node["value"] {
            Value::String(text) => (text.len() as u64, 0),
            Value::Number(number) => (0, number.as_f64().unwrap_or(f64::MAX).abs() as u64),
            _ => (0, 1),
        },
        "List" | "Tuple" => (of_items(&node["items"])?, 0),
        "Map" => (
            of_items(&node["keys"])?.saturating_add(of_items(&node["values"])?),
            0,
        ),
        "UnaryOp" => return constant(&node["expr"]),
        "Compare" => (0, 1),
        "BinOp" => {
            let (left, right) = (constant(&node["left"])?, constant(&node["right"])?);
            let times = |text: &Constant, count: &Constant| text.bytes.saturating_mul(count.number);
            match node["op"].as_str()? {
                "Mul" => (
                    times(&left, &right).max(times(&right, &left)),
                    left.number.saturating_mul(right.number),
                ),
                "Pow" => (0, u64::MAX),
                _ => (
                    left.bytes.saturating_add(right.bytes),
                    left.number.saturating_add(right.number),
                ),
            }
        }
        _ => return None,
    };
    Some(Constant { bytes, number })
}
