//! Traces of requests, for a collector that speaks OTLP over HTTP.
//!
//! The API notes the moments of a request, and hands them over once, when the request has ended. A
//! program that is built with the feature `otlp` makes spans of them. Spans that are made while a
//! request runs were rejected: they would need a context on each thread that the request passes.
//!
//! Invariant: a span has no text of a prompt or an answer, and no key.
//!
//! Invariant: the engine thread does nothing for traces, and no request waits for a collector.

#[cfg(feature = "otlp")]
mod collector;
mod request;
#[cfg(feature = "otlp")]
mod span_queue;
#[cfg(feature = "otlp")]
mod spans;

use std::net::SocketAddr;
use std::sync::Arc;

pub use request::{
    GenAiOperation, GrammarPhase, RequestParameters, RequestPhases, RequestTrace, TokenCounts,
    TraceContext, TracePhase, TracedAnswer,
};

/// Where traces go, and how many.
#[derive(Clone, Copy, Debug)]
pub struct TraceSettings<'a> {
    /// The URL of the collector, without `/v1/traces`. If `None`, the variables of OpenTelemetry
    /// say it; without these, there are no traces.
    pub endpoint: Option<&'a str>,
    /// The share of the requests without a `traceparent` that are traced, from 0 to 1. If `None`,
    /// the variables of OpenTelemetry say it.
    pub sample: Option<f64>,
    /// The address of the HTTP interface.
    pub server: SocketAddr,
}

/// Takes the requests that have ended. No method waits for a collector, except `flush`.
pub trait TraceSink: Send + Sync {
    /// Takes a request.
    fn record(&self, request: &RequestTrace);

    /// Sends what has been recorded, within a limit of time. Requests that end later are not
    /// recorded.
    fn flush(&self);
}

/// Starts the thread that sends traces, if there is a collector for them.
///
/// # Errors
/// If a setting is invalid. The error names the flag or the variable.
#[cfg(feature = "otlp")]
pub fn start(settings: &TraceSettings<'_>) -> Result<Option<Arc<dyn TraceSink>>, String> {
    if collector::is_disabled() {
        return Ok(None);
    }
    match collector::endpoint(settings.endpoint)? {
        Some(endpoint) => Ok(Some(Arc::new(spans::SpanWriter::start(
            settings, endpoint,
        )?))),
        None if settings.sample.is_some() => {
            Err("--otlp-sample: there is no collector; give --otlp-endpoint".into())
        }
        None => Ok(None),
    }
}

/// Returns no sink: this program is built without traces.
///
/// # Errors
/// If a flag asks for traces.
#[cfg(not(feature = "otlp"))]
pub fn start(settings: &TraceSettings<'_>) -> Result<Option<Arc<dyn TraceSink>>, String> {
    if settings.endpoint.is_none() && settings.sample.is_none() {
        return Ok(None);
    }
    Err(
        "--otlp-endpoint, --otlp-sample: this program is built without traces. Build it with: \
         cargo build --release --features otlp"
            .into(),
    )
}
