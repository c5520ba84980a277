//! Messages to a prompt, by the checkpoint's own template.
//!
//! Invariants: nothing that a user wrote becomes a special token, whatever the template does with it; a conversation without special
//! tokens in its messages is tokenised exactly as the reference does, which renders and encodes all of it as one text. A template
//! is a program from a stranger: its steps and its output are bounded, and it sees nothing but the conversation.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value as JinjaValue;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, context};
use serde_json::Value;

use super::specials::Found;
use super::{TextError, Tokenizer, token_text};

const FUEL: u64 = 1_000_000;
const MOST_OUTPUT_BYTES: usize = 16 << 20;
const NAME: &str = "chat_template";
/// The characters that stand in for those of special tokens: the last private-use plane.
const STAND_INS: std::ops::RangeInclusive<char> = '\u{100000}'..='\u{10FFFD}';

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`; templates rely on it, so it must not be a user's free text.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// Why a conversation can't become a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// The template itself objects, e.g. to the order of roles; its own words.
    Refused(String),
    /// The template fails, or takes too many steps, or writes too much.
    Failed(String),
    /// The conversation uses every private-use character, and some are needed here.
    NoStandIn,
    /// The rendered text can't be encoded.
    Text(TextError),
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateError::Refused(why) => {
                write!(f, "the model's chat template refuses these messages: {why}")
            }
            TemplateError::Failed(why) => write!(
                f,
                "the model's chat template fails on these messages: {why}"
            ),
            TemplateError::NoStandIn => {
                write!(f, "the messages contain too many private-use characters")
            }
            TemplateError::Text(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TemplateError {}

/// A checkpoint's chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: BTreeMap<String, String>, // bos_token and the like, which templates name.
}

impl ChatTemplate {
    /// The template of a checkpoint: the file, or else the `chat_template` of the configuration, which is one template or a list of
    /// named ones, of which `default` counts. `None` when there is neither.
    ///
    /// # Errors
    /// When it does not compile.
    pub fn find(config: &Value, file: Option<&str>) -> Result<Option<ChatTemplate>, TextError> {
        let inline = match &config["chat_template"] {
            Value::Array(named) => named
                .iter()
                .find(|one| one["name"] == "default")
                .and_then(|one| one["template"].as_str()),
            one => one.as_str(),
        };
        let (name, source) = match (file, inline) {
            (Some(source), _) => ("chat_template.jinja", source),
            (None, Some(source)) => ("tokenizer_config.json", source),
            (None, None) => return Ok(None),
        };
        let environment = environment(source).map_err(|error| TextError::BadFile {
            file: name,
            why: format!("chat template: {error:#}"),
        })?;
        let tokens = config
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| Some((key.clone(), token_text(value)?.to_owned())))
            .collect();
        Ok(Some(ChatTemplate {
            environment,
            tokens,
        }))
    }

    /// The text of a conversation, ready for the assistant's next words.
    ///
    /// # Errors
    /// When the template refuses it or fails.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let messages: Vec<JinjaValue> = messages
            .iter()
            .map(|message| context! { role => message.role.as_str(), content => message.content.as_str() })
            .collect();
        let tokens = JinjaValue::from_pairs(
            self.tokens
                .iter()
                .map(|(name, text)| (name.as_str(), text.as_str())),
        );
        let conversation = context! {
            messages,
            add_generation_prompt => true,
            tools => (),
            documents => (),
            ..tokens
        };
        let mut output = Bounded(Vec::new());
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| failure(&error))?;
        template
            .render_captured_to(conversation, &mut output)
            .map_err(|error| failure(&error))?;
        String::from_utf8(output.0).map_err(|error| TemplateError::Failed(error.to_string()))
    }

    /// The tokens of a conversation. The template brings its own beginning of text; nothing is put before it.
    ///
    /// # Errors
    /// When the template refuses it or fails, or the text can't be encoded.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
    ) -> Result<Vec<u32>, TemplateError> {
        let rendered = self.render(messages)?;
        let disguise = Disguise::new(tokenizer, messages)?;
        let disguised = self.render(&disguise.put_on(messages))?;
        // Only the template's own special tokens are left to be found in the disguised text.
        let parts = disguise.take_off(&disguised, &tokenizer.specials.find(&disguised));

        let found = tokenizer.specials.find(&rendered);
        let innocent = if parts.text() == rendered {
            parts.specials() == found
        } else {
            // The template looks into the messages, and behaves differently when it can't read them.
            let tokens = |found: &[Found]| found.iter().map(|one| one.token).collect::<Vec<_>>();
            let clean = !messages
                .iter()
                .any(|message| tokenizer.specials.stand_in(&message.content));
            clean && tokens(&parts.specials()) == tokens(&found)
        };
        if innocent {
            return tokenizer
                .encode_recognising(&rendered)
                .map_err(TemplateError::Text);
        }
        parts.encode(tokenizer).map_err(TemplateError::Text)
    }
}

fn environment(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    // As transformers sets up Jinja.
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()?;
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |why: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, why).with_source(Raised))
    });
    environment.add_function("strftime_now", |format: String| {
        strftime(&format, SystemTime::now())
    });
    environment.set_fuel(Some(FUEL));
    environment.add_template_owned(NAME, source.to_owned())?;
    Ok(environment)
}

/// Marks the errors that a template raises on purpose.
#[derive(Debug)]
struct Raised;

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

fn failure(error: &Error) -> TemplateError {
    let raised = std::error::Error::source(error).is_some_and(|source| source.is::<Raised>());
    let words = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    if raised {
        TemplateError::Refused(words)
    } else {
        TemplateError::Failed(words)
    }
}

/// Takes so many bytes and no more.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MOST_OUTPUT_BYTES {
            return Err(io::Error::other("the rendered conversation is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces, in what users wrote, each character that occurs in a special token by one that occurs nowhere. Whatever a template then
/// does with the messages (trim, split, join, replace), a special token in its output is the template's own.
struct Disguise {
    stand_in: BTreeMap<char, char>,
    original: BTreeMap<char, char>,
}

impl Disguise {
    fn new(tokenizer: &Tokenizer, messages: &[Message]) -> Result<Disguise, TemplateError> {
        let written = messages.iter().flat_map(|message| message.content.chars());
        let taken: HashSet<char> = written.filter(|char| STAND_INS.contains(char)).collect();
        let mut free = STAND_INS.filter(|char| !taken.contains(char));
        let mut stand_in = BTreeMap::new();
        for &char in tokenizer.specials.alphabet() {
            stand_in.insert(char, free.next().ok_or(TemplateError::NoStandIn)?);
        }
        let original = stand_in
            .iter()
            .map(|(char, stand_in)| (*stand_in, *char))
            .collect();
        Ok(Disguise { stand_in, original })
    }

    fn put_on(&self, messages: &[Message]) -> Vec<Message> {
        let disguised = |text: &str| {
            text.chars()
                .map(|char| *self.stand_in.get(&char).unwrap_or(&char))
                .collect()
        };
        messages
            .iter()
            .map(|message| Message {
                role: message.role.clone(),
                content: disguised(&message.content),
            })
            .collect()
    }

    /// Splits a disguised text at the special tokens, and restores the text between them.
    fn take_off(&self, disguised: &str, specials: &[Found]) -> MarkedText {
        let restored = |text: &str| {
            text.chars()
                .map(|char| *self.original.get(&char).unwrap_or(&char))
                .collect()
        };
        let mut parts = Vec::new();
        let mut end = 0;
        for special in specials {
            parts.push(Segment::Text(restored(
                &disguised[end..special.bytes.start],
            )));
            parts.push(Segment::Special(
                special.token,
                disguised[special.bytes.clone()].to_owned(),
            ));
            end = special.bytes.end;
        }
        parts.push(Segment::Text(restored(&disguised[end..])));
        MarkedText(parts)
    }
}

/// A rendered conversation in which it is known what is special.
struct MarkedText(Vec<Segment>);

enum Segment {
    Text(String),
    Special(u32, String),
}

impl Segment {
    fn text(&self) -> &str {
        match self {
            Segment::Text(text) | Segment::Special(_, text) => text,
        }
    }
}

impl MarkedText {
    fn text(&self) -> String {
        self.0.iter().map(Segment::text).collect()
    }

    fn specials(&self) -> Vec<Found> {
        let mut start = 0;
        let mut specials = Vec::new();
        for part in &self.0 {
            let end = start + part.text().len();
            if let Segment::Special(token, _) = part {
                specials.push(Found {
                    token: *token,
                    bytes: start..end,
                });
            }
            start = end;
        }
        specials
    }

    fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, TextError> {
        let mut tokens = Vec::new();
        for part in &self.0 {
            match part {
                Segment::Special(token, _) => tokens.push(*token),
                Segment::Text(text) if text.is_empty() => {}
                Segment::Text(text) => tokens.extend(tokenizer.encode_plain(text)?),
            }
        }
        Ok(tokens)
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The parts of C's `strftime` that templates use, in UTC. An unknown letter stays as it is.
fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let days = seconds / 86_400;
    let (year, month, day) = civil_date(days);
    let month_name = MONTHS[month as usize - 1];
    let weekday = WEEKDAYS[(days % 7) as usize];
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        let letter = chars.next();
        let plain = letter == Some('-');
        let letter = if plain { chars.next() } else { letter };
        let two = |number: u64| {
            if plain {
                number.to_string()
            } else {
                format!("{number:02}")
            }
        };
        match letter {
            Some('Y') => text += &year.to_string(),
            Some('y') => text += &two(year % 100),
            Some('m') => text += &two(month),
            Some('d') => text += &two(day),
            Some('H') => text += &two(hour),
            Some('M') => text += &two(minute),
            Some('S') => text += &two(second),
            Some('B') => text += month_name,
            Some('b') => text += &month_name[..3],
            Some('A') => text += weekday,
            Some('a') => text += &weekday[..3],
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Year, month and day of the day that is so many days after 1970-01-01 (Howard Hinnant's `civil_from_days`).
fn civil_date(days: u64) -> (u64, u64, u64) {
    let day = days + 719_468;
    let era = day / 146_097;
    let day_of_era = day % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests;
