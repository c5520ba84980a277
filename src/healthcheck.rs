//! `sterna healthcheck`: asks a server whether it accepts requests, for containers that have no
//! `curl`.

use std::error::Error;
use std::time::Duration;

use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::runtime;
use tokio::time::timeout;

use crate::config::HealthcheckConfig;

/// The port of a URL that names none.
const HTTP_PORT: u16 = 80;
/// The server answers within a step. One that takes longer cannot be used either.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// Asks the server once.
///
/// # Errors
/// If the answer is not 200, or if none comes within 3 seconds. The error says which.
pub fn run(config: &HealthcheckConfig) -> Result<(), Box<dyn Error>> {
    let url = &config.url()?;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let status = runtime.block_on(async { timeout(ANSWERS_WITHIN, status(url)).await });
    match status {
        Ok(Ok(StatusCode::OK)) => Ok(()),
        Ok(Ok(status)) => Err(format!("{url} answers {status}").into()),
        Ok(Err(error)) => Err(format!("{url}: {error}").into()),
        Err(_) => Err(format!("{url} does not answer within {ANSWERS_WITHIN:?}").into()),
    }
}

/// Returns the status of the answer to `GET`.
async fn status(url: &Uri) -> Result<StatusCode, Box<dyn Error>> {
    let (Some("http"), Some(authority)) = (url.scheme_str(), url.authority()) else {
        return Err("this is no URL; give one such as http://127.0.0.1:30000/ready".into());
    };
    let host = authority.host().trim_start_matches('[');
    let address = (
        host.trim_end_matches(']'),
        authority.port_u16().unwrap_or(HTTP_PORT),
    );
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let request = Request::get(path)
        .header(HOST, authority.as_str())
        .body(String::new())?;
    // The answer comes while the connection is driven.
    tokio::select! {
        answer = sender.send_request(request) => Ok(answer?.status()),
        Err(error) = connection => Err(error.into()),
    }
}
