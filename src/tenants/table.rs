//! The tables of the file, and the checks of a `[[tenant]]` table.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::fault::{Fault, fault, line};
use super::keys::KeyHash;
use super::tenant::{Deadlines, check_tenant_id};
use crate::engine::{Band, PublicPrefix, Rate, TenantPolicy};

/// The limits of a number of seconds: up to a day.
const ANY_SECONDS: RangeInclusive<i64> = 1..=86_400;
const ANY_COUNT: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// The limits of a rate or burst. The scheduler keeps a burst as whole nanoseconds in 64 bits: the
/// largest burst at the smallest rate still fits, and the largest rate is one per 600 ns.
const ANY_RATE: RangeInclusive<i64> = 1..=100_000_000;
/// The default of `request_burst` is `requests_per_minute` divided by this.
const BURST_DIVISOR: u32 = 10;

/// The limits of a tenant whose table does not set its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// The deadlines of its requests.
    pub deadlines: Deadlines,
    /// The number of its requests that may wait.
    pub max_queued: u32,
    /// The predicted machine time of its requests that wait.
    pub max_queued_time: Duration,
}

/// A system message whose keys and values several tenants share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicText {
    /// Its name in the file.
    pub name: String,
    /// The system message.
    pub system: String,
}

/// A `[[tenant]]` table. An entry without keys is a tenant that the file no longer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TenantEntry {
    pub(super) id: String,
    pub(super) keys: Vec<KeyHash>,
    pub(super) policy: TenantPolicy,
    pub(super) deadlines: Deadlines,
    pub(super) models: Option<Vec<String>>,
    pub(super) trusted: bool,
}

impl TenantEntry {
    /// Marks a tenant that the file no longer has: no key is valid for it, and no pages are
    /// reserved for it.
    pub(super) fn remove(&mut self) {
        self.keys.clear();
        self.policy.guaranteed_pages = 0;
    }
}

/// A whole number that may be omitted.
type Number = Option<Spanned<i64>>;

/// The fields of a table as the file has them, one for each key of the TOML table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantTable {
    id: Spanned<String>,
    key_sha256: Spanned<KeyDigits>,
    weight: Number,
    #[serde(default, with = "BandName")]
    band: Band,
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
    models: Option<Spanned<Vec<Spanned<String>>>>,
    #[serde(default)]
    trusted: bool,
}

/// The names of bands.
#[derive(Deserialize)]
#[serde(remote = "Band", rename_all = "lowercase")]
enum BandName {
    Interactive,
    Standard,
    Batch,
}

/// The tables read so far.
pub(super) struct SeenTables<'a> {
    text: &'a str,
    prefixes: &'a [PublicText],
    ids: HashMap<String, usize>,   // With their lines.
    keys: HashMap<KeyHash, usize>, // With their lines.
}

impl<'a> SeenTables<'a> {
    /// Starts a file with this text and these public prefixes.
    pub(super) fn new(text: &'a str, prefixes: &'a [PublicText]) -> SeenTables<'a> {
        SeenTables {
            text,
            prefixes,
            ids: HashMap::new(),
            keys: HashMap::new(),
        }
    }

    /// Adds the keys of a table.
    pub(super) fn add_keys(&mut self, digits: &Spanned<KeyDigits>) -> Result<Vec<KeyHash>, Fault> {
        match digits.get_ref() {
            KeyDigits::One(one) => Ok(vec![self.add_key(one, digits.span())?]),
            KeyDigits::Several(several) if several.is_empty() => {
                let why = "`key_sha256` is empty; `sterna keygen ID` makes a key and its hash";
                Err(fault(digits.span(), why))
            }
            KeyDigits::Several(several) => several
                .iter()
                .map(|digits| self.add_key(digits.get_ref(), digits.span()))
                .collect(),
        }
    }

    fn add_key(&mut self, digits: &str, at: Range<usize>) -> Result<KeyHash, Fault> {
        let why = "a key's SHA-256 must have 64 hexadecimal digits; `sterna keygen ID` makes the \
                   key and the hash";
        let key = KeyHash::from_hex(digits).ok_or_else(|| fault(at.clone(), why))?;
        let duplicate = "this key is already used";
        add(&mut self.keys, key, self.text, at, duplicate)?;
        Ok(key)
    }
}

/// Adds the value at `at` to the values of `lines`, with its line in `text`.
///
/// # Errors
/// If the value is there already. The error says `duplicate`, and in which line the value is.
fn add<K: Eq + Hash>(
    lines: &mut HashMap<K, usize>,
    value: K,
    text: &str,
    at: Range<usize>,
    duplicate: &str,
) -> Result<(), Fault> {
    match lines.insert(value, line(text, at.start)) {
        Some(line) => Err(fault(at, format!("{duplicate} in line {line}"))),
        None => Ok(()),
    }
}

/// A numeric field with its name.
struct Field<'a> {
    number: &'a Number,
    name: &'static str,
}

/// Returns a numeric field of a table, with its name in the file.
macro_rules! field {
    ($table:ident . $name:ident) => {
        Field {
            number: &$table.$name,
            name: stringify!($name),
        }
    };
}

impl TenantTable {
    /// Checks the table. What it omits is taken from `defaults`.
    pub(super) fn entry(
        self,
        seen: &mut SeenTables<'_>,
        defaults: &Defaults,
    ) -> Result<TenantEntry, Fault> {
        let (id, at) = (self.id.get_ref(), self.id.span());
        check_tenant_id(id).map_err(|why| fault(at.clone(), why))?;
        let duplicate = format!("the id `{id}` is already used");
        add(&mut seen.ids, id.clone(), seen.text, at, &duplicate)?;
        let first_token = field!(self.first_token_seconds).seconds()?;
        let total = field!(self.total_seconds).seconds()?;
        Ok(TenantEntry {
            deadlines: Deadlines {
                first_token: first_token.or(defaults.deadlines.first_token),
                total: total.or(defaults.deadlines.total),
            },
            keys: seen.add_keys(&self.key_sha256)?,
            policy: self.policy(seen, defaults)?,
            models: self.models(seen)?,
            trusted: self.trusted,
            id: self.id.into_inner(),
        })
    }

    fn models(&self, seen: &SeenTables<'_>) -> Result<Option<Vec<String>>, Fault> {
        let Some(models) = &self.models else {
            return Ok(None);
        };
        if models.get_ref().is_empty() {
            let why = "`models` is empty; list a model, or omit `models` to allow all models";
            return Err(fault(models.span(), why));
        }
        let mut lines = HashMap::new();
        for name in models.get_ref() {
            let (name, at) = (name.get_ref().as_str(), name.span());
            if name.is_empty() {
                return Err(fault(at, "a model's name must not be empty"));
            }
            add(
                &mut lines,
                name,
                seen.text,
                at,
                "this model is already listed",
            )?;
        }
        let names = models.get_ref().iter();
        Ok(Some(names.map(|name| name.get_ref().clone()).collect()))
    }

    fn policy(&self, seen: &SeenTables<'_>, defaults: &Defaults) -> Result<TenantPolicy, Fault> {
        let public = self.public.iter().map(|name| {
            let mut prefixes = seen.prefixes.iter();
            let index = prefixes.position(|prefix| prefix.name == *name.get_ref());
            let why = "the file has no [[public_prefix]] with this name";
            let index = index.ok_or_else(|| fault(name.span(), why))?;
            Ok(PublicPrefix(index as u32))
        });
        let request_burst = |per_minute: u32| (per_minute / BURST_DIVISOR).max(1);
        let requests = field!(self.requests_per_minute);
        let tokens = field!(self.tokens_per_minute);
        let queued_time = field!(self.max_queued_seconds).seconds()?;
        let max_pages = field!(self.max_pages)
            .within(ANY_COUNT)?
            .unwrap_or(u32::MAX);
        let weight = field!(self.weight).within(1..=1000)?;
        let requests = rate(requests, field!(self.request_burst), request_burst)?;
        let tokens = rate(tokens, field!(self.token_burst), |per_minute| per_minute)?;
        let max_running = field!(self.max_running).within(ANY_COUNT)?;
        let max_queued = field!(self.max_queued).within(ANY_COUNT)?;
        let guaranteed_pages = field!(self.guaranteed_pages).within(0..=i64::from(max_pages))?;
        Ok(TenantPolicy {
            band: self.band,
            weight: weight.unwrap_or(1),
            requests,
            tokens,
            max_running: max_running.unwrap_or(u32::MAX),
            max_queued: max_queued.unwrap_or(defaults.max_queued),
            max_queued_time: queued_time.unwrap_or(defaults.max_queued_time).as_micros() as u64,
            guaranteed_pages: guaranteed_pages.unwrap_or(0),
            max_pages,
            public: public.collect::<Result<_, _>>()?,
        })
    }
}

impl Field<'_> {
    /// Returns the number if it is set. `limits` must lie within the limits of `u32`.
    fn within(&self, limits: RangeInclusive<i64>) -> Result<Option<u32>, Fault> {
        let Some(spanned) = self.number else {
            return Ok(None);
        };
        let number = *spanned.get_ref();
        if limits.contains(&number) {
            return Ok(u32::try_from(number).ok());
        }
        let (min, max) = limits.into_inner();
        let why = format!("`{}` must be from {min} to {max}; got {number}", self.name);
        Err(fault(spanned.span(), why))
    }

    fn seconds(&self) -> Result<Option<Duration>, Fault> {
        let seconds = self.within(ANY_SECONDS)?;
        Ok(seconds.map(|seconds| Duration::from_secs(seconds.into())))
    }
}

fn rate(
    per_minute: Field<'_>,
    burst: Field<'_>,
    default_burst: impl Fn(u32) -> u32,
) -> Result<Option<Rate>, Fault> {
    let burst_number = burst.within(ANY_RATE)?;
    match (per_minute.within(ANY_RATE)?, burst.number) {
        (Some(per_minute), _) => Ok(Some(Rate {
            per_minute,
            burst: burst_number.unwrap_or_else(|| default_burst(per_minute)),
        })),
        (None, Some(number)) => {
            let (burst, per_minute) = (burst.name, per_minute.name);
            let why = format!("`{burst}` has no effect without `{per_minute}`; set both");
            Err(fault(number.span(), why))
        }
        (None, None) => Ok(None),
    }
}

/// The digits of one key or of several, each with its place in the file. An untagged enum of serde
/// would lose the places.
pub(super) enum KeyDigits {
    One(String),
    Several(Vec<Spanned<String>>),
}

impl<'de> Deserialize<'de> for KeyDigits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<KeyDigits, D::Error> {
        struct KeyDigitsVisitor;

        impl<'de> Visitor<'de> for KeyDigitsVisitor {
            type Value = KeyDigits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E>(self, digits: &str) -> Result<KeyDigits, E> {
                Ok(KeyDigits::One(digits.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<KeyDigits, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(KeyDigits::Several)
            }
        }

        deserializer.deserialize_any(KeyDigitsVisitor)
    }
}
