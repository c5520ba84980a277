//! Who is next: bands by their share of the machine, in them tenants by virtual time, in them requests by arrival.
//!
//! A tenant's virtual time is the machine time it was charged, divided by its weight (VTC, Sheng et al.,
//! arXiv:2401.00588, in predicted machine time instead of tokens). The tenant with the least is next. Pages and budgets
//! are decided elsewhere.
//!
//! Invariant: a band's `active` are its tenants that run or wait, by virtual time; its `eligible` those that wait and may
//! run one more, by what the policy orders by. Invariant: a tenant that comes back after a pause is lifted to the least
//! virtual time of the active, so that it has not saved up the time it was away.

mod ranking;
mod rate;
mod tenants;

use std::collections::VecDeque;

use ranking::Ranking;
use tenants::Tenants;

use crate::{Band, Micros, Nanos, Order, TenantId, TenantPolicy};

/// Waiting requests that one admission chooses among.
pub(crate) const LOOK_AHEAD: usize = 16;

/// Machine time by which a tenant that comes back may be ahead of its turn: about a prompt. With none, a light tenant would
/// share the machine with a flood of another's just while it waits for its first token.
const CREDIT: Nanos = 2_000_000_000;

/// The bands' parts of the machine when all are busy, in percent.
const BAND_PERCENT: [u64; 3] = [60, 30, 10];

/// All tenants, and the requests that wait.
pub(crate) struct Queue {
    order: Order,
    pub(crate) tenants: Tenants,
    bands: [BandQueue; 3],
    band_clock: u64, // The highest that the least virtual time of the busy bands has been.
    waiting: usize,
    queued_time: Nanos,
    active_weight: u64,
    charged: Vec<u32>, // Tenants whose charges of this step are not in their virtual time yet.
    planned: Vec<u32>, // Tenants whose virtual time is moved ahead for this plan.
    chosen: Vec<u32>,  // For `candidates`.
}

#[derive(Default)]
struct BandQueue {
    active: Ranking,
    eligible: Ranking,
    virtual_time: u64,
    planned: u64,
    left_at: u64, // The virtual time of the tenant that left last.
    clock: u64,   // The highest that the least virtual time of the active has been.
}

impl BandQueue {
    /// The highest that the least virtual time of its active tenants has been.
    fn now(&self) -> u64 {
        let least = self.active.least_key().unwrap_or(self.left_at);
        self.clock.max(least)
    }
}

/// One request that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) arrival: u64,
    pub(crate) slot: usize,
    /// Machine time that it will take, as far as one can tell.
    pub(crate) estimate: Nanos,
}

impl Queue {
    pub(crate) fn new(order: Order) -> Queue {
        Queue {
            order,
            tenants: Tenants::new(),
            bands: Default::default(),
            band_clock: 0,
            waiting: 0,
            queued_time: 0,
            active_weight: 0,
            charged: Vec::new(),
            planned: Vec::new(),
            chosen: Vec::new(),
        }
    }

    /// Requests that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    /// Machine time of all that waits.
    pub(crate) fn queued_time(&self) -> Nanos {
        self.queued_time
    }

    /// How long the machine takes for `work` of a tenant, when it also serves everybody who is active now.
    pub(crate) fn time_at_share(&self, tenant: TenantId, work: Nanos) -> Micros {
        let tenant = &self.tenants[tenant];
        let weight = u64::from(tenant.policy.weight);
        let all = self.active_weight + if tenant.is_active() { 0 } else { weight };
        (u128::from(work) * u128::from(all) / u128::from(weight) / 1000) as Micros
    }

    /// Whether a tenant has less of what runs than its weight among those who are active; `running` counts all.
    pub(crate) fn runs_less_than_its_share(&self, id: TenantId, running: usize) -> bool {
        let tenant = &self.tenants[id];
        let own = u64::from(tenant.running) * self.active_weight;
        own < u64::from(tenant.policy.weight) * running as u64
    }

    pub(crate) fn set_tenant(&mut self, now: Micros, id: TenantId, policy: TenantPolicy) {
        if let Some(tenant) = self.tenants.get(id) {
            let was_active = tenant.is_active();
            let band = &mut self.bands[tenant.policy.band as usize];
            band.active.remove(id.0);
            band.eligible.remove(id.0);
            self.active_weight -= if was_active {
                u64::from(tenant.policy.weight)
            } else {
                0
            };
            self.active_weight += if was_active {
                u64::from(policy.weight)
            } else {
                0
            };
            if tenant.policy.band != policy.band {
                // Each band has a time of its own.
                let time = self.bands[policy.band as usize].now();
                self.tenants[id].virtual_time = time;
                if was_active {
                    self.lift_band(policy.band as usize);
                }
            }
        }
        self.tenants.set(now, id, policy);
        self.refresh(id);
    }

    /// A request waits: a new one, or one that lost its pages, which goes to where its arrival puts it.
    pub(crate) fn insert(&mut self, id: TenantId, waiting: Waiting) {
        self.activate(id);
        self.waiting += 1;
        self.queued_time += waiting.estimate;
        let tenant = &mut self.tenants[id];
        tenant.queued_time += waiting.estimate;
        insert_by_arrival(&mut tenant.waiting, waiting);
        self.refresh(id);
    }

    /// A request waits no more.
    pub(crate) fn remove(&mut self, id: TenantId, arrival: u64) {
        let tenant = &mut self.tenants[id];
        let place = tenant.waiting.binary_search_by_key(&arrival, |w| w.arrival);
        let place = place.expect("a queued sequence is in the queue");
        let removed = tenant.waiting.remove(place).expect("it was found there");
        tenant.queued_time -= removed.estimate;
        self.queued_time -= removed.estimate;
        self.waiting -= 1;
        self.deactivate(id);
    }

    /// A waiting request runs. To be called before it is removed from those that wait, so that its tenant stays active.
    pub(crate) fn begin_running(&mut self, id: TenantId) {
        self.tenants[id].running += 1;
    }

    /// A sequence runs no more.
    pub(crate) fn end_running(&mut self, id: TenantId) {
        self.tenants[id].running -= 1;
        self.deactivate(id);
    }

    /// Whoever was idle until now gets no credit for it.
    fn activate(&mut self, id: TenantId) {
        if self.tenants[id].is_active() {
            return;
        }
        let band = self.tenants[id].policy.band as usize;
        self.lift_band(band);
        let clock = self.bands[band].now();
        self.bands[band].clock = clock;
        let tenant = &mut self.tenants[id];
        let credit = CREDIT / u64::from(tenant.policy.weight);
        tenant.virtual_time = tenant.virtual_time.max(clock.saturating_sub(credit));
        self.active_weight += u64::from(tenant.policy.weight);
    }

    /// A band that was idle until now gets no credit for it either.
    fn lift_band(&mut self, band: usize) {
        if self.bands[band].active.len() > 0 {
            return;
        }
        let busy = self.bands.iter().filter(|band| band.active.len() > 0);
        let least = busy.map(|band| band.virtual_time).min();
        self.band_clock = self.band_clock.max(least.unwrap_or(0));
        let band = &mut self.bands[band];
        band.virtual_time = band.virtual_time.max(self.band_clock);
    }

    fn deactivate(&mut self, id: TenantId) {
        let tenant = &self.tenants[id];
        if !tenant.is_active() {
            self.active_weight -= u64::from(tenant.policy.weight);
            self.bands[tenant.policy.band as usize].left_at = tenant.virtual_time;
        }
        self.refresh(id);
        if self.bands.iter().all(|band| band.active.len() == 0) {
            // Whoever comes first after a pause must not find a band behind.
            let latest = self.bands.iter().map(|band| band.virtual_time).max();
            self.band_clock = self.band_clock.max(latest.unwrap_or(0));
        }
    }

    /// Puts a tenant where it belongs after a change.
    fn refresh(&mut self, id: TenantId) {
        let tenant = &self.tenants[id];
        let band = &mut self.bands[tenant.policy.band as usize];
        if tenant.is_active() {
            band.active.set(id.0, tenant.virtual_time);
        } else {
            band.active.remove(id.0);
        }
        match tenant.waiting.front() {
            Some(first) if tenant.running < tenant.policy.max_running => {
                let key = match self.order {
                    Order::FairShare { .. } => tenant.planned_time(),
                    Order::FirstCome | Order::LongestPrefix => first.arrival,
                };
                band.eligible.set(id.0, key);
            }
            _ => band.eligible.remove(id.0),
        }
    }

    /// A committed step took `cost` of machine time for this tenant.
    pub(crate) fn charge(&mut self, id: TenantId, cost: Nanos) {
        let tenant = &mut self.tenants[id];
        if tenant.charged == 0 && cost > 0 {
            self.charged.push(id.0);
        }
        tenant.charged += cost;
    }

    /// Moves the virtual times by what was charged since the last call.
    pub(crate) fn settle_charges(&mut self) {
        while let Some(id) = self.charged.pop() {
            let tenant = &mut self.tenants[TenantId(id)];
            let cost = std::mem::take(&mut tenant.charged);
            tenant.service += cost;
            let weight = u64::from(tenant.policy.weight);
            let due = tenant.remainder + cost;
            tenant.virtual_time += due / weight;
            tenant.remainder = due % weight;
            let band = tenant.policy.band as usize;
            self.bands[band].virtual_time += cost * 100 / BAND_PERCENT[band];
            self.refresh(TenantId(id));
        }
    }

    /// For the rest of this plan, counts `cost` as if the tenant had been charged it: else one tenant would fill the plan.
    pub(crate) fn plan_charge(&mut self, id: TenantId, cost: Nanos) {
        let tenant = &mut self.tenants[id];
        if tenant.planned == 0 && cost > 0 {
            self.planned.push(id.0);
        }
        tenant.planned += cost;
        let band = tenant.policy.band as usize;
        self.bands[band].planned += cost * 100 / BAND_PERCENT[band];
        self.refresh(id);
    }

    /// Ends a plan: what was only planned is forgotten.
    pub(crate) fn forget_planned(&mut self) {
        for band in &mut self.bands {
            band.planned = 0;
        }
        while let Some(id) = self.planned.pop() {
            self.tenants[TenantId(id)].planned = 0;
            self.refresh(TenantId(id));
        }
    }

    /// The bands, the one that is behind its share first.
    pub(crate) fn bands(&self) -> [Band; 3] {
        let mut bands = [Band::Interactive, Band::Standard, Band::Batch];
        bands.sort_by_key(|&band| {
            let queue = &self.bands[band as usize];
            queue.virtual_time + queue.planned
        });
        bands
    }

    /// The least virtual time of a band's active tenants.
    pub(crate) fn least_virtual_time(&self, band: Band) -> u64 {
        self.bands[band as usize].active.least_key().unwrap_or(0)
    }

    /// Appends up to [`LOOK_AHEAD`] requests of a band that may be admitted, in the policy's order.
    pub(crate) fn candidates(&mut self, band: Band, out: &mut Vec<Waiting>) {
        let eligible = &mut self.bands[band as usize].eligible;
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
            // The slack is machine time, and a tenant's virtual time is that divided by its weight.
            let tenants = &self.tenants;
            self.chosen.retain(|&id| {
                let tenant = &tenants[TenantId(id)];
                tenant.planned_time() - least <= slack / u64::from(tenant.policy.weight)
            });
        }
        let by_share = slack.is_some();
        let each = LOOK_AHEAD / if by_share { self.chosen.len() } else { 1 };
        let begin = out.len();
        for &id in &self.chosen {
            out.extend(self.tenants[TenantId(id)].waiting.iter().take(each));
        }
        if !by_share {
            out[begin..].sort_unstable_by_key(|waiting| waiting.arrival);
        }
        out.truncate(begin + LOOK_AHEAD);
    }

    /// Everything that waits, tenant by tenant.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Waiting> {
        self.tenants.iter().flat_map(|(_, tenant)| &tenant.waiting)
    }

    /// Asserts what this file promises.
    pub(crate) fn check(&self) {
        let waiting = self.tenants.iter().map(|(_, tenant)| tenant.waiting.len());
        assert_eq!(waiting.sum::<usize>(), self.waiting);
        let time = self.iter().map(|waiting| waiting.estimate);
        assert_eq!(time.sum::<Nanos>(), self.queued_time);
        let active = self.tenants.iter().filter(|(_, tenant)| tenant.is_active());
        let weight = active
            .clone()
            .map(|(_, tenant)| u64::from(tenant.policy.weight));
        assert_eq!(weight.sum::<u64>(), self.active_weight);
        for (index, band) in self.bands.iter().enumerate() {
            let own = active
                .clone()
                .filter(|(_, t)| t.policy.band as usize == index);
            assert_eq!(own.clone().count(), band.active.len());
            let least = own.map(|(_, tenant)| tenant.virtual_time).min();
            assert_eq!(band.active.least_key(), least);
        }
    }
}

fn insert_by_arrival(queue: &mut VecDeque<Waiting>, waiting: Waiting) {
    let place = queue.partition_point(|other| other.arrival < waiting.arrival);
    queue.insert(place, waiting);
}
