//! Authentication: finds the tenant of each request by its API key.
//!
//! Invariant: if the server has API keys, every path needs one, even a path that does not exist.
//! The only exceptions are `OPEN_PATHS`, the files of the page and, if the operator opens them,
//! `METRICS_PATHS`.
//!
//! Invariant: the admin key serves the paths of `is_for_admin` and nothing else, and no tenant's
//! key serves them. Only `METRICS_PATHS` are open on a server without tenants.
//!
//! Invariant: the server never reads the body of a request without a valid key.
//!
//! Invariant: the server never logs a key and never sends one back.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Span;

use super::precedence::Precedence;
use super::rate_headers;
use super::request_id::RequestId;
use super::request_log::RequestLog;
use crate::api::app::{App, Serving};
use crate::api::connection::Progress;
use crate::api::error::ApiError;
use crate::api::generation::running::RunningRequests;
use crate::api::page;
use crate::engine::Rates;
use crate::tenants::{KeyHolder, Tenant};

const SCHEME: &str = "bearer";
const API_KEY: &str = "x-api-key";
/// Paths that need no key. The chat page asks the user for a key; probes have no key.
const OPEN_PATHS: [&str; 3] = ["/", "/health", "/ready"];
/// Need the admin key unless the operator opens them, because the metrics name all tenants.
const METRICS_PATHS: [&str; 2] = ["/metrics", "/metrics/recent"];
/// Need the admin key, because they change what all tenants do.
const ADMIN_PATHS: [&str; 2] = ["/reset_prefix_cache", "/flush_cache"];
/// The same, for the paths of requests.
const REQUESTS_PATH: &str = "/v1/requests/";

/// The tenant of a request, and where the request records the tenant's rate limits.
#[derive(Clone)]
pub(in crate::api) struct Caller {
    pub(in crate::api) tenant: Arc<Tenant>,
    /// Its place among the requests of the tenant.
    pub(in crate::api) precedence: Precedence,
    /// The id in `x-request-id`.
    pub(in crate::api) request_id: String,
    /// Where the request notes what its line in the log says.
    pub(in crate::api) log: RequestLog,
    app: App,
    rates: Arc<OnceLock<Rates>>,
}

impl Caller {
    /// Returns the requests that run or wait.
    pub(in crate::api) fn running(&self) -> &RunningRequests {
        self.app.running()
    }

    /// Records the tenant's rate limits for the headers of this response and of later responses.
    ///
    /// A request with several choices submits several engine requests; the first one's rates count.
    pub(in crate::api) fn set_rates(&self, rates: Rates) {
        if self.rates.set(rates).is_ok() {
            let last_rates = self.app.last_rates();
            last_rates.record(&self.tenant, rates, Instant::now());
        }
    }

    /// Charges a request that failed before its submission, if its error is the client's own. So a
    /// flood of malformed requests is limited as any other. Returns `error`, or the error of a
    /// tenant that has used up its rate.
    pub(in crate::api) async fn charged(&self, error: ApiError, serving: &Serving) -> ApiError {
        if !error.is_clients_own() {
            return error;
        }
        self.count_request(serving).await.err().unwrap_or(error)
    }

    /// Charges a request that is never submitted to the tenant's rate of requests. The request is
    /// charged at once, even if nobody waits for the result.
    ///
    /// # Errors
    /// If the tenant has used up its rate.
    pub(in crate::api) fn count_request(
        &self,
        serving: &Serving,
    ) -> impl Future<Output = Result<(), ApiError>> + use<> {
        let is_limited = self.tenant.requests.is_some();
        let charge = is_limited.then(|| serving.engine.charge_request(self.tenant.number));
        let caller = self.clone();
        async move {
            let Some(charge) = charge else {
                return Ok(());
            };
            let Some((charged, rates)) = charge.await else {
                return Ok(());
            };
            caller.set_rates(rates);
            charged.map_err(ApiError::from)
        }
    }
}

/// Returns whether a path needs a key, if the server has keys.
pub(in crate::api) fn needs_key(path: &str) -> bool {
    !OPEN_PATHS.contains(&path) && !path.starts_with(page::FILES_PATH)
}

fn is_metrics(path: &str) -> bool {
    METRICS_PATHS.contains(&path)
}

/// Returns whether a path is for the operator.
fn is_for_admin(path: &str) -> bool {
    is_metrics(path) || ADMIN_PATHS.contains(&path) || path.starts_with(REQUESTS_PATH)
}

/// Rejects a request without a valid key. Otherwise adds the `Caller` to the request and the
/// tenant's rate limits to the response.
pub(in crate::api) async fn authenticate(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    if !needs_key(path) || is_metrics(path) && app.metrics_open() {
        return next.run(request).await;
    }
    let key = presented_key(request.headers());
    let tenant = match app.key_holder(key) {
        None => return ApiError::invalid_key(key.is_some()).into_response(),
        Some(KeyHolder::Admin) if is_for_admin(path) => return next.run(request).await,
        Some(KeyHolder::Admin) => return ApiError::admin_key().into_response(),
        Some(KeyHolder::Tenant(tenant))
            if is_for_admin(path) && !(is_metrics(path) && tenant.is_anyone()) =>
        {
            return ApiError::no_admin_key(path, app.has_admin_key()).into_response();
        }
        Some(KeyHolder::Tenant(tenant)) => tenant,
    };
    Span::current().record("tenant", &tenant.id);
    let log = request
        .extensions()
        .get::<RequestLog>()
        .cloned()
        .unwrap_or_default();
    log.set_tenant(&tenant.id);
    if let Some(progress) = request.extensions().get::<Arc<Progress>>()
        && !tenant.is_anyone()
    {
        progress.set_tenant(tenant.number);
    }
    let precedence = match tenant.trusted.then(|| Precedence::read(request.headers())) {
        Some(Err(error)) => return error.into_response(),
        Some(Ok(precedence)) => precedence,
        None => Precedence::default(),
    };
    let id = request.extensions().get::<RequestId>();
    let caller = Caller {
        tenant,
        precedence,
        request_id: id.map_or_else(String::new, |RequestId(id)| id.clone()),
        log,
        app: app.clone(),
        rates: Arc::default(),
    };
    request.extensions_mut().insert(caller.clone());
    let mut response = next.run(request).await;
    let recorded = caller.rates.get().copied();
    let rates = recorded.unwrap_or_else(|| app.last_rates().now(&caller.tenant, Instant::now()));
    rate_headers::write(&rates, response.headers_mut());
    response
}

/// Returns the bearer token or, without one, the `x-api-key`. An empty key counts as no key.
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
    fn the_key_is_read_from_authorization_or_x_api_key() {
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
