//! The feed-forward half of a layer as a mixture of experts (Shazeer et al., arXiv:1701.06538).
//!
//! For each token, with the normed residual x:
//!
//! ```text
//! logits = router · x                        in f32
//! the k experts with the largest logits, of equal ones the lower
//! weight of an expert = softmax of its logit, over the k experts or over all
//! y = Σ weight · down(activation(gate · x) · (up · x))    by expert, ascending, in f32
//! ```
//!
//! Maple limits gate · x to at most 7, and up · x to the range from −7 to 7.
//!
//! The rows of a step are sorted by expert, so each expert's weights are read once. Workers divide
//! the panels of the experts that have rows; other experts cost nothing.
//!
//! Invariant: what a token gets depends on that token alone: its experts, their order, and the
//! quantized rows of each.

use std::ops::Range;

use sterna_kernels::{
    HugeSlice, Kernels, LogitScale, PANEL_ROWS, PrefetchQueue, QuantizedActivations,
    ScaledActivations, TernaryMatrix,
};

use super::inputs::{InputFormat, Inputs, spread_infinity};
use super::linear::{Projections, TernaryLinear, activate};
use super::pool::{ranges, split_rows};
use super::product::Product;
use super::workers::{Scratch, Workers};
use crate::checkpoint::{Activation, Experts};
use crate::fault::{self, Place};

/// What a unit of work costs beside its rows, in rows: reading the weights.
const READING_ROWS: usize = 4;

/// The feed-forward half of a layer as a mixture of experts.
pub(super) struct Mixture {
    /// A float matrix with a row for each expert.
    pub(super) router: Projections,
    pub(super) experts: Vec<Expert>,
    pub(super) shape: Experts,
    pub(super) activation: Activation,
}

/// The matrices of an expert. All experts of a layer have the same shapes and groups.
pub(super) struct Expert {
    pub(super) gate: TernaryLinear,
    pub(super) up: TernaryLinear,
    pub(super) down: TernaryLinear,
}

impl Expert {
    pub(super) fn linears(&self) -> [&TernaryLinear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut TernaryLinear; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }
}

/// How the experts of a model were used since the model was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertUse {
    /// The rows that experts computed.
    pub rows: u64,
    /// The experts that had rows, added over steps and layers. Their weights were read.
    pub hits: u64,
    /// All experts, added over steps and layers.
    pub candidates: u64,
    /// The rows if each expert had as many as the one with most, in each step and layer.
    pub rows_at_largest_load: u64,
}

/// The rows of a step by expert, and what the experts make of them.
pub(super) struct Routing {
    pub(super) all_use: ExpertUse, // Of all steps.
    rows: RoutedRows,
    outputs: HugeSlice<f32>, // Of the down projections: by expert, [panel][row][PANEL_ROWS].
}

/// Which experts the tokens of a step use, and in which order their rows stand.
///
/// The rows are sorted by expert, and the rows of an expert by token.
struct RoutedRows {
    used: usize,        // Experts of a token.
    experts: Vec<u32>,  // [token][used], ascending.
    weights: Vec<f32>,  // [token][used]
    places: Vec<u32>,   // [token][used]: the row.
    tokens: Vec<u32>,   // By row.
    starts: Vec<usize>, // By expert: its first row; and the number of rows at the end.
    hit: Vec<u32>,      // The experts that have rows, ascending.
}

impl Routing {
    /// Allocates the memory for `max_tokens` tokens. Without experts there is none.
    pub(super) fn new(max_tokens: usize, hidden: usize, shape: Option<&Experts>) -> Routing {
        let (used, count) = shape.map_or((0, 0), |shape| (shape.used, shape.count));
        let rows = max_tokens * used;
        Routing {
            all_use: ExpertUse::default(),
            rows: RoutedRows {
                used,
                experts: Vec::with_capacity(rows),
                weights: Vec::with_capacity(rows),
                places: Vec::with_capacity(rows),
                tokens: Vec::with_capacity(rows),
                starts: Vec::with_capacity(count + 1),
                hit: Vec::with_capacity(count),
            },
            outputs: HugeSlice::new(rows * hidden.next_multiple_of(PANEL_ROWS)),
        }
    }

    /// Adds the outputs of a token's experts, times their weights, to its `residual`. `memory` are
    /// two rows as wide.
    pub(super) fn add_to(&self, token: usize, residual: &mut [f32], memory: [&mut [f32]; 2]) {
        let rows = &self.rows;
        let [sum, output] = memory.map(|memory| &mut memory[..residual.len()]);
        sum.fill(0.0);
        for slot in token * rows.used..(token + 1) * rows.used {
            let (expert, weight) = (rows.experts[slot] as usize, rows.weights[slot]);
            let row = rows.places[slot] as usize - rows.starts[expert];
            let product = rows.product(&self.outputs, expert, residual.len());
            product.copy_rows(row, 0, output);
            sum.iter_mut()
                .zip(&*output)
                .for_each(|(sum, y)| *sum += weight * y);
        }
        residual.iter_mut().zip(sum).for_each(|(x, y)| *x += *y);
    }
}

impl RoutedRows {
    /// Sorts the rows of all tokens by expert.
    fn sort(&mut self, experts: usize) {
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &expert in &self.experts {
            self.starts[expert as usize + 1] += 1;
        }
        self.hit.clear();
        for expert in 0..experts {
            if self.starts[expert + 1] > 0 {
                self.hit.push(expert as u32);
            }
            self.starts[expert + 1] += self.starts[expert];
        }
        self.places.resize(self.experts.len(), 0);
        self.tokens.resize(self.experts.len(), 0);
        for (slot, (&expert, place)) in self.experts.iter().zip(&mut self.places).enumerate() {
            let next = &mut self.starts[expert as usize];
            (*place, self.tokens[*next]) = (*next as u32, (slot / self.used) as u32);
            *next += 1;
        }
        // Each start is now the end of its expert.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }

    /// Counts how the experts are used.
    fn add_to(&self, all_use: &mut ExpertUse) {
        let loads = (0..self.hit.len()).map(|index| self.rows_of_hit(index).len());
        let experts = self.starts.len() - 1;
        all_use.rows += self.tokens.len() as u64;
        all_use.hits += self.hit.len() as u64;
        all_use.candidates += experts as u64;
        all_use.rows_at_largest_load += (experts * loads.max().unwrap_or(0)) as u64;
    }

    /// Returns the rows of an expert.
    fn rows(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Returns the rows of the expert at a place among those that have rows.
    fn rows_of_hit(&self, index: usize) -> Range<usize> {
        self.rows(self.hit[index] as usize)
    }

    /// Divides the panels of all experts with rows among `parts` workers, by cost. Each expert has
    /// `panels`. A unit is one panel of one expert: `place among those with rows * panels + panel`.
    fn shares(&self, panels: usize, parts: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        let cost = move |index: usize| panels * (self.rows_of_hit(index).len() + READING_ROWS);
        let all: usize = (0..self.hit.len()).map(cost).sum();
        let unit_at = move |part: usize| {
            let mut left = all * part / parts;
            for index in 0..self.hit.len() {
                if left < cost(index) {
                    return index * panels + left * panels / cost(index);
                }
                left -= cost(index);
            }
            self.hit.len() * panels
        };
        (0..parts).map(move |part| unit_at(part)..unit_at(part + 1))
    }

    /// Returns where the product of a unit begins: the products of an expert are
    /// `[panel][row][PANEL_ROWS]`, one expert after the other.
    fn offset(&self, panels: usize, unit: usize) -> usize {
        let (index, panel) = (unit / panels, unit % panels);
        if index == self.hit.len() {
            return self.tokens.len() * panels * PANEL_ROWS;
        }
        let rows = self.rows_of_hit(index);
        (rows.start * panels + panel * rows.len()) * PANEL_ROWS
    }

    /// Cuts `out` at the borders of shares.
    fn split<'a>(
        &'a self,
        panels: usize,
        mut out: &'a mut [f32],
        shares: impl Iterator<Item = Range<usize>> + 'a,
    ) -> impl Iterator<Item = &'a mut [f32]> {
        shares.map(move |units| {
            let size = self.offset(panels, units.end) - self.offset(panels, units.start);
            out.split_off_mut(..size).expect("room for all products")
        })
    }

    /// Returns the product of an expert among `products` with `rows` values for each of its rows.
    fn product<'a>(&self, products: &'a [f32], expert: usize, rows: usize) -> Product<'a> {
        let width = rows.next_multiple_of(PANEL_ROWS);
        let own = self.rows(expert);
        Product {
            values: &products[own.start * width..own.end * width],
            rows,
            tokens: own.len(),
        }
    }
}

impl Mixture {
    /// Returns the form of the input rows: floats for the router, quantized for the experts.
    pub(super) fn input_format(&self) -> InputFormat<'_> {
        InputFormat {
            streams: 1,
            group: self.experts[0].gate.weights.group(),
            ..self.router.input_format()
        }
    }

    /// Returns the form of the rows between the projections of an expert.
    pub(super) fn gated_format(&self) -> InputFormat<'_> {
        let down = &self.experts[0].down.weights;
        InputFormat {
            columns: down.columns(),
            streams: 1,
            group: down.group(),
            floats: false,
            ..self.router.input_format()
        }
    }

    /// Returns the number of values between the projections of a token's experts, padded to whole
    /// panels, or of the router's product.
    pub(super) fn product_width(&self) -> usize {
        let gated = self.shape.used * self.gate_panels() * PANEL_ROWS;
        gated.max(self.router.product_width())
    }

    /// Returns the bytes of all experts.
    pub(super) fn bytes(&self) -> usize {
        let linears = self.experts.iter().flat_map(Expert::linears);
        linears.map(|linear| linear.weights.bytes()).sum()
    }

    /// Returns the matrices of as many experts as a token uses.
    pub(super) fn used_by_a_token(&self) -> impl Iterator<Item = &TernaryMatrix> + Clone {
        let used = self.experts.iter().take(self.shape.used);
        used.flat_map(Expert::linears).map(|linear| &linear.weights)
    }

    fn gate_panels(&self) -> usize {
        self.experts[0].gate.weights.panels()
    }

    /// Computes the outputs of all experts that the rows of `inputs` use, and leaves them in
    /// `routing`. `products` has room for `product_width` values for each token.
    pub(super) fn forward(
        &self,
        workers: &mut Workers,
        inputs: &Inputs,
        products: &mut [f32],
        routing: &mut Routing,
    ) {
        self.router.multiply(workers, inputs, products);
        self.choose(workers, inputs.tokens(), products, &mut routing.rows);
        let Routing {
            rows,
            outputs,
            all_use,
        } = routing;
        rows.sort(self.experts.len());
        rows.add_to(all_use);
        self.multiply_gated(workers, inputs.quantized(0), rows, products);
        self.multiply_down(workers, rows, products, outputs);
    }

    /// Chooses the experts of each token by the router's `products`.
    fn choose(
        &self,
        workers: &mut Workers,
        tokens: usize,
        products: &[f32],
        rows: &mut RoutedRows,
    ) {
        let used = self.shape.used;
        let logits = self.router.product(0, products, tokens);
        rows.experts.resize(tokens * used, 0);
        rows.weights.resize(tokens * used, 0.0);
        let shares = ranges(tokens, workers.pool.workers());
        let experts = split_rows(&mut rows.experts, used, shares.clone());
        let weights = split_rows(&mut rows.weights, used, shares.clone());
        let parts = shares.zip(experts.zip(weights)).zip(&mut workers.scratch);
        workers
            .pool
            .run_parts(parts, |_, ((tokens, (experts, weights)), scratch)| {
                let row = &mut scratch.spare[..self.experts.len()];
                let slots = experts
                    .chunks_exact_mut(used)
                    .zip(weights.chunks_exact_mut(used));
                for (token, (experts, weights)) in tokens.zip(slots) {
                    logits.copy_rows(token, 0, row);
                    self.choose_for(row, experts, weights);
                }
            });
    }

    /// Sets a token's experts, ascending, and their weights. If a logit is not finite, the weights
    /// are NaN, so that the token's logits are NaN too.
    fn choose_for(&self, logits: &[f32], experts: &mut [u32], weights: &mut [f32]) {
        if !logits.iter().all(|logit| logit.is_finite()) {
            experts
                .iter_mut()
                .zip(0..)
                .for_each(|(expert, number)| *expert = number);
            return weights.fill(f32::NAN);
        }
        let mut count = 0; // Those found so far, best first.
        for (expert, &logit) in (0..).zip(logits) {
            let better = |other: &u32| logits[*other as usize] >= logit;
            let place = experts[..count]
                .iter()
                .take_while(|other| better(other))
                .count();
            if place == experts.len() {
                continue;
            }
            count = experts.len().min(count + 1);
            experts[place..count].rotate_right(1);
            experts[place] = expert;
        }
        let scale = LogitScale {
            largest: logits[experts[0] as usize],
            inverse_temperature: 1.0,
        };
        experts.sort_unstable();
        let mut sum = 0.0;
        for (weight, &expert) in weights.iter_mut().zip(&*experts) {
            *weight = scale.weight(logits[expert as usize]);
            sum += *weight;
        }
        if !self.shape.normalizes {
            sum = logits.iter().map(|&logit| scale.weight(logit)).sum();
        }
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }

    /// Computes activation(gate) · up for the rows of each expert, one expert after the other.
    fn multiply_gated(
        &self,
        workers: &mut Workers,
        inputs: &QuantizedActivations,
        routed: &RoutedRows,
        out: &mut [f32],
    ) {
        let panels = self.gate_panels();
        let shares = routed.shares(panels, workers.pool.workers());
        let parts = shares.clone().zip(routed.split(panels, out, shares));
        let parts = parts.zip(&mut workers.scratch);
        let kernels = workers.kernels;
        workers
            .pool
            .run_parts(parts, |_, ((units, mut out), scratch)| {
                for_each_expert(routed, panels, units, |expert, panels, next| {
                    if let Some(Expert { gate, up, .. }) = next.map(|next| &self.experts[next]) {
                        gate.weights.prefetch_panel(0);
                        up.weights.prefetch_panel(0);
                    }
                    let rows = routed.rows(expert);
                    let tokens = routed.tokens[rows.clone()]
                        .iter()
                        .map(|token| *token as usize);
                    scratch.expert_rows.gather(inputs, tokens);
                    let size = panels.len() * rows.len() * PANEL_ROWS;
                    let own = out.split_off_mut(..size).expect("room for the share");
                    self.gate_of(kernels, expert, panels, scratch, own);
                });
            });
    }

    /// Computes some panels of activation(gate) · up for the rows in `scratch`.
    fn gate_of(
        &self,
        kernels: Kernels,
        expert: usize,
        panels: Range<usize>,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let Expert { gate, up, .. } = &self.experts[expert];
        let panel = scratch.expert_rows.tokens() * PANEL_ROWS;
        let at_once = scratch.panels_at_once(scratch.expert_rows.tokens());
        let Scratch {
            factors,
            gates,
            ups,
            expert_rows,
            ..
        } = scratch;
        let starts = panels.clone().step_by(at_once);
        for (start, out) in starts.zip(out.chunks_mut(at_once * panel)) {
            let (gates, ups) = (&mut gates[..out.len()], &mut ups[..out.len()]);
            let panels = start..panels.end.min(start + at_once);
            multiply(kernels, gate, panels.clone(), (expert_rows, factors), gates);
            multiply(kernels, up, panels, (expert_rows, factors), ups);
            fault::pass(Place::GatesMultiplied);
            if let Some(limit) = self.shape.gate_limit {
                // Both keep NaN.
                gates
                    .iter_mut()
                    .for_each(|gate| *gate = gate.clamp(f32::NEG_INFINITY, limit));
                ups.iter_mut().for_each(|up| *up = up.clamp(-limit, limit));
            }
            activate(kernels, self.activation, (gates, ups), out);
            fault::pass(Place::GatesActivated);
        }
    }

    /// Multiplies the gated rows of each expert by its down projection.
    fn multiply_down(
        &self,
        workers: &mut Workers,
        routed: &RoutedRows,
        gated: &[f32],
        out: &mut [f32],
    ) {
        let format = self.gated_format();
        let panels = self.experts[0].down.weights.panels();
        let shares = routed.shares(panels, workers.pool.workers());
        let parts = shares.clone().zip(routed.split(panels, out, shares));
        let parts = parts.zip(&mut workers.scratch);
        let kernels = workers.kernels;
        workers
            .pool
            .run_parts(parts, |_, ((units, mut out), scratch)| {
                for_each_expert(routed, panels, units, |expert, panels, next| {
                    if let Some(next) = next {
                        self.experts[next].down.weights.prefetch_panel(0);
                    }
                    let rows = routed.rows(expert);
                    let product = routed.product(gated, expert, format.columns);
                    let Scratch {
                        rows: row,
                        spare,
                        expert_rows,
                        factors,
                        ..
                    } = &mut *scratch;
                    expert_rows.reset_as(rows.len(), format.columns, format.group);
                    let row = &mut row[..format.columns];
                    for (index, mut place) in expert_rows.tokens_mut().enumerate() {
                        product.copy_rows(index, 0, row);
                        spread_infinity(kernels, row, spare);
                        kernels.quantize(row, &mut place);
                    }
                    let size = panels.len() * rows.len() * PANEL_ROWS;
                    let own = out.split_off_mut(..size).expect("room for the share");
                    let down = &self.experts[expert].down;
                    multiply(kernels, down, panels, (expert_rows, factors), own);
                    fault::pass(Place::PanelsMultiplied);
                });
            });
    }
}

/// Calls `work` with each expert of some units, its panels among them, and the next expert. The
/// next one begins with its first panel.
fn for_each_expert(
    routed: &RoutedRows,
    panels: usize,
    units: Range<usize>,
    mut work: impl FnMut(usize, Range<usize>, Option<usize>),
) {
    let mut unit = units.start;
    while unit < units.end {
        let (index, first) = (unit / panels, unit % panels);
        let last = panels.min(first + units.end - unit);
        unit += last - first;
        let next = (unit < units.end).then(|| routed.hit[index + 1] as usize);
        work(routed.hit[index] as usize, first..last, next);
    }
}

/// Multiplies rows by some panels of a matrix.
fn multiply(
    kernels: Kernels,
    linear: &TernaryLinear,
    panels: Range<usize>,
    (rows, factors): (&QuantizedActivations, &mut Vec<f32>),
    out: &mut [f32],
) {
    factors.clear();
    factors.extend(rows.scales().iter().map(|scale| linear.scale / scale));
    let x = ScaledActivations {
        activations: rows,
        factors,
    };
    kernels.ternary_matmul(&linear.weights, panels, x, out, &mut PrefetchQueue::empty());
}
