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
    let longest = limits.max_sequence_tokens;
    let sterna = |order| PolicyPreset::sterna(name, order, limits, budget);
    Some(match name {
        "sterna" => sterna(Policy::default().order),
        "vtc" => sterna(Order::FairShare { slack: 0 }),
        "fcfs" => sterna(Order::FirstCome),
        "lpm" => sterna(Order::LongestPrefix),
        "token-budget" => PolicyPreset::other_engine(name, Budget::Tokens(512), limits, 512),
        "prefill-first" => PolicyPreset::other_engine(name, Budget::PrefillFirst, limits, longest),
        "slots" => {
            let limits = Limits {
                max_running: 4,
                ..limits.clone()
            };
            PolicyPreset::other_engine(name, Budget::Tokens(2048), &limits, 2048)
        }
        _ => return None,
    })
}

impl PolicyPreset {
    /// Returns the product's policy with another order and budget.
    fn sterna(name: &'static str, order: Order, limits: &Limits, budget: Budget) -> PolicyPreset {
        PolicyPreset {
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

    /// Returns another engine's policy: first come, first served, without a limit on prefill
    /// chunks other than `step_tokens`.
    fn other_engine(
        name: &'static str,
        budget: Budget,
        limits: &Limits,
        step_tokens: u32,
    ) -> PolicyPreset {
        PolicyPreset {
            name,
            policy: Policy {
                order: Order::FirstCome,
                budget,
                growth: match budget {
                    Budget::Tokens(512) => Growth::Minimal,
                    _ => Growth::Maximal,
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
