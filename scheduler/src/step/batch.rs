//! What one step computes: plain data, which the model reads.
//!
//! Invariant: a row's page table covers positions `0..row.end()`, no more.

use crate::pages::PageTables;
use crate::{PAGE_TOKENS, Page, SequenceId, TokenId};

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose tokens.
    pub sequence: SequenceId,
    /// Position of the first token; everything before it is in the pages already.
    pub start: u32,
    /// After how many of the row's last tokens the logits are needed: none in the midst of a prompt, one at its end and
    /// in a decode, and one more for each drafted token.
    pub logits: u32,
    first_token: u32,
    token_count: u32,
    first_page: u32,
    page_count: u32,
}

impl Row {
    /// Tokens in the row; at least one.
    #[expect(clippy::len_without_is_empty, reason = "a row is never empty")]
    pub fn len(&self) -> usize {
        self.token_count as usize
    }

    /// The position after the last token.
    pub fn end(&self) -> usize {
        self.start as usize + self.len()
    }
}

/// The keys and values of a whole page, to be copied before any row is computed. The rows then overwrite what differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Written by nobody in this step.
    pub from: Page,
    /// A page of one row of this step.
    pub to: Page,
}

/// The rows of one step, each sequence at most once. Its buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    copies: Vec<PageCopy>,
    rows: Vec<Row>,
    tokens: Vec<TokenId>,          // All rows' tokens, in the order of the rows.
    pub(crate) tables: PageTables, // A scheduler keeps those of all that run here, from step to step.
    logits: usize,
}

impl Batch {
    /// A batch with no rows.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// A scheduler's: so many rows, tokens, and pages of a sequence at most.
    pub(crate) fn with_capacity(rows: usize, tokens: usize, pages: usize) -> Batch {
        Batch {
            rows: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(tokens),
            tables: PageTables::new(rows, pages),
            ..Batch::default()
        }
    }

    /// Adds a copy to be made before the rows are computed.
    pub fn push_copy(&mut self, copy: PageCopy) {
        self.copies.push(copy);
    }

    /// Adds a row: `tokens` stand at positions `start..` of `sequence`, whose page table up to there is `pages`. The last
    /// `logits` of them want logits.
    ///
    /// # Panics
    /// If `tokens` is empty or fewer than `logits`, or `pages` do not cover exactly positions `0..start + tokens.len()`.
    pub fn push_row(
        &mut self,
        sequence: SequenceId,
        start: usize,
        tokens: &[TokenId],
        pages: &[Page],
        logits: usize,
    ) {
        let first_page = self.tables.append(pages);
        let table = (first_page, pages.len());
        self.push_row_of(sequence, start, (tokens, &[]), table, logits);
    }

    /// As [`Batch::push_row`], with drafted tokens after the known ones, and a page table that is here: where it begins, and
    /// how many pages of it are the row's.
    pub(crate) fn push_row_of(
        &mut self,
        sequence: SequenceId,
        start: usize,
        (known, drafts): (&[TokenId], &[TokenId]),
        (first_page, page_count): (usize, usize),
        logits: usize,
    ) {
        let count = known.len() + drafts.len();
        assert!(count > 0, "a row computes something");
        assert!(logits <= count, "logits follow tokens of the row");
        let covered = (start + count).div_ceil(PAGE_TOKENS);
        assert_eq!(page_count, covered, "M9: the pages cover the row exactly");
        self.rows.push(Row {
            sequence,
            start: start as u32,
            logits: logits as u32,
            first_token: self.tokens.len() as u32,
            token_count: count as u32,
            first_page: first_page as u32,
            page_count: page_count as u32,
        });
        self.tokens.extend_from_slice(known);
        self.tokens.extend_from_slice(drafts);
        self.logits += logits;
    }

    /// Removes all rows and keeps the buffers.
    pub fn clear(&mut self) {
        self.clear_rows();
        self.tables.clear();
    }

    /// Removes all rows, but not the page tables that are kept here.
    pub(crate) fn clear_rows(&mut self) {
        self.copies.clear();
        self.rows.clear();
        self.tokens.clear();
        self.logits = 0;
    }

    /// What is copied before the rows are computed; no page is the target of two copies.
    pub fn copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// The rows: decodes first, then prefill chunks.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The tokens of one of this batch's rows.
    pub fn tokens(&self, row: &Row) -> &[TokenId] {
        &self.tokens[row.first_token as usize..][..row.len()]
    }

    /// The page table of one of this batch's rows: position `p` is in page `p / PAGE_TOKENS`, slot `p % PAGE_TOKENS`.
    pub fn pages(&self, row: &Row) -> &[Page] {
        self.tables
            .slice(row.first_page as usize, row.page_count as usize)
    }

    /// Tokens in all rows together.
    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens whose logits are wanted, over all rows.
    pub fn logits_count(&self) -> usize {
        self.logits
    }
}

/// What came of the logits after one token. A row's entries stand in the order of its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The sequence goes on with this token. When it is what the row drafted in this place, the row's next entry counts
    /// too.
    Token(TokenId),
    /// Nothing was drawn: an earlier entry of the row was not as drafted, or ended the sequence.
    Void,
    /// The row cannot be used: its sequence ends with [`FinishReason::Error`](crate::FinishReason::Error), and nothing
    /// that this step computed for it is kept.
    Failed,
}
