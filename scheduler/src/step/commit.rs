//! What a computed step changes: lengths, finished requests, published prefixes, charges.
//!
//! Invariant: only here does anything become computed. Invariant: the charges of a step add up to its predicted cost.

use crate::{
    Event, FinishReason, Micros, PAGE_TOKENS, Row, Sampled, Scheduler, SequenceId, StepShape,
};

impl Scheduler {
    pub(crate) fn commit(&mut self, now: Micros, sampled: &[Sampled]) {
        self.tell(now);
        assert_eq!(sampled.len(), self.batch.logits_count());
        self.charge_step();
        let predicted = self.cost.predict(self.shape);
        self.correction
            .observe(predicted, (now - self.planned_at) * 1000);
        let mut entries = sampled;
        for index in 0..self.batch.rows().len() {
            let row = self.batch.rows()[index];
            let (own, rest) = entries.split_at(row.logits as usize);
            entries = rest;
            self.commit_row(&row, own);
        }
    }

    /// Charges each tenant for its rows: its part of what all rows share, and what each costs by itself.
    fn charge_step(&mut self) {
        let shape = self.shape;
        let total = self.predict(shape);
        let rows_only = StepShape {
            rows: shape.rows,
            ..StepShape::default()
        };
        let a_row = self.predict(rows_only) / shape.rows;
        let logits_only = self.cost.head + self.cost.logit * shape.logits;
        let a_logit = self.correction.apply(logits_only) / shape.logits.max(1);
        let mut charged = 0;
        let first = self.shares[0].tenant;
        for (row, share) in self.batch.rows().iter().zip(&self.shares) {
            let own = row_shape(row, share.tokens);
            let keys = self.correction.apply(self.cost.keys(own));
            let cost = a_row * own.rows + a_logit * own.logits + keys;
            let cost = cost.min(total - charged);
            charged += cost;
            self.queue.charge(share.tenant, cost);
        }
        self.queue.charge(first, total - charged);
        self.queue.settle_charges();
    }

    /// The row's tokens are in its sequence's pages now, unless it failed, and it goes on with what was drawn.
    fn commit_row(&mut self, row: &Row, sampled: &[Sampled]) {
        let (id, slot) = (row.sequence, row.sequence.slot());
        let tokens = self.batch.tokens(row);
        let drafts = &tokens[tokens.len() - sampled.len().saturating_sub(1)..];
        let sequence = &mut self.sequences[slot];
        if sampled.contains(&Sampled::Failed) {
            sequence.draw(drafts, sampled); // What came before it has been seen.
            return self.finish(id, FinishReason::Error);
        }
        if let Some(copy) = sequence.copy.take() {
            self.pool.unpin(copy.from);
            sequence.computed += copy.tokens;
            self.copies += 1;
        }
        sequence.computed += row.len() - drafts.len();
        let (drawn, ending) = sequence.draw(drafts, sampled);
        let accepted = drawn.saturating_sub(1);
        self.drafted += drafts.len() as u64;
        self.accepted += accepted as u64;
        sequence
            .acceptance
            .record(drafts.len() as u32, accepted as u32);
        if drawn > 0 {
            sequence.last_token_at = self.now;
            let tenant = &mut self.queue.tenants[sequence.tenant];
            tenant.charge_tokens(self.now, drawn as u64);
        }
        self.publish(slot);
        if let Some(reason) = ending {
            self.finish(id, reason);
        }
    }

    /// Puts the full, computed pages of a sequence into the tree, each under the page that now stands for its parent.
    fn publish(&mut self, slot: usize) {
        let sequence = &mut self.sequences[slot];
        let (whole_pages, _) = sequence.tokens[..sequence.computed].as_chunks::<PAGE_TOKENS>();
        let pages = self.batch.tables.get_mut(&sequence.table);
        let unpublished = whole_pages.iter().enumerate().skip(sequence.table.in_tree);
        for (index, &tokens) in unpublished {
            let parent = index.checked_sub(1).map(|parent| pages[parent]);
            let edge = self
                .pool
                .edge(sequence.tenant, &sequence.public, parent, tokens);
            let own = pages[index];
            pages[index] = self.pool.publish(sequence.id, own, edge);
            self.redirects += u64::from(pages[index] != own);
        }
        sequence.table.in_tree = whole_pages.len();
    }

    /// The one way for a sequence to lose its pages and its place in the batch.
    pub(crate) fn stop_running(&mut self, slot: usize) {
        let place = self.place(slot);
        self.running.remove(place);
        let sequence = &mut self.sequences[slot];
        if let Some(copy) = sequence.copy.take() {
            self.pool.unpin(copy.from);
        }
        self.pool
            .release_table(self.batch.tables.get(&sequence.table));
        self.batch.tables.close(std::mem::take(&mut sequence.table));
        sequence.computed = 0;
        sequence.state = crate::sequence::State::Queued;
        let tenant = sequence.tenant;
        self.queue.end_running(tenant);
    }

    /// The page that a finished sequence was filling may serve who goes on from it.
    fn offer_tail(&mut self, slot: usize) {
        let sequence = &mut self.sequences[slot];
        let in_tree = sequence.table.in_tree;
        let tail = &sequence.tokens[in_tree * PAGE_TOKENS..sequence.computed];
        if tail.is_empty() {
            return;
        }
        let (kept, rest) = self.batch.tables.get(&sequence.table).split_at(in_tree);
        let (&page, unused) = rest.split_first().expect("computed tokens have a page");
        self.pool.release_table(unused);
        sequence.table.len = in_tree;
        let parent = kept.last().copied();
        self.pool
            .offer_tail(sequence.id, page, parent, sequence.tenant, tail);
    }

    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        let slot = id.slot();
        let sequence = &self.sequences[slot];
        let (tenant, arrival) = (sequence.tenant, sequence.arrival);
        match sequence.state {
            crate::sequence::State::Queued => {
                let is_begun = sequence.cached_tokens.is_some();
                if let Some(rated) = sequence.rated_tokens.filter(|_| !is_begun) {
                    self.queue.tenants[tenant].refund_request(rated);
                }
                self.queue.remove(tenant, arrival);
            }
            crate::sequence::State::Running => {
                if reason != FinishReason::Error {
                    self.offer_tail(slot);
                }
                self.stop_running(slot);
            }
        }
        let sequence = self.sequences.remove(slot);
        self.forget_deadlines();
        if matches!(reason, FinishReason::Stop | FinishReason::Length) {
            self.queue.tenants[tenant].learn_output(sequence.output_len());
        }
        let tenant_now = &self.queue.tenants[tenant];
        if self.pool.cap(tenant) != tenant_now.policy.max_pages {
            self.share_pages(tenant);
        }
        self.events.push(Event::Finished {
            id,
            reason,
            tenant,
            prompt_tokens: sequence.prompt_len as u32,
            cached_tokens: sequence.cached_tokens.unwrap_or(0) as u32,
            output_tokens: sequence.output_len() as u32,
        });
    }
}

/// What one row adds to a step; `known` of its tokens are not drafts.
fn row_shape(row: &Row, known: usize) -> StepShape {
    let (end, drafts) = (row.start as usize + known, row.len() - known);
    if known > 1 {
        return StepShape::chunk(row.start as usize, known, row.logits as usize);
    }
    let each = 1 + drafts as u64;
    StepShape {
        rows: each,
        decode_keys: each * end as u64,
        chunk_keys: 0,
        logits: u64::from(row.logits),
    }
}
