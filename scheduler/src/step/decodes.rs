//! The decodes of a step, how long it may take for their sake, and which of them rest.
//!
//! Invariant: every decode that has its page is in every step, but for those that rest; nobody rests more than
//! [`MOST_PAUSES_FOR_A_GUEST`] steps in a row.

use crate::{Band, Budget, Micros, Nanos, Order, Scheduler, StepShape};

/// Steps in a row that a decode may miss for want of time, or for a guest.
const MOST_PAUSES: u32 = 3;
const MOST_PAUSES_FOR_A_GUEST: u32 = 7;

/// Machine time of a prompt that others pause for, at most.
const LONGEST_GUEST: Nanos = 2_000_000_000;

impl Scheduler {
    /// Everybody's next token; the batch band's only while there is time, or after it has paused for long enough.
    pub(crate) fn plan_decodes(&mut self, may_pause: bool) {
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
            if may_pause && (self.rests_for(&guests, slot) || self.rests_for_time(slot, due)) {
                self.sequences[slot].rested += 1;
                continue;
            }
            let last_token_at = sequence.last_token_at;
            let is_planned = if sequence.has_page_for_next() {
                self.add_share(slot, 1, StepShape::decode(sequence.tokens.len()));
                true
            } else {
                self.plan_share(slot, 1) > 0
            };
            if let Budget::Time {
                inter_token_target, ..
            } = self.policy.budget
                && is_planned
            {
                due = due.min(last_token_at + inter_token_target);
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

    /// Whether a decode rests in this step while a guest's short prompt is computed. One of a tenant that has more waiting
    /// than it is due does, but not for long: its streams must not fill the machine for those who ask for little.
    fn rests_for(&self, guests: &[Option<u64>; 3], slot: usize) -> bool {
        if *guests == [None; 3] {
            return false;
        }
        let sequence = &self.sequences[slot];
        let tenant = &self.queue.tenants[sequence.tenant];
        let guest = guests[tenant.policy.band as usize];
        let is_ahead = guest.is_some_and(|guest| tenant.virtual_time > guest);
        is_ahead && !tenant.waiting.is_empty() && sequence.rested < MOST_PAUSES_FOR_A_GUEST
    }

    /// Whether a decode rests in this step because there is no time for it. One of the batch band does, but not for long.
    fn rests_for_time(&self, slot: usize, due: Micros) -> bool {
        let sequence = &self.sequences[slot];
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
            min_step,
            max_step,
        } = self.policy.budget
        else {
            return Nanos::MAX;
        };
        // A machine too slow for the target has one that it can keep.
        let slower = self.inter_token_target(inter_token_target) - inter_token_target;
        let left = due.saturating_add(slower).saturating_sub(self.now);
        left.clamp(min_step, max_step.max(min_step + slower)) * 1000
    }
}
