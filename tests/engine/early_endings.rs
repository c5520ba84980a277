//! Requests that their client leaves or finishes.

use sterna::engine::{FinishReason, GenerationRequest, StreamEvent, TokenId};

use super::model::{COMPUTES_NAN, KILLS_THE_THREAD, gate};
use super::running::{
    Answer, config, end, guarded, mixed_requests, next, request, start, start_with,
};

#[tokio::test]
async fn requests_of_disconnected_clients_leave_no_state() {
    let running = start();
    let mut streams = Vec::new();
    for (i, request) in mixed_requests().into_iter().enumerate() {
        let mut stream = running
            .handle
            .submit(GenerationRequest {
                max_new_tokens: 100,
                ..request
            })
            .unwrap();
        for _ in 0..i % 6 {
            next(&mut stream).await;
        }
        if i % 4 == 0 {
            streams.push(stream); // These are dropped at once, at the end.
        }
    }
    drop(streams);
    running.assert_empty().await;
    assert_eq!(running.metric("sterna_client_disconnects_total"), 40.0);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_cancel_that_overtakes_its_submission_takes_effect() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let first = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside();
    drop(running.handle.submit(request(&[2], 50)).unwrap());
    steps.open();
    assert_eq!(Answer::of(first).await.tokens.len(), 1);
    running.assert_empty().await;
    assert_eq!(
        running.metric("vllm:generation_tokens_total"),
        3.0,
        "the cancelled request has none"
    );
}

#[tokio::test]
async fn finish_counts_the_tokens_received_so_far() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate));
    let mut stream = running.handle.submit(request(&[7, 8, 9], 50)).unwrap();
    for _ in 0..4 {
        steps.wait_inside();
        steps.pass_one();
    }
    guarded(stream.accepted()).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(
            next(&mut stream).await,
            Some(StreamEvent::Token(_))
        ));
    }
    stream.finish(FinishReason::Stop);
    steps.open();
    assert_eq!(
        next(&mut stream).await,
        Some(end(FinishReason::Stop, 3, 0, 2)),
        "the stream drops later tokens"
    );
    assert_eq!(next(&mut stream).await, None);
    drop(stream);
    running.assert_empty().await;
    assert_eq!(running.metric("sterna_client_disconnects_total"), 0.0);
}

#[tokio::test]
async fn a_failure_after_finish_does_not_change_the_answer() {
    for fatal in [COMPUTES_NAN, KILLS_THE_THREAD] {
        let (gate, steps) = gate();
        let running = start_with(config(), Some(gate));
        let mut stream = running.handle.submit(request(&[fatal, 2], 20)).unwrap();
        steps.wait_inside();
        steps.pass_one();
        guarded(stream.accepted()).await.unwrap();
        assert!(matches!(
            next(&mut stream).await,
            Some(StreamEvent::Token(_))
        ));
        steps.wait_inside();
        stream.finish(FinishReason::Stop);
        steps.open();
        assert_eq!(
            next(&mut stream).await,
            Some(end(FinishReason::Stop, 2, 0, 1))
        );
        assert_eq!(next(&mut stream).await, None);
    }
}

#[tokio::test]
async fn an_early_end_reports_the_cached_tokens() {
    let running = start();
    let prompt: Vec<TokenId> = (0..40).collect();
    let cold = Answer::of(running.handle.submit(request(&prompt, 1)).unwrap()).await;
    assert_eq!(cold.cached_tokens(), 0);
    let warm = Answer::of(running.handle.submit(request(&prompt, 1)).unwrap()).await;
    assert!(warm.cached_tokens() > 0);
    let mut stream = running.handle.submit(request(&prompt, 200)).unwrap();
    guarded(stream.accepted()).await.unwrap();
    assert!(matches!(
        next(&mut stream).await,
        Some(StreamEvent::Token(_))
    ));
    stream.finish(FinishReason::Stop);
    assert_eq!(
        next(&mut stream).await,
        Some(end(FinishReason::Stop, 40, warm.cached_tokens(), 1))
    );
}
