//! Checks one `[[tenant]]` table of the file.

use std::collections::HashMap;
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::entry::{Defaults, TenantEntry};
use super::fault::{Fault, fault, line};
use super::ids::check_tenant_id;
use super::keys::KeyHash;
use super::tenant::Deadlines;
use crate::engine::{Band, PublicPrefix, Rate, TenantPolicy};

/// The limits of a number of seconds: up to a day.
const ANY_SECONDS: RangeInclusive<i64> = 1..=86_400;
const ANY_COUNT: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// The limits of a rate or burst. The scheduler keeps a burst as whole nanoseconds in 64 bits: the
/// largest burst at the smallest rate still fits, and the largest rate is one per 600 ns.
const ANY_RATE: RangeInclusive<i64> = 1..=100_000_000;
/// The default of `request_burst` is `requests_per_minute` divided by this.
const BURST_DIVISOR: u32 = 10;

/// A whole number that may be omitted.
type Number = Option<Spanned<i64>>;

/// The fields of a table as the file has them, one for each key of the TOML table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantTable {
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
    models: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum BandName {
    Interactive,
    #[default]
    Standard,
    Batch,
}

/// The ids and keys of the tables read so far, with their lines, and the file's public prefixes.
pub(super) struct SeenTables<'a> {
    text: &'a str,
    ids: HashMap<String, usize>,
    keys: HashMap<KeyHash, usize>,
    prefixes: HashMap<String, PublicPrefix>,
}

impl<'a> SeenTables<'a> {
    /// Starts a file with this text and these public prefixes.
    pub(super) fn new(text: &'a str, prefixes: HashMap<String, PublicPrefix>) -> SeenTables<'a> {
        SeenTables {
            text,
            ids: HashMap::new(),
            keys: HashMap::new(),
            prefixes,
        }
    }

    fn add_id(&mut self, id: &Spanned<String>) -> Result<(), Fault> {
        let line = line(self.text, id.span().start);
        let id_text = id.get_ref();
        match self.ids.insert(id_text.clone(), line) {
            Some(line) => {
                let why = format!("the id `{id_text}` is already used in line {line}");
                Err(fault(id, why))
            }
            None => Ok(()),
        }
    }

    fn add_key(&mut self, digits: &str, at: Range<usize>) -> Result<KeyHash, Fault> {
        let start = at.start;
        let fault = |why: String| Fault { at: Some(at), why };
        let Some(key) = KeyHash::from_hex(digits) else {
            let why = "a key's SHA-256 must have 64 hexadecimal digits; `sterna keygen ID` makes \
                       the key and the hash";
            return Err(fault(why.into()));
        };
        match self.keys.insert(key, line(self.text, start)) {
            Some(line) => Err(fault(format!("this key is already used in line {line}"))),
            None => Ok(key),
        }
    }
}

impl TenantTable {
    /// Checks the table. What it omits is taken from `defaults`.
    pub(super) fn entry(
        self,
        seen: &mut SeenTables<'_>,
        defaults: &Defaults,
    ) -> Result<TenantEntry, Fault> {
        check_tenant_id(self.id.get_ref()).map_err(|why| fault(&self.id, why))?;
        seen.add_id(&self.id)?;
        let deadlines = self.deadlines(defaults.deadlines)?;
        Ok(TenantEntry {
            keys: self.keys(seen)?,
            policy: self.policy(seen, defaults)?,
            deadlines,
            models: self.models(seen)?,
            id: self.id.into_inner(),
        })
    }

    fn deadlines(&self, defaults: Deadlines) -> Result<Deadlines, Fault> {
        let first_token = Field::new(&self.first_token_seconds, "first_token_seconds").seconds()?;
        let total = Field::new(&self.total_seconds, "total_seconds").seconds()?;
        Ok(Deadlines {
            first_token: first_token.or(defaults.first_token),
            total: total.or(defaults.total),
        })
    }

    fn keys(&self, seen: &mut SeenTables<'_>) -> Result<Vec<KeyHash>, Fault> {
        match self.key_sha256.get_ref() {
            Digits::One(digits) => Ok(vec![seen.add_key(digits, self.key_sha256.span())?]),
            Digits::Several(several) if several.is_empty() => {
                let why = "`key_sha256` is empty; `sterna keygen ID` makes a key and its hash";
                Err(fault(&self.key_sha256, why))
            }
            Digits::Several(several) => several
                .iter()
                .map(|digits| seen.add_key(digits.get_ref(), digits.span()))
                .collect(),
        }
    }

    fn models(&self, seen: &SeenTables<'_>) -> Result<Option<Vec<String>>, Fault> {
        let Some(models) = &self.models else {
            return Ok(None);
        };
        if models.get_ref().is_empty() {
            let why = "`models` is empty; list a model, or omit `models` to allow all models";
            return Err(fault(models, why));
        }
        let mut lines = HashMap::new();
        for name in models.get_ref() {
            if name.get_ref().is_empty() {
                return Err(fault(name, "a model's name must not be empty"));
            }
            let line = line(seen.text, name.span().start);
            if let Some(line) = lines.insert(name.get_ref(), line) {
                let why = format!("this model is already listed in line {line}");
                return Err(fault(name, why));
            }
        }
        let names = models.get_ref().iter();
        Ok(Some(names.map(|name| name.get_ref().clone()).collect()))
    }

    fn policy(&self, seen: &SeenTables<'_>, defaults: &Defaults) -> Result<TenantPolicy, Fault> {
        let public = self.public.iter().map(|name| {
            let found = seen.prefixes.get(name.get_ref()).copied();
            found.ok_or_else(|| fault(name, "the file has no [[public_prefix]] with this name"))
        });
        let requests = RateFields {
            per_minute: Field::new(&self.requests_per_minute, "requests_per_minute"),
            burst: Field::new(&self.request_burst, "request_burst"),
        };
        let tokens = RateFields {
            per_minute: Field::new(&self.tokens_per_minute, "tokens_per_minute"),
            burst: Field::new(&self.token_burst, "token_burst"),
        };
        let queued_time = Field::new(&self.max_queued_seconds, "max_queued_seconds")
            .seconds()?
            .unwrap_or(defaults.max_queued_time);
        let count = |number, name| Field::new(number, name).within(ANY_COUNT);
        let max_pages = count(&self.max_pages, "max_pages")?.unwrap_or(u32::MAX);
        let guaranteed_pages = Field::new(&self.guaranteed_pages, "guaranteed_pages");
        Ok(TenantPolicy {
            band: match self.band {
                BandName::Interactive => Band::Interactive,
                BandName::Standard => Band::Standard,
                BandName::Batch => Band::Batch,
            },
            weight: Field::new(&self.weight, "weight")
                .within(1..=1000)?
                .unwrap_or(1),
            requests: requests.rate(|per_minute| (per_minute / BURST_DIVISOR).max(1))?,
            tokens: tokens.rate(|per_minute| per_minute)?,
            max_running: count(&self.max_running, "max_running")?.unwrap_or(u32::MAX),
            max_queued: count(&self.max_queued, "max_queued")?.unwrap_or(defaults.max_queued),
            max_queued_time: queued_time.as_micros() as u64,
            guaranteed_pages: guaranteed_pages
                .within(0..=i64::from(max_pages))?
                .unwrap_or(0),
            max_pages,
            public: public.collect::<Result<_, _>>()?,
        })
    }
}

/// A numeric field with its name.
struct Field<'a> {
    number: &'a Number,
    name: &'static str,
}

impl<'a> Field<'a> {
    fn new(number: &'a Number, name: &'static str) -> Field<'a> {
        Field { number, name }
    }

    /// Returns the number if it is set. `limits` must lie within those of `u32`.
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
        Err(fault(spanned, why))
    }

    fn seconds(&self) -> Result<Option<Duration>, Fault> {
        let seconds = self.within(ANY_SECONDS)?;
        Ok(seconds.map(|seconds| Duration::from_secs(seconds.into())))
    }
}

/// The two fields of a rate.
struct RateFields<'a> {
    per_minute: Field<'a>,
    burst: Field<'a>,
}

impl RateFields<'_> {
    fn rate(&self, default_burst: impl Fn(u32) -> u32) -> Result<Option<Rate>, Fault> {
        let burst = self.burst.within(ANY_RATE)?;
        match (self.per_minute.within(ANY_RATE)?, self.burst.number) {
            (Some(per_minute), _) => Ok(Some(Rate {
                per_minute,
                burst: burst.unwrap_or_else(|| default_burst(per_minute)),
            })),
            (None, Some(number)) => {
                let (burst, per_minute) = (self.burst.name, self.per_minute.name);
                let why = format!("`{burst}` has no effect without `{per_minute}`; set both");
                Err(fault(number, why))
            }
            (None, None) => Ok(None),
        }
    }
}

/// The digits of one key or of several, each with its place in the file. An untagged enum of serde
/// would lose the places.
enum Digits {
    One(String),
    Several(Vec<Spanned<String>>),
}

impl<'de> Deserialize<'de> for Digits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digits, D::Error> {
        struct DigitsVisitor;

        impl<'de> Visitor<'de> for DigitsVisitor {
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

        deserializer.deserialize_any(DigitsVisitor)
    }
}
