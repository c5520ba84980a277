//! Reads the part of PromQL that the dashboards and rules use. Everything else is an error.
//!
//! ```text
//! expression = operand (operator operand)*
//! operand    = number | "(" expression ")" | call | selector
//! call       = function (("by" | "without") "(" label* ")")? "(" expression* ")"
//! selector   = name ("{" (label matcher string)* "}")? ("[" duration "]")? ("offset" duration)?
//! ```
//!
//! Prometheus itself reads the same queries in `tests/clients/prometheus/`.

use regex::Regex;

/// What a query names.
#[derive(Default)]
pub(crate) struct Names {
    pub(crate) selectors: Vec<Selector>,
    /// The labels of all `by` and `without`.
    pub(crate) grouped_by: Vec<String>,
}

pub(crate) struct Selector {
    pub(crate) name: String,
    pub(crate) labels: Vec<String>,
    /// The function of a range, such as `rate`, that the selector is the argument of.
    pub(crate) range_function: Option<&'static str>,
}

/// The functions of one argument that may group it by labels.
const AGGREGATIONS: [&str; 5] = ["avg", "count", "max", "min", "sum"];

/// The functions of one range.
const RANGE_FUNCTIONS: [&str; 5] = ["deriv", "increase", "irate", "min_over_time", "rate"];

/// The other functions, and how many arguments they have.
const FUNCTIONS: [(&str, usize); 7] = [
    ("absent", 1),
    ("clamp_min", 2),
    ("histogram_quantile", 2),
    ("scalar", 1),
    ("time", 0),
    ("topk", 2),
    ("vector", 1),
];

const OPERATORS: [&str; 15] = [
    "+", "-", "*", "/", "%", "^", "==", "!=", "<", "<=", ">", ">=", "and", "or", "unless",
];

const MATCHERS: [&str; 4] = ["=", "!=", "=~", "!~"];

const DURATION: &str = "^[0-9]+(ms|[smhdwy])$";

/// Names, numbers and durations, strings, and signs.
const TOKEN: &str =
    r#"^([A-Za-z_:][\w:]*|[0-9][\w.]*|"([^"\\]|\\.)*"|[=!]~|[=!<>]=|[-+*/%^(){}\[\],=<>])"#;

/// Returns what `query` names, or why it does not parse.
pub(crate) fn read(query: &str) -> Result<Names, String> {
    let mut reader = Reader {
        tokens: tokens(query)?,
        names: Names::default(),
    };
    reader.expression()?;
    match reader.next() {
        "" => Ok(reader.names),
        token => Err(format!("`{token}` is not expected")),
    }
}

/// Returns the tokens in reverse order.
fn tokens(query: &str) -> Result<Vec<&str>, String> {
    let pattern = Regex::new(TOKEN).unwrap();
    let (mut tokens, mut rest) = (Vec::new(), query.trim_start());
    while !rest.is_empty() {
        let token = pattern.find(rest);
        let token = token.ok_or_else(|| format!("`{rest}` begins with no token"))?;
        tokens.push(token.as_str());
        rest = rest[token.end()..].trim_start();
    }
    tokens.reverse();
    Ok(tokens)
}

struct Reader<'a> {
    tokens: Vec<&'a str>,
    names: Names,
}

impl<'a> Reader<'a> {
    /// Takes the next token. It is empty at the end.
    fn next(&mut self) -> &'a str {
        self.tokens.pop().unwrap_or_default()
    }

    fn peek(&self) -> &'a str {
        self.tokens.last().copied().unwrap_or_default()
    }

    fn expect(&mut self, expected: &str) -> Result<(), String> {
        match self.next() {
            token if token == expected => Ok(()),
            token => Err(format!("expected `{expected}`, got `{token}`")),
        }
    }

    fn expression(&mut self) -> Result<(), String> {
        self.operand()?;
        while OPERATORS.contains(&self.peek()) {
            self.next();
            self.operand()?;
        }
        Ok(())
    }

    fn operand(&mut self) -> Result<(), String> {
        let token = self.next();
        if token == "(" {
            self.expression()?;
            return self.expect(")");
        }
        if token.starts_with(|first: char| first.is_ascii_digit()) {
            let number = token.parse::<f64>();
            return number
                .map(drop)
                .map_err(|error| format!("{token}: {error}"));
        }
        match self.peek() {
            "(" | "by" | "without" => self.call(token),
            _ => self.selector(token, None),
        }
    }

    fn call(&mut self, name: &str) -> Result<(), String> {
        let range_function = RANGE_FUNCTIONS.into_iter().find(|known| *known == name);
        let is_aggregation = AGGREGATIONS.contains(&name);
        let other = FUNCTIONS.into_iter().find(|(known, _)| *known == name);
        let arguments = match other {
            Some((_, arguments)) => arguments,
            None if range_function.is_some() || is_aggregation => 1,
            None => return Err(format!("{name} is no known function")),
        };
        if is_aggregation && self.peek() != "(" {
            self.next(); // `by` or `without`
            let labels = self.list("(", ")", |reader| reader.label())?;
            self.names.grouped_by.extend(labels);
        }
        let given = self.list("(", ")", |reader| match range_function {
            Some(_) => {
                let name = reader.next();
                reader.selector(name, range_function)
            }
            None => reader.expression(),
        })?;
        if given.len() != arguments {
            return Err(format!(
                "{name} has {} arguments, not {arguments}",
                given.len()
            ));
        }
        Ok(())
    }

    /// Reads the rest of the selector of `name`. It has a range if it is an argument of `function`.
    fn duration(&mut self) -> Result<(), String> {
        let duration = self.next();
        match Regex::new(DURATION).unwrap().is_match(duration) {
            true => Ok(()),
            false => Err(format!("`{duration}` is no duration")),
        }
    }

    fn selector(&mut self, name: &str, function: Option<&'static str>) -> Result<(), String> {
        let is_name = name.starts_with(|first: char| first.is_alphabetic() || "_:".contains(first));
        if !is_name || OPERATORS.contains(&name) {
            return Err(format!("expected an operand, got `{name}`"));
        }
        let mut labels = Vec::new();
        if self.peek() == "{" {
            labels = self.list("{", "}", |reader| {
                let label = reader.label()?;
                let (matcher, value) = (reader.next(), reader.next());
                if MATCHERS.contains(&matcher) && value.starts_with('"') {
                    return Ok(label);
                }
                Err(format!("{label}{matcher}{value} is no matcher"))
            })?;
        }
        if function.is_some() {
            self.expect("[")?;
            self.duration()?;
            self.expect("]")?;
        }
        if self.peek() == "offset" {
            self.next();
            self.duration()?;
        }
        self.names.selectors.push(Selector {
            name: name.to_owned(),
            labels,
            range_function: function,
        });
        Ok(())
    }

    fn label(&mut self) -> Result<String, String> {
        let token = self.next();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if token.is_empty() || !token.chars().all(is_name) {
            return Err(format!("`{token}` is no label"));
        }
        Ok(token.to_owned())
    }

    /// Reads items that are separated by commas, between two brackets.
    fn list<T>(
        &mut self,
        open: &str,
        close: &str,
        item: impl Fn(&mut Self) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        self.expect(open)?;
        let mut items = Vec::new();
        while self.peek() != close {
            if !items.is_empty() {
                self.expect(",")?;
            }
            items.push(item(self)?);
        }
        self.next();
        Ok(items)
    }
}
