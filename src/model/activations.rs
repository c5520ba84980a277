//! The activations of a step, from stage to stage of a layer.
//!
//! Each stage takes the value that the stage before returned, and returns the next:
//!
//! ```text
//! Pending   ─ add_and_norm ──► InputRows   the norm before attention
//! InputRows ─ multiply ──────► Projected   query, key, value
//! Projected ─ attend ────────► Attended
//! Attended  ─ into_rows ─────► InputRows   the sub-norm, if there is one
//! InputRows ─ multiply ──────► Pending     the output projection
//! Pending   ─ add_and_norm ──► InputRows   the norm before feed-forward
//! InputRows ─ mix ───────────► Pending     a mixture of experts, or
//! InputRows ─ multiply_gated ► Gated       activation(gate) · up
//! Gated     ─ into_rows ─────► InputRows   the sub-norm, if there is one
//! InputRows ─ multiply ──────► Pending     the down projection
//! ```
//!
//! Invariant: one value at a time holds the memory of the activations, so no stage can read what a
//! later stage has overwritten.

use std::ops::Range;

use sterna_kernels::{HugeSlice, Kernels};

use super::inputs::{InputFormat, Inputs, spread_infinity};
use super::linear::Projections;
use super::mixture::{Mixture, Routing};
use super::norm::Norm;
use super::pool::{ranges, split_rows};
use super::product::Product;
use super::profile::Stage;
use super::workers::{BLOCK_TOKENS, ForwardContext, Workers};
use crate::checkpoint::Activation;
use crate::fault::{self, Place};

/// The memory of the activations, sized for the largest step. Every layer reuses it.
pub(super) struct StepBuffers {
    pub(super) inputs: Inputs,
    products: HugeSlice<f32>,
    attended: HugeSlice<f32>,
    pub(super) routing: Routing,
}

impl StepBuffers {
    /// Allocates the memory for steps of up to `max_tokens` tokens. `formats` are the input formats
    /// of all linears, `product_width` is the size of a token's largest product, and attention
    /// writes `attended_width` values per token. `routing` has room for the tokens' experts.
    pub(super) fn new<'a>(
        max_tokens: usize,
        formats: impl Iterator<Item = InputFormat<'a>> + Clone,
        product_width: usize,
        (attended_width, routing): (usize, Routing),
    ) -> StepBuffers {
        StepBuffers {
            inputs: Inputs::new(max_tokens, formats),
            products: HugeSlice::new(max_tokens * product_width),
            attended: HugeSlice::new(max_tokens * attended_width),
            routing,
        }
    }
}

/// The output of a half of a layer that is not yet added to the residual.
///
/// The next stage adds it while it makes its input rows, so the addition takes no pass of its own
/// over memory.
pub(super) struct Pending<'m> {
    buffers: &'m mut StepBuffers,
    output: Option<PendingOutput<'m>>,
}

/// What is pending.
#[derive(Clone, Copy)]
enum PendingOutput<'m> {
    /// The product of a linear, and the norm after it, if there is one.
    Linear {
        projections: &'m Projections,
        norm: Option<&'m Norm>,
    },
    /// The outputs of experts.
    Mixture,
}

/// The values that are pending.
#[derive(Clone, Copy)]
enum PendingProduct<'a> {
    Linear {
        product: Product<'a>,
        norm: Option<&'a Norm>,
    },
    Mixture(&'a Routing),
}

impl<'m> PendingOutput<'m> {
    fn pending<'a>(
        &self,
        (products, routing): (&'a [f32], &'a Routing),
        tokens: usize,
    ) -> PendingProduct<'a>
    where
        'm: 'a,
    {
        match self {
            PendingOutput::Linear { projections, norm } => PendingProduct::Linear {
                product: projections.product(0, products, tokens),
                norm: *norm,
            },
            PendingOutput::Mixture => PendingProduct::Mixture(routing),
        }
    }
}

impl PendingProduct<'_> {
    /// Adds the values of at most [`BLOCK_TOKENS`] tokens to their `residual`. `rows` and `spare`
    /// are scratch memory of at least its length.
    fn add_to(
        self,
        kernels: Kernels,
        tokens: Range<usize>,
        residual: &mut [f32],
        [rows, spare]: [&mut [f32]; 2],
    ) {
        let (product, norm) = match self {
            PendingProduct::Linear {
                product,
                norm: None,
            } => return product.add_to(tokens, residual),
            PendingProduct::Linear {
                product,
                norm: Some(norm),
            } => (product, norm),
            PendingProduct::Mixture(routing) => {
                let width = residual.len() / tokens.len();
                for (token, residual) in tokens.zip(residual.chunks_exact_mut(width)) {
                    routing.add_to(token, residual, [&mut *rows, &mut *spare]);
                }
                return;
            }
        };
        let (rows, normed) = (&mut rows[..residual.len()], &mut spare[..residual.len()]);
        product.copy_to(tokens, rows);
        norm.apply_rows(kernels, rows, normed);
        residual.iter_mut().zip(normed).for_each(|(x, y)| *x += *y);
    }
}

impl<'m> Pending<'m> {
    /// Starts a step: nothing is pending.
    pub(super) fn nothing(buffers: &'m mut StepBuffers) -> Pending<'m> {
        Pending {
            buffers,
            output: None,
        }
    }

    /// Adds the pending output to `residual`, `[token][hidden]`, and returns the rows
    /// `norm(residual)` as input of `projections`, in the form `format`.
    pub(super) fn add_and_norm(
        self,
        context: &mut ForwardContext<'_>,
        residual: &mut [f32],
        norm: &Norm,
        (projections, format): (&'m Projections, InputFormat<'_>),
    ) -> InputRows<'m> {
        let StepBuffers {
            inputs,
            products,
            routing,
            ..
        } = &mut *self.buffers;
        let before = inputs.tokens();
        let values = (&products[..], &*routing);
        let pending = self.output.map(|output| output.pending(values, before));
        let kernels = context.workers.kernels;
        let tokens = residual.len() / norm.width();
        inputs.fill_blocks(context.workers, &format, tokens, residual, |block| {
            if let Some(pending) = pending {
                let scratch = [&mut *block.rows, &mut *block.spare];
                pending.add_to(kernels, block.tokens.clone(), block.residual, scratch);
            }
            let residuals = block.residual.chunks_exact_mut(norm.width());
            for (token, residual) in block.tokens.zip(residuals) {
                fault::pass_row(Place::OutputAdded, token, residual);
            }
            norm.apply_rows(kernels, block.residual, block.rows);
            fault::pass(Place::RowsNormed);
        });
        context.profile.end(Stage::Rows);
        InputRows {
            buffers: self.buffers,
            projections,
        }
    }

    /// Adds the pending output to `residual`.
    pub(super) fn add(self, context: &mut ForwardContext<'_>, residual: &mut [f32]) {
        if let Some(output) = self.output {
            let tokens = self.buffers.inputs.tokens();
            let values = (&self.buffers.products[..], &self.buffers.routing);
            let pending = output.pending(values, tokens);
            let Workers {
                kernels,
                pool,
                scratch,
            } = &mut *context.workers;
            let (kernels, width) = (*kernels, residual.len() / tokens);
            let shares = ranges(tokens, pool.workers());
            let parts = shares.clone().zip(split_rows(residual, width, shares));
            pool.run_parts(parts.zip(scratch), |_, ((tokens, residual), scratch)| {
                if let PendingProduct::Linear {
                    product,
                    norm: None,
                } = pending
                {
                    return product.add_to(tokens, residual);
                }
                let starts = tokens.clone().step_by(BLOCK_TOKENS);
                for (start, residual) in starts.zip(residual.chunks_mut(BLOCK_TOKENS * width)) {
                    let tokens = start..tokens.end.min(start + BLOCK_TOKENS);
                    let memory = [&mut scratch.rows[..], &mut scratch.spare[..]];
                    pending.add_to(kernels, tokens, residual, memory);
                }
            });
        }
        context.profile.end(Stage::Rows);
    }
}

/// Rows of all tokens, ready to be multiplied by `projections`.
pub(super) struct InputRows<'m> {
    buffers: &'m mut StepBuffers,
    projections: &'m Projections,
}

impl<'m> InputRows<'m> {
    /// Multiplies the rows by the projections.
    pub(super) fn multiply(self, context: &mut ForwardContext<'_>) -> Projected<'m> {
        let projected = self.multiply_and_prefetch(context.workers, |_| std::iter::empty());
        context.profile.end(Stage::Products);
        projected
    }

    /// Multiplies the rows by the projections. Meanwhile each worker prefetches `next(worker)`.
    /// The caller ends the stage, because `next` may borrow from the context.
    pub(super) fn multiply_and_prefetch<'n, I: Iterator<Item = &'n [u8]>>(
        self,
        workers: &mut Workers,
        next: impl Fn(usize) -> I + Sync,
    ) -> Projected<'m> {
        let (inputs, products) = (&self.buffers.inputs, &mut self.buffers.products);
        (self.projections).multiply_and_prefetch(workers, inputs, products, next);
        Projected {
            buffers: self.buffers,
            projections: self.projections,
        }
    }

    /// Returns the outputs of the experts that the rows use as pending for the residual. The
    /// projections are the router of `mixture`.
    pub(super) fn mix(self, context: &mut ForwardContext<'_>, mixture: &Mixture) -> Pending<'m> {
        let StepBuffers {
            inputs,
            products,
            routing,
            ..
        } = &mut *self.buffers;
        mixture.forward(context.workers, inputs, products, routing);
        context.profile.end(Stage::Products);
        Pending {
            buffers: self.buffers,
            output: Some(PendingOutput::Mixture),
        }
    }

    /// Computes activation(gate) · up; the projections are gate and up.
    pub(super) fn multiply_gated(
        self,
        context: &mut ForwardContext<'_>,
        activation: Activation,
    ) -> Gated<'m> {
        let (inputs, products) = (&self.buffers.inputs, &mut self.buffers.products);
        (self.projections).multiply_gated(context.workers, inputs, activation, products);
        context.profile.end(Stage::Products);
        Gated {
            buffers: self.buffers,
            gate_up: self.projections,
        }
    }
}

/// The products of all tokens with one set of projections.
pub(super) struct Projected<'m> {
    buffers: &'m mut StepBuffers,
    projections: &'m Projections,
}

impl<'m> Projected<'m> {
    /// Returns the product of linear `index`.
    pub(super) fn product(&self, index: usize) -> Product<'_> {
        let tokens = self.buffers.inputs.tokens();
        (self.projections).product(index, &self.buffers.products, tokens)
    }

    /// Returns the product of the only linear as pending for the residual. `norm` is applied to it
    /// first, if there is one.
    pub(super) fn into_pending(self, norm: Option<&'m Norm>) -> Pending<'m> {
        let projections = self.projections;
        Pending {
            buffers: self.buffers,
            output: Some(PendingOutput::Linear { projections, norm }),
        }
    }

    /// Calls `attend(products, attended)`, which writes what attention makes of the products:
    /// `width` values for each token.
    pub(super) fn attend(
        self,
        width: usize,
        attend: impl FnOnce(Products<'_>, &mut [f32]),
    ) -> Attended<'m> {
        let buffers = &mut *self.buffers;
        let tokens = buffers.inputs.tokens();
        let products = Products {
            projections: self.projections,
            values: &buffers.products,
            tokens,
        };
        attend(products, &mut buffers.attended[..tokens * width]);
        Attended {
            buffers: self.buffers,
            projections: self.projections,
        }
    }
}

/// The products of all tokens with one set of projections, to read.
#[derive(Clone, Copy)]
pub(super) struct Products<'a> {
    projections: &'a Projections,
    values: &'a [f32],
    tokens: usize,
}

impl<'a> Products<'a> {
    /// Returns the product of linear `index`.
    pub(super) fn product(self, index: usize) -> Product<'a> {
        self.projections.product(index, self.values, self.tokens)
    }
}

/// What attention, or a recurrence, returned for all heads of all tokens.
pub(super) struct Attended<'m> {
    buffers: &'m mut StepBuffers,
    projections: &'m Projections,
}

impl<'m> Attended<'m> {
    /// Makes the rows that feed `projections`. `gather(attended, products, token, row)` writes one
    /// row, to which `norm` is applied if there is one. The products are those that attention read.
    pub(super) fn into_rows(
        self,
        context: &mut ForwardContext<'_>,
        projections: &'m Projections,
        norm: Option<&Norm>,
        gather: impl Fn(&[f32], Products<'_>, usize, &mut [f32]) + Sync,
    ) -> InputRows<'m> {
        let (inputs, attended) = (&mut self.buffers.inputs, &self.buffers.attended[..]);
        let tokens = inputs.tokens();
        let products = Products {
            projections: self.projections,
            values: &self.buffers.products,
            tokens,
        };
        let (kernels, format) = (context.workers.kernels, projections.input_format());
        let write_row = |token, row: &mut [f32], spare: &mut [f32]| match norm {
            Some(norm) => {
                let spare = &mut spare[..row.len()];
                gather(attended, products, token, spare);
                fault::pass_row(Place::HeadsGathered, token, spare);
                norm.apply(kernels, spare, row);
            }
            None => {
                gather(attended, products, token, row);
                fault::pass_row(Place::HeadsGathered, token, row);
                spread_infinity(kernels, row, spare);
            }
        };
        inputs.fill(context.workers, &format, tokens, write_row);
        context.profile.end(Stage::Rows);
        InputRows {
            buffers: self.buffers,
            projections,
        }
    }
}

/// activation(gate) · up of all tokens.
pub(super) struct Gated<'m> {
    buffers: &'m mut StepBuffers,
    gate_up: &'m Projections,
}

impl<'m> Gated<'m> {
    /// Makes the rows that feed `projections`, to which `norm` is applied if there is one.
    pub(super) fn into_rows(
        self,
        context: &mut ForwardContext<'_>,
        projections: &'m Projections,
        norm: Option<&Norm>,
    ) -> InputRows<'m> {
        let (inputs, products) = (&mut self.buffers.inputs, &self.buffers.products);
        let tokens = inputs.tokens();
        // The gated values take the place of the gate's product.
        let gated = self.gate_up.product(0, products, tokens);
        let (kernels, format) = (context.workers.kernels, projections.input_format());
        inputs.fill_blocks(context.workers, &format, tokens, &mut [], |block| {
            let copy = |rows: &mut [f32]| {
                gated.copy_to(block.tokens.clone(), rows);
                let rows = rows.chunks_exact_mut(format.columns);
                for (token, row) in block.tokens.clone().zip(rows) {
                    fault::pass_row(Place::GatedRowsMade, token, row);
                }
            };
            match norm {
                Some(norm) => {
                    let spare = &mut block.spare[..block.rows.len()];
                    copy(spare);
                    norm.apply_rows(kernels, spare, block.rows);
                }
                None => {
                    copy(block.rows);
                    for row in block.rows.chunks_exact_mut(format.columns) {
                        spread_infinity(kernels, row, block.spare);
                    }
                }
            }
        });
        context.profile.end(Stage::Rows);
        InputRows {
            buffers: self.buffers,
            projections,
        }
    }
}
