//! The attention half of a layer: it walks each sequence's pages and calls the kernels on runs of them.
//!
//! Always true: a query reads every key and value from the page, after rounding to half precision, those
//! of its own step included; keys are reduced in spans of 256 absolute positions, in ascending order. So
//! neither chunks nor neighbours nor threads change a result.

use std::ops::{Range, RangeInclusive};

use sterna_kernels::{HugeSlice, KvPage, MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS, Span};
use sterna_scheduler::Batch;

use super::Pass;
use super::kv_store::{HeadPage, KvStore, write_in_order};
use super::linear::{Norm, Projections};
use super::placement::{AttentionBlock, Placement};
use super::pool::{ranges, split_rows};
use super::profile::Stage;

/// How many writes ahead of its use a page is asked for.
const WRITES_AHEAD: usize = 4;

/// How many tokens leave memory time for the keys of attention while their products are made: fewer wait for the weights themselves, and
/// the keys of more do not stay in the caches. (2B shape, 256 keys each, two Zen 4 cores, every other step of a run: 8 and 16 streams gain 1 %
/// of a step, 4 lose as much, 32 nothing that shows.)
const AHEAD_TOKENS: RangeInclusive<usize> = 5..=16;

/// Pages of a span.
const SPAN_PAGES: usize = SPAN_TOKENS / PAGE_TOKENS;

/// The attention half of a layer.
pub(super) struct Attention {
    pub(super) norm: Norm,
    /// Query, key, value.
    pub(super) qkv: Projections,
    pub(super) sub_norm: Option<Norm>,
    pub(super) output: Projections,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// What passes between the stages of attention, for all tokens of a step.
pub(super) struct AttentionBuffers {
    attended: HugeSlice<f32>, // [kv head][token][head of the group][d]: one head's keys stay in cache over its tokens.
}

impl AttentionBuffers {
    pub(super) fn new(max_tokens: usize, heads: usize, head_dim: usize) -> AttentionBuffers {
        AttentionBuffers {
            attended: HugeSlice::new(max_tokens * heads * head_dim),
        }
    }
}

impl Attention {
    /// hidden += what the projections `before` left in the products, if any; then leaves output(attention(norm(hidden))) there, to be added
    /// to the hidden states.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        before: Option<&Projections>,
        hidden: &mut [f32],
    ) {
        let tokens = pass.placement.tokens();
        let (kernels, width) = (pass.crew.kernels, self.qkv.columns());
        let before = before.map(|projections| projections.product(0, pass.products, tokens));
        pass.inputs
            .fill_blocks(pass.crew, &self.qkv, (hidden, width), tokens, |block| {
                if let Some(product) = before {
                    product.add_to(block.tokens, block.states);
                }
                self.norm.apply_all(kernels, block.states, block.rows);
            });
        pass.profile.end(Stage::Rows);
        self.multiply(pass);
        pass.profile.end(Stage::Products);
        self.store(pass);
        self.attend(pass);
        pass.profile.end(Stage::Attention);
        let attended = &pass.attention.attended;
        pass.inputs.fill(
            pass.crew,
            &self.output,
            tokens,
            |token, row, spare| match &self.sub_norm {
                Some(norm) => {
                    let spare = &mut spare[..row.len()];
                    self.gather(attended, (token, tokens), spare);
                    norm.apply(kernels, spare, row);
                }
                None => self.gather(attended, (token, tokens), row),
            },
        );
        pass.profile.end(Stage::Rows);
        self.output.multiply(pass.crew, pass.inputs, pass.products);
        pass.profile.end(Stage::Products);
    }

    /// Query, key and value of all tokens; and each worker asks for the keys and values that it will look at.
    fn multiply(&self, pass: &mut Pass<'_>) {
        let (placement, group) = (pass.placement, self.heads / self.kv_heads);
        let workers = pass.crew.pool.workers();
        let is_worth_it = AHEAD_TOKENS.contains(&placement.tokens());
        let keys = Keys {
            kv: pass.kv,
            layer: pass.layer,
            batch: pass.batch,
            placement,
        };
        let seen = |worker: usize| {
            let mut shares = placement.attention_shares(self.kv_heads, group, workers);
            let share = shares.nth(worker).filter(|_| is_worth_it);
            let places = keys.places(share.unwrap_or_default(), group);
            places.map(move |place| keys.kv.keys_and_values(keys.layer, place))
        };
        self.qkv
            .multiply_before(pass.crew, pass.inputs, pass.products, seen);
    }

    /// Takes the step's keys and values out of the products, rotates the keys by their position, and writes both to their pages.
    fn store(&self, pass: &mut Pass<'_>) {
        let (placement, layer, d) = (pass.placement, pass.layer, self.head_dim);
        let (writes, tokens) = (placement.writes(), placement.tokens());
        let product = |index| self.qkv.product(index, pass.products, tokens);
        let (keys, values) = (product(1), product(2));
        // An item is what one head writes to one page.
        let item = |index| write_in_order(writes, self.kv_heads, index);
        let place = |index| {
            let (head, write) = item(index);
            let page = write.page;
            HeadPage { head, page }
        };
        let shares = ranges(self.kv_heads * writes.len(), pass.crew.pool.workers());
        let places = shares
            .clone()
            .map(|share| place(share.start)..=place(share.end - 1));
        let parts = shares.zip(pass.kv.ranges_mut(layer, places));
        let kernels = pass.crew.kernels;
        pass.crew.pool.run_parts(parts, |_, (share, mut pages)| {
            let [mut key, mut value] = [[0.0; MAX_HEAD_DIM]; 2];
            let (key, value) = (&mut key[..d], &mut value[..d]);
            let mut ahead = share.clone().map(item);
            for (head, write) in ahead.by_ref().take(WRITES_AHEAD) {
                pages.prefetch(head, write);
            }
            for (head, write) in share.map(item) {
                if let Some((head, write)) = ahead.next() {
                    pages.prefetch(head, write);
                }
                let (k_page, v_page) = pages.page_mut(head, write.page);
                for i in 0..write.tokens {
                    let token = write.first_token + i;
                    let (cosines, sines) = placement.rotation(token);
                    keys.copy_part(token, head * d, key);
                    values.copy_part(token, head * d, value);
                    kernels.rope(key, d, cosines, sines);
                    kernels.store_kv(key, value, write.slot + i, k_page, v_page);
                }
            }
        });
    }

    /// Takes the queries out of the products, rotates them by their position, and lets each look at its keys.
    fn attend(&self, pass: &mut Pass<'_>) {
        let (placement, d) = (pass.placement, self.head_dim);
        let (tokens, group) = (placement.tokens(), self.heads / self.kv_heads);
        let queries = self.qkv.product(0, pass.products, tokens);
        let shares = placement.attention_shares(self.kv_heads, group, pass.crew.pool.workers());
        let attended = &mut pass.attention.attended[..tokens * self.heads * d];
        let parts = shares
            .clone()
            .zip(split_rows(attended, d, shares))
            .zip(&mut pass.crew.scratch);
        let keys = Keys {
            kv: pass.kv,
            layer: pass.layer,
            batch: pass.batch,
            placement,
        };
        let kernels = pass.crew.kernels;
        pass.crew
            .pool
            .run_parts(parts, |_, ((items, mut out), scratch)| {
                let state = &mut scratch.attention;
                // While a span is summed, as many keys are asked for, as far ahead as the longest span is long: so neither a short span nor
                // the end of a sequence keeps those that follow waiting.
                let blocks = placement.attention_blocks(items.clone(), group);
                let longest = blocks.map(|block| keys.places_of(&block).len()).max();
                let distance = longest.unwrap_or(0).min(SPAN_PAGES);
                let mut ahead = keys.places(items.clone(), group).skip(distance);
                for block in placement.attention_blocks(items, group) {
                    state.reset(block.heads.len(), block.tokens.len(), d);
                    for (position, token) in block.tokens.clone().enumerate() {
                        let (cosines, sines) = placement.rotation(token);
                        for (i, head) in block.heads.clone().enumerate() {
                            let query = state.query_mut(position, i);
                            let head = block.kv_head * group + head;
                            queries.copy_part(token, head * d, query);
                            kernels.rope(query, d, cosines, sines);
                        }
                    }
                    let (_, position) = placement.of(block.tokens.start);
                    let mut places = keys.places_of(&block);
                    for first in (0..=position).step_by(SPAN_TOKENS) {
                        let pages = keys.next_pages(&mut places, SPAN_PAGES);
                        let next = keys.next_pages(&mut ahead, pages.count);
                        let span = Span {
                            pages: pages.as_slice(),
                            next: next.as_slice(),
                            visible: (position + 1 - first).min(SPAN_TOKENS),
                        };
                        kernels.attention_span(span, state);
                    }
                    let size = block.tokens.len() * block.heads.len() * d;
                    let own = out.split_off_mut(..size).expect("a share's outputs");
                    kernels.attention_finish(state, own);
                }
            });
    }

    /// One token's attended heads, in the order of the heads.
    fn gather(&self, attended: &[f32], (token, tokens): (usize, usize), out: &mut [f32]) {
        let width = self.heads / self.kv_heads * self.head_dim;
        for (head, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&attended[(head * tokens + token) * width..][..width]);
        }
    }
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy)]
struct Keys<'a> {
    kv: &'a KvStore,
    layer: usize,
    batch: &'a Batch,
    placement: &'a Placement,
}

impl<'a> Keys<'a> {
    /// Where all keys are that some items see, in the order in which they are looked at.
    fn places(self, items: Range<usize>, group: usize) -> impl Iterator<Item = HeadPage> {
        let blocks = self.placement.attention_blocks(items, group);
        blocks.flat_map(move |block| self.places_of(&block))
    }

    /// Where all keys are that a block of queries sees; in the last of these pages stand all of the block.
    fn places_of(
        self,
        block: &AttentionBlock,
    ) -> impl ExactSizeIterator<Item = HeadPage> + use<'a> {
        let (row, position) = self.placement.of(block.tokens.start);
        let pages = &self.batch.pages(&self.batch.rows()[row])[..=position / PAGE_TOKENS];
        let head = block.kv_head;
        pages.iter().map(move |page| HeadPage {
            head,
            page: page.index(),
        })
    }

    /// The pages at the next places, up to `most`.
    fn next_pages(self, places: &mut impl Iterator<Item = HeadPage>, most: usize) -> SpanPages<'a> {
        let mut next = SpanPages {
            pages: [KvPage {
                keys: &[],
                values: &[],
            }; SPAN_PAGES],
            count: 0,
        };
        for (page, place) in next.pages.iter_mut().zip(places.take(most)) {
            *page = self.kv.head(self.layer, place);
            next.count += 1;
        }
        next
    }
}

/// Up to as many pages as a span has.
struct SpanPages<'a> {
    pages: [KvPage<'a>; SPAN_PAGES],
    count: usize,
}

impl<'a> SpanPages<'a> {
    fn as_slice(&self) -> &[KvPage<'a>] {
        &self.pages[..self.count]
    }
}
