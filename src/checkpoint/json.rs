//! JSON files, and errors in words that do not need Rust.

use serde::Deserialize;

use super::error::{LoadError, LoadResult};

/// Parses the content of a JSON file.
///
/// # Errors
/// If the content is malformed. The error names `file`.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(file: &str, text: &'a [u8]) -> LoadResult<T> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let field = error.path().to_string();
        let problem = in_words(&error.into_inner().to_string());
        match field.as_str() {
            "." => LoadError::file(file, problem),
            field => LoadError::file(file, format!("{field}: {problem}")),
        }
    })?;
    let end = reader.end();
    end.map_err(|error| LoadError::file(file, error))?;
    Ok(value)
}

/// Returns what serde says, with the kinds of JSON values instead of Rust's types.
fn in_words(problem: &str) -> String {
    [
        ("expected usize", "expected an integer of at least 0"),
        ("expected u32", "expected an integer of at least 0"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a sequence", "expected an array"),
        ("expected a map", "expected an object"),
    ]
    .into_iter()
    .fold(problem.to_owned(), |text, (rust, json)| {
        text.replace(rust, json)
    })
}
