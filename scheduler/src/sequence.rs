//! A request's life: queued, running, queued again when it is preempted, gone.
//!
//! Invariant: of `tokens`, the first `computed` are in the pages of `table`; there is always at least one more, which the
//! next step computes. Prefill is when there are several, decode when there is one: nothing else tells them apart.
//! Invariant: a queued sequence holds no page.

use crate::{FinishReason, Micros, PAGE_TOKENS, Page, Request, SequenceId, TenantId, TokenId};

/// Where a sequence is between `submit` and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Queued,
    Running,
}

/// A sequence's pages by position: first those in the tree, then its private ones.
#[derive(Debug, Default)]
pub(crate) struct PageTable {
    pub(crate) pages: Vec<Page>,
    pub(crate) in_tree: usize,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) arrival: u64, // Its place among all requests; kept for life.
    pub(crate) arrived: Micros,
    pub(crate) tenant: TenantId,
    pub(crate) tokens: Vec<TokenId>, // The prompt, then the output.
    pub(crate) prompt_len: usize,
    pub(crate) max_new_tokens: usize,
    min_new_tokens: usize,
    stop_tokens: Vec<TokenId>,
    pub(crate) state: State,
    pub(crate) computed: usize,
    pub(crate) table: PageTable,
    /// Prompt tokens found in the tree at the first admission; `None` before it.
    pub(crate) cached_tokens: Option<usize>,
}

/// Pages that `tokens` tokens occupy.
pub(crate) fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl Sequence {
    pub(crate) fn new(id: SequenceId, arrival: u64, arrived: Micros, request: Request) -> Sequence {
        Sequence {
            id,
            arrival,
            arrived,
            tenant: request.tenant,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            max_new_tokens: request.max_new_tokens as usize,
            min_new_tokens: request.min_new_tokens as usize,
            stop_tokens: request.stop_tokens,
            state: State::Queued,
            computed: 0,
            table: PageTable::default(),
            cached_tokens: None,
        }
    }

    /// Known tokens that are not computed yet; at least one.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn is_prefill(&self) -> bool {
        self.remaining() > 1
    }

    pub(crate) fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// The tokens whose keys and values may come from the cache: all but the last, whose logits are wanted.
    pub(crate) fn reusable_tokens(&self) -> &[TokenId] {
        &self.tokens[..self.tokens.len() - 1]
    }

    /// Pages still to be taken for the known tokens.
    pub(crate) fn missing_pages(&self) -> usize {
        pages_for(self.tokens.len()) - self.table.pages.len()
    }

    /// Makes room for all tokens and pages that it can ever have, so that decoding never allocates.
    pub(crate) fn reserve(&mut self) {
        let most = self.prompt_len + self.max_new_tokens;
        self.tokens.reserve_exact(most - self.tokens.len());
        self.table.pages.reserve_exact(pages_for(most));
    }

    /// Appends a token, and says how the request ends if it does.
    pub(crate) fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        let output = self.output_len();
        if output >= self.min_new_tokens && self.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        (output >= self.max_new_tokens).then_some(FinishReason::Length)
    }
}
