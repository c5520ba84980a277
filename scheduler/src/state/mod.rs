//! The requests that are alive, where they wait or run, and the memory that they hold.
//!
//! A request moves through `submit`, `start`, `preempt` and `finish`, or leaves the queue through
//! `displace`. Each of these methods changes all owners together: the sequence, the queue, the
//! pages and the event log.

mod invariants;

use crate::conditions::Conditions;
use crate::event_log::EventLog;
use crate::pages::{PagePool, PageQuota};
use crate::queue::Queue;
use crate::sequence::{AdmissionRecord, DeadlineQueue, Sequence, Sequences, pages_for};
use crate::{
    Batch, Event, FinishReason, Limits, Micros, Nanos, Policy, Request, SequenceId, TenantId,
};

/// Everything that lasts from step to step, except the memory of admissions and plans.
pub(crate) struct SchedulerState {
    pub(crate) conditions: Conditions,
    pub(crate) sequences: Sequences,
    pub(crate) queue: Queue,
    pub(crate) pool: PagePool,
    pub(crate) batch: Batch, // It has the page tables of all running sequences.
    pub(crate) log: EventLog,
    deadlines: DeadlineQueue,
}

impl SchedulerState {
    pub(crate) fn new(limits: Limits, policy: Policy) -> SchedulerState {
        let max_running = limits.max_running as usize;
        let table_len = pages_for(limits.longest_sequence() as usize);
        SchedulerState {
            sequences: Sequences::with_capacity(max_running),
            queue: Queue::new(policy.order),
            pool: PagePool::new(limits.pages).with_slabs(limits.states),
            batch: Batch::with_capacity(max_running, limits.max_batch_tokens(), table_len),
            log: EventLog::default(),
            deadlines: DeadlineQueue::default(),
            conditions: Conditions::new(limits, policy),
        }
    }

    /// Returns how long the machine takes for all waiting requests.
    pub(crate) fn queued_time(&self) -> Micros {
        let time = self.queue.queued_time();
        self.conditions.predictor.at_present(time) / 1000
    }

    /// Sets a tenant's quota of pages by its policy. The cap stays above what each of the tenant's
    /// living sequences may need, so that sequences that were accepted under a higher cap can
    /// still end.
    pub(crate) fn set_page_quota(&mut self, id: TenantId) {
        let policy = &self.queue.tenant(id).policy;
        let alive = self.sequences.iter();
        let own = alive.filter(|sequence| sequence.tenant == id);
        let needed = own.map(Sequence::max_pages);
        let quota = PageQuota {
            weight: policy.weight,
            guaranteed: policy.guaranteed_pages,
            max: policy.max_pages.max(needed.max().unwrap_or(0)),
        };
        self.pool.set_tenant(id, quota);
    }

    /// Adds a choice of an accepted request to the queue. `first_choice` is the arrival of the
    /// request's first choice, and `uncached` are the prompt tokens that are not cached, `None` for
    /// a further choice of a prompt.
    pub(crate) fn submit(
        &mut self,
        request: Request,
        first_choice: u64,
        uncached: Option<usize>,
        estimate: Nanos,
    ) -> SequenceId {
        let now = self.conditions.now;
        let tenant = request.tenant;
        let longest = request.max_new_tokens as usize;
        let expected = match request.is_length_given {
            true => longest,
            false => self.queue.tenant(tenant).expected_output(longest),
        };
        let is_first = self.sequences.arrivals() == first_choice;
        let rates = self.queue.rates_mut(tenant);
        let uncached = uncached.map(|tokens| tokens as u64);
        let reserved = rates.reserve(now, is_first, uncached, [longest as u64, expected as u64]);
        let public = self.queue.tenant(tenant).policy.public.clone();
        let (first_token_within, ends_within) = (request.first_token_within, request.ends_within);
        let client = request.sub_tenant;
        let turn = self.queue.take_turn(tenant, request.band, client, estimate);
        let sequence = self.sequences.add(|id, arrival| {
            let record = AdmissionRecord {
                first_choice,
                client,
                turn,
                estimate,
                reserved,
                ..AdmissionRecord::default()
            };
            let diffusion = self.conditions.limits.diffusion;
            Sequence::new(
                id,
                arrival,
                request,
                public,
                (&self.pool, diffusion),
                record,
            )
        });
        let id = sequence.id;
        self.queue.insert(tenant, sequence.as_waiting());
        self.deadlines.add(now, first_token_within, id, true);
        self.deadlines.add(now, ends_within, id, false);
        id
    }

    /// Starts a waiting request.
    pub(crate) fn start(&mut self, slot: usize) {
        let now = self.conditions.now;
        let sequence = &mut self.sequences[slot];
        let (id, tenant) = (sequence.id, sequence.tenant);
        let band = sequence.band_within(&self.queue.tenant(tenant).policy);
        sequence.begin_running(now, band, &mut self.pool, &mut self.batch.tables);
        self.queue.begin_running(tenant, sequence.arrival);
        if let Some(cached) = sequence.note_first_admission() {
            self.log.admitted(id, sequence.prompt_len, cached);
            let uncached = (sequence.prompt_len - cached) as u64;
            let reserved = &sequence.record.reserved;
            let found = reserved.prompt.saturating_sub(uncached);
            let rates = self.queue.rates_mut(tenant);
            rates.refund_tokens(reserved, found);
        }
        let (len, remaining) = (sequence.len(), sequence.remaining());
        let cost = self.conditions.predictor.prefill_time(len, remaining);
        self.queue.plan_charge(tenant, cost);
        self.sequences.begin_running(slot);
    }

    /// Gives back the slabs of a planned step that was not committed.
    pub(crate) fn drop_planned_states(&mut self) {
        if !self.pool.slabs.is_used() {
            return;
        }
        for place in 0..self.sequences.running().len() {
            let slot = self.sequences.running()[place];
            self.sequences[slot].drop_planned_states(&mut self.pool);
        }
    }

    /// Takes a running sequence's pages. It waits again, in the place of its arrival.
    pub(crate) fn preempt(&mut self, slot: usize) {
        self.sequences.stop_running(slot);
        let sequence = &mut self.sequences[slot];
        sequence.preempt(&mut self.pool, &mut self.batch.tables);
        self.queue.preempt(sequence.tenant, sequence.as_waiting());
        self.log.preempted(sequence.id);
    }

    /// Ends a request, whether it waits or runs.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let sequence = self.remove(id, reason != FinishReason::Error);
        let tenant = sequence.tenant;
        if matches!(reason, FinishReason::Stop | FinishReason::Length) {
            self.queue.learn_output(tenant, sequence.output_len());
        }
        self.log.finished(Event::Finished {
            id,
            reason,
            tenant,
            prompt_tokens: sequence.prompt_len as u32,
            cached_tokens: sequence.record.cached_tokens.unwrap_or(0) as u32,
            output_tokens: sequence.output_len() as u32,
        });
    }

    /// Removes a request that has not started, with all its choices, from a full queue.
    pub(crate) fn displace(&mut self, tenant: TenantId, first_choice: u64) {
        let retry_after = self.queued_time();
        let queued = self.queue.tenant(tenant).choices(first_choice);
        let slots: Vec<usize> = queued.map(|choice| choice.slot).collect();
        for slot in slots {
            let id = self.sequences[slot].id;
            self.remove(id, false);
            self.log.displaced(id, tenant, retry_after);
        }
    }

    /// Removes a sequence from the queue or the running order, and gives back what it holds. If it
    /// runs, `keeps_pages` says whether what it computed stays in the cache.
    fn remove(&mut self, id: SequenceId, keeps_pages: bool) -> Sequence {
        let slot = id.slot();
        let sequence = &self.sequences[slot];
        let tenant = sequence.tenant;
        let rates = self.queue.rates_mut(tenant);
        rates.settle(
            &sequence.record.reserved,
            sequence.record.cached_tokens.is_some(),
            sequence.output_len() as u64,
        );
        if sequence.is_running {
            self.sequences.stop_running(slot);
            let sequence = &mut self.sequences[slot];
            if keeps_pages {
                sequence.offer_tail(&mut self.pool, &self.batch.tables);
                sequence.stop_running(&mut self.pool, &mut self.batch.tables);
            } else {
                sequence.stop_and_discard(&mut self.pool, &mut self.batch.tables);
            }
            self.queue.end_running(tenant);
        } else {
            self.queue.remove(tenant, sequence.arrival);
        }
        let sequence = self.sequences.remove(slot);
        self.deadlines.forget_ended(&self.sequences);
        if self.pool.cap(tenant) != self.queue.tenant(tenant).policy.max_pages {
            self.set_page_quota(tenant);
        }
        sequence
    }

    /// Ends the requests whose deadlines have passed.
    pub(crate) fn expire(&mut self) {
        while let Some(deadline) = self.deadlines.pop_passed(self.conditions.now) {
            let sequence = self.sequences.get(deadline.id);
            let is_late = sequence
                .is_some_and(|sequence| !deadline.is_for_first_token || sequence.output_len() == 0);
            if is_late {
                self.finish(deadline.id, FinishReason::Deadline);
            }
        }
    }
}
