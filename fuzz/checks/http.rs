//! Sends bytes to a listening server, over a connection of their own.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use sterna::api::{self, ConnectionLimits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::SERVER;

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(20);

static ADDRESS: LazyLock<SocketAddr> = LazyLock::new(|| {
    let (runtime, server) = &*SERVER;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
    let listener = listener.expect("a free port");
    let address = listener.local_addr().expect("a bound address");
    let never = std::future::pending();
    let limits = ConnectionLimits::default();
    runtime.spawn(api::serve(listener, server.router.clone(), limits, never));
    address
});

/// Checks that the server closes the connection of a client that has sent everything, and that
/// whatever it answers is HTTP.
pub fn check(data: &[u8]) {
    let address = *ADDRESS;
    let answer = async { timeout(LIMIT, exchange(address, data)).await };
    let answer = SERVER.0.block_on(answer).expect("the connection ends");
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1."),
        "{answer:?}"
    );
}

/// Sends `data` and returns what comes back until the connection ends or breaks.
async fn exchange(address: SocketAddr, data: &[u8]) -> Vec<u8> {
    let client = TcpStream::connect(address).await;
    let (mut input, mut output) = client.expect("the server accepts").into_split();
    let mut answer = Vec::new();
    let send = async {
        // The server may have answered and closed before it has read everything.
        let _ = output.write_all(data).await;
        let _ = output.shutdown().await;
    };
    let _ = tokio::join!(send, input.read_to_end(&mut answer));
    answer
}
