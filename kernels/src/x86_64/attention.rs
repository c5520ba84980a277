//! Attention, written once for AVX2 and AVX-512.
//!
//! A step that decodes has one position: each load of keys and values serves up to four heads of
//! the group. A chunk of a prompt has many positions: keys and values are widened to single
//! precision one panel at a time, and all queries are multiplied by the panel while it is in the
//! first-level cache, with the sums of a tile of queries in registers.
//!
//! Invariant: the sums of each query run in the order of the scalar definition.

use std::ops::Range;

use crate::attention::{AttentionRow, PAGE_TOKENS, PanelRow, Span};

/// The product of some rows and a panel.
pub(super) struct TileProduct<'a> {
    /// The queries, or the weights of the keys.
    pub(super) rows: &'a [AttentionRow],
    /// The element of each row that is multiplied by the panel's first row.
    pub(super) first: usize,
    /// The widened keys or values.
    pub(super) panel: &'a [PanelRow],
    /// The column of the output at which the product's 32 columns begin.
    pub(super) column: usize,
    /// Whether the product is added to the output instead of replacing it.
    pub(super) accumulates: bool,
}

/// Returns which of the later keys to prefetch while the values of the `index`th page are summed
/// in the given dimensions.
///
/// All later keys are prefetched once when all dimensions of all pages are summed. They are
/// prefetched in the order of memory, which helps the hardware's own prefetching.
#[inline(always)]
pub(super) fn next_keys(span: Span<'_>, index: usize, dimensions: Range<usize>) -> *const u16 {
    let page = &span.pages[index];
    let steps_a_page = page.values.len() / PAGE_TOKENS / dimensions.len();
    let step = dimensions.start / dimensions.len() * span.pages.len() + index;
    let keys = span.next.get(step / steps_a_page).unwrap_or(page).keys;
    let at = step % steps_a_page * PAGE_TOKENS * dimensions.len();
    keys.as_ptr().wrapping_add(at)
}

/// Defines the module `attention` for one instruction set. `registers` names its module of
/// `registers.rs`; the numbers say how many sums are kept in registers:
///
/// - `pages`: numbers of pages whose keys are multiplied at a time in a step that decodes.
/// - `value_chunks`: chunks of sixteen values of a head that are summed at a time there.
/// - `tile_rows`: numbers of queries of a tile, from 1 up.
/// - `tile_chunks`: chunks of sixteen columns of a tile that are summed at a time.
/// - `probe_sums`: independent sums of the probe.
macro_rules! attention_kernels {
    (
        features: $features:literal,
        registers: $registers:ident,
        pages: [$($pages:literal)*],
        value_chunks: $value_chunks:literal,
        tile_rows: [$($tile_rows:literal)*],
        tile_chunks: $tile_chunks:literal,
        probe_sums: $probe_sums:literal,
    ) => {
        pub(crate) mod attention {
            use std::array::from_fn;
            use std::hint::black_box;
            use std::ops::Range;

            use crate::attention::{
                AttentionRow, AttentionState, KvPage, PAGE_TOKENS, PANEL_COLUMNS, PanelRow,
                ProductBuffers, SPAN_TOKENS, Span,
            };
            use crate::elementwise::LANES;
            use crate::x86_64::attention::{TileProduct, next_keys};
            use crate::x86_64::registers::$registers::{
                broadcast, fused, lanes, load, narrow, widen, zero,
            };
            use crate::x86_64::registers::prefetch;
            use crate::x86_64::{CACHE_LINE_HALVES, blocks, padded};

            /// Heads whose sums are kept in registers in a step that decodes.
            const HEADS: usize = 4;

            /// Queries of the largest tile.
            const TILE_ROWS: usize = [$($tile_rows),*].len();

            /// Tokens whose values are widened at a time. With 32 columns, they take half of a
            /// first-level cache.
            const PANEL_TOKENS: usize = 128;

            /// Adds one span of keys and values to the state.
            #[target_feature(enable = $features)]
            pub(crate) fn attention_span(span: Span<'_>, state: &mut AttentionState) {
                if state.positions() == 1 {
                    one_position(span, state);
                } else {
                    many_positions(span, state);
                }
            }

            /// Computes attention for decodes. Prefetches the memory that it reads next.
            #[target_feature(enable = $features)]
            #[inline]
            fn one_position(span: Span<'_>, state: &mut AttentionState) {
                let (group, head_dim) = (state.group(), state.head_dim());
                let ProductBuffers { input, output, .. } = state.score_buffers();
                for heads in blocks(group, HEADS) {
                    let (queries, scores) = (&input[heads.clone()], &mut output[heads.clone()]);
                    by_count!(heads.len(), [1 2 3 4], H => {
                        score_heads::<H>(queries, span.pages, scores)
                    });
                }
                state.weigh_span(span.visible);
                let ProductBuffers { input, output, .. } = state.value_buffers();
                for heads in blocks(group, HEADS) {
                    let (weights, acc) = (&input[heads.clone()], &mut output[heads.clone()]);
                    by_count!(heads.len(), [1 2 3 4], H => {
                        sum_heads::<H>(weights, span, head_dim, acc)
                    });
                }
                state.merge_span();
            }

            /// Multiplies H queries by all keys of the span, several pages at a time: enough
            /// independent sums to keep both multipliers busy.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_heads<const H: usize>(
                queries: &[AttentionRow],
                pages: &[KvPage<'_>],
                scores: &mut [AttentionRow],
            ) {
                let mut first = 0;
                $(
                    while let Some(pages) = pages[first..].first_chunk::<$pages>() {
                        score_pages::<H, $pages>(queries, pages, first * PAGE_TOKENS, scores);
                        first += $pages;
                    }
                )*
            }

            /// Multiplies H queries by the keys of P pages, whose first token is `first`. The
            /// pages' values, which are needed soon, are prefetched.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_pages<const H: usize, const P: usize>(
                queries: &[AttentionRow],
                pages: &[KvPage<'_>; P],
                first: usize,
                scores: &mut [AttentionRow],
            ) {
                let head_dim = pages[0].keys.len() / PAGE_TOKENS;
                let queries: [&[[f32; 2]]; H] = from_fn(|h| queries[h].0[..head_dim].as_chunks().0);
                let values: [*const u16; P] = from_fn(|p| pages[p].values.as_ptr());
                let pages: [&[[u16; CACHE_LINE_HALVES]]; P] =
                    from_fn(|p| &pages[p].keys.as_chunks().0[..head_dim / 2]);
                let mut sums = [[zero(); P]; H];
                // The values are prefetched in the order of memory, which helps the hardware's own
                // prefetching.
                let steps_a_page = head_dim / 2 / P;
                let (mut page, mut steps_left, mut line) = (0, steps_a_page, values[0]);
                for i in 0..head_dim / 2 {
                    if P > 1 && steps_left == 0 {
                        page = (page + 1) % P;
                        (steps_left, line) = (steps_a_page, values[page]);
                    }
                    steps_left -= 1;
                    for _ in 0..P {
                        prefetch(line);
                        line = line.wrapping_add(CACHE_LINE_HALVES);
                    }
                    for half in [0, 1] {
                        let mut keys = [zero(); P];
                        for p in 0..P {
                            keys[p] = widen(&pages[p][i].as_chunks().0[half]);
                        }
                        for h in 0..H {
                            let query = broadcast(queries[h][i][half]);
                            for p in 0..P {
                                sums[h][p] = fused(query, keys[p], sums[h][p]);
                            }
                        }
                    }
                }
                for h in 0..H {
                    let scores = &mut scores[h].0[first..][..P * PAGE_TOKENS];
                    for (scores, sums) in scores.as_chunks_mut().0.iter_mut().zip(sums[h]) {
                        *scores = lanes(sums);
                    }
                }
            }

            /// Adds up the weighted values of H heads.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_heads<const H: usize>(
                weights: &[AttentionRow],
                span: Span<'_>,
                head_dim: usize,
                acc: &mut [AttentionRow],
            ) {
                const CHUNKS: usize = $value_chunks;
                let rest = head_dim / (CHUNKS * LANES) * (CHUNKS * LANES);
                for first in (0..rest).step_by(CHUNKS * LANES) {
                    sum_chunks::<H, CHUNKS>(weights, span, head_dim, first, acc);
                }
                for first in (rest..head_dim).step_by(LANES) {
                    sum_chunks::<H, 1>(weights, span, head_dim, first, acc);
                }
            }

            /// Adds up the 16 · J weighted values of each head from `first` on. Tokens that are not
            /// seen are not read. Later keys are prefetched.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_chunks<const H: usize, const J: usize>(
                weights: &[AttentionRow],
                span: Span<'_>,
                head_dim: usize,
                first: usize,
                acc: &mut [AttentionRow],
            ) {
                let weights: [&[f32]; H] = from_fn(|h| &weights[h].0[..span.visible]);
                let mut sums = [[zero(); J]; H];
                for (index, page) in span.pages.iter().enumerate() {
                    let next = next_keys(span, index, first..first + J * LANES);
                    let tokens = index * PAGE_TOKENS..span.visible.min((index + 1) * PAGE_TOKENS);
                    for (token, values) in tokens.zip(page.values.chunks_exact(head_dim)) {
                        let at = token % PAGE_TOKENS * J * LANES;
                        if at.is_multiple_of(CACHE_LINE_HALVES) {
                            for line in (0..J * LANES).step_by(CACHE_LINE_HALVES) {
                                prefetch(next.wrapping_add(at + line));
                            }
                        }
                        let values = values[first..][..J * LANES].as_chunks().0;
                        let mut widened = [zero(); J];
                        for (widened, values) in widened.iter_mut().zip(values) {
                            *widened = widen(values);
                        }
                        for h in 0..H {
                            let weight = broadcast(weights[h][token]);
                            for j in 0..J {
                                sums[h][j] = fused(weight, widened[j], sums[h][j]);
                            }
                        }
                    }
                }
                for h in 0..H {
                    let acc = acc[h].0[first..][..J * LANES].as_chunks_mut().0;
                    for (acc, sums) in acc.iter_mut().zip(sums[h]) {
                        *acc = lanes(sums);
                    }
                }
            }

            /// Computes attention of a chunk of a prompt. Each key and value is widened once, for
            /// the queries of all positions.
            #[target_feature(enable = $features)]
            #[inline]
            fn many_positions(span: Span<'_>, state: &mut AttentionState) {
                score_span(span, state);
                state.weigh_span(span.visible);
                sum_span(span, state);
                state.merge_span();
            }

            /// Multiplies all queries by the keys of the span.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_span(span: Span<'_>, state: &mut AttentionState) {
                let head_dim = state.head_dim();
                let ProductBuffers {
                    input: queries,
                    output: scores,
                    panel,
                } = state.score_buffers();
                let panel = &mut panel[..head_dim];
                let pairs = span.pages.chunks(PANEL_COLUMNS / PAGE_TOKENS);
                for (index, pair) in pairs.enumerate() {
                    widen_keys(pair, panel);
                    for rows in blocks(queries.len(), TILE_ROWS) {
                        let product = TileProduct {
                            rows: &queries[rows.clone()],
                            first: 0,
                            panel,
                            column: index * PANEL_COLUMNS,
                            accumulates: false,
                        };
                        multiply_tile(product, &mut scores[rows]);
                    }
                }
            }

            /// Adds up the span's weighted values for all queries.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_span(span: Span<'_>, state: &mut AttentionState) {
                let (group, head_dim) = (state.group(), state.head_dim());
                let seen = |row: usize| (span.visible + row / group).min(SPAN_TOKENS);
                let ProductBuffers {
                    input: weights,
                    output: acc,
                    panel,
                } = state.value_buffers();
                let all = seen(weights.len() - 1);
                for start in (0..all).step_by(PANEL_TOKENS) {
                    let end = all.min(start + PANEL_TOKENS);
                    let panel = &mut panel[..end - start];
                    for column in (0..head_dim).step_by(PANEL_COLUMNS) {
                        widen_values(span, head_dim, start..end, column, panel);
                        for rows in blocks(weights.len(), TILE_ROWS) {
                            let (weights, acc) = (&weights[rows.clone()], &mut acc[rows.clone()]);
                            // First the tokens that all queries of the tile see.
                            let together = seen(rows.start).clamp(start, end);
                            let product = TileProduct {
                                rows: weights,
                                first: start,
                                panel: &panel[..together - start],
                                column,
                                accumulates: start > 0,
                            };
                            multiply_tile(product, acc);
                            // Then, query by query, the tokens that only later positions see.
                            for (i, row) in rows.enumerate() {
                                let own = seen(row).clamp(start, end);
                                let panel = &panel[together - start..own - start];
                                if !panel.is_empty() {
                                    let product = TileProduct {
                                        rows: &weights[i..=i],
                                        first: together,
                                        panel,
                                        column,
                                        accumulates: true,
                                    };
                                    multiply_tile(product, &mut acc[i..=i]);
                                }
                            }
                        }
                    }
                }
            }

            /// Widens the keys of one or two pages. The columns of a missing page are zero. The
            /// pages' values are prefetched.
            #[target_feature(enable = $features)]
            #[inline]
            fn widen_keys(pages: &[KvPage<'_>], panel: &mut [PanelRow]) {
                for part in 0..PANEL_COLUMNS / PAGE_TOKENS {
                    match pages.get(part) {
                        Some(page) => {
                            let keys = page.keys.as_chunks::<PAGE_TOKENS>().0;
                            for (i, (row, keys)) in panel.iter_mut().zip(keys).enumerate() {
                                prefetch(page.values.as_ptr().wrapping_add(i * PAGE_TOKENS));
                                row.0.as_chunks_mut().0[part] = lanes(widen(keys));
                            }
                        }
                        None => {
                            for row in &mut *panel {
                                row.0.as_chunks_mut::<LANES>().0[part] = [0.0; LANES];
                            }
                        }
                    }
                }
            }

            /// Widens 32 values, from `column` on, of some tokens. Columns beyond the head are
            /// zero. Later keys are prefetched.
            #[target_feature(enable = $features)]
            #[inline]
            fn widen_values(
                span: Span<'_>,
                head_dim: usize,
                tokens: Range<usize>,
                column: usize,
                panel: &mut [PanelRow],
            ) {
                for (token, row) in tokens.zip(panel) {
                    let (page, at) = (token / PAGE_TOKENS, token % PAGE_TOKENS * head_dim + column);
                    if let Some(next) = span.next.get(page) {
                        prefetch(next.keys.as_ptr().wrapping_add(at));
                    }
                    let columns = PANEL_COLUMNS.min(head_dim - column);
                    let values = span.pages[page].values[at..][..columns].as_chunks::<LANES>().0;
                    for (part, row) in row.0.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                        *row = match values.get(part) {
                            Some(values) => lanes(widen(values)),
                            None => [0.0; LANES],
                        };
                    }
                }
            }

            /// Computes a product of up to [`TILE_ROWS`] rows.
            #[target_feature(enable = $features)]
            fn multiply_tile(product: TileProduct<'_>, out: &mut [AttentionRow]) {
                by_count!(product.rows.len(), [$($tile_rows)*], R => {
                    multiply_rows::<R>(product, out)
                });
            }

            /// Computes a product of R rows.
            #[target_feature(enable = $features)]
            #[inline]
            fn multiply_rows<const R: usize>(product: TileProduct<'_>, out: &mut [AttentionRow]) {
                const CHUNKS: usize = $tile_chunks;
                let TileProduct { first, panel, .. } = product;
                let rows = product.rows.first_chunk::<R>().expect("R rows");
                let out = out.first_chunk_mut::<R>().expect("R rows");
                for part in 0..PANEL_COLUMNS / (CHUNKS * LANES) {
                    let column = product.column + part * CHUNKS * LANES;
                    let mut sums = [[zero(); CHUNKS]; R];
                    if product.accumulates {
                        for r in 0..R {
                            let out = out[r].0[column..][..CHUNKS * LANES].as_chunks().0;
                            for (sum, out) in sums[r].iter_mut().zip(out) {
                                *sum = load(out);
                            }
                        }
                    }
                    for (i, row) in panel.iter().enumerate() {
                        let row = row.0.as_chunks().0;
                        let columns: [_; CHUNKS] = from_fn(|j| load(&row[part * CHUNKS + j]));
                        for r in 0..R {
                            let factor = broadcast(rows[r].0[first + i]);
                            for j in 0..CHUNKS {
                                sums[r][j] = fused(factor, columns[j], sums[r][j]);
                            }
                        }
                    }
                    for r in 0..R {
                        let out = out[r].0[column..][..CHUNKS * LANES].as_chunks_mut().0;
                        for (out, sum) in out.iter_mut().zip(sums[r]) {
                            *out = lanes(sum);
                        }
                    }
                }
            }

            /// Stores a token's key as a lane of the page's keys, its value as a row.
            #[target_feature(enable = $features)]
            pub(crate) fn store_kv(
                key: &[f32],
                value: &[f32],
                slot: usize,
                k_page: &mut [u16],
                v_page: &mut [u16],
            ) {
                let key_lanes = k_page.as_chunks_mut::<PAGE_TOKENS>().0;
                for (rows, key) in key_lanes.chunks_mut(LANES).zip(key.chunks(LANES)) {
                    for (row, half) in rows.iter_mut().zip(narrow(load(&padded(key)))) {
                        row[slot] = half;
                    }
                }
                let v_row = &mut v_page[slot * value.len()..][..value.len()];
                for (halves, value) in v_row.chunks_mut(LANES).zip(value.chunks(LANES)) {
                    halves.copy_from_slice(&narrow(load(&padded(value)))[..value.len()]);
                }
            }

            /// Computes independent sums of register operands, each a fused multiplication and
            /// addition a round.
            #[target_feature(enable = $features)]
            pub(crate) fn probe_f32(rounds: u64) -> u64 {
                let (a, b) = black_box((broadcast(0.5), broadcast(0.25)));
                let mut sums = [zero(); $probe_sums];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = fused(*sum, a, b);
                    }
                }
                black_box(sums);
                rounds * $probe_sums * LANES as u64 * 2
            }
        }
    };
}

pub(super) use attention_kernels;
