//! Sends bytes to a listening server, over a connection of their own.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::LazyLock;
use std::time::Duration;

use sterna::api::{self, ConnectionLimits};
use tokio::net::TcpListener;

use super::SERVER;

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
    let mut client = TcpStream::connect(*ADDRESS).expect("the server accepts");
    let limit = Some(Duration::from_secs(20));
    client.set_read_timeout(limit).expect("a time limit");
    // The server may have answered and closed before it has read everything.
    let sent = client
        .write_all(data)
        .and_then(|()| client.shutdown(Shutdown::Write));
    let mut answer = Vec::new();
    match client.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => {
            let kind = error.kind();
            let waited = [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut];
            assert!(
                !waited.contains(&kind),
                "the connection stays open: {sent:?}"
            );
        }
    }
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1."),
        "{answer:?}"
    );
}
