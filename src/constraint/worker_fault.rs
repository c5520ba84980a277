//! Faults that tests put into a worker.
//!
//! A grammar in Lark names its fault in a comment, `// fault: abort`. The fault happens when the
//! worker computes the first mask after a drawn token. Without the feature `faults`, as in every
//! build of the product, such a comment means nothing.

use llguidance::api::TopLevelGrammar;

use super::TokenId;
use super::window::Window;

/// What goes wrong.
#[derive(Clone, Copy)]
pub(super) enum WorkerFault {
    Abort,
    Allocate,
    Loop,
    Recurse,
    WrongMask,
}

impl WorkerFault {
    /// Returns the fault that a grammar names.
    pub(super) fn of(grammar: &TopLevelGrammar) -> Option<WorkerFault> {
        let mut larks = grammar
            .grammars
            .iter()
            .filter_map(|one| one.lark_grammar.as_ref());
        let name = larks.find_map(|lark| lark.split_once("// fault: "))?.1;
        Some(match name.trim_end() {
            "abort" => WorkerFault::Abort,
            "allocate" => WorkerFault::Allocate,
            "loop" => WorkerFault::Loop,
            "recurse" => WorkerFault::Recurse,
            "wrong mask" => WorkerFault::WrongMask,
            other => panic!("there is no fault {other}"),
        })
    }

    /// Does it.
    pub(super) fn happen(self) -> Window {
        match self {
            WorkerFault::Abort => std::process::abort(),
            WorkerFault::Allocate => {
                let mut all = Vec::new();
                loop {
                    all.push(vec![1_u8; 1 << 20]);
                    std::hint::black_box(&all);
                }
            }
            WorkerFault::Loop => loop {
                std::hint::spin_loop();
            },
            WorkerFault::Recurse => {
                std::hint::black_box(recurse(&[0; 64]));
                Window::dead_end("it has recursed")
            }
            WorkerFault::WrongMask => Window {
                forced: vec![TokenId::MAX],
                ..Window::dead_end("it is wrong")
            },
        }
    }
}

/// Calls itself without an end.
fn recurse(before: &[u64; 64]) -> u64 {
    let own = std::hint::black_box(before.map(|value| value + 1));
    match own[0] {
        0 => 0,
        _ => recurse(&own) + own[1],
    }
}
