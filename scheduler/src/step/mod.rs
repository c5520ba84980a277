//! Plans a step: decodes first, then prefills share the time that is left, then drafts fill rows
//! that cost little.
//!
//! Invariant: whatever is planned has its pages.

mod commit;
mod decodes;
mod draft;
mod plan;
mod preempt;
mod prefills;
mod short_prompts;
mod speculate;

use commit::{charge_step, commit_rows};
use decodes::plan_decodes;
use plan::StepPlan;
use preempt::plan_leader;
use prefills::{PrefillRank, plan_prefills};
use short_prompts::ShortPrompts;
use speculate::{plan_drafts, plan_own_drafts, tells_speed};

use crate::state::SchedulerState;
use crate::{Budget, MAX_DRAFTED_TOKENS, Micros, Sampled, SequenceId, StepShape};

/// The last plan, and the memory for the next.
pub(crate) struct Planner {
    plan: StepPlan,
    prefills: Vec<PrefillRank>,
    planned_at: Micros,
    is_short_of_pages: bool, // The last plan preempted a sequence.
}

impl Planner {
    pub(crate) fn new(max_running: usize) -> Planner {
        Planner {
            plan: StepPlan::with_capacity(max_running, MAX_DRAFTED_TOKENS),
            prefills: Vec::with_capacity(max_running),
            planned_at: 0,
            is_short_of_pages: false,
        }
    }

    /// Returns whether the last plan preempted a sequence for lack of pages.
    pub(crate) fn is_short_of_pages(&self) -> bool {
        self.is_short_of_pages
    }

    /// Returns the shape of the planned step.
    pub(crate) fn shape(&self) -> StepShape {
        self.plan.shape
    }

    /// Returns the shape of the pass that drafts before the planned step.
    pub(crate) fn drafting(&self) -> StepShape {
        self.plan.drafting
    }

    /// Plans a step of the running sequences and fills the batch. Returns `false` if none runs.
    pub(crate) fn plan(&mut self, state: &mut SchedulerState) -> bool {
        let preemptions = state.log.counts().preemptions;
        let (plan, prefills) = (&mut self.plan, &mut self.prefills);
        plan.clear();
        state.drop_planned_states();
        let short_prompts = ShortPrompts::of(state);
        if state.conditions.policy.budget == Budget::PrefillFirst {
            prefills.clear();
            let running = state.sequences.iter_running();
            let prompts = running.filter(|sequence| sequence.is_prefill());
            prefills.extend(prompts.map(PrefillRank::by_arrival));
        } else {
            plan_decodes(plan, prefills, state, &short_prompts, true);
        }
        plan_prefills(plan, prefills, state, &short_prompts, self.planned_at);
        if plan.rows.is_empty() {
            // Either the policy plans prompts only and none is left, or the prompts got no pages
            // while the decodes paused for them.
            plan_decodes(plan, prefills, state, &short_prompts, false);
        }
        if plan.rows.is_empty() {
            plan_leader(plan, state);
        }
        self.is_short_of_pages = state.log.counts().preemptions > preemptions;
        if state.sequences.running().is_empty() {
            return false;
        }
        assert!(!plan.rows.is_empty(), "a running sequence advances");
        plan_drafts(plan, &state.sequences, &state.conditions);
        plan_own_drafts(plan, state);
        plan.fill(&mut state.batch, &state.sequences);
        self.planned_at = state.conditions.now;
        true
    }

    /// Commits the planned step. The predictor learns from how long it took.
    pub(crate) fn commit(&self, state: &mut SchedulerState, sampled: &[Sampled]) {
        assert_eq!(sampled.len(), state.batch.logits_count());
        charge_step(&self.plan, state);
        let elapsed = state.conditions.now - self.planned_at;
        let predictor = &mut state.conditions.predictor;
        predictor.observe(self.plan.shape, self.plan.drafting, elapsed * 1000);
        let tells_speed = tells_speed(&self.plan, state);
        let accepted = state.log.counts().accepted;
        commit_rows(state, sampled, &[]);
        if tells_speed {
            let decodes = self.plan.rows.len();
            let tokens = decodes + (state.log.counts().accepted - accepted) as usize;
            let drafted = self.plan.drafting.rows > 0;
            let speeds = &mut state.conditions.decode_speeds;
            speeds.observe(decodes, drafted, tokens, elapsed * 1000);
        }
    }

    /// Commits the planned step after its rows were computed one by one, except the rows of
    /// `failed`.
    pub(crate) fn commit_rerun(
        &self,
        state: &mut SchedulerState,
        sampled: &[Sampled],
        failed: &[SequenceId],
    ) {
        assert_eq!(sampled.len(), state.batch.logits_count());
        charge_step(&self.plan, state);
        commit_rows(state, sampled, failed);
    }
}
