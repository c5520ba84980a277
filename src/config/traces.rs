//! The flags of traces.

use clap::Args;

use super::probability;

/// Where traces go, and how many.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Traces")]
pub struct TraceFlags {
    /// Send traces of requests to a collector of OpenTelemetry, over HTTP, for example to
    /// http://localhost:4318 (see deploy/README.md). The program must be built with the feature
    /// otlp. If omitted, OTEL_EXPORTER_OTLP_ENDPOINT says it.
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Share of the requests that are traced, from 0 to 1. A request with a traceparent follows its
    /// sender instead. If omitted, OTEL_TRACES_SAMPLER says it, and without that all are traced.
    #[arg(long, value_name = "SHARE", value_parser = probability)]
    pub otlp_sample: Option<f32>,
}
