//! Decides which tenants' gauges leave with a turn's output, so that metrics follow them at little
//! cost.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use sterna_scheduler::{TenantId, TenantState};

/// The time between two reports of all active tenants.
const INTERVAL: Duration = Duration::from_millis(100);

/// The tenants with work or pages, and the tenants with a request that has just ended.
#[derive(Default)]
pub(super) struct TenantReports {
    active: HashSet<TenantId>,
    ended: Vec<TenantId>,
    last_report: Option<Instant>, // Of all active tenants.
    has_changed: bool,            // Since the last report.
}

impl TenantReports {
    /// Notes that a request of this tenant was accepted.
    pub(super) fn begun(&mut self, tenant: TenantId) {
        self.active.insert(tenant);
    }

    /// Notes that a request of this tenant has ended. The next report includes this tenant, because
    /// its gauges may then stay unchanged for long.
    pub(super) fn ended(&mut self, tenant: TenantId) {
        if !self.ended.contains(&tenant) {
            self.ended.push(tenant);
        }
    }

    /// Notes that pages may have changed hands outside a step.
    pub(super) fn changed(&mut self) {
        self.has_changed = true;
    }

    /// Returns the gauges to report at `now`. Usually there are none, and nothing is allocated.
    ///
    /// Other tenants may evict the pages of a tenant without work. So a tenant is reported as long
    /// as it has pages, and once more when the engine becomes idle.
    pub(super) fn report(
        &mut self,
        now: Instant,
        has_stepped: bool,
        state: impl Fn(TenantId) -> TenantState,
    ) -> Vec<(TenantId, TenantState)> {
        let is_due = self
            .last_report
            .is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL)
            || (self.has_changed && !has_stepped);
        self.has_changed |= has_stepped;
        let mut report = Vec::new();
        for tenant in self.ended.drain(..) {
            report.push((tenant, state(tenant)));
        }
        if is_due && !self.active.is_empty() {
            self.last_report = Some(now);
            self.has_changed = false;
            self.active.retain(|&tenant| {
                let state = state(tenant);
                report.push((tenant, state));
                state.running + state.queued + state.pages > 0
            });
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_reported_until_its_last_page_is_free() {
        let pages = |pages| {
            move |_| TenantState {
                pages,
                ..TenantState::default()
            }
        };
        let start = Instant::now();
        let mut tenants = TenantReports::default();
        tenants.begun(TenantId(1));
        assert_eq!(tenants.report(start, true, pages(3)).len(), 1);
        assert_eq!(tenants.report(start, true, pages(3)), [], "too soon");
        let reported = tenants.report(start, false, pages(2));
        assert_eq!(reported[0].1.pages, 2, "the engine becomes idle");
        assert_eq!(tenants.report(start, false, pages(2)), [], "nothing is new");
        tenants.changed();
        assert_eq!(tenants.report(start, false, pages(1)).len(), 1);
        let later = start + INTERVAL;
        assert_eq!(tenants.report(later, true, pages(0))[0].1.pages, 0);
        let last = later + INTERVAL;
        assert_eq!(
            tenants.report(last, true, pages(0)),
            [],
            "it has nothing left"
        );
    }
}
