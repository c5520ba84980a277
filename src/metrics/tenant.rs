//! The series with a tenant's name. At most [`MAX_NAMED`] tenants have their own series; the others
//! share the tenant label `other`.

use std::collections::HashMap;

use sterna_scheduler::{Micros, TenantId, TenantState};

use super::registry::{Definition, Registry};
use super::series::TenantSeries;

/// The number of tenants with their own series. It bounds the number of series.
const MAX_NAMED: usize = 128;

const DEFAULT: &str = "default";
const OTHER: &str = "other";

/// The series of all tenants that were ever named.
pub(super) struct AllTenantSeries {
    named: HashMap<TenantId, TenantSeries>,
    other: TenantSeries,
    states: HashMap<TenantId, TenantState>, // The last reported ones.
    other_service: Micros,                  // The sum over the tenants that share `other`.
}

impl AllTenantSeries {
    /// Registers the series of `other` and of tenant 0, which is called `default`. The recorder
    /// must be in place. Also returns the metrics.
    pub(super) fn register() -> (AllTenantSeries, Vec<Definition>) {
        let mut registry = Registry::of_tenant(OTHER);
        let other = TenantSeries::register(&mut registry);
        let default = TenantSeries::register(&mut Registry::of_tenant(DEFAULT));
        let series = AllTenantSeries {
            named: HashMap::from([(TenantId(0), default)]),
            other,
            states: HashMap::new(),
            other_service: 0,
        };
        (series, registry.definitions)
    }

    /// Gives unknown tenants their own series, as long as there are fewer than [`MAX_NAMED`]. The
    /// recorder must be in place.
    pub(super) fn name(&mut self, tenants: &[(TenantId, String)]) {
        for (id, name) in tenants {
            if !self.named.contains_key(id) && self.named.len() < MAX_NAMED {
                let series = TenantSeries::register(&mut Registry::of_tenant(name));
                self.named.insert(*id, series);
            }
        }
    }

    pub(super) fn of(&self, id: TenantId) -> &TenantSeries {
        self.named.get(&id).unwrap_or(&self.other)
    }

    /// Changes the series by the difference to the tenant's last state, so that those of tenants
    /// that share series add up.
    pub(super) fn set(&mut self, id: TenantId, now: TenantState) {
        let before = self.states.insert(id, now).unwrap_or_default();
        let service = if self.named.contains_key(&id) {
            now.service
        } else {
            self.other_service += now.service.saturating_sub(before.service);
            self.other_service
        };
        let series = self.of(id);
        let change = |now: u32, before: u32| f64::from(now) - f64::from(before);
        let running = change(now.running, before.running);
        series.running.increment(running);
        series.waiting.increment(change(now.queued, before.queued));
        series.pages.increment(change(now.pages, before.pages));
        series.service.absolute(service / 1_000_000);
    }

    /// Sets all gauges to 0, because the engine has ended.
    pub(super) fn clear(&mut self) {
        for (id, state) in self.states.clone() {
            let ended = TenantState {
                service: state.service,
                ..TenantState::default()
            };
            self.set(id, ended);
        }
    }
}
