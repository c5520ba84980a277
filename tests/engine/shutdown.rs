//! How the engine ends: a drain, or the last handle and stream.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sterna::engine::{
    EngineConfig, EventStream, FinishReason, GenerationRequest, Rates, Refusal, StreamEvent,
    TenantId, TenantPolicy, TenantsRefused,
};

use super::model::gate;
use super::running::{Answer, Running, config, end, guarded, next, request, start, start_with};

#[tokio::test]
async fn tenants_can_be_set_until_the_engine_has_ended() {
    let running = start();
    let tenants = vec![(TenantId(1), TenantPolicy::default())];
    let set = running.handle.set_tenants(tenants.clone());
    assert_eq!(guarded(set).await, Ok(()));
    let of_tenant = GenerationRequest {
        tenant: TenantId(1),
        ..request(&[1, 2, 3], 2)
    };
    let mut stream = running.handle.submit(of_tenant).unwrap();
    assert_eq!(stream.rates(), None, "the engine has not answered yet");
    guarded(stream.accepted()).await.unwrap();
    assert_eq!(
        stream.rates(),
        Some(Rates::default()),
        "the tenant has no rates"
    );
    while next(&mut stream).await.is_some() {}

    let handle = running.handle.clone();
    handle.drain();
    running.stop().await.unwrap();
    let set = handle.set_tenants(tenants);
    assert_eq!(guarded(set).await, Err(TenantsRefused::Gone));
}

#[tokio::test]
async fn a_drain_finishes_accepted_requests_and_refuses_new_ones() {
    let (gate, steps) = gate();
    let mut narrow = config();
    narrow.limits.max_running = 2;
    let running = start_with(narrow, Some(gate));
    let mut accepted: Vec<EventStream> = (0..5)
        .map(|i| running.handle.submit(request(&[i], 6)).unwrap())
        .collect();
    steps.wait_inside();
    steps.pass_one();
    steps.pass_one(); // The first step may have begun before the other requests came.
    for stream in &mut accepted {
        guarded(stream.accepted()).await.unwrap();
    }
    running.handle.drain();
    assert!(running.handle.status().draining && !running.handle.status().ready());
    assert_eq!(
        running.handle.submit(request(&[1], 1)).map(|_| ()),
        Err(Refusal::Draining.into())
    );
    steps.open();
    for mut stream in accepted {
        let mut tokens = 0;
        loop {
            match next(&mut stream).await {
                Some(StreamEvent::Token(_)) => tokens += 1,
                Some(StreamEvent::Finished { reason, .. }) => {
                    break assert_eq!(reason, FinishReason::Length);
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(tokens, 6);
    }
    let handle = running.handle.clone();
    assert_eq!(running.stop().await, Ok(()));
    assert_eq!(
        handle.submit(request(&[1], 1)).map(|_| ()),
        Err(Refusal::Draining.into())
    );
    let status = handle.status();
    assert!(status.healthy() && !status.ready(), "the drain ended well");
}

#[tokio::test]
async fn a_drain_without_limit_finishes_queued_submissions() {
    let (gate, steps) = gate();
    let mut unlimited = config();
    unlimited.drain_limit = Duration::MAX;
    let running = start_with(unlimited, Some(gate));
    let first = running.handle.submit(request(&[1], 6)).unwrap();
    steps.wait_inside(); // The engine takes no submission now.
    let queued = running.handle.submit(request(&[2, 3], 6)).unwrap();
    running.handle.drain();
    steps.open();
    let first = Answer::of(first).await;
    assert_eq!(first.end, Some(end(FinishReason::Length, 1, 0, 6)));
    let second = Answer::of(queued).await;
    assert_eq!(second.end, Some(end(FinishReason::Length, 2, 0, 6)));
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn a_drain_past_its_limit_ends_the_remaining_requests() {
    let (gate, steps) = gate();
    let running = start_with(
        EngineConfig {
            drain_limit: Duration::ZERO,
            ..config()
        },
        Some(gate),
    );
    let mut stream = running.handle.submit(request(&[1, 2], 200)).unwrap();
    steps.wait_inside();
    running.handle.drain();
    steps.open();
    guarded(stream.accepted()).await.unwrap();
    let mut received = 0;
    let last = loop {
        match next(&mut stream).await {
            Some(StreamEvent::Token(_)) => received += 1,
            other => break other,
        }
    };
    assert_eq!(last, Some(end(FinishReason::Shutdown, 2, 0, received)));
    assert!(received < 200);
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn the_engine_ends_when_its_last_handle_is_dropped() {
    let running = start();
    let stream = running.handle.submit(request(&[1], 200)).unwrap();
    drop(stream);
    assert_eq!(running.stop().await, Ok(()));
}

#[tokio::test]
async fn a_stream_outlives_the_last_handle() {
    let running = start();
    let mut stream = running.handle.submit(request(&[1], 5)).unwrap();
    let Running { handle, engine, .. } = running;
    drop(handle);
    let mut last = None;
    while let Some(event) = next(&mut stream).await {
        last = Some(event);
    }
    assert_eq!(last, Some(end(FinishReason::Length, 1, 0, 5)));
    let ended = tokio::task::spawn_blocking(move || engine.join());
    assert!(
        !ended.is_finished(),
        "the engine lives as long as the stream"
    );
    drop(stream);
    assert_eq!(guarded(ended).await.unwrap(), Ok(()));
}

#[tokio::test]
async fn streams_may_be_read_on_other_tasks() {
    let running = start();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..16)
        .map(|i| {
            let (handle, answers) = (running.handle.clone(), Arc::clone(&answers));
            tokio::spawn(async move {
                let answer = Answer::of(handle.submit(request(&[i], 8)).unwrap()).await;
                answers.lock().unwrap().push(answer.tokens.len());
            })
        })
        .collect();
    for task in tasks {
        guarded(task).await.unwrap();
    }
    assert_eq!(*answers.lock().unwrap(), [8; 16]);
    running.assert_empty().await;
}
