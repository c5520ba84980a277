//! Cached prefixes: who computes, shares and waits for them.

use sterna_scheduler::{Diffusion, Limits};

use super::table::Action::*;
use super::table::{ANSWER, LIMITS, check, text};

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
fn a_request_waits_for_no_page_that_ends_inside_a_block() {
    let limits = Limits {
        diffusion: Some(Diffusion {
            block: 24,
            part: 24,
            mask_token: 9,
            is_causal: false,
            has_block_cache: false,
        }),
        ..LIMITS
    };
    check(
        limits,
        &[
            // Three whole blocks, and four whole pages: 48 tokens are both.
            (
                vec![
                    Submit("a", text(100..173), 1),
                    Submit("b", text(100..173), 1),
                ],
                "a 0..24",
                "+a 0",
            ),
            (vec![], "a 24..48", ""),
            (vec![], "a 48..72, b 48..72", "+b 48"),
        ],
    );
}

#[test]
fn a_scored_prompt_is_computed_whole_and_each_token_gives_logits_once() {
    check(
        LIMITS,
        &[
            (vec![Submit("a", text(100..140), 1)], "a 0..32", "+a 0"),
            (vec![], "a 32..40*", "-a Length 1"),
            (vec![Score("b", text(100..140), 2)], "b 0..32*32", "+b 0"),
            (vec![DropNext], "b 32..40*8", ""),
            (vec![], "b 32..40*8", ""),
            (vec![], "b 40..41*", "-b Length 2"),
            // A request beside it finds the pages.
            (
                vec![Submit("c", text(100..140), 1)],
                "c 39..40*",
                "+c 39, -c Length 1",
            ),
            (
                vec![Score("d", vec![100], 1)],
                "d 0..1*",
                "+d 0, -d Length 1",
            ),
            (
                vec![Score("e", text(200..240), 1), FailRow("e")],
                "e 0..32*32",
                "+e 0, -e Error 0",
            ),
        ],
    );
}

#[test]
fn scored_prompts_share_the_logits_of_a_step() {
    let limits = Limits {
        step_tokens: 200,
        prefill_chunk: 200,
        ..LIMITS
    };
    check(
        limits,
        &[
            (
                vec![
                    Score("a", text(100..180), 1),
                    Score("b", text(200..210), 1),
                    Submit("c", text(300..310), 1),
                ],
                "a 0..64*64, b 0..1*, c 0..10*",
                "+a 0, +b 0, +c 0, -c Length 1",
            ),
            (vec![], "a 64..80*16, b 1..10*9", "-a Length 1, -b Length 1"),
        ],
    );
}
