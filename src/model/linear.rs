//! Linear layers: quantize each token once, multiply panels on all workers, scale.
//!
//! Always true: what a token receives depends on that token alone. Workers share panels of rows, never a sum.

use std::ops::Range;
use std::sync::Arc;

use sterna_kernels::{
    AttentionState, DenseMatrix, Kernels, PANEL_ROWS, QuantizedActivations, QuantizedTokenMut,
    TernaryMatrix,
};

use super::pool::{Pool, ranges, split_rows};

/// Integer products that a worker keeps before it scales them: few enough for its cache, many enough to
/// call a kernel seldom.
const PRODUCTS_AT_ONCE: usize = 1 << 16;

/// RMS norm with learned weights.
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) eps: f32,
}

impl Norm {
    pub(super) fn apply(&self, kernels: Kernels, x: &[f32], out: &mut [f32]) {
        kernels.rms_norm(x, &self.weight, self.eps, out);
    }
}

/// One matrix of the model.
pub(super) enum Linear {
    Ternary(TernaryLinear),
    /// Left as floats by the checkpoint; perhaps shared (the embedding as output head).
    Dense(Arc<DenseMatrix>),
}

/// Ternary weights: y = (W·q) · scale / s, where q and s are the quantized input and its scale.
pub(super) struct TernaryLinear {
    pub(super) weights: TernaryMatrix,
    pub(super) scale: f32,
    /// Applied to the input before it is quantized, where the checkpoint asks for that.
    pub(super) input_norm: Option<Norm>,
}

impl Linear {
    pub(super) fn rows(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.rows(),
            Linear::Dense(weights) => weights.rows(),
        }
    }

    fn columns(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.columns(),
            Linear::Dense(weights) => weights.columns(),
        }
    }

    fn panels(&self) -> usize {
        self.rows().div_ceil(PANEL_ROWS)
    }

    /// Bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.bytes(),
            Linear::Dense(weights) => weights.bytes(),
        }
    }
}

/// Linears that are fed the same rows, as query, key and value. Their products stand behind each other.
pub(super) struct Projections {
    linears: Vec<Linear>,
}

impl Projections {
    pub(super) fn new(linears: Vec<Linear>) -> Projections {
        assert!(
            linears
                .windows(2)
                .all(|pair| pair[0].columns() == pair[1].columns()),
            "linears fed the same rows"
        );
        assert!(!linears.is_empty(), "something is projected to");
        Projections { linears }
    }

    pub(super) fn linears(&self) -> &[Linear] {
        &self.linears
    }

    pub(super) fn columns(&self) -> usize {
        self.linears[0].columns()
    }

    /// Values of all products of one token, padded to whole panels.
    pub(super) fn product_width(&self) -> usize {
        self.linears.iter().map(Linear::panels).sum::<usize>() * PANEL_ROWS
    }

    /// How many differently quantized inputs there are: one, or one each where each norms its own; none
    /// if all are float.
    fn streams(&self) -> usize {
        let normed = |linear: &Linear| matches!(linear, Linear::Ternary(linear) if linear.input_norm.is_some());
        if self.linears.iter().any(normed) {
            return self.linears.len();
        }
        usize::from(
            self.linears
                .iter()
                .any(|linear| matches!(linear, Linear::Ternary(_))),
        )
    }

    /// Multiplies all tokens of `inputs` by all linears. `out` holds `product_width` values a token.
    pub(super) fn multiply(&self, crew: &mut Crew, inputs: &Inputs, out: &mut [f32]) {
        let panel = inputs.tokens * PANEL_ROWS;
        let shares = ranges(self.product_width() / PANEL_ROWS, crew.pool.workers());
        let out = split_rows(
            &mut out[..self.product_width() * inputs.tokens],
            panel,
            shares.clone(),
        );
        let kernels = crew.kernels;
        crew.pool.run_parts(
            shares.zip(out).zip(&mut crew.scratch),
            |_, ((panels, mut out), scratch)| {
                let mut first = 0;
                for (index, linear) in self.linears.iter().enumerate() {
                    let mine = panels.start.max(first)..panels.end.min(first + linear.panels());
                    if !mine.is_empty() {
                        let (now, later) =
                            std::mem::take(&mut out).split_at_mut(mine.len() * panel);
                        let of_linear = mine.start - first..mine.end - first;
                        inputs.multiply(
                            kernels,
                            (linear, index),
                            of_linear,
                            now,
                            &mut scratch.products,
                        );
                        out = later;
                    }
                    first += linear.panels();
                }
            },
        );
    }

    /// The products of linear `index` among those that `multiply` wrote for `tokens` tokens.
    pub(super) fn product<'a>(
        &self,
        index: usize,
        products: &'a [f32],
        tokens: usize,
    ) -> Product<'a> {
        let before: usize = self.linears[..index].iter().map(Linear::panels).sum();
        let linear = &self.linears[index];
        let values =
            &products[before * PANEL_ROWS * tokens..][..linear.panels() * PANEL_ROWS * tokens];
        Product {
            values,
            rows: linear.rows(),
            tokens,
        }
    }
}

/// The product of one linear and some tokens, panel-major.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    values: &'a [f32],
    rows: usize,
    tokens: usize,
}

impl<'a> Product<'a> {
    /// Values a token.
    pub(super) fn rows(self) -> usize {
        self.rows
    }

    /// A token's values: in order, 32 at a time, the last piece perhaps shorter.
    pub(super) fn pieces(self, token: usize) -> impl Iterator<Item = &'a [f32]> {
        let panels = self.values.chunks_exact(self.tokens * PANEL_ROWS);
        panels.enumerate().map(move |(panel, values)| {
            let rows = (self.rows - panel * PANEL_ROWS).min(PANEL_ROWS);
            &values[token * PANEL_ROWS..][..rows]
        })
    }
}

/// The rows that one set of projections is fed, quantized, and as floats where a linear wants that.
/// Reused from stage to stage.
pub(super) struct Inputs {
    tokens: usize,
    quantized: Vec<QuantizedActivations>,
    dense: Vec<f32>,
}

impl Inputs {
    /// Room for `max_tokens` rows for any of the given projections.
    pub(super) fn new<'a>(
        max_tokens: usize,
        projections: impl Iterator<Item = &'a Projections> + Clone,
    ) -> Inputs {
        let streams = projections
            .clone()
            .map(Projections::streams)
            .max()
            .unwrap_or(1);
        let columns = projections.map(Projections::columns).max().unwrap_or(1);
        let quantized = (0..streams)
            .map(|_| QuantizedActivations::new(max_tokens, columns))
            .collect();
        Inputs {
            tokens: 0,
            quantized,
            dense: Vec::new(),
        }
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
        self.tokens = tokens;
        let any_dense = projections
            .linears
            .iter()
            .any(|linear| matches!(linear, Linear::Dense(_)));
        self.dense
            .resize(if any_dense { tokens * columns } else { 0 }, 0.0);
        let streams = &mut self.quantized[..projections.streams()];
        streams
            .iter_mut()
            .for_each(|stream| stream.reset(tokens, columns));

        let shares = ranges(tokens, crew.pool.workers());
        let mut quantized: Vec<_> = streams
            .iter_mut()
            .map(QuantizedActivations::tokens_mut)
            .collect();
        let dense = split_rows(
            &mut self.dense,
            if any_dense { columns } else { 0 },
            shares.clone(),
        );
        let parts = shares
            .zip(dense)
            .zip(&mut crew.scratch)
            .map(|((tokens, dense), scratch)| {
                let quantized = quantized
                    .iter_mut()
                    .map(|stream| stream.take(tokens.len()).collect())
                    .collect();
                FillPart {
                    tokens,
                    quantized,
                    dense,
                    scratch,
                }
            });
        let kernels = crew.kernels;
        crew.pool
            .run_parts(parts, |_, part| part.fill(kernels, projections, &write_row));
    }

    /// Multiplies all tokens by some panels of the `index`th linear of the projections that were filled for.
    fn multiply(
        &self,
        kernels: Kernels,
        (linear, index): (&Linear, usize),
        panels: Range<usize>,
        out: &mut [f32],
        products: &mut [i32],
    ) {
        let linear = match linear {
            Linear::Ternary(linear) => linear,
            Linear::Dense(weights) => {
                return kernels.dense_matmul(weights, panels, &self.dense, self.tokens, out);
            }
        };
        let x = &self.quantized[if linear.input_norm.is_some() {
            index
        } else {
            0
        }];
        let panel = self.tokens * PANEL_ROWS;
        let at_once = products.len() / panel;
        for (start, out) in panels
            .clone()
            .step_by(at_once)
            .zip(out.chunks_mut(at_once * panel))
        {
            let products = &mut products[..out.len()];
            kernels.ternary_matmul(
                &linear.weights,
                start..panels.end.min(start + at_once),
                x,
                products,
            );
            let pieces = products
                .chunks_exact(PANEL_ROWS)
                .zip(out.chunks_exact_mut(PANEL_ROWS));
            for (piece, (products, out)) in pieces.enumerate() {
                kernels.dequantize(products, linear.scale / x.scale(piece % self.tokens), out);
            }
        }
    }
}

/// The tokens that one worker writes.
struct FillPart<'a> {
    tokens: Range<usize>,
    quantized: Vec<Vec<QuantizedTokenMut<'a>>>, // [stream][token of the range]
    dense: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl FillPart<'_> {
    fn fill(
        mut self,
        kernels: Kernels,
        projections: &Projections,
        write_row: impl Fn(usize, &mut [f32], &mut [f32]),
    ) {
        let columns = projections.columns();
        let row = &mut self.scratch.row[..columns];
        for (i, token) in self.tokens.enumerate() {
            write_row(token, row, &mut self.scratch.spare);
            for (stream, linear) in self.quantized.iter_mut().zip(&projections.linears) {
                match linear {
                    Linear::Ternary(TernaryLinear {
                        input_norm: Some(norm),
                        ..
                    }) => {
                        let normed = &mut self.scratch.spare[..columns];
                        norm.apply(kernels, row, normed);
                        kernels.quantize(normed, &mut stream[i]);
                    }
                    // Linears without a norm share the first stream, whoever they are.
                    Linear::Ternary(_) | Linear::Dense(_) => kernels.quantize(row, &mut stream[i]),
                }
            }
            if let Some(dense) = self.dense.chunks_exact_mut(columns).nth(i) {
                dense.copy_from_slice(row);
            }
        }
    }
}

/// Whoever works on a step: the kernels, the threads, and each worker's own memory.
pub(super) struct Crew {
    pub(super) kernels: Kernels,
    pub(super) pool: Pool,
    pub(super) scratch: Vec<Scratch>,
}

/// The memory of one worker.
pub(super) struct Scratch {
    row: Vec<f32>,
    spare: Vec<f32>,
    products: Vec<i32>,
    pub(super) attention: AttentionState,
}

impl Scratch {
    /// For rows of up to `max_width` values, up to `max_tokens` tokens, and `attention`.
    pub(super) fn new(max_width: usize, max_tokens: usize, attention: AttentionState) -> Scratch {
        Scratch {
            row: vec![0.0; max_width],
            spare: vec![0.0; max_width],
            products: vec![0; PRODUCTS_AT_ONCE.max(max_tokens * PANEL_ROWS)],
            attention,
        }
    }
}

/// Adds each token's product to its hidden state.
pub(super) fn add_product(crew: &mut Crew, product: Product<'_>, hidden: &mut [f32]) {
    let width = product.rows();
    let shares = ranges(hidden.len() / width, crew.pool.workers());
    let parts = shares.clone().zip(split_rows(hidden, width, shares));
    let kernels = crew.kernels;
    crew.pool.run_parts(parts, |_, (tokens, hidden)| {
        for (token, hidden) in tokens.zip(hidden.chunks_exact_mut(width)) {
            for (hidden, piece) in hidden.chunks_mut(PANEL_ROWS).zip(product.pieces(token)) {
                kernels.add(hidden, piece);
            }
        }
    });
}
