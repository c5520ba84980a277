//! The series with a tenant's name. At most [`MAX_NAMED`] tenants have their own series; the others
//! share the tenant label `other`.

use std::collections::{BTreeMap, HashMap};

use sterna_scheduler::{Micros, TenantId, TenantPolicy, TenantState};

use super::limits::TenantLimit;
use super::registry::{Definition, Registry};
use super::series::TenantSeries;

/// The number of tenants with their own series. It bounds the number of series.
const MAX_NAMED: usize = 128;

const DEFAULT: &str = "default";
const OTHER: &str = "other";

/// The series of all tenants that were ever named.
pub(super) struct AllTenantSeries {
    named: HashMap<TenantId, NamedTenant>,
    other: TenantSeries,
    states: HashMap<TenantId, TenantState>, // The last reported ones.
    other_service: Micros,                  // The sum over the tenants that share `other`.
    policies: HashMap<TenantId, TenantPolicy>,
}

/// A tenant with its own series.
struct NamedTenant {
    name: String,
    series: TenantSeries,
}

impl NamedTenant {
    /// Registers the series. The recorder must be in place.
    fn register(name: &str) -> NamedTenant {
        NamedTenant {
            name: name.to_owned(),
            series: TenantSeries::register(&mut Registry::of_tenant(name)),
        }
    }
}

impl AllTenantSeries {
    /// Registers the series of `other` and of tenant 0, which is called `default`. The recorder
    /// must be in place. Also returns the metrics.
    pub(super) fn register() -> (AllTenantSeries, Vec<Definition>) {
        let mut registry = Registry::of_tenant(OTHER);
        let other = TenantSeries::register(&mut registry);
        let series = AllTenantSeries {
            named: HashMap::from([(TenantId(0), NamedTenant::register(DEFAULT))]),
            other,
            states: HashMap::new(),
            other_service: 0,
            policies: HashMap::new(),
        };
        (series, registry.definitions)
    }

    /// Gives unknown tenants their own series, as long as there are fewer than [`MAX_NAMED`]. The
    /// recorder must be in place.
    pub(super) fn name(&mut self, tenants: &[(TenantId, String)]) {
        for (id, name) in tenants {
            if !self.named.contains_key(id) && self.named.len() < MAX_NAMED {
                self.named.insert(*id, NamedTenant::register(name));
            }
        }
    }

    /// Replaces the limits of all tenants.
    pub(super) fn limit(&mut self, policies: Vec<(TenantId, TenantPolicy)>) {
        self.policies = policies.into_iter().collect();
    }

    pub(super) fn of(&self, id: TenantId) -> &TenantSeries {
        let named = self.named.get(&id);
        named.map_or(&self.other, |named| &named.series)
    }

    /// Changes the series by the difference to the tenant's last state, so that the states of
    /// tenants that share series add up.
    pub(super) fn set(&mut self, id: TenantId, now: TenantState) {
        let before = self.states.insert(id, now).unwrap_or_default();
        if !self.named.contains_key(&id) {
            self.other_service += now.service.saturating_sub(before.service);
        }
        let series = self.of(id);
        let change = |now: u32, before: u32| f64::from(now) - f64::from(before);
        let running = change(now.running, before.running);
        series.running.increment(running);
        series.waiting.increment(change(now.queued, before.queued));
        series.pages.increment(change(now.pages, before.pages));
    }

    /// Returns the labels of all tenants, and the machine time charged to each, in seconds.
    pub(super) fn services(&self) -> impl Iterator<Item = (&str, f64)> {
        let named = self.named.iter().map(|(id, named)| {
            let state = self.states.get(id);
            (named.name.as_str(), state.map_or(0, |state| state.service))
        });
        let all = named.chain([(OTHER, self.other_service)]);
        all.map(|(name, service)| (name, service as f64 / 1e6))
    }

    /// Adds up values of tenants by label. Every label has a value.
    pub(super) fn by_name(
        &self,
        values: impl Iterator<Item = (TenantId, f64)>,
    ) -> BTreeMap<&str, f64> {
        let names = self.named.values().map(|named| named.name.as_str());
        let mut all: BTreeMap<&str, f64> = names.chain([OTHER]).map(|name| (name, 0.0)).collect();
        for (id, value) in values {
            let name = self.named.get(&id).map_or(OTHER, |named| &named.name);
            *all.entry(name).or_default() += value;
        }
        all
    }

    /// Returns the tenants that have a limit, and the limit. Tenants that share `other` have none.
    pub(super) fn limits(&self, limit: &TenantLimit) -> impl Iterator<Item = (&str, f64)> {
        self.named.iter().filter_map(|(id, named)| {
            let policy = self.policies.get(id)?;
            Some((named.name.as_str(), limit.of(policy)?))
        })
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
