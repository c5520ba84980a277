//! Where each token of a batch stands: its position, the page that it is written to, the angles that it
//! is rotated by.
//!
//! Always true: this depends on the batch alone, so it is worked out once a step and serves all layers.

use std::ops::Range;

use sterna_kernels::PAGE_TOKENS;
use sterna_scheduler::Batch;

use super::config::ModelConfig;

/// Work on a query that does not depend on how many keys it sees, in keys.
const QUERY_COST: u64 = 32;

/// Consecutive tokens of one sequence that go to one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageWrite {
    pub(super) page: usize,
    /// The slot of the first token.
    pub(super) slot: usize,
    /// The tokens, as indices into the batch.
    pub(super) first_token: usize,
    pub(super) tokens: usize,
}

/// The batch, token by token. Its buffers are reused from step to step.
pub(super) struct Placement {
    inverse_frequencies: Vec<f32>,
    max_tokens: usize,
    rows: Vec<usize>,      // By token: the batch's row.
    positions: Vec<usize>, // By token.
    cosines: Vec<f32>,     // By token, head_dim / 2 each.
    sines: Vec<f32>,
    cost: Vec<u64>, // By token: of all tokens before it.
    writes: Vec<PageWrite>,
    logits: Vec<usize>,
}

impl Placement {
    /// Room for `max_tokens` tokens.
    pub(super) fn new(config: &ModelConfig, max_tokens: usize) -> Placement {
        let half = config.head_dim / 2;
        // Single precision where the reference has it: at far positions a more exact frequency would be
        // a different angle.
        let inverse_frequency = |i: usize| {
            let exponent = (2 * i) as f32 / config.head_dim as f32;
            1.0 / (config.rope_theta.powf(f64::from(exponent)) as f32)
        };
        Placement {
            inverse_frequencies: (0..half).map(inverse_frequency).collect(),
            max_tokens,
            rows: Vec::with_capacity(max_tokens),
            positions: Vec::with_capacity(max_tokens),
            cosines: Vec::with_capacity(max_tokens * half),
            sines: Vec::with_capacity(max_tokens * half),
            cost: Vec::with_capacity(max_tokens + 1),
            writes: Vec::with_capacity(max_tokens),
            logits: Vec::with_capacity(max_tokens),
        }
    }

    /// Works out where the tokens of `batch` stand.
    ///
    /// # Panics
    /// If there are more tokens than room, two rows write to one page, or a row to a page that is copied.
    pub(super) fn place(&mut self, batch: &Batch) {
        let tokens = batch.token_count();
        assert!(
            tokens <= self.max_tokens,
            "{tokens} tokens in a step, room for {}",
            self.max_tokens
        );
        self.clear();
        for (index, row) in batch.rows().iter().enumerate() {
            let (start, first_token) = (row.start as usize, self.positions.len());
            for position in start..row.end() {
                self.push_token(index, position);
            }
            let pages = batch.pages(row).iter().enumerate();
            for (index, page) in pages.skip(start / PAGE_TOKENS) {
                let begin = start.max(index * PAGE_TOKENS);
                let end = row.end().min((index + 1) * PAGE_TOKENS);
                self.writes.push(PageWrite {
                    page: page.index(),
                    slot: begin % PAGE_TOKENS,
                    first_token: first_token + begin - start,
                    tokens: end - begin,
                });
            }
            let end = first_token + row.len();
            self.logits.extend(end - row.logits as usize..end);
        }
        self.writes.sort_unstable_by_key(|write| write.page);
        assert!(
            self.writes
                .windows(2)
                .all(|pair| pair[0].page < pair[1].page),
            "two rows write to one page"
        );
        let is_written = |page| {
            let found = self.writes.binary_search_by_key(&page, |write| write.page);
            found.is_ok()
        };
        assert!(
            !batch
                .copies()
                .iter()
                .any(|copy| is_written(copy.from.index())),
            "a row writes to a page that is copied"
        );
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.positions.clear();
        self.cosines.clear();
        self.sines.clear();
        self.writes.clear();
        self.logits.clear();
        self.cost.clear();
        self.cost.push(0);
    }

    fn push_token(&mut self, row: usize, position: usize) {
        self.rows.push(row);
        self.positions.push(position);
        for &frequency in &self.inverse_frequencies {
            let angle = f64::from(position as f32 * frequency);
            self.cosines.push(angle.cos() as f32);
            self.sines.push(angle.sin() as f32);
        }
        let before = self.cost.last().copied().unwrap_or(0);
        self.cost.push(before + position as u64 + QUERY_COST);
    }

    /// How many tokens there are.
    pub(super) fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// The row of the batch and the position of a token.
    pub(super) fn of(&self, token: usize) -> (usize, usize) {
        (self.rows[token], self.positions[token])
    }

    /// Cosines and sines of a token's angles.
    pub(super) fn rotation(&self, token: usize) -> (&[f32], &[f32]) {
        let half = self.inverse_frequencies.len();
        (
            &self.cosines[token * half..][..half],
            &self.sines[token * half..][..half],
        )
    }

    /// What is written to which page; pages ascend.
    pub(super) fn writes(&self) -> &[PageWrite] {
        &self.writes
    }

    /// The tokens whose logits are wanted, in the order of the rows.
    pub(super) fn logits(&self) -> &[usize] {
        &self.logits
    }

    /// Shares the attention of `heads` heads among `parts`, by the keys to be seen. An item is `head *
    /// tokens + token`; the ranges are contiguous from 0, and some may be empty.
    pub(super) fn attention_shares(
        &self,
        heads: usize,
        parts: usize,
    ) -> impl Iterator<Item = Range<usize>> + Clone {
        let a_head = self.cost.last().copied().unwrap_or(0);
        let item_at = move |part: usize| {
            let cost = a_head * heads as u64 * part as u64 / parts as u64;
            let (head, rest) = if part == parts {
                (heads, 0)
            } else {
                ((cost / a_head) as usize, cost % a_head)
            };
            head * self.tokens() + self.cost.partition_point(|&before| before < rest)
        };
        (0..parts).map(move |part| item_at(part)..item_at(part + 1))
    }
}
