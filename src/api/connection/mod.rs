//! One connection: its limits, its requests, and the end of each.
//!
//! Invariant: a connection is limited in time and memory (`io.rs`).
//!
//! Invariant: a response that the server sends before the request's body has arrived says
//! `connection: close`. The server then discards the rest (`linger.rs`), so that a client that
//! writes its whole request before it reads finds the response.
//!
//! Every error has OpenAI's shape, with one exception: the HTTP library answers input that is not
//! HTTP/1 (400) and a request head that is too large (431). Those responses have neither a body nor
//! an `x-request-id`.

mod head_scan;
mod io;
mod limits;
mod linger;
pub(in crate::api) mod listener;
pub(in crate::api) mod open_connections;
mod progress;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::response::{IntoResponse, Response};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tower::ServiceExt;

use crate::api::error::ApiError;
use crate::api::ids::{REQUEST_ID, random_id};
use io::ConnectionIo;

pub use limits::ConnectionLimits;
pub(super) use linger::Linger;
pub(super) use progress::{Phase, Progress};

/// Serves the requests of one connection until it ends or the sender of `stopped` is dropped.
pub(super) async fn serve_connection(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
    limits: &ConnectionLimits,
    progress: Arc<Progress>,
    mut stopped: watch::Receiver<()>,
) {
    let of_service = Arc::clone(&progress);
    let service =
        service_fn(move |request| respond(router.clone(), request, Arc::clone(&of_service)));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        // `ConnectionIo` has the limits of each, and ends the connection first.
        .header_read_timeout(limits.idle_timeout + limits.header_timeout)
        .max_buf_size(limits.buffer_bytes);
    let io = TokioIo::new(ConnectionIo::new(io, limits, progress));
    let mut connection = std::pin::pin!(builder.serve_connection(io, service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

async fn respond(
    router: Router,
    request: Request<Incoming>,
    progress: Arc<Progress>,
) -> Result<Response, Infallible> {
    let has_ended = request.body().is_end_stream();
    progress.begin_request(if has_ended {
        Phase::Response
    } else {
        Phase::Body
    });
    let mut request = request.map(|body| {
        let progress = Arc::clone(&progress);
        Body::new(RequestBody { body, progress })
    });
    if let Some(fault) = head_fault(&request, &progress) {
        request.extensions_mut().insert(fault);
    }
    request.extensions_mut().insert(Arc::clone(&progress));
    let (mut response, is_last) = tokio::select! {
        response = router.oneshot(request) => (response?, false),
        () = progress.evicted() => (too_many_connections(), true),
    };
    if is_last || progress.phase() == Phase::Body {
        // The client does not know where the unread rest of its request would end.
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    Ok(response.map(|body| Body::new(ResponseBody { body, progress })))
}

/// Returns when the first byte of a request arrived. A request that comes from no connection
/// arrives now.
pub(super) fn arrival(request: &Request) -> std::time::Instant {
    let progress = request.extensions().get::<Arc<Progress>>();
    progress.map_or_else(std::time::Instant::now, |progress| {
        progress.request_began().into_std()
    })
}

/// Answers a request whose connection gives way to a new one.
fn too_many_connections() -> Response {
    let mut response = ApiError::too_many_connections().into_response();
    let id = HeaderValue::try_from(random_id("req-")).expect("hexadecimal digits are printable");
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Why the head of a request is not valid. The router answers it with 400.
#[derive(Clone, Copy)]
pub(in crate::api) struct HeadFault(pub(in crate::api) &'static str);

fn head_fault(request: &Request, progress: &Progress) -> Option<HeadFault> {
    let hosts = request.headers().get_all(header::HOST).iter().count();
    let fault = if progress.is_ambiguous() {
        "The request has both 'content-length' and 'transfer-encoding'. Send one of them."
    } else if progress.is_unscanned() {
        "The request follows a chunked one in the same packet. Wait for the response first."
    } else if hosts > 1 {
        "The request has more than one 'host' header. Send one."
    } else if hosts == 0 && request.version() >= Version::HTTP_11 {
        "The request has no 'host' header. Send one."
    } else {
        return None;
    };
    Some(HeadFault(fault))
}

/// A request's body. The client awaits the response as soon as the body has ended; until then, all
/// input belongs to the body.
struct RequestBody {
    body: Incoming,
    progress: Arc<Progress>,
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.progress.enter(Phase::Response);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response's body. After it, the client awaits no response.
struct ResponseBody {
    body: Body,
    progress: Arc<Progress>,
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // After an early response, the connection ends while its client may still send the body.
        if self.progress.phase() == Phase::Response {
            self.progress.enter(Phase::Idle);
        }
    }
}

#[cfg(test)]
mod tests;
