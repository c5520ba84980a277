//! One key head of a recurrent layer: the tokens of a row, one after the other.

use std::ops::Range;

use sterna_kernels::{DeltaUpdate, Kernels};
use sterna_scheduler::{Row, RowStates, StateSlab};

use super::norm::Norm;
use super::product::Product;
use super::state_store::{HeadStates, StateShape};
use crate::checkpoint::{MAX_TAPS, RecurrentLayers};
use crate::fault::{self, Place};

/// What is added to the squares before queries and keys get length 1, as in the published code.
pub(super) const LENGTH_EPS: f32 = 1e-6;

/// The weights of a recurrent layer, except its projections.
pub(super) struct RecurrentWeights {
    pub(super) heads: RecurrentLayers,
    /// The weights of the convolution of each key head, `[key head][tap][channel]`.
    pub(super) convolution: Vec<f32>,
    /// −e^A_log, by value head.
    pub(super) rates: Vec<f32>,
    /// What is added to the steps, by value head.
    pub(super) step_bias: Vec<f32>,
    /// Makes a query of length 1 / √key_dim, and a key of length 1.
    pub(super) query_norm: Norm,
    pub(super) key_norm: Norm,
    /// The norm of each value head.
    pub(super) norm: Norm,
}

/// The memory of a worker for one token of a key head.
pub(super) struct RecurrentScratch {
    convolved: Vec<f32>, // [channel]
    query: Vec<f32>,
    key: Vec<f32>,
    sums: [Vec<f32>; 2], // By key and by query.
    value: Vec<f32>,
    gate: Vec<f32>,
    /// What the token before left.
    last: Update,
    zeros: Vec<f32>,  // As many as an input of the convolution has.
    states: Vec<f32>, // Of a row that must leave the states of its slab at its start.
}

/// What a token leaves to add to the states of a key head.
struct Update {
    key: Vec<f32>,
    deltas: Vec<f32>, // [value head][column]
    decays: Vec<f32>, // By value head.
}

impl RecurrentScratch {
    pub(super) fn new(heads: Option<&RecurrentLayers>) -> RecurrentScratch {
        let shape = heads.map(|heads| StateShape::new(heads, 1));
        let size = |of: fn(StateShape) -> usize| vec![0.0; shape.map_or(0, of)];
        RecurrentScratch {
            convolved: size(StateShape::channels),
            query: size(|shape| shape.key_dim),
            key: size(|shape| shape.key_dim),
            sums: [size(|shape| shape.value_dim), size(|shape| shape.value_dim)],
            value: size(|shape| shape.value_dim),
            gate: size(|shape| shape.value_dim),
            last: Update {
                key: size(|shape| shape.key_dim),
                deltas: size(StateShape::values),
                decays: size(|shape| shape.group),
            },
            zeros: size(StateShape::channels),
            states: size(|shape| shape.group * shape.state()),
        }
    }
}

impl Update {
    /// Sets what changes nothing.
    fn reset(&mut self) {
        self.key.fill(0.0);
        self.deltas.fill(0.0);
        self.decays.fill(1.0);
    }

    fn of_head(&self, member: usize) -> DeltaUpdate<'_> {
        let columns = self.deltas.len() / self.decays.len();
        DeltaUpdate {
            decay: self.decays[member],
            key: &self.key,
            delta: &self.deltas[member * columns..][..columns],
        }
    }
}

/// One key head of a row.
pub(super) struct HeadRow<'a> {
    pub(super) weights: &'a RecurrentWeights,
    pub(super) kernels: Kernels,
    pub(super) shape: StateShape,
    pub(super) head: usize,
    /// Of the channels of the convolution, the gate, the strengths, the steps.
    pub(super) products: [Product<'a>; 4],
    pub(super) scratch: &'a mut RecurrentScratch,
}

impl HeadRow<'_> {
    /// Computes the tokens of a row, whose indices in the batch are `tokens`. `index` is the head's
    /// among those in `states`.
    ///
    /// # Panics
    /// If the row names no states, or states that do not reach its start.
    pub(super) fn compute(
        &mut self,
        states: &mut HeadStates<'_>,
        index: usize,
        row: &Row,
        tokens: Range<usize>,
        out: &mut [f32],
    ) {
        let RowStates { from, to, keep } = row.states.expect("a row of a recurrent model");
        let (start, limit) = (row.start as usize, self.shape.in_place_tokens);
        let is_short = row.len() <= limit;
        match from {
            None => states.region(index, to).clear(start),
            Some(from) if from == to => assert!(is_short, "a long row has a slab of its own"),
            Some(from) => states.copy(index, from, to),
        }
        self.catch_up(states, index, to, start);
        for (position, (token, out)) in
            (start..).zip(tokens.zip(out.chunks_exact_mut(self.shape.values())))
        {
            for kept in keep.into_iter().flatten() {
                if kept.position as usize == position {
                    if !is_short {
                        self.write_last(states, index, to, position);
                    }
                    states.copy(index, to, kept.slab);
                }
            }
            self.convolve(states, index, to, position, token);
            let mut region = states.region(index, to);
            let is_first = position == start;
            if is_short && position == start + 1 {
                self.scratch.states.copy_from_slice(region.states);
            }
            let values = if is_short && !is_first {
                None // The states of the slab stay at the row's start.
            } else {
                Some(&mut *region.states)
            };
            // Nothing may panic between the change of the states and that of their base.
            self.compute_token(values, token, out);
            if is_short {
                region.set_base(start);
                self.write_entry(states, index, to, position);
            }
            fault::pass(Place::TokenMixed);
        }
        if !is_short {
            self.write_last(states, index, to, row.end());
        }
    }

    /// Applies what the journal has before `start`, except the last token, which the first token of
    /// the row applies.
    fn catch_up(
        &mut self,
        states: &mut HeadStates<'_>,
        index: usize,
        slab: StateSlab,
        start: usize,
    ) {
        let mut region = states.region(index, slab);
        let (base, limit) = (region.base(), self.shape.in_place_tokens);
        assert!(
            base <= start && start - base <= limit,
            "a state at {base} with a journal of {limit} does not reach {start}"
        );
        let last = &mut self.scratch.last;
        last.reset();
        for position in base..start {
            let entry = region.entry(position);
            last.key.copy_from_slice(entry.key);
            last.deltas.copy_from_slice(entry.deltas);
            last.decays.copy_from_slice(entry.decays);
            if position + 1 == start {
                break;
            }
            let [by_key, by_query] = &mut self.scratch.sums;
            let (key, query) = (&self.scratch.key, &self.scratch.query);
            let heads = region.states.chunks_exact_mut(self.shape.state());
            for (member, state) in heads.enumerate() {
                let update = last.of_head(member);
                (self.kernels).delta_step(state, update, [key, query], [by_key, by_query]);
            }
            region.set_base(position + 1);
        }
    }

    /// Sets the query and the key of a token, and `convolved`. Keeps the input of the convolution.
    fn convolve(
        &mut self,
        states: &mut HeadStates<'_>,
        index: usize,
        slab: StateSlab,
        position: usize,
        token: usize,
    ) {
        let mut region = states.region(index, slab);
        let (shape, heads) = (self.shape, &self.weights.heads);
        let product = self.products[0];
        let (queries, values) = (heads.key_heads * shape.key_dim, shape.value_dim);
        let input = region.input_mut(position);
        let (query, rest) = input.split_at_mut(shape.key_dim);
        let (key, rest) = rest.split_at_mut(shape.key_dim);
        product.copy_rows(token, self.head * shape.key_dim, query);
        product.copy_rows(token, queries + self.head * shape.key_dim, key);
        for (member, value) in rest.chunks_exact_mut(values).enumerate() {
            let head = heads.value_head(self.head, member);
            product.copy_rows(token, 2 * queries + head * values, value);
        }
        let scratch = &mut *self.scratch;
        let mut inputs: [&[f32]; MAX_TAPS] = [&scratch.zeros; MAX_TAPS];
        let inputs = &mut inputs[..shape.taps];
        for (back, input) in inputs.iter_mut().rev().enumerate() {
            if let Some(position) = position.checked_sub(back) {
                *input = region.input(position);
            }
        }
        let size = shape.taps * shape.channels();
        let taps = &self.weights.convolution[self.head * size..][..size];
        self.kernels.convolve(inputs, taps, &mut scratch.convolved);
        let (query, key) = scratch.convolved.split_at(shape.key_dim);
        let key = &key[..shape.key_dim];
        (self.weights.query_norm).apply(self.kernels, query, &mut scratch.query);
        (self.weights.key_norm).apply(self.kernels, key, &mut scratch.key);
    }

    /// Computes the output of a token, and what it leaves. Without `states`, continues with those
    /// in the scratch memory.
    fn compute_token(&mut self, states: Option<&mut [f32]>, token: usize, out: &mut [f32]) {
        let (shape, kernels) = (self.shape, self.kernels);
        let weights = self.weights;
        let RecurrentScratch {
            convolved,
            query,
            key,
            sums: [by_key, by_query],
            value,
            gate,
            last,
            states: own,
            ..
        } = &mut *self.scratch;
        let states = states.unwrap_or(own);
        let key_query = dot(key, query);
        let values = convolved[2 * shape.key_dim..].chunks_exact(shape.value_dim);
        let heads = states.chunks_exact_mut(shape.state()).zip(values);
        let heads = heads.zip(out.chunks_exact_mut(shape.value_dim));
        for (member, ((state, input), out)) in heads.enumerate() {
            let head = weights.heads.value_head(self.head, member);
            let update = last.of_head(member);
            kernels.delta_step(state, update, [key, query], [by_key, by_query]);
            let of_head = |product: Product<'_>| {
                let mut value = [0.0];
                product.copy_rows(token, head, &mut value);
                f64::from(value[0])
            };
            let strength = sigmoid(of_head(self.products[2]));
            let step = of_head(self.products[3]) + f64::from(weights.step_bias[head]);
            let decay = (f64::from(weights.rates[head]) * softplus(step)).exp() as f32;
            let factors = [decay, strength as f32, key_query];
            let delta = &mut last.deltas[member * shape.value_dim..][..shape.value_dim];
            kernels.delta_finish([by_key, by_query], input, factors, delta, value);
            last.decays[member] = decay;
            let gates = self.products[1];
            gates.copy_rows(token, head * shape.value_dim, gate);
            weights.norm.apply(kernels, value, by_key);
            kernels.silu_gate(gate, by_key, out);
        }
        last.key.copy_from_slice(key);
    }

    /// Writes what the last token left to the journal, as the entry of `position`.
    fn write_entry(
        &self,
        states: &mut HeadStates<'_>,
        index: usize,
        slab: StateSlab,
        position: usize,
    ) {
        let mut region = states.region(index, slab);
        let (entry, last) = (region.entry(position), &self.scratch.last);
        entry.key.copy_from_slice(&last.key);
        entry.deltas.copy_from_slice(&last.deltas);
        entry.decays.copy_from_slice(&last.decays);
    }

    /// Ends a part of a long row before the token at `end`: the states have seen all tokens but the
    /// last, and the journal has that one.
    fn write_last(&self, states: &mut HeadStates<'_>, index: usize, slab: StateSlab, end: usize) {
        self.write_entry(states, index, slab, end - 1);
        states.region(index, slab).set_base(end - 1);
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns ln(1 + e^x).
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Returns the product of two rows: a sum in sixteen lanes, and then over the lanes.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    lanes.into_iter().sum()
}
