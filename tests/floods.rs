//! Floods of connections against the server program: idle streams and slow senders.
//!
//! At full size they also check times, and need 13,000 open files (`ulimit -n`):
//! `STERNA_FLOODS=long cargo test --release --test floods -- --nocapture --test-threads 1`

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot unwrap a value has failed"
)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

/// A timeout that only a hanging test reaches.
const PATIENCE: Duration = Duration::from_secs(120);
/// What a stream may hold that waits in the queue.
const MAX_IDLE_BYTES: usize = 24_000;
/// How much longer others may wait beside clients that never read.
const MAX_DELAY: f64 = 1.05;
/// What a client may hold that reads nothing of its stream.
const MAX_UNREAD_BYTES: usize = 64 << 10;
/// What the batch of such streams may need beyond a smaller batch, for its keys and values.
const BATCH_BYTES: usize = 2 << 20;
/// Files that the server may open beside its connections, such as the files of its timers.
const OTHER_FILES: usize = 4;

fn is_long() -> bool {
    std::env::var("STERNA_FLOODS").is_ok_and(|extent| extent == "long")
}

/// Returns the size of a flood.
fn size(short: usize, long: usize) -> usize {
    if is_long() { long } else { short }
}

/// A server process with the demo model. It is killed at the end of the test.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Server {
        let mut process = Command::new(env!("CARGO_BIN_EXE_sterna"))
            .args(["--port", "0", "--threads", "1"])
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines.map_while(Result::ok).find_map(|line| {
            let rest = &line[line.find("http://")? + "http://".len()..];
            rest.split_whitespace().next().map(str::to_owned)
        });
        Server {
            process,
            address: address.expect("the server names its address"),
        }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).await.unwrap()
    }

    /// Returns the median time of some short answers.
    async fn median_answer(&self) -> Duration {
        let mut times = Vec::new();
        for _ in 0..size(5, 201) {
            times.push(self.answer().await);
        }
        times.sort_unstable();
        times[times.len() / 2]
    }

    /// Opens a connection that holds little of what the client does not read.
    async fn connect_narrow(&self) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(2048).unwrap();
        socket.connect(self.address.parse().unwrap()).await.unwrap()
    }

    /// Waits until `count` requests have ended. Returns the most memory that the server held
    /// meanwhile, in bytes.
    async fn ended(&self, count: usize) -> usize {
        let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        let mut most = 0;
        let ending = async {
            loop {
                let mut client = self.connect().await;
                client.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                client.read_to_string(&mut answer).await.unwrap();
                most = most.max(self.memory());
                let reasons = answer
                    .lines()
                    .filter(|line| line.starts_with("vllm:request_success_total{"));
                let ended: f64 = reasons
                    .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
                    .sum();
                if ended >= count as f64 {
                    return;
                }
            }
        };
        timeout(5 * PATIENCE, ending)
            .await
            .expect("the requests end");
        most
    }

    /// Returns the resident memory of the process in bytes, without the pages of its files: the
    /// system reads the program's code when the program first runs it.
    fn memory(&self) -> usize {
        let path = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(path).unwrap();
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = resident.unwrap().split_whitespace().next().unwrap();
        kib.parse::<usize>().unwrap() << 10
    }

    /// Returns the number of open files of the process.
    fn files(&self) -> usize {
        let path = format!("/proc/{}/fd", self.process.id());
        std::fs::read_dir(path).unwrap().count()
    }

    /// Asks for a short answer on a connection of its own. Returns how long it took.
    async fn answer(&self) -> Duration {
        let start = Instant::now();
        let mut client = self.connect().await;
        let request = post(8, false).replace("host:", "connection: close\r\nhost:");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = client.read_to_string(&mut answer);
        timeout(5 * PATIENCE, read)
            .await
            .expect("an answer")
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        start.elapsed()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Returns a request for `tokens` tokens.
fn post(tokens: u32, stream: bool) -> String {
    let body = json!({
        "prompt": "Count.", "max_tokens": tokens, "ignore_eos": true, "stream": stream,
    });
    let (body, path) = (body.to_string(), "/v1/completions");
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Reads until `text` has arrived.
async fn read_until(client: &mut TcpStream, text: &str) {
    let mut read = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&read).contains(text) {
            // The text may be split between this part and the one before.
            read.drain(..read.len().saturating_sub(text.len()));
            let count = client.read_buf(&mut read).await.unwrap();
            assert!(count > 0, "{}", String::from_utf8_lossy(&read));
        }
    };
    timeout(5 * PATIENCE, reading)
        .await
        .expect("the text arrives");
}

/// Returns `count` clients whose streams wait in the queue.
async fn idle_streams(server: &Server, count: usize) -> Vec<TcpStream> {
    let mut idle = Vec::new();
    for _ in 0..count {
        let mut client = server.connect().await;
        client.write_all(post(900, true).as_bytes()).await.unwrap();
        idle.push(client);
    }
    for client in &mut idle {
        read_until(client, "text/event-stream").await;
    }
    idle
}

#[tokio::test]
async fn idle_streams_take_little_memory() {
    let count = size(300, 10_000);
    let server = Server::start(&[
        "--max-connections",
        "12000",
        "--max-queued",
        "12000",
        "--max-queued-seconds",
        "86400",
        "--max-running",
        "1",
    ]);
    // The first streams also fill what all share, such as the arenas of the allocator.
    let _first = idle_streams(&server, 600).await;
    let base = server.memory();
    let _idle = idle_streams(&server, count).await;
    let each = server.memory().saturating_sub(base) / count;
    println!("{count} idle streams: {each} bytes each");
    assert!(each <= MAX_IDLE_BYTES, "{each} bytes each");
}

/// A client that asked for a long stream and read nothing held its connection and its tokens.
#[tokio::test]
async fn clients_that_never_read_hold_little_and_are_closed() {
    let count = size(12, 1000);
    let server = Server::start(&["--max-queued", "1000", "--max-queued-seconds", "86400"]);
    server.answer().await;
    let files = server.files();
    let calm = server.median_answer().await;
    // As many streams that are read, up to the size of a batch, fill what all share: the keys and
    // values of the batch, and the allocator's arenas.
    let mut read = Vec::new();
    for _ in 0..size(count, 64) {
        let mut client = server.connect().await;
        client.write_all(post(900, true).as_bytes()).await.unwrap();
        read.push(client);
    }
    for client in &mut read {
        read_until(client, "[DONE]").await;
    }
    let base = server.memory();
    let mut unread = Vec::new();
    for _ in 0..count {
        let mut client = server.connect_narrow().await;
        client.write_all(post(900, true).as_bytes()).await.unwrap();
        unread.push(client);
    }
    // Tokens are not counted, because a slow server closes a connection before it has generated its
    // whole answer. The answers before have ended too.
    let answers = 1 + size(5, 201) + read.len();
    let most = server.ended(answers + count).await;
    drop(read);
    let stalled = Instant::now();
    let each = most.saturating_sub(base) / count;
    let beside = server.median_answer().await;
    let closed = async {
        while server.files() > files + OTHER_FILES {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(PATIENCE, closed)
        .await
        .expect("the server closes the connections of clients that do not read");
    println!(
        "{count} clients that never read: {} KiB each; closed after {:.1?}; an answer of others \
         takes {calm:.2?}, and {beside:.2?} beside them (median)",
        each >> 10,
        stalled.elapsed()
    );
    assert!(!is_long() || beside <= calm.mul_f64(MAX_DELAY));
    let shared = if is_long() { 0 } else { BATCH_BYTES / count };
    assert!(each <= MAX_UNREAD_BYTES + shared, "{each} bytes each");
    assert!(!is_long() || stalled.elapsed() <= Duration::from_secs(45));
    drop(unread);
}

/// Sends `beginning`, then a byte each second, until the server closes the connection. Returns how
/// long the connection was open.
async fn dribble(address: String, beginning: String) -> Duration {
    let start = Instant::now();
    let client = TcpStream::connect(address).await.unwrap();
    let (mut reader, mut writer) = client.into_split();
    let writing = async {
        let mut second = interval(Duration::from_secs(1));
        if writer.write_all(beginning.as_bytes()).await.is_ok() {
            while writer.write_all(b"x").await.is_ok() {
                second.tick().await;
            }
        }
        std::future::pending().await
    };
    let mut answer = Vec::new();
    tokio::select! {
        _ = reader.read_to_end(&mut answer) => {} // The connection may end with a reset.
        () = writing => {}
    }
    start.elapsed()
}

#[tokio::test]
async fn slow_senders_are_disconnected_and_others_are_served() {
    let server = Server::start(&[]);
    let files = server.files();
    server.answer().await;
    let base = server.memory();
    let body = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n\
                content-type: application/json\r\ncontent-length: 2000000\r\n\r\n{";
    let mut flood = JoinSet::new();
    for (count, beginning) in [
        (size(100, 5000), "GET / HTTP/1.1\r\nx: "),
        (size(20, 1000), body),
    ] {
        for _ in 0..count {
            flood.spawn(dribble(server.address.clone(), beginning.to_owned()));
        }
    }
    let count = flood.len();
    let mut slowest_answer = Duration::ZERO;
    let mut longest = Duration::ZERO;
    let reaping = async {
        while let Some(open) = flood.join_next().await {
            longest = longest.max(open.unwrap());
        }
    };
    let answering = async {
        for _ in 0..10 {
            slowest_answer = slowest_answer.max(server.answer().await);
        }
    };
    let ((), ()) = tokio::join!(
        async {
            timeout(PATIENCE, reaping)
                .await
                .expect("the server ends slow connections")
        },
        answering
    );
    let above = server.memory().saturating_sub(base);
    println!(
        "{count} slow senders: open for at most {longest:.1?}; slowest answer meanwhile \
         {slowest_answer:.2?}; then {} MB above the base",
        above / 1_000_000
    );
    assert!(!is_long() || longest <= Duration::from_secs(15));
    let closed = async {
        while server.files() > files + OTHER_FILES {
            tokio::task::yield_now().await
        }
    };
    timeout(PATIENCE, closed)
        .await
        .expect("the server closes its files");
}
