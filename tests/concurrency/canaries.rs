//! Canaries: fifty tenants with a secret each. The model repeats its prompt, so an answer is the
//! secret of whoever wrote the pages that it was computed from.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use sterna::engine::Limits;
use sterna_random::Random;
use tokio::time::timeout;

use crate::effort;
use crate::model::{FIRST_PIECE, PageModel, Rule};
use crate::requests::words;
use crate::server::{ROOMY, TestServer};

const TENANTS: u64 = 50;
const CLIENTS: usize = 48;
/// The length of a secret in tokens. It is no multiple of a page, so that secrets cross pages.
const SECRET: usize = 21;

/// Limits under which pages change their owner all the time.
const TIGHT: Limits = Limits {
    pages: 96,
    max_running: 16,
    step_tokens: 128,
    prefill_chunk: 48,
    max_sequence_tokens: 160,
    ..ROOMY
};

/// Returns the secret of a tenant, in letters.
fn secret(tenant: u64) -> Vec<u32> {
    let mut random = Random::new(tenant);
    let letter = |_| FIRST_PIECE + 1 + random.below(26) as u32;
    (0..SECRET).map(letter).collect()
}

fn spell(tokens: &[u32]) -> String {
    let letter = |&token: &u32| char::from(b'a' + (token - FIRST_PIECE - 1) as u8);
    tokens.iter().map(letter).collect()
}

/// Asks as random tenants until no request is left. Returns how many whole answers were checked.
async fn ask_and_check(
    server: Arc<TestServer>,
    secrets: Arc<Vec<String>>,
    left: Arc<AtomicU64>,
    mut random: Random,
) -> u64 {
    let of_secret: HashMap<&str, usize> = secrets
        .iter()
        .enumerate()
        .map(|(tenant, secret)| (&secret[..8], tenant))
        .collect();
    // All tenants begin with the same text, of a length that differs by request.
    let common = words(&mut Random::new(TENANTS), 40);
    let mut checked = 0;
    let take = |left: u64| left.checked_sub(1);
    while left
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take)
        .is_ok()
    {
        let tenant = random.below(TENANTS);
        let before = &common[..random.below(40) as usize];
        let repeated = secret(tenant).repeat(random.between(1, 3) as usize);
        let max_tokens = random.between(8, 32) as usize;
        let prompt = [before, &repeated].concat();
        let body = json!({
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        });
        let asking = server.complete(tenant as usize, &body);
        let answer = if random.percent(10) {
            // This client leaves.
            match timeout(Duration::from_micros(random.below(2000)), asking).await {
                Ok(answer) => answer,
                Err(_) => continue,
            }
        } else {
            asking.await
        };
        let text = answer["choices"][0]["text"].as_str().unwrap();
        let own = secrets[tenant as usize].repeat(2);
        if text != &own[..max_tokens] {
            let starts = 0..text.len().saturating_sub(7);
            let foreign = starts.filter_map(|at| of_secret.get(text.get(at..at + 8)?));
            let foreign: Vec<_> = foreign.filter(|&&other| other != tenant as usize).collect();
            panic!("tenant {tenant} read {text:?}, secrets of {foreign:?}; request {body}");
        }
        checked += 1;
    }
    checked
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_answer_has_the_secret_of_another_tenant() {
    let requests = effort("STERNA_CANARIES", 4000);
    let mut random = Random::from_env();
    let model = PageModel::new(Rule::Repeat(SECRET));
    let server = Arc::new(TestServer::start(model, TIGHT, 2, TENANTS as usize).await);
    let secrets: Vec<String> = (0..TENANTS).map(|tenant| spell(&secret(tenant))).collect();
    let secrets = Arc::new(secrets);
    let left = Arc::new(AtomicU64::new(requests));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (server, secrets) = (Arc::clone(&server), Arc::clone(&secrets));
            let random = Random::new(random.next_u64());
            tokio::spawn(ask_and_check(server, secrets, Arc::clone(&left), random))
        })
        .collect();
    let mut checked = 0;
    for client in clients {
        checked += client.await.unwrap();
    }
    println!("{requests} requests, {checked} answers checked");
    assert!(checked > requests / 2);
    assert!(server.metric("sterna_evictions_total", "") > 0.0);
    assert!(server.metric("vllm:prefix_cache_hits_total", "") > 0.0);
    server.assert_every_page_comes_back().await;
}
