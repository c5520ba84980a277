//! The rules of a world between two calls, as far as they show from outside the scheduler.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Band, CostModel, Micros, Nanos, Order, PAGE_TOKENS, Rate, Rates, Refusal, Request, SequenceId,
    Snapshot, Step, StepShape, TenantId, TenantState,
};

use crate::model::Client;
use crate::rules::Decode;
use crate::world::{PATIENCE, World};

/// A tenant's state after the last call, and its use of its rates.
#[derive(Clone, Default)]
pub(crate) struct Account {
    state: TenantState,
    pub(crate) accepted: i64, // Requests since `since`, without refunded requests.
    /// Output tokens of the requests since `since`: those that the client got, or may still get.
    pub(crate) tokens: i64,
    pub(crate) since: Micros, // The time of the last change of policy.
}

/// Everything that a refusal must not change.
pub(crate) type Picture = (Snapshot, Vec<(TenantState, Rates)>);

/// What a planned step should cost, and the tenants that cause it.
pub(crate) struct PlannedCost {
    pub(crate) predicted: Micros,
    shape: StepShape,
    drafting: Nanos, // What the pass that drafts takes.
    cost: CostModel,
    sampling: Vec<Nanos>, // By tenant.
    service: Vec<Micros>, // Of each tenant before the step.
}

impl PlannedCost {
    pub(crate) fn of(
        step: &Step<'_>,
        clients: &BTreeMap<SequenceId, Client>,
        service: Vec<Micros>,
    ) -> PlannedCost {
        let mut sampling = vec![0; service.len()];
        for row in step.batch().rows() {
            let request = &clients[&row.sequence].request;
            sampling[request.tenant.0 as usize] += u64::from(row.logits) * request.draw_time;
        }
        let shape = step.shape();
        let all: Nanos = sampling.iter().sum();
        assert_eq!(shape.sampling, all, "S16: the prediction lacks sampling");
        PlannedCost {
            predicted: step.predicted(),
            shape,
            drafting: step.cost().predict(step.drafting()),
            cost: step.cost(),
            sampling,
            service,
        }
    }
}

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
    ///
    /// S14: A tenant's output tokens are within its burst and what it has earned since, except
    /// the tokens of the last accepted request.
    pub(crate) fn check_rates(&mut self, request: &Request, choices: usize, before: &Picture) {
        let tenant = request.tenant.0 as usize;
        let (_, rates) = before.1[tenant];
        for rate in [rates.requests, rates.tokens].into_iter().flatten() {
            assert!(rate.remaining > 0, "S12: a used-up rate accepts a request");
        }
        let account = &mut self.accounts[tenant];
        account.accepted += 1;
        let elapsed = self.now - account.since;
        let limit = |rate: Rate| {
            let nanos_per_unit = 60_000_000_000 / u64::from(rate.per_minute);
            let earned = elapsed * 1000 / nanos_per_unit;
            (u64::from(rate.burst) + earned + 1) as i64
        };
        assert!(
            (self.terms[tenant].requests).is_none_or(|rate| account.accepted <= limit(rate)),
            "S12: the rate accepts too many requests"
        );
        assert!(
            (self.terms[tenant].tokens).is_none_or(|rate| account.tokens <= limit(rate)),
            "S14: {} tokens are used up or reserved before this request",
            account.tokens
        );
        account.tokens += choices as i64 * i64::from(request.max_new_tokens);
    }

    /// Gives back what an ended request has not used of its tenant's rates.
    pub(crate) fn settle_account(&mut self, client: &Client) {
        let request = &client.request;
        let account = &mut self.accounts[request.tenant.0 as usize];
        account.accepted -= i64::from(client.takes_place());
        account.tokens -= i64::from(request.max_new_tokens) - client.output.len() as i64;
        if client.policies < self.policies {
            // The rates of that time may have earned all of it already.
            account.tokens -= (request.prompt.len() + client.output.len()) as i64;
        }
    }

    /// Returns the number of a tenant's requests that take a place in the queue.
    fn places(&self, tenant: TenantId) -> usize {
        let own = self.clients.values().filter(|client| client.takes_place());
        own.filter(|client| client.request.tenant == tenant).count()
    }

    /// S12: The queue holds at most `max_queued` requests that have not started.
    pub(crate) fn check_places(&self, newest: &Request) {
        let tenants = (0..self.tenants as u32).map(TenantId);
        let places: usize = tenants.map(|id| self.places(id)).sum();
        assert!(
            places <= self.limits.max_queued as usize,
            "S12: the queue holds {places} requests"
        );
        assert!(
            self.places(newest.tenant) > 0,
            "S13: a new request displaces itself"
        );
    }

    /// S13: A tenant with nothing waiting is refused for lack of room only if no other tenant has
    /// two requests waiting.
    pub(crate) fn check_refusal(&self, request: &Request, refusal: Refusal) {
        let is_shared = matches!(self.policy.order, Order::FairShare { .. });
        let is_full = matches!(refusal, Refusal::Overloaded { .. });
        if !is_shared || !is_full || self.places(request.tenant) > 0 {
            return;
        }
        for id in (0..self.tenants as u32).map(TenantId) {
            let places = self.places(id);
            assert!(
                places < 2,
                "S13: {:?} finds no room although {id:?} has {places} requests waiting",
                request.tenant
            );
        }
    }

    /// S13: Only a request that has never run is displaced, and its handle is dead.
    pub(crate) fn check_displaced(&mut self, id: SequenceId, tenant: TenantId) {
        let client = self.clients.remove(&id).expect("a request ends once");
        assert!(!client.was_admitted, "S13: {id:?} had started");
        assert_eq!(client.request.tenant, tenant);
        self.settle_account(&client);
    }

    /// Returns whether a tenant cannot exceed its guaranteed pages, even if all of its requests
    /// run.
    fn is_guaranteed(&self, tenant: TenantId) -> bool {
        let own = self.clients.values();
        let own = own.filter(|client| client.request.tenant == tenant);
        let pages: usize = own.map(Client::max_pages).sum();
        pages <= self.terms[tenant.0 as usize].guaranteed_pages as usize
    }

    /// S15: A tenant that cannot exceed its guaranteed pages is never preempted.
    pub(crate) fn check_preempted(&self, id: SequenceId) {
        let tenant = self.clients[&id].request.tenant;
        assert!(
            !self.is_guaranteed(tenant),
            "S15: {id:?} is preempted within its guarantee"
        );
    }

    /// Returns the running decodes.
    pub(crate) fn decodes(&self) -> Vec<Decode> {
        let decodes = self.clients.iter().filter(|(_, client)| client.is_decode());
        let decode = |(&id, client): (&SequenceId, &Client)| Decode {
            id,
            must_advance: self.is_guaranteed(client.request.tenant) && !self.may_pause(client),
        };
        decodes.map(decode).collect()
    }

    /// Returns whether a decode may pause: for lack of time in the batch band, or for a short
    /// prompt while its tenant has requests waiting.
    fn may_pause(&self, client: &Client) -> bool {
        let tenant = client.request.tenant;
        let mut own = self.clients.values();
        self.terms[tenant.0 as usize].band == Band::Batch
            || client.request.band == Some(Band::Batch)
            || client.policies < self.policies
            || own.any(|other| other.is_waiting && other.request.tenant == tenant)
    }

    /// Checks the scheduler's own invariants, and
    /// S12: A tenant has no more pages and running sequences than its policy allows, except what it
    /// had before, and except the pages of its longest accepted request.
    pub(crate) fn check(&mut self) {
        self.scheduler.check();
        let tenants = self.terms.iter().zip(&mut self.accounts);
        for (id, (terms, account)) in (0..).map(TenantId).zip(tenants) {
            let state = self.scheduler.tenant(id);
            let own = self.clients.values();
            let own = own.filter(|client| client.request.tenant == id);
            let longest = own.map(Client::max_pages).max().unwrap_or(0);
            let max_pages = terms.max_pages.max(longest as u32);
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
        self.services().sum()
    }

    /// Returns the sum of the charges to each tenant.
    pub(crate) fn services(&self) -> impl Iterator<Item = Micros> {
        let tenants = (0..self.tenants as u32).map(TenantId);
        tenants.map(|id| self.scheduler.tenant(id).service)
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
    ///
    /// S16: No tenant is charged for the sampling of others: a step costs it at most as much as a
    /// step with its own sampling alone.
    pub(crate) fn check_charges(&self, step: &PlannedCost) {
        let services = || self.services().zip(&step.service);
        let charged: Micros = services().map(|(after, before)| after - before).sum();
        let predicted = step.predicted;
        assert!(
            charged.abs_diff(predicted) <= self.tenants + 1,
            "S7: {charged} µs charged for {predicted} µs"
        );
        for ((after, before), &sampling) in services().zip(&step.sampling) {
            let (charged, shape) = (after - before, step.shape);
            let own = step.cost.predict(StepShape { sampling, ..shape });
            let limit = (own + step.drafting) / 1000;
            assert!(
                charged <= limit + 2,
                "S16: {charged} µs charged for a step of {limit} µs and the sampling of others"
            );
        }
    }

    /// S4: At most `2 * PATIENCE` later requests of the same client of a tenant are admitted before
    /// a waiting request, unless that has a band of its own. A request that may have waited for a
    /// prefix being computed is an exception.
    pub(crate) fn check_order(&mut self, id: SequenceId) {
        let admitted = &self.clients[&id];
        let owner = |request: &Request| (request.tenant, request.sub_tenant);
        let (number, admitted) = (admitted.number, owner(&admitted.request));
        for client in self.clients.values_mut() {
            let is_bypassed = client.is_waiting && client.number < number;
            let is_usual = client.request.band.is_none();
            if is_bypassed && is_usual && owner(&client.request) == admitted {
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
