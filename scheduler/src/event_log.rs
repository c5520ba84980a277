//! What has happened: events for the caller to collect, and counts since the start.

use crate::{Event, Micros, SequenceId, Snapshot, TenantId};

/// Events that the caller has not collected yet, and counts.
#[derive(Default)]
pub(crate) struct EventLog {
    events: Vec<Event>,
    counts: Snapshot, // Only the fields that the methods below change.
}

impl EventLog {
    /// Returns the counts of what was recorded. The other fields are 0.
    pub(crate) fn counts(&self) -> &Snapshot {
        &self.counts
    }

    /// Removes and returns all events, oldest first.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.events.drain(..)
    }

    /// Records the first admission of a request.
    pub(crate) fn admitted(&mut self, id: SequenceId, prompt_tokens: usize, cached_tokens: usize) {
        self.counts.prefix_queries += prompt_tokens as u64;
        self.counts.prefix_hits += cached_tokens as u64;
        self.events.push(Event::Admitted {
            id,
            cached_tokens: cached_tokens as u32,
        });
    }

    pub(crate) fn preempted(&mut self, id: SequenceId) {
        self.counts.preemptions += 1;
        self.events.push(Event::Preempted { id });
    }

    pub(crate) fn displaced(&mut self, id: SequenceId, tenant: TenantId, retry_after: Micros) {
        self.events.push(Event::Displaced {
            id,
            tenant,
            retry_after,
        });
    }

    pub(crate) fn finished(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Records that a request waits for a running prefill to compute its prefix.
    pub(crate) fn deferred(&mut self) {
        self.counts.deferrals += 1;
    }

    pub(crate) fn copied_page(&mut self) {
        self.counts.copies += 1;
    }

    pub(crate) fn redirected_pages(&mut self, pages: u64) {
        self.counts.redirects += pages;
    }

    /// Records a pass over a block that has replaced mask tokens.
    pub(crate) fn unmasked(&mut self, tokens: usize) {
        self.counts.block_passes += 1;
        self.counts.unmasked += tokens as u64;
    }

    /// Records the drafts of a row, and whether the model drafted them itself.
    pub(crate) fn drafted(&mut self, drafted: usize, accepted: usize, are_own: bool) {
        self.counts.drafted += drafted as u64;
        self.counts.accepted += accepted as u64;
        if are_own {
            self.counts.own_drafted += drafted as u64;
            self.counts.own_accepted += accepted as u64;
        }
    }
}
