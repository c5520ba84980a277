//! The errors of the API: status code, OpenAI's error body and headers.
//!
//! Invariant: no other file chooses the status code of an error.
//!
//! Invariant: a message quotes at most `MAX_QUOTED_CHARS` characters of a client's text. What the
//! compiler of grammars says is bounded there.
//!
//! Invariant: a message reveals no internals of the server.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::constraint::GrammarError;
use crate::engine::{NoRoom, RateKind, Refusal, SubmitError};

/// The maximum length of a client's text in a message, in characters.
pub(super) const MAX_QUOTED_CHARS: usize = 64;
/// The retry delay for a full body buffer, which empties quickly.
const RETRY_SOON: Duration = Duration::from_secs(1);
/// The retry delay for a server that is loading or shutting down, or has no free connection.
const RETRY_LATER: Duration = Duration::from_secs(5);

/// The status code, `type` and `code` of an error.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ErrorClass {
    status: u16,
    kind: &'static str,
    code: &'static str,
}

const fn class(status: u16, kind: &'static str, code: &'static str) -> ErrorClass {
    ErrorClass { status, kind, code }
}

const INVALID: &str = "invalid_request_error";
const OVERLOADED: &str = "overloaded_error";
const RATE_LIMIT: &str = "rate_limit_error";
const SERVER: &str = "server_error";

const INVALID_VALUE: ErrorClass = class(400, INVALID, "invalid_value");
const UNSUPPORTED: ErrorClass = class(400, INVALID, "unsupported_parameter");
const INVALID_JSON: ErrorClass = class(400, INVALID, "invalid_json");
const MALFORMED: ErrorClass = class(400, INVALID, "malformed_request");
const CONTEXT: ErrorClass = class(400, INVALID, "context_length_exceeded");
const NO_TEMPLATE: ErrorClass = class(400, INVALID, "chat_template_missing");
const DEAD_END: ErrorClass = class(400, INVALID, "grammar_dead_end");
const INVALID_KEY: ErrorClass = class(401, "authentication_error", "invalid_api_key");
const FORBIDDEN: ErrorClass = class(403, "permission_error", "model_not_allowed");
const NOT_ADMIN: ErrorClass = class(403, "permission_error", "admin_key_required");
const NOT_TENANT: ErrorClass = class(403, "permission_error", "tenant_key_required");
const FOREIGN_HOST: ErrorClass = class(403, "permission_error", "host_not_allowed");
const ABORTED: ErrorClass = class(403, "permission_error", "request_aborted");
const NO_MODEL: ErrorClass = class(404, INVALID, "model_not_found");
const NO_ENDPOINT: ErrorClass = class(404, INVALID, "not_found");
const NO_REQUEST: ErrorClass = class(404, INVALID, "request_not_found");
const METHOD: ErrorClass = class(405, INVALID, "method_not_allowed");
const TIMEOUT: ErrorClass = class(408, INVALID, "request_timeout");
const TOO_LARGE: ErrorClass = class(413, INVALID, "request_too_large");
const CONTENT_TYPE: ErrorClass = class(415, INVALID, "unsupported_content_type");
const RATE: ErrorClass = class(429, RATE_LIMIT, "rate_limit_exceeded");
const QUOTA: ErrorClass = class(429, RATE_LIMIT, "concurrency_limit");
const INTERNAL: ErrorClass = class(500, SERVER, "internal_error");
const LOADING: ErrorClass = class(503, OVERLOADED, "loading");
const DRAINING: ErrorClass = class(503, OVERLOADED, "draining");
const BUSY: ErrorClass = class(503, OVERLOADED, "engine_overloaded");
const CONNECTIONS: ErrorClass = class(503, OVERLOADED, "too_many_connections");
const DEAD: ErrorClass = class(503, SERVER, "engine_dead");
const DEADLINE: ErrorClass = class(504, "timeout_error", "deadline_exceeded");

/// All classes, for the OpenAPI document.
const CLASSES: &[ErrorClass] = &[
    INVALID_VALUE,
    UNSUPPORTED,
    INVALID_JSON,
    MALFORMED,
    CONTEXT,
    NO_TEMPLATE,
    DEAD_END,
    INVALID_KEY,
    FORBIDDEN,
    NOT_ADMIN,
    NOT_TENANT,
    FOREIGN_HOST,
    ABORTED,
    NO_MODEL,
    NO_ENDPOINT,
    NO_REQUEST,
    METHOD,
    TIMEOUT,
    TOO_LARGE,
    CONTENT_TYPE,
    RATE,
    QUOTA,
    INTERNAL,
    LOADING,
    DRAINING,
    BUSY,
    CONNECTIONS,
    DEAD,
    DEADLINE,
];

/// Returns the `type` and `code` of each error with this status.
pub(super) fn classes_of(status: u16) -> impl Iterator<Item = (&'static str, &'static str)> {
    let classes = CLASSES.iter().filter(move |class| class.status == status);
    classes.map(|class| (class.kind, class.code))
}

/// The body of an error.
#[derive(Serialize, ToSchema)]
pub(super) struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

/// What went wrong.
#[derive(Serialize, ToSchema)]
struct ErrorObject<'a> {
    /// What is wrong, where, and what to do.
    message: &'a str,
    /// The class of the error.
    #[serde(rename = "type")]
    kind: &'a str,
    /// The field that is wrong, by its path, such as `messages[1].role`.
    param: Option<&'a str>,
    /// The name of the error.
    code: &'a str,
}

/// A failed request.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    class: ErrorClass,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
}

impl ApiError {
    fn new(class: ErrorClass, message: impl Into<String>) -> ApiError {
        ApiError {
            class,
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

    /// The field `param` has an invalid value. `message` says which values are valid.
    pub(super) fn invalid_value(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(INVALID_VALUE, message).about(param)
    }

    /// The server knows the field `param` but does not support its value.
    pub(super) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(UNSUPPORTED, message).about(param)
    }

    /// The body is not a JSON object.
    pub(super) fn invalid_json(message: impl Into<String>) -> ApiError {
        ApiError::new(INVALID_JSON, message)
    }

    /// The head of the request is not valid HTTP. `message` says why.
    pub(super) fn malformed_request(message: &str) -> ApiError {
        ApiError::new(MALFORMED, message)
    }

    /// The prompt in the field `param` contains no tokens.
    pub(super) fn empty_prompt(param: &str) -> ApiError {
        ApiError::invalid_value(param, "The prompt contains no tokens.")
    }

    /// The field `param` does not fit the model's context of `limit` tokens.
    ///
    /// `found` says what the request needs and how to shorten it.
    pub(super) fn context_length(param: &str, limit: u32, found: &str) -> ApiError {
        let message = format!("This model's maximum context length is {limit} tokens. {found}");
        ApiError::new(CONTEXT, message).about(param)
    }

    /// The model has no chat template.
    pub(super) fn no_chat_template(model: &str) -> ApiError {
        let message = format!(
            "The model '{model}' cannot chat because it has no chat template: neither \
             `chat_template` in its tokenizer_config.json nor a chat_template.jinja. \
             Use POST /v1/completions instead."
        );
        ApiError::new(NO_TEMPLATE, message).about("messages")
    }

    /// The model generates text and computes no embeddings.
    pub(super) fn no_embeddings(model: &str) -> ApiError {
        let message = format!(
            "The model '{model}' generates text and computes no embeddings. Use a server of an \
             embedding model: one without an output head."
        );
        ApiError::unsupported("model", message)
    }

    /// The model computes embeddings and generates no text.
    pub(super) fn no_text(model: &str) -> ApiError {
        let message = format!(
            "The model '{model}' computes embeddings and generates no text. \
             Use POST /v1/embeddings."
        );
        ApiError::unsupported("model", message)
    }

    /// The server does not serve the model `requested`.
    ///
    /// The message names the `served` model, which is `None` if the tenant may not use it.
    pub(super) fn model_not_found(requested: &str, served: Option<&str>) -> ApiError {
        let requested = quoted(requested);
        let message = match served {
            Some(served) => {
                format!("The model {requested} does not exist. This server serves '{served}'.")
            }
            None => format!("The model {requested} does not exist."),
        };
        ApiError::new(NO_MODEL, message).about("model")
    }

    /// The tenant may not use the served model.
    pub(super) fn model_not_allowed(requested: Option<&str>) -> ApiError {
        let message = match requested {
            Some(requested) => {
                format!("Your API key may not use the model {}.", quoted(requested))
            }
            None => "Your API key may not use the model of this server.".to_owned(),
        };
        ApiError::new(FORBIDDEN, message).about("model")
    }

    /// The request names a host that is not one of the server's names.
    pub(super) fn host_not_allowed(host: &str) -> ApiError {
        let message = format!(
            "This server does not answer to the host {}. Use one of its own names or addresses, \
             or start it with --allowed-host.",
            quoted(host)
        );
        ApiError::new(FOREIGN_HOST, message)
    }

    /// The path does not exist.
    pub(super) fn not_found(method: &str, path: &str) -> ApiError {
        let endpoint = quoted(&format!("{method} {path}"));
        ApiError::new(NO_ENDPOINT, format!("There is no endpoint {endpoint}."))
    }

    /// The path exists for other methods only.
    pub(super) fn method_not_allowed(method: &str, path: &str) -> ApiError {
        let message = format!(
            "{} does not support the method {}. The 'allow' header lists the supported methods.",
            quoted(path),
            quoted(method)
        );
        ApiError::new(METHOD, message)
    }

    /// The body has more than `limit` bytes.
    pub(super) fn too_large(limit: usize) -> ApiError {
        let message = format!("The request body may have at most {limit} bytes. Shorten it.");
        ApiError::new(TOO_LARGE, message)
    }

    /// The body has more than `limit` values.
    pub(super) fn too_many_values(limit: usize) -> ApiError {
        let message = format!(
            "The request body may have at most {limit} JSON values, names of fields included. The \
             numbers of a prompt do not count; JSON in a string counts. Shorten it."
        );
        ApiError::new(TOO_LARGE, message)
    }

    /// The request does not declare its body as JSON.
    pub(super) fn content_type() -> ApiError {
        let message =
            "The request body must be JSON. Set the header 'content-type: application/json'.";
        ApiError::new(CONTENT_TYPE, message)
    }

    /// The connection ended before the body did.
    pub(super) fn body_incomplete() -> ApiError {
        let message = "The request body ended early. Send the request again.";
        ApiError::new(TIMEOUT, message)
    }

    /// The body did not arrive within `deadline`, or brought less than `bytes` bytes in `period`.
    pub(super) fn body_too_slow(deadline: Duration, bytes: usize, period: Duration) -> ApiError {
        let message = format!(
            "The request body arrives too slowly. Send it within {} seconds, and at least {bytes} \
             bytes in each {} seconds.",
            deadline.as_secs(),
            period.as_secs()
        );
        ApiError::new(TIMEOUT, message)
    }

    /// The server is still loading its model.
    pub(super) fn loading() -> ApiError {
        let message = "The server is still loading its model. Retry later.";
        ApiError::new(LOADING, message).retry_after(RETRY_LATER)
    }

    /// The server is shutting down.
    pub(super) fn draining() -> ApiError {
        let message = "The server is shutting down and accepts no new requests. Retry later.";
        ApiError::new(DRAINING, message).retry_after(RETRY_LATER)
    }

    /// The server, or the client's address, has too many open connections.
    pub(super) fn too_many_connections() -> ApiError {
        let message = "The server has too many open connections. \
                       Close idle connections or retry later.";
        ApiError::new(CONNECTIONS, message).retry_after(RETRY_LATER)
    }

    /// The server's queue is full.
    fn overloaded(retry_after: Duration) -> ApiError {
        let message = "The server is overloaded: too many requests are waiting. Retry later.";
        ApiError::new(BUSY, message).retry_after(retry_after)
    }

    /// Every place of the batch is used.
    pub(super) fn no_slot() -> ApiError {
        let message = "All slots are in use, so a request would wait. Retry later.";
        ApiError::new(BUSY, message).retry_after(RETRY_SOON)
    }

    /// The request has no API key, or one that the server does not know.
    pub(super) fn invalid_key(given: bool) -> ApiError {
        let message = if given {
            "The API key is not valid. Check it and retry."
        } else {
            "This server requires an API key. \
             Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
        };
        ApiError::new(INVALID_KEY, message)
    }

    /// The request does not have the admin key, which `path` needs.
    pub(super) fn no_admin_key(path: &str, has_admin_key: bool) -> ApiError {
        let path = quoted(path);
        let message = match has_admin_key {
            true => format!(
                "{path} shows or changes what all tenants do, so it needs the admin key. Ask the \
                 operator of this server."
            ),
            false => format!(
                "{path} needs the admin key, and this server has none. Start it with \
                 --admin-key-file, or with [admin] in the file of --tenants."
            ),
        };
        ApiError::new(NOT_ADMIN, message)
    }

    /// No request with this id runs or waits.
    pub(super) fn no_such_request(id: &str) -> ApiError {
        let id = quoted(id);
        let message = format!(
            "No request {id} runs or waits. Give the 'id' of its answer, or its x-request-id."
        );
        ApiError::new(NO_REQUEST, message)
    }

    /// The operator has ended the request.
    pub(super) fn aborted() -> ApiError {
        ApiError::new(
            ABORTED,
            "The operator of this server has ended the request.",
        )
    }

    /// The key is the admin key, but the path needs a tenant's key.
    pub(super) fn admin_key() -> ApiError {
        let message = "The admin key serves '/metrics', '/reset_prefix_cache', '/flush_cache' and \
                       '/v1/requests/' only. Use a tenant's key, or none if this server has no \
                       tenants.";
        ApiError::new(NOT_TENANT, message)
    }

    /// The request exceeded a deadline of its tenant or of the server.
    pub(super) fn too_slow() -> ApiError {
        let message = "The request exceeded its deadline, and the server ended it. \
                       Retry later or request fewer tokens.";
        ApiError::new(DEADLINE, message)
    }

    /// The grammar in `field` cannot be compiled, or not soon enough.
    pub(super) fn grammar(field: &str, error: &GrammarError) -> ApiError {
        let message = format!("'{field}' {error}.");
        match error {
            GrammarError::Invalid(_) | GrammarError::TooCostly(_) | GrammarError::TooSlow => {
                ApiError::invalid_value(field, message)
            }
            GrammarError::Busy | GrammarError::NoProcess(_) => {
                ApiError::new(BUSY, message).retry_after(RETRY_SOON)
            }
        }
    }

    /// No token can follow in an answer that follows a grammar.
    pub(super) fn dead_end(why: &str) -> ApiError {
        let message = format!("The answer cannot go on as its grammar demands: {why}.");
        ApiError::new(DEAD_END, message)
    }

    /// The engine's thread has ended, and only a restart brings it back.
    ///
    /// Probes repeat this error, so it is not logged here.
    pub(super) fn dead() -> ApiError {
        let message = "The server's engine has failed. Restart the server.";
        ApiError::new(DEAD, message)
    }

    /// A bug, or a broken machine. Logs `why`, which the client must not see.
    pub(super) fn internal(why: &str) -> ApiError {
        tracing::error!(why, "a request failed");
        let message = "The server failed to process this request. \
                       Its log has the details under this response's x-request-id.";
        ApiError::new(INTERNAL, message)
    }

    /// Returns whether the request itself is at fault, and not the state of server or tenant.
    pub(super) fn is_clients_own(&self) -> bool {
        (400..500).contains(&self.class.status) && self.class.kind != RATE_LIMIT
    }

    /// Returns the name of the error.
    pub(super) fn code(&self) -> &'static str {
        self.class.code
    }

    /// Returns the status code.
    pub(super) fn status(&self) -> u16 {
        self.class.status
    }

    /// Returns what is wrong.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the JSON of the error, for a response's body or a stream.
    pub(super) fn body(&self) -> Value {
        let body = ErrorBody {
            error: ErrorObject {
                message: &self.message,
                kind: self.class.kind,
                param: self.param.as_deref(),
                code: self.class.code,
            },
        };
        serde_json::to_value(body).expect("all keys are strings")
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> ApiError {
        match error {
            SubmitError::Refused(refusal) => refusal.into(),
            SubmitError::UnknownToken(token) => ApiError::invalid_value(
                "prompt",
                format!("The model has no token with the id {token}."),
            ),
            SubmitError::InvalidSampling(name) => {
                ApiError::invalid_value(name, format!("'{name}' is outside its limits."))
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
                let rate = match rate {
                    RateKind::Requests => "requests",
                    RateKind::Tokens => "tokens",
                };
                let delay = after(retry_after);
                let message = format!(
                    "You have used up your {rate} per minute. Retry in {:.3} seconds.",
                    delay.as_secs_f64()
                );
                ApiError::new(RATE, message).retry_after(delay)
            }
            Refusal::TenantQueueFull { retry_after } => {
                let message =
                    "You have too many requests waiting. Wait for some to finish and retry.";
                ApiError::new(QUOTA, message).retry_after(after(retry_after))
            }
            Refusal::Deadline {
                retry_after: Some(retry_after),
            } => {
                let message = "The server is overloaded: your first token would miss its \
                               deadline. Retry later.";
                ApiError::new(BUSY, message).retry_after(after(retry_after))
            }
            Refusal::Deadline { retry_after: None } => {
                let message = "Your prompt is too long: even on an idle server its first token \
                               would miss its deadline. Shorten the prompt.";
                ApiError::new(CONTEXT, message).about("messages")
            }
            Refusal::TooLong {
                needed_tokens,
                limit_tokens,
            } => {
                let message = format!(
                    "Prompt and output need {needed_tokens} tokens; this server has memory for \
                     {limit_tokens}. Shorten the prompt or reduce 'max_tokens'."
                );
                ApiError::new(CONTEXT, message).about("max_tokens")
            }
            Refusal::EmptyPrompt => ApiError::empty_prompt("prompt"),
            Refusal::NothingToGenerate => {
                ApiError::invalid_value("max_tokens", "'max_tokens' must be at least 1; got 0.")
            }
            Refusal::Draining => ApiError::draining(),
        }
    }
}

impl From<NoRoom> for ApiError {
    fn from(limit: NoRoom) -> ApiError {
        match limit {
            NoRoom::OfOwner => {
                let message = "You have too many request bodies in flight. \
                               Wait for some to finish and retry.";
                ApiError::new(QUOTA, message).retry_after(RETRY_SOON)
            }
            NoRoom::OfAll => ApiError::overloaded(RETRY_SOON),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.class.status).expect("a valid status code");
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (status, json, self.body().to_string()).into_response();
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(delay) = self.retry_after {
            let millis = u64::try_from(delay.as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
            let seconds = millis.div_ceil(1000).max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            headers.insert("retry-after-ms", HeaderValue::from(millis));
        }
        // Other APIs have other forms of errors.
        response.extensions_mut().insert(self);
        response
    }
}

/// Returns a client's text in quotes, cut to `MAX_QUOTED_CHARS` characters.
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
    fn the_message_says_whether_the_tenants_or_the_servers_queue_is_full() {
        let retry_after = 1_000_000;
        let message = |refusal| ApiError::from(refusal).body()["error"]["message"].to_string();
        let tenant = message(Refusal::TenantQueueFull { retry_after });
        assert!(
            tenant.contains("You have too many requests waiting"),
            "{tenant}"
        );
        let server = message(Refusal::Overloaded { retry_after });
        assert!(
            server.contains("server is overloaded: too many requests are waiting"),
            "{server}"
        );
    }

    #[test]
    fn each_refusal_has_its_status_type_code_and_retry_delay() {
        let retry_after = 1_500_200;
        let requests = RateKind::Requests;
        for (refusal, status, kind, code, retry_headers) in [
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
            let response = error.into_response();
            assert_eq!(response.status(), status, "{refusal:?}");
            let header = |name| {
                response
                    .headers()
                    .get(name)
                    .and_then(|value| value.to_str().ok())
            };
            let found = header("retry-after").zip(header("retry-after-ms"));
            assert_eq!(found, retry_headers, "{refusal:?}");
        }
        let late = ApiError::too_slow();
        assert_eq!(late.body()["error"]["type"], "timeout_error");
        assert_eq!(late.into_response().status(), 504);
    }
}
