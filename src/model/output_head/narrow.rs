//! A copy of a large output head in about 4 bits, with proven bounds: which logits can be large.
//!
//! A row w of the head is approximated by the mean row m and a rounded rest a. The logit of an
//! input x differs from the estimate m·x + a·x′, where x′ is x rounded, by (w − m − a)·x +
//! a·(x − x′). By the inequality of Cauchy and Schwarz, that is at most ‖w − m − a‖·‖x‖ +
//! ‖a‖·‖x − x′‖. The norms of the rows are stored.
//!
//! A few columns of the input have most of its norm. In these columns a has 8 bits, in the others
//! 4, and each part has norms of its own. So the bound is about half as wide.
//!
//! A row has two logits: of the floats, and of the row and the input in 8 bits. The bound is for
//! both: it takes the greater of both errors, and both inputs.
//!
//! Invariant: no logit exceeds its limit, as computed in f32, whatever its head and input are. Only
//! how tight the limits are depends on which columns are large and on the mean row.

use std::ops::Range;

use sterna_kernels::{
    DenseMatrix, FourBitMatrix, Int8Matrix, Kernels, PANEL_ROWS, QuantizedActivations,
};

use crate::fault::{self, Place};
use crate::model::pool::{Pool, ranges, split_rows};
use crate::model::workers::Workers;

/// The most inputs of a step.
pub(super) const MAX_INPUTS: usize = 4;

/// The columns in 8 bits: those of the largest inputs.
const LARGE_COLUMNS: usize = 32;
/// A column for each part.
pub(super) const MIN_COLUMNS: usize = PARTS;
/// The rows that count in the mean row.
const MEAN_ROWS: usize = 512;
/// The panels that a worker builds at a time, in about a millisecond.
const PANELS_AT_ONCE: usize = 2;
/// The forms of an input: its floats, and the same in 8 bits as the 8-bit head reads it.
const FORMS: usize = 2;
/// The parts of a row: large columns, and the others.
const PARTS: usize = 2;
/// If the product of the norms of an input and a row is greater than this, a sum might overflow.
const MAX_PRODUCT: f32 = 1e30;
/// More than what a sum of products loses because some are too small for an f32.
const UNDERFLOW: f32 = 1e-28;

/// The copy and its bounds.
pub(super) struct NarrowCopy {
    order: Vec<u32>, // The columns, those of large inputs first.
    mean: Vec<f32>,  // In that order.
    large: Int8Matrix,
    rest: FourBitMatrix,
    facts: Vec<PanelFacts>, // [panel]
    mean_norm: f32,
    /// A bound of the norms of all rows that are built.
    greatest_norm: f32,
    built: usize, // Panels.
    inputs: NarrowInputs,
}

/// What the limits of a panel's rows need besides the sums, by part. Rows beyond the last have
/// zeros.
#[derive(Clone, Copy, Default)]
struct PanelFacts {
    scales: [[f32; PANEL_ROWS]; PARTS],
    /// The norm of a row less its copy and the mean row.
    errors: [[f32; PANEL_ROWS]; PARTS],
    /// The norm of the copy of a row.
    kept: [[f32; PANEL_ROWS]; PARTS],
}

/// The inputs of a step, each in all forms, `[token][form]`.
struct NarrowInputs {
    parts: [QuantizedActivations; PARTS],
    weights: Vec<BoundWeights>,
    ordered: Vec<f32>,
}

/// What the norms of a row are multiplied by for the bound of one input.
#[derive(Clone, Copy)]
struct BoundWeights {
    errors: [f32; PARTS],
    kept: [f32; PARTS],
    /// What the sums of the rounded input are multiplied by, besides the scale of the row.
    factors: [f32; PARTS],
    /// Added to the estimate of each row: that of the mean row, and the errors of sums.
    all: f32,
}

impl NarrowCopy {
    /// Returns the bytes of the copy of a head.
    pub(super) fn bytes_of(rows: usize, columns: usize) -> usize {
        let large = large_columns(columns);
        rows * (large + (columns - large).div_ceil(2) + size_of::<f32>() * 4 * PARTS)
    }

    /// Allocates the copy of `exact` for inputs whose squares are, on average, in proportion to
    /// `squares`.
    pub(super) fn new(kernels: Kernels, exact: &DenseMatrix, squares: &[f32]) -> NarrowCopy {
        let (rows, columns) = (exact.rows(), exact.columns());
        let large = large_columns(columns);
        let mut order: Vec<u32> = (0..columns as u32).collect();
        let square = |column: &u32| squares[*column as usize];
        order.sort_by(|a, b| square(b).total_cmp(&square(a)));
        let mean = mean_row(kernels, exact);
        let inputs = MAX_INPUTS * FORMS;
        NarrowCopy {
            facts: vec![PanelFacts::default(); rows.div_ceil(PANEL_ROWS)],
            mean_norm: norm(mean.iter().copied()),
            greatest_norm: 0.0,
            mean: order.iter().map(|column| mean[*column as usize]).collect(),
            order,
            large: Int8Matrix::new(rows, large),
            rest: FourBitMatrix::new(rows, columns - large),
            built: 0,
            inputs: NarrowInputs {
                parts: [large, columns - large]
                    .map(|columns| QuantizedActivations::new(inputs, columns)),
                weights: Vec::with_capacity(inputs),
                ordered: vec![0.0; columns],
            },
        }
    }

    /// Builds the next panels from the floats and their 8-bit copy. Returns whether all are built.
    pub(super) fn build(
        &mut self,
        kernels: Kernels,
        pool: &mut Pool,
        exact: &DenseMatrix,
        screen: &Int8Matrix,
    ) -> bool {
        let (begin, all, split) = (self.built, self.large.panels(), self.large.columns());
        let count = (all - begin).min(PANELS_AT_ONCE * pool.workers());
        let panels = self.large.panels_mut().zip(self.rest.panels_mut());
        let panels = panels.zip(&mut self.facts).skip(begin).take(count);
        let mut panels: Vec<_> = panels.collect();
        let (order, mean) = (&self.order, &self.mean);
        let parts = split_rows(&mut panels, 1, ranges(count, pool.workers()));
        pool.run_parts(parts, |_, panels| {
            let mut copy = RowCopy::new(order, mean);
            for ((large, rest), facts) in panels {
                for (place, row) in rest.rows().enumerate() {
                    kernels.dense_row(exact, row, &mut copy.floats);
                    copy.arrange(screen.scales(row / PANEL_ROWS)[row % PANEL_ROWS]);
                    let parts = copy.stored.split_at_mut(split);
                    large.set_row(row, parts.0);
                    rest.set_row(row, parts.1);
                    let scales = [large.scales()[place], rest.scales()[place]];
                    Int8Matrix::round(parts.0, scales[0]);
                    let kept = [parts.0, parts.1].map(|part| norm(part.iter().copied()));
                    let errors = copy.errors(split);
                    for part in 0..PARTS {
                        facts.scales[part][place] = scales[part];
                        facts.kept[part][place] = kept[part];
                        facts.errors[part][place] = errors[part];
                    }
                }
            }
        });
        drop(panels);
        for facts in &self.facts[begin..begin + count] {
            for place in 0..PANEL_ROWS {
                let of_part = |part: usize| facts.errors[part][place] + facts.kept[part][place];
                let bound = self.mean_norm + (0..PARTS).map(of_part).sum::<f32>();
                let bound = if bound.is_finite() {
                    bound
                } else {
                    f32::INFINITY
                };
                self.greatest_norm = bound.max(self.greatest_norm);
            }
        }
        self.built += count;
        self.built == all
    }

    /// Returns whether all panels are built.
    pub(super) fn is_built(&self) -> bool {
        self.built == self.large.panels()
    }

    /// Takes the inputs of a step: the floats `x` of each token, and the same in 8 bits. Returns
    /// whether their logits have limits: not if a number is not finite or might overflow.
    pub(super) fn take_inputs<'a>(
        &mut self,
        kernels: Kernels,
        x: impl ExactSizeIterator<Item = &'a [f32]>,
        rounded: &QuantizedActivations,
    ) -> bool {
        let NarrowInputs {
            parts,
            weights,
            ordered,
        } = &mut self.inputs;
        let (order, split) = (&self.order, self.large.columns());
        for (part, columns) in parts.iter_mut().zip([split, order.len() - split]) {
            part.reset(x.len() * FORMS, columns);
        }
        weights.clear();
        let [large, rest] = parts;
        let mut inputs = large.tokens_mut().zip(rest.tokens_mut());
        for (token, x) in x.enumerate() {
            let (q, factor) = (rounded.row(token), 1.0 / rounded.scales()[token]);
            for form in 0..FORMS {
                for (value, column) in ordered.iter_mut().zip(&self.order) {
                    let column = *column as usize;
                    *value = if form == 0 {
                        x[column]
                    } else {
                        f32::from(q[column]) * factor
                    };
                }
                let (large, rest) = inputs.next().expect("an input of each form");
                let values = ordered.split_at(split);
                let parts = [(large, values.0), (rest, values.1)];
                let parts = parts.map(|(mut quantized, values)| {
                    kernels.quantize(values, &mut quantized);
                    let (q, factor) = (quantized.values(), 1.0 / quantized.scale());
                    let errors = values
                        .iter()
                        .zip(q)
                        .map(|(x, q)| x - f32::from(*q) * factor);
                    (norm(values.iter().copied()), norm(errors), factor)
                });
                let all = parts[0].0 + parts[1].0;
                let product = all * self.greatest_norm;
                if product.is_nan() || product > MAX_PRODUCT {
                    return false;
                }
                let rounding = rounding_of_sums(order.len()) * all;
                weights.push(BoundWeights {
                    errors: parts.map(|(norm, ..)| norm + rounding),
                    kept: parts.map(|(_, error, _)| error + rounding),
                    factors: parts.map(|(.., factor)| factor),
                    all: dot(ordered, &self.mean) + rounding * self.mean_norm + UNDERFLOW,
                });
            }
        }
        true
    }

    /// Computes the limits of all logits of the inputs, panel-major, `[panel][token][PANEL_ROWS]`,
    /// and the maximum of each panel and token. Rows beyond the last have the limit −∞.
    pub(super) fn limits(&self, workers: &mut Workers, limits: &mut [f32], maxima: &mut [f32]) {
        let tokens = self.inputs.weights.len() / FORMS;
        let shares = ranges(self.large.panels(), workers.pool.workers());
        let maxima = split_rows(maxima, tokens, shares.clone());
        let limits = split_rows(limits, tokens * PANEL_ROWS, shares.clone());
        let parts = shares.zip(limits.zip(maxima));
        let kernels = workers.kernels;
        let pool = &mut workers.pool;
        pool.run_parts(parts, |_, (panels, (limits, maxima))| {
            self.limits_of_panels(kernels, panels, limits, maxima);
            fault::pass(Place::HeadScreened);
        });
    }

    fn limits_of_panels(
        &self,
        kernels: Kernels,
        panels: Range<usize>,
        limits: &mut [f32],
        maxima: &mut [f32],
    ) {
        let tokens = self.inputs.weights.len() / FORMS;
        let [large_inputs, rest_inputs] = &self.inputs.parts;
        let mut sums = [[0; MAX_INPUTS * FORMS * PANEL_ROWS]; PARTS];
        let [large, rest] = sums
            .each_mut()
            .map(|sums| &mut sums[..tokens * FORMS * PANEL_ROWS]);
        let outs = limits.chunks_exact_mut(tokens * PANEL_ROWS);
        for (panel, (limits, maxima)) in panels.zip(outs.zip(maxima.chunks_exact_mut(tokens))) {
            kernels.int8_matmul(&self.large, panel..panel + 1, large_inputs, large);
            kernels.four_bit_matmul(&self.rest, panel..panel + 1, rest_inputs, rest);
            self.limits_of_panel(panel, [large, rest], limits, maxima);
        }
    }

    /// Computes the limits of one panel from the sums of both parts, `[token][form][PANEL_ROWS]`.
    fn limits_of_panel(
        &self,
        panel: usize,
        sums: [&[i32]; PARTS],
        limits: &mut [f32],
        maxima: &mut [f32],
    ) {
        let PanelFacts {
            scales,
            errors,
            kept,
        } = &self.facts[panel];
        let rows = (self.large.rows() - panel * PANEL_ROWS).min(PANEL_ROWS);
        let [large, rest] = sums.map(|sums| sums.as_chunks::<PANEL_ROWS>().0);
        let inputs = self.inputs.weights.iter().zip(large.iter().zip(rest));
        let limits = limits.as_chunks_mut::<PANEL_ROWS>().0;
        limits.as_flattened_mut().fill(f32::NEG_INFINITY);
        for (input, (weights, (large, rest))) in inputs.enumerate() {
            let sums = [large, rest];
            let limits = &mut limits[input / FORMS];
            for lane in 0..PANEL_ROWS {
                let mut limit = weights.all;
                for part in 0..PARTS {
                    let scale = scales[part][lane] * weights.factors[part];
                    limit += sums[part][lane] as f32 * scale
                        + errors[part][lane] * weights.errors[part]
                        + kept[part][lane] * weights.kept[part];
                }
                limits[lane] = if limit > limits[lane] {
                    limit
                } else {
                    limits[lane]
                };
            }
        }
        for (limits, maximum) in limits.iter_mut().zip(maxima) {
            limits[rows..].fill(f32::NEG_INFINITY);
            *maximum = limits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        }
    }
}

/// The memory to make the copy of a row.
struct RowCopy<'a> {
    columns: &'a [u32],
    mean: &'a [f32],
    /// The row, in its own order.
    floats: Vec<f32>,
    /// The row less the mean row, in the order of the copy.
    exact: Vec<f32>,
    /// The same of the row in 8 bits.
    rounded: Vec<f32>,
    /// What is stored.
    stored: Vec<f32>,
}

impl<'a> RowCopy<'a> {
    fn new(columns: &'a [u32], mean: &'a [f32]) -> RowCopy<'a> {
        let row = vec![0.0; columns.len()];
        RowCopy {
            columns,
            mean,
            floats: row.clone(),
            exact: row.clone(),
            rounded: row.clone(),
            stored: row,
        }
    }

    /// Puts the row, whose 8-bit copy has this scale, into the order of the copy.
    fn arrange(&mut self, scale: f32) {
        let pairs = self.columns.iter().zip(self.mean);
        for (out, (column, mean)) in self.exact.iter_mut().zip(pairs.clone()) {
            *out = self.floats[*column as usize] - mean;
        }
        Int8Matrix::round(&mut self.floats, scale);
        for (out, (column, mean)) in self.rounded.iter_mut().zip(pairs) {
            *out = self.floats[*column as usize] - mean;
        }
        self.stored.copy_from_slice(&self.rounded);
    }

    /// Returns the norms of what is not stored of each part, which begins at `split`, of both rows
    /// the greater.
    fn errors(&self, split: usize) -> [f32; PARTS] {
        [0..split, split..self.stored.len()].map(|part| {
            let stored = &self.stored[part.clone()];
            let [exact, rounded] = [&self.exact, &self.rounded].map(|row| {
                let pairs = row[part.clone()].iter().zip(stored);
                norm(pairs.map(|(row, stored)| row - stored))
            });
            // If one is NaN, the sum is too.
            if exact > rounded {
                exact
            } else {
                rounded + 0.0 * exact
            }
        })
    }
}

/// Returns a bound of the error of a logit's sum in f32, as a share of the norms of row and input:
/// of sixteen lanes of fused products, their sum, and the operations of the estimate.
fn rounding_of_sums(columns: usize) -> f32 {
    (columns / 16 + 64) as f32 * f32::EPSILON
}

fn large_columns(columns: usize) -> usize {
    (columns / 4).clamp(1, LARGE_COLUMNS)
}

/// Returns the mean of some rows.
fn mean_row(kernels: Kernels, exact: &DenseMatrix) -> Vec<f32> {
    let rows = (0..exact.rows()).step_by(exact.rows().div_ceil(MEAN_ROWS));
    let per_row = 1.0 / rows.len() as f32;
    let mut mean = vec![0.0; exact.columns()];
    let mut floats = mean.clone();
    for row in rows {
        kernels.dense_row(exact, row, &mut floats);
        for (mean, value) in mean.iter_mut().zip(&floats) {
            *mean += value * per_row;
        }
    }
    mean
}

/// Returns the norm, rounded up.
fn norm(values: impl Iterator<Item = f32>) -> f32 {
    let squares = values.map(|value| f64::from(value) * f64::from(value));
    ((squares.sum::<f64>().sqrt() * (1.0 + 1e-6)) as f32).next_up()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum::<f64>() as f32
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    /// The input of the greatest error is what the copy leaves out of a row: then the error is the
    /// bound.
    #[test]
    fn the_limit_holds_for_the_worst_input() {
        let mut random = Random::from_env();
        let kernels = Kernels::best();
        let mut pool = Pool::new(1, false);
        let (rows, columns) = (50, 48);
        let weights = (0..rows * columns).map(|_| random.fraction_f32() - 0.3);
        let weights: Vec<f32> = weights.collect();
        let exact = DenseMatrix::from_f32(rows, columns, weights.clone());
        let mut screen = Int8Matrix::new(rows, columns);
        for mut panel in screen.panels_mut() {
            for row in panel.rows() {
                panel.set_row(row, &weights[row * columns..][..columns]);
            }
        }
        let mut copy = NarrowCopy::new(kernels, &exact, &vec![1.0; columns]);
        while !copy.build(kernels, &mut pool, &exact, &screen) {}
        for row in 0..rows {
            let left_out = left_out(&copy, row, &weights[row * columns..][..columns]);
            for sign in [1.0, -1.0] {
                let x: Vec<f32> = left_out.iter().map(|x| sign * x).collect();
                let mut rounded = QuantizedActivations::new(1, columns);
                rounded.reset(1, columns);
                kernels.quantize(&x, &mut rounded.tokens_mut().next().unwrap());
                assert!(copy.take_inputs(kernels, [&x[..]].into_iter(), &rounded));
                let mut limits = vec![0.0; rows.next_multiple_of(PANEL_ROWS)];
                let mut maxima = [0.0; 2];
                copy.limits_of_panels(kernels, 0..2, &mut limits, &mut maxima);
                let mut logit = [0.0];
                kernels.dense_dots(&exact, &[row as u32], &x, &mut logit);
                assert!(limits[row] >= logit[0], "{} of {}", limits[row], logit[0]);
                let square = x.iter().map(|x| x * x).sum::<f32>();
                let is_tight = limits[row] - logit[0] < 0.2 * square;
                assert!(is_tight || sign < 0.0, "{} of {}", limits[row], logit[0]);
            }
        }
    }

    /// Returns what the 4-bit part of a copy leaves out of a row.
    fn left_out(copy: &NarrowCopy, row: usize, weights: &[f32]) -> Vec<f32> {
        let scale = copy.rest.scales(row / PANEL_ROWS)[row % PANEL_ROWS];
        let split = copy.large.columns();
        let mut left_out = vec![0.0; weights.len()];
        for place in split..weights.len() {
            let column = copy.order[place] as usize;
            let kept = f32::from(copy.rest.weight(row, place - split)) * scale;
            left_out[column] = weights[column] - copy.mean[place] - kept;
        }
        left_out
    }
}
