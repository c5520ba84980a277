//! The model: it loads a checkpoint and computes forward passes.

use std::io;
use std::ops::Range;

use sterna_kernels::{AttentionState, Kernels, KvDtype, SPAN_TOKENS, SavedSpans};
use sterna_scheduler::{Batch, StateLimits};

use super::activations::{Pending, StepBuffers};
use super::attention::MAX_CUT_SPANS;
use super::kv_store::{KvShape, KvStore};
use super::layer::Layer;
use super::linear::Projections;
use super::load::load_weights;
use super::logits::{Logits, StepLogits};
use super::mixture::{ExpertUse, Mixture, Routing};
use super::options::LoadOptions;
use super::output_head::{LikelyUse, OutputHead};
use super::placement::Placement;
use super::pool::Pool;
use super::profile::{Profile, Stage};
use super::recurrent_head::RecurrentScratch;
use super::state_store::{StateShape, StateStore};
use super::wanted::WantedLogits;
use super::weights::{Sizes, Weights};
use super::workers::{ForwardContext, Scratch, ScratchSizes, Workers};
#[cfg(test)]
use super::{activations::InputRows, attention::Attention, layer::Mixer};
use crate::checkpoint::ModelConfig;
use crate::checkpoint::{LoadError, RecurrentLayers, Source};
use crate::fault::{self, Place};

/// The states of one sequence, with a slab to read and a slab to write.
const ONE_SEQUENCE: StateLimits = StateLimits {
    slabs: 2,
    in_place_tokens: 1,
    trial_interval: 2048,
};

/// A loaded model, its threads, and the memory that its steps reuse.
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    workers: Workers,
    memory: StepMemory,
    logits: Logits,
    max_logits_rows: usize,
    /// The logits that the next step wants.
    wanted: WantedLogits,
    kv_dtype: KvDtype,
    profile: Profile,
}

/// The hidden states after the last norm of the tokens of a step that asked for logits.
pub struct HiddenStates<'a> {
    values: &'a [f32], // [token][width]
    tokens: &'a [usize],
    width: usize,
}

impl HiddenStates<'_> {
    /// Returns the states, in the order of the batch's rows and of their tokens.
    pub fn iter(&self) -> impl Iterator<Item = &[f32]> {
        let state = |token: &usize| &self.values[token * self.width..][..self.width];
        self.tokens.iter().map(state)
    }
}

/// The memory of a step, sized for the largest one.
struct StepMemory {
    placement: Placement,
    residual: Vec<f32>, // [token][hidden]
    buffers: StepBuffers,
}

impl StepMemory {
    fn new(config: &ModelConfig, weights: &Weights, max_tokens: usize) -> StepMemory {
        let projections = weights.layers.iter().flat_map(Layer::projections);
        let mixtures = weights.layers.iter().filter_map(Layer::mixture);
        let widths = projections.clone().map(Projections::product_width);
        let product_width = widths
            .chain(mixtures.clone().map(Mixture::product_width))
            .max();
        let formats = projections
            .map(Projections::input_format)
            .chain(mixtures.map(Mixture::input_format));
        let state_values = config.recurrent.as_ref().map_or(0, RecurrentLayers::values);
        StepMemory {
            placement: Placement::new(config, max_tokens),
            residual: Vec::with_capacity(max_tokens * config.hidden),
            buffers: StepBuffers::new(
                max_tokens,
                formats.chain(weights.head.as_ref().map(OutputHead::input_format)),
                product_width.unwrap_or(0),
                (
                    (config.heads * config.head_dim).max(state_values),
                    Routing::new(max_tokens, config.hidden, config.experts.as_ref()),
                ),
            ),
        }
    }
}

impl Model {
    /// Returns how the experts were used since the model was loaded. Without experts, all is 0.
    pub fn expert_use(&self) -> ExpertUse {
        self.memory.buffers.routing.all_use
    }

    /// Loads a checkpoint.
    ///
    /// # Errors
    /// If a file or tensor is missing, malformed or at odds with the configuration, or if the
    /// configuration asks for something that this engine does not compute. The error names the
    /// file, the field or the tensor.
    ///
    /// # Panics
    /// If `max_step_tokens`, `max_logits_rows` or `threads` is zero.
    pub fn load(source: &Source, options: LoadOptions) -> Result<Model, LoadError> {
        assert!(
            options.max_step_tokens > 0 && options.max_logits_rows > 0,
            "a step has room for a token and its logits"
        );
        let config = ModelConfig::read(source)?;
        let mut pool = Pool::new(options.threads, options.pin_threads);
        let weights = load_weights(source, &config, &mut pool, &options)?;
        let max_tokens = options.max_step_tokens.max(options.max_logits_rows);
        let sizes = ScratchSizes {
            max_width: config.max_width(),
            max_tokens,
            factors: weights.factors_per_token(),
            has_corrections: weights.have_corrections(),
            expert_width: (config.experts.as_ref())
                .map_or(0, |experts| config.hidden.max(experts.intermediate)),
        };
        let scratch = (0..pool.workers()).map(|_| {
            let (group, head_dim) = (config.group(), config.head_dim);
            let attention = AttentionState::new(group, head_dim);
            let spans = MAX_CUT_SPANS.min(config.max_position.div_ceil(SPAN_TOKENS));
            let attention = (attention, SavedSpans::new(spans, group, head_dim));
            let recurrent = RecurrentScratch::new(config.recurrent.as_ref());
            Scratch::new(sizes, attention, recurrent)
        });
        let scratch = scratch.collect();
        let padded_rows = weights.head.as_ref().map_or(0, OutputHead::padded_rows);
        let logits = padded_rows * options.max_logits_rows;
        let wanted = WantedLogits::with_capacity(config.vocab);
        Ok(Model {
            memory: StepMemory::new(&config, &weights, options.max_step_tokens),
            logits: Logits::new(config.vocab, logits),
            config,
            weights,
            workers: Workers {
                kernels: options.kernels,
                pool,
                scratch,
            },
            max_logits_rows: options.max_logits_rows,
            wanted,
            kv_dtype: options.kv_dtype,
            profile: Profile::new(),
        })
    }

    /// Returns the hyperparameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the maximum number of tokens in a step.
    pub(super) fn max_step_tokens(&self) -> usize {
        self.memory.placement.max_tokens()
    }

    /// Returns the number of threads that compute, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.pool.workers()
    }

    /// Returns the bytes of all matrices.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes
    }

    /// Returns the bytes of memory that [`Model::prepare`] takes.
    pub fn later_bytes(&self) -> usize {
        let head = self.weights.head.as_ref();
        head.map_or(0, OutputHead::later_bytes)
    }

    /// Returns how much a step reads and multiplies.
    pub fn sizes(&self) -> Sizes {
        let layers = self.config.recurrent.as_ref();
        let states = layers.map(RecurrentLayers::state_bytes);
        Sizes::of(
            (&self.config, &self.weights),
            self.kv_shape(),
            states.unwrap_or(0),
        )
    }

    /// Returns the time that forward passes have spent in each stage.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Returns the number format of keys and values.
    pub fn kv_dtype(&self) -> KvDtype {
        self.kv_dtype
    }

    /// Returns the bytes of keys and values of one page, all layers.
    pub fn kv_bytes_per_page(&self) -> usize {
        self.kv_shape().page_bytes()
    }

    /// Takes the memory for the keys and values of `pages` pages, and for the
    /// [`AlternatingSlabs`](super::AlternatingSlabs) of one sequence.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn new_kv_store(&self, pages: usize) -> io::Result<KvStore> {
        self.new_kv_store_in(self.kv_dtype, pages)
    }

    /// Computes with other kernels from now on. Returns the previous kernels.
    pub(super) fn use_kernels(&mut self, kernels: Kernels) -> Kernels {
        std::mem::replace(&mut self.workers.kernels, kernels)
    }

    /// Takes the memory as [`Model::new_kv_store`] does, for keys and values in any format. A step
    /// stores them in the format of its store.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn new_kv_store_in(&self, dtype: KvDtype, pages: usize) -> io::Result<KvStore> {
        let shape = KvShape {
            dtype,
            ..self.kv_shape()
        };
        self.with_states(KvStore::new(shape, pages)?, ONE_SEQUENCE)
    }

    /// Takes the memory for the keys and values of `pages` pages, and for slabs of states if the
    /// model has recurrent layers.
    ///
    /// # Errors
    /// If the system does not have enough memory.
    pub fn new_kv_store_with_states(
        &self,
        pages: usize,
        states: StateLimits,
    ) -> io::Result<KvStore> {
        self.with_states(KvStore::new(self.kv_shape(), pages)?, states)
    }

    fn with_states(&self, kv: KvStore, states: StateLimits) -> io::Result<KvStore> {
        let Some(layers) = &self.config.recurrent else {
            return Ok(kv);
        };
        let shape = StateShape::new(layers, states.in_place_tokens as usize);
        kv.with_states(StateStore::new(shape, states.slabs as usize)?)
    }

    /// Returns the bytes of a slab of states, if the model has recurrent layers.
    pub fn slab_bytes(&self, in_place_tokens: u32) -> Option<usize> {
        let layers = self.config.recurrent.as_ref()?;
        Some(StateShape::new(layers, in_place_tokens as usize).slab_bytes())
    }

    fn kv_shape(&self) -> KvShape {
        KvShape {
            layers: self.config.attention_layers(),
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            dtype: self.kv_dtype,
        }
    }

    /// Returns the most tokens with logits of a step that may compute only wanted logits.
    pub fn max_wanted_tokens(&self) -> usize {
        let head = self.weights.head.as_ref();
        head.map_or(0, OutputHead::max_wanted_tokens)
    }

    /// Says which logits of each row the next step wants. The other logits may be lower then.
    pub fn want_logits(&mut self, wanted: &WantedLogits) {
        self.wanted.copy(wanted);
    }

    /// Returns how often only the likely rows of the output head were computed.
    pub fn likely_use(&self) -> LikelyUse {
        let head = self.weights.head.as_ref();
        head.map_or(LikelyUse::default(), OutputHead::likely_use)
    }

    /// Does the next part of the work that makes later steps faster, in some milliseconds.
    /// Returns whether there is more to do.
    pub fn prepare(&mut self) -> bool {
        let head = self.weights.head.as_mut();
        head.is_some_and(|head| head.prepare(&mut self.workers))
    }

    /// Computes a step: copies the pages that the batch asks for, writes the keys and values of the
    /// batch's tokens into `kv`, and returns the logits. Logits are in the order of the rows and of
    /// their tokens. A model without an output head returns logits of 0.
    ///
    /// # Panics
    /// If one of these holds:
    /// - the batch is larger than the options allow;
    /// - it names a page or token that does not exist;
    /// - it writes to a page that it also copies from;
    /// - `kv` was made by a model of another shape.
    pub fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> &Logits {
        // If a step panics, this memory is lost; the next step allocates it again.
        let mut residual = std::mem::take(&mut self.memory.residual);
        let wanted = std::mem::take(&mut self.wanted);
        self.profile.begin();
        fault::pass(Place::ForwardBegun);
        self.embed(batch, &mut residual);
        self.run_layers(0..self.config.layers, &mut residual, batch, kv);
        self.compute_logits(&residual, &wanted);
        self.profile.end(Stage::Head);
        self.memory.residual = residual;
        self.wanted = wanted;
        self.wanted.clear();
        &self.logits
    }

    /// Computes a step as [`Model::forward`] does, except for the output head. Returns the hidden
    /// states after the last norm of the tokens that ask for logits, in the same order.
    ///
    /// # Panics
    /// Under the conditions of [`Model::forward`].
    pub fn forward_states(&mut self, batch: &Batch, kv: &mut KvStore) -> HiddenStates<'_> {
        let mut residual = std::mem::take(&mut self.memory.residual);
        self.profile.begin();
        self.embed(batch, &mut residual);
        self.run_layers(0..self.config.layers, &mut residual, batch, kv);
        let (kernels, width) = (self.workers.kernels, self.config.hidden);
        let normed = &mut self.workers.scratch[0].rows[..width];
        let tokens = self.memory.placement.logits();
        for token in tokens {
            let state = &mut residual[token * width..][..width];
            self.weights.norm.apply(kernels, state, normed);
            state.copy_from_slice(normed);
        }
        self.profile.end(Stage::Head);
        self.memory.residual = residual;
        HiddenStates {
            values: &self.memory.residual,
            tokens,
            width,
        }
    }

    /// Computes nothing: all logits of the batch are 0, and its tokens leave nothing in states.
    pub(crate) fn leave_out(&mut self, batch: &Batch, kv: &mut KvStore) {
        for (row, states) in batch
            .rows()
            .iter()
            .filter_map(|row| Some((row, row.states?)))
        {
            if self.config.recurrent.is_some() {
                kv.states_mut().clear(states.to, row.end());
            }
        }
        let rows = batch.rows().iter().map(|row| row.logits as usize).sum();
        self.logits.reset(rows).fill(0.0);
    }

    /// Returns the logits of the last step, with the threads to work on them.
    pub fn step_logits(&mut self) -> StepLogits<'_> {
        StepLogits {
            logits: &self.logits,
            kernels: self.workers.kernels,
            pool: &mut self.workers.pool,
            hidden: &self.memory.residual,
            tokens: self.memory.placement.logits(),
            norm: &self.weights.norm,
        }
    }

    /// Sets `hidden` to the embeddings of the batch's tokens, `[token][hidden]`: the input of the
    /// first layer.
    ///
    /// # Panics
    /// If a token does not exist.
    pub(super) fn embed(&self, batch: &Batch, hidden: &mut Vec<f32>) {
        let (kernels, width) = (self.workers.kernels, self.config.hidden);
        let scale = self.config.architecture.scales_embedding;
        let scale = scale.then(|| (width as f64).sqrt() as f32);
        hidden.resize(batch.token_count() * width, 0.0);
        let tokens = batch.rows().iter().flat_map(|row| batch.tokens(row));
        for (index, (state, &token)) in hidden.chunks_exact_mut(width).zip(tokens).enumerate() {
            (self.weights.embedding).copy_row(kernels, token as usize, state);
            if let Some(scale) = scale {
                state.iter_mut().for_each(|value| *value *= scale);
            }
            fault::pass_row(Place::TokenEmbedded, index, state);
        }
    }

    /// Copies the pages that the batch asks for. Then runs some layers one after the other on the
    /// hidden states of the batch's tokens, `[token][hidden]`, in place.
    ///
    /// # Panics
    /// Under the conditions of [`Model::forward`].
    pub fn run_layers(
        &mut self,
        layers: Range<usize>,
        residual: &mut [f32],
        batch: &Batch,
        kv: &mut KvStore,
    ) {
        let dtype = kv.shape().dtype;
        let shape = KvShape {
            dtype,
            ..self.kv_shape()
        };
        assert_eq!(
            kv.shape(),
            shape,
            "the KV store has the shape of this model"
        );
        assert_eq!(
            residual.len(),
            batch.token_count() * self.config.hidden,
            "one hidden state per token"
        );
        self.memory.placement.place(batch);
        fault::pass(Place::BatchPlaced);
        for copy in batch.copies() {
            kv.copy_page(copy.from.index(), copy.to.index());
        }
        fault::pass(Place::PagesCopied);
        self.profile.end(Stage::Rows);
        if residual.is_empty() {
            return;
        }
        let mut context = ForwardContext {
            workers: &mut self.workers,
            batch,
            placement: &self.memory.placement,
            kv,
            profile: &mut self.profile,
        };
        let mut pending = Pending::nothing(&mut self.memory.buffers);
        for layer in &self.weights.layers[layers] {
            fault::pass(Place::LayerBegun);
            pending = layer.forward(&mut context, residual, pending);
            fault::pass(Place::LayerEnded);
        }
        pending.add(&mut context, residual);
        fault::pass(Place::LastOutputAdded);
    }

    /// Calls `read` with the attention of a layer and the normed input rows that the hidden states
    /// of the batch's tokens, `[token][hidden]`, give it.
    #[cfg(test)]
    pub(super) fn observe_attention<T>(
        &mut self,
        layer: usize,
        hidden: &[f32],
        batch: &Batch,
        kv: &mut KvStore,
        read: impl FnOnce(&Attention, &mut ForwardContext<'_>, InputRows<'_>) -> T,
    ) -> T {
        self.memory.placement.place(batch);
        let mut context = ForwardContext {
            workers: &mut self.workers,
            batch,
            placement: &self.memory.placement,
            kv,
            profile: &mut self.profile,
        };
        let layer = &self.weights.layers[layer];
        let pending = Pending::nothing(&mut self.memory.buffers);
        let Mixer::Attention(attention) = &layer.mixer else {
            panic!("a layer with attention");
        };
        let (norm, qkv) = (&layer.mixer_norm, &attention.qkv);
        let input = (qkv, qkv.input_format());
        let rows = pending.add_and_norm(&mut context, &mut hidden.to_vec(), norm, input);
        read(attention, &mut context, rows)
    }

    /// Computes the logits: the output head on the normed hidden states of the tokens that get
    /// logits. These logits of each row are `wanted`, or all if `wanted` is empty.
    pub(super) fn compute_logits(&mut self, hidden: &[f32], wanted: &WantedLogits) {
        let Model {
            weights, workers, ..
        } = self;
        let tokens = self.memory.placement.logits();
        assert!(
            tokens.len() <= self.max_logits_rows,
            "{} tokens ask for logits, but the limit is {}",
            tokens.len(),
            self.max_logits_rows
        );
        let logits = self.logits.reset(tokens.len());
        if tokens.is_empty() {
            return;
        }
        let Some(head) = weights.head.as_mut() else {
            return; // All logits are 0.
        };
        let (kernels, width, norm) = (workers.kernels, self.config.hidden, &weights.norm);
        let inputs = &mut self.memory.buffers.inputs;
        let format = head.input_format();
        inputs.fill(workers, &format, tokens.len(), |row, normed, _| {
            norm.apply(kernels, &hidden[tokens[row] * width..][..width], normed);
            fault::pass_row(Place::HiddenNormed, row, normed);
        });
        head.multiply(workers, inputs, wanted, logits);
        fault::pass(Place::HeadMultiplied);
    }
}
