//! A request's body: its declared kind, its size, its deadline, and where the work of reading it is done.
//!
//! Invariants: a body that is not small is parsed, rendered and tokenised on a blocking thread, in its turn; every body has its room
//! (`room.rs`) while it arrives, and every byte from when it comes until it has been read.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::authentication::Caller;
use super::body_limits::{BodyLimitReached, BodyPermit, BodyQuota};
use super::error::ApiError;
use super::{App, Serving};
use crate::tenants::Tenant;

const MAX_BODY_BYTES: usize = 2 << 20;
/// A client that sends too much still gets its answer if it is done by then; many read only after they have written.
const MAX_DISCARDED_BYTES: usize = 8 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// So little that it is read at once, where it is.
const SMALL_BYTES: usize = 1 << 10;

/// Reads the body of `request` with `read`.
///
/// # Errors
/// Those of `read`; the wrong kind of content, too much of it, too slowly; JSON that is none; too many bodies at once.
pub(super) async fn read<T: Send + 'static>(
    app: &App,
    caller: &Caller,
    request: Request,
    read: fn(&Serving, &Tenant, &Value) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let serving = Arc::clone(app.serving()?);
    if !declares_json(request.headers()) {
        return Err(ApiError::content_type());
    }
    let tenant = Arc::clone(&caller.tenant);
    let share = app.inner.body_limits.quota(&tenant);
    let turned_away = |full: BodyLimitReached| {
        let number = tenant.number.0;
        serving.metrics.rejected(number, full.label());
        ApiError::from(full)
    };
    // What finds none is not read, else it would hold its connection all the same.
    let arriving = share.arriving().map_err(turned_away)?;
    let collecting = collect(request.into_body(), &share, turned_away);
    let received = match timeout(DEADLINE, collecting).await {
        Ok(received) => received?,
        Err(_) => {
            return Err(ApiError::body_incomplete(
                "The body did not arrive in time.",
            ));
        }
    };
    drop(arriving);
    if received.bytes.len() <= SMALL_BYTES {
        return read(&serving, &tenant, &parse(&received.bytes)?);
    }
    let place = share.place().map_err(turned_away)?;
    let turn = share.turn().await;
    let done = spawn_blocking(move || {
        let _kept = (turn, place); // To the end of the work, as `received` is, also when the client leaves meanwhile.
        let received = received;
        read(&serving, &tenant, &parse(&received.bytes)?)
    });
    done.await
        .unwrap_or_else(|_| Err(ApiError::internal("reading a body panicked")))
}

fn declares_json(headers: &HeaderMap) -> bool {
    let declared = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let kind = declared
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// A body, and its room.
#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    room: Option<BodyPermit>,
}

impl Received {
    /// Adds `frame` if there is room for it.
    fn add(&mut self, frame: &[u8], share: &BodyQuota) -> Result<(), BodyLimitReached> {
        let more = share.bytes(frame.len())?;
        match &mut self.room {
            Some(room) => room.merge(more),
            room => *room = Some(more),
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }
}

async fn collect(
    body: Body,
    share: &BodyQuota,
    turned_away: impl Fn(BodyLimitReached) -> ApiError,
) -> Result<Received, ApiError> {
    let mut kept = Ok(Received::default());
    let mut received = 0;
    let mut frames = body.into_data_stream();
    while let Some(frame) = frames.next().await {
        let frame = frame.map_err(|_| ApiError::body_incomplete("The body ended early."))?;
        received += frame.len();
        if received > MAX_DISCARDED_BYTES {
            break;
        }
        // What was kept is given up as soon as it is known to be refused.
        if received > MAX_BODY_BYTES {
            kept = Err(ApiError::too_large(MAX_BODY_BYTES));
        } else if let Ok(so_far) = &mut kept
            && let Err(full) = so_far.add(&frame, share)
        {
            kept = Err(turned_away(full));
        }
    }
    kept
}

/// The nesting is bounded by the parser, at 128.
fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    if bytes.is_empty() {
        return Err(ApiError::invalid_json(
            "The body is empty; it must be a JSON object.",
        ));
    }
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::invalid_json(format!("The body is not valid JSON: {error}.")))
}
