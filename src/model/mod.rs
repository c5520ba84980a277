//! The model: tokens and pages in, logits out.
//!
//! [`Model::forward`] computes one step for a batch of rows of many sequences, prefill chunks and
//! decodes mixed. All tokens of all rows go through each matrix together; attention alone looks at each
//! sequence for itself.
//!
//! Always true: within one instruction set a row's logits depend only on its own sequence, bit for bit;
//! not on the other rows, nor on how its prompt was cut into chunks, nor on the number of threads. The
//! model knows no request, no tenant and no text.

mod attention;
mod config;
mod head;
mod inputs;
mod kv_store;
mod layer;
mod linear;
mod load;
mod logits;
mod placement;
mod pool;
mod profile;
#[cfg(test)]
mod reference;
mod sizes;
pub mod synthetic;
#[cfg(test)]
mod tests;
pub mod toy;

pub use config::{Activation, Architecture, ModelConfig, Quantization, ScaleDirection};
pub use kv_store::KvStore;
pub use load::{FileBytes, LoadError, Source};
pub use logits::{Logits, StepLogits};
pub use profile::{Profile, Stage};
pub use sizes::Sizes;

use std::ops::Range;

use sterna_kernels::{AttentionState, HugeSlice, Kernels};
use sterna_scheduler::Batch;

use attention::AttentionBuffers;
use head::Rescoring;
use inputs::{Crew, Inputs, Scratch};
use kv_store::KvShape;
use layer::Layer;
use linear::{Linear, Projections};
use load::Weights;
use placement::Placement;
use pool::Pool;

/// How a model is loaded, and the most that a step may ask of it.
#[derive(Clone, Copy)]
pub struct LoadOptions {
    /// The arithmetic.
    pub kernels: Kernels,
    /// Threads that compute, the caller of [`Model::forward`] included.
    pub threads: usize,
    /// Bind each thread but the caller to a core of its own, where there are enough.
    pub pin_threads: bool,
    /// The most tokens of a step.
    pub max_step_tokens: usize,
    /// The most tokens of a step whose logits are wanted; each takes a row of logits.
    pub max_logits_rows: usize,
    /// A float output head of more bytes than this is multiplied in 8 bits first, and then the best rows of each token again from the
    /// floats.
    pub exact_head_bytes: usize,
    /// Show a progress bar while loading, if stderr is a terminal.
    pub progress: bool,
}

impl LoadOptions {
    /// `threads` threads, not bound to cores; steps of up to 512 tokens, 64 rows of logits; no progress bar.
    #[must_use]
    pub fn new(kernels: Kernels, threads: usize) -> LoadOptions {
        LoadOptions {
            kernels,
            threads,
            pin_threads: false,
            max_step_tokens: 512,
            max_logits_rows: 64,
            exact_head_bytes: 16 << 20, // Half of which a cache might hold; the heads of small models cost next to nothing.
            progress: false,
        }
    }
}

/// A loaded model, its threads, and the memory that its steps reuse.
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    crew: Crew,
    memory: Memory,
    logits: Logits,
    rescoring: Rescoring,
    max_logits_rows: usize,
    profile: Profile,
}

/// What stages hand to each other, sized for the largest step.
struct Memory {
    placement: Placement,
    hidden: Vec<f32>, // [token][hidden]
    inputs: Inputs,
    products: HugeSlice<f32>,
    attention: AttentionBuffers,
}

/// What every stage of a step works with.
struct Pass<'a> {
    crew: &'a mut Crew,
    inputs: &'a mut Inputs,
    products: &'a mut [f32],
    attention: &'a mut AttentionBuffers,
    placement: &'a Placement,
    batch: &'a Batch,
    kv: &'a mut KvStore,
    profile: &'a mut Profile,
    layer: usize,
}

impl Memory {
    fn new(config: &ModelConfig, weights: &Weights, max_tokens: usize) -> Memory {
        let projections = weights.layers.iter().flat_map(Layer::projections);
        let product_width = projections
            .clone()
            .map(Projections::product_width)
            .max()
            .unwrap_or(0);
        Memory {
            placement: Placement::new(config, max_tokens),
            hidden: Vec::with_capacity(max_tokens * config.hidden),
            inputs: Inputs::new(max_tokens, projections.chain([&weights.head])),
            products: HugeSlice::new(max_tokens * product_width),
            attention: AttentionBuffers::new(max_tokens, config.heads, config.head_dim),
        }
    }
}

impl Model {
    /// Loads a checkpoint.
    ///
    /// # Errors
    /// If a file or tensor is missing, malformed or not what the configuration asks for, or the
    /// configuration asks for something that this engine does not compute. The error names the thing.
    ///
    /// # Panics
    /// If an option is zero.
    pub fn load(source: &Source, options: LoadOptions) -> Result<Model, LoadError> {
        assert!(
            options.max_step_tokens > 0 && options.max_logits_rows > 0,
            "a step computes something"
        );
        let config = ModelConfig::read(source)?;
        let mut pool = Pool::new(options.threads, options.pin_threads);
        let weights = Weights::load(source, &config, &mut pool, &options)?;
        let rescoring = Rescoring::new(
            pool.workers(),
            options.max_logits_rows,
            weights.head.product_width(),
        );
        let memory = Memory::new(&config, &weights, options.max_step_tokens);
        let width = config
            .hidden
            .max(config.intermediate)
            .max(config.heads * config.head_dim);
        let scratch = || {
            let attention = AttentionState::new(config.group(), config.head_dim);
            Scratch::new(
                width,
                options.max_step_tokens.max(options.max_logits_rows),
                attention,
            )
        };
        let scratch = (0..pool.workers()).map(|_| scratch()).collect();
        let crew = Crew {
            kernels: options.kernels,
            pool,
            scratch,
        };
        let logits = Logits::new(
            config.vocab,
            weights.head.product_width() * options.max_logits_rows,
        );
        Ok(Model {
            config,
            weights,
            crew,
            memory,
            logits,
            rescoring,
            max_logits_rows: options.max_logits_rows,
            profile: Profile::new(),
        })
    }

    /// The hyperparameters.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Threads that compute, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.crew.pool.workers()
    }

    /// Bytes of all matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes
    }

    /// What a step reads and multiplies.
    #[must_use]
    pub fn sizes(&self) -> Sizes {
        Sizes::of(&self.weights, self.kv_shape())
    }

    /// Where the time of its steps went.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Bytes of keys and values of one page, all layers.
    #[must_use]
    pub fn kv_bytes_per_page(&self) -> usize {
        self.kv_shape().page_bytes()
    }

    /// Memory for the keys and values of `pages` pages.
    #[must_use]
    pub fn new_kv_store(&self, pages: usize) -> KvStore {
        KvStore::new(self.kv_shape(), pages)
    }

    fn kv_shape(&self) -> KvShape {
        let ModelConfig {
            layers,
            kv_heads,
            head_dim,
            ..
        } = self.config;
        KvShape {
            layers,
            kv_heads,
            head_dim,
        }
    }

    /// Computes a step: makes the batch's copies, writes the keys and values of its tokens into `kv`, and
    /// returns the logits after the tokens for which they are wanted, in the order of the rows and of their
    /// tokens.
    ///
    /// # Panics
    /// If the batch is larger than the options allow, names a page or token that does not exist, writes to a
    /// page that it also copies from, or `kv` is another model's.
    pub fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> &Logits {
        // Should a step panic, the states are lost; the next one makes them anew.
        let mut hidden = std::mem::take(&mut self.memory.hidden);
        self.profile.begin();
        hidden.resize(batch.token_count() * self.config.hidden, 0.0);
        self.embed(batch, &mut hidden);
        self.memory.placement.place(batch);
        for copy in batch.copies() {
            kv.copy_page(copy.from.index(), copy.to.index());
        }
        self.profile.end(Stage::Rows);
        self.placed_layers(0..self.config.layers, &mut hidden, batch, kv);
        self.project(&hidden);
        self.profile.end(Stage::Head);
        self.memory.hidden = hidden;
        &self.logits
    }

    /// The logits of the last step, as [`Model::forward`] returned them, with the threads to work on them.
    pub fn step_logits(&mut self) -> StepLogits<'_> {
        StepLogits {
            logits: &self.logits,
            kernels: self.crew.kernels,
            pool: &mut self.crew.pool,
        }
    }

    /// Writes the embeddings of the batch's tokens, `[token][hidden]`: what the first layer is given.
    ///
    /// # Panics
    /// If a token does not exist or `hidden` has another size.
    pub fn embed(&mut self, batch: &Batch, hidden: &mut [f32]) {
        let width = self.config.hidden;
        assert_eq!(
            hidden.len(),
            batch.token_count() * width,
            "one state a token"
        );
        let tokens = batch.rows().iter().flat_map(|row| batch.tokens(row));
        for (state, &token) in hidden.chunks_exact_mut(width).zip(tokens) {
            self.crew
                .kernels
                .dense_row(&self.weights.embedding, token as usize, state);
        }
    }

    /// Runs one layer on the hidden states `[token][hidden]` of the batch's tokens, in place.
    /// [`Model::forward`] computes what this does, layer by layer, between [`Model::embed`] with the batch's
    /// copies and the output head.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn run_layer(&mut self, layer: usize, hidden: &mut [f32], batch: &Batch, kv: &mut KvStore) {
        self.memory.placement.place(batch);
        self.placed_layers(layer..layer + 1, hidden, batch, kv);
    }

    /// Runs some layers one after the other, the batch being placed.
    fn placed_layers(
        &mut self,
        layers: Range<usize>,
        hidden: &mut [f32],
        batch: &Batch,
        kv: &mut KvStore,
    ) {
        assert_eq!(
            kv.shape(),
            self.kv_shape(),
            "the memory of keys and values is this model's"
        );
        assert_eq!(
            hidden.len(),
            batch.token_count() * self.config.hidden,
            "one state a token"
        );
        if hidden.is_empty() {
            return;
        }
        let Memory {
            placement,
            inputs,
            products,
            attention,
            ..
        } = &mut self.memory;
        let mut pass = Pass {
            crew: &mut self.crew,
            inputs,
            products,
            attention,
            placement,
            batch,
            kv,
            profile: &mut self.profile,
            layer: layers.start,
        };
        let mut before = None;
        for layer in &self.weights.layers[layers] {
            layer.forward(&mut pass, before, hidden);
            (before, pass.layer) = (Some(layer), pass.layer + 1);
        }
        if let Some(last) = before {
            last.finish(&mut pass, hidden);
        }
    }

    /// The output head, on the final norm of the states whose logits are wanted.
    fn project(&mut self, hidden: &[f32]) {
        let Model {
            weights,
            crew,
            memory,
            logits,
            rescoring,
            ..
        } = self;
        let wanted = memory.placement.logits();
        assert!(
            wanted.len() <= self.max_logits_rows,
            "{} tokens want logits, room for {}",
            wanted.len(),
            self.max_logits_rows
        );
        let out = logits.reset(wanted.len());
        if wanted.is_empty() {
            return;
        }
        let (kernels, width) = (crew.kernels, self.config.hidden);
        memory
            .inputs
            .fill(crew, &weights.head, wanted.len(), |row, normed, _| {
                weights
                    .norm
                    .apply(kernels, &hidden[wanted[row] * width..][..width], normed);
            });
        match weights.head.linears() {
            [Linear::Screened(head)] => head.multiply(crew, &memory.inputs, rescoring, out),
            _ => weights.head.multiply(crew, &memory.inputs, out),
        }
    }
}
