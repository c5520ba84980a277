//! What the next step computes: newcomers are let in, then come the decodes, then prefills share what time is left, then
//! drafts fill what costs little.
//!
//! Invariant: whatever is planned has its pages. Invariant: a step is predicted to take no longer than its budget, or than
//! its decodes and [`PREFILL_FLOOR`] prompt tokens.

use crate::draft::{self, MAX_DRAFTED_TOKENS};
use crate::sequence::pages_for;
use crate::{
    Band, Batch, Budget, Micros, Nanos, Order, PAGE_TOKENS, PageCopy, Sampled, Scheduler,
    SequenceId, StepShape, TokenId,
};

/// Prompt tokens that a step computes even when its decodes leave no time, so that prefills never starve.
pub(crate) const PREFILL_FLOOR: usize = 8;

/// Steps in a row that a decode may miss for want of time, or for a guest.
const MOST_PAUSES: u32 = 3;
const MOST_PAUSES_FOR_A_GUEST: u32 = 7;

/// Machine time of a prompt that others pause for, at most.
const LONGEST_GUEST: Nanos = 2_000_000_000;

/// Decodes in a step, beyond which none drafts: rows are hardly free then, and looking for drafts takes its time too.
const MOST_DRAFTING: usize = 16;

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
    pub(crate) tokens: usize,
    pub(crate) first_draft: usize, // In the plan's drafts.
    pub(crate) drafts: usize,
}

/// A running prefill's place in the order; the least is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PrefillRank {
    band: usize,    // By how far the band is behind its share.
    ahead: u64,     // Of the tenant served least, in units of the slack.
    remaining: i64, // Microseconds to compute, less those that it has waited since its last part.
    arrival: u64,
    slot: usize,
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

    /// What the step consists of, as far as its cost goes.
    pub fn shape(&self) -> StepShape {
        self.scheduler.shape
    }

    /// How long the step should take.
    pub fn predicted(&self) -> Micros {
        self.scheduler.predict(self.scheduler.shape).div_ceil(1000)
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

    /// Everybody's next token; the batch band's only while there is time, or after it has paused for long enough.
    fn plan_decodes(&mut self, may_pause: bool) {
        self.prefills.clear();
        let guests = self.guests();
        let mut due = Micros::MAX;
        let mut place = 0;
        while place < self.running.len() {
            let slot = self.running[place];
            place += 1; // Only sequences behind this place can be preempted below.
            let sequence = &self.sequences[slot];
            if sequence.is_prefill() {
                self.prefills.push(slot);
                continue;
            }
            if may_pause && self.must_pause(slot, due, &guests) {
                self.sequences[slot].rested += 1;
                continue;
            }
            if let Budget::Time {
                inter_token_target, ..
            } = self.policy.budget
            {
                due = due.min(sequence.last_token_at + inter_token_target);
            }
            if sequence.has_page_for_next() {
                self.add_share(slot, 1, StepShape::decode(sequence.tokens.len()));
            } else {
                self.plan_share(slot, 1);
            }
            self.sequences[slot].rested = 0;
        }
        self.budget = self.budget_until(due);
    }

    /// In each band, the virtual time of a tenant that has a short prompt under way and nothing waiting, while others have:
    /// of several, the one served least.
    fn guests(&self) -> [Option<u64>; 3] {
        let mut guests = [None; 3];
        if self.queue.len() == 0 || !matches!(self.policy.order, Order::FairShare { .. }) {
            return guests;
        }
        for &slot in &self.running {
            let sequence = &self.sequences[slot];
            let tenant = &self.queue.tenants[sequence.tenant];
            let asks_for_little = || {
                let len = sequence.tokens.len();
                let uncached = len - sequence.cached_tokens.unwrap_or(0).min(len);
                self.prefill_time(len, uncached) <= LONGEST_GUEST
            };
            if sequence.is_prefill() && tenant.waiting.is_empty() && asks_for_little() {
                let guest = &mut guests[tenant.policy.band as usize];
                *guest = Some(guest.map_or(tenant.virtual_time, |other: u64| {
                    other.min(tenant.virtual_time)
                }));
            }
        }
        guests
    }

    /// Whether a decode rests in this step. One of the batch band does while there is no time for it. One of a tenant that
    /// has more waiting than it is due does while a guest's short prompt is computed: its streams must not fill the machine
    /// for those who ask for little. Nobody pauses for long.
    fn must_pause(&self, slot: usize, due: Micros, guests: &[Option<u64>; 3]) -> bool {
        let sequence = &self.sequences[slot];
        let tenant = &self.queue.tenants[sequence.tenant];
        let guest = guests[tenant.policy.band as usize];
        let is_ahead = guest.is_some_and(|guest| tenant.virtual_time > guest);
        if is_ahead && !tenant.waiting.is_empty() && sequence.rested < MOST_PAUSES_FOR_A_GUEST {
            return true;
        }
        let with = self.shape.plus(StepShape::decode(sequence.tokens.len()));
        sequence.band == Band::Batch as usize
            && sequence.rested < MOST_PAUSES
            && !self.shares.is_empty()
            && self.predict(with) > self.budget_until(due)
    }

    /// Time for this step if a decode is due then.
    fn budget_until(&self, due: Micros) -> Nanos {
        let Budget::Time {
            inter_token_target,
            least,
            most,
        } = self.policy.budget
        else {
            return Nanos::MAX;
        };
        if due == Micros::MAX {
            return most * 1000;
        }
        // A machine too slow for the target has one that it can keep.
        let slower = self.inter_token_target(inter_token_target) - inter_token_target;
        let left = (due + slower).saturating_sub(self.now);
        left.clamp(least, most.max(least + slower)) * 1000
    }

    /// Shares the rest of the budget among the prompts.
    fn plan_prefills(&mut self) {
        let mut ranks = std::mem::take(&mut self.prefill_ranks);
        self.rank_prefills(&mut ranks);
        let mut is_fed = false;
        for rank in &ranks {
            // Whoever is earlier may have taken its pages.
            if self.sequences[rank.slot].state != crate::sequence::State::Running {
                continue;
            }
            let tokens = self.chunk(rank.slot, !is_fed);
            let planned = if tokens > 0 {
                self.plan_share(rank.slot, tokens)
            } else {
                0
            };
            is_fed |= planned > 0;
            let sequence = &mut self.sequences[rank.slot];
            let since = self.now - self.planned_at.max(sequence.last_token_at);
            let waited = &mut sequence.waited;
            *waited = match planned {
                0 => *waited + since,
                _ => 0,
            };
        }
        self.prefill_ranks = ranks;
    }

    /// The prefills that run. Shortest first among equals, less the time that they have waited, so that nobody rests for ever.
    fn rank_prefills(&self, ranks: &mut Vec<PrefillRank>) {
        ranks.clear();
        let bands = self.queue.bands();
        for &slot in &self.prefills {
            let sequence = &self.sequences[slot];
            let mut rank = PrefillRank {
                band: 0,
                ahead: 0,
                remaining: 0,
                arrival: sequence.arrival,
                slot,
            };
            if let Order::FairShare { slack } = self.policy.order {
                let tenant = &self.queue.tenants[sequence.tenant];
                let least = self.queue.least_virtual_time(tenant.policy.band);
                let time = self.prefill_time(sequence.tokens.len(), sequence.remaining()) / 1000;
                rank.band = bands
                    .iter()
                    .position(|&band| band == tenant.policy.band)
                    .unwrap_or(0);
                rank.ahead =
                    tenant.virtual_time.saturating_sub(least) / slack.saturating_mul(1000).max(1);
                rank.remaining = time as i64 - sequence.waited as i64;
            }
            ranks.push(rank);
        }
        ranks.sort_unstable();
    }

    /// Tokens of the next chunk of a sequence: as many as the budget allows, and a few in any case for the first prompt of a
    /// step.
    fn chunk(&self, slot: usize, is_first: bool) -> usize {
        let sequence = &self.sequences[slot];
        let (start, left) = (sequence.start(), sequence.remaining());
        let most = left
            .min(self.limits.prefill_chunk as usize)
            .min((self.limits.step_tokens as usize).saturating_sub(self.shape.rows as usize));
        let allowed = match self.policy.budget {
            Budget::Time { .. } => {
                let budget = self.correction.unapply(self.budget);
                let part = self.cost.largest_chunk(budget, self.shape, start, most, 0);
                if part < left {
                    part
                } else {
                    self.cost.largest_chunk(budget, self.shape, start, most, 1)
                }
            }
            Budget::Tokens(tokens) => {
                most.min((tokens as usize).saturating_sub(self.shape.rows as usize))
            }
            Budget::PrefillFirst => most,
        };
        let floor = if is_first { PREFILL_FLOOR.min(left) } else { 0 };
        allowed.max(floor)
    }

    /// Adds `tokens` of a running sequence to the plan, or as many as there are pages for. Returns how many.
    fn plan_share(&mut self, slot: usize, tokens: usize) -> usize {
        let tokens = self.secure_pages(slot, tokens);
        if tokens > 0 {
            self.add_share(slot, tokens, self.shape_of(slot, tokens));
        }
        tokens
    }

    fn add_share(&mut self, slot: usize, tokens: usize, shape: StepShape) {
        self.shape = self.shape.plus(shape);
        self.shares.push(Share {
            slot,
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

    /// Guesses tokens for decodes where computing them along costs less than they should gain: a guess that is right saves
    /// a part of a later step. Past the knee of the cost nothing is gained.
    fn plan_drafts(&mut self) {
        let decodes = self.shares.iter().filter(|share| share.tokens == 1).count();
        if self.policy.max_draft == 0 || !(1..=MOST_DRAFTING).contains(&decodes) {
            return;
        }
        let decodes_only = StepShape {
            rows: decodes as u64,
            decode_keys: self.shape.decode_keys,
            chunk_keys: 0,
            logits: decodes as u64,
        };
        let a_token = self.cost.predict(decodes_only) / decodes as u64;
        let one_more = self.shape.plus(StepShape::decode(1));
        if self.cost.predict(one_more) - self.cost.predict(self.shape) >= a_token {
            return; // Not even a guess that is sure to be right would be worth it.
        }
        for index in 0..self.shares.len() {
            let share = self.shares[index];
            let sequence = &self.sequences[share.slot];
            if share.tokens != 1 || sequence.is_prefill() {
                continue;
            }
            let room = sequence.table.pages.len() * PAGE_TOKENS - sequence.tokens.len();
            let rows = self.limits.max_batch_tokens() - self.shape.rows as usize;
            let most = (self.policy.max_draft as usize)
                .min(sequence.output_left() - 1)
                .min(room)
                .min(rows)
                .min(MAX_DRAFTED_TOKENS - self.drafts.len());
            let worthwhile = self.worthwhile_drafts(share.slot, most, a_token);
            if worthwhile == 0 {
                continue;
            }
            let first_draft = self.drafts.len();
            draft::propose(&sequence.tokens, worthwhile, &mut self.drafts);
            let drafts = self.drafts.len() - first_draft;
            self.shares[index] = Share {
                first_draft,
                drafts,
                ..share
            };
            for _ in 0..drafts {
                let one = StepShape::decode(self.sequences[share.slot].tokens.len());
                self.shape = self.shape.plus(one);
            }
        }
    }

    /// How many drafts of a sequence are each worth their cost, if a decoded token costs `a_token`.
    fn worthwhile_drafts(&self, slot: usize, most: usize, a_token: Nanos) -> usize {
        let sequence = &self.sequences[slot];
        let one = StepShape::decode(sequence.tokens.len());
        let gain = |drafts: usize| u64::from(sequence.acceptance.expected(drafts as u32)) * a_token;
        let mut shape = self.shape;
        for count in 0..most {
            let next = shape.plus(one);
            let cost = self.cost.predict(next) - self.cost.predict(shape);
            if self.predict(next) > self.budget || gain(count + 1) - gain(count) <= cost << 16 {
                return count;
            }
            shape = next;
        }
        most
    }

    fn build_batch(&mut self) {
        self.batch.clear();
        for share in &self.shares {
            let sequence = &self.sequences[share.slot];
            let start = sequence.start();
            if let Some(copy) = sequence.copy {
                self.batch.push_copy(PageCopy {
                    from: copy.from,
                    to: sequence.table.pages[sequence.computed / PAGE_TOKENS],
                });
            }
            let end = start + share.tokens;
            let is_last = end == sequence.tokens.len();
            self.batch.push_drafting_row(
                sequence.id,
                start,
                (
                    &sequence.tokens[start..end],
                    &self.drafts[share.first_draft..][..share.drafts],
                ),
                &sequence.table.pages[..pages_for(end + share.drafts)],
                usize::from(is_last) + share.drafts,
            );
        }
    }
}
