//! What is recorded of each request: a line in the log and a trace, written when its response has
//! been sent or its client has left, and the count of its endpoint and status.
//!
//! Invariant: a line has no text of a prompt or an answer, and no key. Of a client's own words it
//! has the request's id, which is printable and which the log's format quotes.
//!
//! Invariant: the engine thread does nothing for it. The egress thread notes the moments.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use crate::api::app::App;
use crate::api::connection::{Progress, arrival};
use crate::api::error::ApiError;
use crate::engine::StreamAccount;
use crate::traces::{
    GenAiOperation, GrammarPhase, RequestPhases, RequestTrace, TokenCounts, TraceContext,
    TracedAnswer,
};

/// The endpoint of a path that has none.
const UNKNOWN: &str = "unknown";
/// Endpoints that machines read every few seconds. A line about their success is for debugging.
const PROBES: [&str; 3] = ["/health", "/ready", "/metrics"];
/// The `finish` of a request whose client left before the end of the response.
const DISCONNECTED: &str = "disconnected";
/// The `finish` and the status of a request whose connection gave way to another one.
const EVICTED: (&str, u16) = ("too_many_connections", 503);
/// The endpoints whose requests have traces, because they run the model.
const TRACED: [(&str, GenAiOperation); 9] = [
    ("/v1/chat/completions", GenAiOperation::Chat),
    ("/chat/completions", GenAiOperation::Chat),
    ("/v1/responses", GenAiOperation::Chat),
    ("/v1/messages", GenAiOperation::Chat),
    ("/v1/completions", GenAiOperation::TextCompletion),
    ("/completions", GenAiOperation::TextCompletion),
    ("/completion", GenAiOperation::TextCompletion),
    ("/generate", GenAiOperation::TextCompletion),
    ("/v1/embeddings", GenAiOperation::Embeddings),
];

/// What is known of a request, among its extensions. Clones share it.
#[derive(Clone, Default)]
pub(in crate::api) struct RequestLog {
    facts: Arc<Mutex<RequestFacts>>,
}

#[derive(Default)]
struct RequestFacts {
    id: String,
    trace: Option<TraceContext>,
    tenant: Option<String>,
    answer: Option<TracedAnswer>,
    grammar: Option<GrammarPhase>,
    submitted: Option<Instant>,
    generated: Option<GeneratedFacts>,
    failure: Option<&'static str>,
}

/// What is known of the choices of a request.
#[derive(Default)]
struct GeneratedFacts {
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    ended: Option<Instant>,  // The last output that has.
    has_open: bool,          // An output did not end, or failed.
    ends: Vec<&'static str>, // Each once.
}

impl GeneratedFacts {
    /// Returns when the last output ended, if all have.
    fn last_token(&self) -> Option<Instant> {
        self.ended.filter(|_| !self.has_open)
    }
}

impl RequestLog {
    /// Notes the request's id and its sender's trace.
    pub(super) fn identify(&self, id: &str, trace: Option<TraceContext>) {
        let mut facts = self.lock();
        (facts.id, facts.trace) = (id.to_owned(), trace);
    }

    /// Notes whose key the request has.
    pub(in crate::api) fn set_tenant(&self, id: &str) {
        self.lock().tenant = Some(id.to_owned());
    }

    /// Notes what answer the request asks for.
    pub(in crate::api) fn set_answer(&self, answer: TracedAnswer) {
        self.lock().answer = Some(answer);
    }

    /// Notes that the compilation of a grammar begins.
    pub(in crate::api) fn begin_grammar(&self) {
        let began = Instant::now();
        self.lock().grammar = Some(GrammarPhase { began, ended: None });
    }

    /// Notes that the compilation has ended, if one has begun.
    pub(in crate::api) fn end_grammar(&self, has_failed: bool) {
        if let Some(grammar) = &mut self.lock().grammar {
            grammar.ended = Some((Instant::now(), has_failed));
        }
    }

    /// Notes when the engine's handle got the request.
    pub(in crate::api) fn submit(&self, at: Instant) {
        self.lock().submitted = Some(at);
    }

    /// Notes the name of the error that ended the request.
    pub(in crate::api) fn fail(&self, code: &'static str) {
        self.lock().failure.get_or_insert(code);
    }

    /// Adds a prompt.
    pub(in crate::api) fn add_prompt(&self, account: &StreamAccount) {
        let mut facts = self.lock();
        let generated = facts.generated.get_or_insert_default();
        generated.prompt_tokens += account.prompt_tokens;
        generated.cached_tokens += account.cached_tokens;
    }

    /// Adds an output of a prompt, and why it ended if it did.
    pub(in crate::api) fn add_output(
        &self,
        account: &StreamAccount,
        completion_tokens: u32,
        end: Option<&'static str>,
    ) {
        let mut facts = self.lock();
        let generated = facts.generated.get_or_insert_default();
        generated.completion_tokens += completion_tokens;
        let first = |one: Option<Instant>, other| one.into_iter().chain(other).min();
        generated.admitted = first(generated.admitted, account.admitted);
        generated.first_token = first(generated.first_token, account.first_token);
        generated.ended = generated.ended.max(account.ended);
        generated.has_open |= account.ended.is_none();
        if let Some(end) = end.filter(|end| !generated.ends.contains(end)) {
            generated.ends.push(end);
        }
    }

    /// Locks the facts. A thread that panicked with the lock left them valid.
    fn lock(&self) -> MutexGuard<'_, RequestFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the request's line when its response has ended.
pub(in crate::api) async fn record(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Response {
    let log = RequestLog::default();
    let mut line = LogLine {
        log: log.clone(),
        app,
        arrived: arrival(&request),
        is_post: request.method() == Method::POST,
        endpoint: request.extensions().get::<MatchedPath>().cloned(),
        progress: request.extensions().get::<Arc<Progress>>().cloned(),
        status: None,
        is_complete: false,
    };
    request.extensions_mut().insert(log);
    let response = next.run(request).await;
    line.status = Some(response.status().as_u16());
    if let Some(error) = response.extensions().get::<ApiError>() {
        line.log.fail(error.code());
    }
    response.map(|body| Body::new(LoggedBody { body, line }))
}

/// Counts each response in the metrics. While the model loads there are none.
pub(in crate::api) async fn count(
    State(app): State<App>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    if let Ok(serving) = app.serving() {
        let route = route.as_ref().map(MatchedPath::as_str);
        serving.metrics.responded(route, response.status().as_u16());
    }
    response
}

/// A response's body, and the line that follows it.
struct LoggedBody {
    body: Body, // Dropped first: an answer that is cancelled then says what it has computed.
    line: LogLine,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        self.line.is_complete |= frame.is_none();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for LoggedBody {
    fn drop(&mut self) {
        // Nobody polls a body of known length after its last frame.
        self.line.is_complete |= self.body.is_end_stream();
    }
}

/// The line of a request. Dropping it writes it.
struct LogLine {
    log: RequestLog,
    app: App,
    arrived: Instant,
    is_post: bool,
    endpoint: Option<MatchedPath>,
    progress: Option<Arc<Progress>>,
    status: Option<u16>, // `None` until the response has begun.
    is_complete: bool,
}

impl Drop for LogLine {
    fn drop(&mut self) {
        let facts = self.log.lock();
        let generated = facts.generated.as_ref();
        let seconds = |at: Instant| at.saturating_duration_since(self.arrived).as_secs_f64();
        let is_evicted = self.progress.as_ref().is_some_and(|one| one.is_evicted());
        let (finish, status) = match self.status {
            None if is_evicted => (Some(EVICTED.0.to_owned()), Some(EVICTED.1)),
            status if !self.is_complete => (Some(DISCONNECTED.to_owned()), status),
            status => (facts.finish(), status),
        };
        let endpoint = self.endpoint();
        if let Some(traces) = self.app.traces()
            && let Some(trace) = self.trace(&facts, finish.clone(), status)
        {
            traces.record(&trace);
        }
        macro_rules! write {
            ($level:ident) => {
                tracing::$level!(
                    target: "sterna::requests",
                    parent: None,
                    id = facts.id,
                    trace_id = facts.trace.as_ref().map(|trace| trace.trace_id.as_str()),
                    parent_id = facts.trace.as_ref().map(|trace| trace.parent_id.as_str()),
                    tenant = facts.tenant,
                    endpoint,
                    status,
                    finish,
                    prompt_tokens = generated.map(|facts| facts.prompt_tokens),
                    cached_tokens = generated.map(|facts| facts.cached_tokens),
                    completion_tokens = generated.map(|facts| facts.completion_tokens),
                    queue_seconds = generated.and_then(|facts| facts.admitted).map(seconds),
                    first_token_seconds =
                        generated.and_then(|facts| facts.first_token).map(seconds),
                    total_seconds = self.arrived.elapsed().as_secs_f64(),
                    "request"
                )
            };
        }
        if PROBES.contains(&endpoint) && status == Some(200) {
            write!(debug);
        } else {
            write!(info);
        }
    }
}

impl LogLine {
    fn endpoint(&self) -> &str {
        self.endpoint.as_ref().map_or(UNKNOWN, MatchedPath::as_str)
    }

    /// Returns the trace of a request that ends now. Only requests of tenants that run the model
    /// have one: a stranger without a key cannot fill the queue of traces.
    fn trace(
        &self,
        facts: &RequestFacts,
        finish: Option<String>,
        status: Option<u16>,
    ) -> Option<RequestTrace> {
        let endpoint = if self.is_post {
            self.endpoint()
        } else {
            UNKNOWN
        };
        let (_, operation) = TRACED.iter().find(|(path, _)| *path == endpoint)?;
        let generated = facts.generated.as_ref();
        let has_failed = facts.failure.is_some() || !self.is_complete;
        Some(RequestTrace {
            context: facts.trace.clone(),
            operation: *operation,
            endpoint: endpoint.to_owned(),
            model: (self.app.serving().ok()).map(|serving| serving.model.name.clone()),
            tenant: facts.tenant.clone()?,
            request_id: facts.id.clone(),
            answer: facts.answer.clone(),
            counts: generated.map(|generated| TokenCounts {
                prompt: generated.prompt_tokens,
                cached: generated.cached_tokens,
                output: generated.completion_tokens,
            }),
            ends: generated.map_or_else(Vec::new, |generated| generated.ends.clone()),
            phases: RequestPhases {
                arrived: self.arrived,
                grammar: facts.grammar,
                submitted: facts.submitted,
                admitted: generated.and_then(|generated| generated.admitted),
                first_token: generated.and_then(|generated| generated.first_token),
                last_token: generated.and_then(GeneratedFacts::last_token),
                ended: Instant::now(),
            },
            status,
            error: finish.filter(|_| has_failed),
        })
    }
}

impl RequestFacts {
    /// Returns why the request ended: the name of its error, or the ends of its choices.
    fn finish(&self) -> Option<String> {
        if let Some(code) = self.failure {
            return Some(code.to_owned());
        }
        let ends = &self.generated.as_ref()?.ends;
        (!ends.is_empty()).then(|| ends.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_is_known_once_all_outputs_have_ended() {
        let log = RequestLog::default();
        let now = Instant::now();
        let add = |ended| {
            let account = StreamAccount {
                prompt_tokens: 1,
                cached_tokens: 0,
                admitted: Some(now),
                first_token: Some(now),
                ended,
            };
            log.add_output(&account, 1, None);
        };
        let last_token = || log.lock().generated.as_ref().unwrap().last_token();
        add(Some(now));
        assert_eq!(last_token(), Some(now));
        add(None);
        assert_eq!(last_token(), None);
        add(Some(now));
        assert_eq!(last_token(), None);
    }
}
