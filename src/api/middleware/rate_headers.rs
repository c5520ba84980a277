//! The `x-ratelimit-*` headers: where a tenant's rate limits stand.
//!
//! Only the scheduler knows a tenant's rate limits, and it reports them when it accepts or rejects
//! a request. Every other response (an error before that, a list of models) computes its headers
//! from the last report and the time since. So no response between two requests shows what the
//! first request's output cost; the second request's response does.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::engine::{Meter, Rate, RateState, Rates, TenantId};
use crate::tenants::Tenant;

/// The scheduler's last report for each tenant that has a rate limit.
#[derive(Default)]
pub(in crate::api) struct LastRates {
    reports: Mutex<HashMap<TenantId, RateReport>>,
}

/// The meters' clocks begin with the report.
#[derive(Clone, Copy)]
struct RateReport {
    at: Instant,
    requests: Option<Meter>,
    tokens: Option<Meter>,
}

impl LastRates {
    /// Records the scheduler's report for `tenant`, made at `at`.
    pub(in crate::api) fn record(&self, tenant: &Tenant, rates: Rates, at: Instant) {
        let meter = |rate: Option<Rate>, state: Option<RateState>| {
            (rate.zip(state)).map(|(rate, state)| Meter::owing(rate, state.reset))
        };
        let report = RateReport {
            at,
            requests: meter(tenant.requests, rates.requests),
            tokens: meter(tenant.tokens, rates.tokens),
        };
        if report.requests.is_some() || report.tokens.is_some() {
            let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
            reports.insert(tenant.number, report);
        }
    }

    /// Returns the rate limits of `tenant` at `at`. Without a report, the tenant has used nothing.
    pub(in crate::api) fn now(&self, tenant: &Tenant, at: Instant) -> Rates {
        if tenant.requests.is_none() && tenant.tokens.is_none() {
            return Rates::default();
        }
        let reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let report = reports.get(&tenant.number);
        let elapsed = report.map_or(Duration::ZERO, |report| {
            at.saturating_duration_since(report.at)
        });
        // A rate may have changed since the report.
        let state = |rate: Option<Rate>, last: Option<Meter>| {
            let rate = rate?;
            let meter = last.map_or(Meter::new(rate), |last| last.at_rate(0, rate));
            Some(meter.state(elapsed.as_micros() as u64))
        };
        Rates {
            requests: state(tenant.requests, report.and_then(|report| report.requests)),
            tokens: state(tenant.tokens, report.and_then(|report| report.tokens)),
        }
    }
}

/// Writes `rates` into the headers of a response.
pub(in crate::api) fn write(rates: &Rates, headers: &mut HeaderMap) {
    for (kind, state) in [("requests", rates.requests), ("tokens", rates.tokens)] {
        let Some(state) = state else { continue };
        let reset = HeaderValue::try_from(format_duration(Duration::from_micros(state.reset)))
            .expect("digits and letters are printable");
        for (part, value) in [
            ("limit", state.limit.into()),
            ("remaining", state.remaining.into()),
            ("reset", reset),
        ] {
            let name = HeaderName::try_from(format!("x-ratelimit-{part}-{kind}"));
            headers.insert(name.expect("lowercase letters and dashes"), value);
        }
    }
}

/// Formats a duration as OpenAI's headers do, rounded up to milliseconds: `120ms`, `1.5s`, `6m0s`,
/// `1h0m2s`.
fn format_duration(duration: Duration) -> String {
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
            trusted: false,
            models: None,
            requests: Some(requests),
            tokens,
        }
    }

    fn requests_left(rates: &LastRates, tenant: &Tenant, at: Instant) -> (u32, Duration) {
        let state = rates.now(tenant, at).requests.unwrap();
        assert_eq!(state.limit, tenant.requests.unwrap().burst);
        (state.remaining, Duration::from_micros(state.reset))
    }

    #[test]
    fn a_reported_rate_recovers_as_time_passes() {
        let (per_minute, burst) = (60, 3);
        let tenant = limited(Rate { per_minute, burst }, None);
        let (rates, start) = (LastRates::default(), Instant::now());
        assert_eq!(requests_left(&rates, &tenant, start), (3, Duration::ZERO));
        let report = Rates {
            requests: Some(RateState {
                limit: burst,
                remaining: 0,
                reset: 4_500_000,
            }),
            tokens: None,
        };
        rates.record(&tenant, report, start);
        for (millis, remaining) in [
            (0, 0),
            (1500, 0),
            (2499, 0),
            (2500, 1),
            (4499, 2),
            (4500, 3),
        ] {
            let elapsed = Duration::from_millis(millis);
            let left = Duration::from_millis(4500) - elapsed;
            assert_eq!(
                requests_left(&rates, &tenant, start + elapsed),
                (remaining, left),
                "{millis}"
            );
        }
        assert_eq!(
            requests_left(&rates, &tenant, start + 99 * SECOND),
            (3, Duration::ZERO)
        );
        assert_eq!(
            rates.now(&tenant, start).tokens,
            None,
            "the tenant has no token rate"
        );

        let per_minute = 120; // Twice the rate recovers the same debt in half the time.
        let faster = limited(Rate { per_minute, burst }, Some(Rate { per_minute, burst }));
        let half = Duration::from_millis(2250);
        assert_eq!(requests_left(&rates, &faster, start), (0, half));
        assert_eq!(rates.now(&faster, start).tokens.unwrap().remaining, 3);
    }

    #[test]
    fn durations_are_formatted_as_openai_does() {
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
            let formatted = format_duration(Duration::from_micros(micros));
            assert_eq!(formatted, expected, "{micros}");
        }
    }
}
