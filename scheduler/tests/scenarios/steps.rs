//! What a step contains: chunks of prompts, decodes, and what follows a step that is dropped.

use sterna_scheduler::{Budget, CostModel, Limits, Plan, Policy, Row, Sampled, Scheduler, TokenId};

use super::table::Action::*;
use super::table::{LIMITS, check, request, text};

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
fn the_logits_of_a_deferred_draw_are_computed_again() {
    check(
        LIMITS,
        &[
            (
                vec![
                    Submit("a", text(100..132), 3),
                    Submit("b", text(200..210), 3),
                    DeferRow("a"),
                ],
                "a 0..32*, b 0..10*",
                "+a 0, +b 0",
            ),
            // Only the last token of the prompt is computed again.
            (vec![DeferRow("a")], "a 31..32*, b 10..11*", ""),
            (vec![], "a 31..32*, b 11..12*", "-b Length 3"),
            (vec![DeferRow("a")], "a 32..33*", ""),
            (vec![], "a 32..33*", ""),
            (vec![], "a 33..34*", "-a Length 3"),
        ],
    );
}

/// The times of a mixture: every further row of a small step reads further experts, and a large
/// step has read nearly all.
const MIXTURE: CostModel = CostModel {
    rows: [
        7_000_000,
        10_700_000,
        17_000_000,
        28_000_000,
        46_000_000,
        71_000_000,
        94_000_000,
        119_000_000,
        220_000_000,
        438_000_000,
    ],
    ..CostModel::UNMEASURED
};

/// Returns the rows of the next step, and draws `token` for each.
fn rows_of_step(scheduler: &mut Scheduler, now: u64, token: TokenId) -> Vec<usize> {
    let Plan::Step(step) = scheduler.plan(now) else {
        panic!("a request runs");
    };
    let rows = step.batch().rows().iter().map(Row::len).collect();
    let mut sampled = Vec::new();
    for row in step.batch().rows() {
        let first = (row.logits > 0).then_some(Sampled::Token(token));
        let rest = (row.logits as usize).saturating_sub(1);
        sampled.extend(
            first
                .into_iter()
                .chain(std::iter::repeat_n(Sampled::Void, rest)),
        );
    }
    step.commit(now, &sampled);
    scheduler.events().for_each(drop);
    rows
}

#[test]
fn a_mixture_has_larger_chunks_and_fewer_drafts() {
    let limits = Limits {
        step_tokens: 512,
        prefill_chunk: 512,
        pages: 100,
        max_sequence_tokens: 1024,
        ..LIMITS
    };
    let policy = Policy {
        max_draft: 4,
        budget: Budget::within(50_000),
        ..Policy::default()
    };
    let dense = CostModel {
        rows: CostModel::roofline(7_000_000, 850_000),
        ..CostModel::UNMEASURED
    };
    // The prompt repeats itself, so it proposes drafts.
    let prompt: Vec<TokenId> = [1, 2, 3, 4].repeat(4);
    let run = |cost| {
        let mut scheduler = Scheduler::new(limits.clone(), policy.clone());
        scheduler.calibrate(cost);
        let submit = |scheduler: &mut Scheduler, now, prompt: &[TokenId]| {
            scheduler.submit(now, request(prompt, 20, 0)).expect("room");
        };
        submit(&mut scheduler, 0, &prompt);
        assert_eq!(rows_of_step(&mut scheduler, 1, 1), [16]);
        let decode = rows_of_step(&mut scheduler, 2, 9);
        submit(&mut scheduler, 2, &text(100..600));
        let beside = rows_of_step(&mut scheduler, 3, 9);
        (decode[0], beside[1])
    };
    let (decode, chunk) = run(dense);
    assert_eq!(decode, 5, "further rows are free");
    let (decode_of_mixture, chunk_of_mixture) = run(MIXTURE);
    assert_eq!(decode_of_mixture, 3, "a further row brings further experts");
    assert!(chunk_of_mixture > chunk, "{chunk_of_mixture} and {chunk}");
}
