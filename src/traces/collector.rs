//! The collector of traces: its URL, and the HTTP client that sends to it.

use std::env;
use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT};
use ureq::Agent;
use ureq::http::Uri;

const FLAG: &str = "--otlp-endpoint";
/// Where a collector takes traces.
const PATH: &str = "/v1/traces";
const SEND_LIMIT: Duration = Duration::from_secs(10);
const MAX_RESPONSE_BYTES: u64 = 1 << 16;

/// Returns the URL to which traces go: from the flag, or from the variables of OpenTelemetry.
/// `None` means no traces.
///
/// # Errors
/// If the URL is invalid.
pub(super) fn endpoint(flag: Option<&str>) -> Result<Option<String>, String> {
    endpoint_in(flag, |name| env::var(name).ok())
}

fn endpoint_in(
    flag: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, String> {
    let variable = |name| variable(name).filter(|value| !value.is_empty());
    if variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(None);
    }
    let with_path = |base: &str| format!("{}{PATH}", base.trim_end_matches('/'));
    let (name, url) = if let Some(base) = flag {
        (FLAG, with_path(base))
    } else if let Some(url) = variable(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) {
        (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, url)
    } else if let Some(base) = variable(OTEL_EXPORTER_OTLP_ENDPOINT) {
        (OTEL_EXPORTER_OTLP_ENDPOINT, with_path(&base))
    } else {
        return Ok(None);
    };
    let parsed = url.parse::<Uri>().ok().filter(|parsed| {
        let is_http = matches!(parsed.scheme_str(), Some("http" | "https"));
        is_http && parsed.host().is_some_and(|host| !host.is_empty())
    });
    match parsed {
        Some(_) => Ok(Some(url)),
        None => Err(format!(
            "{name}: '{url}' is no URL of a collector that takes OTLP over HTTP. Give one such as \
             http://localhost:4318"
        )),
    }
}

/// Sends batches of spans. Blocks the thread of the batches, which does nothing else.
#[derive(Debug)]
pub(super) struct CollectorClient(Agent);

impl CollectorClient {
    pub(super) fn new() -> CollectorClient {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("sterna/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(SEND_LIMIT))
            .build();
        CollectorClient(config.new_agent())
    }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let response = self.0.run(Request::from_parts(head, body.to_vec()))?;
        let (head, body) = response.into_parts();
        let body = body.into_with_config().limit(MAX_RESPONSE_BYTES);
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_the_variables() {
        const TRACES: &str = OTEL_EXPORTER_OTLP_TRACES_ENDPOINT;
        const ALL: &str = OTEL_EXPORTER_OTLP_ENDPOINT;
        let base = "http://otel:4318";
        let url = Some("http://otel:4318/v1/traces");
        for (flag, variables, expected) in [
            (None, vec![], None),
            (None, vec![(ALL, "")], None),
            (Some(base), vec![], url),
            (Some("http://otel:4318/"), vec![(TRACES, "http://b/c")], url),
            (None, vec![(ALL, base)], url),
            (
                None,
                vec![(ALL, base), (TRACES, "https://b/c")],
                Some("https://b/c"),
            ),
            (Some(base), vec![("OTEL_SDK_DISABLED", "true")], None),
        ] {
            let find = |name: &str| {
                let found = variables.iter().find(|(own, _)| *own == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let found = endpoint_in(flag, find);
            assert_eq!(
                found,
                Ok(expected.map(str::to_owned)),
                "{flag:?} {variables:?}"
            );
        }
    }

    #[test]
    fn what_is_no_url_is_an_error_that_names_its_origin() {
        for text in [
            "localhost:4318",
            "otel",
            "grpc://otel:4317",
            "http://",
            "http://a b",
        ] {
            let error = endpoint_in(Some(text), |_| None).unwrap_err();
            assert!(error.starts_with("--otlp-endpoint: '"), "{error}");
            let error = endpoint_in(None, |_| Some(text.to_owned())).unwrap_err();
            assert!(
                error.starts_with("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: '"),
                "{error}"
            );
        }
    }
}
