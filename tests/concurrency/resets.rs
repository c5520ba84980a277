//! Resets of the prefix cache while requests run.

use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use sterna::engine::Limits;
use sterna_random::Random;

use crate::model::{PageModel, Rule};
use crate::requests::{Said, words};
use crate::server::{ROOMY, TestServer};

/// Each answer depends on every page that it reads. So a page that a reset takes from a running
/// sequence would change an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_of_the_prefix_cache_never_changes_an_answer() {
    let mut random = Random::from_env();
    let limits = Limits {
        step_tokens: 64, // Prompts take several steps, so that resets meet them half computed.
        prefill_chunk: 64,
        ..ROOMY
    };
    let server = TestServer::start(PageModel::new(Rule::Hash), limits, 4, 2).await;
    let shared = words(&mut random, 100);
    let bodies: Vec<_> = (0..24)
        .map(|_| {
            let (kept, own) = (random.below(100) as usize, random.below(60) + 1);
            let prompt = [&shared[..kept], &words(&mut random, own)].concat();
            json!({"prompt": prompt, "max_tokens": 30, "temperature": 0, "return_token_ids": true})
        })
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        server.engine.reset_prefix_cache().await.unwrap();
        alone.push(Said::whole(&server.complete(0, body).await));
    }
    let asking = bodies.iter().enumerate();
    let asking = asking.map(|(index, body)| server.complete(index % 2, body));
    let asking = futures_util::future::join_all(asking);
    let is_over = AtomicBool::new(false);
    let asking = async {
        let together = asking.await;
        is_over.store(true, Ordering::Relaxed);
        together
    };
    let resetting = async {
        let mut freed = 0;
        while !is_over.load(Ordering::Relaxed) {
            freed += server.engine.reset_prefix_cache().await.unwrap();
        }
        freed
    };
    let (together, freed) = tokio::join!(asking, resetting);
    for (body, (answer, alone)) in bodies.iter().zip(together.iter().zip(&alone)) {
        assert_eq!(Said::whole(answer), *alone, "{body}");
    }
    assert!(freed > 0, "no reset found a page that no sequence used");
    server.assert_every_page_comes_back().await;
}
