//! The prompts of a step: in which order, and how much of each.
//!
//! Invariant: prompts take what the decodes leave of the budget; in any case the first gets [`PREFILL_FLOOR`] tokens.

use crate::{Budget, Order, Scheduler};

/// Prompt tokens that a step computes even when its decodes leave no time, so that prefills never starve.
pub(crate) const PREFILL_FLOOR: usize = 8;

/// A running prefill's place in the order; the least is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PrefillRank {
    band: usize,    // By how far the band is behind its share.
    ahead: u64,     // Of the tenant served least, in units of the slack.
    remaining: i64, // Microseconds to compute, less those that it has waited since its last part.
    arrival: u64,
    slot: usize,
}

impl Scheduler {
    /// Shares the rest of the budget among the prompts.
    pub(crate) fn plan_prefills(&mut self) {
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
                rank.ahead = tenant.machine_time_since(least) / slack.saturating_mul(1000).max(1);
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
}
