//! Each tenant's waiting requests, what it was charged, and its rates.

use std::collections::VecDeque;

use super::rates::RateMeters;
use super::turns::{QueueTurn, Turns};
use crate::{Band, Micros, Nanos, SubTenant, TenantId, TenantPolicy};

/// The assumed length of an answer, in tokens, before a tenant's first answer has ended.
const FIRST_GUESS: u64 = 128;

/// One waiting sequence: a request, or one of its choices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) turn: QueueTurn,
    pub(crate) arrival: u64,
    pub(crate) first_choice: u64, // The arrival of its request's first choice.
    pub(crate) has_run: bool,     // It was preempted.
    pub(crate) slot: usize,
    pub(crate) estimate: Nanos, // Machine time of the whole sequence, as at the calibration.
    pub(crate) tokens: u32,     // Its known tokens, cached ones included.
}

impl Waiting {
    /// Returns its place among the waiting sequences of its tenant; the least is first.
    fn place(&self) -> (QueueTurn, u64) {
        (self.turn, self.arrival)
    }

    /// Returns whether the sequence takes a place in the queue. A request with several choices
    /// takes one. A preempted sequence takes none.
    pub(crate) fn takes_place(&self) -> bool {
        !self.has_run && self.arrival == self.first_choice
    }

    /// Returns the time that counts against the limits of the queue.
    fn limited_time(&self) -> Nanos {
        if self.has_run { 0 } else { self.estimate }
    }
}

/// What counts against the limits of the queue: requests that have not started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backlog {
    pub(crate) places: usize, // The number of requests.
    pub(crate) time: Nanos,   // Their predicted machine time.
}

impl Backlog {
    pub(super) fn add(&mut self, waiting: &Waiting) {
        self.places += usize::from(waiting.takes_place());
        self.time += waiting.limited_time();
    }

    pub(super) fn remove(&mut self, waiting: &Waiting) {
        self.places -= usize::from(waiting.takes_place());
        self.time -= waiting.limited_time();
    }
}

/// The requests of one tenant, as the queue sees them. Only the queue can change it.
#[derive(Debug, Default)]
pub(crate) struct TenantQueue {
    pub(crate) policy: TenantPolicy,
    pub(crate) rates: RateMeters,
    pub(crate) waiting: VecDeque<Waiting>, // By their turns, then by arrival.
    pub(crate) running: u32,
    pub(crate) queued_time: Nanos, // The sum of the estimates of the waiting requests.
    pub(crate) backlog: Backlog,
    pub(crate) service: Nanos, // All charges so far.
    pub(crate) virtual_time: u64,
    remainder: u64, // Of the charges, below the weight, so that division loses nothing.
    charged: Nanos, // Not yet in `service` and `virtual_time`.
    planned: Nanos, // Counts as charged until the plan ends.
    turns: Turns,
    mean_output: u64, // Tokens of an answer, a moving average, times 16.
}

impl TenantQueue {
    fn new(policy: TenantPolicy) -> TenantQueue {
        TenantQueue {
            rates: RateMeters::new(&policy),
            policy,
            mean_output: FIRST_GUESS * 16,
            ..TenantQueue::default()
        }
    }

    /// Changes the policy. Used rates stay used.
    fn set_policy(&mut self, now: Micros, policy: TenantPolicy) {
        self.rates.set(now, &policy);
        self.remainder = 0;
        self.policy = policy;
    }

    /// Returns the virtual time plus what the current plan will add to it.
    pub(super) fn planned_time(&self) -> u64 {
        self.virtual_time + self.planned / self.weight()
    }

    /// Returns the machine time that took the tenant from an earlier virtual time to its own.
    pub(crate) fn machine_time_since(&self, earlier: u64) -> Nanos {
        let ahead = self.virtual_time.saturating_sub(earlier);
        ahead.saturating_mul(self.weight())
    }

    pub(super) fn weight(&self) -> u64 {
        u64::from(self.policy.weight)
    }

    pub(super) fn band(&self) -> usize {
        self.policy.band as usize
    }

    /// Returns the choices of a request that have not started, in order.
    pub(crate) fn choices(&self, first_choice: u64) -> impl Iterator<Item = &Waiting> {
        let all = self.waiting.iter();
        all.filter(move |waiting| waiting.first_choice == first_choice && !waiting.has_run)
    }

    /// Returns whether any request of the tenant runs or waits.
    pub(super) fn is_active(&self) -> bool {
        self.running > 0 || !self.waiting.is_empty()
    }

    /// Returns whether the tenant may run one more sequence.
    pub(crate) fn may_run_more(&self) -> bool {
        self.running < self.policy.max_running
    }

    /// Gives a new request its turn among the tenant's requests. `time` is its predicted machine
    /// time, and `band` its own priority, if it has one.
    pub(super) fn take_turn(
        &mut self,
        band: Option<Band>,
        client: Option<SubTenant>,
        time: Nanos,
    ) -> QueueTurn {
        let lowered = band.filter(|&band| band > self.policy.band);
        self.turns.take(lowered, client, time)
    }

    /// Returns the waiting requests that may start now, as far as their turns say, in order. A
    /// preempted request has had its turn.
    pub(super) fn in_turn(&self, slack: Nanos) -> impl Iterator<Item = &Waiting> {
        let slack = if self.turns.have_clients() {
            slack
        } else {
            Nanos::MAX
        };
        let new = self.waiting.iter().find(|waiting| !waiting.has_run);
        let first = new.map(|waiting| waiting.turn);
        let may_start = move |waiting: &&Waiting| {
            let slack = if waiting.has_run { Nanos::MAX } else { slack };
            first.is_none_or(|first| waiting.turn.is_within(slack, first))
        };
        self.waiting.iter().take_while(may_start)
    }

    /// Adds a waiting request in its turn.
    pub(super) fn insert(&mut self, waiting: Waiting) {
        self.queued_time += waiting.estimate;
        self.backlog.add(&waiting);
        let place = self
            .waiting
            .partition_point(|other| other.place() < waiting.place());
        self.waiting.insert(place, waiting);
    }

    pub(super) fn remove(&mut self, arrival: u64) -> Waiting {
        let place = self.waiting.iter().position(|w| w.arrival == arrival);
        let place = place.expect("a queued sequence is in the queue");
        let removed = self.waiting.remove(place).expect("it was found there");
        self.queued_time -= removed.estimate;
        self.backlog.remove(&removed);
        removed
    }

    pub(super) fn begin_running(&mut self, started: &Waiting) {
        self.running += 1;
        if !started.has_run {
            self.turns.begin(started.turn);
        }
    }

    pub(super) fn end_running(&mut self) {
        self.running -= 1;
    }

    /// Notes that no request of the tenant runs or waits any more.
    pub(super) fn become_idle(&mut self) {
        self.turns.level();
    }

    pub(super) fn set_virtual_time(&mut self, time: u64) {
        self.virtual_time = time;
    }

    /// Charges machine time. Returns whether this is the first charge since the last settlement.
    pub(super) fn charge(&mut self, cost: Nanos) -> bool {
        let is_first = self.charged == 0 && cost > 0;
        self.charged += cost;
        is_first
    }

    /// Charges machine time outside of steps: from the virtual time `before` on, up to `latest`.
    pub(super) fn charge_outside_of_steps(&mut self, before: u64, cost: Nanos, latest: u64) {
        self.service += cost;
        let after = before + cost / self.weight();
        self.virtual_time = after.min(latest).max(before);
    }

    /// Adds the charges to the virtual time and returns them.
    pub(super) fn settle_charges(&mut self) -> Nanos {
        let cost = std::mem::take(&mut self.charged);
        self.service += cost;
        let due = self.remainder + cost;
        self.virtual_time += due / self.weight();
        self.remainder = due % self.weight();
        cost
    }

    /// Counts machine time as charged until the plan ends. Returns whether this is the first.
    pub(super) fn plan_charge(&mut self, cost: Nanos) -> bool {
        let is_first = self.planned == 0 && cost > 0;
        self.planned += cost;
        is_first
    }

    pub(super) fn forget_planned(&mut self) {
        self.planned = 0;
    }

    /// Returns the expected length of an answer of at most `limit` tokens.
    pub(crate) fn expected_output(&self, limit: usize) -> usize {
        (self.mean_output as usize / 16).clamp(1, limit)
    }

    /// Learns from the length of a complete answer.
    pub(super) fn learn_output(&mut self, tokens: usize) {
        self.mean_output = (self.mean_output * 7 + tokens as u64 * 16) / 8;
    }
}

/// All tenants by number.
pub(crate) struct TenantQueues {
    all: Vec<Option<TenantQueue>>,
}

impl TenantQueues {
    /// Creates tenant 0, with the default policy.
    pub(super) fn new() -> TenantQueues {
        TenantQueues {
            all: vec![Some(TenantQueue::new(TenantPolicy::default()))],
        }
    }

    pub(super) fn set(&mut self, now: Micros, id: TenantId, policy: TenantPolicy) {
        if self.all.len() <= id.index() {
            self.all.resize_with(id.index() + 1, || None);
        }
        match &mut self.all[id.index()] {
            Some(tenant) => tenant.set_policy(now, policy),
            absent => *absent = Some(TenantQueue::new(policy)),
        }
    }

    pub(crate) fn find(&self, id: TenantId) -> Option<&TenantQueue> {
        self.all.get(id.index())?.as_ref()
    }

    /// Returns a tenant.
    ///
    /// # Panics
    /// If the caller never set it.
    pub(super) fn get(&self, id: TenantId) -> &TenantQueue {
        self.find(id)
            .unwrap_or_else(|| panic!("{id:?} was never set"))
    }

    pub(super) fn get_mut(&mut self, id: TenantId) -> &mut TenantQueue {
        let tenant = self.all.get_mut(id.index()).and_then(Option::as_mut);
        tenant.unwrap_or_else(|| panic!("{id:?} was never set"))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantId, &TenantQueue)> + Clone {
        let numbered = self.all.iter().enumerate();
        numbered.filter_map(|(index, tenant)| Some((TenantId(index as u32), tenant.as_ref()?)))
    }
}
