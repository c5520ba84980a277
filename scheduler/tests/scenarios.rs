//! Named situations as small tables: the actions, the rows of the next step, and the events.
//!
//! A row is written `name start..end`, with `*` if it has logits. Rows and events are in order. The
//! fake model answers every row with the token [`ANSWER`].

use std::collections::BTreeMap;
use std::ops::Range;

use sterna_scheduler::{
    Budget, Event, FinishReason, Growth, Limits, Order, Plan, Policy, Refusal, Request, Sampled,
    Scheduler, SequenceId, TenantId, TenantPolicy, TenantsError, TokenId,
};

const ANSWER: TokenId = 7;

/// Limits under which nothing is scarce.
const LIMITS: Limits = Limits {
    pages: 100,
    max_running: 8,
    max_queued: 8,
    max_queued_time: u64::MAX,
    step_tokens: 64,
    prefill_chunk: 32,
    max_sequence_tokens: 1000,
};

/// Returns the simplest policy: first come, first served, with a token budget.
fn first_come(limits: &Limits) -> Policy {
    Policy {
        order: Order::FirstCome,
        budget: Budget::Tokens(limits.step_tokens),
        growth: Growth::Expected,
        max_draft: 0,
    }
}

/// An action before a step is planned.
enum Action {
    /// Submits a request with this name, prompt and `max_new_tokens`.
    Submit(&'static str, Vec<TokenId>, u32),
    /// Submits a request of another tenant.
    SubmitOther(&'static str, Vec<TokenId>, u32),
    Cancel(&'static str),
    Reset,
    /// Runs requests with short outputs, so that the scheduler reserves little memory for outputs.
    LearnShortOutputs,
    /// Runs a number of steps without checking them.
    Run(u32),
    /// Drops the next step.
    DropNext,
    /// Fails the next step. The rerun of its rows fails for these requests.
    FailNext(&'static [&'static str]),
    /// Fails the row of this request in the next step.
    FailRow(&'static str),
}
use Action::*;

/// The actions, the rows of the next step (empty if the plan is idle), and the events up to its
/// end.
type Turn = (Vec<Action>, &'static str, &'static str);

#[derive(Default)]
struct Names {
    ids: BTreeMap<&'static str, SequenceId>,
}

impl Names {
    fn of(&self, id: SequenceId) -> &'static str {
        let mut names = self.ids.iter();
        names
            .find(|(_, named)| **named == id)
            .expect("the sequence has a name")
            .0
    }

    fn event(&self, event: Event) -> String {
        match event {
            Event::Admitted { id, cached_tokens } => format!("+{} {cached_tokens}", self.of(id)),
            Event::Preempted { id } => format!("<{}", self.of(id)),
            Event::Displaced { id, .. } => format!("!{}", self.of(id)),
            Event::Finished {
                id,
                reason,
                output_tokens,
                ..
            } => format!("-{} {reason:?} {output_tokens}", self.of(id)),
        }
    }
}

fn check(limits: Limits, turns: &[Turn]) -> Scheduler {
    let mut scheduler = Scheduler::new(limits.clone(), first_come(&limits));
    let other = (TenantId(1), TenantPolicy::default());
    assert_eq!(scheduler.set_tenants(&[other]), Ok(()));
    let mut names = Names::default();
    for (number, (actions, rows, events)) in turns.iter().enumerate() {
        let mut next = None;
        for action in actions {
            match action {
                Submit(name, prompt, max_new_tokens) => {
                    let id = scheduler.submit(0, request(prompt, *max_new_tokens, 0));
                    names.ids.insert(name, id.expect("the request is accepted"));
                }
                SubmitOther(name, prompt, max_new_tokens) => {
                    let id = scheduler.submit(0, request(prompt, *max_new_tokens, 1));
                    names.ids.insert(name, id.expect("the request is accepted"));
                }
                Cancel(name) => {
                    assert!(scheduler.cancel(names.ids[name], FinishReason::Cancelled));
                }
                Reset => scheduler.reset_prefix_cache(),
                LearnShortOutputs => learn_short_outputs(&mut scheduler),
                Run(steps) => {
                    for _ in 0..*steps {
                        step(&mut scheduler, &names, None);
                    }
                }
                DropNext | FailNext(_) | FailRow(_) => next = Some(action),
            }
        }
        assert_eq!(step(&mut scheduler, &names, next), *rows, "turn {number}");
        scheduler.check();
        let seen: Vec<_> = scheduler.events().map(|e| names.event(e)).collect();
        assert_eq!(seen.join(", "), *events, "turn {number}");
    }
    scheduler
}

fn learn_short_outputs(scheduler: &mut Scheduler) {
    for _ in 0..60 {
        let id = scheduler.submit(0, request(&[1], 1, 0));
        assert!(id.is_ok() && scheduler.events().count() == 0);
        let Plan::Step(step) = scheduler.plan(0) else {
            panic!("the plan is idle although a request is waiting");
        };
        step.commit(0, &[Sampled::Token(ANSWER)]);
        assert_eq!(scheduler.events().count(), 2, "admitted and finished");
    }
    scheduler.reset_prefix_cache();
}

/// Plans a step, and commits, drops or fails it. Returns its rows.
fn step(scheduler: &mut Scheduler, names: &Names, next: Option<&Action>) -> String {
    let Plan::Step(step) = scheduler.plan(0) else {
        return String::new();
    };
    let batch = step.batch();
    let rows = batch.rows().iter().map(|row| {
        let mark = if row.logits > 0 { "*" } else { "" };
        format!(
            "{} {}..{}{mark}",
            names.of(row.sequence),
            row.start,
            row.end()
        )
    });
    let rows: Vec<_> = rows.collect();
    let with_logits = batch.rows().iter().filter(|row| row.logits > 0);
    let sampled: Vec<_> = with_logits
        .map(|row| match next {
            Some(FailRow(name)) if names.ids[name] == row.sequence => Sampled::Failed,
            _ => Sampled::Token(ANSWER),
        })
        .collect();
    match next {
        Some(DropNext) => drop(step),
        Some(FailNext(failed)) => {
            let ids: Vec<_> = failed.iter().map(|name| names.ids[name]).collect();
            step.commit_rerun(0, &sampled, &ids);
        }
        _ => step.commit(0, &sampled),
    }
    rows.join(", ")
}

fn request(prompt: &[TokenId], max_new_tokens: u32, tenant: u32) -> Request {
    Request {
        prompt: prompt.to_vec(),
        max_new_tokens,
        min_new_tokens: 0,
        stop_tokens: Vec::new(),
        tenant: TenantId(tenant),
        ..Request::default()
    }
}

/// Returns a prompt of these tokens.
fn text(tokens: Range<TokenId>) -> Vec<TokenId> {
    tokens.collect()
}

#[test]
fn a_prompt_is_computed_in_whole_pages_until_its_end() {
    check(
        LIMITS,
        &[
            (vec![Submit("a", text(100..170), 2)], "a 0..32", "+a 0"),
            (vec![], "a 32..64", ""),
            (vec![], "a 64..70*", ""),
            (vec![], "a 70..71*", "-a Length 2"),
            (vec![], "", ""),
        ],
    );
}

#[test]
fn prompts_around_a_page_long_are_computed_in_one_step() {
    for (len, row) in [(15, "a 0..15*"), (16, "a 0..16*"), (17, "a 0..17*")] {
        check(
            LIMITS,
            &[(vec![Submit("a", text(0..len), 1)], row, "+a 0, -a Length 1")],
        );
    }
}

#[test]
fn decodes_come_first_then_prefills_then_admissions() {
    check(
        LIMITS,
        &[
            (vec![Submit("a", text(100..110), 9)], "a 0..10*", "+a 0"),
            (
                vec![Submit("b", text(200..260), 9)],
                "a 10..11*, b 0..32",
                "+b 0",
            ),
            (
                vec![Submit("c", text(300..310), 9)],
                "a 11..12*, b 32..60*, c 0..10*",
                "+c 0",
            ),
            (vec![], "a 12..13*, b 60..61*, c 10..11*", ""),
        ],
    );
}

#[test]
fn several_prompts_advance_in_one_step() {
    let submitted = vec![
        Submit("a", text(100..180), 1),
        Submit("b", text(200..250), 1),
        Submit("c", text(300..310), 1),
    ];
    check(
        LIMITS,
        &[
            (submitted, "a 0..32, b 0..32", "+a 0, +b 0, +c 0"),
            (
                vec![],
                "a 32..64, b 32..50*, c 0..10*",
                "-b Length 1, -c Length 1",
            ),
            (vec![], "a 64..80*", "-a Length 1"),
        ],
    );
}

#[test]
fn a_prefill_gets_eight_tokens_even_if_decodes_use_the_whole_budget() {
    let limits = Limits {
        step_tokens: 1,
        ..LIMITS
    };
    check(
        limits,
        &[
            (vec![Submit("a", text(100..101), 9)], "a 0..1*", "+a 0"),
            (
                vec![Submit("b", text(200..201), 9)],
                "a 1..2*, b 0..1*",
                "+b 0",
            ),
            (
                vec![Submit("c", text(300..340), 9)],
                "a 2..3*, b 1..2*, c 0..8",
                "+c 0",
            ),
            (vec![], "a 3..4*, b 2..3*, c 8..16", ""),
        ],
    );
}

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
fn a_cached_prefix_is_not_computed_again() {
    check(
        LIMITS,
        &[
            (
                vec![Submit("a", text(100..132), 1)],
                "a 0..32*",
                "+a 0, -a Length 1",
            ),
            // The whole prompt is cached. The last page is copied except its last token, which is
            // computed for its logits.
            (
                vec![Submit("b", text(100..132), 1)],
                "b 31..32*",
                "+b 31, -b Length 1",
            ),
            (
                vec![Submit("c", text(100..133), 1)],
                "c 32..33*",
                "+c 32, -c Length 1",
            ),
            (vec![Reset], "", ""),
            (
                vec![Submit("d", text(100..132), 1)],
                "d 0..32*",
                "+d 0, -d Length 1",
            ),
        ],
    );
}

#[test]
fn a_page_computed_twice_is_kept_once() {
    let scheduler = check(
        LIMITS,
        &[
            (
                vec![Submit("a", text(100..132), 1)],
                "a 0..32*",
                "+a 0, -a Length 1",
            ),
            (
                vec![Submit("b", text(100..132), 1)],
                "b 31..32*",
                "+b 31, -b Length 1",
            ),
        ],
    );
    let state = scheduler.snapshot();
    assert_eq!((state.redirects, state.tree, state.pinned), (1, 2, 0));
    assert_eq!((state.prefix_queries, state.prefix_hits), (64, 31));
}

#[test]
fn another_tenant_shares_nothing() {
    check(
        LIMITS,
        &[
            (
                vec![Submit("a", text(100..120), 1)],
                "a 0..20*",
                "+a 0, -a Length 1",
            ),
            (
                vec![SubmitOther("b", text(100..120), 1)],
                "b 0..20*",
                "+b 0, -b Length 1",
            ),
        ],
    );
}

#[test]
fn outputs_are_cached_for_the_next_turn_of_a_conversation() {
    let conversation = [text(100..115), vec![ANSWER; 18], text(200..204)].concat();
    check(
        LIMITS,
        &[
            (vec![Submit("a", text(100..115), 18)], "a 0..15*", "+a 0"),
            (vec![Run(16)], "a 31..32*", "-a Length 18"),
            (
                vec![Submit("b", conversation, 1)],
                "b 32..37*",
                "+b 32, -b Length 1",
            ),
        ],
    );
}

#[test]
fn a_request_waits_for_a_prefix_that_is_being_computed() {
    let system = text(100..148);
    let chat = |own| [system.clone(), text(own)].concat();
    let submitted = vec![
        Submit("a", chat(200..203), 1),
        Submit("b", chat(300..303), 1),
        Submit("other", text(500..510), 1),
        Submit("c", chat(400..403), 1),
    ];
    check(
        LIMITS,
        &[
            // `other` bypasses `b`, which waits for the prefix that `a` computes.
            (
                submitted,
                "a 0..32, other 0..10*",
                "+a 0, +other 0, -other Length 1",
            ),
            (vec![], "a 32..51*", "-a Length 1"),
            (
                vec![],
                "b 48..51*, c 48..51*",
                "+b 48, +c 48, -b Length 1, -c Length 1",
            ),
        ],
    );
}

#[test]
fn a_request_that_waits_for_a_prefix_runs_when_the_prefill_is_cancelled() {
    check(
        LIMITS,
        &[
            (
                vec![
                    Submit("a", text(100..150), 1),
                    Submit("b", text(100..151), 1),
                ],
                "a 0..32",
                "+a 0",
            ),
            (
                vec![Cancel("a")],
                "b 32..51*",
                "-a Cancelled 0, +b 32, -b Length 1",
            ),
        ],
    );
}

#[test]
fn the_later_arrival_is_preempted_and_finds_its_pages_in_the_cache() {
    let limits = Limits { pages: 4, ..LIMITS };
    let scheduler = check(
        limits,
        &[
            (
                vec![LearnShortOutputs, Submit("a", text(100..115), 40)],
                "a 0..15*",
                "+a 0",
            ),
            (
                vec![Submit("b", text(200..216), 40)],
                "a 15..16*, b 0..16*",
                "+b 0",
            ),
            // Each has two pages, and `a` needs a third. `b` loses both of its pages; the later one
            // is evicted.
            (vec![Run(15)], "a 31..32*, b 31..32*", ""),
            (vec![], "a 32..33*", "<b"),
            (vec![Cancel("a")], "b 16..33*", "-a Cancelled 19"),
        ],
    );
    assert_eq!(scheduler.snapshot().preemptions, 1);
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
fn the_cached_prefix_of_a_request_is_not_evicted_for_it() {
    let limits = Limits { pages: 4, ..LIMITS };
    check(
        limits,
        &[
            (vec![Submit("a", text(100..133), 1)], "a 0..32", "+a 0"),
            (vec![], "a 32..33*", "-a Length 1"),
            (vec![Submit("r", text(1..2), 3)], "r 0..1*", "+r 0"),
            // `b` needs two more pages. Three cached pages can be evicted, but two of them are the
            // prefix of `b`.
            (vec![Submit("b", text(100..153), 1)], "r 1..2*", ""),
            (vec![], "r 2..3*", "-r Length 3"),
            // `b` could copy from the third page, but then it would not fit.
            (vec![], "b 32..53*", "+b 32, -b Length 1"),
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
fn a_dropped_step_is_planned_again() {
    check(
        LIMITS,
        &[
            (
                vec![Submit("a", text(100..140), 2), DropNext],
                "a 0..32",
                "+a 0",
            ),
            (vec![DropNext], "a 0..32", ""),
            (vec![], "a 0..32", ""),
            (vec![], "a 32..40*", ""),
        ],
    );
}

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
fn the_least_recently_used_page_is_evicted_first() {
    let limits = Limits { pages: 3, ..LIMITS };
    check(
        limits,
        &[
            (
                vec![Submit("a", text(100..117), 1)],
                "a 0..17*",
                "+a 0, -a Length 1",
            ),
            (
                vec![Submit("b", text(200..217), 1)],
                "b 0..17*",
                "+b 0, -b Length 1",
            ),
            (
                vec![Submit("a2", text(100..117), 1)],
                "a2 16..17*",
                "+a2 16, -a2 Length 1",
            ),
            (
                vec![Submit("c", text(300..317), 1)],
                "c 0..17*",
                "+c 0, -c Length 1",
            ),
            (
                vec![Submit("a3", text(100..117), 1)],
                "a3 16..17*",
                "+a3 16, -a3 Length 1",
            ),
            (
                vec![Submit("b2", text(200..217), 1)],
                "b2 0..17*",
                "+b2 0, -b2 Length 1",
            ),
        ],
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
