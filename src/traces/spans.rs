//! The spans of a request: their names, times and attributes.
//!
//! They follow the semantic conventions for generative AI:
//! <https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/>. The span of the request is
//! named `chat MODEL`; its children are `grammar`, `queue`, `prefill` and `decode`. Only the
//! request's own span has attributes of tokens, so a sum over all spans counts each token once.

use std::env;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{
    Span, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
    TraceState, Tracer, TracerProvider,
};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_otlp::{WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{
    EnvResourceDetector, ResourceDetector, TelemetryResourceDetector,
};
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};

use super::collector::CollectorClient;
use super::request::{RequestTrace, TraceContext};
use super::span_queue::{SpanCounts, SpanQueue};
use super::{TraceSettings, TraceSink};

/// The name of the program: of its service, its instrumentation and its provider of models.
const STERNA: &str = "sterna";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long the end of the server waits for a collector.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Makes spans of requests, and sends them.
pub(super) struct SpanWriter {
    tracer: SdkTracer,
    provider: SdkTracerProvider,
    counts: Arc<SpanCounts>,
    server: SocketAddr,
}

impl SpanWriter {
    /// Starts the thread that sends spans to `endpoint`.
    ///
    /// # Errors
    /// If a variable of OpenTelemetry asks for what this program does not have.
    pub(super) fn start(
        settings: &TraceSettings<'_>,
        endpoint: String,
    ) -> Result<SpanWriter, String> {
        super::collector::check_variables(settings.sample.is_some())?;
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_endpoint(endpoint)
            .with_http_client(CollectorClient::new())
            .build()
            .map_err(|error| format!("OTLP: {error}"))?;
        let counts = Arc::new(SpanCounts::default());
        let queue = SpanQueue::start(exporter, Arc::clone(&counts));
        let mut provider = SdkTracerProvider::builder()
            .with_resource(resource())
            .with_span_processor(queue);
        if let Some(share) = settings.sample {
            let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(share)));
            provider = provider.with_sampler(sampler);
        }
        let provider = provider.build();
        Ok(SpanWriter {
            tracer: provider.tracer(STERNA),
            provider,
            counts,
            server: settings.server,
        })
    }

    fn attributes(&self, request: &RequestTrace) -> Vec<KeyValue> {
        let mut all = vec![
            KeyValue::new("gen_ai.operation.name", request.operation.name()),
            KeyValue::new("gen_ai.provider.name", STERNA),
            KeyValue::new("http.request.method", "POST"),
            KeyValue::new("http.route", request.endpoint.clone()),
            KeyValue::new("server.address", self.server.ip().to_string()),
            KeyValue::new("server.port", i64::from(self.server.port())),
            KeyValue::new("sterna.request.id", request.request_id.clone()),
            KeyValue::new("sterna.tenant", request.tenant.clone()),
        ];
        let mut add = |name: &'static str, value: Option<Value>| {
            all.extend(value.map(|value| KeyValue::new(name, value)));
        };
        let text = |text: &Option<String>| text.clone().map(Value::from);
        let status = request.status.map(|status| i64::from(status).into());
        add("gen_ai.request.model", text(&request.model));
        add("http.response.status_code", status);
        add("error.type", text(&request.error));
        if let Some(answer) = &request.answer {
            let given = &answer.parameters;
            let unless = |off: f32, value: f32| (value != off).then(|| decimal(value));
            let number = |number: u64| Value::from(i64::try_from(number).unwrap_or(i64::MAX));
            let choices = (given.choices != 1).then(|| i64::from(given.choices).into());
            let top_k = (given.top_k > 0).then(|| i64::from(given.top_k).into());
            add("gen_ai.response.id", text(&answer.id));
            add("gen_ai.request.max_tokens", given.max_tokens.map(number));
            add(
                "gen_ai.request.temperature",
                Some(decimal(given.temperature)),
            );
            add("gen_ai.request.top_p", Some(decimal(given.top_p)));
            add("gen_ai.request.top_k", top_k);
            add(
                "gen_ai.request.frequency_penalty",
                unless(0.0, given.frequency_penalty),
            );
            add(
                "gen_ai.request.presence_penalty",
                unless(0.0, given.presence_penalty),
            );
            add("gen_ai.request.choice.count", choices);
            add(
                "gen_ai.request.stream",
                given.is_stream.then(|| true.into()),
            );
        }
        if let Some(counts) = request.counts {
            add("gen_ai.response.model", text(&request.model));
            let tokens = |tokens: u32| Some(i64::from(tokens).into());
            add("gen_ai.usage.input_tokens", tokens(counts.prompt));
            add(
                "gen_ai.usage.cache_read.input_tokens",
                tokens(counts.cached),
            );
            add("gen_ai.usage.output_tokens", tokens(counts.output));
        }
        let ends: Vec<StringValue> = request.ends.iter().map(|end| (*end).into()).collect();
        let ends = (!ends.is_empty()).then_some(Value::Array(Array::String(ends)));
        add("gen_ai.response.finish_reasons", ends);
        all
    }
}

impl TraceSink for SpanWriter {
    fn record(&self, request: &RequestTrace) {
        let (clock, phases) = (WallClock::now(), &request.phases);
        let sender = request.context.as_ref().and_then(sender_span);
        let parent = match sender {
            Some(sender) => Context::new().with_remote_span_context(sender),
            None => Context::new(),
        };
        let operation = request.operation.name();
        let name = match &request.model {
            Some(model) => format!("{operation} {model}"),
            None => operation.to_owned(),
        };
        let whole = SpanBuilder::from_name(name)
            .with_kind(SpanKind::Server)
            .with_start_time(clock.at(phases.arrived));
        let whole = self.tracer.build_with_context(whole, &parent);
        if !whole.is_recording() {
            return;
        }
        let error = request.error.clone().unwrap_or_default();
        let context = parent.with_span(whole);
        context.span().set_attributes(self.attributes(request));
        for phase in phases.list(request.operation) {
            let span = SpanBuilder::from_name(phase.name)
                .with_kind(SpanKind::Internal)
                .with_start_time(clock.at(phase.began));
            let mut span = self.tracer.build_with_context(span, &context);
            if phase.has_failed && request.error.is_some() {
                span.set_attribute(KeyValue::new("error.type", error.clone()));
                span.set_status(Status::error(error.clone()));
            }
            span.end_with_timestamp(clock.at(phase.ended));
        }
        // The conventions for HTTP: a mistake of the client is no error of the server.
        let is_clients = (request.status).is_some_and(|status| (400..500).contains(&status));
        if request.error.is_some() && !is_clients {
            context.span().set_status(Status::error(error));
        }
        context.span().end_with_timestamp(clock.at(phases.ended));
    }

    fn flush(&self) {
        // A failure is in the counts.
        drop(self.provider.shutdown_with_timeout(FLUSH_LIMIT));
        self.counts.close("the server has ended");
    }
}

/// The times of moments.
#[derive(Clone, Copy)]
struct WallClock {
    moment: Instant,
    time: SystemTime,
}

impl WallClock {
    /// Creates the clock of one request, so that all its spans agree even if the system's time is
    /// set meanwhile.
    fn now() -> WallClock {
        WallClock {
            moment: Instant::now(),
            time: SystemTime::now(),
        }
    }

    fn at(self, moment: Instant) -> SystemTime {
        self.time - self.moment.saturating_duration_since(moment)
    }
}

/// Returns what spans say of this server. The variables of OpenTelemetry win.
fn resource() -> Resource {
    let detectors: [Box<dyn ResourceDetector>; 2] = [
        Box::new(TelemetryResourceDetector),
        Box::new(EnvResourceDetector::new()),
    ];
    let resource = Resource::builder_empty()
        .with_attributes([KeyValue::new("service.version", VERSION)])
        .with_service_name(STERNA)
        .with_detectors(&detectors);
    match env::var("OTEL_SERVICE_NAME")
        .ok()
        .filter(|name| !name.is_empty())
    {
        Some(name) => resource.with_service_name(name).build(),
        None => resource.build(),
    }
}

fn sender_span(sender: &TraceContext) -> Option<SpanContext> {
    let flags = match sender.is_sampled {
        true => TraceFlags::SAMPLED,
        false => TraceFlags::default(),
    };
    let trace = TraceId::from_hex(&sender.trace_id).ok()?;
    let span = SpanId::from_hex(&sender.parent_id).ok()?;
    Some(SpanContext::new(
        trace,
        span,
        flags,
        true,
        TraceState::default(),
    ))
}

/// Returns the number that a client wrote: 0.7, and not the nearest number of 32 bits.
fn decimal(value: f32) -> Value {
    value.to_string().parse().unwrap_or(f64::from(value)).into()
}
