//! Compiles and runs a Jinja template as `transformers` does.
//!
//! The template is part of the checkpoint and is trusted as the weights are. What it reads is not:
//! each message is a stranger's text. A template that copies each message a few times, or joins
//! them one by one, takes memory within a small multiple of the request. Joining `n` messages
//! copies their text about `n / 2` times. The number of steps and the length of the output are
//! limited too, so a mistake in a template ends with an error. No limit stops one that doubles a
//! string in a loop: `minijinja` has no hook for operators.
//!
//! Invariant: a template sees nothing except the conversation and the time.

use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use chrono::format::StrftimeItems;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::output::LimitedOutput;
use super::python;
use super::syntax::adapted;
use crate::text::error::TemplateError;

/// The number of steps that one rendering may take.
const FUEL: u64 = 1_000_000;
const NAME: &str = "chat_template";

/// A compiled template.
pub(super) struct JinjaTemplate {
    environment: Environment<'static>,
}

impl JinjaTemplate {
    /// Compiles a template with the settings of `transformers`.
    pub(super) fn compile(source: &str) -> Result<JinjaTemplate, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()?,
        );
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        python::add_to(&mut environment);
        environment.remove_global("debug"); // It prints everything at once.
        environment.add_function("raise_exception", |why: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, why).with_source(RaisedByTemplate))
        });
        environment.add_function("strftime_now", |format: String| {
            strftime(&format, SystemTime::now())
                .map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now: bad format"))
        });
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, adapted(source))?;
        Ok(JinjaTemplate { environment })
    }

    /// Renders the template with these variables.
    pub(super) fn render(&self, variables: JinjaValue) -> Result<String, TemplateError> {
        let mut output = LimitedOutput::default();
        let rendered = self.environment.get_template(NAME).and_then(|template| {
            template
                .render_captured_to(variables, &mut output)
                .map(drop)
        });
        match rendered {
            Ok(()) => Ok(output.into_text()),
            Err(error) => Err(match output.error() {
                Some(why) => TemplateError::Failed(why),
                None => template_error(&error),
            }),
        }
    }
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
