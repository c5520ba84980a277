//! The engine's configuration.

use std::time::Duration;

use sterna_scheduler::{CostModel, Limits, Policy, TokenId};

/// The engine's limits and policies.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The scheduler's limits: pages, running and queued requests, tokens per step.
    pub limits: Limits,
    /// The scheduler's policy.
    pub policy: Policy,
    /// Public prefixes, which the conversations of several tenants begin with. Tenant policies
    /// refer to them by their index.
    pub public_prefixes: Vec<Vec<TokenId>>,
    /// The cost of a step, in which all draws cost the same. If `None`, the engine measures it and
    /// the cost of each kind of draw at the start, in about a second.
    pub cost: Option<CostModel>,
    /// Capacity of the submit queue, in requests. A configured tenant may fill a quarter of it, and
    /// at least 8 places. A tenant with nothing in it always gets a place.
    pub submit_queue: usize,
    /// How long a drain lets requests finish.
    pub drain_limit: Duration,
    /// See `Status::stall_limit`.
    pub stall_limit: Duration,
    /// Whether to pin the engine thread to the first core, as worker 0 of the model's pool.
    pub pin: bool,
}
