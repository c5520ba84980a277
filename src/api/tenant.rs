//! Who is asking: the key of a request, before anything else of it is looked at.
//!
//! Invariants: with keys, every path needs one but those that are listed here, whether it exists or not; the body of a request without
//! a good key is never read; no key is logged or sent back.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Span;

use super::App;
use super::error::ApiError;
use crate::engine::{RateState, Rates};
use crate::tenants::Tenant;

const SCHEME: &str = "bearer";
const API_KEY: &str = "x-api-key";
/// The page asks for a key itself; probes have none.
const OPEN_PATHS: [&str; 3] = ["/", "/health", "/ready"];
/// Open only if the operator says so: they tell of all tenants.
const METRICS_PATH: &str = "/metrics";

/// Whose request it is, and what is to be told about their rates.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) tenant: Arc<Tenant>,
    rates: Arc<OnceLock<Rates>>,
}

impl Caller {
    /// Where the tenant's rates stand, for the answer's headers. Of several requests to the engine the first counts.
    pub(super) fn set_rates(&self, rates: Rates) {
        self.rates.get_or_init(|| rates);
    }
}

/// Lets those in who may come in, as `Caller`s, and puts their rates into the answer.
pub(super) async fn admit(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if OPEN_PATHS.contains(&path) || path == METRICS_PATH && app.inner.metrics_open {
        return next.run(request).await;
    }
    let key = presented_key(request.headers());
    let Some(tenant) = app.inner.tenants.load().find(key) else {
        return ApiError::invalid_key(key.is_some()).into_response();
    };
    Span::current().record("tenant", &tenant.id);
    let rates = Arc::default();
    let caller = Caller {
        tenant,
        rates: Arc::clone(&rates),
    };
    request.extensions_mut().insert(caller);
    let mut response = next.run(request).await;
    if let Some(rates) = rates.get() {
        tell(rates, response.headers_mut());
    }
    response
}

/// The bearer's token, or else `x-api-key`; nothing if that is empty.
fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(bearer_token);
    let key = bearer.or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes));
    key.map(<[u8]>::trim_ascii).filter(|key| !key.is_empty())
}

fn bearer_token(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, token) = value.as_bytes().split_at_checked(SCHEME.len())?;
    (scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) && token.starts_with(b" ")).then_some(token)
}

fn tell(rates: &Rates, headers: &mut HeaderMap) {
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

    #[test]
    fn a_key_comes_in_one_of_two_headers() {
        for (fields, expected) in [
            (vec![], None),
            (vec![("authorization", "Bearer k")], Some("k")),
            (vec![("authorization", "bEARER   k ")], Some("k")),
            (vec![("x-api-key", "k")], Some("k")),
            (
                vec![("x-api-key", "x"), ("authorization", "Bearer k")],
                Some("k"),
            ),
            (
                vec![("x-api-key", "x"), ("authorization", "Basic k")],
                Some("x"),
            ),
            (vec![("authorization", "Bearer")], None),
            (vec![("authorization", "Bearer ")], None),
            (vec![("authorization", "Bearerk")], None),
            (vec![("authorization", "k")], None),
            (vec![("x-api-key", " ")], None),
        ] {
            let headers: HeaderMap = fields
                .iter()
                .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
                .collect();
            let key = presented_key(&headers);
            assert_eq!(key, expected.map(str::as_bytes), "{fields:?}");
        }
    }
}
