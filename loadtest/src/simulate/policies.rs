//! The product's policy, and what other engines do, over the same scheduler.

use sterna_scheduler::{Budget, Growth, Limits, Order, Policy};

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

/// One way to decide.
pub(super) struct Choice {
    /// By which it is asked for.
    pub(super) name: &'static str,
    /// Who is next, and how much a step may do.
    pub(super) policy: Policy,
    /// What bounds it.
    pub(super) limits: Limits,
    /// Whether the scheduler is told whose a request is. To engines that know no tenants, all are one.
    pub(super) knows_tenants: bool,
}

/// The policy of that name, and the limits that go with it.
pub(super) fn named(name: &str, limits: &Limits) -> Option<Choice> {
    let name = NAMES.into_iter().find(|known| *known == name)?;
    let longest = limits.max_sequence_tokens;
    let fair = |slack| Choice::ours(name, Order::FairShare { slack }, limits);
    Some(match name {
        "sterna" => Choice {
            policy: Policy::default(),
            ..fair(0)
        },
        "vtc" => fair(0),
        "fcfs" => Choice::ours(name, Order::FirstCome, limits),
        "lpm" => Choice::ours(name, Order::LongestPrefix, limits),
        "token-budget" => Choice::theirs(name, Budget::Tokens(512), limits, 512),
        "prefill-first" => Choice::theirs(name, Budget::PrefillFirst, limits, longest),
        "slots" => {
            let limits = Limits {
                max_running: 4,
                ..limits.clone()
            };
            Choice::theirs(name, Budget::Tokens(2048), &limits, 2048)
        }
        _ => return None,
    })
}

impl Choice {
    /// The product's but for the order.
    fn ours(name: &'static str, order: Order, limits: &Limits) -> Choice {
        Choice {
            name,
            policy: Policy {
                order,
                ..Policy::default()
            },
            limits: limits.clone(),
            knows_tenants: true,
        }
    }

    /// First come, first served; prompts are cut by the step alone.
    fn theirs(name: &'static str, budget: Budget, limits: &Limits, step_tokens: u32) -> Choice {
        Choice {
            name,
            policy: Policy {
                order: Order::FirstCome,
                budget,
                growth: match budget {
                    Budget::Tokens(512) => Growth::Least,
                    _ => Growth::Most,
                },
                max_draft: 0,
            },
            limits: Limits {
                step_tokens,
                prefill_chunk: step_tokens,
                ..limits.clone()
            },
            knows_tenants: false,
        }
    }
}
