//! The scheduler as its caller sees it: requests in, steps and events out.

use std::collections::BTreeMap;

use crate::admission::{Admission, places_for, submit, submit_prompts};
use crate::limits::MAX_SCORED_TOKENS;
use crate::sequence::{OutputRules, Sequence};
use crate::state::SchedulerState;
use crate::step::Planner;
use crate::{
    Batch, CacheChange, CostModel, Diffusion, Event, FinishReason, Limits, Micros, Nanos,
    OwnDrafts, PAGE_TOKENS, Page, Policy, PublicPrefix, Rates, Refusal, Request, Sampled,
    SequenceId, Snapshot, StateSlab, StepShape, TenantId, TenantPolicy, TenantState, TenantsError,
    TokenId,
};

/// Decides the steps of a continuous batch.
///
/// It owns all requests between `submit` and their end, all tenants, and all KV pages.
pub struct Scheduler {
    state: SchedulerState,
    admission: Admission,
    planner: Planner,
}

/// What to do next.
pub enum Plan<'a> {
    /// No request runs or waits.
    Idle,
    /// Compute this step.
    Step(Step<'a>),
}

/// A planned step. If the caller drops it, no token counts as computed; what the plan admitted,
/// preempted or evicted stays so.
#[must_use = "the tokens of a step count only after its commit"]
pub struct Step<'a> {
    scheduler: &'a mut Scheduler,
}

impl Scheduler {
    /// Creates a scheduler with no requests and free memory.
    ///
    /// # Panics
    /// If a limit is 0, if `prefill_chunk` is less than a page, if blocks have less than 2 tokens
    /// or parts more than 64, if a model with states fills blocks, or if `max_running` sequences of
    /// the greatest length have more pages than 32 bits can number.
    pub fn new(limits: Limits, policy: Policy) -> Scheduler {
        assert!(limits.longest_sequence() > 0, "a token fits in memory");
        assert!(limits.max_running > 0, "a sequence may run");
        assert!(limits.max_queued > 0, "requests pass through the queue");
        assert!(
            limits.prefill_chunk as usize >= PAGE_TOKENS,
            "prefill advances by pages"
        );
        if let Some(states) = limits.states {
            assert!(states.in_place_tokens > 0, "a decode is a row in place");
            let interval = states.trial_interval as usize;
            let is_whole = interval > 0 && interval.is_multiple_of(PAGE_TOKENS);
            assert!(is_whole, "states are kept after whole pages");
            assert!(
                states.slabs > limits.max_running,
                "there are more slabs than running sequences"
            );
        }
        if let Some(diffusion) = limits.diffusion {
            let Diffusion { block, part, .. } = diffusion;
            assert!(limits.states.is_none(), "recurrent layers are causal");
            assert!(block >= 2, "a block has a known token and an unknown one");
            let largest = MAX_SCORED_TOKENS as u32;
            assert!(
                (1..=largest).contains(&part),
                "the logits of a part fit in a step"
            );
        }
        Scheduler {
            planner: Planner::new(limits.max_running as usize),
            admission: Admission::default(),
            state: SchedulerState::new(limits, policy),
        }
    }

    /// Declares a public prefix. The tenants whose policy names it share its whole
    /// pages, which stay cached once they are computed. Prefixes are declared before the first
    /// request.
    ///
    /// # Panics
    /// If a request was submitted before, or the prefixes leave no page for anything else.
    pub fn declare_public(&mut self, prefix: &[TokenId]) -> PublicPrefix {
        let arrivals = self.state.sequences.arrivals();
        assert_eq!(arrivals, 0, "public prefixes come first");
        let public = self.state.pool.declare_public(prefix);
        let pages = self.state.conditions.limits.pages;
        assert!(self.state.pool.reserved() < pages, "no page is left");
        public
    }

    /// Changes the policies of these tenants. Other tenants keep theirs, and all requests go on.
    ///
    /// # Errors
    /// If a policy is not valid, or the policies together guarantee more pages than exist. Then
    /// nothing changes.
    pub fn set_tenants(
        &mut self,
        tenants: &[(TenantId, TenantPolicy)],
    ) -> Result<(), TenantsError> {
        let state = &mut self.state;
        let all = state.queue.tenants().iter();
        let mut guaranteed: BTreeMap<TenantId, u32> = all
            .map(|(id, tenant)| (id, tenant.policy.guaranteed_pages))
            .collect();
        for (id, policy) in tenants {
            policy.check(*id, state.pool.tree().public.prefixes())?;
            guaranteed.insert(*id, policy.guaranteed_pages);
        }
        let guaranteed = guaranteed.values().map(|&pages| u64::from(pages)).sum();
        let limit = u64::from(state.conditions.limits.pages - state.pool.reserved());
        if guaranteed > limit {
            return Err(TenantsError::TooManyGuaranteed { guaranteed, limit });
        }
        let now = state.conditions.now;
        for (id, policy) in tenants {
            state.queue.set_tenant(now, *id, policy.clone());
            state.set_page_quota(*id);
        }
        Ok(())
    }

    /// Returns a tenant's state in numbers; zeros if it was never set.
    pub fn tenant(&self, id: TenantId) -> TenantState {
        let tenant = self.state.queue.tenants().find(id);
        tenant.map_or(TenantState::default(), |tenant| TenantState {
            running: tenant.running,
            queued: tenant.waiting.len() as u32,
            pages: self.state.pool.held(id),
            service: tenant.service / 1000,
        })
    }

    /// Returns the state of a tenant's rates; none if it was never set.
    pub fn rates(&self, now: Micros, id: TenantId) -> Rates {
        let tenant = self.state.queue.tenants().find(id);
        tenant.map_or(Rates::default(), |tenant| tenant.rates.state(now))
    }

    /// Predicts steps with these coefficients, until steps teach others.
    pub fn calibrate(&mut self, cost: CostModel) {
        self.state.conditions.calibrate(cost);
    }

    /// As [`calibrate`](Scheduler::calibrate), with coefficients whose measurement other work has
    /// disturbed. The queue is not limited by its predicted time until steps have taught others.
    pub fn calibrate_unsure(&mut self, cost: CostModel) {
        self.state.conditions.calibrate_unsure(cost);
    }

    /// Says which tokens must come next in the output of a sequence, because a grammar forces them.
    /// These tokens are the only drafts of the sequence until its next step commits, and no others
    /// follow. A sequence that has ended is ignored.
    pub fn force(&mut self, id: SequenceId, tokens: impl Iterator<Item = TokenId>) {
        if self.state.sequences.get(id).is_some() {
            self.state.sequences[id.slot()].force(tokens);
        }
    }

    /// Accepts a request. The request waits until a plan admits it. If the queue is full, requests
    /// of tenants that have more of the queue than their share may leave: see [`Event::Displaced`].
    ///
    /// # Errors
    /// A [`Refusal`] if it can never run, or not now. Then nothing changes.
    ///
    /// # Panics
    /// If its tenant was never set, its draws take longer than
    /// [`MAX_DRAW_TIME`](crate::MAX_DRAW_TIME), or time runs backwards.
    pub fn submit(&mut self, now: Micros, request: Request) -> Result<SequenceId, Refusal> {
        self.state.conditions.advance(now);
        submit(&mut self.state, request)
    }

    /// Accepts a request with several choices: sequences of the same prompt. Returns the handle of
    /// each choice.
    ///
    /// # Errors
    /// A [`Refusal`] if it can never run, or not now. Then nothing changes.
    ///
    /// # Panics
    /// If there is no choice, its tenant was never set, its draws take longer than
    /// [`MAX_DRAW_TIME`](crate::MAX_DRAW_TIME), or time runs backwards.
    pub fn submit_choices(
        &mut self,
        now: Micros,
        request: Request,
        choices: usize,
    ) -> Result<Vec<SequenceId>, Refusal> {
        self.state.conditions.advance(now);
        submit_prompts(&mut self.state, vec![request], choices)
    }

    /// Accepts a request of several prompts, each with as many choices. All of them take one place
    /// in the queue, and the tenant's rates count one request and each prompt once. Returns the
    /// handles of the choices, those of the first prompt first.
    ///
    /// # Errors
    /// A [`Refusal`] if the request can never run, or not now. Then nothing changes.
    ///
    /// # Panics
    /// If there is no prompt or no choice, the prompts are of several tenants, the tenant was never
    /// set, draws take longer than [`MAX_DRAW_TIME`](crate::MAX_DRAW_TIME), or time runs backwards.
    pub fn submit_prompts(
        &mut self,
        now: Micros,
        prompts: Vec<Request>,
        choices: usize,
    ) -> Result<Vec<SequenceId>, Refusal> {
        self.state.conditions.advance(now);
        submit_prompts(&mut self.state, prompts, choices)
    }

    /// Returns how many more requests of a tenant find places in the queue now. Each may still be
    /// refused for what it asks for. In a full queue, the tenant's own limit alone counts: the
    /// tenant gets the places of others. Changes no request.
    ///
    /// # Errors
    /// A [`Refusal`] if every request of the tenant is refused now, whatever it asks for.
    ///
    /// # Panics
    /// If the tenant was never set, or time runs backwards.
    pub fn places_for(&mut self, now: Micros, tenant: TenantId) -> Result<usize, Refusal> {
        self.state.conditions.advance(now);
        places_for(&self.state, tenant)
    }

    /// Charges a request that is never submitted: it has failed before, or it is about text only.
    /// It counts as one request and as no tokens.
    ///
    /// # Errors
    /// If the tenant's rates allow no request now. Then nothing is charged.
    pub fn charge_request(&mut self, now: Micros, tenant: TenantId) -> Result<(), Refusal> {
        self.state.conditions.advance(now);
        let rates = self.state.queue.rates_mut(tenant);
        match rates.conforms(now) {
            Ok(()) => rates.charge_request(now),
            Err((rate, retry_after)) => return Err(Refusal::RateLimited { rate, retry_after }),
        }
        Ok(())
    }

    /// Charges a tenant for processor time that its requests took outside of steps, such as the
    /// encoding of a text or the compilation of a grammar.
    ///
    /// # Panics
    /// If the tenant was never set.
    pub fn charge_time(&mut self, tenant: TenantId, time: Nanos) {
        self.state.queue.charge_outside_of_steps(tenant, time);
    }

    /// Ends a request with this reason, whether it waits or runs. Returns `false` if it has ended
    /// already.
    pub fn cancel(&mut self, id: SequenceId, reason: FinishReason) -> bool {
        let is_alive = self.state.sequences.get(id).is_some();
        if is_alive {
            self.state.finish(id, reason);
        }
        is_alive
    }

    /// Refuses every request from now on. Running and waiting requests go on.
    pub fn drain(&mut self) {
        self.state.conditions.drain();
    }

    /// Removes and returns what happened since the last call, oldest first.
    pub fn events(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.state.log.drain()
    }

    /// Begins to record what the prefix cache gains and loses. The pages that are cached already
    /// count as stored now. The caller then has to collect [`Scheduler::cache_changes`].
    pub fn watch_cache(&mut self) {
        self.state.pool.watch();
    }

    /// Removes and returns the changes of the prefix cache since the last call, oldest first. A
    /// page is stored after its parent and removed before it.
    pub fn cache_changes(&mut self) -> Vec<CacheChange> {
        self.state.pool.drain_changes()
    }

    /// Forgets every cached page that no running sequence uses. Returns the number of these pages.
    pub fn reset_prefix_cache(&mut self) -> usize {
        let free = self.free_pages().len();
        self.state.pool.forget_unpinned();
        self.free_pages().len() - free
    }

    /// Returns the pages whose content no request will read. They stay free until the next plan.
    pub fn free_pages(&self) -> &[Page] {
        self.state.pool.free()
    }

    /// Returns the slabs whose content no request will read, if the model has recurrent layers.
    /// They stay free until the next plan.
    pub fn free_slabs(&self) -> Option<&[StateSlab]> {
        let slabs = &self.state.pool.slabs;
        slabs.is_used().then_some(slabs.free())
    }

    /// Returns how often a waiting request has left the queue so far, for any reason.
    pub fn departures(&self) -> u64 {
        self.state.queue.departures()
    }

    /// Returns how the model drafts for itself.
    pub fn own_drafts(&self) -> Option<OwnDrafts> {
        self.state.conditions.policy.own_drafts
    }

    /// Returns the number of known tokens of a sequence that has not ended.
    pub fn known_tokens(&self, id: SequenceId) -> Option<usize> {
        self.state.sequences.get(id).map(Sequence::len)
    }

    /// Returns the state in numbers.
    pub fn snapshot(&self) -> Snapshot {
        let state = &self.state;
        state.pool.add_counts(Snapshot {
            running: state.sequences.running().len(),
            queued: state.queue.len(),
            queued_time: state.queued_time(),
            queued_tokens: state.queue.queued_tokens(),
            ..state.log.counts().clone()
        })
    }

    /// Decides the next step. This may admit and preempt requests and evict cached pages.
    ///
    /// # Panics
    /// If time runs backwards.
    pub fn plan(&mut self, now: Micros) -> Plan<'_> {
        self.state.conditions.advance(now);
        self.state.expire();
        self.state.queue.forget_planned();
        // Admission comes first, because a new prompt may be shorter than the running ones. After a
        // plan that was short of pages, a new request would only take more of them.
        if !self.planner.is_short_of_pages() || self.state.sequences.running().is_empty() {
            self.admission.admit(&mut self.state);
        }
        if self.planner.plan(&mut self.state) {
            Plan::Step(Step { scheduler: self })
        } else {
            let queued = self.state.queue.len();
            assert_eq!(queued, 0, "an accepted request can run alone");
            Plan::Idle
        }
    }

    /// Asserts every invariant. This takes time in proportion to all pages and all tokens; it is
    /// for tests.
    ///
    /// # Panics
    /// If an invariant does not hold. That is a bug in this crate.
    pub fn check(&self) {
        self.state.check();
    }
}

impl Step<'_> {
    /// Returns what to compute.
    pub fn batch(&self) -> &Batch {
        &self.scheduler.state.batch
    }

    /// Returns all known tokens of a sequence of this step: its prompt, then its output.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn history(&self, id: SequenceId) -> &[TokenId] {
        self.sequence(id).tokens()
    }

    /// Returns the tokens after the history up to the end of the block that a sequence fills: mask
    /// tokens, and those that replaced some.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn ahead(&self, id: SequenceId) -> &[TokenId] {
        self.sequence(id).ahead()
    }

    /// Returns how many tokens of the history are the prompt.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn prompt_len(&self, id: SequenceId) -> usize {
        self.sequence(id).prompt_len
    }

    /// Returns the rules that decide which token ends a sequence.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn output_rules(&self, id: SequenceId) -> &OutputRules {
        &self.sequence(id).output_rules
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        let sequence = self.scheduler.state.sequences.get(id);
        sequence.expect("the sequence is alive")
    }

    /// Returns the step's size, as the cost model sees it.
    pub fn shape(&self) -> StepShape {
        self.scheduler.planner.shape()
    }

    /// Returns the size of the pass in which the model drafts before the step. It has no tokens if
    /// the model drafts nothing.
    pub fn drafting(&self) -> StepShape {
        self.scheduler.planner.drafting()
    }

    /// Sets what the model has drafted for the rows of the batch: see [`Batch::set_drafts`].
    /// Without this call, the rows have mask tokens as drafts, which are wrong.
    ///
    /// # Panics
    /// If `drafts` has another number of tokens than the rows want.
    pub fn set_drafts(&mut self, drafts: &[TokenId]) {
        self.scheduler.state.batch.set_drafts(drafts);
    }

    /// Returns the cost model that the plan used: what the steps so far teach.
    pub fn cost(&self) -> CostModel {
        self.scheduler.state.conditions.predictor.model()
    }

    /// Returns how often a waiting request has left the queue so far, for any reason.
    pub fn departures(&self) -> u64 {
        self.scheduler.departures()
    }

    /// Returns how long the step should take.
    pub fn predicted(&self) -> Micros {
        let predictor = &self.scheduler.state.conditions.predictor;
        let drafting = predictor.predict(self.drafting());
        (predictor.predict(self.shape()) + drafting).div_ceil(1000)
    }

    /// Returns how long the step would take if the machine were as fast as at its calibration.
    pub fn calibrated(&self) -> Micros {
        let predictor = &self.scheduler.state.conditions.predictor;
        let drafting = predictor.predict_calibrated(self.drafting());
        (predictor.predict_calibrated(self.shape()) + drafting).div_ceil(1000)
    }

    /// Makes the step's result count. `sampled` has one entry for each row of logits, in the order
    /// of the batch's rows and their tokens.
    ///
    /// # Panics
    /// If `sampled` has another length or void entries in the wrong places, or time runs backwards.
    pub fn commit(self, now: Micros, sampled: &[Sampled]) {
        let Scheduler { state, planner, .. } = self.scheduler;
        state.conditions.advance(now);
        planner.commit(state, sampled);
    }

    /// Commits a step that failed, after each of its rows was computed in a step of its own. The
    /// sequences in `failed` failed again: they end with [`FinishReason::Error`], and their entries
    /// of `sampled` do not count. The predictor learns nothing from how long this took.
    ///
    /// # Panics
    /// As [`commit`](Self::commit).
    pub fn commit_rerun(self, now: Micros, sampled: &[Sampled], failed: &[SequenceId]) {
        let Scheduler { state, planner, .. } = self.scheduler;
        state.conditions.advance(now);
        planner.commit_rerun(state, sampled, failed);
    }
}
