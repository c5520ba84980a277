//! How requests end: cancelled, failed, at a stop token.

use sterna_scheduler::{Event, FinishReason, Limits, Plan, Request, Sampled, Scheduler, TenantId};

use super::table::Action::*;
use super::table::{ANSWER, LIMITS, check, first_come, request, text};

#[test]
fn a_failed_step_ends_only_the_requests_that_fail_again() {
    let submitted = vec![
        Submit("a", text(100..120), 1),
        Submit("b", text(200..220), 2),
        FailNext(&["a"]),
    ];
    let again = vec![Submit("c", text(100..120), 1)];
    check(
        LIMITS,
        &[
            (submitted, "a 0..20*, b 0..20*", "+a 0, +b 0, -a Error 0"),
            (
                again,
                "b 20..21*, c 0..20*",
                "+c 0, -b Length 2, -c Length 1",
            ),
        ],
    );
}

#[test]
fn a_chunk_that_fails_again_ends_its_request_and_caches_nothing() {
    let submitted = vec![
        Submit("a", text(100..140), 1),
        Submit("b", text(200..210), 2),
        FailNext(&["a"]),
    ];
    let again = vec![Submit("c", text(100..140), 1)];
    check(
        LIMITS,
        &[
            (submitted, "a 0..32, b 0..10*", "+a 0, +b 0, -a Error 0"),
            (again, "b 10..11*, c 0..32", "+c 0, -b Length 2"),
            (vec![], "c 32..40*", "-c Length 1"),
        ],
    );
}

#[test]
fn a_failed_row_ends_its_request_and_caches_nothing() {
    let submitted = vec![
        Submit("a", text(100..120), 1),
        Submit("b", text(200..220), 1),
        FailRow("a"),
    ];
    check(
        LIMITS,
        &[
            (
                submitted,
                "a 0..20*, b 0..20*",
                "+a 0, +b 0, -a Error 0, -b Length 1",
            ),
            (
                vec![
                    Submit("c", text(100..120), 1),
                    Submit("d", text(200..220), 1),
                ],
                "d 19..20*, c 0..20*",
                "+c 0, +d 19, -d Length 1, -c Length 1",
            ),
        ],
    );
}

#[test]
fn a_cancelled_request_frees_its_pages_in_every_state() {
    let limits = Limits {
        max_running: 1,
        ..LIMITS
    };
    let scheduler = check(
        limits,
        &[
            (
                vec![
                    Submit("a", text(100..140), 9),
                    Submit("b", text(200..240), 9),
                ],
                "a 0..32",
                "+a 0",
            ),
            (vec![Cancel("b")], "a 32..40*", "-b Cancelled 0"),
            (vec![Cancel("a")], "", "-a Cancelled 1"),
        ],
    );
    let state = scheduler.snapshot();
    assert_eq!((state.free, state.tree, state.pinned), (97, 3, 0));
    assert_eq!((state.running, state.queued), (0, 0));
}

#[test]
fn a_stop_token_ends_the_output_once_it_is_long_enough() {
    for (min_new_tokens, reason, output) in [
        (0, FinishReason::Stop, 1),
        (1, FinishReason::Stop, 1),
        (3, FinishReason::Stop, 3),
        (4, FinishReason::Stop, 4),
        (5, FinishReason::Length, 4),
    ] {
        let mut scheduler = Scheduler::new(LIMITS, first_come(&LIMITS));
        let request = Request {
            min_new_tokens,
            stop_tokens: vec![1, ANSWER],
            ..request(&[1, 2, 3], 4, 0)
        };
        let id = scheduler
            .submit(0, request)
            .expect("the request is accepted");
        while let Plan::Step(step) = scheduler.plan(0) {
            step.commit(0, &[Sampled::Token(ANSWER)]);
        }
        let finished = Event::Finished {
            id,
            reason,
            tenant: TenantId(0),
            prompt_tokens: 3,
            cached_tokens: 0,
            output_tokens: output,
        };
        assert_eq!(
            scheduler.events().last(),
            Some(finished),
            "{min_new_tokens}"
        );
    }
}

#[test]
fn the_handle_of_an_ended_request_is_dead() {
    let mut scheduler = Scheduler::new(LIMITS, first_come(&LIMITS));
    let first = scheduler.submit(0, request(&[1], 1, 0));
    let first = first.expect("the request is accepted");
    assert!(scheduler.cancel(first, FinishReason::Cancelled));
    let second = scheduler.submit(0, request(&[1], 1, 0));
    let second = second.expect("the request is accepted");
    assert!(!scheduler.cancel(first, FinishReason::Cancelled));
    assert!(scheduler.cancel(second, FinishReason::Shutdown));
}

#[test]
fn deadlines_of_ended_requests_are_dropped() {
    let mut scheduler = Scheduler::new(LIMITS, first_come(&LIMITS));
    let request = Request {
        first_token_within: Some(1_000_000),
        ends_within: Some(2_000_000),
        ..request(&[1], 1, 0)
    };
    let kept = scheduler.submit(0, request.clone());
    let kept = kept.expect("the request is accepted");
    for _ in 0..1000 {
        let id = scheduler.submit(0, request.clone());
        scheduler.cancel(
            id.expect("the request is accepted"),
            FinishReason::Cancelled,
        );
        scheduler.check();
    }
    scheduler.events().for_each(drop);
    assert!(matches!(scheduler.plan(999_999), Plan::Step(_)));
    assert!(matches!(scheduler.plan(1_000_000), Plan::Idle));
    let ended = scheduler.events().last();
    let is_late = |event| match event {
        Event::Finished { id, reason, .. } => id == kept && reason == FinishReason::Deadline,
        _ => false,
    };
    assert!(
        ended.is_some_and(is_late),
        "the deadline of the waiting request holds"
    );
}
