//! Models that keep states: at which token a sequence can continue.

use sterna_scheduler::{Limits, StateLimits};

use super::table::Action::*;
use super::table::{LIMITS, check, text};

/// Limits under which a state is kept on trial at every `trial_interval` tokens.
fn limits(slabs: u32, trial_interval: u32) -> Limits {
    Limits {
        max_running: 2,
        states: Some(StateLimits {
            slabs,
            in_place_tokens: 1,
            trial_interval,
        }),
        ..LIMITS
    }
}

#[test]
fn a_preempted_sequence_continues_from_its_last_state_on_trial() {
    let limits = Limits {
        pages: 4,
        ..limits(5, 16)
    };
    check(
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
            (vec![Run(15)], "a 31..32*, b 31..32*", ""),
            // `b` loses both pages, and `a` gets the later one.
            (vec![], "a 32..33*", "<b"),
            // `b` kept a state at token 16, where a decode began.
            (vec![Cancel("a")], "b 16..33*", "-a Cancelled 19"),
        ],
    );
}

#[test]
fn a_prompt_that_diverges_inside_a_long_one_continues_at_a_state_on_trial() {
    let short = Limits {
        prefill_chunk: 48,
        ..limits(8, 32)
    };
    check(
        short,
        &[
            (vec![Submit("a", text(100..220), 1)], "a 0..48", "+a 0"),
            (vec![], "a 48..96", ""),
            (vec![], "a 96..120*", "-a Length 1"),
            // The first 80 tokens are equal. The states at 32 and 64 were inside chunks.
            (
                vec![Submit("b", [text(100..180), text(300..340)].concat(), 1)],
                "b 64..112",
                "+b 64",
            ),
            (vec![], "b 112..120*", "-b Length 1"),
        ],
    );
}

#[test]
fn a_flood_of_prompts_displaces_its_own_tenant_s_states() {
    let six_slabs = Limits {
        prefill_chunk: 48,
        ..limits(6, 1024)
    };
    let long = |from: u32| text(from..from + 33);
    check(
        six_slabs,
        &[
            (
                vec![SubmitOther("a", long(100), 1)],
                "a 0..33*",
                "+a 0, -a Length 1",
            ),
            (
                vec![Submit("b", long(200), 1)],
                "b 0..33*",
                "+b 0, -b Length 1",
            ),
            (
                vec![Submit("c", long(300), 1)],
                "c 0..33*",
                "+c 0, -c Length 1",
            ),
            (
                vec![Submit("d", long(400), 1)],
                "d 0..33*",
                "+d 0, -d Length 1",
            ),
            (
                vec![Submit("e", long(500), 1)],
                "e 0..33*",
                "+e 0, -e Length 1",
            ),
            // Each prompt leaves two states. The oldest of all are those of `a`.
            (
                vec![SubmitOther("a2", long(100), 1)],
                "a2 32..33*",
                "+a2 32, -a2 Length 1",
            ),
            (
                vec![Submit("b2", long(200), 1)],
                "b2 0..33*",
                "+b2 0, -b2 Length 1",
            ),
        ],
    );
}

#[test]
fn a_state_on_trial_displaces_no_state_that_is_likely_to_be_wanted() {
    check(
        limits(4, 16),
        &[
            (vec![Submit("a", text(100..133), 1)], "a 0..32", "+a 0"),
            (vec![], "a 32..33*", "-a Length 1"),
            (vec![Submit("b", text(200..265), 1)], "b 0..32", "+b 0"),
            (vec![], "b 32..64", ""),
            (vec![], "b 64..65*", "-b Length 1"),
            (
                vec![Submit("a2", text(100..133), 1)],
                "a2 32..33*",
                "+a2 32, -a2 Length 1",
            ),
        ],
    );
}
