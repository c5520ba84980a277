//! Compiles and runs a Jinja template as `transformers` does.
//!
//! Invariant: a template is a program from a stranger, so its steps, the bytes that it builds and
//! its output are limited. It sees nothing except the conversation and the time.

use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use chrono::format::StrftimeItems;
use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::byte_budget::{charge, charge_output};
use super::constants::check_constants;
use super::guarded::{CHARGE, guarded};
use super::to_json::to_json;
use crate::text::error::TemplateError;

/// The number of steps that one rendering may take.
const FUEL: u64 = 1_000_000;
const MAX_OUTPUT_BYTES: usize = 16 << 20;
const NAME: &str = "chat_template";

/// A compiled template.
pub(super) struct JinjaTemplate {
    environment: Environment<'static>,
}

impl JinjaTemplate {
    /// Compiles a template with the settings of `transformers`.
    pub(super) fn compile(source: &str) -> Result<JinjaTemplate, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        check_constants(source, syntax.clone())?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter(CHARGE, charge);
        environment.add_filter("tojson", to_json);
        environment.set_formatter(|output, state, value| {
            charge_output(state, value)?;
            escape_formatter(output, state, value)
        });
        environment.remove_global("debug"); // It prints everything at once.
        environment.add_function("raise_exception", |why: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, why).with_source(RaisedByTemplate))
        });
        environment.add_function("strftime_now", |format: String| {
            strftime(&format, SystemTime::now())
                .map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now: bad format"))
        });
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, source.to_owned())?;
        let template = environment.get_template(NAME)?;
        guarded(get_compiled_template(&template)).map_err(unsupported)?;
        Ok(JinjaTemplate { environment })
    }

    /// Renders the template with these variables.
    pub(super) fn render(&self, variables: JinjaValue) -> Result<String, TemplateError> {
        let output = self.evaluate(variables);
        let output = output.map_err(|error| template_error(&error))?;
        if output.len() > MAX_OUTPUT_BYTES {
            let why = "the rendered conversation is too long";
            return Err(TemplateError::Failed(why.to_owned()));
        }
        Ok(output)
    }

    /// Runs the template. The charges are added to its instructions each time, because instructions
    /// borrow from the environment.
    fn evaluate(&self, variables: JinjaValue) -> Result<String, Error> {
        let template = self.environment.get_template(NAME)?;
        let compiled = get_compiled_template(&template);
        let instructions = guarded(compiled).map_err(unsupported)?;
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let escape = compiled.initial_auto_escape.clone();
        let blocks = &compiled.blocks;
        eval(
            &self.environment,
            &instructions,
            variables,
            blocks,
            &mut output,
            escape,
        )?;
        Ok(text)
    }
}

fn unsupported(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// Marks the errors that a template raises on purpose.
#[derive(Debug)]
struct RaisedByTemplate;

impl fmt::Display for RaisedByTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for RaisedByTemplate {}

fn template_error(error: &Error) -> TemplateError {
    let source = std::error::Error::source(error);
    let raised = source.is_some_and(|source| source.is::<RaisedByTemplate>());
    let why = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    if raised {
        TemplateError::Rejected(why)
    } else {
        TemplateError::Failed(why)
    }
}

/// Formats a time in UTC like C's `strftime`. Unknown specifiers stay as they are.
fn strftime(format: &str, time: SystemTime) -> Result<String, fmt::Error> {
    let seconds = time
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_secs()).ok());
    let time = seconds
        .and_then(|seconds| DateTime::from_timestamp(seconds, 0))
        .unwrap_or_default();
    let mut text = String::new();
    // Not `to_string`, which would panic if a specifier could not be formatted.
    write!(
        text,
        "{}",
        time.format_with_items(StrftimeItems::new_lenient(format))
    )?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sterna_random::Random;

    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn dates_follow_the_calendar() {
        for (format, seconds, expected) in [
            ("%d %b %Y", 0, "01 Jan 1970"),
            (
                "%Y-%m-%d %H:%M:%S %A",
                951_827_696,
                "2000-02-29 12:34:56 Tuesday",
            ),
            ("%-d %B %y %% %Q", 1_709_164_800, "29 February 24 % %Q"),
            (
                "%a %-m/%-d, %I %p, %j",
                1_709_164_800,
                "Thu 2/29, 12 AM, 060",
            ),
        ] {
            assert_eq!(strftime(format, at(seconds)).unwrap(), expected, "{format}");
        }
    }

    #[test]
    fn any_format_returns() {
        let mut random = Random::from_env();
        let alphabet: Vec<char> = (' '..='~').chain("%%%%%%%%-_0:.#é你\n".chars()).collect();
        for _ in 0..100_000 {
            let format: String = (0..random.index(8))
                .map(|_| random.pick(&alphabet))
                .collect();
            let bits = random.below(64);
            drop(strftime(&format, at(random.below(1 << bits))));
        }
        for format in ["%", "%-", "%é", "%-é", "%999999999d", "%10Y"] {
            assert_eq!(strftime(format, at(0)).unwrap(), format);
        }
    }
}
