//! The tenants file: TOML in, checked tables out.
//!
//! Invariant: whatever is wrong is named with its line, and nothing that could be a key or its hash is repeated.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::{Deadlines, Defaults, KeyHash, Member};
use crate::engine::{Band, PublicPrefix, Rate, TenantPolicy};

const MOST_ID_BYTES: usize = 64;
const LONGEST_SECONDS: i64 = 86_400;
const ANY_COUNT: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// The part of a minute's requests that may come at once, unless `request_burst` says otherwise.
const BURST_PART: u32 = 10;

/// What is wrong with a tenants file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    path: PathBuf,
    line: Option<usize>,
    why: String,
}

impl FileError {
    /// About no line of its own.
    pub(super) fn whole(path: &Path, why: impl Into<String>) -> FileError {
        FileError {
            path: path.to_owned(),
            line: None,
            why: why.into(),
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileError { path, line, why } = self;
        match line {
            Some(line) => write!(f, "{}, line {line}: {why}", path.display()),
            None => write!(f, "{}: {why}", path.display()),
        }
    }
}

impl std::error::Error for FileError {}

/// A text that several tenants' conversations begin with, and whose keys and values they share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicText {
    /// Its name in the file.
    pub name: String,
    /// The system message.
    pub system: String,
}

/// A file's tables.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) members: Vec<Member>,
    pub(super) public: Vec<PublicText>,
}

/// Reads and checks the file at `path`.
pub(super) fn read(path: &Path, defaults: &Defaults) -> Result<Listing, FileError> {
    let text =
        fs::read_to_string(path).map_err(|error| FileError::whole(path, error.to_string()))?;
    parse(&text, defaults).map_err(|fault| FileError {
        path: path.to_owned(),
        line: fault.at.map(|at| line(&text, at.start)),
        why: fault.why,
    })
}

/// # Errors
/// When `id` is no name for a tenant; the text says what is.
pub(super) fn check_id(id: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=MOST_ID_BYTES).contains(&id.len()) && id.chars().all(fits) {
        return Ok(());
    }
    Err(format!(
        "a name is 1 to {MOST_ID_BYTES} letters, digits, `.`, `_` or `-`"
    ))
}

/// The line of a byte, counted from 1.
fn line(text: &str, byte: usize) -> usize {
    let before = &text.as_bytes()[..byte.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// What is wrong, and at which bytes.
struct Fault {
    at: Option<Range<usize>>,
    why: String,
}

fn fault<T>(at: &Spanned<T>, why: impl Into<String>) -> Fault {
    Fault {
        at: Some(at.span()),
        why: why.into(),
    }
}

fn parse(text: &str, defaults: &Defaults) -> Result<Listing, Fault> {
    let tables: Tables = toml::from_str(text).map_err(|error| Fault {
        at: error.span(),
        why: error.message().to_owned(),
    })?;
    if tables.tenant.is_empty() {
        let why = "there is no [[tenant]], so nobody could come in".into();
        return Err(Fault { at: None, why });
    }
    let mut prefixes = HashMap::new();
    let mut public = Vec::new();
    for table in tables.public_prefix {
        check_id(table.name.get_ref()).map_err(|why| fault(&table.name, why))?;
        let place = PublicPrefix(public.len() as u32);
        let name = table.name.get_ref().clone();
        if prefixes.insert(name.clone(), place).is_some() {
            let why = format!("there is a public prefix `{name}` already");
            return Err(fault(&table.name, why));
        }
        let system = table.system;
        public.push(PublicText { name, system });
    }
    let mut known = Known {
        text,
        ids: HashMap::new(),
        keys: HashMap::new(),
        prefixes,
    };
    let members: Result<_, Fault> = tables
        .tenant
        .into_iter()
        .map(|table| table.member(&mut known, defaults))
        .collect();
    Ok(Listing {
        members: members?,
        public,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    #[serde(default)]
    tenant: Vec<TenantTable>,
    #[serde(default)]
    public_prefix: Vec<PrefixTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefixTable {
    name: Spanned<String>,
    system: String,
}

/// A whole number that may be left out.
type Number = Option<Spanned<i64>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantTable {
    id: Spanned<String>,
    key_sha256: Spanned<Digits>,
    weight: Number,
    #[serde(default)]
    band: BandName,
    requests_per_minute: Number,
    request_burst: Number,
    tokens_per_minute: Number,
    token_burst: Number,
    max_running: Number,
    max_queued: Number,
    max_queued_seconds: Number,
    guaranteed_pages: Number,
    max_pages: Number,
    first_token_seconds: Number,
    total_seconds: Number,
    #[serde(default)]
    public: Vec<Spanned<String>>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum BandName {
    Interactive,
    #[default]
    Standard,
    Batch,
}

/// What the tables before this one have said, by the line that said it.
struct Known<'a> {
    text: &'a str,
    ids: HashMap<String, usize>,
    keys: HashMap<KeyHash, usize>,
    prefixes: HashMap<String, PublicPrefix>,
}

impl TenantTable {
    fn member(self, known: &mut Known<'_>, defaults: &Defaults) -> Result<Member, Fault> {
        let id = self.id.get_ref().clone();
        check_id(&id).map_err(|why| fault(&self.id, why))?;
        if let Some(line) = known
            .ids
            .insert(id.clone(), line(known.text, self.id.span().start))
        {
            let why = format!("the tenant `{id}` stands in line {line} already");
            return Err(fault(&self.id, why));
        }
        let seconds = |number: &Number, name, default: Option<Duration>| {
            let given = within(number, name, 1..=LONGEST_SECONDS)?;
            Ok(given.map_or(default, |given| Some(Duration::from_secs(given.into()))))
        };
        let deadlines = Deadlines {
            first_token: seconds(
                &self.first_token_seconds,
                "first_token_seconds",
                defaults.deadlines.first_token,
            )?,
            total: seconds(
                &self.total_seconds,
                "total_seconds",
                defaults.deadlines.total,
            )?,
        };
        Ok(Member {
            id,
            keys: self.keys(known)?,
            policy: self.policy(known, defaults)?,
            deadlines,
        })
    }

    fn keys(&self, known: &mut Known<'_>) -> Result<Vec<KeyHash>, Fault> {
        let digits = match self.key_sha256.get_ref() {
            Digits::One(digits) => vec![(digits, self.key_sha256.span())],
            Digits::Several(several) => several
                .iter()
                .map(|digits| (digits.get_ref(), digits.span()))
                .collect(),
        };
        if digits.is_empty() {
            return Err(fault(&self.key_sha256, "there is no key here"));
        }
        let mut keys = Vec::new();
        for (digits, at) in digits {
            let wrong = |why: String| Fault {
                at: Some(at.clone()),
                why,
            };
            let key = KeyHash::from_hex(digits).ok_or_else(|| {
                wrong(
                    "the SHA-256 of a key is 64 hexadecimal digits; `sterna keygen ID` makes both"
                        .into(),
                )
            })?;
            if let Some(line) = known.keys.insert(key, line(known.text, at.start)) {
                return Err(wrong(format!("the same key stands in line {line} already")));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    fn policy(&self, known: &Known<'_>, defaults: &Defaults) -> Result<TenantPolicy, Fault> {
        let public = self.public.iter().map(|name| {
            let found = known.prefixes.get(name.get_ref()).copied();
            found.ok_or_else(|| {
                let why = format!("there is no [[public_prefix]] `{}`", name.get_ref());
                fault(name, why)
            })
        });
        let requests = rate(
            (&self.requests_per_minute, "requests_per_minute"),
            (&self.request_burst, "request_burst"),
            |per_minute| (per_minute / BURST_PART).max(1),
        )?;
        let tokens = rate(
            (&self.tokens_per_minute, "tokens_per_minute"),
            (&self.token_burst, "token_burst"),
            |per_minute| per_minute,
        )?;
        let queued_seconds = within(
            &self.max_queued_seconds,
            "max_queued_seconds",
            1..=LONGEST_SECONDS,
        )?;
        let queued_time = queued_seconds.map_or(defaults.max_queued_time, |seconds| {
            Duration::from_secs(seconds.into())
        });
        let max_pages = within(&self.max_pages, "max_pages", ANY_COUNT)?.unwrap_or(u32::MAX);
        let guarantees = 0..=i64::from(max_pages);
        Ok(TenantPolicy {
            band: match self.band {
                BandName::Interactive => Band::Interactive,
                BandName::Standard => Band::Standard,
                BandName::Batch => Band::Batch,
            },
            weight: within(&self.weight, "weight", 1..=1000)?.unwrap_or(1),
            requests,
            tokens,
            max_running: within(&self.max_running, "max_running", ANY_COUNT)?.unwrap_or(u32::MAX),
            max_queued: within(&self.max_queued, "max_queued", ANY_COUNT)?
                .unwrap_or(defaults.max_queued),
            max_queued_time: queued_time.as_micros() as u64,
            guaranteed_pages: within(&self.guaranteed_pages, "guaranteed_pages", guarantees)?
                .unwrap_or(0),
            max_pages,
            public: public.collect::<Result<_, _>>()?,
        })
    }
}

/// The number, if it is there and within `limits`, which lie within u32's.
fn within(number: &Number, name: &str, limits: RangeInclusive<i64>) -> Result<Option<u32>, Fault> {
    let Some(spanned) = number else {
        return Ok(None);
    };
    let given = *spanned.get_ref();
    if limits.contains(&given) {
        return Ok(u32::try_from(given).ok());
    }
    let (least, most) = limits.into_inner();
    let why = format!("`{name}` must be from {least} to {most}, not {given}");
    Err(fault(spanned, why))
}

/// So much a minute, and so much at once.
fn rate(
    per_minute: (&Number, &str),
    burst: (&Number, &str),
    default_burst: impl Fn(u32) -> u32,
) -> Result<Option<Rate>, Fault> {
    let given = within(burst.0, burst.1, ANY_COUNT)?;
    match (within(per_minute.0, per_minute.1, ANY_COUNT)?, burst.0) {
        (Some(per_minute), _) => Ok(Some(Rate {
            per_minute,
            burst: given.unwrap_or_else(|| default_burst(per_minute)),
        })),
        (None, Some(number)) => {
            let why = format!("`{}` means nothing without `{}`", burst.1, per_minute.1);
            Err(fault(number, why))
        }
        (None, None) => Ok(None),
    }
}

/// One string, or several, each with its place. (Serde's own untagged enums lose the places.)
enum Digits {
    One(String),
    Several(Vec<Spanned<String>>),
}

impl<'de> Deserialize<'de> for Digits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digits, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = Digits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E>(self, digits: &str) -> Result<Digits, E> {
                Ok(Digits::One(digits.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Digits, A::Error> {
                let mut several = Vec::new();
                while let Some(item) = items.next_element()? {
                    several.push(item);
                }
                Ok(Digits::Several(several))
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}
