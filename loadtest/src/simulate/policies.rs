//! The product's scheduling policy, and the policies of other engines, for the same scheduler.

use sterna_scheduler::{Budget, Growth, Limits, Order, Policy};

/// The names of all policies. The product's comes first.
pub(super) const NAMES: [&str; 7] = [
    "sterna",
    "fcfs",
    "vtc",
    "lpm",
    "token-budget",
    "prefill-first",
    "slots",
];

/// A policy and the limits that belong to it.
pub(super) struct PolicyPreset {
    /// The name on the command line.
    pub(super) name: &'static str,
    /// The order of admission, and the budget of a step.
    pub(super) policy: Policy,
    /// The limits of the scheduler.
    pub(super) limits: Limits,
    /// Whether the scheduler sees the tenants. If not, all requests belong to one tenant.
    pub(super) knows_tenants: bool,
}

/// Returns the preset `name`, based on `limits`. Policies with a time budget use `budget`.
pub(super) fn named(name: &str, limits: &Limits, budget: Budget) -> Option<PolicyPreset> {
    let name = NAMES.into_iter().find(|known| *known == name)?;
    let (longest, max_running) = (limits.max_sequence_tokens, limits.max_running);
    // The product's policy with another order.
    let sterna = |order| PolicyPreset {
        name,
        policy: Policy {
            order,
            budget,
            ..Policy::default()
        },
        limits: limits.clone(),
        knows_tenants: true,
    };
    // Another engine's policy: first come, first served, without a limit on prefill chunks other
    // than `step_tokens`.
    let other_engine = |budget, growth, step_tokens, max_running| PolicyPreset {
        name,
        policy: Policy {
            order: Order::FirstCome,
            budget,
            growth,
            max_draft: 0,
            own_drafts: None,
        },
        limits: Limits {
            step_tokens,
            prefill_chunk: step_tokens,
            max_running,
            ..limits.clone()
        },
        knows_tenants: false,
    };
    Some(match name {
        "sterna" => sterna(Policy::default().order),
        "vtc" => sterna(Order::FairShare { slack: 0 }),
        "fcfs" => sterna(Order::FirstCome),
        "lpm" => sterna(Order::LongestPrefix),
        "token-budget" => other_engine(Budget::Tokens(512), Growth::Minimal, 512, max_running),
        "prefill-first" => {
            other_engine(Budget::PrefillFirst, Growth::Maximal, longest, max_running)
        }
        "slots" => other_engine(Budget::Tokens(2048), Growth::Maximal, 2048, 4),
        _ => return None,
    })
}
