//! The bands' virtual times, and the tenants of each band in order.
//!
//! Invariant: a band's `active` tenants run or wait, ordered by virtual time. Its `eligible`
//! tenants wait and may run one more sequence, ordered by what the policy orders by.

use super::ranking::Ranking;
use crate::tenant::BAND_PERCENT;
use crate::{Band, Nanos};

/// All bands.
#[derive(Default)]
pub(super) struct Bands {
    queues: [BandQueue; 3],
    clock: u64, // The greatest value so far of the least virtual time of the busy bands.
}

/// The tenants of one band.
#[derive(Default)]
pub(super) struct BandQueue {
    pub(super) active: Ranking,
    pub(super) eligible: Ranking,
    virtual_time: u64,
    planned: u64,
    left_at: u64, // The virtual time of the tenant that became idle last.
    clock: u64,   // The greatest value so far of the least virtual time of the active tenants.
}

impl BandQueue {
    /// Returns the greatest value so far of the least virtual time of the active tenants.
    pub(super) fn now(&self) -> u64 {
        let least = self.active.least_key().unwrap_or(self.left_at);
        self.clock.max(least)
    }

    /// Moves the band's clock to its present value.
    pub(super) fn advance(&mut self) {
        self.clock = self.now();
    }

    pub(super) fn leave_at(&mut self, virtual_time: u64) {
        self.left_at = virtual_time;
    }

    /// Moves a tenant to its keys in the two orders. It is absent from an order without a key.
    pub(super) fn place(&mut self, tenant: u32, active: Option<u64>, eligible: Option<u64>) {
        for (order, key) in [(&mut self.active, active), (&mut self.eligible, eligible)] {
            match key {
                Some(key) => order.set(tenant, key),
                None => order.remove(tenant),
            }
        }
    }

    fn is_busy(&self) -> bool {
        self.active.len() > 0
    }
}

impl Bands {
    pub(super) fn get(&self, band: usize) -> &BandQueue {
        &self.queues[band]
    }

    pub(super) fn get_mut(&mut self, band: usize) -> &mut BandQueue {
        &mut self.queues[band]
    }

    /// Returns the active tenants of all bands, in no particular order.
    pub(super) fn active(&self) -> impl Iterator<Item = u32> {
        self.queues.iter().flat_map(|band| band.active.members())
    }

    /// Returns the bands, the one furthest behind its share first.
    pub(super) fn in_order(&self) -> [Band; 3] {
        let mut bands = [Band::Interactive, Band::Standard, Band::Batch];
        bands.sort_by_key(|&band| {
            let queue = &self.queues[band as usize];
            queue.virtual_time + queue.planned
        });
        bands
    }

    pub(super) fn charge(&mut self, band: usize, cost: Nanos) {
        self.queues[band].virtual_time += cost * 100 / BAND_PERCENT[band];
    }

    pub(super) fn plan_charge(&mut self, band: usize, cost: Nanos) {
        self.queues[band].planned += cost * 100 / BAND_PERCENT[band];
    }

    pub(super) fn forget_planned(&mut self) {
        for band in &mut self.queues {
            band.planned = 0;
        }
    }

    /// Lifts an idle band to the least virtual time of the busy bands, so that it does not save up
    /// the time it was idle.
    pub(super) fn lift(&mut self, band: usize) {
        if self.queues[band].is_busy() {
            return;
        }
        let busy = self.queues.iter().filter(|band| band.is_busy());
        let least = busy.map(|band| band.virtual_time).min();
        self.clock = self.clock.max(least.unwrap_or(0));
        let band = &mut self.queues[band];
        band.virtual_time = band.virtual_time.max(self.clock);
    }

    /// Once all bands are idle, moves their clock to the latest virtual time. Otherwise the next
    /// band to become busy would be behind the others.
    pub(super) fn level_if_idle(&mut self) {
        if !self.queues.iter().any(BandQueue::is_busy) {
            let latest = self.queues.iter().map(|band| band.virtual_time).max();
            self.clock = self.clock.max(latest.unwrap_or(0));
        }
    }
}
