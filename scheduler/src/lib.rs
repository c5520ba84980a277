//! Given the time and the requests, decides the next step of a continuous batch.
//!
//! ```text
//! submit ──► queue ──► plan(now) ──► Step ──► (the caller computes step.batch()) ──► commit ──► events
//! ```
//!
//! A [`Step`] borrows the scheduler, so nothing is submitted, cancelled or freed while it is being computed: the
//! compiler proves it. **Plan moves pages; commit moves truth.** Planning may admit, evict and preempt, but only
//! committing changes what counts as computed, so a step that is dropped needs no undo.
//!
//! What always holds (`Scheduler::check` asserts it):
//! - every page is free, private to one sequence, or in the prefix tree; a step writes private pages only;
//! - a page enters the tree only when it is full and computed, and is found again only by equal tokens after an equal
//!   prefix, of the same tenant or public;
//! - an accepted request fits in memory alone, and the earliest running sequence is never preempted: so everybody ends;
//! - equal calls give equal plans. The scheduler is told the time; it does no I/O, and starts no thread.

#![forbid(unsafe_code)]

mod admission;
mod cost;
mod invariants;
mod output_rules;
mod pages;
mod policy;
mod queue;
mod request;
mod sequence;
mod step;
mod tenant;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use slab::Slab;

pub use cost::{CostModel, Nanos, StepShape};
pub use output_rules::OutputRules;
pub use pages::{PAGE_TOKENS, Page};
pub use policy::{Budget, Growth, INTER_TOKEN_TARGET, Order, Policy};
pub use request::{
    Event, FinishReason, Limits, Micros, Refusal, Request, SequenceId, Snapshot, TenantId, TokenId,
};
pub use step::{Batch, MAX_DRAFTED_TOKENS, PageCopy, Plan, Row, Sampled, Step};
pub use tenant::{
    Band, PublicPrefix, Rate, RateKind, RateState, Rates, TenantPolicy, TenantState, TenantsError,
};

use admission::Deadline;
use cost::Correction;
use pages::PagePool;
use queue::{Queue, Waiting};
use sequence::{Sequence, pages_for};
use step::{PrefillRank, Share};

/// All requests between `submit` and their end, all tenants, and all KV pages.
pub struct Scheduler {
    limits: Limits,
    policy: Policy,
    cost: CostModel,
    correction: Correction,
    now: Micros, // The latest time told.
    is_draining: bool,
    arrivals: u64,
    sequences: Slab<Sequence>,
    queue: Queue,
    deadlines: BinaryHeap<Reverse<Deadline>>,
    running: Vec<usize>, // Slots, by band and arrival. The first is the leader.
    pool: PagePool,
    // The plan being made; fields, to use their memory again.
    planned_at: Micros,
    is_short_of_pages: bool, // The last plan took pages from somebody.
    budget: Nanos,
    shape: StepShape,
    shares: Vec<Share>,
    drafts: Vec<TokenId>,
    prefills: Vec<usize>, // Slots of those that compute their prompt.
    prefill_ranks: Vec<PrefillRank>,
    candidates: Vec<Waiting>,
    kept_out: [Option<SequenceId>; 3], // By band: who was its first and found no memory.
    matched: Vec<Page>,                // The cached prefix of the request being looked at.
    batch: Batch,
    events: Vec<Event>,
    // Counts since the start.
    prefix_queries: u64,
    prefix_hits: u64,
    preemptions: u64,
    redirects: u64,
    deferrals: u64,
    copies: u64,
    drafted: u64,
    accepted: u64,
}

impl Scheduler {
    /// A scheduler with no requests and free memory.
    ///
    /// # Panics
    /// If a limit is 0, `prefill_chunk` is less than a page, or 32 bits cannot number the pages of as many of the longest sequences as may
    /// run.
    pub fn new(limits: Limits, policy: Policy) -> Scheduler {
        assert!(limits.longest_sequence() > 0, "there is room for a token");
        assert!(limits.max_running > 0, "something may run");
        assert!(limits.max_queued > 0, "requests pass through the queue");
        assert!(
            limits.prefill_chunk as usize >= PAGE_TOKENS,
            "prefill advances by pages"
        );
        let max_running = limits.max_running as usize;
        let table_len = pages_for(limits.longest_sequence() as usize);
        Scheduler {
            cost: CostModel::UNMEASURED,
            correction: Correction::default(),
            now: 0,
            is_draining: false,
            arrivals: 0,
            sequences: Slab::with_capacity(max_running),
            queue: Queue::new(policy.order),
            deadlines: BinaryHeap::new(),
            running: Vec::with_capacity(max_running),
            pool: PagePool::new(limits.pages),
            planned_at: 0,
            is_short_of_pages: false,
            budget: 0,
            shape: StepShape::default(),
            shares: Vec::with_capacity(max_running),
            drafts: Vec::with_capacity(MAX_DRAFTED_TOKENS),
            prefills: Vec::with_capacity(max_running),
            prefill_ranks: Vec::with_capacity(max_running),
            candidates: Vec::new(),
            kept_out: [None; 3],
            matched: Vec::new(),
            batch: Batch::with_capacity(max_running, limits.max_batch_tokens(), table_len),
            events: Vec::new(),
            prefix_queries: 0,
            prefix_hits: 0,
            preemptions: 0,
            redirects: 0,
            deferrals: 0,
            copies: 0,
            drafted: 0,
            accepted: 0,
            limits,
            policy,
        }
    }

    /// Declares a prefix that all tenants whose policy names it share: its whole pages, once computed, stay. Prefixes are
    /// declared before the first request.
    ///
    /// # Panics
    /// If a request was submitted before, or the prefixes leave no page for anything else.
    pub fn declare_public(&mut self, prefix: &[TokenId]) -> PublicPrefix {
        assert_eq!(self.arrivals, 0, "public prefixes come first");
        let public = self.pool.declare_public(prefix);
        assert!(self.pool.reserved() < self.limits.pages, "no page is left");
        public
    }

    /// Sets what these tenants may have from now on; others keep what they had. What runs or waits goes on.
    ///
    /// # Errors
    /// When one policy is impossible, or all together are. Nothing has changed then.
    pub fn set_tenants(
        &mut self,
        tenants: &[(TenantId, TenantPolicy)],
    ) -> Result<(), TenantsError> {
        let mut guaranteed: BTreeMap<TenantId, u32> = self
            .queue
            .tenants
            .iter()
            .map(|(id, tenant)| (id, tenant.policy.guaranteed_pages))
            .collect();
        for (id, policy) in tenants {
            policy.check(*id, self.pool.prefixes())?;
            guaranteed.insert(*id, policy.guaranteed_pages);
        }
        let guaranteed = guaranteed.values().map(|&pages| u64::from(pages)).sum();
        let limit = u64::from(self.limits.pages - self.pool.reserved());
        if guaranteed > limit {
            return Err(TenantsError::TooManyGuaranteed { guaranteed, limit });
        }
        for (id, policy) in tenants {
            self.queue.set_tenant(self.now, *id, policy.clone());
            self.share_pages(*id);
        }
        Ok(())
    }

    /// Tells the pool what a tenant may have. What was accepted under a higher cap keeps it until it has ended: it
    /// could not end otherwise.
    fn share_pages(&mut self, id: TenantId) {
        let policy = &self.queue.tenants[id].policy;
        let alive = self.sequences.iter().map(|(_, sequence)| sequence);
        let longest = alive
            .filter(|sequence| sequence.tenant == id)
            .map(|sequence| {
                let most = pages_for(sequence.prompt_len + sequence.output_rules.max_new_tokens);
                (most + usize::from(sequence.copy.is_some())) as u32
            });
        let quota = pages::PageQuota {
            weight: policy.weight,
            guaranteed: policy.guaranteed_pages,
            max: policy.max_pages.max(longest.max().unwrap_or(0)),
        };
        self.pool.set_tenant(id, quota);
    }

    /// A tenant in numbers; zeros for one that was never set.
    pub fn tenant(&self, id: TenantId) -> TenantState {
        let Some(tenant) = self.queue.tenants.get(id) else {
            return TenantState::default();
        };
        TenantState {
            running: tenant.running,
            queued: tenant.waiting.len() as u32,
            pages: self.pool.held(id),
            service: tenant.service / 1000,
        }
    }

    /// Where a tenant's rates stand; nowhere for one that was never set.
    pub fn rates(&self, now: Micros, id: TenantId) -> Rates {
        self.queue
            .tenants
            .get(id)
            .map_or(Rates::default(), |tenant| tenant.rates(now))
    }

    /// From now on steps are predicted with these coefficients.
    pub fn calibrate(&mut self, cost: CostModel) {
        self.cost = cost;
        self.correction = Correction::default();
    }

    /// Ends a request wherever it is, with this reason. `false` if it has ended already.
    pub fn cancel(&mut self, id: SequenceId, reason: FinishReason) -> bool {
        let is_alive = self.sequences.get(id.slot()).is_some_and(|s| s.id == id);
        if is_alive {
            self.finish(id, reason);
        }
        is_alive
    }

    /// Refuses every request from now on. Those that run or wait go on.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// What happened since the last call, in order.
    pub fn events(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.events.drain(..)
    }

    /// Forgets every cached page that no running sequence uses.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget_unpinned();
    }

    /// The state in numbers.
    pub fn snapshot(&self) -> Snapshot {
        let counts = self.pool.counts();
        Snapshot {
            running: self.running.len(),
            queued: self.queue.len(),
            free: counts.free,
            private: counts.private,
            tree: counts.tree,
            pinned: counts.pinned,
            prefix_queries: self.prefix_queries,
            prefix_hits: self.prefix_hits,
            preemptions: self.preemptions,
            evictions: counts.evictions,
            redirects: self.redirects,
            deferrals: self.deferrals,
            copies: self.copies,
            drafted: self.drafted,
            accepted: self.accepted,
            queued_time: self.queue.queued_time() / 1000,
        }
    }

    fn tell(&mut self, now: Micros) {
        assert!(now >= self.now, "time runs backwards");
        self.now = now;
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        let sequence = &self.sequences[id.slot()];
        assert_eq!(sequence.id, id, "the sequence is alive");
        sequence
    }

    /// How many running sequences come before the one in `slot`.
    fn place(&self, slot: usize) -> usize {
        let rank = |slot: usize| (self.sequences[slot].band, self.sequences[slot].arrival);
        let own = rank(slot);
        self.running.partition_point(|&other| rank(other) < own)
    }
}
