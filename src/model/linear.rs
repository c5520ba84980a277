//! Linear layers: multiply panels on all workers, scale.
//!
//! Always true: what a token receives depends on that token alone. Workers share panels of rows, never a sum.

use std::ops::Range;
use std::sync::Arc;

use sterna_kernels::{DenseMatrix, Kernels, PANEL_ROWS, PrefetchQueue, TernaryMatrix, prefetch};

use super::config::Activation;
use super::head::ScreenedHead;
use super::inputs::{Crew, Inputs, Scratch};
use super::pool::{ranges, split_rows};

/// How far ahead of its use a token's piece of a product is asked for: the panels of many tokens are far apart.
const PANELS_AHEAD: usize = 4;

/// RMS norm with learned weights.
pub(super) struct Norm {
    pub(super) weight: Vec<f32>,
    pub(super) eps: f32,
}

impl Norm {
    pub(super) fn apply(&self, kernels: Kernels, x: &[f32], out: &mut [f32]) {
        kernels.rms_norm(x, &self.weight, self.eps, out);
    }

    /// Of several rows.
    pub(super) fn apply_all(&self, kernels: Kernels, x: &[f32], out: &mut [f32]) {
        let width = self.weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            self.apply(kernels, x, out);
        }
    }
}

/// One matrix of the model.
pub(super) enum Linear {
    Ternary(TernaryLinear),
    /// Left as floats by the checkpoint; perhaps shared (the embedding as output head).
    Dense(Arc<DenseMatrix>),
    /// Floats as well, but so many rows that most are only looked at in 8 bits.
    Screened(ScreenedHead),
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
            Linear::Screened(head) => head.exact().rows(),
        }
    }

    fn columns(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.columns(),
            Linear::Dense(weights) => weights.columns(),
            Linear::Screened(head) => head.exact().columns(),
        }
    }

    fn panels(&self) -> usize {
        self.rows().div_ceil(PANEL_ROWS)
    }

    /// Bytes of the weights that a product reads.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.bytes(),
            Linear::Dense(weights) => weights.bytes(),
            Linear::Screened(head) => head.screen().bytes(),
        }
    }

    /// The norm that its input goes through before it is quantized, if it has one of its own.
    pub(super) fn input_norm(&self) -> Option<&Norm> {
        match self {
            Linear::Ternary(linear) => linear.input_norm.as_ref(),
            Linear::Dense(_) | Linear::Screened(_) => None,
        }
    }

    /// Does it multiply quantized rows?
    fn reads_quantized(&self) -> bool {
        matches!(self, Linear::Ternary(_) | Linear::Screened(_))
    }

    /// Does it multiply rows of floats?
    pub(super) fn reads_floats(&self) -> bool {
        matches!(self, Linear::Dense(_) | Linear::Screened(_))
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

    pub(super) fn linears_mut(&mut self) -> &mut [Linear] {
        &mut self.linears
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
    pub(super) fn streams(&self) -> usize {
        if (self.linears.iter()).any(|linear| linear.input_norm().is_some()) {
            return self.linears.len();
        }
        usize::from(self.linears.iter().any(Linear::reads_quantized))
    }

    /// Multiplies all tokens of `inputs` by all linears. `out` holds `product_width` values a token.
    pub(super) fn multiply(&self, crew: &mut Crew, inputs: &Inputs, out: &mut [f32]) {
        self.multiply_before(crew, inputs, out, |_| std::iter::empty());
    }

    /// As [`Projections::multiply`], when `next(worker)` is what that worker reads afterwards.
    pub(super) fn multiply_before<'m, I: Iterator<Item = &'m [u16]>>(
        &self,
        crew: &mut Crew,
        inputs: &Inputs,
        out: &mut [f32],
        next: impl Fn(usize) -> I + Sync,
    ) {
        let panel = inputs.tokens() * PANEL_ROWS;
        let shares = ranges(self.product_width() / PANEL_ROWS, crew.pool.workers());
        let out = split_rows(
            &mut out[..self.product_width() * inputs.tokens()],
            panel,
            shares.clone(),
        );
        let kernels = crew.kernels;
        crew.pool.run_parts(
            shares.zip(out).zip(&mut crew.scratch),
            |worker, ((panels, mut out), scratch)| {
                let mut next = next(worker);
                let mut ahead = PrefetchQueue::new(&mut next);
                let mut first = 0;
                for (index, linear) in self.linears.iter().enumerate() {
                    let mine = panels.start.max(first)..panels.end.min(first + linear.panels());
                    if !mine.is_empty() {
                        let (now, later) =
                            std::mem::take(&mut out).split_at_mut(mine.len() * panel);
                        let of_linear = mine.start - first..mine.end - first;
                        let memory = (&mut scratch.factors, &mut ahead);
                        inputs.multiply(kernels, (linear, index), of_linear, memory, now);
                        out = later;
                    }
                    first += linear.panels();
                }
            },
        );
    }

    /// activation(gate) · up, of the two linears gate and up, for all tokens of `inputs`. What each of the two
    /// gives is used while it is in a worker's cache, and never seen by memory.
    pub(super) fn multiply_gated<'a>(
        &self,
        crew: &mut Crew,
        inputs: &Inputs,
        activation: Activation,
        out: &'a mut [f32],
    ) -> Product<'a> {
        let [gate, up] = &self.linears[..] else {
            panic!("a gate and what it is held before");
        };
        let panel = inputs.tokens() * PANEL_ROWS;
        let out = &mut out[..gate.panels() * panel];
        let shares = ranges(gate.panels(), crew.pool.workers());
        let parts = shares.clone().zip(split_rows(out, panel, shares));
        let kernels = crew.kernels;
        crew.pool.run_parts(
            parts.zip(&mut crew.scratch),
            |_, ((panels, out), scratch)| {
                let at_once = scratch.panels_at_once(inputs.tokens());
                let Scratch {
                    factors,
                    gates,
                    ups,
                    ..
                } = scratch;
                let starts = panels.clone().step_by(at_once);
                for (start, out) in starts.zip(out.chunks_mut(at_once * panel)) {
                    let range = start..panels.end.min(start + at_once);
                    let (gates, ups) = (&mut gates[..out.len()], &mut ups[..out.len()]);
                    let ahead = &mut PrefetchQueue::empty();
                    inputs.multiply(kernels, (gate, 0), range.clone(), (factors, ahead), gates);
                    inputs.multiply(kernels, (up, 1), range, (factors, ahead), ups);
                    match activation {
                        Activation::Relu2 => kernels.relu2_gate(gates, ups, out),
                        Activation::Silu => kernels.silu_gate(gates, ups, out),
                    }
                }
            },
        );
        Product {
            values: out,
            rows: gate.rows(),
            tokens: inputs.tokens(),
        }
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
    /// A token's values in a panel.
    fn piece(self, token: usize, panel: usize) -> &'a [f32] {
        let rows = (self.rows - panel * PANEL_ROWS).min(PANEL_ROWS);
        &self.values[(panel * self.tokens + token) * PANEL_ROWS..][..rows]
    }

    /// Adds the values of some tokens to `out`, `[token][rows]`.
    pub(super) fn add_to(self, tokens: Range<usize>, out: &mut [f32]) {
        self.for_each_piece(tokens, out, |out, piece| {
            out.iter_mut().zip(piece).for_each(|(out, x)| *out += x);
        });
    }

    /// Copies the values of some tokens, `[token][rows]`.
    pub(super) fn copy_to(self, tokens: Range<usize>, out: &mut [f32]) {
        self.for_each_piece(tokens, out, <[f32]>::copy_from_slice);
    }

    /// Copies a token's values `first..`, as many as `out` holds.
    pub(super) fn copy_part(self, token: usize, first: usize, out: &mut [f32]) {
        assert!(first + out.len() <= self.rows, "values of the product");
        let mut at = 0;
        while at < out.len() {
            let row = first + at;
            let piece = &self.piece(token, row / PANEL_ROWS)[row % PANEL_ROWS..];
            let count = piece.len().min(out.len() - at);
            let out = &mut out[at..at + count];
            on_piece(out, &piece[..count], <[f32]>::copy_from_slice);
            at += count;
        }
    }

    /// Panels outside, tokens inside: as the values stand in memory.
    fn for_each_piece(
        self,
        tokens: Range<usize>,
        out: &mut [f32],
        each: impl Fn(&mut [f32], &[f32]),
    ) {
        assert_eq!(out.len(), tokens.len() * self.rows, "one output a value");
        let panels = self.values.chunks_exact(self.tokens * PANEL_ROWS);
        let tokens = tokens.start * PANEL_ROWS..tokens.end * PANEL_ROWS;
        for (panel, values) in panels.enumerate() {
            let first = panel * PANEL_ROWS;
            let rows = (self.rows - first).min(PANEL_ROWS);
            let ahead = (panel + PANELS_AHEAD) * self.tokens * PANEL_ROWS;
            if let Some(values) = self.values.get(ahead + tokens.start..ahead + tokens.end) {
                prefetch(values);
            }
            let pieces = values[tokens.clone()].chunks_exact(PANEL_ROWS);
            for (out, piece) in out.chunks_exact_mut(self.rows).zip(pieces) {
                on_piece(&mut out[first..][..rows], &piece[..rows], &each);
            }
        }
    }
}

/// Calls `each` with both; if they are a whole piece, as most are, with a length that the compiler knows, so that no call remains.
#[inline(always)]
fn on_piece(out: &mut [f32], piece: &[f32], each: impl Fn(&mut [f32], &[f32])) {
    if out.len() == PANEL_ROWS {
        each(&mut out[..PANEL_ROWS], &piece[..PANEL_ROWS]);
    } else {
        each(out, piece);
    }
}

/// Adds each token's product to its hidden state, on all workers.
pub(super) fn add_product(crew: &mut Crew, product: Product<'_>, hidden: &mut [f32]) {
    let width = product.rows;
    let shares = ranges(hidden.len() / width, crew.pool.workers());
    let parts = shares.clone().zip(split_rows(hidden, width, shares));
    crew.pool
        .run_parts(parts, |_, (tokens, hidden)| product.add_to(tokens, hidden));
}
