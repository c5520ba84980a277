//! The HTTP client. It keeps connections open for the next request. It uses no proxy, which would
//! add its own latency to the measurement, and follows no redirect.

use std::error::Error;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use hyper::http::request::Builder;
use hyper::http::uri::Scheme;
use hyper::{Request, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;

use super::outcome::Failure;
use super::stream::code_of;

/// The time without an answer after which a connection is probed, and between two probes. After
/// three probes it has failed.
const KEEPALIVE: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 3;

/// A client of one server.
pub(super) struct HttpClient {
    connections: Client<HttpConnector, String>,
    base: String,
}

/// The body of an answer with status 200. It may still be arriving.
pub(super) struct AnswerBody(Incoming);

impl HttpClient {
    /// Creates a client of the server at `base`, to which the path of each request is added.
    pub(super) fn new(base: String) -> Result<HttpClient, Failure> {
        let address: Uri = base.parse().map_err(|error| connection(&error))?;
        if address.scheme() != Some(&Scheme::HTTP) {
            let advice = "give an address that begins with http:// (there is no TLS)";
            return Err(Failure::Connection(advice.into()));
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_keepalive(Some(KEEPALIVE));
        connector.set_keepalive_interval(Some(KEEPALIVE));
        connector.set_keepalive_retries(Some(KEEPALIVE_PROBES));
        let connections = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .build(connector);
        Ok(HttpClient { connections, base })
    }

    /// Sends a GET request. `key` is an API key.
    pub(super) async fn get(
        &self,
        path: &str,
        key: Option<&String>,
    ) -> Result<AnswerBody, Failure> {
        let request = Request::get(format!("{}{path}", self.base));
        self.send(request, key, String::new()).await
    }

    /// Sends a POST request with a body in JSON.
    pub(super) async fn post(
        &self,
        path: &str,
        key: Option<&String>,
        body: &Value,
    ) -> Result<AnswerBody, Failure> {
        let request = Request::post(format!("{}{path}", self.base));
        let request = request.header(CONTENT_TYPE, "application/json");
        self.send(request, key, body.to_string()).await
    }

    /// Every status except 200 is a failure.
    async fn send(
        &self,
        mut request: Builder,
        key: Option<&String>,
        body: String,
    ) -> Result<AnswerBody, Failure> {
        request = request.header(ACCEPT, "*/*");
        if let Some(key) = key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(body).map_err(|error| connection(&error))?;
        let response = self.connections.request(request).await;
        let response = response.map_err(|error| connection(&error))?;
        let status = response.status();
        let answer = AnswerBody(response.into_body());
        if status != StatusCode::OK {
            let body = answer.rest().await?;
            return Err(Failure::Status(status.as_u16(), error_code(&body)));
        }
        Ok(answer)
    }
}

impl AnswerBody {
    /// Returns the next piece of the body as soon as it arrives, or `None` at the end.
    pub(super) async fn piece(&mut self) -> Result<Option<Bytes>, Failure> {
        while let Some(frame) = self.0.frame().await {
            if let Ok(piece) = frame.map_err(|error| connection(&error))?.into_data() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Returns the rest of the body.
    pub(super) async fn rest(self) -> Result<Bytes, Failure> {
        let body = self.0.collect().await;
        Ok(body.map_err(|error| connection(&error))?.to_bytes())
    }
}

/// Returns the innermost cause, such as "connection refused". The outer ones repeat the address.
fn connection(error: &(dyn Error + 'static)) -> Failure {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    Failure::Connection(cause.to_string())
}

/// Returns the code of an OpenAI error body, or the start of any other body.
fn error_code(body: &[u8]) -> String {
    match serde_json::from_slice::<Value>(body) {
        Ok(value) if value.get("error").is_some() => code_of(&value["error"]),
        _ => String::from_utf8_lossy(body).chars().take(80).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[test]
    fn addresses_without_http_are_refused_before_the_first_request() {
        for address in ["https://127.0.0.1:1", "127.0.0.1:1", "localhost", ""] {
            let refused = HttpClient::new(address.into()).err();
            assert!(
                matches!(&refused, Some(Failure::Connection(_))),
                "{address}: {refused:?}"
            );
        }
        let refused = HttpClient::new("https://127.0.0.1:1".into()).err().unwrap();
        assert!(refused.to_string().contains("http://"), "{refused}");
    }

    #[tokio::test]
    async fn the_next_request_uses_the_same_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            for path in ["/first ", "/second "] {
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    head.push(socket.read_u8().await.unwrap().into());
                }
                assert!(head.contains(path), "{head}");
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                socket.write_all(answer).await.unwrap();
            }
        });
        let client = HttpClient::new(base).unwrap();
        for path in ["/first", "/second"] {
            let answer = client.get(path, None).await.ok().unwrap();
            assert_eq!(answer.rest().await.unwrap(), "ok");
        }
        server.await.unwrap();
    }
}
