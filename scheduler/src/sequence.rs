//! A request's life: queued, running, queued again when it is preempted, gone.
//!
//! Invariant: of `tokens`, the first `computed` are in the pages of `table`; there is always at least one more, which the
//! next step computes. Prefill is when there are several, decode when there is one: nothing else tells them apart.
//! Invariant: a queued sequence holds no page.

use crate::pages::PageTable;
use crate::queue::Waiting;
use crate::step::Acceptance;
use crate::{
    FinishReason, Micros, Nanos, OutputRules, PAGE_TOKENS, Page, PublicPrefix, Request, Sampled,
    SequenceId, TenantId, TokenId,
};

/// Where a sequence is between `submit` and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Queued,
    Running,
}

/// A cached page that begins with the tokens that come after the computed ones. It is pinned until the step commits that
/// copies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingCopy {
    pub(crate) from: Page,
    pub(crate) tokens: usize, // Of it that are wanted; fewer than a page.
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) arrival: u64, // Its place among all requests; kept for life.
    pub(crate) tenant: TenantId,
    pub(crate) tokens: Vec<TokenId>, // The prompt, then the output.
    pub(crate) prompt_len: usize,
    pub(crate) public: Vec<PublicPrefix>, // Those that its tenant might use when it was submitted.
    pub(crate) public_tokens: usize,      // At the start, that are one of them; whole pages.
    pub(crate) output_rules: OutputRules,
    pub(crate) state: State,
    pub(crate) band: usize, // Its tenant's when it was admitted: the order among those that run does not move.
    pub(crate) computed: usize,
    pub(crate) table: PageTable,
    pub(crate) copy: Option<PendingCopy>,
    /// Prompt tokens found in the tree at the first admission; `None` before it.
    pub(crate) cached_tokens: Option<usize>,
    /// Prompt tokens charged to the tenant's rate with the request itself; `None` for another choice of one.
    pub(crate) rated_tokens: Option<u64>,
    pub(crate) estimate: Nanos, // Machine time that it will take, as far as one can tell.
    pub(crate) waited: Micros,  // Since its prompt had a part in a step.
    pub(crate) last_token_at: Micros, // Or when it was admitted.
    pub(crate) rested: u32,     // Steps in a row in which its decode paused.
    pub(crate) passed: u32,     // Others that were admitted while it was first and did not fit.
    pub(crate) preempted: u32,
    pub(crate) acceptance: Acceptance,
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
            tenant: request.tenant,
            prompt_len: request.prompt.len(),
            tokens: request.prompt,
            public: Vec::new(),
            public_tokens: 0,
            output_rules: OutputRules {
                min_new_tokens: request.min_new_tokens as usize,
                max_new_tokens: request.max_new_tokens as usize,
                stop_tokens: request.stop_tokens,
            },
            state: State::Queued,
            band: 0,
            computed: 0,
            table: PageTable::default(),
            copy: None,
            cached_tokens: None,
            rated_tokens: None,
            estimate: 0,
            waited: 0,
            last_token_at: arrived,
            rested: 0,
            passed: 0,
            preempted: 0,
            acceptance: Acceptance::new(),
        }
    }

    /// As the queue has it.
    pub(crate) fn as_waiting(&self) -> Waiting {
        Waiting {
            arrival: self.arrival,
            slot: self.id.slot(),
            estimate: self.estimate,
        }
    }

    /// Where the next row begins: after what is computed, and after what a pending copy brings.
    pub(crate) fn start(&self) -> usize {
        self.computed + self.copy.map_or(0, |copy| copy.tokens)
    }

    /// Known tokens that the next rows compute; at least one.
    pub(crate) fn remaining(&self) -> usize {
        self.tokens.len() - self.start()
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
        pages_for(self.tokens.len()).saturating_sub(self.table.len)
    }

    /// Makes room for all tokens that it can ever have, so that decoding never allocates.
    pub(crate) fn reserve(&mut self) {
        let most = self.prompt_len + self.output_rules.max_new_tokens;
        self.tokens.reserve_exact(most - self.tokens.len());
    }

    /// Whether the page of the next token is in the table already.
    pub(crate) fn has_page_for_next(&self) -> bool {
        self.start() < self.table.len * PAGE_TOKENS
    }

    /// Output tokens that may still come.
    pub(crate) fn output_left(&self) -> usize {
        self.output_rules.max_new_tokens - self.output_len()
    }

    /// Appends the drawn tokens of a row: the first, and each next one whose draft came true. Returns how many, and how the
    /// request ends if it does.
    pub(crate) fn draw(
        &mut self,
        drafts: &[TokenId],
        sampled: &[Sampled],
    ) -> (usize, Option<FinishReason>) {
        let mut drawn = 0;
        for (place, entry) in sampled.iter().enumerate() {
            let ending = match entry {
                Sampled::Token(token) => {
                    drawn += 1;
                    let ending = self.push(*token);
                    if ending.is_none() && drafts.get(place) == Some(token) {
                        self.computed += 1;
                        continue;
                    }
                    ending
                }
                Sampled::Failed => Some(FinishReason::Error),
                Sampled::Void => panic!("a token was due"),
            };
            let rest = &sampled[place + 1..];
            assert!(
                rest.iter().all(|entry| *entry == Sampled::Void),
                "nothing more was due"
            );
            return (drawn, ending);
        }
        (drawn, None)
    }

    /// Appends a token. Returns how the request ends if this token ends it.
    fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.tokens.push(token);
        self.output_rules.ending(token, self.output_len())
    }
}
