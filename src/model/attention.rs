//! The attention half of a layer: it walks each sequence's pages and calls the kernels on runs of them.
//!
//! Always true: a query reads every key and value from the page, after rounding to half precision, those
//! of its own step included; keys are reduced in spans of 256 absolute positions, in ascending order. So
//! neither chunks nor neighbours nor threads change a result.

use sterna_kernels::{KvPage, PAGE_TOKENS, SPAN_TOKENS};

use super::Pass;
use super::linear::{Norm, Projections};
use super::pool::{ranges, split_rows};

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
    queries: Vec<f32>,  // [token][head][d]
    keys: Vec<f32>,     // [token][kv head][d]
    values: Vec<f32>,   // [token][kv head][d]
    attended: Vec<f32>, // [kv head][token][head of the group][d]: one head's keys stay in cache over its tokens.
}

impl AttentionBuffers {
    pub(super) fn new(
        max_tokens: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> AttentionBuffers {
        let room = |heads: usize| vec![0.0; max_tokens * heads * head_dim];
        AttentionBuffers {
            queries: room(heads),
            keys: room(kv_heads),
            values: room(kv_heads),
            attended: room(heads),
        }
    }
}

impl Attention {
    /// Leaves output(attention(norm(hidden))) in the products, to be added to the hidden states.
    pub(super) fn forward(&self, pass: &mut Pass<'_>, hidden: &[f32]) {
        let tokens = pass.placement.tokens();
        let (kernels, width) = (pass.crew.kernels, self.qkv.columns());
        pass.inputs
            .fill(pass.crew, &self.qkv, tokens, |token, row, _| {
                self.norm
                    .apply(kernels, &hidden[token * width..][..width], row);
            });
        self.qkv.multiply(pass.crew, pass.inputs, pass.products);
        self.rotate(pass);
        self.store(pass);
        self.attend(pass);
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
        self.output.multiply(pass.crew, pass.inputs, pass.products);
    }

    /// Takes queries, keys and values out of the products, and rotates queries and keys by their position.
    fn rotate(&self, pass: &mut Pass<'_>) {
        let (placement, tokens, head_dim) =
            (pass.placement, pass.placement.tokens(), self.head_dim);
        let product = |index| self.qkv.product(index, pass.products, tokens);
        let products = [product(0), product(1), product(2)];
        let (q, kv) = (self.heads * head_dim, self.kv_heads * head_dim);
        let shares = ranges(tokens, pass.crew.pool.workers());
        let queries = split_rows(&mut pass.attention.queries[..tokens * q], q, shares.clone());
        let keys = split_rows(&mut pass.attention.keys[..tokens * kv], kv, shares.clone());
        let values = split_rows(
            &mut pass.attention.values[..tokens * kv],
            kv,
            shares.clone(),
        );
        let parts = shares.zip(queries.zip(keys.zip(values)));
        let kernels = pass.crew.kernels;
        pass.crew
            .pool
            .run_parts(parts, |_, (tokens, (queries, (keys, values)))| {
                let rows = queries
                    .chunks_exact_mut(q)
                    .zip(keys.chunks_exact_mut(kv).zip(values.chunks_exact_mut(kv)));
                for (token, (query, (key, value))) in tokens.zip(rows) {
                    let (cosines, sines) = placement.rotation(token);
                    products[0].copy_row(token, query);
                    products[1].copy_row(token, key);
                    products[2].copy_row(token, value);
                    kernels.rope(query, head_dim, cosines, sines);
                    kernels.rope(key, head_dim, cosines, sines);
                }
            });
    }

    /// Writes the step's keys and values to their pages.
    fn store(&self, pass: &mut Pass<'_>) {
        let writes = pass.placement.writes();
        let (keys, values) = (&pass.attention.keys, &pass.attention.values);
        let mut pages: Vec<_> = pass
            .kv
            .layer_mut(pass.layer, writes.iter().map(|write| write.page))
            .collect();
        let shares = ranges(writes.len(), pass.crew.pool.workers());
        let parts = shares.clone().zip(split_rows(&mut pages, 1, shares));
        let (kernels, d) = (pass.crew.kernels, self.head_dim);
        pass.crew.pool.run_parts(parts, |_, (range, pages)| {
            for (write, page) in writes[range].iter().zip(pages) {
                for (head, (k_page, v_page)) in page.heads_mut().enumerate() {
                    for i in 0..write.tokens {
                        let at = ((write.first_token + i) * self.kv_heads + head) * d;
                        kernels.store_kv(
                            &keys[at..][..d],
                            &values[at..][..d],
                            write.slot + i,
                            k_page,
                            v_page,
                        );
                    }
                }
            }
        });
    }

    /// Lets each query look at its keys.
    fn attend(&self, pass: &mut Pass<'_>) {
        let (placement, tokens) = (pass.placement, pass.placement.tokens());
        let width = self.heads / self.kv_heads * self.head_dim;
        let shares = placement.attention_shares(self.kv_heads, pass.crew.pool.workers());
        let attended = &mut pass.attention.attended[..tokens * self.heads * self.head_dim];
        let parts = shares
            .clone()
            .zip(split_rows(attended, width, shares))
            .zip(&mut pass.crew.scratch);
        let (queries, kv, batch, layer) =
            (&pass.attention.queries, &*pass.kv, pass.batch, pass.layer);
        let kernels = pass.crew.kernels;
        pass.crew
            .pool
            .run_parts(parts, |_, ((items, out), scratch)| {
                for (item, out) in items.zip(out.chunks_exact_mut(width)) {
                    let (head, token) = (item / tokens, item % tokens);
                    let (row, position) = placement.of(token);
                    let query =
                        &queries[token * self.heads * self.head_dim + head * width..][..width];
                    let pages = batch.pages(&batch.rows()[row]);
                    scratch
                        .attention
                        .reset(self.heads / self.kv_heads, self.head_dim);
                    for (span, pages) in pages[..=position / PAGE_TOKENS]
                        .chunks(SPAN_PAGES)
                        .enumerate()
                    {
                        let visible = (position + 1 - span * SPAN_TOKENS).min(SPAN_TOKENS);
                        let run: [KvPage<'_>; SPAN_PAGES] = std::array::from_fn(|i| {
                            kv.head(pages[i.min(pages.len() - 1)].index(), layer, head)
                        });
                        kernels.attention_span(
                            query,
                            self.head_dim,
                            &run[..pages.len()],
                            visible,
                            &mut scratch.attention,
                        );
                    }
                    kernels.attention_finish(&scratch.attention, out);
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
