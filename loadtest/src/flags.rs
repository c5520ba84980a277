//! Parsers of flag values that both subcommands use.

/// Parses a number from 0 to 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("must be a number from 0 to 1".into()),
    }
}

/// Parses a number above 0 and below 10⁹.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value < 1e9 => Ok(value),
        _ => Err("must be a number above 0 and below 1e9".into()),
    }
}
