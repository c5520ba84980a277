//! What can go wrong with a request, as a status code and OpenAI's error body.
//!
//! Invariants: no other file chooses a status code for a failure; what a client sent is quoted only in part; no internals are told.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::body_limits::BodyLimitReached;
use crate::engine::{RateKind, Refusal, SubmitError};

/// Characters of a client's own words that an error repeats.
const MAX_QUOTED_CHARS: usize = 64;
/// When there may be room for a body again.
const RETRY_SOON: Duration = Duration::from_secs(1);
/// When a server that drains or loads may be worth another try.
const RETRY_LATER: Duration = Duration::from_secs(5);

/// A failed request.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
}

const INVALID: &str = "invalid_request_error";
const OVERLOADED: &str = "overloaded_error";
const RATE_LIMIT: &str = "rate_limit_error";

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    fn about(mut self, param: impl Into<String>) -> ApiError {
        self.param = Some(param.into());
        self
    }

    fn retry_after(mut self, delay: Duration) -> ApiError {
        self.retry_after = Some(delay);
        self
    }

    /// `param` is not what it must be; `message` says what that is.
    pub(super) fn invalid_value(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, "invalid_value", message).about(param)
    }

    /// The server knows `param`, but can't do what it asks.
    pub(super) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            INVALID,
            "unsupported_parameter",
            message,
        )
        .about(param)
    }

    /// The body is no JSON object.
    pub(super) fn invalid_json(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, "invalid_json", message)
    }

    /// `param` is longer than the model can take.
    pub(super) fn context_length(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            INVALID,
            "context_length_exceeded",
            message,
        )
        .about(param)
    }

    /// The checkpoint brought no chat template.
    pub(super) fn no_chat_template(model: &str) -> ApiError {
        let message = format!(
            "The model '{model}' has no chat template (neither `chat_template` in its tokenizer_config.json nor a \
             chat_template.jinja), so it can't chat. Its completions work: POST /v1/completions."
        );
        ApiError::new(
            StatusCode::BAD_REQUEST,
            INVALID,
            "chat_template_missing",
            message,
        )
        .about("messages")
    }

    /// Another model than the one that is served, which is named to those who may use it.
    pub(super) fn model_not_found(asked: &str, served: Option<&str>) -> ApiError {
        let asked = quoted(asked);
        let message = match served {
            Some(served) => {
                format!("The model {asked} does not exist; this server has '{served}'.")
            }
            None => format!("The model {asked} does not exist."),
        };
        ApiError::new(StatusCode::NOT_FOUND, INVALID, "model_not_found", message).about("model")
    }

    /// The model that is served, which the tenant may not use.
    pub(super) fn model_not_allowed(asked: Option<&str>) -> ApiError {
        let message = match asked {
            Some(asked) => format!("Your key may not use the model {}.", quoted(asked)),
            None => "Your key may not use the model of this server.".to_owned(),
        };
        ApiError::new(
            StatusCode::FORBIDDEN,
            "permission_error",
            "model_not_allowed",
            message,
        )
        .about("model")
    }

    /// No such route.
    pub(super) fn not_found(method: &str, path: &str) -> ApiError {
        let message = format!("There is no {} {}.", quoted(method), quoted(path));
        ApiError::new(StatusCode::NOT_FOUND, INVALID, "not_found", message)
    }

    /// The route exists for other methods.
    pub(super) fn method_not_allowed(method: &str, path: &str) -> ApiError {
        let message = format!("{} is not allowed on {}.", quoted(method), quoted(path));
        ApiError::new(
            StatusCode::METHOD_NOT_ALLOWED,
            INVALID,
            "method_not_allowed",
            message,
        )
    }

    /// The body has more than `limit` bytes.
    pub(super) fn too_large(limit: usize) -> ApiError {
        let message = format!("The body is larger than {limit} bytes.");
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            INVALID,
            "request_too_large",
            message,
        )
    }

    /// The body is not declared to be JSON.
    pub(super) fn content_type() -> ApiError {
        let message = "The body must be JSON, with the header content-type: application/json.";
        ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            INVALID,
            "unsupported_content_type",
            message,
        )
    }

    /// The body ended early, or came too slowly.
    pub(super) fn body_incomplete(message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            INVALID,
            "request_timeout",
            message,
        )
    }

    /// The model is not there yet.
    pub(super) fn loading() -> ApiError {
        let message = "The server is still loading its model.";
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "loading",
            message,
        )
        .retry_after(RETRY_LATER)
    }

    /// The server is shutting down.
    pub(super) fn draining() -> ApiError {
        let message = "The server is shutting down and takes no new requests.";
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "draining",
            message,
        )
        .retry_after(RETRY_LATER)
    }

    /// Too much is under way already.
    pub(super) fn overloaded(retry_after: Duration) -> ApiError {
        let message =
            "The server is overloaded: too many requests wait already. Please try again later.";
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "engine_overloaded",
            message,
        )
        .retry_after(retry_after)
    }

    /// No key, or none that is known.
    pub(super) fn invalid_key(given: bool) -> ApiError {
        let message = match given {
            true => "This API key is not valid.",
            false => {
                "An API key is needed: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
            }
        };
        ApiError::new(
            StatusCode::UNAUTHORIZED,
            "authentication_error",
            "invalid_api_key",
            message,
        )
    }

    /// The tenant has used up a rate of its own.
    fn rate_limited(rate: RateKind, retry_after: Duration) -> ApiError {
        let rate = match rate {
            RateKind::Requests => "requests",
            RateKind::Tokens => "tokens",
        };
        let message = format!(
            "Your {rate} per minute are used up. Please try again in {:.3} seconds.",
            retry_after.as_secs_f64()
        );
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            RATE_LIMIT,
            "rate_limit_exceeded",
            message,
        )
        .retry_after(retry_after)
    }

    /// Too much of the tenant's own waits.
    fn tenant_queue_full(retry_after: Duration) -> ApiError {
        let message =
            "Too many of your requests wait already. Please wait for some of them to end.";
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            RATE_LIMIT,
            "concurrency_limit",
            message,
        )
        .retry_after(retry_after)
    }

    /// Too many bytes of the tenant's own, or too many of its bodies, have come and are not read yet.
    fn tenant_bodies_full() -> ApiError {
        let message = "Too much that you have sent is not read yet. Please let some of your requests arrive before you send more.";
        ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            RATE_LIMIT,
            "concurrency_limit",
            message,
        )
        .retry_after(RETRY_SOON)
    }

    /// It would begin too late to be of use.
    fn too_late(retry_after: Duration) -> ApiError {
        let message = "The server is overloaded: your first token would come later than your requests allow. Please try again later.";
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            OVERLOADED,
            "engine_overloaded",
            message,
        )
        .retry_after(retry_after)
    }

    /// It could never begin in time, however little else there is to do.
    fn never_in_time() -> ApiError {
        let message = "Computing this prompt alone takes longer than your requests may wait for their first token. Please reduce its \
                       length.";
        ApiError::context_length("messages", message)
    }

    /// It took longer than its tenant, or the server, lets a request take.
    pub(super) fn too_slow() -> ApiError {
        let message = "The request took longer than it may, and was ended.";
        ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            "timeout_error",
            "deadline_exceeded",
            message,
        )
    }

    /// The engine's thread is gone, and only a restart brings it back. Asked for again and again, so it is not logged here.
    pub(super) fn dead() -> ApiError {
        let message = "The server's engine has died; the server must be restarted.";
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "server_error",
            "engine_dead",
            message,
        )
    }

    /// A bug or a broken machine; the reason belongs into the log, not to the client.
    pub(super) fn internal(why: &str) -> ApiError {
        tracing::error!(why, "a request failed");
        let message = "The server failed on this request. The response's x-request-id names it in the server's log.";
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "server_error",
            "internal_error",
            message,
        )
    }

    /// The error, as in a body or in a stream.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::Refused(refusal) => refusal.into(),
            SubmitError::UnknownToken(token) => {
                ApiError::invalid_value("prompt", format!("The model has no token {token}."))
            }
            SubmitError::InvalidSampling(name) => {
                ApiError::invalid_value(name, format!("'{name}' is not a usable number."))
            }
            SubmitError::Dead => ApiError::internal("the engine is dead"),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let after = Duration::from_micros;
        match refusal {
            Refusal::Overloaded { retry_after } => ApiError::overloaded(after(retry_after)),
            Refusal::RateLimited { rate, retry_after } => {
                ApiError::rate_limited(rate, after(retry_after))
            }
            Refusal::TenantQueueFull { retry_after } => {
                ApiError::tenant_queue_full(after(retry_after))
            }
            Refusal::Deadline {
                retry_after: Some(retry_after),
            } => ApiError::too_late(after(retry_after)),
            Refusal::Deadline { retry_after: None } => ApiError::never_in_time(),
            Refusal::TooLong {
                needed_tokens,
                limit_tokens,
            } => ApiError::context_length(
                "max_tokens",
                format!(
                    "Prompt and output would take {needed_tokens} tokens; this server has memory \
                     for {limit_tokens}."
                ),
            ),
            Refusal::EmptyPrompt => ApiError::invalid_value("prompt", "The prompt has no tokens."),
            Refusal::NothingToGenerate => {
                ApiError::invalid_value("max_tokens", "'max_tokens' is not a usable number.")
            }
            Refusal::Draining => ApiError::draining(),
        }
    }
}

impl From<BodyLimitReached> for ApiError {
    fn from(full: BodyLimitReached) -> ApiError {
        match full {
            BodyLimitReached::Tenant => ApiError::tenant_bodies_full(),
            BodyLimitReached::Server => ApiError::overloaded(RETRY_SOON),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.body().to_string();
        let mut response = (
            self.status,
            [(header::CONTENT_TYPE, "application/json")],
            body,
        )
            .into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(delay) = self.retry_after {
            let millis = u64::try_from(delay.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
            headers.insert(
                header::RETRY_AFTER,
                HeaderValue::from(millis.div_ceil(1000).max(1)),
            );
            headers.insert("retry-after-ms", HeaderValue::from(millis));
        }
        response
    }
}

/// A client's own words, in quotes and cut short.
pub(super) fn quoted(text: &str) -> String {
    let mut chars = text.chars();
    let short: String = chars.by_ref().take(MAX_QUOTED_CHARS).collect();
    let ellipsis = if chars.next().is_some() { "…" } else { "" };
    format!("'{short}{ellipsis}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_finds_a_queue_full_is_told_whose() {
        let retry_after = 1_000_000;
        let told = |refusal| ApiError::from(refusal).body()["error"]["message"].to_string();
        let own = told(Refusal::TenantQueueFull { retry_after });
        assert!(own.contains("of your requests wait"), "{own}");
        let all = told(Refusal::Overloaded { retry_after });
        assert!(
            all.contains("server is overloaded: too many requests wait"),
            "{all}"
        );
    }

    #[test]
    fn refusals_have_their_status_and_say_when_to_come_back() {
        let retry_after = 1_500_200;
        let requests = RateKind::Requests;
        for (refusal, status, kind, code, told) in [
            (
                Refusal::RateLimited {
                    rate: requests,
                    retry_after,
                },
                429,
                RATE_LIMIT,
                "rate_limit_exceeded",
                Some(("2", "1501")),
            ),
            (
                Refusal::TenantQueueFull { retry_after },
                429,
                RATE_LIMIT,
                "concurrency_limit",
                Some(("2", "1501")),
            ),
            (
                Refusal::Overloaded { retry_after },
                503,
                OVERLOADED,
                "engine_overloaded",
                Some(("2", "1501")),
            ),
            (
                Refusal::Deadline {
                    retry_after: Some(0),
                },
                503,
                OVERLOADED,
                "engine_overloaded",
                Some(("1", "0")),
            ),
            (
                Refusal::Deadline { retry_after: None },
                400,
                INVALID,
                "context_length_exceeded",
                None,
            ),
            (
                Refusal::Draining,
                503,
                OVERLOADED,
                "draining",
                Some(("5", "5000")),
            ),
            (Refusal::EmptyPrompt, 400, INVALID, "invalid_value", None),
        ] {
            let error = ApiError::from(refusal);
            assert_eq!(error.body()["error"]["type"], kind, "{refusal:?}");
            assert_eq!(error.body()["error"]["code"], code, "{refusal:?}");
            let answer = error.into_response();
            assert_eq!(answer.status(), status, "{refusal:?}");
            let header = |name| {
                answer
                    .headers()
                    .get(name)
                    .and_then(|value| value.to_str().ok())
            };
            let found = header("retry-after").zip(header("retry-after-ms"));
            assert_eq!(found, told, "{refusal:?}");
        }
        let late = ApiError::too_slow();
        assert_eq!(late.body()["error"]["type"], "timeout_error");
        assert_eq!(late.into_response().status(), 504);
    }
}
