//! Timed traces over real HTTP: clients read, read slowly, or leave; pages run out; tenants are
//! reloaded. Each answer is then compared with the answer to the same request alone.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hyper::Request;
use serde_json::{Value, json};
use sterna::engine::Limits;
use sterna_random::Random;
use tokio::time::{sleep, timeout};

use crate::client::{self, Response};
use crate::model::{PageModel, Rule};
use crate::requests::{Said, events, streaming, with, words};
use crate::server::{COMPLETIONS, ROOMY, TestServer};
use crate::{PATIENCE, effort};

const CLIENTS: u64 = 32;
const TENANTS: usize = 6;
const STEP: Duration = Duration::from_micros(100);

/// Limits under which the running sequences need about twice as many pages as there are.
const TIGHT: Limits = Limits {
    pages: 40,
    max_running: 12,
    step_tokens: 64,
    prefill_chunk: 32,
    max_sequence_tokens: 320,
    ..ROOMY
};

/// What a client saw of an answer.
enum Seen {
    Whole(Said),
    /// The beginning of a stream, and its tokens.
    Begun(String, Vec<Value>),
    Nothing,
}

struct Tried {
    tenant: usize,
    body: Value,
    seen: Seen,
}

/// What a client does with its stream.
#[derive(Clone, Copy)]
enum Manner {
    Reads,
    ReadsSlowly,
    LeavesAfter { pieces: u64 },
}

fn manner(random: &mut Random) -> Manner {
    match random.below(10) {
        0..5 => Manner::Reads,
        5..7 => Manner::ReadsSlowly,
        _ => Manner::LeavesAfter {
            pieces: random.below(12),
        },
    }
}

/// Returns a request. Its prompt begins like others of its tenant, often in the middle of a page,
/// and may repeat itself, so that draft tokens are proposed.
fn request(random: &mut Random, tenant: usize) -> Value {
    let variant = random.below(3);
    let mut shared = Random::new(1000 * tenant as u64 + variant);
    let mut prompt = words(&mut shared, [20, 37, 64][variant as usize]);
    prompt.truncate(random.between(1, 64) as usize);
    let count = random.between(1, 24);
    prompt.extend(words(random, count).repeat(random.between(1, 3) as usize));
    let temperature = [0.0, 0.8][random.index(2)];
    let mut body = json!({
        "prompt": prompt,
        "max_tokens": random.between(1, 150),
        "temperature": temperature,
        "seed": random.below(1000),
        "ignore_eos": random.percent(70),
        "return_token_ids": true,
    });
    if random.percent(20) {
        let stop = ["a", "the", "é", "1 "][random.index(4)];
        body["stop"] = json!([stop]);
    }
    if random.percent(20) {
        body["frequency_penalty"] = json!(0.5);
    }
    body
}

struct Client {
    http: client::Client,
    address: SocketAddr,
    keys: Arc<Vec<String>>,
    random: Random,
}

impl Client {
    async fn try_one(&mut self) -> Tried {
        let random = &mut self.random;
        let tenant = random.below(TENANTS as u64) as usize;
        let body = request(random, tenant);
        let (manner, streams) = (manner(random), random.percent(70));
        let sent = if streams {
            streaming(&body)
        } else {
            body.clone()
        };
        sleep(Duration::from_micros(random.below(3000))).await;
        let url = format!("http://{}{COMPLETIONS}", self.address);
        let request = Request::post(url).header("x-api-key", &self.keys[tenant]);
        let answering = self.http.send(request, sent.to_string());
        let seen = match manner {
            Manner::LeavesAfter { pieces } if !streams => {
                // The client may leave before, while or after its request is answered.
                let patience = Duration::from_micros(300 * pieces);
                if let Ok(response) = timeout(patience, answering).await {
                    drop(response.unwrap());
                }
                Seen::Nothing
            }
            manner => read(answering.await.unwrap(), manner, streams).await,
        };
        Tried { tenant, body, seen }
    }
}

async fn read(mut response: Response, manner: Manner, streams: bool) -> Seen {
    let status = response.status();
    let (mut bytes, mut pieces) = (Vec::new(), 0);
    while let Some(piece) = client::piece(&mut response).await {
        bytes.extend_from_slice(&piece);
        pieces += 1;
        match manner {
            Manner::Reads => {}
            Manner::ReadsSlowly => sleep(Duration::from_millis(1)).await,
            Manner::LeavesAfter { pieces: limit } if pieces > limit => {
                drop(response);
                return begun(&String::from_utf8_lossy(&bytes));
            }
            Manner::LeavesAfter { .. } => {}
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    assert_eq!(status, 200, "{text}");
    Seen::Whole(if streams {
        Said::streamed(&text)
    } else {
        Said::whole(&serde_json::from_str(&text).unwrap())
    })
}

fn begun(body: &str) -> Seen {
    let (mut text, mut tokens) = (String::new(), Vec::new());
    for event in events(body) {
        let choice = &event["choices"][0];
        text += choice["text"].as_str().unwrap_or_default();
        tokens.extend(
            choice["token_ids"]
                .as_array()
                .into_iter()
                .flatten()
                .cloned(),
        );
    }
    Seen::Begun(text, tokens)
}

/// Reloads the tenants with other shares and limits, and sometimes empties the prefix cache.
async fn reload_until(done: &AtomicBool, server: &TestServer, mut random: Random) -> u64 {
    let mut reloads = 0;
    while !done.load(Ordering::SeqCst) {
        server
            .set_tenants(|_, mut policy| {
                policy.weight = random.between(1, 4) as u32;
                policy.max_running = random.between(2, 12) as u32;
                policy.guaranteed_pages = random.below(3) as u32;
                policy.max_pages = random.between(24, 100) as u32;
                policy
            })
            .await;
        if random.percent(10) {
            server.engine.reset_prefix_cache().await.unwrap();
        }
        reloads += 1;
        sleep(Duration::from_millis(random.between(1, 10))).await;
    }
    reloads
}

/// Compares with the answers of a server that runs one request at a time, without drafts and with
/// an empty prefix cache. Returns how many whole answers were compared.
async fn compare(tried: Vec<Tried>) -> u64 {
    let alone = TestServer::start(PageModel::new(Rule::Phrases), ROOMY, 0, TENANTS).await;
    let mut compared = 0;
    for Tried { tenant, body, seen } in tried {
        if matches!(seen, Seen::Nothing) {
            continue;
        }
        alone.engine.reset_prefix_cache().await.unwrap();
        let expected = Said::whole(&alone.complete(tenant, &body).await);
        match seen {
            Seen::Whole(said) => {
                assert_eq!(said, expected, "{body}");
                compared += 1;
            }
            Seen::Begun(text, tokens) => {
                assert!(expected.text.starts_with(&text), "{text:?} of {body}");
                assert!(expected.tokens.starts_with(&tokens), "{tokens:?} of {body}");
            }
            Seen::Nothing => {}
        }
    }
    compared
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_among_others_is_that_of_the_request_alone() {
    let requests = effort("STERNA_TRACES", 1000);
    let mut random = Random::from_env();
    // A step takes some time, so that many requests run at once.
    let model = PageModel::watched(Rule::Phrases, |_| std::thread::sleep(STEP));
    let server = TestServer::start(model, TIGHT, 4, TENANTS).await;
    let address = server.listen().await;
    let keys = Arc::new(server.keys.clone());
    let left = Arc::new(AtomicU64::new(requests));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut client = Client {
                http: client::Client::new(),
                address,
                keys: Arc::clone(&keys),
                random: Random::new(random.next_u64()),
            };
            let left = Arc::clone(&left);
            tokio::spawn(async move {
                let mut tried = Vec::new();
                let take = |left: u64| left.checked_sub(1);
                while left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
                    .is_ok()
                {
                    let one = timeout(PATIENCE, client.try_one()).await;
                    tried.push(one.expect("a request hangs"));
                }
                tried
            })
        })
        .collect();
    let done = AtomicBool::new(false);
    let working = async {
        let mut tried = Vec::new();
        for client in clients {
            tried.extend(client.await.unwrap());
        }
        done.store(true, Ordering::SeqCst);
        tried
    };
    let reloading = reload_until(&done, &server, Random::new(random.next_u64()));
    let (tried, reloads) = tokio::join!(working, reloading);
    assert_eq!(tried.len() as u64, requests);
    for happened in [
        "sterna_client_disconnects_total",
        "sterna_evictions_total",
        "sterna_page_copies_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ] {
        let count = server.metric(happened, "");
        println!("{happened} {count}");
        assert!(count > 0.0, "{happened} is 0, so the trace was too tame");
    }
    server.assert_every_page_comes_back().await;
    let compared = compare(tried).await;
    println!("{requests} requests, {reloads} reloads, {compared} whole answers compared");
    assert!(compared > requests / 3 && reloads > 0);
}

#[tokio::test]
async fn a_difference_is_found() {
    let server = TestServer::start(PageModel::new(Rule::Phrases), ROOMY, 0, TENANTS).await;
    let body = request(&mut Random::new(1), 0);
    let said = Said::whole(&server.complete(0, &body).await);
    let tried = |body| Tried {
        tenant: 0,
        body,
        seen: Seen::Whole(said.clone()),
    };
    assert_eq!(compare(vec![tried(body.clone())]).await, 1);
    let mut prompt = body["prompt"].as_array().unwrap().clone();
    prompt[0] = json!(crate::model::FIRST_BYTE);
    let other = with(&body, json!({"prompt": prompt}));
    let compared = tokio::spawn(compare(vec![tried(other)])).await;
    assert!(compared.is_err_and(|error| error.is_panic()));
}
