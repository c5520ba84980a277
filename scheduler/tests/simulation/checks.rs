//! What must hold of a world between two calls, as far as it can be seen from outside.

use sterna_scheduler::{
    Micros, PAGE_TOKENS, Rates, Request, SequenceId, Snapshot, TenantId, TenantState,
};

use crate::world::{PATIENCE, World};

/// What a tenant had before, and what it used of its rate.
#[derive(Clone, Default)]
pub(crate) struct Account {
    state: TenantState,
    pub(crate) accepted: i64, // Requests since these terms hold, less those that were given back.
    pub(crate) since: Micros,
}

/// All that a refusal must not change.
pub(crate) type Picture = (Snapshot, Vec<(TenantState, Rates)>);

impl World {
    pub(crate) fn picture(&self) -> Picture {
        let tenants = (0..self.tenants as u32).map(TenantId);
        let of = |id| {
            (
                self.scheduler.tenant(id),
                self.scheduler.rates(self.now, id),
            )
        };
        (self.scheduler.snapshot(), tenants.map(of).collect())
    }

    /// S12: nobody asks more often than its rates allow.
    pub(crate) fn check_rates(&mut self, request: &Request, before: &Picture) {
        if request.is_another_choice {
            return;
        }
        let tenant = request.tenant.0 as usize;
        let (_, rates) = before.1[tenant];
        for rate in [rates.requests, rates.tokens].into_iter().flatten() {
            assert!(rate.remaining > 0, "S12: a rate was used up");
        }
        let account = &mut self.accounts[tenant];
        account.accepted += 1;
        if let Some(rate) = self.terms[tenant].requests {
            let one_takes = 60_000_000_000 / u64::from(rate.per_minute);
            let earned = (self.now - account.since) * 1000 / one_takes;
            let most = u64::from(rate.burst) + earned + 1;
            assert!(account.accepted <= most as i64, "S12: too many requests");
        }
    }

    /// What must hold after every call: what the scheduler itself says, and
    /// S12: a tenant has no more than its terms allow, but for what it had before they were narrowed.
    pub(crate) fn check(&mut self) {
        self.scheduler.check();
        let tenants = self.terms.iter().zip(&mut self.accounts);
        for (id, (terms, account)) in (0..).map(TenantId).zip(tenants) {
            let state = self.scheduler.tenant(id);
            let own = self.clients.values().map(|client| &client.request);
            let longest = own.filter(|request| request.tenant == id).map(|request| {
                let tokens = request.prompt.len() + request.max_new_tokens as usize;
                tokens.div_ceil(PAGE_TOKENS) as u32 + 1 // And the page that it may copy from.
            });
            let pages = terms.max_pages.max(longest.max().unwrap_or(0));
            assert!(state.pages <= pages.max(account.state.pages), "S12: {id:?}");
            let running = terms.max_running.max(account.state.running);
            assert!(state.running <= running, "S12: {id:?}");
            account.state = state;
        }
    }

    /// What all tenants were charged.
    pub(crate) fn service(&self) -> Micros {
        let tenants = (0..self.tenants as u32).map(TenantId);
        tenants.map(|id| self.scheduler.tenant(id).service).sum()
    }

    /// S8: who is cancelled holds no page any more, and takes none from others.
    pub(crate) fn check_pages_back(&self, before: &Snapshot) {
        let after = self.scheduler.snapshot();
        let available = |state: &Snapshot| state.free + state.tree - state.pinned;
        assert!(available(&after) >= available(before), "S8: pages are lost");
        let public: usize = self.public.iter().map(|p| p.len() / PAGE_TOKENS).sum();
        let is_quiet = after.private == 0 && after.pinned <= public;
        assert!(after.running > 0 || is_quiet, "S8: nobody's pages are held");
    }

    /// M7: a plan evicts only for pages that it takes. Can be seen when nobody has lost or given up pages in it.
    pub(crate) fn check_evictions(&self, before: &Snapshot) {
        let after = self.scheduler.snapshot();
        let mut states = self.accounts.iter().zip(&self.terms);
        let is_within_caps = states.all(|(account, terms)| account.state.pages <= terms.max_pages);
        let requests = |state: &Snapshot| (state.preemptions, state.running + state.queued);
        if is_within_caps && requests(&after) == requests(before) {
            let evicted = after.evictions - before.evictions;
            let taken = after.private - before.private;
            assert!(evicted <= taken as u64, "M7: evicted in vain");
        }
    }

    /// S7: a step's charges are what it was predicted to take.
    pub(crate) fn check_charges(&self, before: Micros, predicted: Micros) {
        let charged = self.service() - before;
        assert!(
            charged.abs_diff(predicted) <= self.tenants + 1,
            "S7: {charged} µs for {predicted}"
        );
    }

    /// S4: within a tenant, those who come later may go past only so often, but while one waits for a prefix being computed.
    pub(crate) fn check_order(&mut self, id: SequenceId) {
        let admitted = &self.clients[&id];
        let (number, tenant) = (admitted.number, admitted.request.tenant);
        for client in self.clients.values_mut() {
            let is_passed = client.is_waiting && client.number < number;
            if is_passed && client.request.tenant == tenant {
                client.passed += 1;
                assert!(
                    client.passed <= 2 * PATIENCE || client.may_be_passed,
                    "S4: passed for ever"
                );
            }
        }
    }
}
