//! Whole answers: alone and batched, their ends, their log-probabilities.

use sterna::engine::{EventStream, FinishReason, Forward, GenerationRequest};
use sterna::model::toy;

use super::model::Recorder;
use super::running::{Answer, config, end, mixed_requests, request, start, start_model};

/// Answers the mixed requests one after the other with a cold cache on one thread, then all at once
/// with too few pages on two threads.
async fn check_batching<F: Forward + 'static>(model: impl Fn(usize) -> F) {
    let mut alone = Vec::new();
    let running = start_model(model(1), config());
    for request in mixed_requests() {
        running.handle.reset_prefix_cache().await.expect("it runs");
        let stream = running.handle.submit(request).expect("there is room");
        let answer = Answer::of(stream).await;
        assert_eq!(answer.cached_tokens(), 0);
        alone.push(answer.tokens);
    }
    let mut crowded = config();
    crowded.limits.pages = 20;
    let running = start_model(model(2), crowded);
    let streams: Vec<EventStream> = mixed_requests()
        .into_iter()
        .map(|request| running.handle.submit(request).expect("there is room"))
        .collect();
    for (stream, expected) in streams.into_iter().zip(alone) {
        assert_eq!(Answer::of(stream).await.tokens, expected);
    }
    for occurred in [
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "sterna_evictions_total",
    ] {
        assert!(running.metric(occurred) > 0.0, "{occurred}");
    }
    running.assert_empty().await;
}

#[tokio::test]
async fn requests_answer_alike_alone_and_batched() {
    check_batching(|_threads| Recorder { gate: None }).await;
}

#[tokio::test]
async fn requests_of_a_real_model_answer_alike_alone_and_batched() {
    check_batching(toy::model).await;
}

#[tokio::test]
async fn an_answer_ends_at_a_stop_token_or_at_its_length() {
    let running = start();
    let whole = Answer::of(running.handle.submit(request(&[5, 6], 12)).unwrap()).await;
    assert_eq!(whole.tokens.len(), 12);
    assert_eq!(whole.end, Some(end(FinishReason::Length, 2, 0, 12)));

    let stop = whole.tokens[4].token;
    let first = whole
        .tokens
        .iter()
        .position(|output| output.token == stop)
        .unwrap();
    let stopping = GenerationRequest {
        stop_tokens: vec![stop],
        ..request(&[5, 6], 12)
    };
    let stopped = Answer::of(running.handle.submit(stopping.clone()).unwrap()).await;
    assert_eq!(
        stopped.tokens,
        whole.tokens[..=first],
        "the stop token is reported"
    );
    assert_eq!(
        stopped.end,
        Some(end(FinishReason::Stop, 2, 1, first as u32 + 1))
    );

    let too_short_to_stop = GenerationRequest {
        min_new_tokens: 12,
        ..stopping
    };
    let answer = Answer::of(running.handle.submit(too_short_to_stop).unwrap()).await;
    assert_eq!(answer.tokens.len(), 12);
    assert!(answer.tokens.iter().all(|output| output.token != stop));
    assert_eq!(running.finished("stop"), 1.0);
}

#[tokio::test]
async fn logprobs_have_the_requested_number_of_tokens() {
    let running = start();
    let mut wanted = request(&[1], 3);
    wanted.sampling.logprobs = Some(2);
    let answer = Answer::of(running.handle.submit(wanted).unwrap()).await;
    for output in answer.tokens {
        assert_eq!(output.top.len(), 2);
        assert_eq!(
            output.top[0],
            (output.token, output.logprob.unwrap()),
            "greedy takes the most likely"
        );
    }
}
