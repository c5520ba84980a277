//! The processes of grammars: ended from outside at any time, and their time charged.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use crate::{PATIENCE, Server, client, json_of};

/// The length of each answer.
const TOKENS: u32 = 60;

/// Returns the processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    ids.filter(|id: &u32| {
        // A process may have ended since.
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let own = after_name.split_whitespace().nth(1);
        own == Some(parent.to_string().as_str())
    })
    .collect()
}

fn kill(ids: Vec<u32>) {
    if !ids.is_empty() {
        let ids = ids.iter().map(u32::to_string);
        // They may have ended already.
        drop(Command::new("kill").arg("-9").args(ids).output());
    }
}

fn body(number: u64) -> Value {
    let mut body = json!({
        "prompt": format!("Number {number} is"), "max_tokens": TOKENS, "seed": number,
        "temperature": 1.2, "min_tokens": TOKENS, "logprobs": 1,
    });
    if number.is_multiple_of(2) {
        let letter = ["a", "b", "c"][number as usize / 2 % 3];
        body["guided_regex"] = json!(format!("[{letter}-z0-9 ]{{1000}}"));
    }
    body
}

/// Returns the choices of the answer, or its error.
async fn answer(server: &Server, number: u64) -> Result<Value, Value> {
    let response = server.post("/v1/completions", &body(number)).await;
    let is_whole = response.status() == 200;
    let answer = json_of(response).await;
    match is_whole {
        true => Ok(answer["choices"].clone()),
        false => Err(answer["error"]["code"].clone()),
    }
}

/// Answers everything at the same time, and calls `disturb` meanwhile until all is answered.
async fn disturbed(
    server: &Arc<Server>,
    alone: &BTreeMap<u64, Value>,
    disturb: impl Fn(),
) -> usize {
    let answers = alone.iter().map(|(&number, expected)| {
        let (server, expected) = (Arc::clone(server), expected.clone());
        tokio::spawn(async move {
            match answer(&server, number).await {
                Ok(choices) => assert_eq!(choices, expected, "{number}"),
                Err(code) => {
                    assert_eq!(number % 2, 0, "a plain answer ended: {code}");
                    return 1;
                }
            }
            0
        })
    });
    let all = tokio::spawn(futures_util::future::join_all(answers.collect::<Vec<_>>()));
    while !all.is_finished() {
        disturb();
        assert_eq!(server.get("/health").await.status(), 200);
    }
    all.await.unwrap().into_iter().map(Result::unwrap).sum()
}

#[tokio::test]
async fn processes_of_grammars_that_are_killed_change_no_plain_answer() {
    let server = Arc::new(Server::start(&["--max-queued-seconds", "600"]).await);
    let mut alone = BTreeMap::new();
    for number in 0..12 {
        alone.insert(number, answer(&server, number).await.unwrap());
    }
    let template = || children(server.process.id());
    let tasks = format!("/proc/{}/task", template()[0]);
    let threads = fs::read_dir(tasks).unwrap().count();
    assert_eq!(threads, 1, "a fork copies only the thread that calls it");
    let workers = || template().into_iter().flat_map(children).collect();
    assert_eq!(disturbed(&server, &alone, || ()).await, 0);
    let ended = disturbed(&server, &alone, || kill(workers())).await;
    assert!(ended > 0, "no worker was killed");
    assert_eq!(
        disturbed(&server, &alone, || ()).await,
        0,
        "all is well again"
    );
    let ended = disturbed(&server, &alone, || kill(template())).await;
    assert!(ended > 0, "no template was killed");
    assert_eq!(
        disturbed(&server, &alone, || ()).await,
        0,
        "all is well again"
    );
}

/// Returns the sum of all series of a metric.
async fn metric(server: &Server, name: &str) -> f64 {
    let text = client::text(server.get("/metrics").await).await;
    let series = text.lines().filter(|line| line.starts_with(name));
    series
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

#[tokio::test]
async fn the_time_of_grammars_counts_as_service_of_their_tenant() {
    let server = Server::start(&[]).await;
    let properties = (0..600).map(|n| (format!("p{n}"), json!({"type": "integer"})));
    let properties: serde_json::Map<String, Value> = properties.collect();
    let bodies = [
        // Its compilation takes long.
        json!({"guided_json": {"type": "object", "properties": properties}}),
        // The mask after its first token takes 500 ms.
        json!({"guided_grammar": "start: /[bc]/ A A\nA: /a{100}/+\n"}),
    ];
    let kinds = [
        "sterna_tenant_grammar_compilation_seconds_total",
        "sterna_tenant_grammar_mask_seconds_total",
    ];
    for (mut body, kind) in bodies.into_iter().zip(kinds) {
        let service = || metric(&server, "sterna_tenant_service_seconds_total");
        let (before, began) = (service().await, metric(&server, kind).await);
        body["prompt"] = json!("Hi");
        body["max_tokens"] = json!(2);
        drop(server.post("/v1/completions", &body).await);
        let patience = Instant::now() + PATIENCE;
        loop {
            // A charge of less than a millisecond may be due.
            let took = metric(&server, kind).await - began - 0.001;
            let charged = service().await - before;
            if took > 0.02 && charged >= took {
                break;
            }
            let late = Instant::now() < patience;
            assert!(late, "{kind}: took {took} s, charged {charged} s");
        }
    }
}
