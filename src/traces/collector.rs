//! The collector of traces: its URL, and the HTTP client that sends to it.

use std::env;
use std::ops::RangeInclusive;
use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT};
use ureq::Agent;
use ureq::http::Uri;

const FLAG: &str = "--otlp-endpoint";
const DISABLED: &str = "OTEL_SDK_DISABLED";
const PROTOCOLS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
];
const PROTOCOL: &str = "http/protobuf";
const EXPORTER: &str = "OTEL_TRACES_EXPORTER";
const COMPRESSION: &str = "OTEL_EXPORTER_OTLP_COMPRESSION";
const DELAY: &str = "OTEL_BSP_SCHEDULE_DELAY";
/// The milliseconds between two batches. With 0 the thread that sends them would never rest.
const DELAYS: RangeInclusive<u64> = 10..=3_600_000;
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];
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

/// Returns whether a variable of OpenTelemetry turns traces off, whatever the flags say.
pub(super) fn is_disabled() -> bool {
    env::var(DISABLED).is_ok_and(|value| value.eq_ignore_ascii_case("true"))
        || env::var(EXPORTER).is_ok_and(|value| value == "none")
}

/// Checks the variables of OpenTelemetry whose wrong values the SDK would pass over in silence.
/// `has_share` says whether a flag replaces those of the sampler.
///
/// # Errors
/// If one asks for what this program does not have. The error names the variable.
pub(super) fn check_variables(has_share: bool) -> Result<(), String> {
    check_variables_in(has_share, |name| env::var(name).ok())
}

fn check_variables_in(
    has_share: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(), String> {
    let variable = |name| variable(name).filter(|value| !value.is_empty());
    for name in PROTOCOLS {
        if let Some(value) = variable(name).filter(|value| value != PROTOCOL) {
            return Err(format!(
                "{name}: '{value}' is not supported; {PROTOCOL} is, usually on port 4318"
            ));
        }
    }
    for (name, only) in [(EXPORTER, "otlp"), (COMPRESSION, "none")] {
        if let Some(value) = variable(name).filter(|value| value != only) {
            return Err(format!("{name}: '{value}' is not supported; '{only}' is"));
        }
    }
    let delay = variable(DELAY).map(|text| text.parse::<u64>());
    if delay.is_some_and(|delay| !delay.is_ok_and(|delay| DELAYS.contains(&delay))) {
        let (least, most) = (DELAYS.start(), DELAYS.end());
        return Err(format!(
            "{DELAY}: must be from {least} to {most} milliseconds"
        ));
    }
    let (Some(sampler), false) = (variable(SAMPLER), has_share) else {
        return Ok(());
    };
    if !SAMPLERS.contains(&sampler.as_str()) {
        let known = SAMPLERS.join(", ");
        return Err(format!(
            "{SAMPLER}: there is no '{sampler}'; there are {known}"
        ));
    }
    let share = variable(SAMPLER_ARG);
    let is_share = |text: &String| text.parse().is_ok_and(|share| (0.0..=1.0).contains(&share));
    if sampler.ends_with("ratio") && !share.as_ref().is_some_and(is_share) {
        let found = share.unwrap_or_default();
        return Err(format!(
            "{SAMPLER_ARG}: must be a number from 0 to 1 for {sampler}; got '{found}'"
        ));
    }
    Ok(())
}

fn endpoint_in(
    flag: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, String> {
    let variable = |name| variable(name).filter(|value| !value.is_empty());
    let with_path = |base: &str| format!("{}{PATH}", base.trim_end_matches('/'));
    let (name, url) = if let Some(base) = flag.filter(|base| !base.is_empty()) {
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
        let has_query = parsed.query().is_some();
        is_http && !has_query && parsed.host().is_some_and(|host| !host.is_empty())
    });
    // What stands before an @ may be a password.
    let shown = url.rsplit('@').next().unwrap_or_default();
    match parsed {
        Some(_) => Ok(Some(url)),
        None => Err(format!(
            "{name}: '{shown}' is no URL of a collector that takes OTLP over HTTP. Give one such \
             as http://localhost:4318"
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
        let response = self.0.run(Request::from_parts(head, body.to_vec()));
        let response = response
            .inspect_err(|error| tracing::debug!(%error, "the collector did not answer"))?;
        let (head, body) = response.into_parts();
        let body = body.into_with_config().limit(MAX_RESPONSE_BYTES);
        // The status says enough. With an error, the batch would be sent again.
        let body = body.read_to_vec().unwrap_or_default();
        Ok(Response::from_parts(head, body.into()))
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
            (Some(""), vec![], None),
            (Some("http://otel:4318/"), vec![(TRACES, "http://b/c")], url),
            (None, vec![(ALL, base)], url),
            (
                None,
                vec![(ALL, base), (TRACES, "https://b/c")],
                Some("https://b/c"),
            ),
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
    fn variables_that_ask_for_something_else_are_errors() {
        let check = |has_share, variables: &[(&str, &str)]| {
            check_variables_in(has_share, |name| {
                let found = variables.iter().find(|(own, _)| *own == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        for wrong in [
            &[(PROTOCOLS[0], "grpc")][..],
            &[(PROTOCOLS[1], "http/json")],
            &[(SAMPLER, "xray")],
            &[(EXPORTER, "zipkin")],
            &[(COMPRESSION, "gzip")],
            &[(DELAY, "0")],
            &[(DELAY, "soon")],
            &[(SAMPLER_ARG, "2"), (SAMPLER, "traceidratio")],
            &[(SAMPLER_ARG, ""), (SAMPLER, "parentbased_traceidratio")],
        ] {
            let error = check(false, wrong).unwrap_err();
            assert!(error.starts_with(wrong[0].0), "{error}");
        }
        for right in [
            &[][..],
            &[(PROTOCOLS[0], PROTOCOL), (SAMPLER, "always_off")],
            &[(SAMPLER, "traceidratio"), (SAMPLER_ARG, "0.5")],
        ] {
            assert_eq!(check(false, right), Ok(()), "{right:?}");
        }
        assert_eq!(check(true, &[(SAMPLER, "xray")]), Ok(()), "the flag wins");
    }

    #[test]
    fn what_is_no_url_is_an_error_that_names_its_origin() {
        for text in [
            "localhost:4318",
            "otel",
            "grpc://otel:4317",
            "http://",
            "http://a b",
            "http://a/?b=c",
        ] {
            let error = endpoint_in(Some(text), |_| None).unwrap_err();
            assert!(error.starts_with("--otlp-endpoint: '"), "{error}");
            let with_password = text.replacen("://", "://me:secret@", 1);
            let error = endpoint_in(Some(&with_password), |_| None).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
            let error = endpoint_in(None, |_| Some(text.to_owned())).unwrap_err();
            assert!(
                error.starts_with("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: '"),
                "{error}"
            );
        }
    }
}
