//! Which tenants' numbers leave with a turn, so that metrics follow them at a cost that does not show.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use sterna_scheduler::{TenantId, TenantState};

/// Between two reports of all active tenants.
const INTERVAL: Duration = Duration::from_millis(100);

/// The tenants with work or pages, and those for whom some has just ended.
#[derive(Default)]
pub(super) struct Tenants {
    active: HashSet<TenantId>,
    ended: Vec<TenantId>,
    reported: Option<Instant>, // All active ones.
    has_changed: bool,         // Since then.
}

impl Tenants {
    /// A request of this tenant was accepted.
    pub(super) fn begun(&mut self, tenant: TenantId) {
        self.active.insert(tenant);
    }

    /// A request of this tenant has ended: its numbers may now stay as they are for long, so they leave at once.
    pub(super) fn ended(&mut self, tenant: TenantId) {
        if !self.ended.contains(&tenant) {
            self.ended.push(tenant);
        }
    }

    /// Pages may have changed hands outside a step.
    pub(super) fn changed(&mut self) {
        self.has_changed = true;
    }

    /// What to report at `now`; most often nothing, without allocation. Others may evict the pages of a tenant without work, so it is
    /// reported while it has any, and once more when the engine comes to rest.
    pub(super) fn report(
        &mut self,
        now: Instant,
        stepped: bool,
        state: impl Fn(TenantId) -> TenantState,
    ) -> Vec<(TenantId, TenantState)> {
        let is_due = self
            .reported
            .is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL)
            || (self.has_changed && !stepped);
        self.has_changed |= stepped;
        let mut report = Vec::new();
        for tenant in self.ended.drain(..) {
            report.push((tenant, state(tenant)));
        }
        if is_due && !self.active.is_empty() {
            self.reported = Some(now);
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
    fn a_tenant_is_reported_until_its_last_page_is_gone() {
        let pages = |pages| {
            move |_| TenantState {
                pages,
                ..TenantState::default()
            }
        };
        let start = Instant::now();
        let mut tenants = Tenants::default();
        tenants.begun(TenantId(1));
        assert_eq!(tenants.report(start, true, pages(3)).len(), 1);
        assert_eq!(tenants.report(start, true, pages(3)), [], "too soon");
        let told = tenants.report(start, false, pages(2));
        assert_eq!(told[0].1.pages, 2, "the engine comes to rest");
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
