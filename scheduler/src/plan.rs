//! What the next step computes, and what its result changes.
//!
//! Decodes come first, then prefills that run already, then admissions, each in the order of arrival.
//!
//! Invariant: whatever is planned has its pages. Invariant: the leader, which is the earliest running sequence, is in
//! every step. Invariant: pages are published by commit alone, when they are full and computed.

use crate::prefix::Edge;
use crate::sequence::{Sequence, State, pages_for};
use crate::{
    Batch, Event, FinishReason, Micros, PAGE_TOKENS, Sampled, Scheduler, SequenceId, StepShape,
    TokenId,
};

/// Waiting requests that one plan looks at. Those behind a request that does not fit are not among them.
const LOOK_AHEAD: usize = 16;

/// Running prefills that a waiting request is compared with.
const COMPARED_PREFILLS: usize = 8;

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
    scheduler: &'a mut Scheduler,
}

/// One sequence's part of the step being planned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    slot: usize,
    tokens: usize,
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

    /// How long the step should take.
    pub fn predicted(&self) -> Micros {
        self.scheduler.cost.predict_micros(StepShape::default())
    }

    /// Makes the step's result count: `sampled` has one entry for each token whose logits are wanted, in the order of the
    /// rows and of their tokens.
    ///
    /// # Panics
    /// If `sampled` has another length, or time runs backwards.
    pub fn commit(self, now: Micros, sampled: &[Sampled]) {
        let scheduler = self.scheduler;
        scheduler.tell(now);
        assert_eq!(sampled.len(), scheduler.batch.logits_count());
        let mut sampled = sampled.iter().copied();
        for index in 0..scheduler.batch.rows().len() {
            let row = scheduler.batch.rows()[index];
            let outcome = if row.logits > 0 { sampled.next() } else { None };
            scheduler.commit_row(row.sequence, row.len(), outcome);
        }
    }

    /// Throws the step's result away and ends these sequences with [`FinishReason::Error`]. The others are as they were.
    pub fn fail(self, ids: &[SequenceId]) {
        for &id in ids {
            self.scheduler.cancel(id, FinishReason::Error);
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
        self.shares.clear();
        let preemptions = self.preemptions;
        self.plan_decodes();
        let budget = self.plan_prefills(self.prefill_budget());
        if self.preemptions == preemptions {
            self.admit(budget);
        }
        let Some(&leader) = self.running.first() else {
            assert!(self.queue.is_empty(), "what is accepted can run alone");
            return Plan::Idle;
        };
        assert!(
            self.shares.iter().any(|share| share.slot == leader),
            "the leader is in every step"
        );
        self.build_batch();
        Plan::Step(Step { scheduler: self })
    }

    fn plan_decodes(&mut self) {
        let mut place = 0;
        while place < self.running.len() {
            let slot = self.running[place];
            if !self.sequences[slot].is_prefill() {
                self.plan_share(slot, 1);
            }
            place += 1; // Only sequences behind this place can have been preempted.
        }
    }

    /// Tokens for prefills and admissions after the decodes. They always get a page, so decodes cannot starve them.
    ///
    /// A budget in time rather than in tokens would be computed here.
    fn prefill_budget(&self) -> usize {
        let decodes = self.shares.len();
        (self.limits.step_tokens as usize)
            .saturating_sub(decodes)
            .max(PAGE_TOKENS)
    }

    /// Advances what runs already, and returns what is left of the budget.
    fn plan_prefills(&mut self, mut budget: usize) -> usize {
        let mut place = 0;
        while place < self.running.len() {
            let slot = self.running[place];
            let sequence = &self.sequences[slot];
            if sequence.is_prefill() {
                let tokens = self.chunk(sequence.computed, sequence.tokens.len(), budget);
                budget -= self.plan_share(slot, tokens);
            }
            place += 1;
        }
        budget
    }

    /// Tokens of the next chunk of a sequence of `len` known tokens: whole pages, except at the end.
    fn chunk(&self, computed: usize, len: usize, budget: usize) -> usize {
        let most = budget.min(self.limits.prefill_chunk as usize);
        let end = len.min(computed + most);
        let end = if end == len {
            end
        } else {
            end / PAGE_TOKENS * PAGE_TOKENS
        };
        end.saturating_sub(computed)
    }

    /// Adds `tokens` of a running sequence to the plan, or as many as there are pages for. Returns how many.
    fn plan_share(&mut self, slot: usize, tokens: usize) -> usize {
        let tokens = self.secure_pages(slot, tokens);
        if tokens > 0 {
            self.shares.push(Share { slot, tokens });
        }
        tokens
    }

    /// Takes the pages for the next `tokens` tokens of a running sequence, and returns for how many there are pages now.
    /// While there are none at all, later arrivals lose theirs; whoever comes last waits.
    fn secure_pages(&mut self, slot: usize, tokens: usize) -> usize {
        let computed = self.sequences[slot].computed;
        let needed = pages_for(computed + tokens);
        if self.sequences[slot].table.pages.len() < needed {
            self.preempt_for(slot);
        }
        let sequence = &mut self.sequences[slot];
        while sequence.table.pages.len() < needed {
            let Some(page) = self.pool.take(sequence.id) else {
                break;
            };
            sequence.table.pages.push(page);
        }
        tokens.min(sequence.table.pages.len() * PAGE_TOKENS - computed)
    }

    /// Preempts sequences that arrived after the one in `slot` until a page is available, or nobody can give one.
    fn preempt_for(&mut self, slot: usize) {
        while self.pool.available() == 0 {
            let Some(victim) = self.victim_of(slot) else {
                return;
            };
            self.preempt(victim);
        }
    }

    /// The latest arrival that can give the sequence in `slot` a page. To the leader, the latest of all: pages that several
    /// others share come free with the last of them.
    fn victim_of(&self, slot: usize) -> Option<usize> {
        let place = self.place(slot);
        let mut later = self.running[place + 1..].iter().rev().copied();
        let last = later.clone().next().filter(|_| place == 0);
        later.find(|&other| self.gives_pages(other)).or(last)
    }

    /// Whether preempting the sequence in `slot` frees a page: one that no other page table contains.
    fn gives_pages(&self, slot: usize) -> bool {
        let pages = &self.sequences[slot].table.pages;
        pages.iter().any(|page| self.pool.pins[page.index()] == 1)
    }

    fn preempt(&mut self, slot: usize) {
        self.stop_running(slot);
        self.shares.retain(|share| share.slot != slot);
        let sequence = &self.sequences[slot];
        self.queue.insert(sequence.arrival, slot);
        self.preemptions += 1;
        self.events.push(Event::Preempted { id: sequence.id });
    }

    /// Admits waiting requests in their order while tokens, pages and places last.
    fn admit(&mut self, mut budget: usize) {
        let mut promised = self.promised_pages();
        let mut place = 0;
        while place < LOOK_AHEAD && self.running.len() < self.limits.max_running as usize {
            let Some(slot) = self.queue.get(place) else {
                return;
            };
            self.find_prefix(slot);
            if self.would_gain_by_waiting(slot) {
                self.deferrals += 1;
                place += 1;
                continue;
            }
            let known = self.sequences[slot].tokens.len();
            let tokens = self.chunk(self.matched.len() * PAGE_TOKENS, known, budget);
            if tokens == 0 || !self.fits(slot, promised) {
                return;
            }
            self.start(slot);
            let secured = self.plan_share(slot, tokens);
            assert_eq!(secured, tokens, "the pages were counted before");
            budget -= tokens;
            promised += 1 + self.sequences[slot].missing_pages();
        }
    }

    /// Pages that running sequences will soon need: for the prompts they have begun, and one each to go on.
    fn promised_pages(&self) -> usize {
        let missing = |&slot: &usize| 1 + self.sequences[slot].missing_pages();
        self.running.iter().map(missing).sum()
    }

    fn find_prefix(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let found = self.pool.find(sequence.tenant, sequence.reusable_tokens());
        self.matched.clear();
        self.matched.extend(found);
    }

    /// Whether a running prefill is about to compute more of this request's prefix than is cached now.
    fn would_gain_by_waiting(&self, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        let is_ahead = |other: &Sequence| {
            let shared = common_prefix(sequence.reusable_tokens(), &other.tokens);
            shared / PAGE_TOKENS > self.matched.len()
        };
        let running = self.running.iter().map(|&other| &self.sequences[other]);
        running
            .filter(|other| other.is_prefill() && other.tenant == sequence.tenant)
            .take(COMPARED_PREFILLS)
            .any(is_ahead)
    }

    /// Whether all known tokens of a waiting request find room beside the promised pages. Its own matched pages cannot
    /// also be evicted for it.
    fn fits(&self, slot: usize, promised: usize) -> bool {
        let unpinned = |page: &&crate::Page| !self.pool.is_pinned(**page);
        let revived = self.matched.iter().filter(unpinned).count();
        let missing = pages_for(self.sequences[slot].tokens.len()) - self.matched.len();
        missing + revived + promised <= self.pool.available()
    }

    /// Makes a waiting request a running one, with the matched pages.
    fn start(&mut self, slot: usize) {
        let place = self.place(slot);
        let sequence = &mut self.sequences[slot];
        self.queue.remove(sequence.arrival);
        self.running.insert(place, slot);
        sequence.reserve();
        sequence.state = State::Running;
        for &page in &self.matched {
            self.pool.pin(page);
            sequence.table.pages.push(page);
        }
        sequence.table.in_tree = self.matched.len();
        sequence.computed = self.matched.len() * PAGE_TOKENS;
        if sequence.cached_tokens.is_none() {
            sequence.cached_tokens = Some(sequence.computed);
            self.latest_wait = self.now - sequence.arrived;
            self.prefix_queries += sequence.prompt_len as u64;
            self.prefix_hits += sequence.computed as u64;
            self.events.push(Event::Admitted {
                id: sequence.id,
                cached_tokens: sequence.computed as u32,
            });
        }
    }

    fn build_batch(&mut self) {
        self.batch.clear();
        for share in &self.shares {
            let sequence = &self.sequences[share.slot];
            let end = sequence.computed + share.tokens;
            self.batch.push_row(
                sequence.id,
                sequence.computed,
                &sequence.tokens[sequence.computed..end],
                &sequence.table.pages[..pages_for(end)],
                usize::from(end == sequence.tokens.len()),
            );
        }
    }

    /// `computed` more tokens of a sequence are in its pages, unless its row failed.
    fn commit_row(&mut self, id: SequenceId, computed: usize, sampled: Option<Sampled>) {
        if sampled == Some(Sampled::Failed) {
            return self.finish(id, FinishReason::Error);
        }
        self.sequences[id.slot()].computed += computed;
        self.publish(id.slot());
        if let Some(Sampled::Token(token)) = sampled
            && let Some(reason) = self.sequences[id.slot()].push(token)
        {
            self.finish(id, reason);
        }
    }

    /// Puts the full, computed pages of a sequence into the tree, each under the page that now stands for its parent.
    fn publish(&mut self, slot: usize) {
        let sequence = &mut self.sequences[slot];
        let (whole_pages, _) = sequence.tokens[..sequence.computed].as_chunks::<PAGE_TOKENS>();
        let table = &mut sequence.table;
        for (index, &tokens) in whole_pages.iter().enumerate().skip(table.in_tree) {
            let edge = Edge {
                tenant: sequence.tenant,
                parent: index.checked_sub(1).map(|parent| table.pages[parent]),
                tokens,
            };
            let own = table.pages[index];
            table.pages[index] = self.pool.publish(sequence.id, own, edge);
            self.redirects += u64::from(table.pages[index] != own);
        }
        table.in_tree = whole_pages.len();
    }
}

/// How many tokens two sequences have in common at the start.
fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
