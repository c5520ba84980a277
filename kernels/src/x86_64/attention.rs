//! Attention over stored floats of any format, written once for AVX2 and AVX-512.
//!
//! There are two paths:
//!
//! - A step that decodes has one position. Each load of keys and values serves up to four heads of
//!   the group.
//! - A chunk of a prompt has many positions. A panel of keys or values is widened to single
//!   precision, and stays in the first-level cache. All queries are multiplied by it, one tile at a
//!   time. The sums of a tile stay in registers.
//!
//! Invariant: both paths add in the order of the scalar definition.

use crate::attention::{AttentionRow, PanelRow};
use crate::kv_page::FloatPage;

/// The pages of one span, and what is read after it.
pub(super) struct FloatSpan<'a, C> {
    pub(super) pages: &'a [FloatPage<'a, C>],
    pub(super) next: &'a [&'a [u8]],
    pub(super) visible: usize,
}

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

/// Defines the module `attention` for one instruction set. `registers` is its module in
/// `registers.rs`. The numbers set how many sums stay in registers:
///
/// - `pages`: how many pages of keys a decode multiplies at a time.
/// - `value_chunks`: how many chunks of sixteen values a decode adds up at a time.
/// - `tile_rows`: the possible numbers of queries in a tile, from 1 up.
/// - `tile_chunks`: how many chunks of sixteen columns of a tile are added up at a time.
/// - `probe_sums`: how many independent sums the probe has.
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
                AttentionRow, AttentionState, PANEL_COLUMNS, PanelRow, ProductBuffers, Span,
            };
            use crate::elementwise::LANES;
            use crate::kv_geometry::{PAGE_TOKENS, SPAN_TOKENS};
            use crate::kv_page::{FloatChunk, FloatPage, SpanScales};
            use crate::x86_64::attention::{FloatSpan, TileProduct};
            use crate::x86_64::page_prefetch::{KeyPrefetch, ValuePrefetch};
            use crate::x86_64::registers::$registers::{
                broadcast, fused, lanes, load, narrow, widen_stored, zero,
            };
            use crate::x86_64::registers::prefetch;
            use crate::x86_64::{CACHE_LINE, blocks};

            /// Dimensions of a step of the product with the keys.
            const STEP: usize = 4;

            /// Heads whose sums are kept in registers in a step that decodes.
            const HEADS: usize = 4;

            /// Queries of the largest tile.
            const TILE_ROWS: usize = [$($tile_rows),*].len();

            /// Tokens whose values are widened at a time. With 32 columns, they take half of a
            /// first-level cache.
            const PANEL_TOKENS: usize = 128;

            /// Reduces one span of keys and values. `attention_merge` then adds it to the state.
            #[target_feature(enable = $features)]
            pub(crate) fn attention_span<C: FloatChunk>(
                span: Span<'_>,
                state: &mut AttentionState,
            ) {
                let pages = FloatPage::<C>::all_of(span.pages, state.head_dim());
                let floats = FloatSpan {
                    pages: &pages[..span.pages.len()],
                    next: span.next,
                    visible: span.visible,
                };
                if state.positions() == 1 {
                    score_position(&floats, state);
                } else {
                    score_span(&floats, state);
                }
                let seen = (span.visible, span.hidden);
                match C::UNIT.map(|unit| SpanScales::of(span.pages, unit)) {
                    Some(scales) => state.weigh_span(seen, Some(&scales)),
                    None => state.weigh_span(seen, None),
                }
                if state.positions() == 1 {
                    sum_position(&floats, state);
                } else {
                    sum_span(&floats, state);
                }
            }

            /// Multiplies the queries of one position by the keys of the span.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_position<C: FloatChunk>(span: &FloatSpan<'_, C>, state: &mut AttentionState) {
                let group = state.group();
                let ProductBuffers { input, output, .. } = state.score_buffers();
                for heads in blocks(group, HEADS) {
                    let (queries, scores) = (&input[heads.clone()], &mut output[heads.clone()]);
                    by_count!(heads.len(), [1 2 3 4], H => {
                        score_heads::<C, H>(queries, span.pages, scores)
                    });
                }
            }

            /// Adds up the span's weighted values for one position.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_position<C: FloatChunk>(span: &FloatSpan<'_, C>, state: &mut AttentionState) {
                let (group, head_dim) = (state.group(), state.head_dim());
                let ProductBuffers { input, output, .. } = state.value_buffers();
                for heads in blocks(group, HEADS) {
                    let (weights, acc) = (&input[heads.clone()], &mut output[heads.clone()]);
                    by_count!(heads.len(), [1 2 3 4], H => {
                        sum_heads::<C, H>(weights, span, head_dim, acc)
                    });
                }
            }

            /// Multiplies H queries by all keys of the span. It takes several pages at a time, so
            /// that enough independent sums keep both multipliers busy.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_heads<C: FloatChunk, const H: usize>(
                queries: &[AttentionRow],
                pages: &[FloatPage<'_, C>],
                scores: &mut [AttentionRow],
            ) {
                let mut first = 0;
                $(
                    while let Some(pages) = pages[first..].first_chunk::<$pages>() {
                        score_pages::<C, H, $pages>(queries, pages, first * PAGE_TOKENS, scores);
                        first += $pages;
                    }
                )*
            }

            /// Multiplies H queries by the keys of P pages, whose first token is `first`. Also
            /// prefetches the values of these pages, which are needed soon.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_pages<C: FloatChunk, const H: usize, const P: usize>(
                queries: &[AttentionRow],
                pages: &[FloatPage<'_, C>; P],
                first: usize,
                scores: &mut [AttentionRow],
            ) {
                let steps = pages[0].keys.len() / STEP;
                let queries: [&[[f32; STEP]]; H] =
                    from_fn(|h| &queries[h].0.as_chunks().0[..steps]);
                let values: [*const u8; P] = from_fn(|p| pages[p].values.as_ptr().cast());
                let pages: [&[[C; STEP]]; P] =
                    from_fn(|p| &pages[p].keys.as_chunks().0[..steps]);
                let mut sums = [[zero(); P]; H];
                let mut ahead = ValuePrefetch::new(values, steps);
                for i in 0..steps {
                    ahead.step(size_of::<[C; STEP]>() / CACHE_LINE);
                    for part in 0..STEP {
                        let mut keys = [zero(); P];
                        for p in 0..P {
                            keys[p] = widen_stored(pages[p][i][part].stored());
                        }
                        for h in 0..H {
                            let query = broadcast(queries[h][i][part]);
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
            fn sum_heads<C: FloatChunk, const H: usize>(
                weights: &[AttentionRow],
                span: &FloatSpan<'_, C>,
                head_dim: usize,
                acc: &mut [AttentionRow],
            ) {
                const CHUNKS: usize = $value_chunks;
                let rest = head_dim / (CHUNKS * LANES) * (CHUNKS * LANES);
                for first in (0..rest).step_by(CHUNKS * LANES) {
                    sum_chunks::<C, H, CHUNKS>(weights, span, head_dim, first, acc);
                }
                for first in (rest..head_dim).step_by(LANES) {
                    sum_chunks::<C, H, 1>(weights, span, head_dim, first, acc);
                }
            }

            /// Adds up 16 · J weighted values of each head, from `first` on. Reads only the tokens
            /// that the heads see, and prefetches later keys.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_chunks<C: FloatChunk, const H: usize, const J: usize>(
                weights: &[AttentionRow],
                span: &FloatSpan<'_, C>,
                head_dim: usize,
                first: usize,
                acc: &mut [AttentionRow],
            ) {
                let weights: [&[f32]; H] = from_fn(|h| &weights[h].0[..span.visible]);
                let mut sums = [[zero(); J]; H];
                let ahead = KeyPrefetch::new(span.next, span.pages.len(), head_dim / (J * LANES));
                for (index, page) in span.pages.iter().enumerate() {
                    let own = page.keys.as_ptr().cast();
                    let step_bytes = J * LANES * size_of::<C>();
                    let next = ahead.address(first / (J * LANES), index, step_bytes, own);
                    let tokens = index * PAGE_TOKENS..span.visible.min((index + 1) * PAGE_TOKENS);
                    let rows = page.values.chunks_exact(head_dim / LANES);
                    for (token, values) in tokens.zip(rows) {
                        let at = token % PAGE_TOKENS * J * size_of::<C>();
                        if at.is_multiple_of(CACHE_LINE) {
                            for line in (0..J * size_of::<C>()).step_by(CACHE_LINE) {
                                prefetch(next.wrapping_add(at + line));
                            }
                        }
                        let values = &values[first / LANES..][..J];
                        let mut widened = [zero(); J];
                        for (widened, values) in widened.iter_mut().zip(values) {
                            *widened = widen_stored(values.stored());
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

            /// Multiplies the queries of all positions of a chunk of a prompt by the keys of the
            /// span. Each key is widened once.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_span<C: FloatChunk>(span: &FloatSpan<'_, C>, state: &mut AttentionState) {
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

            /// Adds up the span's weighted values for all positions. Each value is widened once.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_span<C: FloatChunk>(span: &FloatSpan<'_, C>, state: &mut AttentionState) {
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

            /// Widens the keys of one or two pages, and prefetches their values. The columns of a
            /// missing page are zero.
            #[target_feature(enable = $features)]
            #[inline]
            fn widen_keys<C: FloatChunk>(pages: &[FloatPage<'_, C>], panel: &mut [PanelRow]) {
                for part in 0..PANEL_COLUMNS / PAGE_TOKENS {
                    match pages.get(part) {
                        Some(page) => {
                            let pairs = page.keys.iter().zip(page.values);
                            for (row, (keys, value)) in panel.iter_mut().zip(pairs) {
                                prefetch(value);
                                let keys = widen_stored(keys.stored());
                                row.0.as_chunks_mut().0[part] = lanes(keys);
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

            /// Widens 32 values of some tokens, from `column` on, and prefetches later keys.
            /// Columns beyond the head are zero.
            #[target_feature(enable = $features)]
            #[inline]
            fn widen_values<C: FloatChunk>(
                span: &FloatSpan<'_, C>,
                head_dim: usize,
                tokens: Range<usize>,
                column: usize,
                panel: &mut [PanelRow],
            ) {
                let width = head_dim / LANES;
                for (token, row) in tokens.zip(panel) {
                    let page = token / PAGE_TOKENS;
                    let at = token % PAGE_TOKENS * width + column / LANES;
                    if let Some(next) = span.next.get(page) {
                        prefetch(next.as_ptr().wrapping_add(at * size_of::<C>()));
                    }
                    let chunks = (PANEL_COLUMNS / LANES).min(width - column / LANES);
                    let values = &span.pages[page].values[at..][..chunks];
                    for (part, row) in row.0.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                        *row = match values.get(part) {
                            Some(values) => lanes(widen_stored(values.stored())),
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

            /// Rounds a token's key and value to half precision. Stores the key as a lane of the
            /// page's keys, and the value as a row.
            #[target_feature(enable = $features)]
            pub(crate) fn store_f16(key: &[f32], value: &[f32], slot: usize, page: &mut [u8]) {
                let halves = page.as_chunks_mut::<2>().0;
                let (keys, values) = halves.split_at_mut(key.len() * PAGE_TOKENS);
                let rows = keys.as_chunks_mut::<PAGE_TOKENS>().0.as_chunks_mut::<LANES>().0;
                for (rows, key) in rows.iter_mut().zip(key.as_chunks().0) {
                    for (row, half) in rows.iter_mut().zip(narrow(load(key))) {
                        row[slot] = half.to_le_bytes();
                    }
                }
                let value_row = &mut values[slot * value.len()..][..value.len()];
                let chunks = value_row.as_chunks_mut::<LANES>().0.iter_mut();
                for (halves, value) in chunks.zip(value.as_chunks().0) {
                    *halves = narrow(load(value)).map(u16::to_le_bytes);
                }
            }

            /// Computes independent sums of registers. A round adds one product to each, fused.
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
