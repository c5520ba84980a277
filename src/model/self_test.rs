//! Compares the kernels that a model uses with plain Rust, on the model's own weights.
//!
//! Plain Rust is slow, so only a part of a large model is compared: as many layers, spread evenly,
//! as a given number of products allows, but at least one.
//!
//! Invariant: each compared stage has the same input in both runs, so a difference names the stage
//! where it arises.

use std::fmt;
use std::io;

use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, PAGE_TOKENS, Page, SequenceId, TokenId};

use super::forward::Model;
use super::kv_store::KvStore;
use super::state_store::AlternatingSlabs;
use super::wanted::WantedLogits;

/// The tokens that are compared: a short prefill and a decode. More would only repeat them.
const MAX_TOKENS: usize = 9;
const MIN_TOKENS: usize = 3;
const _: () = assert!(MAX_TOKENS <= PAGE_TOKENS); // One page is enough.

/// Which part of a model was compared with plain Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComparedPart {
    /// The number of tokens.
    pub tokens: usize,
    /// The number of layers.
    pub layers: usize,
    /// Whether the output head was compared.
    pub head: bool,
}

impl ComparedPart {
    /// Returns the part that takes about `max_products` products of a weight and an activation.
    fn of(model: &Model, max_products: u64) -> ComparedPart {
        let (sizes, all) = (model.sizes(), model.config().layers);
        let (layer, head) = (sizes.ternary_weights / all, sizes.head_weights);
        let (layer, head) = (layer.max(1) as u64, head as u64);
        let affordable = max_products.saturating_sub(head) / layer; // Layers times tokens.
        let tokens = affordable.clamp(MIN_TOKENS as u64, MAX_TOKENS as u64);
        let layers = (affordable / tokens).clamp(1, all as u64);
        ComparedPart {
            tokens: tokens as usize,
            layers: layers as usize,
            head: model.config().has_head && head + layers * tokens * layer <= max_products,
        }
    }

    /// Returns whether `layer` of `all` layers is compared. The layers are spread evenly.
    fn has_layer(&self, layer: usize, all: usize) -> bool {
        layer * self.layers / all != (layer + 1) * self.layers / all
    }
}

/// Why a comparison with plain Rust failed.
#[derive(Debug)]
pub enum SelfTestError {
    /// The system does not have the memory for keys and values.
    Memory(io::Error),
    /// Two values differ.
    Difference(KernelDifference),
}

/// The first value that differs from plain Rust's.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelDifference {
    /// The instruction set.
    pub isa: Isa,
    /// The stage that computes the value.
    pub stage: ComparedStage,
    /// The index of the value in the output of the stage.
    pub index: usize,
    /// The value that the instruction set computes.
    pub computed: f32,
    /// The value that plain Rust computes.
    pub expected: f32,
}

/// A part of the forward pass that is compared by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedStage {
    /// The look-up of the tokens' embeddings.
    Embedding,
    /// One transformer layer.
    Layer(usize),
    /// The last norm and the output head.
    Head,
}

impl fmt::Display for SelfTestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SelfTestError::Memory(error) => write!(f, "no memory for keys and values: {error}"),
            SelfTestError::Difference(difference) => difference.fmt(f),
        }
    }
}

impl std::error::Error for SelfTestError {}

impl fmt::Display for KernelDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelDifference {
            isa,
            stage,
            index,
            computed,
            expected,
        } = self;
        write!(
            f,
            "{isa} and plain Rust differ in {stage}: value {index} is {computed} instead of \
             {expected}"
        )
    }
}

impl fmt::Display for ComparedStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ComparedStage::Embedding => f.write_str("the embedding"),
            ComparedStage::Layer(layer) => write!(f, "layer {layer}"),
            ComparedStage::Head => f.write_str("the output head"),
        }
    }
}

impl Model {
    /// Computes a prefill and a decode of `text`, repeated to the length that is needed, with the
    /// model's kernels and with plain Rust. Plain Rust computes about `max_products` products, but
    /// at least one layer. Returns the part that was compared.
    ///
    /// # Errors
    /// If a value differs in any bit, or the system does not have the memory for keys and values.
    ///
    /// # Panics
    /// If `text` is empty or has a token that does not exist.
    pub fn compare_with_scalar(
        &mut self,
        text: &[TokenId],
        max_products: u64,
    ) -> Result<ComparedPart, SelfTestError> {
        let part = ComparedPart::of(self, max_products);
        let tokens: Vec<TokenId> = text.iter().copied().cycle().take(part.tokens).collect();
        assert!(!tokens.is_empty(), "a text to compare");
        let memory = |kv: io::Result<KvStore>| kv.map_err(SelfTestError::Memory);
        let mut comparison = Comparison {
            part,
            scalar: Kernels::new(Isa::Scalar).expect("every machine runs plain Rust"),
            kv: memory(self.new_kv_store(1))?,
            scalar_kv: memory(self.new_kv_store(1))?,
            model: self,
        };
        let (id, page) = (SequenceId::new(0, 0), [Page::new(0)]);
        let (last, prompt) = tokens.split_last().expect("several tokens");
        let mut batch = Batch::new();
        let mut slabs = AlternatingSlabs::new(0);
        batch.push_row(id, 0, prompt, &page, 0);
        batch.set_states(slabs.next_row());
        let prefill = comparison.step(&batch);
        batch.clear();
        batch.push_row(id, prompt.len(), &[*last], &page, usize::from(part.head));
        batch.set_states(slabs.next_row());
        let both = prefill.and_then(|()| comparison.step(&batch));
        both.map(|()| part).map_err(SelfTestError::Difference)
    }
}

struct Comparison<'m> {
    part: ComparedPart,
    model: &'m mut Model,
    kv: KvStore,
    scalar: Kernels,
    scalar_kv: KvStore,
}

impl Comparison<'_> {
    /// Computes a step, and compares its stages.
    fn step(&mut self, batch: &Batch) -> Result<(), KernelDifference> {
        let mut hidden = self.both(ComparedStage::Embedding, |model, _| {
            let mut hidden = Vec::new();
            model.embed(batch, &mut hidden);
            hidden
        })?;
        let layers = self.model.config().layers;
        for layer in 0..layers {
            if !self.part.has_layer(layer, layers) {
                let kv = &mut self.kv;
                self.model
                    .run_layers(layer..layer + 1, &mut hidden, batch, kv);
                continue;
            }
            hidden = self.both(ComparedStage::Layer(layer), |model, kv| {
                let mut hidden = hidden.clone();
                model.run_layers(layer..layer + 1, &mut hidden, batch, kv);
                hidden
            })?;
        }
        if batch.rows().iter().all(|row| row.logits == 0) {
            return Ok(());
        }
        let logits = self.both(ComparedStage::Head, |model, _| {
            model.compute_logits(&hidden, &WantedLogits::default());
            let mut logits = vec![0.0; model.config().vocab];
            model.step_logits().logits().copy_row(0, &mut logits);
            logits
        });
        logits.map(drop)
    }

    /// Runs a stage with the model's kernels and with plain Rust. Returns the values if they are
    /// equal.
    fn both(
        &mut self,
        stage: ComparedStage,
        run: impl Fn(&mut Model, &mut KvStore) -> Vec<f32>,
    ) -> Result<Vec<f32>, KernelDifference> {
        let computed = run(self.model, &mut self.kv);
        let own = self.model.use_kernels(self.scalar);
        let expected = run(self.model, &mut self.scalar_kv);
        self.model.use_kernels(own);
        // The bits of NaN are not defined.
        let is_same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let mut pairs = computed.iter().zip(&expected);
        match pairs.position(|(a, b)| !is_same(*a, *b)) {
            None => Ok(computed),
            Some(index) => Err(KernelDifference {
                isa: own.isa(),
                stage,
                index,
                computed: computed[index],
                expected: expected[index],
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LoadOptions, toy};

    fn toys() -> impl Iterator<Item = Model> {
        Isa::available().map(|isa| {
            let kernels = Kernels::new(isa).unwrap();
            Model::load(&toy::source(), LoadOptions::new(kernels, 2)).unwrap()
        })
    }

    #[test]
    fn every_instruction_set_computes_what_plain_rust_computes() {
        for mut model in toys() {
            let part = model.compare_with_scalar(&[1, 7, 300], u64::MAX).unwrap();
            let (tokens, layers) = (MAX_TOKENS, model.config().layers);
            let head = true;
            assert_eq!(
                part,
                ComparedPart {
                    tokens,
                    layers,
                    head
                }
            );
        }
    }

    #[test]
    fn a_large_model_is_compared_in_part() {
        let mut model = toy::model(1);
        let sizes = model.sizes();
        let layer = (sizes.ternary_weights / model.config().layers) as u64;
        let head = sizes.head_weights as u64;
        let part = |tokens, layers, head| ComparedPart {
            tokens,
            layers,
            head,
        };
        for (products, expected) in [
            (0, part(3, 1, false)),
            (head + 3 * layer - 1, part(3, 1, false)),
            (head + 3 * layer, part(3, 1, true)),
            (head + 8 * layer, part(8, 1, true)),
            (head + 17 * layer, part(9, 1, true)),
            (head + 18 * layer, part(9, 2, true)),
        ] {
            assert_eq!(model.compare_with_scalar(&[1], products).unwrap(), expected);
        }
    }

    #[test]
    fn compared_layers_are_spread_evenly() {
        let chosen = |layers, all| {
            let part = ComparedPart {
                tokens: 3,
                layers,
                head: false,
            };
            (0..all)
                .filter(|layer| part.has_layer(*layer, all))
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen(1, 30), [29]);
        assert_eq!(chosen(3, 30), [9, 19, 29]);
        assert_eq!(chosen(3, 5), [1, 3, 4]);
        assert_eq!(chosen(4, 4), [0, 1, 2, 3]);
    }
}
