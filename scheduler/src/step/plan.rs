//! What the next step computes: newcomers are let in, then come the decodes, then prefills share what time is left, then
//! drafts fill what costs little.
//!
//! Invariant: whatever is planned has its pages.

use crate::sequence::pages_for;
use crate::{
    Batch, Budget, Micros, Nanos, OutputRules, PAGE_TOKENS, PageCopy, Sampled, Scheduler,
    SequenceId, StepShape, TenantId, TokenId,
};

/// What to do next.
pub enum Plan<'a> {
    /// Nothing runs or waits.
    Idle,
    /// Compute this.
    Step(Step<'a>),
}

/// A planned step. Committing it is the only way to make it count; dropping it leaves every sequence where it was.
#[must_use = "a step that is not committed has no effect"]
pub struct Step<'a> {
    pub(crate) scheduler: &'a mut Scheduler,
}

/// One sequence's part of the step being planned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) slot: usize,
    pub(crate) tenant: TenantId,
    pub(crate) tokens: usize,
    pub(crate) first_draft: usize, // In the plan's drafts.
    pub(crate) drafts: usize,
}

impl Step<'_> {
    /// What to compute.
    pub fn batch(&self) -> &Batch {
        &self.scheduler.batch
    }

    /// All known tokens of a sequence of this step: its prompt, then its output.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn history(&self, id: SequenceId) -> &[TokenId] {
        &self.scheduler.sequence(id).tokens
    }

    /// How many tokens of the history are the prompt.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn prompt_len(&self, id: SequenceId) -> usize {
        self.scheduler.sequence(id).prompt_len
    }

    /// Returns the rules that decide which token ends a sequence.
    ///
    /// # Panics
    /// If the sequence is not alive.
    pub fn output_rules(&self, id: SequenceId) -> &OutputRules {
        &self.scheduler.sequence(id).output_rules
    }

    /// What the step consists of, as far as its cost goes.
    pub fn shape(&self) -> StepShape {
        self.scheduler.shape
    }

    /// How long the step should take.
    pub fn predicted(&self) -> Micros {
        self.scheduler.predict(self.scheduler.shape).div_ceil(1000)
    }

    /// How long the step would take as the machine was when it was calibrated.
    pub fn calibrated(&self) -> Micros {
        let scheduler = &self.scheduler;
        scheduler.cost.predict(scheduler.shape).div_ceil(1000)
    }

    /// Makes the step's result count: `sampled` has one entry for each token whose logits are wanted, in the order of the
    /// rows and of their tokens.
    ///
    /// # Panics
    /// If `sampled` has another length or void entries in the wrong places, or time runs backwards.
    pub fn commit(self, now: Micros, sampled: &[Sampled]) {
        self.scheduler.commit(now, sampled);
    }

    /// Throws the step's result away and ends these sequences with
    /// [`FinishReason::Error`](crate::FinishReason::Error). The others are as they were.
    pub fn fail(self, ids: &[SequenceId]) {
        for &id in ids {
            self.scheduler.cancel(id, crate::FinishReason::Error);
        }
    }
}

impl Scheduler {
    /// Decides the next step. Requests may be admitted and preempted by it, and cached pages evicted.
    ///
    /// # Panics
    /// If time runs backwards.
    pub fn plan(&mut self, now: Micros) -> Plan<'_> {
        self.tell(now);
        self.expire();
        self.queue.forget_planned();
        self.shares.clear();
        self.prefills.clear();
        self.drafts.clear();
        self.shape = StepShape::default();
        self.budget = Nanos::MAX;
        if !self.is_short_of_pages || self.running.is_empty() {
            self.admit(); // First: a newcomer may be shorter than the prompts that run, or due before their decodes.
        }
        let preemptions = self.preemptions;
        let prompts_first = self.policy.budget == Budget::PrefillFirst;
        if prompts_first {
            let running = self.running.iter().copied();
            let prefills = running.filter(|&slot| self.sequences[slot].is_prefill());
            self.prefills.extend(prefills);
        } else {
            self.plan_decodes(true);
        }
        self.plan_prefills();
        if self.shares.is_empty() {
            // Prompts went first and there were none, or they found no memory and the decodes had paused for them.
            self.plan_decodes(false);
        }
        self.is_short_of_pages = self.preemptions > preemptions;
        if self.running.is_empty() {
            assert_eq!(self.queue.len(), 0, "what is accepted can run alone");
            return Plan::Idle;
        }
        assert!(!self.shares.is_empty(), "somebody goes on");
        self.plan_drafts();
        self.build_batch();
        self.planned_at = now;
        Plan::Step(Step { scheduler: self })
    }

    /// How long a step takes, as corrected by the steps so far.
    pub(crate) fn predict(&self, shape: StepShape) -> Nanos {
        self.correction.apply(self.cost.predict(shape))
    }

    /// Adds `tokens` of a running sequence to the plan, or as many as there are pages for. Returns how many.
    pub(crate) fn plan_share(&mut self, slot: usize, tokens: usize) -> usize {
        let tokens = self.secure_pages(slot, tokens);
        if tokens > 0 {
            self.add_share(slot, tokens, self.shape_of(slot, tokens));
        }
        tokens
    }

    pub(crate) fn add_share(&mut self, slot: usize, tokens: usize, shape: StepShape) {
        self.shape = self.shape.plus(shape);
        self.shares.push(Share {
            slot,
            tenant: self.sequences[slot].tenant,
            tokens,
            first_draft: 0,
            drafts: 0,
        });
    }

    /// What the next `tokens` tokens of a sequence add to a step.
    fn shape_of(&self, slot: usize, tokens: usize) -> StepShape {
        let sequence = &self.sequences[slot];
        let (start, len) = (sequence.start(), sequence.tokens.len());
        if sequence.is_prefill() {
            StepShape::chunk(start, tokens, usize::from(start + tokens == len))
        } else {
            StepShape::decode(len)
        }
    }

    /// Takes a sequence out of the plan.
    pub(crate) fn drop_share(&mut self, slot: usize) {
        let Some(index) = self.shares.iter().position(|share| share.slot == slot) else {
            return;
        };
        let share = self.shares.remove(index);
        self.shape = self.shape.minus(self.shape_of(slot, share.tokens));
    }

    fn build_batch(&mut self) {
        self.batch.clear_rows();
        for share in &self.shares {
            let sequence = &self.sequences[share.slot];
            let start = sequence.start();
            if let Some(copy) = sequence.copy {
                self.batch.push_copy(PageCopy {
                    from: copy.from,
                    to: self.batch.tables.get(&sequence.table)[sequence.computed / PAGE_TOKENS],
                });
            }
            let end = start + share.tokens;
            let pages = pages_for(end + share.drafts);
            assert!(pages <= sequence.table.len, "the plan secured its pages");
            let is_last = end == sequence.tokens.len();
            self.batch.push_row_of(
                sequence.id,
                start,
                (
                    &sequence.tokens[start..end],
                    &self.drafts[share.first_draft..][..share.drafts],
                ),
                (sequence.table.first, pages),
                usize::from(is_last) + share.drafts,
            );
        }
    }
}
