//! What one step computes: plain data, which the model reads.
//!
//! Invariant: a row's page table covers positions `0..row.end()`, no more.

use crate::{PAGE_TOKENS, Page, SequenceId, TokenId};

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose tokens.
    pub sequence: SequenceId,
    /// Position of the first token; everything before it is in the pages already.
    pub start: u32,
    /// Whether the logits after the row's last token are needed.
    pub wants_logits: bool,
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

/// The rows of one step, each sequence at most once. Its buffers are reused from step to step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    rows: Vec<Row>,
    tokens: Vec<TokenId>, // All rows' tokens, in the order of the rows.
    pages: Vec<Page>,     // All rows' page tables, likewise.
    logits: usize,
}

impl Batch {
    /// A batch with no rows.
    pub fn new() -> Batch {
        Batch::default()
    }

    pub(crate) fn with_capacity(rows: usize, tokens: usize) -> Batch {
        Batch {
            rows: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(tokens),
            ..Batch::default()
        }
    }

    /// Adds a row: `tokens` stand at positions `start..` of `sequence`, whose page table up to there is `pages`.
    ///
    /// # Panics
    /// If `tokens` is empty, or `pages` do not cover exactly positions `0..start + tokens.len()`.
    pub fn push_row(
        &mut self,
        sequence: SequenceId,
        start: usize,
        tokens: &[TokenId],
        pages: &[Page],
        wants_logits: bool,
    ) {
        assert!(!tokens.is_empty(), "a row computes something");
        let covered = (start + tokens.len()).div_ceil(PAGE_TOKENS);
        assert_eq!(pages.len(), covered, "the pages cover the row exactly");
        self.rows.push(Row {
            sequence,
            start: start as u32,
            wants_logits,
            first_token: self.tokens.len() as u32,
            token_count: tokens.len() as u32,
            first_page: self.pages.len() as u32,
            page_count: pages.len() as u32,
        });
        self.tokens.extend_from_slice(tokens);
        self.pages.extend_from_slice(pages);
        self.logits += usize::from(wants_logits);
    }

    /// Removes all rows and keeps the buffers.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
        self.pages.clear();
        self.logits = 0;
    }

    /// The rows: decodes first, then prefill chunks, then what was admitted just now.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The tokens of one of this batch's rows.
    pub fn tokens(&self, row: &Row) -> &[TokenId] {
        &self.tokens[row.first_token as usize..][..row.len()]
    }

    /// The page table of one of this batch's rows: position `p` is in page `p / PAGE_TOKENS`, slot `p % PAGE_TOKENS`.
    pub fn pages(&self, row: &Row) -> &[Page] {
        &self.pages[row.first_page as usize..][..row.page_count as usize]
    }

    /// Tokens in all rows together.
    pub fn token_count(&self) -> usize {
        self.tokens.len()
    }

    /// Rows that want logits.
    pub fn logits_count(&self) -> usize {
        self.logits
    }
}

/// What came of the logits of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The sequence goes on with this token.
    Token(TokenId),
    /// The row cannot be used: its sequence ends with [`FinishReason::Error`](crate::FinishReason::Error), and nothing
    /// that this step computed for it is kept.
    Failed,
}
