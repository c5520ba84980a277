//! The placement of each token of a batch: its position, the page that holds its keys and values,
//! and its rotary angles.
//!
//! Invariant: the placement depends on the batch alone, so it is computed once per step for all
//! layers.

use std::ops::Range;

use sterna_kernels::{PAGE_TOKENS, SPAN_TOKENS, Span};
use sterna_scheduler::Batch;

use crate::checkpoint::{ModelConfig, RopeScaling};

// The scheduler and the kernels have the same page size.
const _: () = assert!(PAGE_TOKENS == sterna_scheduler::PAGE_TOKENS);

/// The fixed cost of a query, in units of the cost of one key.
const QUERY_COST: u64 = 32;

/// Consecutive tokens of one sequence whose keys and values go to one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageWrite {
    pub(super) page: usize,
    /// The slot of the first token.
    pub(super) slot: usize,
    /// The index of the first token in the batch.
    pub(super) first_token: usize,
    pub(super) tokens: usize,
}

/// The placement of the tokens of a batch. Steps reuse its buffers.
pub(super) struct Placement {
    kinds: Vec<LayerKind>,
    max_tokens: usize,
    rows: Vec<usize>,      // By token: the index of its row in the batch.
    positions: Vec<usize>, // By token.
    visible: Vec<usize>,   // By token: the last position that the token attends to.
    writes: Vec<PageWrite>,
    logits: Vec<usize>,
}

/// What layers of one kind have in common: the local ones, or the others.
struct LayerKind {
    rotary: Option<Rotary>, // None if queries and keys are not rotated.
    window: Option<usize>,  // The number of tokens that a token attends to, itself included.
    cost: Vec<u64>,         // By token: the attention cost of all tokens before it.
}

/// The kinds of layers by their index. A model without local layers has the first one only.
pub(super) const GLOBAL: usize = 0;
pub(super) const LOCAL: usize = 1;

impl LayerKind {
    fn new(rotary: Option<Rotary>, window: Option<usize>, max_tokens: usize) -> LayerKind {
        LayerKind {
            rotary,
            window,
            cost: Vec::with_capacity(max_tokens + 1),
        }
    }

    /// Returns how many of the first keys of a sequence are too far away for the token at a
    /// position. It may be negative.
    fn hidden(&self, position: usize) -> isize {
        let hidden = |window: usize| (position + 1) as isize - window as isize;
        self.window.map_or(Span::NONE_HIDDEN, hidden)
    }

    /// Returns the position at which the first span begins that holds a key for the token at a
    /// position.
    fn first_span(&self, position: usize) -> usize {
        self.hidden(position).max(0) as usize / SPAN_TOKENS * SPAN_TOKENS
    }
}

/// Rotary frequencies, and the angles of the tokens.
struct Rotary {
    frequencies: Vec<f32>,
    factor: f32,         // Of cosines and sines.
    rotations: Vec<f32>, // By token: rotary_dim / 2 cosines, then as many sines.
}

impl Rotary {
    fn new(scaling: &RopeScaling, theta: f64, rotary_dim: usize, max_tokens: usize) -> Rotary {
        Rotary {
            frequencies: scaling.frequencies(theta, rotary_dim),
            factor: scaling.attention_factor(),
            rotations: Vec::with_capacity(max_tokens * rotary_dim),
        }
    }

    fn push(&mut self, position: usize) {
        let angle = |frequency: &f32| f64::from(position as f32 * frequency);
        let angles = self.frequencies.iter().map(angle);
        let factor = self.factor;
        self.rotations
            .extend(angles.clone().map(|angle| angle.cos() as f32 * factor));
        self.rotations
            .extend(angles.map(|angle| angle.sin() as f32 * factor));
    }
}

impl Placement {
    /// Allocates the memory for `max_tokens` tokens.
    pub(super) fn new(config: &ModelConfig, max_tokens: usize) -> Placement {
        let rotary = |scaling, theta| Rotary::new(scaling, theta, config.rotary_dim, max_tokens);
        let global = rotary(&config.rope_scaling, config.rope_theta);
        let local = config.local.as_ref();
        let is_rotated = local.is_none_or(|local| !local.rotates_alone);
        let global = LayerKind::new(is_rotated.then_some(global), None, max_tokens);
        let local = local.map(|local| {
            let rotary = rotary(&RopeScaling::None, local.rope_theta);
            LayerKind::new(Some(rotary), Some(local.window), max_tokens)
        });
        Placement {
            kinds: std::iter::once(global).chain(local).collect(),
            max_tokens,
            rows: Vec::with_capacity(max_tokens),
            positions: Vec::with_capacity(max_tokens),
            visible: Vec::with_capacity(max_tokens),
            writes: Vec::with_capacity(max_tokens),
            logits: Vec::with_capacity(max_tokens),
        }
    }

    /// Places the tokens of `batch`.
    ///
    /// # Panics
    /// If there are more than `max_tokens` tokens, if two rows write to one page, or if a row
    /// writes to a page that is copied.
    pub(super) fn place(&mut self, batch: &Batch) {
        let tokens = batch.token_count();
        assert!(
            tokens <= self.max_tokens,
            "a step has {tokens} tokens, but the limit is {}",
            self.max_tokens
        );
        self.clear();
        for (index, row) in batch.rows().iter().enumerate() {
            let (start, first_token) = (row.start as usize, self.positions.len());
            let seen = row.end() + row.tokens_behind as usize;
            for position in start..row.end() {
                let visible = match row.block as usize {
                    0 => position,
                    size => seen.min((position / size + 1) * size) - 1,
                };
                self.push_token(index, position, visible);
            }
            let pages = batch.pages(row).iter().enumerate();
            let written = pages.take(row.end().div_ceil(PAGE_TOKENS));
            for (index, page) in written.skip(start / PAGE_TOKENS) {
                let begin = start.max(index * PAGE_TOKENS);
                let end = row.end().min((index + 1) * PAGE_TOKENS);
                self.writes.push(PageWrite {
                    page: page.index(),
                    slot: begin % PAGE_TOKENS,
                    first_token: first_token + begin - start,
                    tokens: end - begin,
                });
            }
            let of_row = row.logits_range();
            let index = |position| first_token + position - start;
            self.logits.extend(index(of_row.start)..index(of_row.end));
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
        self.visible.clear();
        for kind in &mut self.kinds {
            if let Some(rotary) = &mut kind.rotary {
                rotary.rotations.clear();
            }
            kind.cost.clear();
            kind.cost.push(0);
        }
        self.writes.clear();
        self.logits.clear();
    }

    fn push_token(&mut self, row: usize, position: usize, visible: usize) {
        self.rows.push(row);
        self.positions.push(position);
        self.visible.push(visible);
        for kind in &mut self.kinds {
            if let Some(rotary) = &mut kind.rotary {
                rotary.push(position);
            }
            let before = kind.cost.last().copied().unwrap_or(0);
            let keys = visible - kind.first_span(position);
            kind.cost.push(before + keys as u64 + QUERY_COST);
        }
    }

    /// Returns the maximum number of tokens.
    pub(super) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Returns the number of tokens.
    pub(super) fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// Returns the index of a token's row in the batch.
    pub(super) fn row(&self, token: usize) -> usize {
        self.rows[token]
    }

    /// Returns the last position that a token attends to: its own, or the end of its block.
    pub(super) fn visible(&self, token: usize) -> usize {
        self.visible[token]
    }

    /// Returns how many of the first keys of its sequence are too far away for a token in a layer
    /// of a kind. It may be negative.
    pub(super) fn hidden(&self, kind: usize, token: usize) -> isize {
        self.kinds[kind].hidden(self.positions[token])
    }

    /// Returns the position at which the first span begins that holds a key for a token in a layer
    /// of a kind.
    pub(super) fn first_span(&self, kind: usize, token: usize) -> usize {
        self.kinds[kind].first_span(self.positions[token])
    }

    /// Returns the cosines and sines of a token's angles in a layer of a kind, if the layer rotates
    /// queries and keys.
    pub(super) fn rotation(&self, kind: usize, token: usize) -> Option<(&[f32], &[f32])> {
        let rotary = self.kinds[kind].rotary.as_ref()?;
        let half = rotary.frequencies.len();
        Some(rotary.rotations[token * 2 * half..][..2 * half].split_at(half))
    }

    /// Returns the writes to pages; the pages ascend.
    pub(super) fn writes(&self) -> &[PageWrite] {
        &self.writes
    }

    /// Returns the tokens that get logits, in the order of the rows.
    pub(super) fn logits(&self) -> &[usize] {
        &self.logits
    }

    /// Divides the attention of `kv_heads` groups of `group` query heads into `parts` shares of
    /// equal cost, in a layer of a kind. The cost follows the number of keys. The shares are
    /// contiguous, and some may be empty.
    ///
    /// The keys of a group are read once in each share that has a part of it. So the group of a
    /// token that is alone in its row is cut between spans, if the token sees several and at most
    /// `max_spans`, and other groups between query heads. The drafts after a token do not pay for a
    /// cut between spans (`benches/record/engine.md`).
    pub(super) fn attention_shares(
        &self,
        kind: usize,
        (kv_heads, group): (usize, usize),
        max_spans: usize,
        parts: usize,
    ) -> impl Iterator<Item = Range<AttentionCut>> + Clone {
        let all = &self.kinds[kind].cost;
        let of_head = all.last().copied().unwrap_or(0);
        let cut_at = move |part: usize| {
            if part == parts {
                return AttentionCut::before(kv_heads * self.tokens() * group);
            }
            let cost = of_head * kv_heads as u64 * part as u64 / parts as u64;
            let (head, rest) = ((cost / of_head) as usize, cost % of_head);
            let token = all.partition_point(|&before| before <= rest) - 1;
            let of_token = all[token + 1] - all[token];
            let share_of = |count: usize| (rest - all[token]) * count as u64 / of_token;
            let item = (head * self.tokens() + token) * group;
            match self.spans(kind, token) {
                spans if self.is_alone(token) && (2..=max_spans).contains(&spans) => {
                    // The nearest end of a span.
                    match share_of(2 * spans).div_ceil(2) as usize {
                        cut if cut == spans => AttentionCut::before(item + group),
                        spans => AttentionCut { item, spans },
                    }
                }
                _ => AttentionCut::before(item + share_of(group) as usize),
            }
        };
        (0..parts).map(move |part| cut_at(part)..cut_at(part + 1))
    }

    /// Returns the number of spans that hold keys for a token in a layer of a kind.
    fn spans(&self, kind: usize, token: usize) -> usize {
        (self.visible(token) - self.first_span(kind, token)) / SPAN_TOKENS + 1
    }

    /// Returns whether the row of a token has no other token.
    fn is_alone(&self, token: usize) -> bool {
        let row = self.rows[token];
        (token == 0 || self.rows[token - 1] != row) && self.rows.get(token + 1) != Some(&row)
    }

    /// Cuts a share into the blocks that attention computes at once, in a layer of a kind.
    pub(super) fn attention_blocks(
        &self,
        kind: usize,
        mut share: Range<AttentionCut>,
        group: usize,
    ) -> impl Iterator<Item = AttentionBlock> {
        std::iter::from_fn(move || {
            if share.start >= share.end {
                return None;
            }
            let AttentionCut { item, spans: begin } = share.start;
            let (query, head) = (item / group, item % group);
            let token = query % self.tokens();
            let spans = self.spans(kind, token);
            let left = share.end.item - item;
            let is_cut = begin > 0 || left == 0;
            let end = if left == 0 { share.end.spans } else { spans };
            let heads = match is_cut {
                true => 0..group,
                false => head..group.min(head + left),
            };
            let tokens = match left / group {
                whole if whole > 0 && head == 0 && !is_cut => self.neighbours(kind, token, whole),
                _ => 1,
            };
            share.start = match left {
                0 => share.end,
                _ => AttentionCut::before(item + tokens * heads.len()),
            };
            Some(AttentionBlock {
                kv_head: query / self.tokens(),
                heads,
                tokens: token..token + tokens,
                spans: begin..end,
                is_open: end < spans,
            })
        })
    }

    /// Returns how many tokens from `token` on, at most `limit`, are neighbours in one page of one
    /// sequence, of which each attends to one more token than the one before it, from the same span
    /// on.
    fn neighbours(&self, kind: usize, token: usize, limit: usize) -> usize {
        if self.visible[token] != self.positions[token] {
            return 1;
        }
        let position = self.positions[token];
        let in_page = PAGE_TOKENS - position % PAGE_TOKENS;
        let kind = &self.kinds[kind];
        let is_same_span = |i: usize| kind.first_span(position + i) == kind.first_span(position);
        let limit = limit.min(in_page);
        let limit = (1..limit).find(|i| !is_same_span(*i)).unwrap_or(limit);
        let rows = self.rows[token..].iter().zip(&self.visible[token..]);
        let next = rows.zip(self.visible[token]..).take(limit);
        next.take_while(|&((row, visible), expected)| {
            *row == self.rows[token] && *visible == expected
        })
        .count()
    }
}

/// Where a share of attention begins or ends: behind all queries before `item`, and behind the
/// first spans of the group that begins there.
///
/// An item is one query: `(kv head * tokens + token) * group + head of the group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AttentionCut {
    pub(super) item: usize,
    /// The spans of each query of the group that are before the cut; mostly 0.
    pub(super) spans: usize,
}

impl AttentionCut {
    /// Returns the cut before an item.
    pub(super) fn before(item: usize) -> AttentionCut {
        AttentionCut { item, spans: 0 }
    }

    /// Returns the first query that no share before the cut has begun.
    pub(super) fn next_item(self, group: usize) -> usize {
        self.item + if self.spans > 0 { group } else { 0 }
    }
}

/// Queries that attention computes at once: some heads of a group, at neighbouring positions of a
/// sequence, within one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AttentionBlock {
    pub(super) kv_head: usize,
    /// The indices of the heads in the group.
    pub(super) heads: Range<usize>,
    /// The indices of the tokens in the batch.
    pub(super) tokens: Range<usize>,
    /// The spans to compute, counted from the first one that holds a key for the queries. If they
    /// do not begin at 0, an earlier share has those before them.
    pub(super) spans: Range<usize>,
    /// Whether later shares have further spans.
    pub(super) is_open: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The positions of each row: a long chunk, two decodes, and a chunk that begins inside a page.
    const ROWS: [Range<usize>; 4] = [500..700, 40_000..40_001, 17..18, 9..50];

    fn placement() -> Placement {
        let kinds = [None, Some(512)].map(|window| LayerKind::new(None, window, 0));
        let mut placement = Placement {
            kinds: kinds.into(),
            max_tokens: 1000,
            rows: Vec::new(),
            positions: Vec::new(),
            visible: Vec::new(),
            writes: Vec::new(),
            logits: Vec::new(),
        };
        placement.clear();
        for (row, positions) in ROWS.into_iter().enumerate() {
            positions.for_each(|position| placement.push_token(row, position, position));
        }
        placement
    }

    #[test]
    fn every_span_of_a_query_is_in_one_block_and_shares_have_equal_costs() {
        let placement = placement();
        for kind in [GLOBAL, LOCAL] {
            check_shares(&placement, kind);
        }
    }

    fn check_shares(placement: &Placement, kind: usize) {
        for heads in [(5, 4), (1, 1), (3, 7), (1, 32)] {
            for parts in [1, 2, 3, 8, 50] {
                for max_spans in [0, 15, 512] {
                    check_parts(placement, kind, heads, (parts, max_spans));
                }
            }
        }
    }

    fn check_parts(
        placement: &Placement,
        kind: usize,
        (kv_heads, group): (usize, usize),
        (parts, max_spans): (usize, usize),
    ) {
        let tokens = placement.tokens();
        let (mut at, mut costs) = (AttentionCut::before(0), Vec::new());
        let mut is_group_cut = false;
        for share in placement.attention_shares(kind, (kv_heads, group), max_spans, parts) {
            assert_eq!(share.start, at, "shares are contiguous");
            let (mut outputs, mut cost) = (share.start.next_item(group), 0.0);
            for block in placement.attention_blocks(kind, share.clone(), group) {
                let first = block.tokens.start;
                let item = (block.kv_head * tokens + first) * group + block.heads.start;
                let spans = placement.spans(kind, first);
                assert_eq!((item, block.spans.start), (at.item, at.spans), "in order");
                assert!(!block.spans.is_empty() && block.spans.end <= spans);
                assert_eq!(block.is_open, block.spans.end < spans);
                assert!(block.tokens.len() == 1 || block.heads == (0..group));
                if block.spans != (0..spans) {
                    assert!((2..=max_spans).contains(&spans) && placement.is_alone(first));
                    assert_eq!((block.tokens.len(), block.heads.clone()), (1, 0..group));
                    is_group_cut = true;
                }
                let (row, position) = (placement.row(first), placement.visible(first));
                for (i, token) in block.tokens.clone().enumerate() {
                    assert_eq!(
                        (placement.row(token), placement.visible(token)),
                        (row, position + i)
                    );
                    let span = placement.first_span(kind, token);
                    assert_eq!(span, placement.first_span(kind, first));
                    let all = &placement.kinds[kind].cost;
                    let part = block.spans.len() as f64 / spans as f64;
                    let queries = block.heads.len() as f64;
                    cost += (all[token + 1] - all[token]) as f64 * queries * part;
                }
                assert!(position % PAGE_TOKENS + block.tokens.len() <= PAGE_TOKENS);
                if block.spans.start == 0 {
                    outputs += block.tokens.len() * block.heads.len();
                }
                at = match block.is_open {
                    true => AttentionCut {
                        item,
                        spans: block.spans.end,
                    },
                    false => AttentionCut::before(item + block.tokens.len() * block.heads.len()),
                };
            }
            assert_eq!(at, share.end, "blocks fill their share");
            assert_eq!(outputs, share.end.next_item(group));
            costs.push(cost);
        }
        assert_eq!(at, AttentionCut::before(kv_heads * tokens * group));
        let largest = costs.iter().copied().fold(0.0, f64::max);
        let mean = costs.iter().sum::<f64>() / parts as f64;
        // A span of each query of a group, or the longest query.
        let unit = match max_spans {
            512 => 1000.0_f64.max(2.0 * (SPAN_TOKENS * group) as f64),
            _ => 40_100.0,
        };
        assert!(largest <= mean + unit, "{costs:?} among {parts}");
        if max_spans == 512 && kind == GLOBAL && parts == 50 {
            assert!(is_group_cut, "the long decode is cut");
        }
    }
}
