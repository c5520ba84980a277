//! Counts how often the random worlds met each difficult case.

/// What all worlds of one run did.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    pub(crate) submits: u64,
    pub(crate) plans: u64,
    pub(crate) steps: u64,
    pub(crate) dropped_steps: u64,
    pub(crate) failed_steps: u64,
    pub(crate) failed_rows: u64,
    pub(crate) deferred_draws: u64,
    pub(crate) scored_rows: u64, // Of prompts whose log-probabilities are wanted.
    pub(crate) cancels: u64,
    pub(crate) cancels_while_waiting: u64,
    pub(crate) refusals: u64,
    pub(crate) resets: u64,
    pub(crate) finished: u64,
    pub(crate) chunks: u64,
    pub(crate) prefix_hits: u64,
    pub(crate) block_hits: u64, // Prefix hits of requests whose keys are not causal.
    pub(crate) evictions: u64,
    pub(crate) preemptions: u64,
    pub(crate) redirects: u64,
    pub(crate) deferrals: u64,
    pub(crate) copies: u64,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) own_drafts: u64, // Of the model itself.
    pub(crate) block_passes: u64,
    pub(crate) unmasked: u64,
    pub(crate) part_passes: u64,     // Over a part of a block.
    pub(crate) restored_blocks: u64, // Computed again, because pages were lost.
    pub(crate) public_hits: u64,
    pub(crate) missed_deadlines: u64,
    pub(crate) policy_changes: u64,
    pub(crate) calibrations: u64,
    pub(crate) corrected: u64, // Steps whose prediction is far from the calibration.
    pub(crate) pauses: u64,    // Steps in which a decode paused.
    pub(crate) longest_pause: u64, // In steps.
    pub(crate) repeated_preemptions: u64, // Of a sequence that was preempted three times before.
    pub(crate) rate_limited: u64,
    pub(crate) tenant_queue_full: u64,
    pub(crate) overloaded: u64,
    pub(crate) displaced: u64,
    pub(crate) guaranteed: u64, // Steps with a decode of a tenant that stays in its guarantee.
    pub(crate) deadline_refusals: u64,
    pub(crate) refused_unseen: u64, // Requests that were refused whatever they ask for.
    pub(crate) states_in_place: u64, // Rows that change their slab in place.
    pub(crate) states_elsewhere: u64, // Rows that continue a state in another slab.
    pub(crate) kept_states: u64,
    pub(crate) reused_states: u64, // Requests that began with a snapshot.
    pub(crate) costly: u64,        // Steps with sampling beyond plain draws.
}

impl Coverage {
    /// Returns the number of calls that changed the scheduler. A full check follows each of them.
    pub(crate) fn operations(&self) -> u64 {
        let steps = self.plans + self.steps; // Each step is also committed, dropped or failed.
        self.submits + self.cancels + steps + self.resets + self.policy_changes + self.calibrations
    }

    /// Asserts that the run met every difficult case: it proves nothing about a case it never met.
    pub(crate) fn assert_enough(&self) {
        let frequent = [
            ("dropped steps", self.dropped_steps),
            ("deferred draws", self.deferred_draws),
            ("rows with scores", self.scored_rows),
            ("cancels", self.cancels),
            ("chunks", self.chunks),
            ("prefix hits", self.prefix_hits),
            ("evictions", self.evictions),
            ("preemptions", self.preemptions),
            ("redirects to an equal page", self.redirects),
            ("deferrals behind a prefill", self.deferrals),
            ("copies of pages", self.copies),
            ("accepted drafts", self.accepted),
            ("rejected drafts", self.drafted - self.accepted),
            ("drafts of the model itself", self.own_drafts),
            ("passes over blocks", self.block_passes),
            (
                "further tokens of passes",
                self.unmasked - self.block_passes,
            ),
            ("passes over parts", self.part_passes),
            ("steps whose prediction was corrected", self.corrected),
            ("steps in which a decode paused", self.pauses),
            ("steps with costly sampling", self.costly),
            ("rows with a state in place", self.states_in_place),
            (
                "rows that continue a state elsewhere",
                self.states_elsewhere,
            ),
            ("kept states", self.kept_states),
            ("requests that began with a snapshot", self.reused_states),
        ];
        for (name, count) in frequent {
            assert!(count >= self.steps / 300, "only {count} {name}");
        }
        let occasional = [
            ("failed steps", self.failed_steps),
            ("failed rows", self.failed_rows),
            ("cancels while waiting", self.cancels_while_waiting),
            ("refusals", self.refusals),
            ("resets", self.resets),
            ("reads of a public page of another tenant", self.public_hits),
            ("requests that missed a deadline", self.missed_deadlines),
            ("changes of the tenants' policies", self.policy_changes),
            ("refusals for a rate", self.rate_limited),
            ("refusals for a tenant's queue", self.tenant_queue_full),
            ("refusals for the whole queue", self.overloaded),
            ("refusals for a deadline", self.deadline_refusals),
            (
                "requests refused whatever they ask for",
                self.refused_unseen,
            ),
            ("displaced requests", self.displaced),
            ("prefix hits of whole blocks", self.block_hits),
        ];
        for (name, count) in occasional {
            assert!(count >= self.steps / 1000, "only {count} {name}");
        }
        let rare = [
            ("changes of the cost model", self.calibrations),
            ("steps with a guaranteed decode", self.guaranteed),
            ("fourth preemptions", self.repeated_preemptions),
            ("blocks computed again", self.restored_blocks),
        ];
        for (name, count) in rare {
            assert!(count >= self.steps / 20_000, "only {count} {name}");
        }
        let longest = self.longest_pause;
        let is_enough = longest == 7 || self.steps < 100_000;
        assert!(is_enough, "the longest pause was {longest} steps, not 7");
    }
}
