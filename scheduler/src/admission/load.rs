//! What the running sequences take of each step's time and of the memory.

use crate::limits::prefill_floor;
use crate::sequence::{Sequence, pages_for};
use crate::state::SchedulerState;
use crate::{Band, Budget, Growth, StepShape};

/// Prompts that are computed at the same time. A tenant that runs less than its share may have up
/// to twice as many running.
const PREFILL_PLACES: usize = 8;

/// The load of the running sequences.
#[derive(Default)]
pub(super) struct RunningLoad {
    decodes: StepShape, // Of all sequences outside of the batch band, once they decode.
    batch_decodes: StepShape, // Of the sequences of the batch band, once they decode.
    promised_pages: usize, // Pages that the sequences will probably still take.
    prefills: usize,
}

impl RunningLoad {
    pub(super) fn of(state: &SchedulerState) -> RunningLoad {
        let mut load = RunningLoad::default();
        for sequence in state.sequences.iter_running() {
            load.add(sequence, state);
        }
        load
    }

    /// Adds a running sequence.
    pub(super) fn add(&mut self, sequence: &Sequence, state: &SchedulerState) {
        if sequence.band == Band::Batch {
            self.batch_decodes.add(sequence.decode_shape());
        } else {
            self.decodes.add(sequence.decode_shape());
        }
        self.promised_pages += promised_pages(sequence, state);
        self.prefills += usize::from(sequence.is_prefill());
    }

    /// Returns whether every decode still meets its inter-token target, and every prefill gets its
    /// turn, with the sequence in `slot`.
    ///
    /// A target that is not strict gives way if it would leave too few decodes for the throughput:
    /// on a slow machine, the least chunk of a prompt alone takes most of the target.
    ///
    /// For a tenant that runs less than its share the target is a quarter wider. So the tenant need
    /// not wait until sequences of other tenants end.
    pub(super) fn has_time_for(&self, slot: usize, state: &SchedulerState) -> bool {
        let running = state.sequences.running().len();
        if running == 0 {
            return true;
        }
        let sequence = &state.sequences[slot];
        let queue = &state.queue;
        let is_light = queue.runs_less_than_its_share(sequence.tenant, running);
        let places = PREFILL_PLACES * if is_light { 2 } else { 1 };
        if self.prefills >= places {
            return false;
        }
        let predictor = &state.conditions.predictor;
        let Budget::Time {
            inter_token_target,
            is_strict,
            ..
        } = state.conditions.policy.budget
        else {
            return true;
        };
        let target = predictor.target(inter_token_target, is_strict);
        let extra = if is_light { target / 4 } else { 0 };
        // Decodes of the batch band pause for other decodes, and take no time from them.
        let policy = &queue.tenant(sequence.tenant).policy;
        let is_batch = sequence.band_within(policy) == Band::Batch;
        let mut step = self.decodes.plus(sequence.decode_shape());
        if is_batch {
            step = step.plus(self.batch_decodes);
        }
        let floor = prefill_floor(step.rows as usize);
        let with_chunk = step.plus(StepShape::chunk(0, floor, 0));
        predictor.predict(with_chunk) <= (target + extra) * 1000
            || !is_strict && predictor.predict(step) <= predictor.throughput_step()
    }

    /// Returns whether `needed` pages are available beside the promised pages and the pages that
    /// other tenants are guaranteed. A sequence that runs alone may use all pages. A sequence
    /// within its tenant's guarantee gets its pages from the sequences of other tenants.
    pub(super) fn has_memory_for(
        &self,
        slot: usize,
        needed: usize,
        state: &SchedulerState,
    ) -> bool {
        if state.sequences.running().is_empty() {
            return needed <= state.pool.available_to_all();
        }
        let tenant = state.sequences[slot].tenant;
        if is_guaranteed(slot, needed, state) {
            return true;
        }
        let guaranteed = state.pool.unmet_guarantees(tenant);
        needed + self.promised_pages + guaranteed <= state.pool.available_to_all()
    }
}

/// Returns whether `needed` pages for the sequence in `slot` are within its tenant's guarantee,
/// beside what the running sequences of the tenant will probably still take.
pub(super) fn is_guaranteed(slot: usize, needed: usize, state: &SchedulerState) -> bool {
    let tenant = state.sequences[slot].tenant;
    let left = state.pool.guaranteed_left(tenant);
    if needed > left {
        return false;
    }
    let running = state.sequences.iter_running();
    let own = running.filter(|sequence| sequence.tenant == tenant);
    let promised: usize = own.map(|sequence| promised_pages(sequence, state)).sum();
    needed + promised <= left
}

/// Returns how many pages a running sequence will probably still take: for its known tokens and for
/// the rest of its answer.
///
/// An answer that is longer than usual is expected to grow by half of its length. This is about
/// right for lengths that vary widely.
fn promised_pages(sequence: &Sequence, state: &SchedulerState) -> usize {
    let (output, left) = (sequence.output_len(), sequence.output_left());
    let more = match state.conditions.policy.growth {
        Growth::Minimal => 1,
        Growth::Maximal => left,
        Growth::Expected => {
            let tenant = state.queue.tenant(sequence.tenant);
            let usual = tenant.expected_output(sequence.output_rules.max_new_tokens);
            usual.saturating_sub(output).max(output / 2).clamp(1, left)
        }
    };
    pages_for(sequence.len() + more).saturating_sub(sequence.table().len)
}
