//! Ends of the server: SIGTERM while it serves, and SIGKILL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::Connection;
use crate::outcome::{Outcome, Tally, serve};
use crate::process::Process;
use crate::{Extent, Findings};

const CLIENTS: usize = 16;
/// The time from the start of the process to its first correct answer.
const MAX_RESTART: Duration = Duration::from_secs(1);

/// Sends SIGTERM to servers that serve. Each request must have exactly one end.
pub(crate) async fn terminate(extent: Extent, findings: &mut Findings) {
    let rounds = extent.pick(10, 100);
    let (mut tally, mut clean) = (Tally::default(), 0);
    for round in 0..rounds {
        let server = Arc::new(Process::start(&[]).await);
        let mut clients = JoinSet::new();
        for client in 0..CLIENTS {
            let server = Arc::clone(&server);
            clients.spawn(async move { until_unreachable(&server, client).await });
        }
        // A different moment in each round, from the first prefill to a steady state.
        tokio::time::sleep(Duration::from_millis(5 + 7 * round)).await;
        server.signal("-TERM");
        while let Some(client) = clients.join_next().await {
            tally.merge(client.expect("the client does not panic"));
        }
        let server = Arc::into_inner(server).expect("the clients have ended");
        clean += u64::from(server.wait().code() == Some(0));
    }
    findings.check_ends(&tally);
    let complete = tally.of(&Outcome::Complete);
    findings.check(&format!("{complete} answers complete"), complete > 0);
    findings.check(
        &format!("{clean} of {rounds} servers exited with 0"),
        clean == rounds,
    );
}

/// Sends requests until the server does not accept connections.
async fn until_unreachable(server: &Process, client: usize) -> Tally {
    let mut tally = Tally::default();
    let mut connection = None;
    loop {
        let open = match connection.take() {
            Some(open) => Ok(open),
            None => Connection::open(server.address).await,
        };
        let Ok(mut open) = open else {
            return tally;
        };
        let body = json!({
            "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
            "max_tokens": 8 + client, "ignore_eos": true, "stream": client.is_multiple_of(2),
        });
        let path = "/v1/chat/completions";
        let served = serve(&mut open, (path, "", &body.to_string()), None).await;
        if !served.closes {
            connection = Some(open);
        }
        let refused = served.outcome == Outcome::Refused;
        tally.count(served.outcome);
        if refused {
            return tally; // The server drains.
        }
    }
}

/// Kills the server, starts it again, and measures the time to its first correct answer.
pub(crate) async fn kill(extent: Extent, findings: &mut Findings) {
    let rounds = extent.pick(3, 20);
    let mut times = Vec::new();
    let mut expected = None;
    for _ in 0..rounds {
        let start = Instant::now();
        let server = Process::start(&[]).await;
        let text = answer(&server).await;
        times.push(start.elapsed());
        let expected = expected.get_or_insert_with(|| text.clone());
        findings.check(&format!("the answer is {text:?}"), text == *expected);
        let streams = (0..4).map(|_| answer(&server));
        drop(futures_util::future::join_all(streams).await);
        server.signal("-KILL");
        server.wait();
    }
    times.sort_unstable();
    let (median, slowest) = (times[times.len() / 2], times[times.len() - 1]);
    let figure = format!(
        "start to first answer: median {} ms (at most {}), slowest {} ms",
        median.as_millis(),
        MAX_RESTART.as_millis(),
        slowest.as_millis()
    );
    findings.check_time(&figure, median <= MAX_RESTART);
}

/// Returns the answer to a fixed question, which is always the same.
pub(crate) async fn answer(server: &Process) -> String {
    let body = json!({
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8, "temperature": 0,
    });
    let mut connection = Connection::open(server.address)
        .await
        .expect("the server listens");
    let sent = connection
        .post("/v1/chat/completions", "", &body.to_string())
        .await;
    sent.expect("the request is sent");
    let head = connection.head().await.expect("an answer comes");
    assert_eq!(head.status, 200);
    let text = connection.rest().await.expect("the answer is whole");
    let body: Value = serde_json::from_str(&text).expect("the answer is JSON");
    body["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}
