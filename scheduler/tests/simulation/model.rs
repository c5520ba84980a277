//! The fake model, whose KV pages hold the tokens themselves, and the clients that know what they should be answered.

use std::collections::BTreeMap;

use sterna_scheduler::{
    Batch, FinishReason, Micros, PAGE_TOKENS, PageCopy, Request, Row, Sampled, SequenceId,
    TenantId, TokenId,
};

use crate::Counts;

/// SplitMix64.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    pub(crate) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What a real key and value depend on: the token and everything before it.
pub(crate) fn chain(before: u64, token: TokenId) -> u64 {
    mix(before.wrapping_mul(31).wrapping_add(u64::from(token) + 1))
}

/// The fake model's next token.
pub(crate) fn next_token(chain: u64, alphabet: u64) -> TokenId {
    (mix(chain) % alphabet) as TokenId
}

/// One token's place in the fake KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) tenant: TenantId,
    pub(crate) position: usize,
    pub(crate) token: TokenId,
    pub(crate) chain: u64,
}

/// The fake model: its memory, and what it answers.
pub(crate) struct Model {
    pub(crate) cells: Vec<Option<Cell>>,
    pub(crate) alphabet: u64,
}

impl Model {
    pub(crate) fn cell(&mut self, batch: &Batch, row: &Row, position: usize) -> &mut Option<Cell> {
        let page = batch.pages(row)[position / PAGE_TOKENS];
        &mut self.cells[page.index() * PAGE_TOKENS + position % PAGE_TOKENS]
    }

    /// Reads a row's history back, and returns the chain that it ends with. What another tenant has written may be read as
    /// far as it is a public prefix.
    pub(crate) fn read(&mut self, batch: &Batch, row: &Row, client: &Client) -> (u64, bool) {
        let mut before = 0;
        let mut is_shared = false;
        for position in 0..row.start as usize {
            let token = client.token(position);
            before = chain(before, token);
            let found = self.cell(batch, row, position).expect("it was computed");
            let expected = Cell {
                tenant: found.tenant,
                position,
                token,
                chain: before,
            };
            assert_eq!(
                found, expected,
                "M6: {row:?} reads what was not computed for it"
            );
            if found.tenant != client.request.tenant {
                let is_public = position < client.public_tokens();
                assert!(is_public, "M6: {row:?} reads a stranger's page");
                is_shared = true;
            }
        }
        (before, is_shared)
    }

    /// Computes a row after its history, and returns the tokens that follow those whose logits are wanted.
    pub(crate) fn write(
        &mut self,
        batch: &Batch,
        row: &Row,
        client: &Client,
        mut before: u64,
    ) -> Vec<TokenId> {
        let first_wanted = row.len() - row.logits as usize;
        let mut next = Vec::new();
        for (offset, &token) in batch.tokens(row).iter().enumerate() {
            before = chain(before, token);
            let position = row.start as usize + offset;
            *self.cell(batch, row, position) = Some(Cell {
                tenant: client.request.tenant,
                position,
                token,
                chain: before,
            });
            if offset >= first_wanted {
                next.push(next_token(before, self.alphabet));
            }
        }
        next
    }

    /// The row went wrong: what it has written is worth nothing.
    pub(crate) fn spoil(&mut self, batch: &Batch, id: SequenceId) {
        let mut rows = batch.rows().iter();
        let row = rows.find(|row| row.sequence == id).expect("it has a row");
        for position in row.start as usize..row.end() {
            *self.cell(batch, row, position) = None;
        }
    }

    /// Copies a page. What its row goes on from is the reader's own from now on, if it might read it.
    fn copy(&mut self, batch: &Batch, copy: PageCopy, clients: &BTreeMap<SequenceId, Client>) {
        let from = copy.from.index() * PAGE_TOKENS;
        let to = copy.to.index() * PAGE_TOKENS;
        self.cells.copy_within(from..from + PAGE_TOKENS, to);
        let mut rows = batch.rows().iter();
        let row = rows.find(|row| batch.pages(row).contains(&copy.to));
        let row = row.expect("a copy is for a row");
        let client = &clients[&row.sequence];
        for cell in self.cells[to..][..row.start as usize % PAGE_TOKENS].iter_mut() {
            let cell = cell.as_mut().expect("it was computed");
            let is_public = cell.position < client.public_tokens();
            assert!(
                is_public || cell.tenant == client.request.tenant,
                "M6: {copy:?} is a stranger's"
            );
            cell.tenant = client.request.tenant;
        }
    }

    /// Copies pages and reads every row's history, then writes the rows that are not `skipped`. Returns what follows those
    /// that want it.
    pub(crate) fn forward(
        &mut self,
        batch: &Batch,
        clients: &BTreeMap<SequenceId, Client>,
        seen: &mut Counts,
        mut skipped: impl FnMut() -> bool,
    ) -> Vec<(Row, Vec<TokenId>)> {
        for copy in batch.copies() {
            self.copy(batch, *copy, clients);
        }
        let rows = batch.rows().iter();
        let read = |row: &Row| {
            let (chain, is_shared) = self.read(batch, row, &clients[&row.sequence]);
            seen.public_hits += u64::from(is_shared);
            chain
        };
        let chains: Vec<u64> = rows.clone().map(read).collect();
        let mut next = Vec::new();
        for (row, before) in rows.zip(chains) {
            if !skipped() {
                let tokens = self.write(batch, row, &clients[&row.sequence], before);
                next.push((*row, tokens));
            }
        }
        next
    }
}

/// Somebody who waits for an answer.
pub(crate) struct Client {
    pub(crate) number: u64, // In the order of submission.
    pub(crate) request: Request,
    pub(crate) output: Vec<TokenId>,
    pub(crate) answer: Vec<TokenId>, // What the same request gets alone.
    pub(crate) reason: FinishReason, // How it should end, as far as is known now.
    pub(crate) is_waiting: bool,
    pub(crate) passed: u32, // Later requests of its tenant that were admitted before it.
    pub(crate) may_be_passed: bool, // It may have waited for a prefix.
    pub(crate) computed: Option<usize>, // Of its tokens, while it runs.
    pub(crate) was_admitted: bool,
    pub(crate) preempted: u32,
    pub(crate) missed: u32, // Steps in a row in which it could have decoded.
    pub(crate) last_token_at: Option<Micros>, // Or when it was admitted, if that is known.
    pub(crate) arrived: Micros,
    pub(crate) public: Vec<Vec<TokenId>>, // The prefixes that its tenant might use when it came.
}

impl Client {
    pub(crate) fn new(number: u64, request: Request, alphabet: u64) -> Client {
        // The public part is set by the world, which knows the tenants.
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
        Client {
            number,
            request,
            output: Vec::new(),
            answer,
            reason,
            is_waiting: true,
            passed: 0,
            may_be_passed: false,
            computed: None,
            was_admitted: false,
            preempted: 0,
            missed: 0,
            last_token_at: None,
            arrived: 0,
            public: Vec::new(),
        }
    }

    /// Whether the next step computes one token of it, if it runs.
    pub(crate) fn decodes(&self) -> bool {
        self.computed == Some(self.known() - 1)
    }

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

    /// Takes the tokens of a row as they leave the model, as long as the drafts come true.
    pub(crate) fn receive(
        &mut self,
        tokens: &[TokenId],
        drafts: &[TokenId],
        fails_at: Option<usize>,
    ) -> Vec<Sampled> {
        let mut sampled = vec![Sampled::Void; tokens.len()];
        for (place, &token) in tokens.iter().enumerate() {
            if fails_at == Some(place) {
                self.fail();
                sampled[place] = Sampled::Failed;
                break;
            }
            assert_eq!(token, self.answer[self.output.len()], "D2: as alone");
            self.output.push(token);
            sampled[place] = Sampled::Token(token);
            if self.output.len() == self.answer.len() || drafts.get(place) != Some(&token) {
                break;
            }
        }
        sampled
    }

    /// How far what it has is a public prefix.
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

    /// Whether it may have ended now for having taken too long.
    pub(crate) fn is_late(&self, now: Micros) -> bool {
        let passed = |limit: Option<Micros>| {
            limit.is_some_and(|limit| now >= self.arrived.saturating_add(limit))
        };
        passed(self.request.ends_within)
            || self.output.is_empty() && passed(self.request.first_token_within)
    }

    pub(crate) fn fail(&mut self) {
        self.reason = FinishReason::Error;
        self.answer.truncate(self.output.len());
    }
}
