//! One tenant's table of the file, checked: its name, its keys, and what it may have.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use toml::Spanned;

use super::file::{Fault, check_tenant, fault, line};
use super::{Deadlines, Defaults, KeyHash, Member};
use crate::engine::{Band, PublicPrefix, Rate, TenantPolicy};

const LONGEST_SECONDS: i64 = 86_400;
const ANY_COUNT: RangeInclusive<i64> = 1..=u32::MAX as i64;
/// A rate is kept in whole nanoseconds in 64 bits: a burst of so many at one a minute fits, and so many a minute are 600 ns each.
const ANY_RATE: RangeInclusive<i64> = 1..=100_000_000;
/// The part of a minute's requests that may come at once, unless `request_burst` says otherwise.
const BURST_PART: u32 = 10;

/// A whole number that may be left out.
type Number = Option<Spanned<i64>>;

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

/// What the tables before this one have said, by the line that said it.
pub(super) struct Known<'a> {
    pub(super) text: &'a str,
    pub(super) ids: HashMap<String, usize>,
    pub(super) keys: HashMap<KeyHash, usize>,
    pub(super) prefixes: HashMap<String, PublicPrefix>,
}

impl TenantTable {
    pub(super) fn member(
        self,
        known: &mut Known<'_>,
        defaults: &Defaults,
    ) -> Result<Member, Fault> {
        let id = self.id.get_ref().clone();
        check_tenant(&id).map_err(|why| fault(&self.id, why))?;
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
            models: self.models(known)?,
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

    fn models(&self, known: &Known<'_>) -> Result<Option<Vec<String>>, Fault> {
        let Some(models) = &self.models else {
            return Ok(None);
        };
        if models.get_ref().is_empty() {
            let why = "there is no model here; a tenant without `models` may use all";
            return Err(fault(models, why));
        }
        let mut lines = HashMap::new();
        for name in models.get_ref() {
            if name.get_ref().is_empty() {
                return Err(fault(name, "a model's name is not empty"));
            }
            let line = line(known.text, name.span().start);
            if let Some(line) = lines.insert(name.get_ref(), line) {
                return Err(fault(
                    name,
                    format!("the same model stands in line {line} already"),
                ));
            }
        }
        let names = models.get_ref().iter();
        Ok(Some(names.map(|name| name.get_ref().clone()).collect()))
    }

    fn policy(&self, known: &Known<'_>, defaults: &Defaults) -> Result<TenantPolicy, Fault> {
        let public = self.public.iter().map(|name| {
            let found = known.prefixes.get(name.get_ref()).copied();
            found.ok_or_else(|| {
                let why = "there is no [[public_prefix]] of this name";
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
    let given = within(burst.0, burst.1, ANY_RATE)?;
    match (within(per_minute.0, per_minute.1, ANY_RATE)?, burst.0) {
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
