//! Products of float matrices, written once for AVX2 and AVX-512.
//!
//! The two differ in the registers that sixteen floats take, and therefore in how many sums fit
//! into registers.

/// Defines the module `dense` for one instruction set. `registers` names its module of
/// `registers.rs`, `floats` the type of sixteen floats there. `rows` rows and up to as many tokens
/// as `tokens` lists are multiplied at a time.
macro_rules! dense_kernels {
    (
        features: $features:literal,
        registers: $registers:ident,
        floats: $floats:ty,
        rows: $rows:literal,
        tokens: [$($tokens:literal)*],
    ) => {
        pub(crate) mod dense {
            use std::array::from_fn;
            use std::ops::Range;

            use crate::block::PANEL_ROWS;
            use crate::dense::{DenseMatrix, DenseValues};
            use crate::elementwise::LANES;
            use crate::x86_64::registers::$registers::{fused, lanes, load, sum_lanes, widen, zero};
            use crate::x86_64::registers::prefetch;
            use crate::x86_64::{blocks, padded, starts_and_nexts};

            /// Tokens that are multiplied at a time.
            const TOKENS: usize = [$($tokens),*].len();

            /// A few neighbouring rows of a matrix.
            #[derive(Clone, Copy)]
            struct RowBlock<'a, W> {
                values: &'a [W],
                columns: usize,
                /// The distance from each row to the one that is multiplied next, in values.
                next: isize,
            }

            /// Multiplies all tokens by the rows of some panels.
            #[target_feature(enable = $features)]
            pub(crate) fn dense_matmul(
                weights: &DenseMatrix,
                panels: Range<usize>,
                x: &[f32],
                tokens: usize,
                out: &mut [f32],
            ) {
                let panel_values = PANEL_ROWS * weights.columns();
                for (panel, out) in panels.zip(out.chunks_exact_mut(tokens * PANEL_ROWS)) {
                    let values = panel * panel_values
                        ..(weights.rows() * weights.columns()).min((panel + 1) * panel_values);
                    out.fill(0.0);
                    match weights.values() {
                        DenseValues::F16(all) => {
                            multiply_panel(&all[values], x, tokens, out, |halves| widen(halves));
                        }
                        DenseValues::F32(all) => {
                            multiply_panel(&all[values], x, tokens, out, |values| load(values));
                        }
                    }
                }
            }

            /// Multiplies the rows of one panel. The outer loop is over tokens: a few of them stay
            /// in the first-level cache while the panel's rows come from the second level.
            #[target_feature(enable = $features)]
            #[inline]
            fn multiply_panel<W: Copy + Default>(
                panel: &[W],
                x: &[f32],
                tokens: usize,
                out: &mut [f32],
                load_weights: impl Fn(&[W; LANES]) -> $floats + Copy,
            ) {
                const ROWS: usize = $rows;
                let columns = x.len() / tokens;
                let (whole, rest) =
                    panel.split_at(panel.len() / (ROWS * columns) * (ROWS * columns));
                for tokens in blocks(tokens, TOKENS) {
                    let x = &x[tokens.start * columns..tokens.end * columns];
                    let out = &mut out[tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS];
                    for (block, values) in whole.chunks_exact(ROWS * columns).enumerate() {
                        let out = &mut out[block * ROWS..];
                        multiply_rows::<ROWS, W>(values, columns, x, out, load_weights);
                    }
                    for (row, values) in rest.chunks_exact(columns).enumerate() {
                        let out = &mut out[whole.len() / columns + row..];
                        multiply_rows::<1, W>(values, columns, x, out, load_weights);
                    }
                }
            }

            /// Multiplies R rows by up to [`TOKENS`] tokens. `out` begins at the first row of the
            /// first token.
            #[target_feature(enable = $features)]
            #[inline]
            fn multiply_rows<const R: usize, W: Copy + Default>(
                values: &[W],
                columns: usize,
                x: &[f32],
                out: &mut [f32],
                load_weights: impl Fn(&[W; LANES]) -> $floats + Copy,
            ) {
                let rows = RowBlock {
                    values,
                    columns,
                    next: (R * columns).cast_signed(),
                };
                by_count!(x.len() / columns, [$($tokens)*], T => {
                    multiply_block::<R, T, W>(rows, x, out, load_weights)
                })
            }

            /// Multiplies R rows by T tokens, and prefetches the rows that are multiplied next.
            #[target_feature(enable = $features)]
            #[inline]
            fn multiply_block<const R: usize, const T: usize, W: Copy + Default>(
                rows: RowBlock<'_, W>,
                x: &[f32],
                out: &mut [f32],
                load_weights: impl Fn(&[W; LANES]) -> $floats,
            ) {
                let RowBlock {
                    values,
                    columns,
                    next,
                } = rows;
                let rows: [(&[[W; LANES]], &[W]); R] =
                    from_fn(|r| values[r * columns..][..columns].as_chunks());
                let x: [(&[[f32; LANES]], &[f32]); T] =
                    from_fn(|t| x[t * columns..][..columns].as_chunks());
                let mut sums = [[zero(); T]; R];
                for chunk in 0..columns / LANES {
                    let mut tokens = [zero(); T];
                    for (token, x) in tokens.iter_mut().zip(&x) {
                        *token = load(&x.0[chunk]);
                    }
                    for r in 0..R {
                        let weights = &rows[r].0[chunk];
                        prefetch(weights.as_ptr().wrapping_offset(next));
                        let weights = load_weights(weights);
                        for t in 0..T {
                            sums[r][t] = fused(weights, tokens[t], sums[r][t]);
                        }
                    }
                }
                if !columns.is_multiple_of(LANES) {
                    for r in 0..R {
                        let weights = load_weights(&padded(rows[r].1));
                        for t in 0..T {
                            sums[r][t] = fused(weights, load(&padded(x[t].1)), sums[r][t]);
                        }
                    }
                }
                for r in 0..R {
                    for t in 0..T {
                        out[t * PANEL_ROWS + r] = sum_lanes(sums[r][t]);
                    }
                }
            }

            /// Multiplies one token by some rows.
            #[target_feature(enable = $features)]
            pub(crate) fn dense_dots(
                weights: &DenseMatrix,
                rows: &[u32],
                x: &[f32],
                out: &mut [f32],
            ) {
                match weights.values() {
                    DenseValues::F16(all) => dots(all, rows, x, out, |halves| widen(halves)),
                    DenseValues::F32(all) => dots(all, rows, x, out, |values| load(values)),
                }
            }

            /// Multiplies one row after the other, and prefetches the next one meanwhile.
            #[target_feature(enable = $features)]
            #[inline]
            fn dots<W: Copy + Default>(
                all: &[W],
                rows: &[u32],
                x: &[f32],
                out: &mut [f32],
                load_weights: impl Fn(&[W; LANES]) -> $floats + Copy,
            ) {
                let columns = x.len();
                let starts = starts_and_nexts(rows, columns);
                for ((start, next), out) in starts.zip(out.chunks_exact_mut(1)) {
                    let row = RowBlock {
                        values: &all[start..][..columns],
                        columns,
                        next,
                    };
                    multiply_block::<1, 1, _>(row, x, out, load_weights);
                }
            }

            /// Copies a row as f32.
            #[target_feature(enable = $features)]
            pub(crate) fn dense_row(weights: &DenseMatrix, row: usize, out: &mut [f32]) {
                let values = row * weights.columns()..(row + 1) * weights.columns();
                match weights.values() {
                    DenseValues::F32(all) => out.copy_from_slice(&all[values]),
                    DenseValues::F16(all) => {
                        let (out, rest) = out.as_chunks_mut();
                        let (halves, halves_rest) = all[values].as_chunks();
                        for (out, halves) in out.iter_mut().zip(halves) {
                            *out = lanes(widen(halves));
                        }
                        rest.copy_from_slice(&lanes(widen(&padded(halves_rest)))[..rest.len()]);
                    }
                }
            }
        }
    };
}

pub(super) use dense_kernels;
