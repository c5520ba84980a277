//! Full memory: which pages are evicted, and which sequence is preempted.

use sterna_scheduler::Limits;

use super::table::Action::*;
use super::table::{LIMITS, check, text};

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
