//! Attention over keys and values of 8-bit integers, written once for AVX2, AVX-VNNI
//! and AVX-512.
//!
//! `int8_rows.rs` defines the result. A line of 64 bytes has four dimensions of sixteen keys, or
//! four tokens of sixteen dimensions of values. A register of sums has a lane for each of the
//! sixteen.
//!
//! Decodes and chunks of prompts take the same path. Each line that is loaded serves up to four
//! rows. For the later rows of a chunk, the lines are in the first-level cache.
//!
//! A span is computed faster than its memory arrives. So each span prefetches all of the next one,
//! at an even pace. With AVX-512, a quarter of the time goes into weighing the keys, so this part
//! prefetches too. The float kernels prefetch the values of a span during its first product. Here
//! this was 1.4 times slower: half of the memory would have to arrive in a quarter of the time.

/// Defines the module `int8_attention` for one instruction set. `registers` is its module in
/// `registers.rs`. The numbers set how many sums stay in registers:
///
/// - `pages`: how many pages of keys are multiplied at a time.
/// - `value_chunks`: how many chunks of sixteen values are added up at a time.
///
/// `prefetched_lines` are cache lines that are prefetched:
///
/// - in a step of the products with keys;
/// - while a span is weighed, for each chunk of sixteen values of a head;
/// - in a step of the sums of values.
///
/// All together are about as many lines as a span has.
macro_rules! int8_attention_kernels {
    (
        features: $features:literal,
        registers: $registers:ident,
        pages: [$($pages:literal)*],
        value_chunks: $value_chunks:literal,
        prefetched_lines: [$score_lines:literal $weight_lines:literal $value_lines:literal],
    ) => {
        mod int8_attention {
            use crate::attention::{AttentionRow, AttentionState, PARTS_OF_WEIGHING, Span};
            use crate::elementwise::LANES;
            use crate::int8_rows::Int8Row;
            use crate::kv_geometry::{INT8_STEP, PAGE_TOKENS};
            use crate::kv_page::{Int8Page, SpanScales};
            use crate::x86_64::page_prefetch::LaterPages;
            use crate::x86_64::registers::$registers::{
                add_weighted, dot_keys, first_sums, lanes, load_bytes, scaled_sums, to_floats,
                weighted_zero,
            };
            use crate::x86_64::blocks;

            /// Rows whose sums are kept in registers.
            const ROWS: usize = 4;

            /// Cache lines that a step of the products with keys prefetches.
            const SCORE_LINES: usize = $score_lines;

            /// Cache lines that weighing prefetches for each chunk of sixteen values of a head.
            const WEIGHT_LINES: usize = $weight_lines;

            /// Cache lines that a step of the sums of values prefetches.
            const VALUE_LINES: usize = $value_lines;

            /// Reduces one span of keys and values. `attention_merge` then adds it to the state.
            #[target_feature(enable = $features)]
            pub(crate) fn int8_attention_span(span: Span<'_>, state: &mut AttentionState) {
                let pages = Int8Page::all_of(span.pages, state.head_dim());
                let pages = &pages[..span.pages.len()];
                let mut later = LaterPages::new(span.next);
                state.quantize_queries();
                score_span(pages, &mut later, state);
                let scales = SpanScales::of(span.pages, 1.0);
                let lines = WEIGHT_LINES * state.head_dim() / LANES;
                let lines = lines / (PARTS_OF_WEIGHING * state.rows().min(ROWS));
                state.weigh_int8_span(span, &scales, || later.step(lines));
                sum_span(pages, &mut later, state);
            }

            /// Multiplies all queries by the keys of the span, several pages at a time.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_span(
                pages: &[Int8Page<'_>],
                later: &mut LaterPages<'_>,
                state: &mut AttentionState,
            ) {
                let (queries, scores) = state.int8_score_buffers();
                let mut first = 0;
                $(
                    while let Some(pages) = pages[first..].first_chunk::<$pages>() {
                        for rows in blocks(queries.len(), ROWS) {
                            let column = first * PAGE_TOKENS;
                            let later = (rows.start == 0).then_some(&mut *later);
                            let (queries, scores) =
                                (&queries[rows.clone()], &mut scores[rows.clone()]);
                            by_count!(rows.len(), [1 2 3 4], R => {
                                score_pages::<R, $pages>(queries, pages, column, later, scores)
                            });
                        }
                        first += $pages;
                    }
                )*
            }

            /// Multiplies R queries by the keys of P pages. The products go to the columns from
            /// `column` on.
            #[target_feature(enable = $features)]
            #[inline]
            fn score_pages<const R: usize, const P: usize>(
                queries: &[Int8Row],
                pages: &[Int8Page<'_>; P],
                column: usize,
                mut later: Option<&mut LaterPages<'_>>,
                scores: &mut [AttentionRow],
            ) {
                let steps = pages[0].keys.len();
                // Not `from_fn`: it is compiled without these features, so it inlines no closure
                // that has them.
                let mut sums = [[first_sums(0); P]; R];
                let mut numbers = [&queries[0].query[..steps]; R];
                for r in 0..R {
                    sums[r] = [first_sums(queries[r].query_sum); P];
                    numbers[r] = &queries[r].query[..steps];
                }
                let mut lines = [&pages[0].keys[..steps]; P];
                for p in 0..P {
                    lines[p] = &pages[p].keys[..steps];
                }
                for i in 0..steps {
                    if let Some(later) = &mut later {
                        later.step(SCORE_LINES);
                    }
                    let mut keys = [first_sums(0); P];
                    for p in 0..P {
                        keys[p] = load_bytes(&lines[p][i]);
                    }
                    for r in 0..R {
                        for p in 0..P {
                            sums[r][p] = dot_keys(sums[r][p], keys[p], numbers[r][i]);
                        }
                    }
                }
                for (scores, sums) in scores.iter_mut().zip(sums) {
                    let scores = scores.0[column..][..P * PAGE_TOKENS].as_chunks_mut().0;
                    for (scores, sums) in scores.iter_mut().zip(sums) {
                        *scores = lanes(to_floats(sums));
                    }
                }
            }

            /// Adds up the weighted values of the span for all rows.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_span(
                pages: &[Int8Page<'_>],
                later: &mut LaterPages<'_>,
                state: &mut AttentionState,
            ) {
                const CHUNKS: usize = $value_chunks;
                let chunks = state.head_dim() / LANES;
                let (weights, acc) = state.int8_value_buffers();
                let rest = chunks / CHUNKS * CHUNKS;
                for rows in blocks(weights.len(), ROWS) {
                    let mut later = (rows.start == 0).then_some(&mut *later);
                    let (weights, acc) = (&weights[rows.clone()], &mut acc[rows.clone()]);
                    by_count!(rows.len(), [1 2 3 4], R => {
                        for first in (0..rest).step_by(CHUNKS) {
                            let later = later.as_deref_mut();
                            sum_chunks::<R, CHUNKS>(weights, pages, first, later, acc);
                        }
                        for first in rest..chunks {
                            let later = later.as_deref_mut();
                            sum_chunks::<R, 1>(weights, pages, first, later, acc);
                        }
                    });
                }
            }

            /// Adds up 16 · J weighted values of each of R rows, from chunk `first` on. Also
            /// prefetches later pages.
            #[target_feature(enable = $features)]
            #[inline]
            fn sum_chunks<const R: usize, const J: usize>(
                weights: &[Int8Row],
                pages: &[Int8Page<'_>],
                first: usize,
                mut later: Option<&mut LaterPages<'_>>,
                acc: &mut [AttentionRow],
            ) {
                const STEPS: usize = PAGE_TOKENS / INT8_STEP; // A page's.
                let weights = weights.first_chunk::<R>().expect("R rows");
                let mut sums = [[weighted_zero(); J]; R];
                for (index, page) in pages.iter().enumerate() {
                    let rows = page.values.chunks_exact(page.values.len() / STEPS);
                    for (step, values) in rows.enumerate() {
                        if let Some(later) = &mut later {
                            later.step(VALUE_LINES);
                        }
                        let at = index * STEPS + step;
                        let lines = values[first..].first_chunk::<J>().expect("J lines");
                        let mut values = [first_sums(0); J];
                        for j in 0..J {
                            values[j] = load_bytes(&lines[j]);
                        }
                        for r in 0..R {
                            for j in 0..J {
                                let (high, low) = (weights[r].high[at], weights[r].low[at]);
                                sums[r][j] = add_weighted(sums[r][j], values[j], high, low);
                            }
                        }
                    }
                }
                for ((acc, weights), sums) in acc.iter_mut().zip(weights).zip(sums) {
                    let acc = acc.0[first * LANES..][..J * LANES].as_chunks_mut().0;
                    for (acc, sums) in acc.iter_mut().zip(sums) {
                        *acc = lanes(scaled_sums(sums, weights.weight_scale));
                    }
                }
            }
        }
    };
}

pub(super) use int8_attention_kernels;
