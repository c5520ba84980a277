//! Which request is next: bands by their share of the machine, the tenants of a band by virtual
//! time, the requests of a tenant by the turns of its clients.
//!
//! A tenant's virtual time is the machine time that it was charged, divided by its weight. The
//! tenant with the least virtual time is next. This is VTC (Sheng et al., arXiv:2401.00588) in
//! predicted machine time instead of tokens. The queue knows nothing of pages and budgets.
//!
//! Invariant: a tenant that becomes active after a pause is lifted to the least virtual time of the
//! active tenants, less a small credit. It does not save up the time it was idle.

mod bands;
mod ranking;
mod rates;
mod tenant_queue;
mod turns;

use bands::Bands;
pub(crate) use rates::{RateMeters, RateReservation};
pub(crate) use tenant_queue::{Backlog, TenantQueue, TenantQueues, Waiting};
pub(crate) use turns::QueueTurn;

use crate::{Band, Micros, Nanos, Order, SubTenant, TenantId, TenantPolicy};

/// The number of waiting requests that one admission considers.
const LOOK_AHEAD: usize = 16;

/// Machine time by which a tenant that becomes active may be ahead of its turn: about one prompt.
/// Without it, a light tenant would wait behind another tenant's flood for each first token.
const CREDIT: Nanos = 2_000_000_000;

/// The most machine time outside of steps by which a tenant comes later than its band.
const MAX_DEBT: Nanos = CREDIT;

/// All tenants and their waiting requests.
pub(crate) struct Queue {
    order: Order,
    tenants: TenantQueues,
    bands: Bands,
    waiting: usize,
    queued_time: Nanos,
    queued_tokens: u64,
    backlog: Backlog,
    departures: u64,
    active_weight: u64,
    charged: Vec<u32>, // Tenants with unsettled charges.
    planned: Vec<u32>, // Tenants with planned charges.
    chosen: Vec<u32>,  // The tenants whose requests `candidates` returns; kept for its memory.
}

impl Queue {
    pub(crate) fn new(order: Order) -> Queue {
        Queue {
            order,
            tenants: TenantQueues::new(),
            bands: Bands::default(),
            waiting: 0,
            queued_time: 0,
            queued_tokens: 0,
            backlog: Backlog::default(),
            departures: 0,
            active_weight: 0,
            charged: Vec::new(),
            planned: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// Returns the number of waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    /// Returns the predicted machine time of all waiting requests.
    pub(crate) fn queued_time(&self) -> Nanos {
        self.queued_time
    }

    /// Returns the known tokens of all waiting sequences.
    pub(crate) fn queued_tokens(&self) -> u64 {
        self.queued_tokens
    }

    /// Returns what counts against the limits of the whole queue.
    pub(crate) fn backlog(&self) -> Backlog {
        self.backlog
    }

    /// Returns how often a waiting request has left the queue so far, for any reason.
    pub(crate) fn departures(&self) -> u64 {
        self.departures
    }

    /// Returns the tenants that run or wait.
    pub(crate) fn active_tenants(&self) -> impl Iterator<Item = TenantId> {
        self.bands.active().map(TenantId)
    }

    /// Returns how far a tenant is ahead of its band, in machine time. It is negative for a tenant
    /// that was idle.
    pub(crate) fn lead(&self, id: TenantId) -> i128 {
        let tenant = self.tenant(id);
        let time = if tenant.is_active() {
            tenant.virtual_time
        } else {
            self.entry_time(tenant)
        };
        let now = self.bands.get(tenant.band()).now();
        (i128::from(time) - i128::from(now)) * i128::from(tenant.weight())
    }

    /// Returns the virtual time with which an idle tenant becomes active.
    fn entry_time(&self, tenant: &TenantQueue) -> u64 {
        let now = self.bands.get(tenant.band()).now();
        let credited = now.saturating_sub(CREDIT / tenant.weight());
        tenant.virtual_time.max(credited)
    }

    /// Returns a tenant.
    ///
    /// # Panics
    /// If the caller never set it.
    pub(crate) fn tenant(&self, id: TenantId) -> &TenantQueue {
        self.tenants.get(id)
    }

    /// Returns all tenants.
    pub(crate) fn tenants(&self) -> &TenantQueues {
        &self.tenants
    }

    /// Returns a tenant's rates. They do not affect its place in the queue.
    pub(crate) fn rates_mut(&mut self, id: TenantId) -> &mut RateMeters {
        &mut self.tenants.get_mut(id).rates
    }

    /// Learns from the length of a tenant's complete answer.
    pub(crate) fn learn_output(&mut self, id: TenantId, tokens: usize) {
        self.tenants.get_mut(id).learn_output(tokens);
    }

    /// Returns how long the machine takes for `work` of a tenant while it also serves all tenants
    /// that are active now.
    pub(crate) fn time_at_share(&self, tenant: TenantId, work: Nanos) -> Micros {
        let tenant = self.tenant(tenant);
        let weight = tenant.weight();
        let all = self.active_weight + if tenant.is_active() { 0 } else { weight };
        (u128::from(work) * u128::from(all) / u128::from(weight) / 1000) as Micros
    }

    /// Returns whether a tenant has less of the `running` sequences than its weight among the
    /// active tenants.
    pub(crate) fn runs_less_than_its_share(&self, id: TenantId, running: usize) -> bool {
        let tenant = self.tenant(id);
        let own = u64::from(tenant.running) * self.active_weight;
        own < tenant.weight() * running as u64
    }

    pub(crate) fn set_tenant(&mut self, now: Micros, id: TenantId, policy: TenantPolicy) {
        if let Some(tenant) = self.tenants.find(id) {
            let was_active = tenant.is_active();
            self.bands.get_mut(tenant.band()).place(id.0, None, None);
            if was_active {
                self.active_weight -= tenant.weight();
                self.active_weight += u64::from(policy.weight);
            }
            let new_band = policy.band as usize;
            if tenant.band() != new_band {
                // Each band has a virtual time of its own.
                let time = self.bands.get(new_band).now();
                self.tenants.get_mut(id).set_virtual_time(time);
                if was_active {
                    self.bands.lift(new_band);
                }
            }
        }
        self.tenants.set(now, id, policy);
        self.refresh(id);
    }

    /// Adds a request. A preempted request returns to the place of its arrival.
    pub(crate) fn insert(&mut self, id: TenantId, waiting: Waiting) {
        self.activate(id);
        self.waiting += 1;
        self.queued_time += waiting.estimate;
        self.queued_tokens += u64::from(waiting.tokens);
        self.backlog.add(&waiting);
        self.tenants.get_mut(id).insert(waiting);
        self.refresh(id);
    }

    /// Gives a new request its turn among the requests of its tenant. Only tenants that share the
    /// machine by weight have turns; else the order of arrival counts.
    pub(crate) fn take_turn(
        &mut self,
        id: TenantId,
        band: Option<Band>,
        client: Option<SubTenant>,
        time: Nanos,
    ) -> QueueTurn {
        match self.order {
            Order::FairShare { .. } => self.tenants.get_mut(id).take_turn(band, client, time),
            Order::FirstCome | Order::LongestPrefix => QueueTurn::default(),
        }
    }

    /// Removes a waiting request.
    pub(crate) fn remove(&mut self, id: TenantId, arrival: u64) {
        self.take(id, arrival);
        self.deactivate(id);
    }

    /// Turns a waiting request into a running one.
    pub(crate) fn begin_running(&mut self, id: TenantId, arrival: u64) {
        let started = self.take(id, arrival);
        self.tenants.get_mut(id).begin_running(&started);
        self.refresh(id);
    }

    fn take(&mut self, id: TenantId, arrival: u64) -> Waiting {
        let removed = self.tenants.get_mut(id).remove(arrival);
        self.queued_time -= removed.estimate;
        self.queued_tokens -= u64::from(removed.tokens);
        self.backlog.remove(&removed);
        self.waiting -= 1;
        self.departures += 1;
        removed
    }

    /// Notes that a running sequence has ended.
    pub(crate) fn end_running(&mut self, id: TenantId) {
        self.tenants.get_mut(id).end_running();
        self.deactivate(id);
    }

    /// Turns a running sequence into a waiting one.
    pub(crate) fn preempt(&mut self, id: TenantId, waiting: Waiting) {
        self.insert(id, waiting); // First, so that the tenant stays active.
        self.end_running(id);
    }

    /// Lifts a tenant that becomes active.
    fn activate(&mut self, id: TenantId) {
        let tenant = self.tenants.get(id);
        if tenant.is_active() {
            return;
        }
        self.active_weight += tenant.weight();
        let (band, time) = (tenant.band(), self.entry_time(tenant));
        self.bands.lift(band);
        self.bands.get_mut(band).advance();
        self.tenants.get_mut(id).set_virtual_time(time);
    }

    fn deactivate(&mut self, id: TenantId) {
        let tenant = self.tenants.get(id);
        if !tenant.is_active() {
            self.active_weight -= tenant.weight();
            let band = self.bands.get_mut(tenant.band());
            band.leave_at(tenant.virtual_time);
            self.tenants.get_mut(id).become_idle();
        }
        self.refresh(id);
        self.bands.level_if_idle();
    }

    /// Moves a tenant to its place after a change.
    fn refresh(&mut self, id: TenantId) {
        let tenant = self.tenants.get(id);
        let active = tenant.is_active().then_some(tenant.virtual_time);
        let first = tenant.waiting.front().filter(|_| tenant.may_run_more());
        let eligible = first.map(|first| match self.order {
            Order::FairShare { .. } => tenant.planned_time(),
            Order::FirstCome | Order::LongestPrefix => first.arrival,
        });
        let band = self.bands.get_mut(tenant.band());
        band.place(id.0, active, eligible);
    }

    /// Charges a tenant for its part of a committed step.
    pub(crate) fn charge(&mut self, id: TenantId, cost: Nanos) {
        if self.tenants.get_mut(id).charge(cost) {
            self.charged.push(id.0);
        }
    }

    /// Charges a tenant for machine time outside of steps, running or idle. The tenant comes later
    /// for it by at most [`MAX_DEBT`]. Its band does not pay: time outside of steps takes no part
    /// of the steps.
    pub(crate) fn charge_outside_of_steps(&mut self, id: TenantId, cost: Nanos) {
        let tenant = self.tenants.get(id);
        let now = self.bands.get(tenant.band()).now();
        let latest = now + MAX_DEBT / tenant.weight();
        let before = if tenant.is_active() {
            tenant.virtual_time
        } else {
            self.entry_time(tenant)
        };
        let tenant = self.tenants.get_mut(id);
        tenant.charge_outside_of_steps(before, cost, latest);
        self.refresh(id);
    }

    /// Adds the charges since the last call to the virtual times.
    pub(crate) fn settle_charges(&mut self) {
        while let Some(id) = self.charged.pop().map(TenantId) {
            let tenant = self.tenants.get_mut(id);
            let cost = tenant.settle_charges();
            self.bands.charge(tenant.band(), cost);
            self.refresh(id);
        }
    }

    /// Counts `cost` as charged for the rest of this plan. Otherwise one tenant would fill it.
    pub(crate) fn plan_charge(&mut self, id: TenantId, cost: Nanos) {
        let tenant = self.tenants.get_mut(id);
        if tenant.plan_charge(cost) {
            self.planned.push(id.0);
        }
        self.bands.plan_charge(tenant.band(), cost);
        self.refresh(id);
    }

    /// Forgets the planned charges, when a plan ends.
    pub(crate) fn forget_planned(&mut self) {
        self.bands.forget_planned();
        while let Some(id) = self.planned.pop().map(TenantId) {
            self.tenants.get_mut(id).forget_planned();
            self.refresh(id);
        }
    }

    /// Returns the bands, the one furthest behind its share first.
    pub(crate) fn bands(&self) -> [Band; 3] {
        self.bands.in_order()
    }

    /// Returns the least virtual time of a band's active tenants.
    pub(crate) fn least_virtual_time(&self, band: Band) -> u64 {
        let active = &self.bands.get(band as usize).active;
        active.least_key().unwrap_or(0)
    }

    /// Appends up to [`LOOK_AHEAD`] requests of a band that may run, in the policy's order.
    pub(crate) fn candidates(&mut self, band: Band, out: &mut Vec<Waiting>) {
        let eligible = &mut self.bands.get_mut(band as usize).eligible;
        let Some(least) = eligible.least_key() else {
            return;
        };
        let slack = match self.order {
            Order::FairShare { slack } => Some(slack.saturating_mul(1000)),
            Order::FirstCome | Order::LongestPrefix => None,
        };
        let limit = slack.map_or(u64::MAX, |slack| least.saturating_add(slack));
        self.chosen.clear();
        eligible.first(LOOK_AHEAD, limit, &mut self.chosen);
        if let Some(slack) = slack {
            // The slack is machine time; a tenant's virtual time is machine time by its weight.
            let tenants = &self.tenants;
            self.chosen.retain(|&id| {
                let tenant = tenants.get(TenantId(id));
                tenant.planned_time() - least <= slack / tenant.weight()
            });
        }
        let by_share = slack.is_some();
        let each = LOOK_AHEAD / if by_share { self.chosen.len() } else { 1 };
        let begin = out.len();
        for &id in &self.chosen {
            let tenant = self.tenants.get(TenantId(id));
            out.extend(tenant.in_turn(slack.unwrap_or(Nanos::MAX)).take(each));
        }
        if !by_share {
            out[begin..].sort_unstable_by_key(|waiting| waiting.arrival);
        }
        out.truncate(begin + LOOK_AHEAD);
    }

    /// Returns all waiting requests, tenant by tenant.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.tenants.iter().flat_map(|(_, tenant)| &tenant.waiting)
    }

    /// Asserts that the sums and the bands agree with the tenants.
    pub(crate) fn check(&self) {
        assert_eq!(self.iter().count(), self.waiting);
        let time = self.iter().map(|waiting| waiting.estimate);
        assert_eq!(time.sum::<Nanos>(), self.queued_time);
        let tokens = self.iter().map(|waiting| u64::from(waiting.tokens));
        assert_eq!(tokens.sum::<u64>(), self.queued_tokens);
        assert_eq!(backlog_of(self.iter()), self.backlog);
        for (_, tenant) in self.tenants.iter() {
            let time = tenant.waiting.iter().map(|waiting| waiting.estimate);
            assert_eq!(time.sum::<Nanos>(), tenant.queued_time);
            assert_eq!(backlog_of(tenant.waiting.iter()), tenant.backlog);
        }
        let active = self.tenants.iter().map(|(_, tenant)| tenant);
        let active = active.filter(|tenant| tenant.is_active());
        let weight = active.clone().map(TenantQueue::weight);
        assert_eq!(weight.sum::<u64>(), self.active_weight);
        for band in [Band::Interactive, Band::Standard, Band::Batch] {
            let own = active.clone().filter(|t| t.policy.band == band);
            let queue = self.bands.get(band as usize);
            assert_eq!(own.clone().count(), queue.active.len());
            let least = own.map(|tenant| tenant.virtual_time).min();
            assert_eq!(queue.active.least_key(), least);
        }
    }
}

fn backlog_of<'a>(waiting: impl Iterator<Item = &'a Waiting>) -> Backlog {
    let mut backlog = Backlog::default();
    waiting.for_each(|waiting| backlog.add(waiting));
    backlog
}
