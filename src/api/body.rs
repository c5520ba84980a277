//! Reads a request's body: checks its content type, size and deadline, and has it parsed.
//!
//! Invariant: a body larger than `SMALL_BYTES` is parsed, rendered and tokenized on a blocking
//! thread, after it has waited for a parser.
//!
//! Invariant: a body holds a permit of `body_limits.rs` for its connection while it arrives, and
//! permits for its bytes until it has been parsed.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout, timeout_at};

use super::app::{App, Serving};
use super::authentication::Caller;
use super::body_limits::{BodyLimitReached, BodyPermit, BodyQuota};
use super::error::ApiError;
use super::json::JsonObject;
use crate::tenants::Tenant;

const MAX_BODY_BYTES: usize = 2 << 20;
/// The server reads and discards a body that is too large up to this size. Many clients read their
/// response only after they have sent the whole request.
const MAX_DISCARDED_BYTES: usize = 8 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// In each period of this length, this much of a body must arrive, or the rest of it.
const PERIOD: Duration = Duration::from_secs(10);
const MIN_PERIOD_BYTES: usize = 16 << 10;
/// The server parses bodies up to this size at once, on the async thread.
const SMALL_BYTES: usize = 1 << 10;

/// Receives the body of `request`, parses it as JSON and passes it to `read`.
///
/// # Errors
/// The errors of `read`, and errors for a body that:
/// - has another content type,
/// - is too large,
/// - arrives incompletely or too slowly,
/// - is not valid JSON,
/// - exceeds the limits for bodies in flight.
pub(super) async fn read<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    read: fn(&Serving, &Tenant, JsonObject<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let serving = Arc::clone(app.serving()?);
    if !declares_json(request.headers()) {
        return Err(ApiError::content_type());
    }
    let tenant = Arc::clone(&caller.tenant);
    let quota = app.body_limits().quota(&tenant);
    let rejected = |limit: BodyLimitReached| {
        serving.metrics.rejected(tenant.number, limit.reason());
        ApiError::from(limit)
    };
    // The server does not read a body beyond the limit: that would occupy a connection after all.
    let receiving = quota.receiving().map_err(rejected)?;
    let receive = receive(request.into_body(), &quota, rejected);
    let received = match timeout(DEADLINE, receive).await {
        Ok(received) => received?,
        Err(_) => return Err(too_slow()),
    };
    drop(receiving);
    if received.bytes.len() <= SMALL_BYTES {
        return read(&serving, &tenant, JsonObject::check(&received.bytes)?);
    }
    let queue_place = quota.queue_place().map_err(rejected)?;
    let parser = quota.parser().await;
    let parsed = spawn_blocking(move || {
        // The closure holds all permits until the body is parsed, even if the client leaves.
        let _permits = (parser, queue_place);
        let received = received;
        read(&serving, &tenant, JsonObject::check(&received.bytes)?)
    });
    parsed
        .await
        .unwrap_or_else(|_| Err(ApiError::internal("parsing a request body panicked")))
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

/// A body, and the permit for its bytes.
#[derive(Default)]
struct ReceivedBody {
    bytes: Vec<u8>,
    permit: Option<BodyPermit>,
}

impl ReceivedBody {
    /// Adds `frame` if the quota allows it.
    fn add(&mut self, frame: &[u8], quota: &BodyQuota) -> Result<(), BodyLimitReached> {
        let more = quota.bytes(frame.len())?;
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            permit => *permit = Some(more),
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }
}

async fn receive(
    body: Body,
    quota: &BodyQuota,
    rejected: impl Fn(BodyLimitReached) -> ApiError,
) -> Result<ReceivedBody, ApiError> {
    let mut result = Ok(ReceivedBody::default());
    let (mut received, mut in_period) = (0, 0);
    let mut period_end = Instant::now() + PERIOD;
    let mut frames = body.into_data_stream();
    loop {
        let frame = match timeout_at(period_end, frames.next()).await {
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
        // Setting an error frees the bytes received so far; the rest of the body is discarded.
        if received > MAX_BODY_BYTES {
            result = Err(ApiError::too_large(MAX_BODY_BYTES));
        } else if let Ok(body) = &mut result
            && let Err(limit) = body.add(&frame, quota)
        {
            result = Err(rejected(limit));
        }
    }
    result
}

fn too_slow() -> ApiError {
    ApiError::body_too_slow(DEADLINE, MIN_PERIOD_BYTES, PERIOD)
}
