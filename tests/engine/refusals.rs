//! Requests that the engine refuses.

use sterna::engine::{
    GenerationRequest, Refusal, SamplingParams, StreamEvent, SubmitError, TenantId, TenantPolicy,
    TokenId,
};

use super::model::{VOCABULARY, gate};
use super::running::{Answer, config, guarded, next, request, start, start_with};

#[tokio::test]
async fn a_full_submit_queue_refuses_at_once_and_a_full_scheduler_within_a_step() {
    let (gate, steps) = gate();
    let mut small = config();
    small.submit_queue = 2;
    small.limits.max_queued = 1;
    small.limits.max_running = 1;
    let running = start_with(small, Some(gate));
    let first = running.handle.submit(request(&[1], 1)).unwrap();
    steps.wait_inside(); // The engine takes no submission now.
    let waiting = running.handle.submit(request(&[2], 1)).unwrap();
    let mut too_many = running.handle.submit(request(&[3], 1)).unwrap();
    match running.handle.submit(request(&[4], 1)).map(|_| ()) {
        Err(SubmitError::Refused(Refusal::Overloaded { retry_after })) => {
            assert!(retry_after >= 1_000_000);
        }
        other => panic!("the submit queue is full, yet {other:?}"),
    }
    // The scheduler accepts one of the two submissions.
    steps.open();
    let refused = guarded(too_many.accepted());
    assert!(matches!(
        refused.await,
        Err(SubmitError::Refused(Refusal::Overloaded { .. }))
    ));
    assert_eq!(next(&mut too_many).await, None);
    assert_eq!(Answer::of(first).await.tokens.len(), 1);
    assert_eq!(Answer::of(waiting).await.tokens.len(), 1);
    running.assert_empty().await;
    assert_eq!(
        running.metric(
            "sterna_refusals_total{model_name=\"recorder\",engine=\"0\",reason=\"queue_full\"}"
        ),
        2.0
    );
}

#[tokio::test]
async fn a_tenants_flood_leaves_room_in_the_submit_queue_for_others() {
    let (gate, steps) = gate();
    let running = start_with(config(), Some(gate)); // A quarter of the submit queue is 16.
    let tenants = [1, 2].map(|id| (TenantId(id), TenantPolicy::default()));
    let set = running.handle.set_tenants(tenants.to_vec());
    assert_eq!(guarded(set).await, Ok(()));
    let submit = |id: u32| {
        running.handle.submit(GenerationRequest {
            tenant: TenantId(id),
            ..request(&[1], 1)
        })
    };
    let mut streams = vec![submit(0).unwrap()];
    steps.wait_inside(); // The engine takes no submission now.
    streams.extend((0..16).map(|_| submit(1).unwrap()));
    match submit(1).map(|_| ()) {
        Err(SubmitError::Refused(Refusal::TenantQueueFull { retry_after })) => {
            assert!(retry_after >= 1_000_000);
        }
        other => panic!("its quota is used up, yet {other:?}"),
    }
    streams.push(submit(2).unwrap());
    streams.extend((0..47).map(|_| submit(0).unwrap()));
    let full = submit(0).map(|_| ());
    assert!(
        matches!(full, Err(SubmitError::Refused(Refusal::Overloaded { .. }))),
        "{full:?}"
    );
    // The queue is full. The newest submissions of the tenant with the most of it leave.
    streams.extend((1..16).map(|_| submit(2).unwrap()));
    let own = submit(2).map(|_| ());
    assert!(
        matches!(
            own,
            Err(SubmitError::Refused(Refusal::TenantQueueFull { .. }))
        ),
        "{own:?}"
    );
    steps.open();
    let mut displaced = Vec::new();
    for (index, stream) in streams.into_iter().enumerate() {
        let answer = Answer::of(stream).await;
        let refused = |end| matches!(end, StreamEvent::Refused(SubmitError::Refused(_)));
        displaced.extend(answer.end.is_some_and(refused).then_some(index));
    }
    let newest = 18 + 47 - 15..18 + 47;
    assert_eq!(displaced, newest.collect::<Vec<_>>());
    // Submissions that were taken or refused do not count any more.
    for _ in 0..40 {
        for id in [1, 2] {
            Answer::of(submit(id).unwrap()).await;
        }
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_with_a_reason() {
    let running = start();
    let refusal = |request| running.handle.submit(request).map(|_| ()).unwrap_err();
    assert_eq!(refusal(request(&[], 1)), Refusal::EmptyPrompt.into());
    assert_eq!(
        refusal(request(&[1, VOCABULARY as TokenId], 1)),
        SubmitError::UnknownToken(VOCABULARY as TokenId)
    );
    assert_eq!(refusal(request(&[1], 0)), Refusal::NothingToGenerate.into());
    let stop = GenerationRequest {
        stop_tokens: vec![777],
        ..request(&[1], 1)
    };
    assert_eq!(refusal(stop), SubmitError::UnknownToken(777));
    let with = |change: fn(&mut SamplingParams)| {
        let mut request = request(&[1], 1);
        change(&mut request.sampling);
        request
    };
    for (name, bad) in [
        (
            "temperature",
            with(|sampling| sampling.temperature = f32::NAN),
        ),
        ("temperature", with(|sampling| sampling.temperature = -1.0)),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = 0.0),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = f32::from_bits(1)),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = 100.1),
        ),
        (
            "repetition_penalty",
            with(|sampling| sampling.repetition_penalty = f32::NAN),
        ),
        (
            "logit_bias",
            with(|sampling| sampling.logit_bias = vec![(1, f32::INFINITY)]),
        ),
        ("logprobs", with(|sampling| sampling.logprobs = Some(21))),
    ] {
        assert_eq!(refusal(bad), SubmitError::InvalidSampling(name));
    }
    let mut stream = running.handle.submit(request(&[1; 250], 200)).unwrap();
    assert!(matches!(
        guarded(stream.accepted()).await,
        Err(SubmitError::Refused(Refusal::TooLong {
            needed_tokens: 450..,
            ..
        }))
    ));
    assert_eq!(next(&mut stream).await, None);
    running.assert_empty().await;
}
