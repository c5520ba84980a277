//! The product's policy, and what other engines do, over the same scheduler.

use sterna_scheduler::{Budget, Limits, Order, Policy};

/// Names of all policies; the product's comes first.
pub(super) const NAMES: [&str; 7] = [
    "sterna",
    "fcfs",
    "vtc",
    "lpm",
    "token-budget",
    "prefill-first",
    "slots",
];

/// The policy of that name, and the limits that go with it.
pub(super) fn named(name: &str, limits: &Limits) -> Option<(&'static str, (Policy, Limits))> {
    let ours = Policy::default();
    let order = |order| Policy {
        order,
        ..ours.clone()
    };
    let first_come = |budget| Policy {
        order: Order::FirstCome,
        budget,
        max_draft: 0,
    };
    let limits = limits.clone();
    let known = NAMES.into_iter().find(|known| *known == name)?;
    let decided = match name {
        "sterna" => (ours, limits),
        "fcfs" => (order(Order::FirstCome), limits),
        "vtc" => (order(Order::FairShare { slack: 0 }), limits),
        "lpm" => (order(Order::LongestPrefix), limits),
        "token-budget" => (first_come(Budget::Tokens(512)), whole_prompts(limits, 512)),
        "prefill-first" => {
            let tokens = limits.max_sequence_tokens;
            (
                first_come(Budget::PrefillFirst),
                whole_prompts(limits, tokens),
            )
        }
        "slots" => {
            let limits = Limits {
                max_running: 4,
                ..whole_prompts(limits, 2048)
            };
            (first_come(Budget::Tokens(2048)), limits)
        }
        _ => return None,
    };
    Some((known, decided))
}

/// Prompts are cut by the step alone.
fn whole_prompts(limits: Limits, step_tokens: u32) -> Limits {
    Limits {
        step_tokens,
        prefill_chunk: step_tokens,
        ..limits
    }
}
