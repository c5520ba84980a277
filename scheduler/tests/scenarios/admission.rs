//! Which requests are accepted and admitted, in which order.

use sterna_scheduler::{
    Event, Limits, Plan, Refusal, Sampled, Scheduler, TenantId, TenantPolicy, TenantsError,
};

use super::table::Action::*;
use super::table::{ANSWER, LIMITS, check, first_come, request, text};

#[test]
fn requests_are_admitted_in_the_order_of_arrival() {
    let limits = Limits {
        max_running: 1,
        ..LIMITS
    };
    check(
        limits,
        &[
            (
                vec![
                    Submit("a", text(100..110), 1),
                    Submit("b", text(200..202), 1),
                ],
                "a 0..10*",
                "+a 0, -a Length 1",
            ),
            (
                vec![Submit("c", text(300..301), 1)],
                "b 0..2*",
                "+b 0, -b Length 1",
            ),
            (vec![], "c 0..1*", "+c 0, -c Length 1"),
        ],
    );
}

#[test]
fn a_request_is_admitted_only_if_its_whole_prompt_fits() {
    let limits = Limits { pages: 6, ..LIMITS };
    check(
        limits,
        &[
            (vec![Submit("a", text(100..131), 3)], "a 0..31*", "+a 0"),
            // Four pages are free, and the last token of `a` will need one of them.
            (vec![Submit("b", text(200..249), 1)], "a 31..32*", ""),
            (vec![], "a 32..33*", "-a Length 3"),
            (vec![], "b 0..32", "+b 0"),
        ],
    );
}

#[test]
fn first_come_holds_across_tenants() {
    let limits = Limits { pages: 6, ..LIMITS };
    check(
        limits,
        &[
            (vec![Submit("a", text(0..40), 2)], "a 0..32", "+a 0"),
            (
                vec![
                    Submit("b", text(100..164), 2), // More pages than are free.
                    SubmitOther("c", text(200..210), 2),
                ],
                "a 32..40*",
                "",
            ),
            (vec![], "a 40..41*", "-a Length 2"),
            (vec![], "b 0..32, c 0..10*", "+b 0, +c 0"),
        ],
    );
}

#[test]
fn requests_accepted_before_the_cap_was_lowered_end() {
    let mut scheduler = Scheduler::new(LIMITS, first_come(&LIMITS));
    let cap = |max_pages| {
        let terms = TenantPolicy {
            max_pages,
            ..TenantPolicy::default()
        };
        [(TenantId(0), terms)]
    };
    assert_eq!(scheduler.set_tenants(&cap(10)), Ok(()));
    let long = request(&text(100..200), 30, 0);
    for _ in 0..2 {
        assert!(scheduler.submit(0, long.clone()).is_ok());
    }
    assert_eq!(scheduler.set_tenants(&cap(2)), Ok(()));
    let refused = scheduler.submit(0, long);
    assert!(matches!(refused, Err(Refusal::TooLong { .. })));
    let mut finished = 0;
    for _ in 0..200 {
        if let Plan::Step(step) = scheduler.plan(0) {
            let wanted = step.batch().logits_count();
            step.commit(0, &vec![Sampled::Token(ANSWER); wanted]);
        }
        scheduler.check();
        let ended = |event: &Event| matches!(event, Event::Finished { .. });
        finished += scheduler.events().filter(ended).count();
    }
    assert_eq!(finished, 2);
    assert!(
        scheduler.tenant(TenantId(0)).pages > 2,
        "its cached pages are above the new cap"
    );
    let small = request(&text(300..320), 1, 0);
    assert!(scheduler.submit(0, small).is_ok());
    assert!(matches!(scheduler.plan(0), Plan::Step(_)));
    scheduler.check();
    assert!(
        scheduler.tenant(TenantId(0)).pages <= 2,
        "the cap holds again"
    );
}

#[test]
fn a_refusal_gives_its_reason() {
    let limits = Limits {
        pages: 4,
        max_queued: 1,
        ..LIMITS
    };
    let too_long = Refusal::TooLong {
        needed_tokens: 65,
        limit_tokens: 64,
    };
    let cases = [
        (0, 1, Some(Refusal::EmptyPrompt)),
        (1, 0, Some(Refusal::NothingToGenerate)),
        (64, 1, Some(too_long)),
        (63, 1, None),
    ];
    let mut scheduler = Scheduler::new(limits.clone(), first_come(&limits));
    for (prompt, max_new_tokens, refusal) in cases {
        let result = scheduler.submit(0, request(&text(0..prompt), max_new_tokens, 0));
        assert_eq!(result.err(), refusal, "{prompt} + {max_new_tokens}");
        scheduler.check();
    }
    let waiting = scheduler.snapshot().queued_time;
    let result = scheduler.submit(0, request(&[1], 1, 0));
    let retry_after = waiting;
    assert_eq!(result, Err(Refusal::Overloaded { retry_after }));
    assert!(waiting > 0, "the queued time is above 0");
    scheduler.drain();
    let result = scheduler.submit(0, request(&[1], 1, 0));
    assert_eq!(result, Err(Refusal::Draining));
}

#[test]
fn a_tenant_without_a_place_in_the_queue_is_refused() {
    let mut scheduler = Scheduler::new(LIMITS, first_come(&LIMITS));
    let tenant = TenantId(1);
    let with_queue = |max_queued| {
        let policy = TenantPolicy {
            max_queued,
            ..TenantPolicy::default()
        };
        [(tenant, policy)]
    };
    let invalid = Err(TenantsError::Invalid(tenant));
    assert_eq!(scheduler.set_tenants(&with_queue(0)), invalid);
    assert_eq!(scheduler.set_tenants(&with_queue(1)), Ok(()));
    assert!(scheduler.submit(0, request(&[1], 1, 1)).is_ok());
}
