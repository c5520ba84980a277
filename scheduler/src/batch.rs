//! The batch that one step computes: plain data, which the model reads.
//!
//! Invariant: a row's page table covers exactly the positions up to the last one that a token of
//! the row attends to.

use std::ops::Range;

use crate::pages::PageTables;
use crate::{PAGE_TOKENS, Page, RowStates, SequenceId, TokenId};

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The sequence of the tokens.
    pub sequence: SequenceId,
    /// The position of the first token. The pages already hold everything before it.
    pub start: u32,
    /// The number of tokens of the row whose logits are needed: 0 inside a prompt, 1 at its end and
    /// in a decode, and 1 more for each draft token. In a prompt that is scored, all tokens whose
    /// logits were not needed before. In a pass over a block, those before mask tokens.
    pub logits: u32,
    /// The number of last tokens of the row behind those whose logits are needed.
    pub behind_logits: u32,
    /// The states that the row reads and writes, if the model has recurrent layers.
    pub states: Option<RowStates>,
    /// The number of last tokens of the row that the model drafts before the step: see
    /// [`Batch::set_drafts`]. Until then they are mask tokens.
    pub own_drafts: u32,
    /// If it is 0, a token attends to those up to its own. Otherwise the positions are divided into
    /// aligned blocks of this size, and a token attends to those up to the end of its block, or of
    /// the row and the tokens behind it.
    pub block: u32,
    /// The number of tokens behind the row that its tokens attend to as well. The pages hold their
    /// keys and values, as an earlier pass over the block left them.
    pub tokens_behind: u32,
    first_token: u32,
    token_count: u32,
    first_page: u32,
    page_count: u32,
}

impl Row {
    /// Returns the number of tokens in the row, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a row is never empty")]
    pub fn len(&self) -> usize {
        self.token_count as usize
    }

    /// Returns the position after the last token.
    pub fn end(&self) -> usize {
        self.start as usize + self.len()
    }

    /// Returns the positions whose logits are needed.
    pub fn logits_range(&self) -> Range<usize> {
        let end = self.end() - self.behind_logits as usize;
        end - self.logits as usize..end
    }
}

/// The contents of a row before the batch has it.
pub(crate) struct NewRow<'a> {
    pub(crate) sequence: SequenceId,
    pub(crate) start: usize,
    pub(crate) known: &'a [TokenId],
    pub(crate) drafts: &'a [TokenId],
    pub(crate) first_page: usize, // The index of its page table among all tables.
    pub(crate) page_count: usize, // Pages of the table up to the last token that is attended to.
    pub(crate) logits: usize,
    pub(crate) behind_logits: usize,
    pub(crate) own_drafts: usize,
    pub(crate) block: usize,
    pub(crate) tokens_behind: usize,
}

/// A copy of the keys and values of a whole page. The copies come before any row, and the rows then
/// overwrite the positions that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The source, which no row of this step writes.
    pub from: Page,
    /// The target, which is a page of one row of this step.
    pub to: Page,
}

/// The rows of one step; each sequence has at most one. The buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    copies: Vec<PageCopy>,
    rows: Vec<Row>,
    tokens: Vec<TokenId>,          // The tokens of all rows, in order.
    pub(crate) tables: PageTables, // In a scheduler: of all running sequences.
    logits: usize,
}

impl Batch {
    /// Creates a batch without rows.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Creates a batch for at most `rows` rows, `tokens` tokens, and `pages` pages per sequence.
    pub(crate) fn with_capacity(rows: usize, tokens: usize, pages: usize) -> Batch {
        Batch {
            rows: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(tokens),
            tables: PageTables::new(rows, pages),
            ..Batch::default()
        }
    }

    /// Adds a copy.
    pub fn push_copy(&mut self, copy: PageCopy) {
        self.copies.push(copy);
    }

    /// Adds a row: `tokens` at the positions from `start` of `sequence`. `pages` is the page table
    /// up to the end of the row. The last `logits` tokens need logits.
    ///
    /// # Panics
    /// If `tokens` is empty or shorter than `logits`, or `pages` does not cover exactly the
    /// positions `0..start + tokens.len()`.
    pub fn push_row(
        &mut self,
        sequence: SequenceId,
        start: usize,
        tokens: &[TokenId],
        pages: &[Page],
        logits: usize,
    ) {
        let first_page = self.tables.append(pages);
        self.push_planned(NewRow {
            sequence,
            start,
            known: tokens,
            drafts: &[],
            first_page,
            page_count: pages.len(),
            logits,
            behind_logits: 0,
            own_drafts: 0,
            block: 0,
            tokens_behind: 0,
        });
    }

    /// Adds a row whose tokens attend to all of their block: `tokens` at the positions from `start`
    /// of `sequence`, which need logits. `block` is the size of the blocks. `pages` is the page
    /// table up to the end of the block, and holds the keys and values of its other tokens.
    ///
    /// # Panics
    /// If `tokens` is empty, or `pages` does not end with the block of the last token.
    pub fn push_part(
        &mut self,
        sequence: SequenceId,
        start: usize,
        tokens: &[TokenId],
        pages: &[Page],
        block: usize,
    ) {
        let end = start + tokens.len();
        let first_page = self.tables.append(pages);
        self.push_planned(NewRow {
            sequence,
            start,
            known: tokens,
            drafts: &[],
            first_page,
            page_count: pages.len(),
            logits: tokens.len(),
            behind_logits: 0,
            own_drafts: 0,
            block,
            tokens_behind: end.next_multiple_of(block) - end,
        });
    }

    /// Adds a row of another batch, as it is there.
    pub fn push_row_of(&mut self, other: &Batch, row: &Row) {
        let first_page = self.tables.append(other.pages(row));
        let first_token = self.tokens.len();
        self.tokens.extend_from_slice(other.tokens(row));
        self.logits += row.logits as usize;
        self.rows.push(Row {
            first_token: first_token as u32,
            first_page: first_page as u32,
            ..*row
        });
    }

    /// Sets the size of the blocks of the last row: see [`Row::block`].
    ///
    /// # Panics
    /// If there is no row.
    pub fn set_block(&mut self, block: u32) {
        self.rows.last_mut().expect("a row").block = block;
    }

    /// Replaces the mask tokens of the rows with drafts of the model. `drafts` has them in the
    /// order of the rows.
    ///
    /// # Panics
    /// If `drafts` has another number of tokens.
    pub fn set_drafts(&mut self, mut drafts: &[TokenId]) {
        for row in &self.rows {
            let (own, rest) = drafts.split_at(row.own_drafts as usize);
            let end = (row.first_token + row.token_count) as usize;
            self.tokens[end - own.len()..end].copy_from_slice(own);
            drafts = rest;
        }
        assert!(drafts.is_empty(), "as many drafts as the rows want");
    }

    /// Sets the states that the last row reads and writes.
    ///
    /// # Panics
    /// If there is no row.
    pub fn set_states(&mut self, states: RowStates) {
        self.rows.last_mut().expect("a row").states = Some(states);
    }

    /// Adds a row whose page table is already here.
    #[inline]
    pub(crate) fn push_planned(&mut self, row: NewRow) {
        let count = row.known.len() + row.drafts.len();
        assert!(count > 0, "a row has at least one token");
        assert!(
            row.logits + row.behind_logits <= count,
            "a row has at most as many logits as tokens"
        );
        let covered = (row.start + count + row.tokens_behind).div_ceil(PAGE_TOKENS);
        assert_eq!(row.page_count, covered, "M9: the pages end with the row");
        self.rows.push(Row {
            sequence: row.sequence,
            start: row.start as u32,
            logits: row.logits as u32,
            behind_logits: row.behind_logits as u32,
            states: None,
            own_drafts: row.own_drafts as u32,
            block: row.block as u32,
            tokens_behind: row.tokens_behind as u32,
            first_token: self.tokens.len() as u32,
            token_count: count as u32,
            first_page: row.first_page as u32,
            page_count: row.page_count as u32,
        });
        self.tokens.extend_from_slice(row.known);
        self.tokens.extend_from_slice(row.drafts);
        self.logits += row.logits;
    }

    /// Removes all rows, copies and page tables, and keeps the buffers.
    pub fn clear(&mut self) {
        self.clear_rows();
        self.tables.clear();
    }

    /// Removes all rows and copies, and keeps the page tables.
    pub(crate) fn clear_rows(&mut self) {
        self.copies.clear();
        self.rows.clear();
        self.tokens.clear();
        self.logits = 0;
    }

    /// Returns the copies. No page is the target of two copies.
    pub fn copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// Returns the rows: decodes first, then prefill chunks.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the tokens of one of this batch's rows.
    pub fn tokens(&self, row: &Row) -> &[TokenId] {
        &self.tokens[row.first_token as usize..][..row.len()]
    }

    /// Returns the page table of one of this batch's rows. Position `p` is in page
    /// `p / PAGE_TOKENS` at offset `p % PAGE_TOKENS`.
    pub fn pages(&self, row: &Row) -> &[Page] {
        self.tables
            .slice(row.first_page as usize, row.page_count as usize)
    }

    /// Returns the number of tokens in all rows.
    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of tokens in all rows that need logits.
    pub fn logits_count(&self) -> usize {
        self.logits
    }
}

/// The result of sampling from the logits of one token. A row's results are in the order of its
/// tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The token that was drawn. If the row drafted this token here, the row's next result is valid
    /// too.
    Token(TokenId),
    /// No token was drawn, because an earlier result of the row differs from its draft or ends the
    /// sequence, or because the next token is known: the token is of a prompt that is scored.
    Void,
    /// No token was drawn, because what the draw needs is not known yet. The logits of this token
    /// are computed again in a later step.
    Deferred,
    /// The row failed: its sequence ends with [`FinishReason::Error`](crate::FinishReason::Error),
    /// and the scheduler keeps nothing that this step computed for it.
    Failed,
}
