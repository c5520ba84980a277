//! A request's body: its declared kind, its size, its deadline, and where the work of reading it is done.
//!
//! Invariants: a body that is not small is parsed, rendered and tokenised on a blocking thread, only a few of them at a time, and only
//! so many wait for it; all bodies together have a limit of bytes. What is beyond is refused at once.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::error::ApiError;
use super::{App, Serving};

const MOST_BYTES: usize = 2 << 20;
/// A client that sends too much still gets its answer if it is done by then; many read only after they have written.
const MOST_BYTES_SWALLOWED: usize = 8 << 20;
const DEADLINE: Duration = Duration::from_secs(30);
/// So little that it is read at once, where it is.
const SMALL_BYTES: usize = 1 << 10;
/// When a server that has too many bodies may be worth another try.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Reads the body of `request` with `read`.
///
/// # Errors
/// Those of `read`; the wrong kind of content, too much of it, too slowly; JSON that is none; too many bodies at once.
pub(super) async fn read<T: Send + 'static>(
    app: &App,
    request: Request,
    read: fn(&Serving, &Value) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let serving = Arc::clone(app.serving()?);
    if !declares_json(request.headers()) {
        return Err(ApiError::content_type());
    }
    let budget = &app.inner.body_bytes;
    let received = match timeout(DEADLINE, collect(request.into_body(), budget)).await {
        Ok(received) => received?,
        Err(_) => {
            return Err(ApiError::body_incomplete(
                "The body did not arrive in time.",
            ));
        }
    };
    let small = received.bytes.len() <= SMALL_BYTES;
    let work = move || {
        let received = received; // With its part of the budget, to the end of the work.
        read(&serving, &parse(&received.bytes)?)
    };
    if small {
        return work();
    }
    let place = place(&app.inner.reader_places)?;
    let readers = Arc::clone(&app.inner.readers);
    let permit = readers
        .acquire_owned()
        .await
        .expect("the semaphore is never closed");
    let done = spawn_blocking(move || {
        let _kept = (permit, place); // Kept to the end of the work, also when the client leaves meanwhile.
        work()
    });
    done.await
        .unwrap_or_else(|_| Err(ApiError::internal("reading a body panicked")))
}

/// One of the places of those that are read and those that wait for it.
fn place(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(places)
        .try_acquire_owned()
        .map_err(|_| ApiError::overloaded(RETRY_SOON))
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

/// A body, and its part of the budget of all bodies.
#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    part: Option<OwnedSemaphorePermit>,
}

impl Received {
    /// Adds `frame` if the budget has room for it.
    fn add(&mut self, frame: &[u8], budget: &Arc<Semaphore>) -> Result<(), ApiError> {
        let count = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        let more = Arc::clone(budget)
            .try_acquire_many_owned(count)
            .map_err(|_| ApiError::overloaded(RETRY_SOON))?;
        match &mut self.part {
            Some(part) => part.merge(more),
            part => *part = Some(more),
        }
        self.bytes.extend_from_slice(frame);
        Ok(())
    }
}

async fn collect(body: Body, budget: &Arc<Semaphore>) -> Result<Received, ApiError> {
    let mut kept = Ok(Received::default());
    let mut received = 0;
    let mut frames = body.into_data_stream();
    while let Some(frame) = frames.next().await {
        let frame = frame.map_err(|_| ApiError::body_incomplete("The body ended early."))?;
        received += frame.len();
        if received > MOST_BYTES_SWALLOWED {
            break;
        }
        // What was kept is given up as soon as it is known to be refused.
        if received > MOST_BYTES {
            kept = Err(ApiError::too_large(MOST_BYTES));
        } else if let Ok(so_far) = &mut kept
            && let Err(error) = so_far.add(&frame, budget)
        {
            kept = Err(error);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bodies_beyond_the_budget_are_refused_and_give_it_back() {
        let budget = Arc::new(Semaphore::new(100));
        let first = collect(Body::from(vec![b'x'; 60]), &budget).await;
        assert_eq!(budget.available_permits(), 40);
        let second = collect(Body::from(vec![b'x'; 60]), &budget).await;
        let refused = ApiError::overloaded(RETRY_SOON);
        assert_eq!(second.err(), Some(refused));
        let third = collect(Body::from(vec![b'x'; 40]), &budget).await;
        assert_eq!(third.map(|third| third.bytes.len()), Ok(40));
        drop(first);
        assert_eq!(budget.available_permits(), 100);
    }

    #[tokio::test]
    async fn a_body_that_finds_too_many_waiting_is_refused() {
        let places = Arc::new(Semaphore::new(0));
        assert_eq!(place(&places).err(), Some(ApiError::overloaded(RETRY_SOON)));
        places.add_permits(1);
        assert!(place(&places).is_ok());
    }
}
