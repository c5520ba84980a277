//! Who begins to run: the policy's choice among those for whom there is time, a place and memory.
//!
//! Invariant: matching a prefix changes nothing; it is pinned, and pages are taken, only once a request is let in.
//! Invariant: a request that was the first of its band and does not fit is passed by others only so often; then nobody
//! of its band enters before it. While it waits for its own tenant's sequences alone, only its tenant waits with it.

use crate::queue::Waiting;
use crate::sequence::{PendingCopy, Sequence, State, pages_for};
use crate::{
    Band, Budget, Event, Growth, Micros, Order, PAGE_TOKENS, Page, Scheduler, StepShape, TenantId,
    TokenId,
};

/// Prompts that are computed at the same time. A tenant that runs less than its share may go up to twice as many.
const PREFILL_PLACES: usize = 8;

/// Running prefills that a waiting request is compared with.
const COMPARED_PREFILLS: usize = 8;

/// Times that others may go past a request.
const PATIENCE: u32 = 32;

/// The same for one that lacks only time, or whose turn was before and is not now. It is longer, for those who pass it are
/// mostly tenants that run less than their share.
pub(crate) const LONG_PATIENCE: u32 = 256;

/// What is left for newcomers in a plan.
struct Room {
    decodes: [StepShape; 2], // Of all that run, once they decode: but for the batch band, and of that.
    promised: usize,         // Pages that those who run will still need.
    prefills: usize,
}

impl Scheduler {
    /// Admits waiting requests while there is room.
    pub(crate) fn admit(&mut self) {
        if self.queue.len() == 0 || self.running.len() >= self.limits.max_running as usize {
            return;
        }
        let mut room = self.room();
        while self.running.len() < self.limits.max_running as usize {
            let Some(slot) = self.choose(&room) else {
                return;
            };
            self.start(slot);
            let sequence = &self.sequences[slot];
            self.occupy(&mut room, sequence);
        }
    }

    fn room(&self) -> Room {
        let mut room = Room {
            decodes: [StepShape::default(); 2],
            promised: 0,
            prefills: 0,
        };
        for &slot in &self.running {
            let sequence = &self.sequences[slot];
            self.occupy(&mut room, sequence);
        }
        room
    }

    fn occupy(&self, room: &mut Room, sequence: &Sequence) {
        let decodes = &mut room.decodes[usize::from(sequence.band == Band::Batch as usize)];
        *decodes = decodes.plus(StepShape::decode(sequence.tokens.len()));
        room.promised += self.promised_pages(sequence);
        room.prefills += usize::from(sequence.is_prefill());
    }

    /// Pages that a running sequence will soon need: for the prompt it has begun, and for the rest of its answer. One that is
    /// longer than usual will go on for a while: half of what it has is about right for lengths that spread widely.
    fn promised_pages(&self, sequence: &Sequence) -> usize {
        let tenant = &self.queue.tenants[sequence.tenant];
        let (had, left) = (sequence.output_len(), sequence.output_left());
        let more = match self.policy.growth {
            Growth::Minimal => 1,
            Growth::Maximal => left,
            Growth::Expected => {
                let usual = tenant.expected_output(sequence.output_rules.max_new_tokens);
                usual.saturating_sub(had).max(had / 2).clamp(1, left)
            }
        };
        let end = sequence.tokens.len() + more;
        pages_for(end).saturating_sub(sequence.table.len)
    }

    /// The next request to be admitted, or nobody for now.
    fn choose(&mut self, room: &Room) -> Option<usize> {
        let mut passed = [[None; 2]; 3]; // Of each band the first, and who is kept out.
        for (index, band) in self.queue.bands().into_iter().enumerate() {
            let mut candidates = std::mem::take(&mut self.candidates);
            candidates.clear();
            let kept_out = self.kept_out(band);
            let waits_too_long = |slot: &usize| self.sequences[*slot].passed >= LONG_PATIENCE;
            let overdue = kept_out.filter(waits_too_long);
            candidates.extend(overdue.map(|slot| self.sequences[slot].as_waiting()));
            self.queue.candidates(band, &mut candidates);
            let choice = self.choose_among(&candidates, room);
            self.candidates = candidates;
            match choice {
                Choice::Admit { slot, first } => {
                    passed[index] = [first, kept_out];
                    self.note_passed(passed, slot);
                    return Some(slot);
                }
                Choice::Reserved => return None,
                Choice::Nobody { first } => passed[index] = [first, kept_out],
            }
        }
        None
    }

    /// The request of a band that was its first once and found no memory, if it waits still and its tenant may run it.
    fn kept_out(&mut self, band: Band) -> Option<usize> {
        let kept_out = &mut self.kept_out[band as usize];
        let id = (*kept_out)?;
        let sequence = self.sequences.get(id.slot()).filter(|sequence| {
            let tenant = &self.queue.tenants[sequence.tenant];
            let is_here = sequence.id == id && tenant.policy.band == band;
            is_here && sequence.state == State::Queued
        });
        let Some(sequence) = sequence else {
            *kept_out = None;
            return None;
        };
        let tenant = &self.queue.tenants[sequence.tenant];
        (tenant.running < tenant.policy.max_running).then_some(id.slot())
    }

    /// Counts that the one in `admitted` goes past the first of each band and past those who are kept out.
    fn note_passed(&mut self, passed: [[Option<usize>; 2]; 3], admitted: usize) {
        for [first, kept_out] in passed {
            let kept_out = kept_out.filter(|_| kept_out != first);
            for slot in [first, kept_out].into_iter().flatten() {
                if slot == admitted {
                    continue;
                }
                if Some(slot) == kept_out {
                    self.find_prefix(slot);
                    if self.would_gain_by_waiting(slot) {
                        continue;
                    }
                }
                self.sequences[slot].passed += 1;
                #[cfg(debug_assertions)]
                self.check_patience(slot);
            }
        }
    }

    fn choose_among(&mut self, candidates: &[Waiting], room: &Room) -> Choice {
        let mut first = None;
        let mut best: Option<(usize, usize)> = None; // Tokens saved, and the slot.
        let mut overdue = None; // A tenant whose first request has been passed often enough.
        for waiting in candidates {
            let slot = waiting.slot;
            let tenant = self.sequences[slot].tenant;
            let has_time = self.has_time(slot, room);
            if overdue == Some(tenant) || !has_time && first.is_some() {
                continue;
            }
            self.find_prefix(slot);
            if self.would_gain_by_waiting(slot) {
                self.deferrals += 1;
                continue;
            }
            let passed = self.sequences[slot].passed;
            let is_strict = self.policy.order == Order::FirstCome;
            let has_own_room = self.needed_pages(slot) <= self.pool.room(tenant);
            let fits = has_own_room && self.fits(slot, room.promised);
            let is_first = first.is_none();
            first = first.or(Some(slot));
            if is_first && has_own_room && !fits {
                self.keep_out(slot);
            }
            if is_first && (is_strict || passed >= PATIENCE) {
                match (has_time, has_own_room, fits) {
                    (true, _, true) => return Choice::Admit { slot, first },
                    // It waits for its own tenant's sequences alone.
                    (_, false, _) => overdue = Some(tenant),
                    (_, true, false) => return Choice::Reserved,
                    (false, ..) if is_strict || passed >= LONG_PATIENCE => {
                        return Choice::Reserved;
                    }
                    (false, ..) => overdue = Some(tenant),
                }
            }
            let saved = self.matched.len() * PAGE_TOKENS;
            if has_time && fits && best.is_none_or(|(most, _)| saved > most) {
                best = Some((saved, slot));
            }
        }
        match best {
            Some((_, slot)) => Choice::Admit { slot, first },
            None => Choice::Nobody { first },
        }
    }

    /// Remembers that a request was the first of its band and found no memory, unless another did so before it.
    fn keep_out(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let (id, band) = (sequence.id, self.queue.tenants[sequence.tenant].policy.band);
        self.kept_out(band); // Forgets who has gone.
        self.kept_out[band as usize].get_or_insert(id);
    }

    /// Whether one more sequence leaves every decode its inter-token target, and every prefill its turn. A tenant that runs
    /// less than its share need not wait for another's sequences to end: for it the target is a quarter wider.
    fn has_time(&self, slot: usize, room: &Room) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let sequence = &self.sequences[slot];
        let is_light = self
            .queue
            .runs_less_than_its_share(sequence.tenant, self.running.len());
        let places = PREFILL_PLACES * if is_light { 2 } else { 1 };
        if room.prefills >= places {
            return false;
        }
        let Budget::Time {
            inter_token_target, ..
        } = self.policy.budget
        else {
            return true;
        };
        let target = self.inter_token_target(inter_token_target);
        let target = if is_light {
            target + target / 4
        } else {
            target
        };
        let [others, batch] = room.decodes;
        // The batch band's decodes pause for others, so they take no place from them.
        let is_batch = self.queue.tenants[sequence.tenant].policy.band == Band::Batch;
        let before = if is_batch { others.plus(batch) } else { others };
        let one_more = before.plus(StepShape::decode(sequence.tokens.len()));
        self.predict(one_more.plus(StepShape::chunk(0, crate::step::PREFILL_FLOOR, 0)))
            <= target * 1000
    }

    /// The target that this machine can keep: at least two steps of a single decode, so that there is a batch at all.
    pub(crate) fn inter_token_target(&self, asked: Micros) -> Micros {
        asked.max(self.predict(StepShape::decode(1)) * 2 / 1000)
    }

    pub(crate) fn find_prefix(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let found = self.pool.find(
            sequence.tenant,
            &sequence.public,
            sequence.reusable_tokens(),
        );
        self.matched.clear();
        self.matched.extend(found);
    }

    /// Whether a running prefill is about to compute more of this request's prefix than is cached now.
    fn would_gain_by_waiting(&self, slot: usize) -> bool {
        let sequence = &self.sequences[slot];
        let is_ahead = |other: &Sequence| {
            let mut shared = common_prefix(sequence.reusable_tokens(), &other.tokens);
            if other.tenant != sequence.tenant {
                shared = shared.min(sequence.public_tokens).min(other.public_tokens);
            }
            shared / PAGE_TOKENS > self.matched.len()
        };
        let running = self.running.iter().map(|&other| &self.sequences[other]);
        running
            .filter(|other| other.is_prefill())
            .take(COMPARED_PREFILLS)
            .any(is_ahead)
    }

    /// Pages that all known tokens of a waiting request take from those that are free or could be evicted. Its own matched
    /// pages cannot also be evicted for it.
    pub(crate) fn needed_pages(&self, slot: usize) -> usize {
        let unpinned = |page: &&Page| !self.pool.is_pinned(**page);
        let revived = self.matched.iter().filter(unpinned).count();
        pages_for(self.sequences[slot].tokens.len()) - self.matched.len() + revived
    }

    /// Whether they are there beside the promised pages and what others are guaranteed. Alone, it may use everything.
    fn fits(&self, slot: usize, promised: usize) -> bool {
        let needed = self.needed_pages(slot);
        if self.running.is_empty() {
            return needed <= self.pool.available_to_all();
        }
        let guaranteed = self.pool.unmet_guarantees(self.sequences[slot].tenant);
        needed + promised + guaranteed <= self.pool.available_to_all()
    }

    /// Makes a waiting request a running one, with the pages that are cached for it.
    fn start(&mut self, slot: usize) {
        self.find_prefix(slot);
        for &page in &self.matched {
            self.pool.pin(page);
        }
        let sequence = &mut self.sequences[slot];
        let tenant = sequence.tenant;
        sequence.reserve();
        sequence.state = State::Running;
        sequence.band = self.queue.tenants[tenant].policy.band as usize;
        sequence.table = self.batch.tables.open();
        for &page in &self.matched {
            self.batch.tables.push(&mut sequence.table, page);
        }
        sequence.table.in_tree = self.matched.len();
        sequence.computed = self.matched.len() * PAGE_TOKENS;
        sequence.last_token_at = self.now;
        sequence.rested = 0;
        sequence.passed = 0;
        let arrival = sequence.arrival;
        self.queue.begin_running(tenant);
        self.queue.remove(tenant, arrival);
        self.begin_copy(slot);
        let place = self.place(slot);
        self.running.insert(place, slot);
        self.announce(slot);
        let sequence = &self.sequences[slot];
        let cost = self.prefill_time(sequence.tokens.len(), sequence.remaining());
        self.queue.plan_charge(tenant, cost);
    }

    /// Finds a cached page that begins with the tokens after the matched ones, if its copy still fits.
    fn begin_copy(&mut self, slot: usize) {
        let sequence = &self.sequences[slot];
        let wanted = &sequence.reusable_tokens()[sequence.computed..];
        // A whole page that was not found is another owner's by now: it is copied all but the last token.
        let wanted = &wanted[..wanted.len().min(PAGE_TOKENS - 1)];
        let parent = self.batch.tables.get(&sequence.table).last().copied();
        let Some((from, tokens)) =
            self.pool
                .similar(sequence.tenant, &sequence.public, parent, wanted)
        else {
            return;
        };
        let revived = usize::from(!self.pool.is_pinned(from));
        if sequence.missing_pages() + revived <= self.pool.available(sequence.tenant) {
            self.pool.pin(from);
            self.sequences[slot].copy = Some(PendingCopy { from, tokens });
        }
    }

    /// Tells of a first admission; a later one, after a preemption, is nobody's news.
    fn announce(&mut self, slot: usize) {
        let sequence = &mut self.sequences[slot];
        if sequence.cached_tokens.is_some() {
            return;
        }
        let cached = sequence.start();
        sequence.cached_tokens = Some(cached);
        let uncached = (sequence.prompt_len - cached) as u64;
        let refund = sequence.rated_tokens.unwrap_or(0).saturating_sub(uncached);
        self.prefix_queries += sequence.prompt_len as u64;
        self.prefix_hits += cached as u64;
        self.events.push(Event::Admitted {
            id: sequence.id,
            cached_tokens: cached as u32,
        });
        let tenant: TenantId = sequence.tenant;
        self.queue.tenants[tenant].refund_tokens(refund);
    }
}

/// What becomes of a band's candidates; `first` is the first of them that does not wait for a prefix.
enum Choice {
    Admit { slot: usize, first: Option<usize> },
    Nobody { first: Option<usize> },
    Reserved, // For the first, which cannot be let in yet.
}

/// How many tokens two sequences have in common at the start.
pub(crate) fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
