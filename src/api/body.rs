//! A request's body: its declared kind, its size, its deadline, and where the work of reading it is done.
//!
//! Invariant: a body that is not small is parsed, rendered and tokenised on a blocking thread, and only a few of them at a time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::error::ApiError;
use super::{App, Serving};

const MOST_BYTES: usize = 2 << 20;
/// A client that sends too much still gets its answer if it is done by then; many read only after they have written.
const MOST_BYTES_SWALLOWED: usize = 8 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// So little that it is read at once, where it is.
const SMALL_BYTES: usize = 8 << 10;

/// Reads the body of `request` with `read`.
///
/// # Errors
/// Those of `read`; the wrong kind of content, too much of it, too slowly; JSON that is none.
pub(super) async fn read<T: Send + 'static>(
    app: &App,
    request: Request,
    read: fn(&Serving, &Value) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let serving = Arc::clone(app.serving()?);
    if !declares_json(request.headers()) {
        return Err(ApiError::content_type());
    }
    let bytes = match timeout(DEADLINE, collect(request.into_body())).await {
        Ok(bytes) => bytes?,
        Err(_) => {
            return Err(ApiError::body_incomplete(
                "The body did not arrive in time.",
            ));
        }
    };
    let small = bytes.len() <= SMALL_BYTES;
    let work = move || read(&serving, &parse(&bytes)?);
    if small {
        return work();
    }
    let readers = Arc::clone(&app.inner.readers);
    let permit = readers
        .acquire_owned()
        .await
        .expect("the semaphore is never closed");
    let done = spawn_blocking(move || {
        let _permit = permit; // Kept to the end of the work, also when the client leaves meanwhile.
        work()
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

async fn collect(body: Body) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    let mut received = 0;
    let mut frames = body.into_data_stream();
    while let Some(frame) = frames.next().await {
        let frame = frame.map_err(|_| ApiError::body_incomplete("The body ended early."))?;
        received += frame.len();
        if received <= MOST_BYTES {
            bytes.extend_from_slice(&frame);
        } else if received > MOST_BYTES_SWALLOWED {
            break;
        }
    }
    if received > MOST_BYTES {
        Err(ApiError::too_large(MOST_BYTES))
    } else {
        Ok(bytes)
    }
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
