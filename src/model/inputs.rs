//! What linears are fed: each token's row, made once, quantized once, on all workers; and the workers.
//!
//! Always true: what a token receives depends on that token alone.

use std::ops::Range;

use sterna_kernels::{
    AttentionState, Kernels, PANEL_ROWS, PrefetchQueue, QuantizedActivations, QuantizedTokensMut,
    ScaledActivations,
};

use super::linear::{Linear, Projections};
use super::pool::{Pool, ranges, split_rows};

/// Values of gates that a worker keeps before it goes on with them: few enough for its cache, many
/// enough to call a kernel seldom.
const GATES_AT_ONCE: usize = 1 << 14;

/// Rows that are made at once. Products are panel-major, so the values of neighbouring tokens are neighbours in memory: they are
/// fetched together.
const BLOCK_TOKENS: usize = 8;

/// The most differently quantized inputs of one set of projections: query, key and value with a norm each.
const MAX_STREAMS: usize = 3;

/// The rows that one set of projections is fed, quantized, and as floats where a linear wants that.
/// Reused from stage to stage.
pub(super) struct Inputs {
    tokens: usize,
    quantized: Vec<QuantizedActivations>, // [stream]
    dense: Vec<f32>,
}

impl Inputs {
    /// Room for `max_tokens` rows for any of the given projections.
    pub(super) fn new<'a>(
        max_tokens: usize,
        projections: impl Iterator<Item = &'a Projections> + Clone,
    ) -> Inputs {
        let streams = (projections.clone().map(Projections::streams).max()).unwrap_or(1);
        assert!(streams <= MAX_STREAMS, "{streams} differently fed linears");
        let columns = projections.clone().map(Projections::columns).max();
        let columns = columns.unwrap_or(1);
        let quantized = (0..streams)
            .map(|_| QuantizedActivations::new(max_tokens, columns))
            .collect();
        let dense = projections.filter(|projections| reads_floats(projections));
        let dense = dense.map(Projections::columns).max().unwrap_or(0);
        Inputs {
            tokens: 0,
            quantized,
            dense: Vec::with_capacity(max_tokens * dense),
        }
    }

    /// How many rows there are.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// All rows, quantized, of projections that norm nothing.
    pub(super) fn quantized(&self) -> &QuantizedActivations {
        &self.quantized[0]
    }

    /// A row as floats, of projections of which a linear reads floats.
    pub(super) fn floats(&self, token: usize) -> &[f32] {
        let columns = self.dense.len() / self.tokens;
        &self.dense[token * columns..][..columns]
    }

    /// Takes in `tokens` rows. `write_row(token, row, spare)` makes one; `spare` is memory that it may
    /// use as it likes, as wide as the widest row of the model.
    pub(super) fn fill(
        &mut self,
        crew: &mut Crew,
        projections: &Projections,
        tokens: usize,
        write_row: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
    ) {
        let columns = projections.columns();
        let write_rows = |block: Block<'_>| {
            let rows = block.rows.chunks_exact_mut(columns);
            for (token, row) in block.tokens.zip(rows) {
                write_row(token, row, block.spare);
            }
        };
        self.fill_blocks(crew, projections, (&mut [], 0), tokens, write_rows);
    }

    /// As [`Inputs::fill`], a few rows at a time, and from a state of `width` values that each token keeps and that may be changed.
    pub(super) fn fill_blocks(
        &mut self,
        crew: &mut Crew,
        projections: &Projections,
        (states, width): (&mut [f32], usize),
        tokens: usize,
        write_rows: impl Fn(Block<'_>) + Sync,
    ) {
        let columns = projections.columns();
        self.tokens = tokens;
        let dense_columns = if reads_floats(projections) {
            columns
        } else {
            0
        };
        self.dense.resize(tokens * dense_columns, 0.0);
        let shares = ranges(tokens, crew.pool.workers());
        let mut streams: [_; MAX_STREAMS] = std::array::from_fn(|_| None);
        let quantized = &mut self.quantized[..projections.streams()];
        for (stream, quantized) in streams.iter_mut().zip(quantized) {
            quantized.reset(tokens, columns);
            *stream = Some(quantized.parts_mut(shares.clone()));
        }
        let dense = split_rows(&mut self.dense, dense_columns, shares.clone());
        let states = split_rows(states, width, shares.clone());
        let parts = shares.zip(dense).zip(states).zip(&mut crew.scratch);
        let parts = parts.map(|(((tokens, dense), states), scratch)| FillPart {
            tokens,
            streams: streams.each_mut().map(|stream| stream.as_mut()?.next()),
            dense,
            states: (states, width),
            scratch,
        });
        let kernels = crew.kernels;
        crew.pool.run_parts(parts, |_, part| {
            part.fill(kernels, projections, &write_rows)
        });
    }

    /// Multiplies all tokens by some panels of the `index`th linear of the projections that were filled for.
    pub(super) fn multiply(
        &self,
        kernels: Kernels,
        (linear, index): (&Linear, usize),
        panels: Range<usize>,
        (factors, ahead): (&mut Vec<f32>, &mut PrefetchQueue<'_, '_>),
        out: &mut [f32],
    ) {
        let linear = match linear {
            Linear::Ternary(linear) => linear,
            Linear::Dense(weights) => {
                return kernels.dense_matmul(weights, panels, &self.dense, self.tokens, out);
            }
            Linear::Screened(_) => unreachable!("a screened head has its own way to multiply"),
        };
        let x = &self.quantized[if linear.input_norm.is_some() {
            index
        } else {
            0
        }];
        factors.clear();
        factors.extend(x.scales().iter().map(|scale| linear.scale / scale));
        let x = ScaledActivations {
            activations: x,
            factors,
        };
        kernels.ternary_matmul(&linear.weights, panels, x, out, ahead);
    }
}

fn reads_floats(projections: &Projections) -> bool {
    projections.linears().iter().any(Linear::reads_floats)
}

/// The tokens that one worker writes.
struct FillPart<'a> {
    tokens: Range<usize>,
    streams: [Option<QuantizedTokensMut<'a>>; MAX_STREAMS],
    dense: &'a mut [f32],
    states: (&'a mut [f32], usize),
    scratch: &'a mut Scratch,
}

impl FillPart<'_> {
    fn fill(mut self, kernels: Kernels, projections: &Projections, write_rows: impl Fn(Block<'_>)) {
        let columns = projections.columns();
        let Scratch { rows, spare, .. } = self.scratch;
        let (states, width) = self.states;
        for start in self.tokens.clone().step_by(BLOCK_TOKENS) {
            let tokens = start..self.tokens.end.min(start + BLOCK_TOKENS);
            let (done, count) = (start - self.tokens.start, tokens.len());
            let rows = &mut rows[..count * columns];
            write_rows(Block {
                tokens,
                states: &mut states[done * width..][..count * width],
                rows,
                spare,
            });
            for row in rows.chunks_exact(columns) {
                let linears = projections.linears();
                for (stream, linear) in self.streams.iter_mut().flatten().zip(linears) {
                    let mut quantized = stream.next().expect("a place for each token of the part");
                    match linear.input_norm() {
                        Some(norm) => {
                            let normed = &mut spare[..columns];
                            norm.apply(kernels, row, normed);
                            kernels.quantize(normed, &mut quantized);
                        }
                        // Linears without a norm share the first stream, whoever they are.
                        None => kernels.quantize(row, &mut quantized),
                    }
                }
            }
            if !self.dense.is_empty() {
                self.dense[done * columns..][..rows.len()].copy_from_slice(rows);
            }
        }
    }
}

/// Some rows that are to be made.
pub(super) struct Block<'a> {
    /// At most [`BLOCK_TOKENS`].
    pub(super) tokens: Range<usize>,
    /// What the tokens keep.
    pub(super) states: &'a mut [f32],
    /// The rows.
    pub(super) rows: &'a mut [f32],
    /// Memory for as many rows, to be used as one likes.
    pub(super) spare: &'a mut [f32],
}

/// Whoever works on a step: the kernels, the threads, and each worker's own memory.
pub(super) struct Crew {
    pub(super) kernels: Kernels,
    pub(super) pool: Pool,
    pub(super) scratch: Vec<Scratch>,
}

/// The memory of one worker.
pub(super) struct Scratch {
    rows: Vec<f32>,
    spare: Vec<f32>,
    pub(super) sums: Vec<i32>,    // A panel of a product.
    pub(super) factors: Vec<f32>, // By token.
    pub(super) gates: Vec<f32>,
    pub(super) ups: Vec<f32>,
    pub(super) attention: AttentionState,
}

impl Scratch {
    /// How many panels of gates for so many tokens there is room for.
    pub(super) fn panels_at_once(&self, tokens: usize) -> usize {
        self.gates.len() / (tokens * PANEL_ROWS)
    }

    /// For rows of up to `max_width` values, up to `max_tokens` tokens, and `attention`.
    pub(super) fn new(max_width: usize, max_tokens: usize, attention: AttentionState) -> Scratch {
        let values = GATES_AT_ONCE.max(max_tokens * PANEL_ROWS);
        Scratch {
            rows: vec![0.0; BLOCK_TOKENS * max_width],
            spare: vec![0.0; BLOCK_TOKENS * max_width],
            sums: vec![0; max_tokens * PANEL_ROWS],
            factors: Vec::with_capacity(max_tokens),
            gates: vec![0.0; values],
            ups: vec![0.0; values],
            attention,
        }
    }
}
