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

/// The policy of that name, and the limits that go with it. Those that know a budget of time have the given one.
pub(super) fn named(name: &str, limits: &Limits, budget: Budget) -> Option<Choice> {
    let name = NAMES.into_iter().find(|known| *known == name)?;
    let longest = limits.max_sequence_tokens;
    let ours = |order| Choice::ours(name, order, limits, budget);
    Some(match name {
        "sterna" => ours(Policy::default().order),
        "vtc" => ours(Order::FairShare { slack: 0 }),
        "fcfs" => ours(Order::FirstCome),
        "lpm" => ours(Order::LongestPrefix),
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
    /// The product's but for the order and the budget.
    fn ours(name: &'static str, order: Order, limits: &Limits, budget: Budget) -> Choice {
        Choice {
            name,
            policy: Policy {
                order,
                budget,
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
