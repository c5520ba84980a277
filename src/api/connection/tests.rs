//! Connections over pipes, in virtual time.

use std::sync::{Mutex, Weak};
use std::time::Duration;

use axum::routing::get;
use futures_util::stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::super::app::App;
use super::super::head_check;
use super::*;

/// Returns the client's end of a connection whose buffer holds 1024 bytes.
fn connect(router: Router) -> (DuplexStream, JoinHandle<()>, watch::Sender<()>) {
    let (client, server) = duplex(1024);
    let (stopping, stopped) = watch::channel(());
    let connection = async move {
        let progress = Arc::new(Progress::new());
        serve_connection(
            server,
            router,
            &ConnectionLimits::default(),
            progress,
            stopped,
        )
        .await
    };
    (client, tokio::spawn(connection), stopping)
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

/// Returns the responses to all bytes that `client` sends, which must end the connection.
async fn responses(mut client: DuplexStream, request: &str) -> String {
    client.write_all(request.as_bytes()).await.unwrap();
    let mut responses = String::new();
    client.read_to_string(&mut responses).await.unwrap();
    responses
}

/// Writes a byte each second until the connection has ended.
async fn dribble(mut client: DuplexStream, connection: JoinHandle<()>) {
    let dribbling = async {
        while client.write_all(b"x").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
        std::future::pending().await
    };
    tokio::select! {
        ended = connection => ended.unwrap(),
        () = dribbling => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_that_arrives_too_slowly_ends_the_connection() {
    for beginning in ["", "GET / HTTP/1.1\r\nhost: x\r\nx-slow: "] {
        let (mut client, connection, _stopping) = connect(Router::new());
        let start = Instant::now();
        client.write_all(beginning.as_bytes()).await.unwrap();
        connection.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), 10, "{beginning:?}");
    }
    let (mut client, connection, _stopping) = connect(Router::new());
    let start = Instant::now();
    client.write_all(b"GET /").await.unwrap();
    dribble(client, connection).await;
    assert_eq!(start.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_kept_longer_than_a_slow_head() {
    let (mut client, connection, _stopping) = connect(Router::new());
    let start = Instant::now();
    let mut response = [0; 1024];
    for _ in 0..2 {
        client.write_all(GET).await.unwrap();
        assert!(client.read(&mut response).await.unwrap() > 0);
        assert!(response.starts_with(b"HTTP/1.1 404 "));
        sleep(Duration::from_secs(70)).await;
    }
    client.write_all(GET).await.unwrap();
    assert!(client.read(&mut response).await.unwrap() > 0);
    assert_eq!(client.read(&mut response).await.unwrap(), 0);
    connection.await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 70 + 70 + 75);

    let (mut client, connection, _stopping) = connect(Router::new());
    client.write_all(GET).await.unwrap();
    assert!(client.read(&mut response).await.unwrap() > 0);
    sleep(Duration::from_secs(60)).await;
    let start = Instant::now();
    dribble(client, connection).await;
    assert_eq!(
        start.elapsed().as_secs(),
        10,
        "from the first byte of the head"
    );
}

#[tokio::test]
async fn a_head_that_proxies_may_read_differently_is_rejected() {
    let checked = Router::new()
        .route("/", get(async || "fine").post(async |_: String| "fine"))
        .layer(axum::middleware::from_fn_with_state(
            App::loading(),
            head_check::check,
        ));
    let length = "content-length: 5\r\n";
    let chunked = "Transfer-Encoding: chunked\r\n";
    for (version, fields, expected) in [
        ("1.1", "host: x\r\n".to_owned(), "200"),
        ("1.0", String::new(), "200"),
        ("1.1", String::new(), "400"),
        ("1.1", "host: x\r\nhost: x\r\n".to_owned(), "400"),
        ("1.0", "host: x\r\nhost: x\r\n".to_owned(), "400"),
        ("1.1", format!("host: x\r\n{length}{chunked}"), "400"),
        ("1.1", format!("host: x\r\n{chunked}{length}"), "400"),
        (
            "1.1",
            format!("host: x\r\n{length}content-length: 6\r\n"),
            "400",
        ),
    ] {
        let (client, connection, _stopping) = connect(checked.clone());
        let head = format!("GET / HTTP/{version}\r\nconnection: close\r\n{fields}\r\n");
        let responses = responses(client, &head).await;
        let status = responses.split(' ').nth(1);
        assert_eq!(status, Some(expected), "{version} {fields:?}");
        connection.await.unwrap();
    }
    let ambiguous = format!("POST / HTTP/1.1\r\nhost: x\r\n{length}{chunked}\r\n0\r\n\r\n");
    let smuggled = String::from_utf8(GET.to_vec()).unwrap();
    let (client, connection, _stopping) = connect(checked.clone());
    let in_chunks = format!("POST / HTTP/1.1\r\nhost: x\r\n{chunked}\r\n0\r\n\r\n");
    let together = responses(client, &(in_chunks + &ambiguous)).await;
    assert_eq!(together.matches("HTTP/1.1 400 ").count(), 1, "{together}");
    assert!(together.contains("follows a chunked one"), "{together}");
    connection.await.unwrap();
    let (client, _connection, _stopping) = connect(checked);
    let responses = responses(client, &(smuggled.clone() + &ambiguous + &smuggled)).await;
    assert_eq!(responses.matches("HTTP/1.1 200 ").count(), 1, "{responses}");
    assert_eq!(responses.matches("HTTP/1.1 400 ").count(), 1, "{responses}");
    assert!(responses.contains("'transfer-encoding'"), "{responses}");
    assert!(
        responses.contains("\r\nconnection: close\r\n"),
        "{responses}"
    );
}

#[tokio::test]
async fn a_head_that_is_too_large_is_rejected() {
    let (client, connection, _stopping) = connect(Router::new());
    let head = format!(
        "GET / HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n",
        "x".repeat(17 << 10)
    );
    let (mut reader, mut writer) = tokio::io::split(client);
    let writing = tokio::spawn(async move { writer.write_all(head.as_bytes()).await });
    let mut response = String::new();
    reader.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 431 "), "{response}");
    drop(reader);
    connection.await.unwrap();
    drop(writing.await.unwrap());
}

/// Returns a router whose response never ends. What it returns lives as long as the response.
fn endless() -> (Router, Weak<()>) {
    let alive = Arc::new(());
    let held = Arc::downgrade(&alive);
    let alive = Mutex::new(Some(alive));
    let respond = move || {
        let alive = alive.lock().unwrap().take();
        async move {
            let frames = stream::repeat_with(move || {
                let _held_by_the_body = &alive;
                Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 100]))
            });
            Body::from_stream(frames)
        }
    };
    let respond = Arc::new(respond);
    let handler = get(move || respond());
    (Router::new().route("/", handler), held)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stalls_is_disconnected_and_its_response_dropped() {
    let (router, held) = endless();
    let (mut client, connection, _stopping) = connect(router);
    let start = Instant::now();
    client.write_all(GET).await.unwrap();
    connection.await.unwrap();
    assert_eq!(start.elapsed().as_secs(), 30);
    assert_eq!(held.strong_count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_slowly_is_disconnected() {
    for (bytes, pause, expected) in [(700, 29, 30), (600, 1, 300), (100, 1, 30)] {
        let (router, held) = endless();
        let (mut client, connection, _stopping) = connect(router);
        let start = Instant::now();
        client.write_all(GET).await.unwrap();
        let mut read = vec![0; bytes];
        while client.read_exact(&mut read).await.is_ok() {
            sleep(Duration::from_secs(pause)).await;
            if connection.is_finished() {
                break;
            }
        }
        connection.await.unwrap();
        let elapsed = start.elapsed().as_secs();
        assert!(
            (expected..expected + pause + 1).contains(&elapsed),
            "{bytes}: {elapsed} s"
        );
        assert_eq!(held.strong_count(), 0);
    }
}

#[tokio::test]
async fn stopping_ends_idle_connections_at_once() {
    let (_client, connection, stopping) = connect(Router::new());
    drop(stopping);
    connection.await.unwrap();
}

/// Before, the clock of a request's latencies began when its body had arrived.
#[tokio::test(start_paused = true)]
async fn a_request_arrives_with_its_first_byte() {
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&arrivals);
    let handler = move |request: Request| async move {
        let arrived = Instant::from_std(arrival(&request));
        seen.lock().unwrap().push(arrived);
        drop(axum::body::to_bytes(request.into_body(), 100).await);
    };
    let router = Router::new().route("/", axum::routing::post(handler));
    let (mut client, server) = duplex(1024);
    let opened = Instant::now();
    let progress = Arc::new(Progress::new());
    // The first request is there before the server reads.
    let request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok";
    client.write_all(request).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    let (stopping, stopped) = watch::channel(());
    let connection = tokio::spawn(async move {
        let limits = ConnectionLimits::default();
        serve_connection(server, router, &limits, progress, stopped).await;
    });
    let mut response = [0; 1024];
    assert!(client.read(&mut response).await.unwrap() > 0);
    sleep(Duration::from_secs(2)).await;
    let second = Instant::now();
    for part in [&request[..1], &request[1..30], &request[30..]] {
        client.write_all(part).await.unwrap();
        sleep(Duration::from_secs(2)).await;
    }
    assert!(client.read(&mut response).await.unwrap() > 0);
    drop((client, stopping));
    connection.await.unwrap();
    assert_eq!(*arrivals.lock().unwrap(), [opened, second]);
}
