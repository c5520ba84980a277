//! The fake model, whose KV pages hold tokens, and the clients that know the answers they expect.

use std::collections::BTreeMap;

use sterna_random::mix;
use sterna_scheduler::{
    Batch, Diffusion, FinishReason, Micros, PAGE_TOKENS, PageCopy, Request, Row, Sampled,
    SequenceId, TenantId, TokenId,
};

use crate::blocks::{self, MASK, NextPass, pass};
use crate::coverage::Coverage;
use crate::states::FakeSlabs;

/// Returns a hash of what a real key and value depend on: the token and everything before it.
pub(crate) fn chain(before: u64, token: TokenId) -> u64 {
    mix(before.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// Returns the fake model's next token.
pub(crate) fn next_token(chain: u64, alphabet: u64) -> TokenId {
    (mix(chain) % alphabet) as TokenId
}

/// The content of one position in the fake KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) tenant: TenantId,
    pub(crate) position: usize,
    pub(crate) token: TokenId,
    pub(crate) chain: u64,
    pub(crate) block: u64, // A hash of all of its block, if the keys are not causal.
}

/// The fake model: its KV memory and the number of different tokens that it answers.
pub(crate) struct FakeModel {
    pub(crate) cells: Vec<Option<Cell>>,
    pub(crate) slabs: FakeSlabs,
    pub(crate) alphabet: u64,
}

impl FakeModel {
    fn cell(&mut self, batch: &Batch, row: &Row, position: usize) -> &mut Option<Cell> {
        let page = batch.pages(row)[position / PAGE_TOKENS];
        &mut self.cells[page.index() * PAGE_TOKENS + position % PAGE_TOKENS]
    }

    /// Reads a row's history back. Returns its chain, and whether any of it is another tenant's.
    ///
    /// # Panics
    /// If a cell holds something else, or another tenant wrote it and it is not public (M6).
    fn read(&mut self, batch: &Batch, row: &Row, client: &Client) -> (u64, bool) {
        let mut before = 0;
        let mut is_shared = false;
        for position in 0..client.computed_before(row) {
            let token = client.token(position);
            before = chain(before, token);
            let found = self
                .cell(batch, row, position)
                .expect("M6: the position was computed");
            let expected = Cell {
                tenant: found.tenant,
                position,
                token,
                chain: before,
                block: client.block_hash(position),
            };
            assert_eq!(found, expected, "M6: {row:?} reads a wrong cell");
            if found.tenant != client.request.tenant {
                let is_public = position < client.public_tokens();
                assert!(is_public, "M6: {row:?} reads another tenant's page");
                is_shared = true;
            }
        }
        (before, is_shared)
    }

    /// Computes a row after its history. Returns the tokens that follow the positions with logits.
    /// In a pass over a block, mask tokens among them stay what they are.
    fn write(
        &mut self,
        batch: &Batch,
        row: &Row,
        client: &Client,
        mut before: u64,
    ) -> Vec<TokenId> {
        let with_logits = row.logits_range();
        let (mut next, mut chains) = (Vec::new(), Vec::new());
        let (at_start, tokens) = (before, batch.tokens(row));
        let begin = client.computed_before(row);
        for position in begin..row.start as usize {
            let cell = self.cell(batch, row, position).expect("an earlier pass");
            before = chain(before, cell.token);
        }
        let hash = |position: usize| match row.block as usize {
            0 => 0,
            _ if client.is_unmasking(row.start as usize) => 0,
            size => {
                let begin = position / size * size - row.start as usize;
                block_hash(tokens[begin..].iter().take(size).copied())
            }
        };
        for (offset, &token) in tokens.iter().enumerate() {
            before = chain(before, token);
            chains.push(before);
            let position = row.start as usize + offset;
            *self.cell(batch, row, position) = Some(Cell {
                tenant: client.request.tenant,
                position,
                token,
                chain: before,
                block: hash(position),
            });
            if with_logits.contains(&position) {
                next.push(next_token(before, self.alphabet));
            }
        }
        self.slabs.write(row, at_start, &chains);
        if client.is_unmasking(row.start as usize) {
            let place = |position| position + 1 - begin;
            let places = place(with_logits.start)..place(with_logits.end);
            let end = row.end() + row.tokens_behind as usize;
            let seen = (begin..end).map(|position| {
                let cell = self.cell(batch, row, position).expect("an earlier pass");
                assert_eq!(cell.tenant, client.request.tenant, "M6: {row:?}");
                assert_eq!(cell.position, position, "M6: {row:?}");
                cell.token
            });
            let seen: Vec<TokenId> = seen.collect();
            let kept = pass(at_start, &seen, places, self.alphabet);
            return kept
                .into_iter()
                .map(|token| token.unwrap_or(MASK))
                .collect();
        }
        next
    }

    /// Erases what a failed row has written.
    pub(crate) fn erase_row(&mut self, batch: &Batch, id: SequenceId) {
        let mut rows = batch.rows().iter();
        let row = rows.find(|row| row.sequence == id).expect("it has a row");
        for position in row.start as usize..row.end() {
            *self.cell(batch, row, position) = None;
        }
        self.slabs.erase_row(row);
    }

    /// Copies a page. The positions that the reader continues from become the reader's own.
    ///
    /// # Panics
    /// If the reader may not read one of these positions (M6).
    fn copy(&mut self, batch: &Batch, copy: PageCopy, clients: &BTreeMap<SequenceId, Client>) {
        let from = copy.from.index() * PAGE_TOKENS;
        let to = copy.to.index() * PAGE_TOKENS;
        self.cells.copy_within(from..from + PAGE_TOKENS, to);
        let mut rows = batch.rows().iter();
        let row = rows.find(|row| batch.pages(row).contains(&copy.to));
        let row = row.expect("a copy is for a row");
        let client = &clients[&row.sequence];
        for cell in self.cells[to..][..row.start as usize % PAGE_TOKENS].iter_mut() {
            let cell = cell.as_mut().expect("the position was computed");
            let is_public = cell.position < client.public_tokens();
            assert!(
                is_public || cell.tenant == client.request.tenant,
                "M6: {copy:?} reads another tenant's page"
            );
            cell.tenant = client.request.tenant;
        }
    }

    /// Computes a step: copies pages, reads every row's history, then writes the rows for which
    /// `is_skipped` returns `false`. Returns each written row with the tokens that follow it.
    pub(crate) fn forward(
        &mut self,
        batch: &Batch,
        clients: &BTreeMap<SequenceId, Client>,
        coverage: &mut Coverage,
        mut is_skipped: impl FnMut() -> bool,
    ) -> Vec<(Row, Vec<TokenId>)> {
        for copy in batch.copies() {
            self.copy(batch, *copy, clients);
        }
        let rows = batch.rows().iter();
        let read = |row: &Row| {
            let (chain, is_shared) = self.read(batch, row, &clients[&row.sequence]);
            coverage.public_hits += u64::from(is_shared);
            chain
        };
        let chains: Vec<u64> = rows.clone().map(read).collect();
        self.slabs.check_batch(batch, &chains, coverage);
        let mut next = Vec::new();
        for (row, before) in rows.zip(chains) {
            if !is_skipped() {
                let tokens = self.write(batch, row, &clients[&row.sequence], before);
                next.push((*row, tokens));
            }
        }
        next
    }
}

/// Returns the answer of a request that runs alone.
fn answer(request: &Request, alphabet: u64) -> (Vec<TokenId>, FinishReason) {
    let mut before = request.prompt.iter().fold(0, |b, &token| chain(b, token));
    let mut answer = Vec::new();
    let reason = loop {
        let token = next_token(before, alphabet);
        before = chain(before, token);
        answer.push(token);
        let may_stop = answer.len() >= request.min_new_tokens as usize;
        if may_stop && request.stop_tokens.contains(&token) {
            break FinishReason::Stop;
        }
        if answer.len() == request.max_new_tokens as usize {
            break FinishReason::Length;
        }
    };
    (answer, reason)
}

/// Returns a hash of a whole block, never 0.
fn block_hash(block: impl Iterator<Item = TokenId>) -> u64 {
    block.fold(7, chain) | 1
}

/// A request that has not ended, and what the world knows about it.
pub(crate) struct Client {
    pub(crate) number: u64, // In the order of submission.
    pub(crate) is_first_choice: bool,
    pub(crate) request: Request,
    pub(crate) rules: Option<Diffusion>, // If it wants block diffusion.
    ahead: Vec<TokenId>,                 // The rest of the block.
    seen: Option<Vec<TokenId>>,          // The block that the last pass over all of it saw.
    has_pass: bool,                      // The pages hold that pass.
    pub(crate) output: Vec<TokenId>,
    pub(crate) answer: Vec<TokenId>, // The output of the same request when it runs alone.
    pub(crate) reason: FinishReason, // The expected reason, as far as it is known now.
    pub(crate) is_waiting: bool,
    pub(crate) times_bypassed: u32, // By later requests of the same tenant.
    pub(crate) may_await_prefix: bool, // Since it came, the scheduler has deferred a request.
    pub(crate) computed: Option<usize>, // Tokens, while it runs and as far as it is known.
    pub(crate) scored: usize,       // The prompt tokens that have given logits.
    pub(crate) was_admitted: bool,
    pub(crate) preempted: u32,
    pub(crate) rows: u64,                     // That were computed for it.
    pub(crate) paused_steps: u32,             // In a row; it had its page in each of them.
    pub(crate) last_token_at: Option<Micros>, // Or the time of the admission, if that is known.
    pub(crate) arrived: Micros,
    pub(crate) policies: u64, // How often the tenants' policies were set before.
    pub(crate) public: Vec<Vec<TokenId>>, // The prefixes that its tenant could use when it came.
}

impl Client {
    /// Creates the client of a request, with the answer that the fake model gives.
    pub(crate) fn new(
        number: u64,
        request: Request,
        diffusion: Option<Diffusion>,
        alphabet: u64,
    ) -> Client {
        let rules = diffusion.filter(|_| request.is_diffused);
        let (answer, reason) = match rules {
            Some(rules) => blocks::answer(&request, rules, alphabet),
            None => answer(&request, alphabet),
        };
        let mut client = Client {
            number,
            is_first_choice: true,
            request,
            rules,
            ahead: Vec::new(),
            seen: None,
            has_pass: false,
            output: Vec::new(),
            answer,
            reason,
            is_waiting: true,
            times_bypassed: 0,
            may_await_prefix: false,
            computed: None,
            scored: 0,
            was_admitted: false,
            preempted: 0,
            rows: 0,
            paused_steps: 0,
            last_token_at: None,
            arrived: 0,
            policies: 0,
            public: Vec::new(),
        };
        client.begin_block();
        client
    }

    /// Returns the size of a block, if the request wants block diffusion, or 1.
    pub(crate) fn block(&self) -> usize {
        self.rules.map_or(1, |rules| rules.block as usize)
    }

    /// Returns how the request's blocks are filled.
    pub(crate) fn rules(&self) -> Diffusion {
        self.rules.expect("the request wants block diffusion")
    }

    fn begin_block(&mut self) {
        let rest = self.known().next_multiple_of(self.block()) - self.known();
        self.ahead = vec![MASK; rest];
        self.seen = None;
        self.has_pass = false;
    }

    /// Notes that the request has lost its pages.
    pub(crate) fn lose_pages(&mut self) {
        self.computed = None;
        self.has_pass = false;
    }

    /// Returns what the next pass over the block computes.
    pub(crate) fn next_pass(&self) -> NextPass {
        let seen = self.seen.as_ref().map(|seen| (&**seen, self.has_pass));
        blocks::next_pass(self.rules(), &self.block_tokens(), seen)
    }

    /// Returns how many tokens were computed before a row: all before it, or before its block.
    fn computed_before(&self, row: &Row) -> usize {
        match self.is_unmasking(row.start as usize) {
            true => self.known() / self.block() * self.block(),
            false => row.start as usize,
        }
    }

    /// Returns the tokens of the block that is filled.
    pub(crate) fn block_tokens(&self) -> Vec<TokenId> {
        let begin = self.known() / self.block() * self.block();
        let known = (begin..self.known()).map(|position| self.token(position));
        known.chain(self.ahead.iter().copied()).collect()
    }

    /// Returns whether a row from `start` on is a pass over a block.
    pub(crate) fn is_unmasking(&self, start: usize) -> bool {
        let (known, block) = (self.known(), self.block());
        !known.is_multiple_of(block) && start >= known / block * block
    }

    /// Returns the hash of the block at a position whose token is known, if keys are not causal.
    fn block_hash(&self, position: usize) -> u64 {
        match self.rules {
            Some(rules) if !rules.is_causal => {
                let begin = position / self.block() * self.block();
                block_hash((begin..begin + self.block()).map(|at| self.token(at)))
            }
            _ => 0,
        }
    }

    /// Takes what a pass over the block draws, and returns the samples. Sample `fails_at` fails.
    pub(crate) fn unmask(&mut self, tokens: &[TokenId], fails_at: Option<usize>) -> Vec<Sampled> {
        if let Some(failed) = fails_at {
            self.fail();
            let mut sampled = vec![Sampled::Void; tokens.len()];
            sampled[failed] = Sampled::Failed;
            return sampled;
        }
        let block = self.block_tokens();
        let pass = self.next_pass();
        if pass.row.len() == block.len() {
            self.seen.get_or_insert_default().clone_from(&pass.tokens);
            self.has_pass = true;
        }
        if tokens.is_empty() {
            return Vec::new();
        }
        let places = pass.unknown;
        let known = block.len() - self.ahead.len();
        for (place, &token) in places.zip(tokens) {
            if token != MASK {
                self.ahead[place - known] = token;
            }
        }
        let is_final = self
            .ahead
            .iter()
            .take(self.answer.len() - self.output.len());
        if !is_final.clone().any(|token| *token == MASK) {
            let is_final: Vec<TokenId> = is_final.copied().collect();
            let expected = &self.answer[self.output.len()..][..is_final.len()];
            assert_eq!(is_final, expected, "D2: the same block as alone");
            self.output.extend(is_final);
            self.begin_block();
        }
        let sample = |&token: &TokenId| match token {
            MASK => Sampled::Void,
            token => Sampled::Token(token),
        };
        tokens.iter().map(sample).collect()
    }

    /// Returns whether the request is a running decode: all of its tokens except one are computed.
    pub(crate) fn is_decode(&self) -> bool {
        self.rules.is_none() && self.computed == Some(self.known() - 1)
    }

    /// Returns whether the request takes a place in the queue.
    pub(crate) fn takes_place(&self) -> bool {
        self.is_first_choice && !self.was_admitted
    }

    /// Returns the greatest number of pages that the request can use, including one to copy from.
    pub(crate) fn max_pages(&self) -> usize {
        let tokens = self.request.prompt.len() + self.request.max_new_tokens as usize;
        let tokens = tokens.next_multiple_of(self.block());
        tokens.div_ceil(PAGE_TOKENS) + 1
    }

    /// Returns the number of known tokens: the prompt and the output so far.
    pub(crate) fn known(&self) -> usize {
        self.request.prompt.len() + self.output.len()
    }

    pub(crate) fn token(&self, position: usize) -> TokenId {
        let prompt = &self.request.prompt;
        match position.checked_sub(prompt.len()) {
            None => prompt[position],
            Some(position) => self.output[position],
        }
    }

    /// Returns whether prompt tokens before the last one have still to give logits.
    pub(crate) fn is_scoring(&self) -> bool {
        self.request.scores_prompt && self.scored + 1 < self.request.prompt.len()
    }

    /// Returns how many of a row's logits are scores: the token that follows is known.
    pub(crate) fn scores_of(&self, row: &Row) -> usize {
        let first = row.end() - row.logits as usize;
        let scores = (self.known() - 1).saturating_sub(first);
        scores.min(row.logits as usize)
    }

    /// Returns the samples of a row's scores. Sample `fails_at` fails.
    pub(crate) fn score(&mut self, scores: usize, fails_at: Option<usize>) -> Vec<Sampled> {
        let mut sampled = vec![Sampled::Void; scores];
        if let Some(failed) = fails_at.and_then(|at| sampled.get_mut(at)) {
            *failed = Sampled::Failed;
            self.fail();
        }
        sampled
    }

    /// Appends the tokens of a row while its drafts are right, and returns the row's samples.
    /// Sample `fails_at` fails instead, and sample `defers_at` is deferred.
    pub(crate) fn receive(
        &mut self,
        tokens: &[TokenId],
        drafts: &[TokenId],
        fails_at: Option<usize>,
        defers_at: Option<usize>,
    ) -> Vec<Sampled> {
        let mut sampled = vec![Sampled::Void; tokens.len()];
        for (index, &token) in tokens.iter().enumerate() {
            if fails_at == Some(index) {
                self.fail();
                sampled[index] = Sampled::Failed;
                break;
            }
            if defers_at == Some(index) {
                sampled[index] = Sampled::Deferred;
                break;
            }
            let expected = self.answer[self.output.len()];
            assert_eq!(token, expected, "D2: the same token as alone");
            self.output.push(token);
            self.begin_block();
            sampled[index] = Sampled::Token(token);
            if self.output.len() == self.answer.len() || drafts.get(index) != Some(&token) {
                break;
            }
        }
        sampled
    }

    /// Returns how many of the known tokens are the start of a public prefix.
    pub(crate) fn public_tokens(&self) -> usize {
        let common = |prefix: &Vec<TokenId>| {
            let known = (0..self.known()).map(|position| self.token(position));
            prefix
                .iter()
                .zip(known)
                .take_while(|(a, b)| **a == *b)
                .count()
        };
        self.public.iter().map(common).max().unwrap_or(0)
    }

    /// Returns whether one of the request's deadlines has expired at `now`.
    pub(crate) fn is_late(&self, now: Micros) -> bool {
        let has_expired = |limit: Option<Micros>| {
            limit.is_some_and(|limit| now >= self.arrived.saturating_add(limit))
        };
        has_expired(self.request.ends_within)
            || self.output.is_empty() && has_expired(self.request.first_token_within)
    }

    pub(crate) fn fail(&mut self) {
        self.end(FinishReason::Error);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.reason == FinishReason::Error
    }

    /// From now on expects the request to end for `reason`, with the output that it has.
    pub(crate) fn end(&mut self, reason: FinishReason) {
        self.reason = reason;
        self.answer.truncate(self.output.len());
    }
}
