//! The HTTP surface: OpenAI's endpoints over the engine's door.
//!
//! Invariants: only this module knows JSON and status codes; nothing here decides about serving. A handler that is dropped, because
//! its client left, drops its `EventStream`, and so cancels its request.

mod authentication;
mod body;
mod body_limits;
mod chat;
mod choices;
mod completions;
mod error;
mod fields;
mod generation;
mod listener;
mod page;
mod params;
mod rate_headers;
mod sse;
mod status;

use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::FutureExt;
use tracing::Instrument;

use crate::engine::{EngineHandle, TokenId};
use crate::metrics::Metrics;
use crate::tenants::{Deadlines, Tenant, Tenants};
use crate::text::{ChatTemplate, Tokenizer};

pub use error::ApiError;
pub use listener::{ConnectionLimits, serve};

use body_limits::BodyLimits;
use rate_headers::LastRates;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Every endpoint.
pub fn router(app: App) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics))
        .route("/", get(page::show))
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(
            app.clone(),
            authentication::authenticate,
        ))
        .layer(middleware::from_fn(name_and_guard))
        .with_state(app)
}

/// What is known about the served model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    /// Its name in the API.
    pub name: String,
    /// Other names that it answers to, beside `default`.
    pub aliases: Vec<String>,
    /// Tokens of prompt and answer together.
    pub max_model_len: u32,
    /// Tokens that the model has.
    pub vocabulary: u32,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<TokenId>,
}

impl ModelCard {
    /// Whether `name` is one of its names.
    pub fn answers_to(&self, name: &str) -> bool {
        name == self.name || name == "default" || self.aliases.iter().any(|alias| alias == name)
    }

    fn is_open_to(&self, tenant: &Tenant) -> bool {
        tenant.may_use(|name| self.answers_to(name))
    }

    /// # Errors
    /// When this is not the model that `tenant` has `asked` for, or not one for it. Who names none means this one.
    fn check(&self, asked: Option<&str>, tenant: &Tenant) -> Result<(), ApiError> {
        let open = self.is_open_to(tenant);
        match asked {
            Some(asked) if !self.answers_to(asked) => {
                let served = open.then_some(self.name.as_str());
                Err(ApiError::model_not_found(asked, served))
            }
            asked if !open => Err(ApiError::model_not_allowed(asked)),
            _ => Ok(()),
        }
    }
}

/// What is needed to answer requests.
pub struct Serving {
    /// The model.
    pub model: ModelCard,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template; without one it can't chat.
    pub chat_template: Option<ChatTemplate>,
    /// The engine that runs it.
    pub engine: EngineHandle,
    /// Where that engine records.
    pub metrics: Metrics,
}

/// The state that all handlers share.
#[derive(Clone)]
pub struct App {
    inner: Arc<Inner>,
}

struct Inner {
    started: u64,
    tenants: ArcSwap<Tenants>,
    metrics_open: bool,
    serving: OnceLock<Arc<Serving>>,
    body_limits: BodyLimits,
    rates: LastRates,
}

impl App {
    /// A server that is still loading, and open to everybody: it lives, but is not ready.
    pub fn loading() -> App {
        let connections = ConnectionLimits::default().connections;
        App::for_tenants(Tenants::anyone(Deadlines::default()), false, connections)
    }

    /// A server that is still loading, for these tenants only, over so many connections. With `metrics_open`, its metrics need no key.
    pub fn for_tenants(tenants: Tenants, metrics_open: bool, connections: usize) -> App {
        App {
            inner: Arc::new(Inner {
                started: unix_seconds(),
                tenants: ArcSwap::from_pointee(tenants),
                metrics_open,
                serving: OnceLock::new(),
                body_limits: BodyLimits::new(connections),
                rates: LastRates::default(),
            }),
        }
    }

    /// From now on requests are answered. The first call counts.
    pub fn serve(&self, serving: Serving) {
        let fresh = self.inner.serving.set(Arc::new(serving)).is_ok();
        assert!(fresh, "a server serves one model");
    }

    /// From now on these may come in, and nobody else. What they have asked already goes on.
    pub fn set_tenants(&self, tenants: Tenants) {
        self.inner.tenants.store(Arc::new(tenants));
    }

    fn serving(&self) -> Result<&Arc<Serving>, ApiError> {
        self.inner.serving.get().ok_or_else(ApiError::loading)
    }
}

async fn unknown_route(request: Request) -> ApiError {
    ApiError::not_found(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::method_not_allowed(request.method().as_str(), request.uri().path())
}

/// Gives each response its `x-request-id`, and ends a panic with the request that caused it.
async fn name_and_guard(request: Request, next: Next) -> Response {
    let id = request_id(&request);
    let tenant = tracing::field::Empty; // Known later.
    let span = tracing::info_span!("request", id = id.to_str().unwrap_or_default(), tenant);
    let answer = AssertUnwindSafe(next.run(request))
        .catch_unwind()
        .instrument(span)
        .await;
    let mut response =
        answer.unwrap_or_else(|_| ApiError::internal("a handler panicked").into_response());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The client's own id if it is short and printable; it is echoed and logged, and never a key to anything.
fn request_id(request: &Request) -> HeaderValue {
    let printable = |id: &&HeaderValue| {
        let bytes = id.as_bytes();
        (1..=MAX_REQUEST_ID_BYTES).contains(&bytes.len())
            && bytes.iter().all(|byte| (b' '..=b'~').contains(byte))
    };
    match request.headers().get(REQUEST_ID).filter(printable) {
        Some(id) => id.clone(),
        None => HeaderValue::try_from(random_id("req-")).expect("hexadecimal digits are printable"),
    }
}

/// A name that nothing else has.
fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_u64(), random_u64())
}

/// Not for secrets: the standard library's hash keys are random for each thread and differ from call to call.
fn random_u64() -> u64 {
    RandomState::new().hash_one(0)
}

fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
