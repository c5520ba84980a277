//! An HTTP client for tests of a server behind a socket.

use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Builder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Error};
use hyper_util::rt::TokioExecutor;

/// An answer whose body may still be arriving.
pub(crate) type Response = hyper::Response<Incoming>;

/// A client that keeps its connections open for the next request.
pub(crate) struct Client(legacy::Client<HttpConnector, String>);

impl Client {
    pub(crate) fn new() -> Client {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Client(legacy::Client::builder(TokioExecutor::new()).build(connector))
    }

    /// Sends `request` with `body`, which is empty or JSON. Returns when the head has arrived.
    pub(crate) async fn send(&self, mut request: Builder, body: String) -> Result<Response, Error> {
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        self.0.request(request.body(body).unwrap()).await
    }
}

/// Returns the next piece of the body as soon as it arrives, or `None` at the end.
pub(crate) async fn piece(response: &mut Response) -> Option<Bytes> {
    let frame = response.body_mut().frame().await?;
    Some(frame.unwrap().into_data().expect("a body has no trailers"))
}

/// Returns the rest of the body.
pub(crate) async fn text(response: Response) -> String {
    let body = response.into_body().collect().await.unwrap();
    String::from_utf8(body.to_bytes().to_vec()).unwrap()
}
