//! The input rows of linears: made once per token, quantized once, by all workers.
//!
//! Invariant: a token's input row depends on that token alone.
//!
//! Invariant: NaN or an infinity in a row reaches all products of that row.

use std::ops::Range;

use sterna_kernels::{GroupSize, Kernels, LOGITS_BLOCK, QuantizedActivations, QuantizedTokensMut};

use super::low_rank::LowRankCorrection;
use super::norm::Norm;
use super::pool::{ranges, split_rows};
use super::product::Product;
use super::rotation::RowRotation;
use super::workers::{BLOCK_TOKENS, Scratch, Workers};
use crate::fault::{self, Place};

/// The maximum number of linears that read the same rows, and of quantized copies of a row.
pub(super) const MAX_STREAMS: usize = 4;

/// The form in which a set of linears reads its input rows.
#[derive(Clone, Copy)]
pub(super) struct InputFormat<'a> {
    /// The number of values in a row.
    pub(super) columns: usize,
    /// The number of quantized copies ("streams") of each row.
    pub(super) streams: usize,
    /// The norm that each stream applies before it quantizes, if any.
    pub(super) norms: [Option<&'a Norm>; MAX_STREAMS],
    /// The low-rank correction of each linear, if any.
    pub(super) corrections: [Option<&'a LowRankCorrection>; MAX_STREAMS],
    /// The rotation of the rows, if the ternary linears are stored rotated.
    pub(super) rotation: Option<&'a RowRotation>,
    /// Whether the float linears are stored rotated too.
    pub(super) rotates_floats: bool,
    /// The columns that share a scale, if the ternary linears have scales for groups.
    pub(super) group: Option<GroupSize>,
    /// Whether a linear reads the rows as floats.
    pub(super) floats: bool,
}

impl InputFormat<'_> {
    /// Returns the number of scales of a quantized row.
    pub(super) fn scales_per_token(&self) -> usize {
        (self.group).map_or(1, |group| self.columns / group.columns())
    }

    /// Returns the rank of a linear's correction; 0 if it has none.
    fn rank(&self, linear: usize) -> usize {
        self.corrections[linear].map_or(0, LowRankCorrection::rank)
    }
}

/// The input rows of one set of linears: quantized, and as floats if a linear reads floats. Stages
/// reuse the memory.
pub(super) struct Inputs {
    tokens: usize,
    quantized: Vec<QuantizedActivations>, // [stream]
    floats: Vec<f32>,                     // [token][column]
    /// Of each linear, the rows as its low-rank correction makes them, `[token][rank]`.
    lowered: [Vec<f32>; MAX_STREAMS],
}

impl Inputs {
    /// Allocates the memory for `max_tokens` rows in any of `formats`.
    pub(super) fn new<'a>(
        max_tokens: usize,
        formats: impl Iterator<Item = InputFormat<'a>> + Clone,
    ) -> Inputs {
        let streams = formats.clone().map(|format| format.streams).max();
        let columns = formats.clone().map(|format| format.columns).max();
        let columns = columns.unwrap_or(1);
        let quantized = (0..streams.unwrap_or(1))
            .map(|_| QuantizedActivations::new(max_tokens, columns))
            .collect();
        let lowered = std::array::from_fn(|linear| {
            let ranks = formats.clone().map(|format| format.rank(linear));
            Vec::with_capacity(max_tokens * ranks.max().unwrap_or(0))
        });
        let floats = formats.filter(|format| format.floats);
        let floats = floats.map(|format| format.columns).max().unwrap_or(0);
        Inputs {
            tokens: 0,
            quantized,
            floats: Vec::with_capacity(max_tokens * floats),
            lowered,
        }
    }

    /// Returns the number of rows.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the rows as quantized for `stream`.
    pub(super) fn quantized(&self, stream: usize) -> &QuantizedActivations {
        &self.quantized[stream]
    }

    /// Returns the rows as the low-rank correction of a linear makes them, `[token][rank]`.
    pub(super) fn lowered(&self, linear: usize) -> &[f32] {
        &self.lowered[linear]
    }

    /// Returns all rows as floats, `[token][column]`. They exist only if the format asks for them.
    pub(super) fn floats(&self) -> &[f32] {
        &self.floats
    }

    /// Returns one row as floats.
    pub(super) fn float_row(&self, token: usize) -> &[f32] {
        let columns = self.floats.len() / self.tokens;
        &self.floats[token * columns..][..columns]
    }

    /// Makes `tokens` rows. `write_row(token, row, spare)` writes one of them; `spare` is scratch
    /// memory as wide as the widest row of the model.
    pub(super) fn fill(
        &mut self,
        workers: &mut Workers,
        format: &InputFormat<'_>,
        tokens: usize,
        write_row: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        self.fill_blocks(workers, format, tokens, &mut [], |block| {
            let rows = block.rows.chunks_exact_mut(format.columns);
            for (token, row) in block.tokens.zip(rows) {
                write_row(token, row, block.spare);
            }
        });
    }

    /// Makes `tokens` rows, a block of them at a time. `write_rows` may change the residual of the
    /// block's tokens in passing. `residual` is `[token][width]`, or empty.
    pub(super) fn fill_blocks(
        &mut self,
        workers: &mut Workers,
        format: &InputFormat<'_>,
        tokens: usize,
        residual: &mut [f32],
        write_rows: impl Fn(InputBlock<'_>) + Sync,
    ) {
        self.tokens = tokens;
        let float_columns = if format.floats { format.columns } else { 0 };
        self.floats.resize(tokens * float_columns, 0.0);
        let shares = ranges(tokens, workers.pool.workers());
        let mut streams: [_; MAX_STREAMS] = std::array::from_fn(|_| None);
        let quantized = &mut self.quantized[..format.streams];
        for (stream, quantized) in streams.iter_mut().zip(quantized) {
            match format.group {
                None => quantized.reset(tokens, format.columns),
                Some(group) => quantized
                    .reset_groups(tokens, format.columns, group)
                    .expect("the columns of a matrix with groups are whole groups"),
            }
            *stream = Some(quantized.parts_mut(shares.clone()));
        }
        let mut lowered: [_; MAX_STREAMS] = std::array::from_fn(|_| None);
        for (linear, (part, memory)) in lowered.iter_mut().zip(&mut self.lowered).enumerate() {
            memory.resize(tokens * format.rank(linear), 0.0);
            *part = Some(split_rows(memory, format.rank(linear), shares.clone()));
        }
        let floats = split_rows(&mut self.floats, float_columns, shares.clone());
        let width = residual.len() / tokens;
        let residuals = split_rows(residual, width, shares.clone());
        let parts = shares.zip(floats).zip(residuals).zip(&mut workers.scratch);
        let parts = parts.map(|(((tokens, floats), residual), scratch)| FillTask {
            tokens,
            streams: streams.each_mut().map(|stream| stream.as_mut()?.next()),
            lowered: lowered.each_mut().map(|part| part.as_mut()?.next()),
            floats,
            residual,
            width,
            scratch,
        });
        let kernels = workers.kernels;
        workers.pool.run_parts(parts, |_, part| {
            part.fill(kernels, format, &write_rows);
        });
    }
}

/// Makes every value of a row infinite if one is NaN or infinite. Otherwise the quantizer would
/// turn NaN into a number, and the request would get wrong tokens instead of an error. A norm does
/// the same. `spare` is at least as long as the row.
pub(super) fn spread_infinity(kernels: Kernels, row: &mut [f32], spare: &mut [f32]) {
    let peaks = &mut spare[..row.len().div_ceil(LOGITS_BLOCK)];
    if !kernels.scan_logits(row, peaks) {
        row.fill(f32::INFINITY);
    }
}

/// The rows that one worker makes, and the memory that it uses.
struct FillTask<'a> {
    tokens: Range<usize>,
    streams: [Option<QuantizedTokensMut<'a>>; MAX_STREAMS],
    lowered: [Option<&'a mut [f32]>; MAX_STREAMS],
    floats: &'a mut [f32],
    residual: &'a mut [f32],
    width: usize, // Values of a token's residual.
    scratch: &'a mut Scratch,
}

impl FillTask<'_> {
    fn fill(mut self, kernels: Kernels, format: &InputFormat<'_>, write: impl Fn(InputBlock<'_>)) {
        let columns = format.columns;
        let Scratch { rows, spare, .. } = self.scratch;
        for start in self.tokens.clone().step_by(BLOCK_TOKENS) {
            let tokens = start..self.tokens.end.min(start + BLOCK_TOKENS);
            let (done, count) = (start - self.tokens.start, tokens.len());
            let rows = &mut rows[..count * columns];
            write(InputBlock {
                tokens,
                residual: &mut self.residual[done * self.width..][..count * self.width],
                rows,
                spare,
            });
            let floats = match self.floats.len() {
                0 => &mut [],
                _ => &mut self.floats[done * columns..][..rows.len()],
            };
            if !format.rotates_floats && !floats.is_empty() {
                floats.copy_from_slice(rows);
            }
            if let Some(rotation) = format.rotation {
                for row in rows.chunks_exact_mut(columns) {
                    rotation.rotate(kernels, row);
                    // Differences of infinities are NaN, and sums may overflow.
                    spread_infinity(kernels, row, spare);
                }
            }
            for row in rows.chunks_exact(columns) {
                for (stream, norm) in self.streams.iter_mut().flatten().zip(format.norms) {
                    let mut quantized = stream.next().expect("one place per token");
                    match norm {
                        Some(norm) => {
                            let normed = &mut spare[..columns];
                            norm.apply(kernels, row, normed);
                            kernels.quantize(normed, &mut quantized);
                        }
                        None => kernels.quantize(row, &mut quantized),
                    }
                    fault::pass(Place::RowQuantized);
                }
            }
            let lowered = self.lowered.iter_mut().flatten();
            for (lowered, correction) in lowered.zip(format.corrections) {
                let Some(correction) = correction else {
                    continue;
                };
                let (rank, width) = (correction.rank(), correction.lowered_width());
                let values = &mut spare[..count * width];
                correction.lower(kernels, rows, count, values);
                let product = Product {
                    values,
                    rows: rank,
                    tokens: count,
                };
                product.copy_to(0..count, &mut lowered[done * rank..][..count * rank]);
            }
            if format.rotates_floats && !floats.is_empty() {
                floats.copy_from_slice(rows);
            }
        }
    }
}

/// Rows of up to [`BLOCK_TOKENS`] neighbouring tokens.
pub(super) struct InputBlock<'a> {
    pub(super) tokens: Range<usize>,
    /// The residual of these tokens, if the caller gave one.
    pub(super) residual: &'a mut [f32],
    /// The rows to write.
    pub(super) rows: &'a mut [f32],
    /// Scratch memory for at least as many rows.
    pub(super) spare: &'a mut [f32],
}
