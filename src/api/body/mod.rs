//! Reads a request's body: checks its content type, size and deadline, and has it parsed.
//!
//! Invariant: a body larger than `SMALL_BYTES` is parsed, rendered and tokenized on a blocking
//! thread, after it has waited for a parser.
//!
//! Invariant: `limits.rs` counts a body and its bytes until a parser takes it.
//!
//! Invariant: the processor time of reading a body counts as service of its tenant, even if the
//! client leaves.

pub(in crate::api) mod limits;
mod reading_time;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};

use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::middleware::authentication::Caller;
use crate::engine::NoRoom;
use crate::metrics::RejectionReason;
use crate::tenants::Tenant;
use limits::{ArrivingBody, Lane, Parser};
pub(in crate::api) use reading_time::Reading;
use reading_time::{Following, ReadingTime, run_slowly};

const MAX_BODY_BYTES: usize = 2 << 20;
/// The server reads and discards a body that is too large up to this size. Many clients read their
/// response only after they have sent the whole request.
const MAX_DISCARDED_BYTES: usize = 8 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// In each period of this length, this much of a body must arrive, or the rest of it.
const PERIOD: Duration = Duration::from_secs(10);
const MIN_PERIOD_BYTES: usize = 16 << 10;
/// If the queue has no room, a body up to this size may still arrive for a moment.
const MAX_REFUSED_BYTES: u64 = 64 << 10;
const REFUSED_DEADLINE: Duration = Duration::from_millis(100);
/// The server parses bodies up to this size at once, on the async thread.
const SMALL_BYTES: usize = 1 << 10;

/// Reads a checked body.
type ReadBody<T> = fn(&Serving, &Tenant, &JsonObject<'_>) -> Result<T, ApiError>;

/// Receives the body of `request`, parses it as JSON and passes it to `read`. The engine will get
/// the request. A request with an error of the client counts in its tenant's rate of requests.
///
/// # Errors
/// The errors of `read`, and errors for a body that:
/// - has another content type,
/// - is too large,
/// - arrives incompletely or too slowly,
/// - is not valid JSON,
/// - exceeds the limits for bodies in flight,
/// - is of a tenant whose requests the engine refuses now, whatever they ask for. The server then
///   parses nothing.
pub(in crate::api) async fn read_for_engine<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    read: ReadBody<T>,
) -> Result<(T, Reading), ApiError> {
    receive_and_parse(app, caller, request, Following::Answer, read).await
}

/// Reads a request about text only, which the engine will not get, as [`read_for_engine`] does. The
/// request counts in its tenant's rate of requests.
///
/// # Errors
/// As [`read_for_engine`], and if the tenant has used up its rate.
pub(in crate::api) async fn read_text_only<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    read: ReadBody<T>,
) -> Result<T, ApiError> {
    let read = receive_and_parse(app, caller, request, Following::Nothing, read).await;
    read.map(|(result, _)| result)
}

async fn receive_and_parse<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    following: Following,
    read: ReadBody<T>,
) -> Result<(T, Reading), ApiError> {
    let serving = app.serving()?;
    let allowances = app.body_limits().allowances();
    let reader = (caller.tenant.number, following);
    let is_slow = || allowances.is_beyond(reader, std::time::Instant::now());
    let received = receive_for_parser(app, serving, caller, request, is_slow).await;
    let (bytes, parser) = match received {
        Ok(received) => received,
        Err(error) => return Err(caller.charged(error, serving).await),
    };
    let (serving, caller) = (Arc::clone(serving), caller.clone());
    let (allowances, length) = (Arc::clone(allowances), bytes.len());
    let is_busy = serving.engine.busy_reader();
    // If the client leaves, the closure still runs. So it charges the request.
    let parse = move || {
        let tenant = &caller.tenant;
        let parse = || read(&serving, tenant, &JsonObject::check(&bytes)?);
        let (result, time) = ReadingTime::of(parse);
        let counts = match &result {
            Ok(_) => following == Following::Nothing,
            Err(error) => error.is_clients_own(),
        };
        let counted = counts.then(|| caller.count_request(&serving));
        serving.engine.charge_time(tenant.number, time.processor);
        let reading = Reading::new(allowances, reader, time);
        (result.map(|request| (request, reading)), counted)
    };
    let parsed = match parser {
        Some(parser) if parser.lane() == Lane::Slow => {
            run_slowly(parse, length, parser.into_permits(), is_busy).await
        }
        Some(parser) => {
            let parse = move || {
                let _parser = parser; // Until the body is parsed, even if the client leaves.
                parse()
            };
            spawn_blocking(parse).await.ok()
        }
        None => Some(parse()),
    };
    let Some((result, counted)) = parsed else {
        return Err(ApiError::internal("parsing a request body panicked"));
    };
    let within_rate = match counted {
        Some(counted) => counted.await,
        None => Ok(()),
    };
    within_rate.and(result)
}

/// Receives a body, and waits for its parser. A small body needs none, unless it `is_slow`.
async fn receive_for_parser(
    app: &App,
    serving: &Arc<Serving>,
    caller: &Caller,
    request: Request,
    is_slow: impl Fn() -> bool,
) -> Result<(Vec<u8>, Option<Parser>), ApiError> {
    let tenant = &caller.tenant;
    if !declares_json(request.headers()) {
        return Err(ApiError::content_type());
    }
    if serving.engine.status().draining {
        serving
            .metrics
            .rejected(tenant.number, RejectionReason::Draining);
        return Err(ApiError::draining());
    }
    let rejected = |limit: NoRoom| {
        let reason = match limit {
            NoRoom::OfOwner => RejectionReason::TenantQueueFull,
            NoRoom::OfAll => RejectionReason::QueueFull,
        };
        serving.metrics.rejected(tenant.number, reason);
        ApiError::from(limit)
    };
    if let Err(error) = serving.engine.check_room(tenant.number) {
        discard_small(request.into_body()).await;
        return Err(error.into());
    }
    // The server does not read a body beyond the limit: that would occupy a connection after all.
    let body = app.body_limits().begin(tenant).map_err(rejected)?;
    let receive = receive(request.into_body(), &body, rejected);
    let length = match timeout(DEADLINE, receive).await {
        Ok(received) => received?,
        Err(_) => return Err(too_slow()),
    };
    if length <= SMALL_BYTES && !is_slow() {
        return Ok((body.into_bytes().map_err(rejected)?, None));
    }
    let (bytes, parser) = body.wait_for_parser(is_slow).await.map_err(rejected)?;
    Ok((bytes, Some(parser)))
}

/// Discards a small body that arrives soon, so that its connection can serve the next request.
async fn discard_small(body: Body) {
    let upper = body.size_hint().upper();
    if upper.is_some_and(|bytes| bytes <= MAX_REFUSED_BYTES) {
        let mut frames = body.into_data_stream();
        let rest = async { while let Some(Ok(_)) = frames.next().await {} };
        // The connection of a slower client is closed after the response.
        drop(timeout(REFUSED_DEADLINE, rest).await);
    }
}

fn declares_json(headers: &HeaderMap) -> bool {
    let declared = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let (kind, _) = declared.split_once(';').unwrap_or((declared, ""));
    let kind = kind.trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// Receives `body` into `arriving` and returns its length.
async fn receive(
    body: Body,
    arriving: &ArrivingBody<'_>,
    rejected: impl Fn(NoRoom) -> ApiError,
) -> Result<usize, ApiError> {
    let mut result = Ok(());
    let (mut received, mut in_period) = (0, 0);
    let mut period_end = Instant::now() + PERIOD;
    let mut frames = body.into_data_stream();
    loop {
        let next = tokio::select! {
            next = timeout_at(period_end, frames.next()) => next,
            limit = arriving.taken_back() => return Err(rejected(limit)),
        };
        let frame = match next {
            Ok(Some(frame)) => frame.map_err(|_| ApiError::body_incomplete())?,
            Ok(None) => break,
            Err(_) if in_period < MIN_PERIOD_BYTES => return Err(too_slow()),
            Err(_) => {
                in_period = 0;
                period_end += PERIOD;
                continue;
            }
        };
        received += frame.len();
        in_period += frame.len();
        if received > MAX_DISCARDED_BYTES {
            break;
        }
        let added = match &result {
            Ok(()) if received > MAX_BODY_BYTES => Err(ApiError::too_large(MAX_BODY_BYTES)),
            Ok(()) => arriving.add(&frame).map_err(&rejected),
            Err(_) => continue, // The rest of the body is discarded.
        };
        if added.is_err() {
            arriving.discard();
            result = added;
        }
    }
    result.map(|()| received)
}

fn too_slow() -> ApiError {
    ApiError::body_too_slow(DEADLINE, MIN_PERIOD_BYTES, PERIOD)
}
