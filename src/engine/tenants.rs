//! Which tenants' numbers leave with a turn, so that metrics follow them at a cost that does not show.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use sterna_scheduler::{Scheduler, TenantId, TenantState};

/// Between two reports of all active tenants.
const INTERVAL: Duration = Duration::from_millis(100);

/// The tenants with work, and those for whom some has just ended.
#[derive(Default)]
pub(super) struct Tenants {
    active: HashSet<TenantId>,
    ended: Vec<TenantId>,
    reported: Option<Instant>, // All active ones.
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

    /// What to report at `now`; most often nothing, without allocation.
    pub(super) fn report(
        &mut self,
        now: Instant,
        scheduler: &Scheduler,
    ) -> Vec<(TenantId, TenantState)> {
        let is_due = self
            .reported
            .is_none_or(|last| now.saturating_duration_since(last) >= INTERVAL);
        let mut report = Vec::new();
        for tenant in self.ended.drain(..) {
            report.push((tenant, scheduler.tenant(tenant)));
        }
        if is_due && !self.active.is_empty() {
            self.reported = Some(now);
            self.active.retain(|&tenant| {
                let state = scheduler.tenant(tenant);
                report.push((tenant, state));
                state.running + state.queued > 0
            });
        }
        report
    }
}
