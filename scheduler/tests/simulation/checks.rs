//! The rules of a world between two calls, as far as they show from outside the scheduler.

use sterna_scheduler::{
    Micros, PAGE_TOKENS, Rates, Request, SequenceId, Snapshot, TenantId, TenantState,
};

use crate::world::{PATIENCE, World};

/// A tenant's state after the last call, and its use of its request rate.
#[derive(Clone, Default)]
pub(crate) struct Account {
    state: TenantState,
    pub(crate) accepted: i64, // Requests since `since`, without refunded requests.
    pub(crate) since: Micros, // The time of the last change of policy.
}

/// Everything that a refusal must not change.
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

    /// S12: A request is accepted only if its tenant's rates are not used up, and a tenant's
    /// accepted requests are within its burst and what it has earned since.
    pub(crate) fn check_rates(&mut self, request: &Request, before: &Picture) {
        if request.is_another_choice {
            return;
        }
        let tenant = request.tenant.0 as usize;
        let (_, rates) = before.1[tenant];
        for rate in [rates.requests, rates.tokens].into_iter().flatten() {
            assert!(rate.remaining > 0, "S12: a used-up rate accepts a request");
        }
        let account = &mut self.accounts[tenant];
        account.accepted += 1;
        if let Some(rate) = self.terms[tenant].requests {
            let nanos_per_request = 60_000_000_000 / u64::from(rate.per_minute);
            let earned = (self.now - account.since) * 1000 / nanos_per_request;
            let limit = u64::from(rate.burst) + earned + 1;
            assert!(
                account.accepted <= limit as i64,
                "S12: the rate accepts too many requests"
            );
        }
    }

    /// Checks the scheduler's own invariants, and
    /// S12: A tenant has no more pages and running sequences than its policy allows, except what it
    /// had before, and except the pages of its longest accepted request.
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
            let max_pages = terms.max_pages.max(longest.max().unwrap_or(0));
            assert!(
                state.pages <= max_pages.max(account.state.pages),
                "S12: {id:?} holds too many pages"
            );
            let max_running = terms.max_running.max(account.state.running);
            assert!(
                state.running <= max_running,
                "S12: {id:?} runs too many sequences"
            );
            account.state = state;
        }
    }

    /// Returns the sum of all charges to all tenants.
    pub(crate) fn service(&self) -> Micros {
        let tenants = (0..self.tenants as u32).map(TenantId);
        tenants.map(|id| self.scheduler.tenant(id).service).sum()
    }

    /// S8: A cancel makes no page unavailable, and if nothing runs afterwards, no page is private
    /// and only public pages are pinned.
    pub(crate) fn check_pages_returned(&self, before: &Snapshot) {
        let after = self.scheduler.snapshot();
        let available = |state: &Snapshot| state.free + state.tree - state.pinned;
        assert!(
            available(&after) >= available(before),
            "S8: a cancel loses pages"
        );
        let is_clean = after.private == 0 && after.pinned <= self.public_pages();
        assert!(
            after.running > 0 || is_clean,
            "S8: a page is held although nothing runs"
        );
    }

    /// Returns the number of pages of all public prefixes.
    pub(crate) fn public_pages(&self) -> usize {
        let pages = self.public.iter().map(|prefix| prefix.len() / PAGE_TOKENS);
        pages.sum()
    }

    /// M7: A plan evicts no more pages than it takes. The counts show this only if the plan
    /// preempts and ends nothing and all tenants are within their caps.
    pub(crate) fn check_evictions(&self, before: &Snapshot) {
        let after = self.scheduler.snapshot();
        let mut states = self.accounts.iter().zip(&self.terms);
        let is_within_caps = states.all(|(account, terms)| account.state.pages <= terms.max_pages);
        let requests = |state: &Snapshot| (state.preemptions, state.running + state.queued);
        if is_within_caps && requests(&after) == requests(before) {
            let evicted = after.evictions - before.evictions;
            let taken = after.private - before.private;
            assert!(
                evicted <= taken as u64,
                "M7: {evicted} evictions for {taken} pages"
            );
        }
    }

    /// S7: The charges of a step add up to its predicted time, apart from rounding.
    pub(crate) fn check_charges(&self, before: Micros, predicted: Micros) {
        let charged = self.service() - before;
        assert!(
            charged.abs_diff(predicted) <= self.tenants + 1,
            "S7: {charged} µs charged for {predicted} µs"
        );
    }

    /// S4: At most `2 * PATIENCE` later requests of the same tenant are admitted before a waiting
    /// request. A request that may have waited for a prefix being computed is an exception.
    pub(crate) fn check_order(&mut self, id: SequenceId) {
        let admitted = &self.clients[&id];
        let (number, tenant) = (admitted.number, admitted.request.tenant);
        for client in self.clients.values_mut() {
            let is_bypassed = client.is_waiting && client.number < number;
            if is_bypassed && client.request.tenant == tenant {
                client.times_bypassed += 1;
                assert!(
                    client.times_bypassed <= 2 * PATIENCE || client.may_await_prefix,
                    "S4: a request was bypassed {} times",
                    client.times_bypassed
                );
            }
        }
    }
}
