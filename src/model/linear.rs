//! Linear layers, multiplied by all workers.
//!
//! Invariant: a token's product depends on that token alone. Workers divide panels of rows among
//! them and never split a sum.

use std::ops::Range;
use std::sync::Arc;

use sterna_kernels::{
    DenseMatrix, GroupSize, Kernels, PANEL_ROWS, PrefetchQueue, ScaledActivations, TernaryMatrix,
};

use super::gelu;
use super::inputs::{InputFormat, Inputs, MAX_STREAMS};
use super::low_rank::LowRankCorrection;
use super::norm::Norm;
use super::pool::{ranges, split_rows};
use super::product::Product;
use super::rotation::RowRotation;
use super::workers::{Scratch, Workers};
use crate::checkpoint::Activation;
use crate::fault::{self, Place};

/// One matrix of the model.
pub(super) enum Linear {
    Ternary(TernaryLinear),
    /// A matrix that the checkpoint keeps as floats. A tied output head shares it with the
    /// embedding.
    Dense(Arc<DenseMatrix>),
}

/// Ternary weights: y = (W·q) · scale / s, where q is the quantized input and s is its scale. A
/// low-rank correction of the input as it was before quantization is added.
///
/// If the weights have a scale for each group of columns, the input has one for each group too, and
/// y is the sum of these products over the groups.
pub(super) struct TernaryLinear {
    pub(super) weights: TernaryMatrix,
    /// The scale of all weights; 1 if each group has its own.
    pub(super) scale: f32,
    /// The norm that the checkpoint applies to the input before it is quantized, if any.
    pub(super) input_norm: Option<Norm>,
    /// The correction that the checkpoint adds to the product, if any.
    pub(super) correction: Option<LowRankCorrection>,
    /// What the checkpoint adds to the product, if anything: a value for each row, in whole panels.
    pub(super) bias: Option<Vec<f32>>,
}

impl TernaryLinear {
    /// Adds the bias to the products of some panels, `[panel][token][PANEL_ROWS]`.
    fn add_bias(&self, panels: Range<usize>, tokens: usize, out: &mut [f32]) {
        let Some(bias) = &self.bias else {
            return;
        };
        let own = bias[panels.start * PANEL_ROWS..panels.end * PANEL_ROWS].chunks_exact(PANEL_ROWS);
        for (products, bias) in out.chunks_exact_mut(tokens * PANEL_ROWS).zip(own) {
            for token in products.chunks_exact_mut(PANEL_ROWS) {
                token.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
            }
        }
    }
}

/// The panels that one worker multiplies by, and the memory that it uses.
struct PanelTask<'t, 'p, 'm> {
    /// The place of the linear among its projections.
    index: usize,
    /// The panels of the linear.
    panels: Range<usize>,
    factors: &'t mut Vec<f32>,
    corrections: &'t mut [f32],
    /// What the kernels prefetch meanwhile.
    prefetches: &'t mut PrefetchQueue<'p, 'm>,
}

impl Linear {
    /// Returns the number of rows: the values of a product.
    pub(super) fn rows(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.rows(),
            Linear::Dense(weights) => weights.rows(),
        }
    }

    /// Returns the number of columns: the values of an input row.
    pub(super) fn columns(&self) -> usize {
        match self {
            Linear::Ternary(linear) => linear.weights.columns(),
            Linear::Dense(weights) => weights.columns(),
        }
    }

    /// Returns the bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Linear::Ternary(linear) => {
                let correction = linear.correction.as_ref();
                linear.weights.bytes() + correction.map_or(0, LowRankCorrection::bytes)
            }
            Linear::Dense(weights) => weights.bytes(),
        }
    }

    /// Returns the columns that share a scale, if each group of columns has its own.
    pub(super) fn group(&self) -> Option<GroupSize> {
        match self {
            Linear::Ternary(linear) => linear.weights.group(),
            Linear::Dense(_) => None,
        }
    }

    fn panels(&self) -> usize {
        self.rows().div_ceil(PANEL_ROWS)
    }

    fn input_norm(&self) -> Option<&Norm> {
        match self {
            Linear::Ternary(linear) => linear.input_norm.as_ref(),
            Linear::Dense(_) => None,
        }
    }

    fn correction(&self) -> Option<&LowRankCorrection> {
        match self {
            Linear::Ternary(linear) => linear.correction.as_ref(),
            Linear::Dense(_) => None,
        }
    }

    /// Multiplies all rows of `inputs` by the panels of `task`.
    fn multiply(
        &self,
        kernels: Kernels,
        inputs: &Inputs,
        task: PanelTask<'_, '_, '_>,
        out: &mut [f32],
    ) {
        let linear = match self {
            Linear::Ternary(linear) => linear,
            Linear::Dense(weights) => {
                let (x, tokens) = (inputs.floats(), inputs.tokens());
                return kernels.dense_matmul(weights, task.panels, x, tokens, out);
            }
        };
        // Linears without a norm of their own share the first stream.
        let stream = linear.input_norm.as_ref().map_or(0, |_| task.index);
        let x = inputs.quantized(stream);
        let factors = task.factors;
        factors.clear();
        factors.extend(x.scales().iter().map(|scale| linear.scale / scale));
        let x = ScaledActivations {
            activations: x,
            factors,
        };
        let panels = task.panels;
        kernels.ternary_matmul(&linear.weights, panels.clone(), x, out, task.prefetches);
        if let Some(correction) = &linear.correction {
            let lowered = inputs.lowered(task.index);
            correction.add(kernels, panels.clone(), lowered, task.corrections, out);
        }
        linear.add_bias(panels, inputs.tokens(), out);
    }
}

/// Computes activation(gate) · up. May change the gates and ups.
pub(super) fn activate(
    kernels: Kernels,
    activation: Activation,
    (gates, ups): (&mut [f32], &mut [f32]),
    out: &mut [f32],
) {
    match activation {
        Activation::Relu2 => kernels.relu2_gate(gates, ups, out),
        Activation::Silu => kernels.silu_gate(gates, ups, out),
        Activation::GeluTanh => {
            gelu::as_silu_gate(gates, ups);
            kernels.silu_gate(gates, ups, out);
        }
    }
}

/// Linears that read the same rows, such as query, key and value. Their products are neighbours in
/// memory.
pub(super) struct Projections {
    linears: Vec<Linear>,
    rotation: Option<RowRotation>,
    rotates_floats: bool,
}

impl Projections {
    /// Joins linears. `rotation` is the rotation of their input, if they are stored rotated.
    pub(super) fn new(linears: Vec<Linear>, rotation: Option<RowRotation>) -> Projections {
        let rotates_floats = rotation.is_some();
        Projections::with_floats(linears, rotation, rotates_floats)
    }

    /// Joins linears of which the float ones are stored rotated only if `rotates_floats`.
    pub(super) fn with_floats(
        linears: Vec<Linear>,
        rotation: Option<RowRotation>,
        rotates_floats: bool,
    ) -> Projections {
        assert!(
            (1..=MAX_STREAMS).contains(&linears.len()),
            "1 to {MAX_STREAMS} linears read the same rows"
        );
        assert!(
            (linears.windows(2)).all(|pair| pair[0].columns() == pair[1].columns()),
            "linears that read the same rows have the same columns"
        );
        Projections {
            linears,
            rotation,
            rotates_floats,
        }
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

    /// Returns the number of values of all products of one token, padded to whole panels.
    pub(super) fn product_width(&self) -> usize {
        self.linears.iter().map(Linear::panels).sum::<usize>() * PANEL_ROWS
    }

    /// Returns the form of the input rows. If a linear has an input norm, every linear has a
    /// quantized stream of its own; otherwise the ternary linears share one.
    pub(super) fn input_format(&self) -> InputFormat<'_> {
        let (mut norms, mut corrections) = ([None; MAX_STREAMS], [None; MAX_STREAMS]);
        for (index, linear) in self.linears.iter().enumerate() {
            norms[index] = linear.input_norm();
            corrections[index] = linear.correction();
        }
        let is_ternary = |linear: &Linear| matches!(linear, Linear::Ternary(_));
        let group = self.linears.iter().find_map(Linear::group);
        InputFormat {
            group,
            columns: self.columns(),
            streams: if norms.iter().any(Option::is_some) {
                self.linears.len()
            } else {
                usize::from(self.linears.iter().any(is_ternary))
            },
            norms,
            corrections,
            rotation: self.rotation.as_ref(),
            rotates_floats: self.rotates_floats,
            floats: !self.linears.iter().all(is_ternary),
        }
    }

    /// Multiplies all rows of `inputs` by all linears. `out` has room for `product_width` values
    /// per token.
    pub(super) fn multiply(&self, workers: &mut Workers, inputs: &Inputs, out: &mut [f32]) {
        self.multiply_and_prefetch(workers, inputs, out, |_| std::iter::empty());
    }

    /// Multiplies as [`Projections::multiply`] does. Meanwhile each worker prefetches
    /// `next(worker)`, which is what it reads after the product.
    pub(super) fn multiply_and_prefetch<'n, I: Iterator<Item = &'n [u8]>>(
        &self,
        workers: &mut Workers,
        inputs: &Inputs,
        out: &mut [f32],
        next: impl Fn(usize) -> I + Sync,
    ) {
        let panel = inputs.tokens() * PANEL_ROWS;
        let out = &mut out[..self.product_width() * inputs.tokens()];
        let shares = ranges(self.product_width() / PANEL_ROWS, workers.pool.workers());
        let parts = shares.clone().zip(split_rows(out, panel, shares));
        let parts = parts.zip(&mut workers.scratch);
        let kernels = workers.kernels;
        let pool = &mut workers.pool;
        pool.run_parts(parts, |worker, ((panels, mut out), scratch)| {
            let mut next = next(worker);
            let mut prefetches = PrefetchQueue::new(&mut next);
            let mut first = 0;
            for (index, linear) in self.linears.iter().enumerate() {
                let own = panels.start.max(first)..panels.end.min(first + linear.panels());
                if !own.is_empty() {
                    let (now, later) = std::mem::take(&mut out).split_at_mut(own.len() * panel);
                    let task = PanelTask {
                        index,
                        panels: own.start - first..own.end - first,
                        factors: &mut scratch.factors,
                        corrections: &mut scratch.corrections,
                        prefetches: &mut prefetches,
                    };
                    linear.multiply(kernels, inputs, task, now);
                    out = later;
                }
                first += linear.panels();
            }
            fault::pass(Place::PanelsMultiplied);
        });
    }

    /// Computes activation(gate) · up for all rows of `inputs`. The linears are gate and up. A
    /// worker combines the two products while they are in its cache; they never reach memory.
    pub(super) fn multiply_gated(
        &self,
        workers: &mut Workers,
        inputs: &Inputs,
        activation: Activation,
        out: &mut [f32],
    ) {
        let [gate, up] = &self.linears[..] else {
            panic!("gate and up are two linears");
        };
        let panel = inputs.tokens() * PANEL_ROWS;
        let out = &mut out[..gate.panels() * panel];
        let shares = ranges(gate.panels(), workers.pool.workers());
        let parts = shares.clone().zip(split_rows(out, panel, shares));
        let parts = parts.zip(&mut workers.scratch);
        let kernels = workers.kernels;
        let pool = &mut workers.pool;
        pool.run_parts(parts, |_, ((panels, out), scratch)| {
            let at_once = scratch.panels_at_once(inputs.tokens());
            let Scratch {
                factors,
                gates,
                ups,
                corrections,
                ..
            } = scratch;
            let starts = panels.clone().step_by(at_once);
            for (start, out) in starts.zip(out.chunks_mut(at_once * panel)) {
                let (gates, ups) = (&mut gates[..out.len()], &mut ups[..out.len()]);
                let pair = [(gate, &mut *gates), (up, &mut *ups)];
                for (index, (linear, out)) in pair.into_iter().enumerate() {
                    let task = PanelTask {
                        index,
                        panels: start..panels.end.min(start + at_once),
                        factors: &mut *factors,
                        corrections: &mut *corrections,
                        prefetches: &mut PrefetchQueue::empty(),
                    };
                    linear.multiply(kernels, inputs, task, out);
                }
                fault::pass(Place::GatesMultiplied);
                activate(kernels, activation, (gates, ups), out);
                fault::pass(Place::GatesActivated);
            }
        });
    }

    /// Returns the product of linear `index` among the `products` that `multiply` wrote.
    pub(super) fn product<'a>(
        &self,
        index: usize,
        products: &'a [f32],
        tokens: usize,
    ) -> Product<'a> {
        let before: usize = self.linears[..index].iter().map(Linear::panels).sum();
        let linear = &self.linears[index];
        let panel = PANEL_ROWS * tokens;
        Product {
            values: &products[before * panel..][..linear.panels() * panel],
            rows: linear.rows(),
            tokens,
        }
    }
}
