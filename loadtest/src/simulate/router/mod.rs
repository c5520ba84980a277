//! The router before the machines: which machine gets a request.
//!
//! Invariant: a router knows what a real one can know when the request arrives: which requests it
//! has sent and which have ended, the prompts, and the cache events of the machines.

mod block_index;
mod hash_ring;
mod prompt_tree;

use std::collections::HashMap;

use clap::ValueEnum;
use sterna_scheduler::{CacheChange, PAGE_TOKENS};

use block_index::BlockIndex;
use hash_ring::HashRing;
use prompt_tree::PromptTree;

/// The share of a prompt that a machine must have received before, so that the prompt follows.
/// Default of vllm-router 0.1.17 (`--cache-threshold`) and of SMG.
const MATCH_THRESHOLD: f64 = 0.3;

/// If the most loaded machine has this many requests more than the least loaded one, and
/// [`BALANCE_FACTOR`] times as many, the least loaded one gets the request. Default of
/// vllm-router 0.1.17 (`--balance-abs-threshold`) and of SMG.
const BALANCE_REQUESTS: u32 = 64;

/// Default of vllm-router 0.1.17 (`--balance-rel-threshold`) and of SMG.
const BALANCE_FACTOR: f64 = 1.5;

/// How a router chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RouterKind {
    /// The machines in turns.
    RoundRobin,
    /// The machine with the fewest requests in flight; in turns among equal ones, as nginx's
    /// `least_conn`.
    LeastLoaded,
    /// The machine that follows the hash of the session on a ring.
    ConsistentHash,
    /// The machine that has received the longest beginning of the prompt, while machines are about
    /// equally loaded, as vllm-router's and SMG's `cache_aware`.
    CacheAware,
    /// The machine with the least work: blocks of the prompt that it does not have cached, and
    /// blocks that its requests in flight had to compute, as Dynamo's KV router.
    KvEvents,
}

/// What the ring of consistent hashing maps to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum HashKey {
    /// The session.
    Session,
    /// The tenant.
    Tenant,
}

impl RouterKind {
    /// Returns the name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            RouterKind::RoundRobin => "round-robin",
            RouterKind::LeastLoaded => "least-loaded",
            RouterKind::ConsistentHash => "consistent-hash",
            RouterKind::CacheAware => "cache-aware",
            RouterKind::KvEvents => "kv-events",
        }
    }
}

/// What a router sees of a request.
pub(super) struct RoutedRequest<'a> {
    /// The number of the session. A session has one request at a time.
    pub(super) session: u64,
    /// The tenant.
    pub(super) tenant: u32,
    /// The prompt. Empty if the router does not read prompts.
    pub(super) prompt: &'a [u32],
}

/// What a router knows of a machine.
#[derive(Clone, Copy, Debug)]
struct MachineLoad {
    is_alive: bool,
    requests: u32, // Sent and not ended.
    blocks: u64,   // The blocks that these requests had to compute when they were sent.
}

/// A router and what it knows.
pub(super) struct Router {
    machines: Vec<MachineLoad>,
    turn: usize, // The machine after the last chosen one.
    hash_key: HashKey,
    in_flight: HashMap<u64, u64>, // The blocks of each request, by session.
    method: RoutingMethod,
}

/// The state that each kind of router has of its own.
enum RoutingMethod {
    RoundRobin,
    LeastLoaded,
    ConsistentHash(HashRing),
    CacheAware(PromptTree),
    KvEvents(BlockIndex),
}

impl Router {
    /// Creates a router before this many machines, which have received nothing.
    pub(super) fn new(kind: RouterKind, machines: usize) -> Router {
        let idle = MachineLoad {
            is_alive: true,
            requests: 0,
            blocks: 0,
        };
        Router {
            machines: vec![idle; machines],
            turn: 0,
            hash_key: HashKey::Session,
            in_flight: HashMap::new(),
            method: match kind {
                RouterKind::RoundRobin => RoutingMethod::RoundRobin,
                RouterKind::LeastLoaded => RoutingMethod::LeastLoaded,
                RouterKind::ConsistentHash => {
                    RoutingMethod::ConsistentHash(HashRing::new(machines))
                }
                RouterKind::CacheAware => RoutingMethod::CacheAware(PromptTree::new(machines)),
                RouterKind::KvEvents => RoutingMethod::KvEvents(BlockIndex::new(machines)),
            },
        }
    }

    /// Sets what consistent hashing maps to a machine.
    pub(super) fn hash_by(mut self, key: HashKey) -> Router {
        self.hash_key = key;
        self
    }

    /// Returns whether the choice depends on the prompt.
    pub(super) fn reads_prompts(&self) -> bool {
        matches!(
            self.method,
            RoutingMethod::CacheAware(_) | RoutingMethod::KvEvents(_)
        )
    }

    /// Returns whether the router needs the cache events of the machines.
    pub(super) fn reads_events(&self) -> bool {
        matches!(self.method, RoutingMethod::KvEvents(_))
    }

    /// Chooses the machine of a request and counts the request as sent. Returns `None` if no
    /// machine is alive.
    pub(super) fn send(&mut self, request: &RoutedRequest<'_>) -> Option<usize> {
        let machine = self.choose(request)?;
        self.turn = machine + 1;
        let blocks = match &self.method {
            RoutingMethod::KvEvents(index) => {
                let cached = index.cached(request.prompt);
                blocks(request.prompt) - cached.get(&machine).copied().unwrap_or(0)
            }
            _ => 0,
        };
        // The answer of a prompt that is cached is work too.
        let blocks = blocks.max(1);
        let load = &mut self.machines[machine];
        load.requests += 1;
        load.blocks += blocks;
        self.in_flight.insert(request.session, blocks);
        Some(machine)
    }

    fn choose(&mut self, request: &RoutedRequest<'_>) -> Option<usize> {
        let machines = &self.machines;
        let is_alive = |machine: usize| machines[machine].is_alive;
        let count = machines.len();
        let mut turns = (0..count).map(|index| (self.turn + index) % count);
        match &mut self.method {
            RoutingMethod::RoundRobin => turns.find(|&machine| is_alive(machine)),
            RoutingMethod::LeastLoaded => turns
                .filter(|&machine| is_alive(machine))
                .min_by_key(|&machine| machines[machine].requests),
            RoutingMethod::ConsistentHash(ring) => {
                let key = match self.hash_key {
                    HashKey::Session => request.session,
                    HashKey::Tenant => u64::from(request.tenant),
                };
                ring.find(key, is_alive)
            }
            RoutingMethod::CacheAware(tree) => {
                let machine = cache_aware(tree, machines, request.prompt)?;
                tree.insert(request.prompt, machine);
                Some(machine)
            }
            RoutingMethod::KvEvents(index) => least_work(index, machines, request.prompt),
        }
    }

    /// Records that the request of a session has ended, was refused, or is sent again.
    pub(super) fn ended(&mut self, machine: usize, session: u64) {
        let blocks = self.in_flight.remove(&session);
        let load = &mut self.machines[machine];
        load.requests -= 1;
        load.blocks -= blocks.expect("a request ends once");
    }

    /// Records the cache events of a machine, in their order.
    pub(super) fn cache_changed(&mut self, machine: usize, changes: &[CacheChange]) {
        if let RoutingMethod::KvEvents(index) = &mut self.method {
            for change in changes {
                index.follow(machine, change);
            }
        }
    }

    /// Records that a machine has failed. Its cache is lost.
    pub(super) fn failed(&mut self, machine: usize) {
        self.machines[machine].is_alive = false;
        match &mut self.method {
            RoutingMethod::CacheAware(tree) => tree.forget(machine),
            RoutingMethod::KvEvents(index) => index.forget(machine),
            _ => (),
        }
    }

    /// Records that a machine accepts requests again.
    pub(super) fn returned(&mut self, machine: usize) {
        self.machines[machine].is_alive = true;
    }
}

/// Returns the number of whole blocks of a prompt.
fn blocks(prompt: &[u32]) -> u64 {
    (prompt.len() / PAGE_TOKENS) as u64
}

/// Chooses as `cache_aware` of SGLang's router, of SMG and of vllm-router 0.1.15, with tokens in
/// place of characters: by load if the load is uneven, else the machine that has received the
/// longest beginning of the prompt, else the machine that has received the least text. Newer
/// sources of vllm-router choose the least loaded machine in the last case.
fn cache_aware(tree: &PromptTree, machines: &[MachineLoad], prompt: &[u32]) -> Option<usize> {
    let alive = || (0..machines.len()).filter(|&machine| machines[machine].is_alive);
    let load = |machine: usize| machines[machine].requests;
    let least_loaded = alive().min_by_key(|&machine| load(machine))?;
    let least = load(least_loaded);
    let most = alive().map(load).max()?;
    if most - least > BALANCE_REQUESTS && f64::from(most) > f64::from(least) * BALANCE_FACTOR {
        return Some(least_loaded);
    }
    let (received, machine) = tree.longest(prompt);
    let is_match = received as f64 > MATCH_THRESHOLD * prompt.len() as f64;
    machine
        .filter(|_| is_match)
        .or_else(|| alive().min_by_key(|&machine| tree.received(machine)))
}

/// Chooses as NVIDIA Dynamo's KV router with its default weight of 1 and temperature of 0
/// (`docs/architecture/kv_cache_routing.md`): the least sum of the prompt's blocks that a machine
/// has to compute and of the blocks of its requests in flight. Dynamo counts a block once that
/// several requests share; here a block counts for the request that has to compute it.
fn least_work(index: &BlockIndex, machines: &[MachineLoad], prompt: &[u32]) -> Option<usize> {
    let whole = blocks(prompt);
    let mut work: Vec<u64> = machines.iter().map(|load| load.blocks + whole).collect();
    for (machine, cached) in index.cached(prompt) {
        work[machine] -= cached;
    }
    let alive = (0..machines.len()).filter(|&machine| machines[machine].is_alive);
    alive.min_by_key(|&machine| work[machine])
}

#[cfg(test)]
mod tests;
