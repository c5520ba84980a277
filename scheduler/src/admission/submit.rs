//! The way in: what is refused, and when it may be worth another try.

use std::cmp::Reverse;

use super::admit::common_prefix;
use crate::queue::Waiting;
use crate::sequence::Sequence;
use crate::{
    Micros, Nanos, PAGE_TOKENS, Refusal, Request, Scheduler, SequenceId, StepShape, TenantId,
};

/// Running sequences that a new request is compared with.
const COMPARED: usize = 8;

/// A moment at which a sequence ends if it has not got so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline {
    at: Micros,
    id: SequenceId,
    for_first_token: bool,
}

impl Scheduler {
    /// Takes a request, which waits until a plan admits it.
    ///
    /// # Errors
    /// A [`Refusal`] if it can never run, or not now. Nothing has changed then.
    ///
    /// # Panics
    /// If its tenant was never set, or time runs backwards.
    pub fn submit(&mut self, now: Micros, request: Request) -> Result<SequenceId, Refusal> {
        self.tell(now);
        self.check_possible(&request)?;
        let tenant = request.tenant;
        let public = &self.queue.tenants[tenant].policy.public;
        let cached = self.pool.find(tenant, public, &request.prompt).count() * PAGE_TOKENS;
        let uncached = request.prompt.len() - cached.min(request.prompt.len() - 1);
        let expected = uncached.min(request.prompt.len() - self.prefix_on_its_way(&request));
        let most = request.max_new_tokens as usize;
        let estimate = self.estimate(tenant, (request.prompt.len(), expected), most);
        self.check_welcome(&request, expected, estimate)?;

        let arrival = self.arrivals;
        self.arrivals += 1;
        let entry = self.sequences.vacant_entry();
        let slot = entry.key();
        let id = SequenceId::new(slot as u32, arrival as u32);
        let is_first = !request.is_another_choice;
        let deadlines = [
            (request.first_token_within, true),
            (request.ends_within, false),
        ];
        let mut sequence = Sequence::new(id, arrival, now, request);
        sequence
            .public
            .clone_from(&self.queue.tenants[tenant].policy.public);
        sequence.public_tokens = self.pool.public_tokens(&sequence.public, &sequence.tokens);
        sequence.rated_tokens = is_first.then_some(uncached as u64);
        sequence.estimate = estimate;
        entry.insert(sequence);
        for (within, for_first_token) in deadlines {
            self.deadlines.extend(within.map(|within| {
                Reverse(Deadline {
                    at: now.saturating_add(within),
                    id,
                    for_first_token,
                })
            }));
        }
        if is_first {
            self.queue.tenants[tenant].charge_request(now, uncached as u64);
        }
        self.queue.insert(
            tenant,
            Waiting {
                arrival,
                slot,
                estimate,
            },
        );
        Ok(id)
    }

    /// Tokens of a prompt, in whole pages, that another request of its tenant has too, which was submitted just before or is
    /// being computed: by the time it is this one's turn they should be cached.
    fn prefix_on_its_way(&self, request: &Request) -> usize {
        let waiting = self.queue.tenants[request.tenant].waiting.back();
        let latest = waiting.map(|waiting| waiting.slot);
        let running = self.running.iter().rev().copied().take(COMPARED);
        let others = latest
            .into_iter()
            .chain(running)
            .map(|slot| &self.sequences[slot]);
        let own = others.filter(|other| other.tenant == request.tenant);
        let reusable = &request.prompt[..request.prompt.len() - 1];
        let shared = own.map(|other| common_prefix(reusable, &other.tokens));
        shared.max().unwrap_or(0) / PAGE_TOKENS * PAGE_TOKENS
    }

    /// Refuses what could not even run alone.
    fn check_possible(&self, request: &Request) -> Result<(), Refusal> {
        let needed_tokens = request.prompt.len() as u64 + u64::from(request.max_new_tokens);
        let limit_tokens = self.longest_sequence(request.tenant);
        if request.prompt.is_empty() {
            Err(Refusal::EmptyPrompt)
        } else if request.max_new_tokens == 0 {
            Err(Refusal::NothingToGenerate)
        } else if needed_tokens > limit_tokens {
            Err(Refusal::TooLong {
                needed_tokens,
                limit_tokens,
            })
        } else if self.is_draining {
            Err(Refusal::Draining)
        } else {
            Ok(())
        }
    }

    /// Prompt and output of one sequence of this tenant at most: what it may hold, beside the public prefixes.
    fn longest_sequence(&self, tenant: TenantId) -> u64 {
        let cap = u64::from(self.queue.tenants[tenant].policy.max_pages);
        let left = u64::from(self.limits.pages - self.pool.reserved());
        let memory = cap.min(left) * PAGE_TOKENS as u64;
        memory.min(u64::from(self.limits.max_sequence_tokens))
    }

    /// Refuses what is too much now.
    fn check_welcome(
        &self,
        request: &Request,
        uncached: usize,
        estimate: Nanos,
    ) -> Result<(), Refusal> {
        let tenant = &self.queue.tenants[request.tenant];
        if !request.is_another_choice
            && let Err((rate, retry_after)) = tenant.conforms(self.now)
        {
            return Err(Refusal::RateLimited { rate, retry_after });
        }
        let own_time = (tenant.queued_time + estimate) / 1000;
        let is_queued = !tenant.waiting.is_empty(); // One request may always wait, however long it is.
        if tenant.waiting.len() >= tenant.policy.max_queued as usize
            || is_queued && own_time > tenant.policy.max_queued_time
        {
            let retry_after = self.queue.time_at_share(request.tenant, tenant.queued_time);
            return Err(Refusal::TenantQueueFull { retry_after });
        }
        let all_time = (self.queue.queued_time() + estimate) / 1000;
        let is_queued = self.queue.len() > 0;
        if self.queue.len() >= self.limits.max_queued as usize
            || is_queued && all_time > self.limits.max_queued_time
        {
            let retry_after = self.queue.queued_time() / 1000;
            return Err(Refusal::Overloaded { retry_after });
        }
        let latest = request.first_token_within.unwrap_or(Micros::MAX);
        let alone = self.prefill_time(request.prompt.len(), uncached) / 1000;
        let expected = alone + self.expected_wait(request.tenant);
        if expected > latest {
            let retry_after = (alone <= latest).then(|| expected - latest);
            return Err(Refusal::Deadline { retry_after });
        }
        Ok(())
    }

    /// How long what waits keeps another request of this tenant from running.
    fn expected_wait(&self, tenant: TenantId) -> Micros {
        let own = self.queue.tenants[tenant].queued_time;
        let at_share = self.queue.time_at_share(tenant, own);
        at_share.min(self.queue.queued_time() / 1000)
    }

    /// Machine time of computing the last `uncached` of `len` prompt tokens.
    pub(crate) fn prefill_time(&self, len: usize, uncached: usize) -> Nanos {
        let shape = StepShape::chunk(len - uncached, uncached, 1);
        self.correction.apply(self.cost.predict(shape))
    }

    /// Machine time that a request should take in all: its prefill, and its part of the steps that decode it beside as
    /// many others as usual.
    fn estimate(&self, tenant: TenantId, (len, uncached): (usize, usize), max_new: usize) -> Nanos {
        let output = self.queue.tenants[tenant].expected_output(max_new);
        let others = self.running.len().max(1) as u64;
        let decode = StepShape::decode(len + output / 2);
        let together = StepShape {
            rows: decode.rows * others,
            decode_keys: decode.decode_keys * others,
            logits: decode.logits * others,
            ..decode
        };
        let a_token = self.correction.apply(self.cost.predict(together)) / others;
        self.prefill_time(len, uncached) + a_token * output as u64
    }

    /// More deadlines are not kept: those who are alive have two each.
    pub(crate) fn most_deadlines(&self) -> usize {
        4 * self.sequences.len() + 64
    }

    /// Forgets the deadlines of those who have ended, once they are the most.
    pub(crate) fn forget_deadlines(&mut self) {
        if self.deadlines.len() > self.most_deadlines() {
            let sequences = &self.sequences;
            let is_alive = |id: SequenceId| sequences.get(id.slot()).is_some_and(|s| s.id == id);
            self.deadlines
                .retain(|Reverse(deadline)| is_alive(deadline.id));
        }
    }

    /// Ends what has taken too long.
    pub(crate) fn expire(&mut self) {
        while let Some(&Reverse(deadline)) = self.deadlines.peek()
            && deadline.at <= self.now
        {
            self.deadlines.pop();
            let sequence = self.sequences.get(deadline.id.slot());
            let is_late = sequence.is_some_and(|sequence| {
                let is_waited_for = !deadline.for_first_token || sequence.output_len() == 0;
                sequence.id == deadline.id && is_waited_for
            });
            if is_late {
                self.finish(deadline.id, crate::FinishReason::Deadline);
            }
        }
    }
}
