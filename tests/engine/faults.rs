//! Steps that panic, compute NaN or stall, and engines that die or cannot start.

use std::io;
use std::time::Duration;

use sterna::engine::{
    Engine, EngineConfig, EngineDied, EventStream, Forward, GenerationRequest, LogitRows,
    StreamEvent, SubmitError,
};
use sterna_scheduler::{Batch, Limits};

use super::model::{
    COMPUTES_NAN, Histories, KILLS_THE_THREAD, PANICS, PANICS_IN_COMPANY, VOCABULARY, gate,
};
use super::running::{
    Answer, config, guarded, metrics, mixed_requests, request, start, start_with,
};

#[tokio::test]
async fn a_panicking_step_fails_its_requests_and_serving_continues() {
    let running = start();
    for _ in 0..3 {
        let answer = Answer::of(running.handle.submit(request(&[PANICS, 1], 5)).unwrap()).await;
        assert!(
            matches!(answer.end, Some(StreamEvent::Failed(_))),
            "{answer:?}"
        );
        assert_eq!(answer.tokens, []);
        running.assert_empty().await;
    }
    assert_eq!(running.finished("error"), 3.0);
    running.stop().await.unwrap();
}

/// Answers requests one after the other, then all at once, and returns both.
async fn alone_and_together(requests: &[GenerationRequest]) -> [Vec<Answer>; 2] {
    let running = start();
    let mut alone = Vec::new();
    for request in requests {
        running.handle.reset_prefix_cache().await.expect("it runs");
        let stream = running
            .handle
            .submit(request.clone())
            .expect("the engine runs");
        alone.push(Answer::of(stream).await);
    }
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let submit = |request: &GenerationRequest| {
        running
            .handle
            .submit(request.clone())
            .expect("the engine runs")
    };
    let streams: Vec<EventStream> = requests.iter().map(submit).collect();
    steps.open();
    let mut together = Vec::new();
    for stream in streams {
        together.push(Answer::of(stream).await);
    }
    running.assert_empty().await;
    running.stop().await.expect("the engine runs");
    [alone, together]
}

#[tokio::test]
async fn only_the_request_that_panics_alone_fails_and_its_neighbours_do_not_change() {
    // Two prompts of several chunks, and six answers that go on for long. Each prompt that panics
    // meets decodes and chunks of the others.
    for fatal in [vec![PANICS; 3], vec![PANICS; 45]] {
        let mut requests = mixed_requests()[10..17].to_vec();
        requests.insert(3, request(&fatal, 20));
        let [alone, together] = alone_and_together(&requests).await;
        for (index, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(alone.tokens, together.tokens, "request {index}");
            let has_failed = matches!(together.end, Some(StreamEvent::Failed(_)));
            assert_eq!(has_failed, index == 3, "{together:?}");
        }
    }
}

#[tokio::test]
async fn no_request_fails_if_a_step_panics_and_each_of_its_rows_alone_does_not() {
    let mut requests = mixed_requests()[10..17].to_vec();
    requests.insert(2, request(&[PANICS_IN_COMPANY, 5, 6], 30));
    let [alone, together] = alone_and_together(&requests).await;
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone.tokens, together.tokens);
        assert!(matches!(together.end, Some(StreamEvent::Finished { .. })));
    }
}

#[tokio::test]
async fn a_row_with_nan_fails_only_its_own_request() {
    let running = start();
    let expected = Answer::of(running.handle.submit(request(&[1, 2], 20)).unwrap()).await;
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let good = running.handle.submit(request(&[1, 2], 20)).unwrap();
    let bad = running
        .handle
        .submit(request(&[COMPUTES_NAN, 2], 20))
        .unwrap();
    steps.open();
    let bad = Answer::of(bad).await;
    assert_eq!(bad.tokens.len(), 1);
    assert!(matches!(bad.end, Some(StreamEvent::Failed(_))));
    assert_eq!(Answer::of(good).await.tokens, expected.tokens);
    running.assert_empty().await;
}

#[tokio::test]
async fn a_dead_engine_ends_every_stream_and_refuses_new_requests() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let fatal = running
        .handle
        .submit(request(&[KILLS_THE_THREAD, 1], 5))
        .unwrap();
    steps.wait_inside();
    let queued = running.handle.submit(request(&[1], 5)).unwrap();
    steps.open();
    assert!(matches!(
        Answer::of(fatal).await.end,
        Some(StreamEvent::Failed(_))
    ));
    assert_eq!(
        Answer::of(queued).await.end,
        Some(StreamEvent::Refused(SubmitError::Dead))
    );
    assert_eq!(
        running.handle.submit(request(&[1], 5)).map(|_| ()),
        Err(SubmitError::Dead)
    );
    let status = running.handle.status();
    assert!(!status.healthy() && !status.ready());
    assert_eq!(running.stop().await, Err(EngineDied));
}

#[tokio::test]
async fn a_stalled_step_makes_the_status_unhealthy() {
    let (gate, steps) = gate();
    let running = start_with(
        EngineConfig {
            stall_limit: Duration::ZERO,
            ..config()
        },
        Some(gate),
    );
    assert!(running.handle.status().healthy(), "idle is healthy");
    let stream = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside();
    guarded(async {
        while running.handle.status().healthy() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    steps.open();
    assert_eq!(Answer::of(stream).await.tokens.len(), 1);
    assert!(running.handle.status().healthy());
    assert_eq!(running.handle.status().steps, 1);
}

/// A model without enough memory for its KV store.
struct TooLarge;

impl Forward for TooLarge {
    type KvStore = ();

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn new_kv_store(&self, _limits: &Limits) -> io::Result<()> {
        Err(io::ErrorKind::OutOfMemory.into())
    }

    fn forward(&mut self, _batch: &Batch, (): &mut ()) -> impl LogitRows {
        Histories(Vec::new())
    }
}

#[test]
fn start_fails_if_the_kv_store_does_not_fit() {
    let started = Engine::start(TooLarge, config(), metrics(&config()));
    let error = started.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
}
