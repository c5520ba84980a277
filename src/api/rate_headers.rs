//! Where a tenant's rates stand, as the headers of its answers write.
//!
//! The scheduler alone knows, and says so when it takes or refuses a request. Any other answer (an error before that, a list of models)
//! tells what the scheduler said last and what has been earned since. So between two requests no answer shows what the first one's
//! output costs; the second one's does.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderValue};

use crate::engine::{Rate, RateState, Rates, TenantId};
use crate::tenants::Tenant;

const MINUTE: Duration = Duration::from_mins(1);

/// What the scheduler said last of each tenant that has a rate.
#[derive(Default)]
pub(super) struct LastRates {
    told: Mutex<HashMap<TenantId, RecordedRates>>,
}

#[derive(Clone, Copy)]
struct RecordedRates {
    at: Instant,
    requests: Option<RateDebt>,
    tokens: Option<RateDebt>,
}

/// So long a rate takes to earn what was charged.
#[derive(Clone, Copy)]
struct RateDebt {
    per_minute: u32,
    time: Duration,
}

impl LastRates {
    /// The scheduler has said at the moment `at` where the rates of `tenant` stand.
    pub(super) fn note(&self, tenant: &Tenant, rates: Rates, at: Instant) {
        let owed = |rate: Option<Rate>, state: Option<RateState>| {
            let (rate, state) = rate.zip(state)?;
            Some(RateDebt {
                per_minute: rate.per_minute,
                time: Duration::from_micros(state.reset),
            })
        };
        let told = RecordedRates {
            at,
            requests: owed(tenant.requests, rates.requests),
            tokens: owed(tenant.tokens, rates.tokens),
        };
        if told.requests.is_some() || told.tokens.is_some() {
            let mut book = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            book.insert(tenant.number, told);
        }
    }

    /// Where the rates of `tenant` stand at the moment `at`, as far as it was told. Nothing has been used of what was never told of.
    pub(super) fn now(&self, tenant: &Tenant, at: Instant) -> Rates {
        if tenant.requests.is_none() && tenant.tokens.is_none() {
            return Rates::default();
        }
        let book = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let told = book.get(&tenant.number);
        let earned = told.map_or(Duration::ZERO, |told| at.saturating_duration_since(told.at));
        let state = |rate: Option<Rate>, owed: Option<RateDebt>| Some(state(rate?, owed, earned));
        Rates {
            requests: state(tenant.requests, told.and_then(|told| told.requests)),
            tokens: state(tenant.tokens, told.and_then(|told| told.tokens)),
        }
    }
}

/// What was `owed` costs the more time the lower the rate is by now; of that, so much has been `earned`.
fn state(rate: Rate, owed: Option<RateDebt>, earned: Duration) -> RateState {
    let owed = owed.map_or(0, |owed| {
        owed.time.as_nanos() * u128::from(owed.per_minute) / u128::from(rate.per_minute)
    });
    let owed = owed.saturating_sub(earned.as_nanos());
    let used = (owed * u128::from(rate.per_minute)).div_ceil(MINUTE.as_nanos());
    RateState {
        limit: rate.burst,
        remaining: rate.burst - u32::try_from(used).map_or(rate.burst, |used| used.min(rate.burst)),
        reset: u64::try_from(owed.div_ceil(1000)).unwrap_or(u64::MAX),
    }
}

/// Writes `rates` into an answer's headers.
pub(super) fn write(rates: &Rates, headers: &mut HeaderMap) {
    let names = [
        [
            "x-ratelimit-limit-requests",
            "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests",
        ],
        [
            "x-ratelimit-limit-tokens",
            "x-ratelimit-remaining-tokens",
            "x-ratelimit-reset-tokens",
        ],
    ];
    for (names, state) in names.into_iter().zip([rates.requests, rates.tokens]) {
        let Some(state) = state else { continue };
        let RateState {
            limit,
            remaining,
            reset,
        } = state;
        let reset = HeaderValue::try_from(spelled(Duration::from_micros(reset)))
            .expect("digits and letters are printable");
        for (name, value) in names
            .into_iter()
            .zip([limit.into(), remaining.into(), reset])
        {
            headers.insert(name, value);
        }
    }
}

/// A duration as OpenAI's headers spell it, rounded up to milliseconds: `120ms`, `1.5s`, `6m0s`, `1h0m2s`.
fn spelled(duration: Duration) -> String {
    let millis = duration.as_micros().div_ceil(1000);
    if (1..1000).contains(&millis) {
        return format!("{millis}ms");
    }
    let (minutes, millis) = (millis / 60_000, millis % 60_000);
    let fraction = match millis % 1000 {
        0 => String::new(),
        rest => format!(".{rest:03}").trim_end_matches('0').to_owned(),
    };
    let seconds = format!("{}{fraction}s", millis / 1000);
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limited(requests: Rate, tokens: Option<Rate>) -> Tenant {
        Tenant {
            id: "a".into(),
            number: TenantId(1),
            deadlines: crate::tenants::Deadlines::default(),
            models: None,
            requests: Some(requests),
            tokens,
        }
    }

    fn requests_left(book: &LastRates, tenant: &Tenant, at: Instant) -> (u32, Duration) {
        let state = book.now(tenant, at).requests.unwrap();
        assert_eq!(state.limit, tenant.requests.unwrap().burst);
        (state.remaining, Duration::from_micros(state.reset))
    }

    #[test]
    fn what_was_told_is_earned_back_as_time_passes() {
        let (per_minute, burst) = (60, 3);
        let tenant = limited(Rate { per_minute, burst }, None);
        let (book, began) = (LastRates::default(), Instant::now());
        assert_eq!(requests_left(&book, &tenant, began), (3, Duration::ZERO));
        let told = Rates {
            requests: Some(RateState {
                limit: burst,
                remaining: 0,
                reset: 4_500_000,
            }),
            tokens: None,
        };
        book.note(&tenant, told, began);
        for (millis, remaining) in [
            (0, 0),
            (1500, 0),
            (2499, 0),
            (2500, 1),
            (4499, 2),
            (4500, 3),
        ] {
            let passed = Duration::from_millis(millis);
            let left = Duration::from_millis(4500) - passed;
            assert_eq!(
                requests_left(&book, &tenant, began + passed),
                (remaining, left),
                "{millis}"
            );
        }
        assert_eq!(
            requests_left(&book, &tenant, began + 99 * SECOND),
            (3, Duration::ZERO)
        );
        assert_eq!(book.now(&tenant, began).tokens, None, "it has no such rate");

        let per_minute = 120; // What is owed costs half the time then.
        let faster = limited(Rate { per_minute, burst }, Some(Rate { per_minute, burst }));
        let half = Duration::from_millis(2250);
        assert_eq!(requests_left(&book, &faster, began), (0, half));
        assert_eq!(book.now(&faster, began).tokens.unwrap().remaining, 3);
    }

    #[test]
    fn durations_are_spelled_as_openai_does() {
        for (micros, expected) in [
            (0, "0s"),
            (1, "1ms"),
            (120_000, "120ms"),
            (999_001, "1s"),
            (1_000_000, "1s"),
            (8_640_000, "8.64s"),
            (59_999_999, "1m0s"),
            (360_000_000, "6m0s"),
            (63_250_000, "1m3.25s"),
            (3_600_000_000, "1h0m0s"),
        ] {
            assert_eq!(spelled(Duration::from_micros(micros)), expected, "{micros}");
        }
    }
}
