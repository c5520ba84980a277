//! The weights of a checkpoint, checked and packed into the kernels' layouts.
//!
//! Always true: what is returned is anonymous memory. The files are mapped only while this runs, so a
//! file that is cut off later cannot hurt a running server; every tensor has the shape that the
//! configuration asks for, and every value is finite.
#![expect(unsafe_code, reason = "mapping a file")]

use std::fs::File;
use std::io::IsTerminal;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use memmap2::{Advice, Mmap, UncheckedAdvice};
use safetensors::Dtype;
use sterna_kernels::{DenseMatrix, Int8Matrix, TernaryMatrix};

use super::checkpoint::{FileBytes, LoadError, Source, Tensors, regular_file};
use super::packing::{Packer, Rounding, one_float, read_floats, refuse_non_finite};
use super::statistics::Census;
use crate::model::LoadOptions;
use crate::model::attention::Attention;
use crate::model::config::{Architecture, ModelConfig, ScaleDirection};
use crate::model::head::ScreenedHead;
use crate::model::layer::{FeedForward, Layer};
use crate::model::linear::{Linear, Norm, Projections, TernaryLinear};
use crate::model::pool::Pool;

/// All weights of a model.
pub(crate) struct Weights {
    pub(crate) embedding: Arc<DenseMatrix>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Norm,
    /// One linear: the output head, which may be the embedding.
    pub(crate) head: Projections,
    /// Bytes of all matrices; a shared head counts once.
    pub(crate) bytes: usize,
}

impl Weights {
    /// Reads, checks and packs all tensors of `source`, on all workers of `pool`.
    pub(crate) fn load(
        source: &Source,
        config: &ModelConfig,
        pool: &mut Pool,
        options: &LoadOptions,
    ) -> Result<Weights, LoadError> {
        let files = source.tensor_files()?;
        let opened = Files::open(source, &files.names)?;
        let contents: Vec<&[u8]> = opened.0.iter().map(Contents::bytes).collect();
        let bytes = contents.iter().map(|bytes| bytes.len() as u64).sum();
        let tensors = Tensors::parse(&files, &contents)?;
        let census = Census::default();
        let progress = progress_bar(bytes, options.progress);
        let packer = Packer {
            pool,
            packing: options.kernels.packing(),
            census,
            progress,
            files: &opened,
        };
        let mut loader = Loader {
            config,
            options,
            tensors,
            packer,
        };
        let weights = loader.weights()?;
        loader.packer.progress.finish_and_clear();
        loader.packer.census.warn_if_unusual();
        loader.tensors.finish()?;
        Ok(weights)
    }
}

/// The files that hold tensors.
pub(crate) struct Files<'a>(Vec<Contents<'a>>);

impl<'a> Files<'a> {
    fn open(source: &'a Source, names: &[String]) -> Result<Files<'a>, LoadError> {
        let contents = names.iter().map(|name| Contents::open(source, name));
        Ok(Files(contents.collect::<Result<_, _>>()?))
    }

    /// Gives the memory of `bytes` of these files back to the system, which reads the file again should they be asked for again. Else
    /// the model would be in memory twice when the last tensor is packed.
    pub(crate) fn release(&self, bytes: &[u8]) {
        for contents in &self.0 {
            let Contents::Mapped(map) = contents else {
                continue; // Somebody else's memory.
            };
            let Some(offset) = bytes.as_ptr().addr().checked_sub(map.as_ptr().addr()) else {
                continue;
            };
            if offset + bytes.len() <= map.len() {
                // SAFETY: pages of a file that is mapped for reading hold nothing but what the file holds,
                // so they can be dropped and read anew, with the neighbours that share the first and last.
                let dropped = unsafe {
                    map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, bytes.len())
                };
                let _ = dropped; // A system that keeps them has them twice for a while.
            }
        }
    }
}

/// The bytes of one file.
enum Contents<'a> {
    Mapped(Mmap),
    Memory(FileBytes<'a>),
}

impl<'a> Contents<'a> {
    fn open(source: &'a Source, name: &str) -> Result<Contents<'a>, LoadError> {
        let Source::Directory(directory) = source else {
            return source
                .read(name)?
                .map(Contents::Memory)
                .ok_or_else(|| LoadError::missing_file(source, name));
        };
        let path = directory.join(name);
        if regular_file(&path)?.is_none() {
            return Err(LoadError::missing_file(source, name));
        }
        let file = File::open(&path).map_err(|error| LoadError::file(&path, error))?;
        // SAFETY: the file is only read, and the map does not outlive `Weights::load`. Whoever cuts the
        // file off during these seconds ends the process by a signal, before it has begun to serve;
        // whoever overwrites it changes weights, which are plain numbers, all of whose bit patterns are
        // valid.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| LoadError::file(&path, error))?;
        // Only a hint: a system that does not take it reads a little slower.
        let _ = map.advise(Advice::WillNeed);
        Ok(Contents::Mapped(map))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Contents::Mapped(map) => map,
            Contents::Memory(bytes) => bytes,
        }
    }
}

fn progress_bar(bytes: u64, wanted: bool) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}");
    ProgressBar::new(bytes).with_style(style.expect("the template is well-formed"))
}

/// Takes one tensor after the other.
struct Loader<'a> {
    config: &'a ModelConfig,
    options: &'a LoadOptions,
    tensors: Tensors<'a>,
    packer: Packer<'a>,
}

impl Loader<'_> {
    fn weights(&mut self) -> Result<Weights, LoadError> {
        let config = self.config;
        let (embedding, head) = self.embedding_and_head()?;
        let mut layers = (0..config.layers)
            .map(|layer| self.layer(layer))
            .collect::<Result<Vec<_>, _>>()?;
        let linears = layers.iter_mut().flat_map(Layer::projections_mut);
        let linears = linears.flat_map(Projections::linears_mut);
        let ternary = linears.filter_map(|linear| match linear {
            Linear::Ternary(linear) => Some(&mut linear.weights),
            Linear::Dense(_) | Linear::Screened(_) => None,
        });
        TernaryMatrix::put_side_by_side(&mut ternary.collect::<Vec<_>>());
        let norm = self.norm("model.norm", config.hidden)?;
        let tied = matches!(&head, Linear::Dense(head) if Arc::ptr_eq(head, &embedding));
        let own_head = if tied { 0 } else { head.bytes() };
        let head = self.screened(head);
        let screen = match &head {
            Linear::Screened(head) => head.screen().bytes(),
            Linear::Ternary(_) | Linear::Dense(_) => 0,
        };
        let projections = layers
            .iter()
            .flat_map(Layer::projections)
            .flat_map(Projections::linears);
        let bytes =
            embedding.bytes() + projections.map(Linear::bytes).sum::<usize>() + own_head + screen;
        Ok(Weights {
            embedding,
            layers,
            norm,
            head: Projections::new(vec![head]),
            bytes,
        })
    }

    fn embedding_and_head(&mut self) -> Result<(Arc<DenseMatrix>, Linear), LoadError> {
        const EMBEDDING: &str = "model.embed_tokens.weight";
        const HEAD: &str = "lm_head.weight";
        let (vocab, hidden) = (self.config.vocab, self.config.hidden);
        if !self.config.tied {
            let embedding = self.tensors.require(EMBEDDING)?;
            let embedding = Arc::new(self.packer.dense(&embedding, vocab, hidden)?);
            return Ok((embedding, self.linear("lm_head", vocab, hidden)?));
        }
        // Either name may hold what both share. A checkpoint that holds both means both, when they differ.
        let (embedding, head) = match (self.tensors.take(EMBEDDING), self.tensors.take(HEAD)) {
            (Some(embedding), Some(head)) => {
                let same = (embedding.dtype, &embedding.shape, embedding.bytes)
                    == (head.dtype, &head.shape, head.bytes);
                (embedding, (!same).then_some(head))
            }
            (Some(shared), None) | (None, Some(shared)) => (shared, None),
            (None, None) => return Err(LoadError::tensor(EMBEDDING, "missing")),
        };
        let embedding = Arc::new(self.packer.dense(&embedding, vocab, hidden)?);
        let head = match head {
            None => Arc::clone(&embedding),
            Some(head) => {
                tracing::warn!(
                    "tie_word_embeddings is set, but {HEAD} differs from {EMBEDDING}: using both"
                );
                Arc::new(self.packer.dense(&head, vocab, hidden)?)
            }
        };
        Ok((embedding, Linear::Dense(head)))
    }

    /// A large float head gets an 8-bit first pass, unless its rows are too wide for that.
    fn screened(&mut self, head: Linear) -> Linear {
        let is_screened = |exact: &DenseMatrix| {
            exact.bytes() > self.options.exact_head_bytes
                && exact.columns() <= Int8Matrix::MAX_COLUMNS
        };
        match head {
            Linear::Dense(exact) if is_screened(&exact) => {
                let kernels = self.options.kernels;
                Linear::Screened(ScreenedHead::new(kernels, self.packer.pool, exact))
            }
            other => other,
        }
    }

    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let config = self.config;
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let (q, kv) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let sub_norms = config.architecture == Architecture::BitNet;
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let attention = Attention {
            norm: self.norm(&name("input_layernorm"), hidden)?,
            qkv: Projections::new(vec![
                self.linear(&name("self_attn.q_proj"), q, hidden)?,
                self.linear(&name("self_attn.k_proj"), kv, hidden)?,
                self.linear(&name("self_attn.v_proj"), kv, hidden)?,
            ]),
            sub_norm: sub_norms
                .then(|| self.norm(&name("self_attn.attn_sub_norm"), q))
                .transpose()?,
            output: Projections::new(vec![self.linear(&name("self_attn.o_proj"), hidden, q)?]),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let feed_forward = FeedForward {
            norm: self.norm(&name("post_attention_layernorm"), hidden)?,
            gate_up: Projections::new(vec![
                self.linear(&name("mlp.gate_proj"), intermediate, hidden)?,
                self.linear(&name("mlp.up_proj"), intermediate, hidden)?,
            ]),
            activation: config.activation,
            sub_norm: sub_norms
                .then(|| self.norm(&name("mlp.ffn_sub_norm"), intermediate))
                .transpose()?,
            down: Projections::new(vec![self.linear(
                &name("mlp.down_proj"),
                hidden,
                intermediate,
            )?]),
        };
        Ok(Layer {
            attention,
            feed_forward,
        })
    }

    fn norm(&mut self, module: &str, width: usize) -> Result<Norm, LoadError> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        tensor.expect_shape(&[width])?;
        let mut weight = vec![0.0; width];
        read_floats(&tensor, tensor.bytes, &mut weight)?;
        refuse_non_finite(&tensor, &weight, f32::MAX)?;
        Ok(Norm {
            weight,
            eps: self.config.norm_eps,
        })
    }

    /// One linear in whatever form the checkpoint has it.
    fn linear(&mut self, module: &str, rows: usize, columns: usize) -> Result<Linear, LoadError> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        if self.config.is_float(module) {
            return Ok(Linear::Dense(Arc::new(
                self.packer.dense(&tensor, rows, columns)?,
            )));
        }
        let scale = self
            .tensors
            .take(&format!("{module}.weight_scale"))
            .map(|scale| one_float(&scale))
            .transpose()?;
        let scale = scale.map(|scale| match self.config.quantization.scale {
            ScaleDirection::Multiply => scale,
            ScaleDirection::Divide => 1.0 / scale,
        });
        let online = self.config.quantization.online;
        let (weights, scale) = match (tensor.dtype, scale) {
            (Dtype::U8, Some(scale)) => (self.packer.packed(&tensor, rows, columns)?, scale),
            // Floats with a scale: already ternary, only not packed.
            (_, Some(scale)) if !online => (
                self.packer
                    .masters(&tensor, rows, columns, Rounding::MustBeTernary)?,
                scale,
            ),
            (Dtype::U8, None) => {
                return Err(LoadError::tensor(
                    format!("{module}.weight_scale"),
                    "missing",
                ));
            }
            (_, None) if online => {
                tensor.expect_shape(&[rows, columns])?;
                let factor = 1.0
                    / self
                        .packer
                        .mean_magnitude(&tensor, rows, columns)?
                        .max(1e-5);
                (
                    self.packer
                        .masters(&tensor, rows, columns, Rounding::Scaled(factor))?,
                    1.0 / factor,
                )
            }
            (_, Some(_)) => {
                return Err(
                    tensor.error("floats with a weight_scale, though quantization_mode is online")
                );
            }
            (dtype, None) => {
                let problem = format!(
                    "{dtype:?} without a weight_scale: masters need \"quantization_mode\": \"online\""
                );
                return Err(tensor.error(problem));
            }
        };
        let input_norm = match self.config.quantization.input_norm_eps {
            Some(eps) => Some(Norm {
                eps,
                ..self.norm(&format!("{module}.rms_norm"), columns)?
            }),
            None => None,
        };
        Ok(Linear::Ternary(TernaryLinear {
            weights,
            scale,
            input_norm,
        }))
    }
}
