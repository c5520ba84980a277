//! The attention half of a layer: it walks the pages of each sequence and calls the kernels on runs
//! of pages.
//!
//! Invariant: a query reads every key and value from its page, as the format of the KV store rounds
//! it, except those that are too far away in a layer whose tokens attend to a window. This includes
//! the keys and values of the query's own step. Keys are reduced in spans of 256 absolute
//! positions, in ascending order. So neither chunks nor neighbours nor threads change a
//! result.

use std::ops::{Range, RangeInclusive};

use sterna_kernels::{AttentionState, Kernels, MAX_HEAD_DIM, PAGE_TOKENS, SPAN_TOKENS, Span};
use sterna_scheduler::Batch;

use super::activations::{InputRows, Pending, Products, Projected};
use super::kv_store::{HeadPage, KvStore, write_in_order};
use super::linear::Projections;
use super::norm::Norm;
use super::placement::{AttentionBlock, AttentionCut, Placement};
use super::pool::{ranges, split_rows};
use super::product::Product;
use super::profile::Stage;
use super::workers::{ForwardContext, Scratch, Workers};
use crate::fault::{self, Place};

/// How many writes ahead a page is prefetched.
const WRITES_AHEAD: usize = 4;

/// The step sizes, in tokens, at which workers prefetch the keys of attention while they multiply.
///
/// With fewer tokens the products themselves wait for memory. The keys of more tokens do not stay
/// in the caches. Measured with the 2B shape on Zen 4: up to 1 % of a step.
const PREFETCH_TOKENS: RangeInclusive<usize> = 5..=16;

/// The most spans of a group that are cut among workers: 131,072 tokens. A worker has memory for
/// the results of as many.
pub(super) const MAX_CUT_SPANS: usize = 512;

/// The number of pages in a span.
const SPAN_PAGES: usize = SPAN_TOKENS / PAGE_TOKENS;

/// The attention half of a layer.
pub(super) struct Attention {
    /// The index of the layer, which finds its keys and values in the store.
    pub(super) layer: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Query, key, value.
    pub(super) qkv: Projections,
    /// The norms of each head of query and key before they are rotated, if the architecture has
    /// them.
    pub(super) head_norms: Option<HeadNorms>,
    /// The norm before `output`, if the architecture has one.
    pub(super) sub_norm: Option<Norm>,
    pub(super) output: Projections,
    /// The norm after `output`, if the architecture has one.
    pub(super) post_norm: Option<Norm>,
    /// Of which kind the layer is: its rotary frequencies, and how far its tokens see.
    pub(super) kind: usize,
    /// The values of a head that are rotated.
    pub(super) rotary_dim: usize,
    /// Whether the query projection also gives a gate for the output of each head.
    pub(super) has_gate: bool,
}

/// The norms of each head of query and key.
pub(super) struct HeadNorms {
    pub(super) query: Norm,
    pub(super) key: Norm,
}

impl Attention {
    /// Returns the half's output for `rows`, the normed residual. Writes the keys and values of the
    /// step's tokens to their pages.
    pub(super) fn forward<'m>(
        &'m self,
        context: &mut ForwardContext<'_>,
        rows: InputRows<'m>,
    ) -> Pending<'m> {
        let projected = self.project(context, rows);
        context.profile.end(Stage::Products);
        self.store(context, projected.product(1), projected.product(2));
        let attended = projected.attend(self.heads * self.head_dim, |products, attended| {
            self.attend(context, products.product(0), attended);
        });
        context.profile.end(Stage::Attention);

        let (tokens, norm) = (context.placement.tokens(), self.sub_norm.as_ref());
        let kernels = context.workers.kernels;
        let gather = |attended: &[f32], products: Products<'_>, token, row: &mut [f32]| {
            self.gather(attended, tokens, token, row);
            if self.has_gate {
                self.gate(kernels, products.product(0), token, row);
            }
        };
        let rows = attended.into_rows(context, &self.output, norm, gather);
        rows.multiply(context).into_pending(self.post_norm.as_ref())
    }

    /// Returns the rows of the query projection for each head.
    fn query_stride(&self) -> usize {
        self.head_dim * (1 + usize::from(self.has_gate))
    }

    /// Multiplies one token's heads by the sigmoids of their gates.
    fn gate(&self, kernels: Kernels, queries: Product<'_>, token: usize, row: &mut [f32]) {
        let d = self.head_dim;
        let [mut gate, mut plain] = [[0.0; MAX_HEAD_DIM]; 2];
        let (gate, plain) = (&mut gate[..d], &mut plain[..d]);
        for (head, values) in row.chunks_exact_mut(d).enumerate() {
            queries.copy_rows(token, head * self.query_stride() + d, gate);
            plain.copy_from_slice(values);
            kernels.sigmoid_gate(gate, plain, values);
        }
    }

    /// Returns the number of query heads that share a key-value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Projects to query, key and value. In steps of [`PREFETCH_TOKENS`], each worker also
    /// prefetches the keys and values that it will attend to.
    fn project<'m>(&self, context: &mut ForwardContext<'_>, rows: InputRows<'m>) -> Projected<'m> {
        let pages = KeyPages {
            kv: context.kv,
            layer: self.layer,
            kind: self.kind,
            batch: context.batch,
            placement: context.placement,
        };
        let count = context.workers.pool.workers();
        let is_worth_it = PREFETCH_TOKENS.contains(&context.placement.tokens());
        rows.multiply_and_prefetch(context.workers, |worker| {
            let placement = pages.placement;
            let heads = (self.kv_heads, self.group());
            let mut shares = placement.attention_shares(self.kind, heads, MAX_CUT_SPANS, count);
            let share = shares.nth(worker).filter(|_| is_worth_it).into_iter();
            let places = share.flat_map(move |share| pages.places(share, self.group()));
            places.map(move |place| pages.kv.head(pages.layer, place))
        })
    }

    /// Rotates the keys by their positions, and writes keys and values to their pages.
    fn store(&self, context: &mut ForwardContext<'_>, keys: Product<'_>, values: Product<'_>) {
        let (placement, d, rotated) = (context.placement, self.head_dim, self.rotary_dim);
        let (writes, dtype) = (placement.writes(), context.kv.dtype());
        // An item is what one head writes to one page.
        let item = |index| write_in_order(writes, self.kv_heads, index);
        let place = |index| {
            let (head, write) = item(index);
            let page = write.page;
            HeadPage { head, page }
        };
        let shares = ranges(self.kv_heads * writes.len(), context.workers.pool.workers());
        let places = shares.clone();
        let places = places.map(|share| place(share.start)..=place(share.end - 1));
        let parts = shares.zip(context.kv.ranges_mut(self.layer, places));
        let kernels = context.workers.kernels;
        let pool = &mut context.workers.pool;
        pool.run_parts(parts, |_, (share, mut pages)| {
            let [mut key, mut value, mut spare] = [[0.0; MAX_HEAD_DIM]; 3];
            let (key, value, spare) = (&mut key[..d], &mut value[..d], &mut spare[..d]);
            let mut ahead = share.clone().map(item);
            for (head, write) in ahead.by_ref().take(WRITES_AHEAD) {
                pages.prefetch(head, write);
            }
            for (head, write) in share.map(item) {
                if let Some((head, write)) = ahead.next() {
                    pages.prefetch(head, write);
                }
                let page = pages.page_mut(head, write.page);
                for i in 0..write.tokens {
                    let token = write.first_token + i;
                    match &self.head_norms {
                        None => keys.copy_rows(token, head * d, key),
                        Some(norms) => {
                            keys.copy_rows(token, head * d, spare);
                            norms.key.apply(kernels, spare, key);
                        }
                    }
                    values.copy_rows(token, head * d, value);
                    if let Some((cosines, sines)) = placement.rotation(self.kind, token) {
                        kernels.rope(&mut key[..rotated], rotated, cosines, sines);
                    }
                    kernels.store_kv(dtype, key, value, write.slot + i, page);
                    fault::pass(Place::TokenStored);
                }
            }
        });
    }

    /// Rotates the queries by their positions and attends.
    ///
    /// Writes to `attended`, `[kv head][token][head of the group][d]`. In this order the keys of
    /// one head stay in the cache for all its tokens.
    fn attend(&self, context: &mut ForwardContext<'_>, queries: Product<'_>, attended: &mut [f32]) {
        let (placement, d, group) = (context.placement, self.head_dim, self.group());
        let keys = KeyPages {
            kv: context.kv,
            layer: self.layer,
            kind: self.kind,
            batch: context.batch,
            placement,
        };
        let Workers {
            kernels,
            pool,
            scratch,
        } = &mut *context.workers;
        let (kernels, dtype) = (*kernels, keys.kv.dtype());
        let heads = (self.kv_heads, group);
        let shares = placement.attention_shares(self.kind, heads, MAX_CUT_SPANS, pool.workers());
        let outputs = shares.clone();
        let outputs = outputs.map(|share| share.start.next_item(group)..share.end.next_item(group));
        let parts = shares.clone().zip(split_rows(&mut *attended, d, outputs));
        let parts = parts.zip(scratch.iter_mut());
        pool.run_parts(parts, |_, ((share, mut out), scratch)| {
            let (state, saved) = (&mut scratch.attention, &mut scratch.saved_spans);
            let spare = &mut scratch.spare[..d];
            saved.clear();
            // While a span is summed, as many keys are prefetched. They are as far ahead as the
            // longest span is long, so that the keys after a short span arrive in time too.
            let blocks = placement.attention_blocks(self.kind, share.clone(), group);
            let longest = blocks.map(|block| keys.places_of(&block).len()).max();
            let distance = longest.unwrap_or(0).min(SPAN_PAGES);
            let mut ahead = keys.places(share.clone(), group).skip(distance);
            for block in placement.attention_blocks(self.kind, share, group) {
                self.set_queries(state, &block, (queries, placement, kernels), spare);
                fault::pass(Place::QueriesRotated);
                let visible = placement.visible(block.tokens.start);
                let hidden = placement.hidden(self.kind, block.tokens.start);
                let begin = placement.first_span(self.kind, block.tokens.start);
                let mut places = keys.places_of(&block);
                for span in block.spans.clone() {
                    let first = begin + span * SPAN_TOKENS;
                    let pages = keys.next_pages(&mut places, SPAN_PAGES);
                    let next = keys.next_pages(&mut ahead, pages.count);
                    let span = Span {
                        pages: &pages.pages[..pages.count],
                        next: &next.pages[..next.count],
                        visible: (visible + 1 - first).min(SPAN_TOKENS),
                        hidden: hidden - first as isize,
                    };
                    match block.spans.start {
                        0 => kernels.attention_span(dtype, span, state),
                        _ => kernels.attention_span_apart(dtype, span, state, saved),
                    }
                    fault::pass(Place::SpanAttended);
                }
                // A group that is cut has its outputs in the share in which it begins.
                if block.spans.start == 0 {
                    let size = block.tokens.len() * block.heads.len() * d;
                    let own = out.split_off_mut(..size);
                    let own = own.expect("the outputs of the share");
                    if !block.is_open {
                        kernels.attention_finish(state, own);
                    }
                }
                fault::pass(Place::BlockAttended);
            }
        });
        finish_cut_groups(kernels, shares, scratch, attended, [group, d]);
    }

    /// Sets the queries of a block, rotated by their positions.
    fn set_queries(
        &self,
        state: &mut AttentionState,
        block: &AttentionBlock,
        (queries, placement, kernels): (Product<'_>, &Placement, Kernels),
        spare: &mut [f32],
    ) {
        let (d, rotated, stride) = (self.head_dim, self.rotary_dim, self.query_stride());
        state.reset(block.heads.len(), block.tokens.len(), d);
        for (position, token) in block.tokens.clone().enumerate() {
            let rotation = placement.rotation(self.kind, token);
            for (i, head) in block.heads.clone().enumerate() {
                let query = state.query_mut(position, i);
                let head = block.kv_head * self.group() + head;
                match &self.head_norms {
                    None => queries.copy_rows(token, head * stride, query),
                    Some(norms) => {
                        queries.copy_rows(token, head * stride, spare);
                        norms.query.apply(kernels, spare, query);
                    }
                }
                if let Some((cosines, sines)) = rotation {
                    kernels.rope(&mut query[..rotated], rotated, cosines, sines);
                }
            }
        }
    }

    /// Copies one token's heads, in the order of the heads, from `attended`, which has `tokens`
    /// tokens.
    fn gather(&self, attended: &[f32], tokens: usize, token: usize, out: &mut [f32]) {
        let width = self.group() * self.head_dim;
        for (head, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&attended[(head * tokens + token) * width..][..width]);
        }
    }
}

/// Writes the outputs of the groups that are cut among workers, after all of them have computed
/// their parts. A group has `group` query heads of `d` values.
fn finish_cut_groups(
    kernels: Kernels,
    shares: impl Iterator<Item = Range<AttentionCut>> + Clone,
    scratch: &mut [Scratch],
    attended: &mut [f32],
    [group, d]: [usize; 2],
) {
    for (worker, share) in shares.clone().enumerate() {
        let item = share.end.item;
        if share.end.spans == 0 || share.start > AttentionCut::before(item) {
            continue;
        }
        let (own, later) = scratch[worker..].split_first_mut().expect("a worker");
        let continues = shares.clone().skip(worker + 1).zip(later);
        for (_, later) in continues.take_while(|(share, _)| share.start.item == item) {
            kernels.attention_resume(&mut own.attention, &later.saved_spans);
        }
        kernels.attention_finish(&own.attention, &mut attended[item * d..][..group * d]);
    }
}

/// The pages that hold the keys and values of a layer.
#[derive(Clone, Copy)]
struct KeyPages<'a> {
    kv: &'a KvStore,
    layer: usize,
    kind: usize,
    batch: &'a Batch,
    placement: &'a Placement,
}

impl<'a> KeyPages<'a> {
    /// Returns the places of all keys that a share reads, in this order.
    fn places(
        self,
        share: Range<AttentionCut>,
        group: usize,
    ) -> impl Iterator<Item = HeadPage> + use<'a> {
        let blocks = self.placement.attention_blocks(self.kind, share, group);
        blocks.flat_map(move |block| self.places_of(&block))
    }

    /// Returns the places of all keys of a block's spans.
    fn places_of(
        self,
        block: &AttentionBlock,
    ) -> impl ExactSizeIterator<Item = HeadPage> + use<'a> {
        let first = block.tokens.start;
        let (row, visible) = (self.placement.row(first), self.placement.visible(first));
        let begin = self.placement.first_span(self.kind, first) / PAGE_TOKENS;
        let pages = self.batch.pages(&self.batch.rows()[row]);
        let [start, end] = [block.spans.start, block.spans.end].map(|at| begin + at * SPAN_PAGES);
        let pages = &pages[start..end.min(visible / PAGE_TOKENS + 1)];
        let head = block.kv_head;
        pages.iter().map(move |page| HeadPage {
            head,
            page: page.index(),
        })
    }

    /// Returns the pages at the next places, at most `limit`.
    fn next_pages(
        self,
        places: &mut impl Iterator<Item = HeadPage>,
        limit: usize,
    ) -> SpanPages<'a> {
        let mut next = SpanPages {
            pages: [&[]; SPAN_PAGES],
            count: 0,
        };
        for (page, place) in next.pages.iter_mut().zip(places.take(limit)) {
            *page = self.kv.head(self.layer, place);
            next.count += 1;
        }
        next
    }
}

/// The pages of up to one span.
struct SpanPages<'a> {
    pages: [&'a [u8]; SPAN_PAGES],
    count: usize,
}

#[cfg(test)]
mod tests {
    use sterna_kernels::KvDtype;
    use sterna_scheduler::{Page, SequenceId};

    use super::*;
    use crate::checkpoint::Source;
    use crate::model::placement::GLOBAL;
    use crate::model::{LoadOptions, Model};

    /// What one layer's attention read and wrote, `[head][token][d]`.
    struct Observed {
        queries: Vec<Vec<f32>>,
        keys: Vec<Vec<f32>>,
        values: Vec<Vec<f32>>,
        attended: Vec<Vec<f32>>,
    }

    impl Attention {
        fn observe(&self, context: &mut ForwardContext<'_>, rows: InputRows<'_>) -> Observed {
            let (d, group, tokens) = (self.head_dim, self.group(), context.placement.tokens());
            let projected = self.project(context, rows);
            let heads = |index: usize, heads: usize, rotates: bool| -> Vec<Vec<f32>> {
                let one = |head: usize| {
                    let mut all = vec![0.0; tokens * d];
                    for (token, x) in all.chunks_mut(d).enumerate() {
                        projected.product(index).copy_rows(token, head * d, x);
                        if rotates {
                            let rotation = context.placement.rotation(GLOBAL, token);
                            let (cosines, sines) = rotation.unwrap();
                            context.workers.kernels.rope(x, d, cosines, sines);
                        }
                    }
                    all
                };
                (0..heads).map(one).collect()
            };
            let queries = heads(0, self.heads, true);
            let (keys, values) = (
                heads(1, self.kv_heads, true),
                heads(2, self.kv_heads, false),
            );
            self.store(context, projected.product(1), projected.product(2));
            let mut attended = vec![vec![0.0; tokens * d]; self.heads];
            projected.attend(self.heads * self.head_dim, |products, all| {
                self.attend(context, products.product(0), all);
                for (index, x) in all.chunks(d).enumerate() {
                    // The order is [kv head][token][head of the group].
                    let (query, i) = (index / group, index % group);
                    let head = query / tokens * group + i;
                    attended[head][query % tokens * d..][..d].copy_from_slice(x);
                }
            });
            Observed {
                queries,
                keys,
                values,
                attended,
            }
        }
    }

    /// Returns the causal attention of one head, computed in double precision.
    fn exact(queries: &[f32], keys: &[f32], values: &[f32], d: usize) -> Vec<f64> {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        let mut out = Vec::new();
        for (token, query) in queries.chunks(d).enumerate() {
            let keys = keys.chunks(d).take(token + 1);
            let scores: Vec<f64> = keys
                .map(|key| dot(query, key) / (d as f64).sqrt())
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..d).map(|i| {
                let values = values.iter().skip(i).step_by(d);
                let weighted = weights.iter().zip(values).map(|(w, v)| w * f64::from(*v));
                weighted.sum::<f64>() / sum
            }));
        }
        out
    }

    /// Returns conversations of the demo model, again and again.
    fn conversation(tokens: usize) -> Vec<u32> {
        let expected = include_str!("../../tests/fixtures/demo/expected.json");
        let expected: serde_json::Value = serde_json::from_str(expected).unwrap();
        let prompts = expected["prompts"].as_array().unwrap();
        let parts = prompts
            .iter()
            .flat_map(|prompt| [&prompt["prompt"], &prompt["continuation"]]);
        let text: Vec<u32> = parts
            .flat_map(|part| part.as_array().unwrap())
            .map(|token| token.as_u64().unwrap() as u32)
            .collect();
        text.into_iter().cycle().take(tokens).collect()
    }

    /// Returns the smallest cosine between the attention output of a head, over all tokens, and
    /// exact attention, and the mean of the cosines of all heads and tokens.
    fn cosines(dtype: KvDtype) -> (f64, f64) {
        let files: [(&str, &'static [u8]); 3] = [
            ("config.json", include_bytes!("../demo/config.json")),
            ("tokenizer.json", include_bytes!("../demo/tokenizer.json")),
            (
                "model.safetensors",
                include_bytes!("../demo/model.safetensors"),
            ),
        ];
        let options = LoadOptions {
            kv_dtype: dtype,
            max_step_tokens: 600,
            ..LoadOptions::new(Kernels::best(), 2)
        };
        let mut model = Model::load(&Source::embedded(&files), options).unwrap();
        let tokens = conversation(600);
        let pages: Vec<Page> = (0..38).map(Page::new).collect();
        let mut batch = Batch::new();
        batch.push_row(SequenceId::new(0, 0), 0, &tokens, &pages, 0);
        let mut kv = model.new_kv_store(pages.len()).unwrap();
        let mut hidden = Vec::new();
        model.embed(&batch, &mut hidden);
        let (d, group) = (model.config().head_dim, model.config().group());
        let (mut smallest, mut all) = (1.0_f64, Vec::new());
        let cosine = |computed: &[f32], exact: &[f64]| {
            let pairs = || {
                computed
                    .iter()
                    .map(|&x| f64::from(x))
                    .zip(exact.iter().copied())
            };
            let sum = |product: fn((f64, f64)) -> f64| pairs().map(product).sum::<f64>();
            sum(|(a, b)| a * b) / (sum(|(a, _)| a * a) * sum(|(_, b)| b * b)).sqrt()
        };
        for layer in 0..model.config().layers {
            let observed = model.observe_attention(
                layer,
                &hidden,
                &batch,
                &mut kv,
                |attention, context, rows| attention.observe(context, rows),
            );
            for (head, queries) in observed.queries.iter().enumerate() {
                let [keys, values] = [&observed.keys, &observed.values].map(|x| &x[head / group]);
                let exact = exact(queries, keys, values, d);
                let computed = &observed.attended[head];
                smallest = smallest.min(cosine(computed, &exact));
                let by_token = computed.chunks(d).zip(exact.chunks(d));
                all.extend(by_token.map(|(computed, exact)| cosine(computed, exact)));
            }
            model.run_layers(layer..layer + 1, &mut hidden, &batch, &mut kv);
        }
        (smallest, all.iter().sum::<f64>() / all.len() as f64)
    }

    #[test]
    fn attention_of_the_demo_is_close_to_that_of_exact_keys_and_values() {
        for dtype in KvDtype::ALL {
            let (head, token) = cosines(dtype);
            println!("{dtype}: {head:.6} in the worst head, {token:.6} in the mean of tokens");
            let bar = match dtype {
                KvDtype::F16 => 0.999_999,
                KvDtype::Bf16 => 0.9999,
                KvDtype::Int8 | KvDtype::Fp8E4m3 => 0.998,
                KvDtype::Fp8E5m2 => 0.99,
            };
            assert!(head >= bar && token >= bar, "{dtype}: {head}, {token}");
        }
    }
}
