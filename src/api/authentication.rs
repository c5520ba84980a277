//! Who is asking: the key of a request, before anything else of it is looked at.
//!
//! Invariants: with keys, every path needs one but those that are listed here, whether it exists or not; the body of a request without
//! a good key is never read; no key is logged or sent back.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Span;

use super::error::ApiError;
use super::{App, rate_headers};
use crate::engine::Rates;
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
    app: App,
    rates: Arc<OnceLock<Rates>>,
}

impl Caller {
    /// Where the tenant's rates stand, for the headers of this answer and of later ones. Of several requests to the engine the first
    /// counts.
    pub(super) fn set_rates(&self, rates: Rates) {
        if self.rates.set(rates).is_ok() {
            let book = &self.app.inner.rates;
            book.note(&self.tenant, rates, Instant::now());
        }
    }
}

/// Lets those in who may come in, as `Caller`s, and puts their rates into the answer.
pub(super) async fn authenticate(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if OPEN_PATHS.contains(&path) || path == METRICS_PATH && app.inner.metrics_open {
        return next.run(request).await;
    }
    let key = presented_key(request.headers());
    let Some(tenant) = app.inner.tenants.load().find(key) else {
        return ApiError::invalid_key(key.is_some()).into_response();
    };
    Span::current().record("tenant", &tenant.id);
    let caller = Caller {
        tenant,
        app: app.clone(),
        rates: Arc::default(),
    };
    request.extensions_mut().insert(caller.clone());
    let mut response = next.run(request).await;
    let told = caller.rates.get().copied();
    let rates = told.unwrap_or_else(|| app.inner.rates.now(&caller.tenant, Instant::now()));
    rate_headers::write(&rates, response.headers_mut());
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

#[cfg(test)]
mod tests {
    use super::*;

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
