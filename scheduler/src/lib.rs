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
//!   prefix in the same namespace;
//! - an accepted request fits in memory alone, and the earliest running sequence is never preempted: so everybody ends;
//! - equal calls give equal plans. The scheduler is told the time; it does no I/O, and starts no thread.

#![forbid(unsafe_code)]

mod batch;
mod cost;
#[cfg_attr(not(test), expect(dead_code, reason = "plan.rs will draft"))]
mod draft;
mod invariants;
mod pages;
mod plan;
mod policy;
mod prefix;
mod queue;
mod request;
mod sequence;
mod tenant;

use slab::Slab;

pub use batch::{Batch, PageCopy, Row, Sampled};
pub use cost::{CostModel, Nanos, StepShape};
pub use draft::MAX_DRAFTED_TOKENS;
pub use pages::{PAGE_TOKENS, Page};
pub use plan::{Plan, Step};
pub use policy::{Budget, Order, Policy};
pub use request::{
    Event, FinishReason, Limits, Micros, Refusal, Request, SequenceId, Snapshot, TenantId, TokenId,
};
pub use tenant::{
    Band, PublicPrefix, Rate, RateKind, RateState, Rates, TenantPolicy, TenantState, TenantsError,
};

use pages::PagePool;
use plan::Share;
use queue::Queue;
use sequence::{Sequence, State};

/// All requests between `submit` and their end, and all KV pages.
pub struct Scheduler {
    limits: Limits,
    policy: Policy,
    cost: CostModel,
    now: Micros, // The latest time told.
    is_draining: bool,
    arrivals: u64,
    sequences: Slab<Sequence>,
    queue: Queue,
    running: Vec<usize>, // Slots, in the order of arrival. The first is the leader.
    pool: PagePool,
    shares: Vec<Share>, // The plan being made; as a field, to use its memory again.
    matched: Vec<Page>, // Likewise: the cached prefix of the request being admitted.
    batch: Batch,
    events: Vec<Event>,
    latest_wait: Micros, // Of the request admitted last.
    prefix_queries: u64,
    prefix_hits: u64,
    preemptions: u64,
    redirects: u64,
    deferrals: u64,
}

impl Scheduler {
    /// A scheduler with no requests and free memory.
    ///
    /// # Panics
    /// If a limit is 0, or `prefill_chunk` is less than a page.
    pub fn new(limits: Limits, policy: Policy) -> Scheduler {
        assert!(limits.longest_sequence() > 0, "there is room for a token");
        assert!(limits.max_running > 0, "something may run");
        assert!(limits.max_queued > 0, "requests pass through the queue");
        assert!(
            limits.prefill_chunk as usize >= PAGE_TOKENS,
            "prefill advances by pages"
        );
        let max_running = limits.max_running as usize;
        Scheduler {
            now: 0,
            is_draining: false,
            arrivals: 0,
            sequences: Slab::with_capacity(max_running),
            queue: Queue::default(),
            running: Vec::with_capacity(max_running),
            pool: PagePool::new(limits.pages),
            shares: Vec::with_capacity(max_running),
            matched: Vec::new(),
            batch: Batch::with_capacity(max_running, limits.max_batch_tokens()),
            events: Vec::new(),
            latest_wait: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            preemptions: 0,
            redirects: 0,
            deferrals: 0,
            policy,
            cost: CostModel::UNMEASURED,
            limits,
        }
    }

    /// Declares a prefix that all tenants whose policy names it share: its whole pages, once computed, stay. Prefixes are
    /// declared before the first request.
    ///
    /// # Panics
    /// If a request was submitted before.
    pub fn declare_public(&mut self, prefix: Vec<TokenId>) -> PublicPrefix {
        assert_eq!(self.arrivals, 0, "public prefixes come first");
        drop(prefix);
        PublicPrefix(0)
    }

    /// Sets what these tenants may have from now on; others keep what they had. What runs or waits goes on.
    ///
    /// # Errors
    /// When one policy is impossible, or all together are. Nothing has changed then.
    pub fn set_tenants(
        &mut self,
        tenants: &[(TenantId, TenantPolicy)],
    ) -> Result<(), TenantsError> {
        let _ = tenants;
        Ok(())
    }

    /// A tenant in numbers; zeros for one that was never set.
    pub fn tenant(&self, tenant: TenantId) -> TenantState {
        let _ = tenant;
        TenantState::default()
    }

    /// Where a tenant's rates stand.
    pub fn rates(&self, now: Micros, tenant: TenantId) -> Rates {
        let _ = (now, tenant);
        Rates::default()
    }

    /// From now on steps are predicted with these coefficients.
    pub fn calibrate(&mut self, cost: CostModel) {
        self.cost = cost;
    }

    /// Takes a request, which waits until a plan admits it.
    ///
    /// # Errors
    /// A [`Refusal`] if it can never run, or not now. Nothing has changed then.
    pub fn submit(&mut self, now: Micros, request: Request) -> Result<SequenceId, Refusal> {
        self.tell(now);
        self.refuse(&request)?;
        let arrival = self.arrivals;
        self.arrivals += 1;
        let entry = self.sequences.vacant_entry();
        let id = SequenceId::new(entry.key() as u32, arrival as u32);
        entry.insert(Sequence::new(id, arrival, now, request));
        self.queue.insert(arrival, id.slot());
        Ok(id)
    }

    fn refuse(&self, request: &Request) -> Result<(), Refusal> {
        let needed_tokens = request.prompt.len() as u64 + u64::from(request.max_new_tokens);
        let limit_tokens = self.limits.longest_sequence();
        if request.prompt.is_empty() {
            Err(Refusal::EmptyPrompt)
        } else if request.max_new_tokens == 0 {
            Err(Refusal::NothingToGenerate)
        } else if needed_tokens > limit_tokens {
            Err(Refusal::TooLong {
                needed_tokens,
                limit_tokens,
            })
        } else if self.is_draining {
            Err(Refusal::Draining)
        } else if self.queue.len() >= self.limits.max_queued as usize {
            Err(Refusal::Overloaded {
                retry_after: self.latest_wait,
            })
        } else {
            Ok(())
        }
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

    /// Whether no request runs or waits.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
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
        let tree = self.pool.tree.len();
        let free = self.pool.free.len();
        Snapshot {
            running: self.running.len(),
            queued: self.queue.len(),
            free,
            private: self.limits.pages as usize - free - tree,
            tree,
            pinned: tree - self.pool.cold.len(),
            prefix_queries: self.prefix_queries,
            prefix_hits: self.prefix_hits,
            preemptions: self.preemptions,
            evictions: self.pool.evictions(),
            redirects: self.redirects,
            deferrals: self.deferrals,
            ..Snapshot::default()
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

    /// The one way for a sequence to lose its pages and its place in the batch.
    fn stop_running(&mut self, slot: usize) {
        let sequence = &mut self.sequences[slot];
        self.pool.release_table(&sequence.table.pages);
        sequence.table.pages.clear();
        sequence.table.in_tree = 0;
        sequence.computed = 0;
        sequence.state = State::Queued;
        let place = self.place(slot);
        self.running.remove(place);
    }

    /// How many running sequences arrived before the one in `slot`.
    fn place(&self, slot: usize) -> usize {
        let arrival = self.sequences[slot].arrival;
        self.running
            .partition_point(|&other| self.sequences[other].arrival < arrival)
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let slot = id.slot();
        match self.sequences[slot].state {
            State::Queued => self.queue.remove(self.sequences[slot].arrival),
            State::Running => self.stop_running(slot),
        }
        let sequence = self.sequences.remove(slot);
        self.events.push(Event::Finished {
            id,
            reason,
            tenant: sequence.tenant,
            prompt_tokens: sequence.prompt_len as u32,
            cached_tokens: sequence.cached_tokens.unwrap_or(0) as u32,
            output_tokens: sequence.output_len() as u32,
        });
    }
}
