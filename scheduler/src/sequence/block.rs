//! The block that a sequence fills, if its output comes by block diffusion (Fast-dLLM v2, Wu et
//! al., arXiv:2509.26328).
//!
//! Blocks are aligned: each begins at a multiple of its size. Whole blocks of known tokens are
//! computed as a prompt is. The draw after the last of them gives the first token of the next
//! block. The rest of a block are mask tokens, which passes over the whole block replace: the token
//! at a place predicts the next one. Once all are known, the block is computed as a prompt is, and
//! only then its keys and values count as computed.
//!
//! With a block cache, a pass computes one part of the block if the part's first token is known. It
//! attends to the keys and values of the rest, which the last pass over the whole block left in the
//! pages. Nothing else is left of that pass, and each pass over a part replaces all of the part. So
//! a sequence that lost its pages computes the tokens of that pass once more, and goes on.
//!
//! Invariant: the known tokens and the tokens ahead of them are whole blocks.
//!
//! Invariant: a pass depends on the known tokens, the tokens ahead, and those of the last pass over
//! the whole block alone, so a sequence that lost its pages continues as if it had not.

use std::ops::Range;

use super::{DrawnTokens, Sequence};
use crate::{Diffusion, FinishReason, Micros, PAGE_TOKENS, Sampled, TokenId};

/// The block that a sequence fills.
#[derive(Debug)]
pub(super) struct MaskedBlock {
    rules: Diffusion,
    ahead: Vec<TokenId>,  // Between the known tokens and the end of the block.
    cached: Vec<TokenId>, // Those of the last pass over the whole block, if passes use them.
    is_cached: bool,      // The pages hold the keys and values of that pass.
}

/// What the next pass over a block computes.
enum Pass {
    /// The whole block.
    Whole,
    /// The whole block as it was in the last such pass, because its pages were lost.
    Restored,
    /// The part at these positions.
    Part(Range<usize>),
}

impl MaskedBlock {
    /// Begins the block after `known` tokens.
    pub(super) fn new(rules: Diffusion, known: usize) -> MaskedBlock {
        let size = rules.block as usize;
        let cached = if rules.has_block_cache { size } else { 0 };
        let mut block = MaskedBlock {
            rules,
            ahead: Vec::with_capacity(size),
            cached: Vec::with_capacity(cached),
            is_cached: false,
        };
        block.begin(known);
        block
    }

    fn size(&self) -> usize {
        self.rules.block as usize
    }

    /// Begins the block after `known` tokens, of which nothing ahead is known. If they are whole
    /// blocks, there is nothing ahead.
    fn begin(&mut self, known: usize) {
        let end = known.next_multiple_of(self.size());
        self.ahead.clear();
        self.ahead.resize(end - known, self.rules.mask_token);
        self.cached.clear();
        self.is_cached = false;
    }

    /// Returns the positions of the first part that has a mask token, and of the mask tokens in it
    /// from the first to the last. `known` is the number of known tokens.
    fn next_part(&self, known: usize) -> (Range<usize>, Range<usize>) {
        let (size, part) = (self.size(), self.rules.part as usize);
        let is_unknown = |place: &usize| self.is_unknown(self.ahead[place - known]);
        let end = known + self.ahead.len();
        let first = (known..end).find(is_unknown);
        let first = first.expect("a mask token");
        let begin = first / size * size + first % size / part * part;
        let part_end = (begin + part).min(end);
        let last = (first..part_end).rfind(is_unknown).expect("the first one");
        (begin..part_end, first..last + 1)
    }

    fn next_pass(&self, known: usize) -> Pass {
        if !self.rules.has_block_cache || self.cached.is_empty() {
            return Pass::Whole;
        }
        let (part, unknown) = self.next_part(known);
        if part.start == unknown.start || part.len() == self.size() {
            Pass::Whole
        } else if self.is_cached {
            Pass::Part(part)
        } else {
            Pass::Restored
        }
    }

    fn is_unknown(&self, token: TokenId) -> bool {
        token == self.rules.mask_token
    }
}

/// What a row has that fills a block, or that belongs to blocks.
#[derive(Default)]
pub(crate) struct BlockRow<'a> {
    /// The number of tokens of the block before the row.
    pub(crate) before: usize,
    /// The tokens after the known ones.
    pub(crate) ahead: &'a [TokenId],
    /// The number of last tokens behind those whose logits are needed.
    pub(crate) behind_logits: usize,
    /// The size of the blocks within which tokens attend to each other; 0 if a token attends to
    /// those up to its own.
    pub(crate) block: usize,
    /// The number of tokens of the block behind the row.
    pub(crate) tokens_behind: usize,
}

impl Sequence {
    /// Returns whether the output comes by block diffusion.
    #[inline]
    pub(crate) fn is_diffused(&self) -> bool {
        self.block.is_some()
    }

    /// Returns whether the next row replaces mask tokens: whatever is known of earlier blocks is
    /// computed.
    #[inline]
    pub(crate) fn is_unmasking(&self) -> bool {
        self.is_diffused() && self.ends_in_a_block()
    }

    fn ends_in_a_block(&self) -> bool {
        let size = self.block.as_ref().map_or(1, |block| block.size());
        let begin = self.len() / size * size;
        begin < self.len() && self.start() == begin
    }

    /// Returns the number of tokens that the next rows compute until something is drawn.
    pub(crate) fn left_to_draw(&self) -> usize {
        match &self.block {
            None => self.remaining(),
            Some(block) if self.is_unmasking() => self.pass_len(block),
            Some(block) => self.len() / block.size() * block.size() - self.start(),
        }
    }

    /// Returns how many of `tokens` tokens the next row can compute: a block or a part that is
    /// filled is computed as a whole, and so is a block whose known tokens attend to all of it.
    pub(crate) fn whole_rows(&self, tokens: usize) -> usize {
        match self.row_unit() {
            None => tokens,
            Some(unit) => tokens / unit * unit,
        }
    }

    /// Returns the least number of tokens of a row, if the sequence may compute more than `floor`
    /// in a step.
    pub(crate) fn least_row(&self, floor: usize) -> usize {
        let unit = self.row_unit();
        unit.unwrap_or_else(|| floor.min(self.left_to_draw()))
    }

    /// Returns the number of tokens that the next row computes together, if it may not compute
    /// fewer.
    fn row_unit(&self) -> Option<usize> {
        let block = self.block.as_ref()?;
        if self.is_unmasking() {
            return Some(self.pass_len(block));
        }
        (!block.rules.is_causal).then_some(block.size())
    }

    fn pass_len(&self, block: &MaskedBlock) -> usize {
        match block.next_pass(self.len()) {
            Pass::Whole | Pass::Restored => block.size(),
            Pass::Part(part) => part.len(),
        }
    }

    /// Returns the size of the blocks of the next row within which tokens attend to each other; 0
    /// if a token attends to those up to its own.
    pub(crate) fn row_block(&self) -> usize {
        match &self.block {
            Some(block) if self.is_unmasking() || !block.rules.is_causal => block.size(),
            _ => 0,
        }
    }

    /// Returns what the next row has beside known tokens, if the sequence fills blocks.
    #[inline]
    pub(crate) fn block_row(&self) -> BlockRow<'_> {
        match &self.block {
            Some(block) => self.row_of(block),
            None => BlockRow::default(),
        }
    }

    fn row_of<'a>(&'a self, block: &'a MaskedBlock) -> BlockRow<'a> {
        let size = self.row_block();
        if !self.is_unmasking() {
            return BlockRow {
                block: size,
                ..BlockRow::default()
            };
        }
        let (known, end) = (self.len(), self.len() + block.ahead.len());
        let (part, ahead) = match block.next_pass(known) {
            Pass::Whole => (end - size..end, &*block.ahead),
            Pass::Restored => {
                return BlockRow {
                    ahead: &block.cached,
                    block: size,
                    ..BlockRow::default()
                };
            }
            Pass::Part(part) => {
                let place = |position: usize| position.saturating_sub(known);
                let ahead = &block.ahead[place(part.start)..place(part.end)];
                (part, ahead)
            }
        };
        let (_, unknown) = block.next_part(known);
        BlockRow {
            before: size - (end - part.start),
            ahead,
            behind_logits: part.end - (unknown.end - 1),
            block: size,
            tokens_behind: end - part.end,
        }
    }

    /// Returns the tokens after the known ones up to the end of the block, if the sequence fills
    /// one.
    pub(crate) fn ahead(&self) -> &[TokenId] {
        self.block.as_ref().map_or(&[], |block| &block.ahead)
    }

    /// Returns how many tokens of the next pass need logits: each predicts the next position.
    /// Together these positions are the mask tokens of the first part of the block that has any.
    pub(crate) fn logits_of_pass(&self) -> usize {
        let block = self.block.as_ref().expect("a block to fill");
        match block.next_pass(self.len()) {
            Pass::Restored => 0,
            Pass::Whole | Pass::Part(_) => block.next_part(self.len()).1.len(),
        }
    }

    /// Returns the length of whole blocks that hold `tokens` tokens.
    pub(crate) fn with_whole_blocks(&self, tokens: usize) -> usize {
        let size = self.block.as_ref().map_or(1, |block| block.size());
        tokens.next_multiple_of(size)
    }

    /// Returns how many of the first `tokens` tokens are of whole blocks.
    pub(super) fn in_whole_blocks(&self, tokens: usize) -> usize {
        let size = self.block.as_ref().map_or(1, |block| block.size());
        tokens / size * size
    }

    /// Returns how many of the first `pages` pages of a cache a sequence can begin with. If known
    /// tokens attend to their block, the last page must end with one.
    pub(super) fn reusable_pages(&self, pages: usize) -> usize {
        let block = self.attended_block().max(1) as usize;
        let ends_a_block = |pages: &usize| (pages * PAGE_TOKENS).is_multiple_of(block);
        (0..=pages).rev().find(ends_a_block).unwrap_or(0)
    }

    /// Returns whether keys and values are those of causal attention.
    #[inline]
    pub(super) fn is_causal(&self) -> bool {
        self.attended_block() == 0
    }

    /// Returns the size of the blocks within which known tokens attend to each other, or 0 if a
    /// token attends to those up to its own.
    #[inline]
    pub(super) fn attended_block(&self) -> u32 {
        let rules = self.block.as_ref().map(|block| &block.rules);
        rules.map_or(0, Diffusion::attended_block)
    }

    /// Begins the next block after a draw.
    #[inline]
    pub(super) fn begin_block(&mut self) {
        let known = self.len();
        if let Some(block) = &mut self.block {
            block.begin(known);
        }
    }

    /// Commits the pass that computed the keys and values of the block again which were lost.
    pub(crate) fn commit_restored_block(&mut self) {
        let block = self.block.as_mut().expect("a block to fill");
        block.is_cached = true;
    }

    /// Notes that the sequence has lost its pages.
    pub(super) fn lose_block_cache(&mut self) {
        if let Some(block) = &mut self.block {
            block.is_cached = false;
        }
    }

    /// Commits a pass over the block: puts the tokens that were drawn in the places of mask tokens.
    /// If the whole block is known then, or the output ends in it, its tokens become output.
    /// Returns how many mask tokens were replaced, and how the sequence goes on.
    pub(crate) fn commit_pass(&mut self, now: Micros, sampled: &[Sampled]) -> (usize, DrawnTokens) {
        let known = self.len();
        let mut drawn = DrawnTokens::default();
        let block = self.block.as_mut().expect("a block to fill");
        let first = block.next_part(known).1.start;
        let is_kept = block.rules.has_block_cache;
        if let (Pass::Whole, true) = (block.next_pass(known), is_kept) {
            block.cached.clone_from(&block.ahead);
            block.is_cached = true;
        }
        let mut replaced = 0;
        for (place, entry) in (first - known..).zip(sampled) {
            match entry {
                Sampled::Token(token) => {
                    let is_unknown = block.is_unknown(block.ahead[place]);
                    assert!(is_unknown, "a known token stays");
                    assert!(!block.is_unknown(*token), "a mask token is not drawn");
                    block.ahead[place] = *token;
                    replaced += 1;
                }
                Sampled::Void => {}
                Sampled::Failed => {
                    drawn.ending = Some(FinishReason::Error);
                    return (replaced, drawn);
                }
                Sampled::Deferred => panic!("a block has no grammar"),
            }
        }
        assert!(replaced > 0, "each pass replaces a mask token");
        self.pacing.last_token_at = now;
        self.take_ahead(&mut drawn);
        (replaced, drawn)
    }

    /// Makes the tokens ahead output, if all are known up to the end of the block or of the output.
    fn take_ahead(&mut self, drawn: &mut DrawnTokens) {
        let block = self.block.as_mut().expect("a block to fill");
        let output = self.tokens.len() - self.prompt_len;
        for (place, token) in block.ahead.iter().enumerate() {
            if block.is_unknown(*token) {
                return;
            }
            drawn.ending = self.output_rules.ending(*token, output + place + 1);
            if drawn.ending.is_some() {
                block.ahead.truncate(place + 1);
                break;
            }
        }
        drawn.tokens = block.ahead.len();
        self.tokens.append(&mut block.ahead);
    }
}
