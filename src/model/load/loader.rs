//! Takes the tensors of a checkpoint one after the other, and builds the layers from them.

use std::io::IsTerminal;
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressStyle};
use safetensors::Dtype;
use sterna_kernels::{DenseMatrix, Int8Matrix, TernaryMatrix};

use super::packing::{Packer, Rounding, one_float, read_floats, refuse_non_finite};
use super::statistics::WeightStatistics;
use crate::model::architecture::ScaleDirection;
use crate::model::attention::Attention;
use crate::model::checkpoint::{LoadError, MappedFiles, Source, Tensor, TensorFiles, Tensors};
use crate::model::config::ModelConfig;
use crate::model::feed_forward::FeedForward;
use crate::model::layer::Layer;
use crate::model::linear::{Linear, Projections, TernaryLinear};
use crate::model::norm::Norm;
use crate::model::options::LoadOptions;
use crate::model::output_head::{OutputHead, ScreenedHead};
use crate::model::pool::Pool;
use crate::model::weights::Weights;

/// The smallest mean magnitude of master weights that is divided by, as in the reference.
const MIN_MEAN_MAGNITUDE: f32 = 1e-5;

/// Reads, checks and packs all tensors of `source`, on all workers of `pool`.
pub(crate) fn load_weights(
    source: &Source,
    config: &ModelConfig,
    pool: &mut Pool,
    options: &LoadOptions,
) -> Result<Weights, LoadError> {
    let files = TensorFiles::list(source)?;
    let mapped = MappedFiles::open(source, &files.names)?;
    let contents = mapped.contents();
    let bytes = contents.iter().map(|bytes| bytes.len() as u64).sum();
    let mut loader = Loader {
        config,
        options,
        tensors: Tensors::parse(&files, &contents)?,
        packer: Packer {
            pool,
            packing: options.kernels.packing(),
            statistics: WeightStatistics::default(),
            progress: progress_bar(bytes, options.progress),
            files: &mapped,
        },
    };
    let weights = loader.weights()?;
    loader.packer.progress.finish_and_clear();
    loader.packer.statistics.warn_if_unusual();
    loader.tensors.finish()?;
    Ok(weights)
}

fn progress_bar(bytes: u64, wanted: bool) -> ProgressBar {
    if !wanted || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("loading {bar:40} {bytes}/{total_bytes}");
    ProgressBar::new(bytes).with_style(style.expect("the template is well-formed"))
}

/// Builds the weights from the tensors that are left.
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
        put_ternary_matrices_side_by_side(&mut layers);
        let norm = self.norm("model.norm", config.hidden)?;
        let is_shared = matches!(&head, Linear::Dense(head) if Arc::ptr_eq(head, &embedding));
        let head_bytes = if is_shared { 0 } else { head.bytes() };
        let head = self.output_head(head);
        let screen_bytes = match &head {
            OutputHead::Screened(head) => head.screen_bytes(),
            OutputHead::Exact(_) => 0,
        };
        let projections = layers.iter().flat_map(Layer::projections);
        let linears = projections.flat_map(Projections::linears);
        let layer_bytes = linears.map(Linear::bytes).sum::<usize>();
        Ok(Weights {
            bytes: embedding.bytes() + layer_bytes + head_bytes + screen_bytes,
            embedding,
            layers,
            norm,
            head,
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
        // Either name may hold the shared matrix. If both names exist and the tensors differ, the
        // checkpoint means both.
        let (embedding, head) = match (self.tensors.take(EMBEDDING), self.tensors.take(HEAD)) {
            (Some(embedding), Some(head)) => {
                let is_same = (embedding.dtype, &embedding.shape, embedding.bytes)
                    == (head.dtype, &head.shape, head.bytes);
                (embedding, (!is_same).then_some(head))
            }
            (Some(shared), None) | (None, Some(shared)) => (shared, None),
            (None, None) => {
                return Err(LoadError::missing_tensor(EMBEDDING));
            }
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

    /// Screens a large float head, unless its rows are too wide for the 8-bit kernels.
    fn output_head(&mut self, head: Linear) -> OutputHead {
        let LoadOptions {
            kernels,
            max_logits_rows,
            exact_head_bytes,
            ..
        } = *self.options;
        match head {
            Linear::Dense(exact)
                if exact.bytes() > exact_head_bytes
                    && exact.columns() <= Int8Matrix::MAX_COLUMNS =>
            {
                let pool = &mut *self.packer.pool;
                OutputHead::Screened(ScreenedHead::new(kernels, pool, exact, max_logits_rows))
            }
            head => OutputHead::Exact(Projections::new(vec![head])),
        }
    }

    /// Builds a layer as the architecture describes it.
    fn layer(&mut self, layer: usize) -> Result<Layer, LoadError> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let q = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        Ok(Layer {
            attention_norm: self.norm(&name(modules.attention_norm), hidden)?,
            attention: Attention {
                layer,
                heads: config.heads,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                qkv: Projections::new(vec![
                    self.linear(&name(modules.query), q, hidden)?,
                    self.linear(&name(modules.key), kv, hidden)?,
                    self.linear(&name(modules.value), kv, hidden)?,
                ]),
                sub_norm: self.sub_norm(modules.attention_sub_norm.map(name), q)?,
                output: Projections::new(vec![self.linear(
                    &name(modules.attention_output),
                    hidden,
                    q,
                )?]),
            },
            feed_forward_norm: self.norm(&name(modules.feed_forward_norm), hidden)?,
            feed_forward: FeedForward {
                gate_up: Projections::new(vec![
                    self.linear(&name(modules.gate), intermediate, hidden)?,
                    self.linear(&name(modules.up), intermediate, hidden)?,
                ]),
                activation: config.activation,
                sub_norm: self.sub_norm(modules.feed_forward_sub_norm.map(name), intermediate)?,
                down: Projections::new(vec![self.linear(
                    &name(modules.down),
                    hidden,
                    intermediate,
                )?]),
            },
        })
    }

    fn sub_norm(
        &mut self,
        module: Option<String>,
        width: usize,
    ) -> Result<Option<Norm>, LoadError> {
        module.map(|module| self.norm(&module, width)).transpose()
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

    /// Reads a linear in the form in which the checkpoint stores it.
    fn linear(&mut self, module: &str, rows: usize, columns: usize) -> Result<Linear, LoadError> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        if self.config.is_float(module) {
            let weights = self.packer.dense(&tensor, rows, columns)?;
            return Ok(Linear::Dense(Arc::new(weights)));
        }
        let (weights, scale) = self.ternary_weights(module, &tensor, rows, columns)?;
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

    /// Returns ternary weights and the scale that their product is multiplied by.
    fn ternary_weights(
        &mut self,
        module: &str,
        tensor: &Tensor<'_>,
        rows: usize,
        columns: usize,
    ) -> Result<(TernaryMatrix, f32), LoadError> {
        let scale_name = format!("{module}.weight_scale");
        let scale = self.tensors.take(&scale_name);
        let scale = scale.map(|scale| one_float(&scale)).transpose()?;
        let scale = scale.map(|scale| match self.config.quantization.scale {
            ScaleDirection::Multiply => scale,
            ScaleDirection::Divide => 1.0 / scale,
        });
        let packer = &mut self.packer;
        match (tensor.dtype, scale, self.config.quantization.online) {
            (Dtype::U8, Some(scale), _) => Ok((packer.packed(tensor, rows, columns)?, scale)),
            (Dtype::U8, None, _) => Err(LoadError::missing_tensor(scale_name)),
            // Floats with a scale are ternary already, only not packed.
            (_, Some(scale), false) => {
                let rounding = Rounding::MustBeTernary;
                Ok((packer.masters(tensor, rows, columns, rounding)?, scale))
            }
            (_, None, true) => {
                tensor.expect_shape(&[rows, columns])?;
                let mean = packer.mean_magnitude(tensor, rows, columns)?;
                let factor = 1.0 / mean.max(MIN_MEAN_MAGNITUDE);
                let rounding = Rounding::Scaled(factor);
                let weights = packer.masters(tensor, rows, columns, rounding)?;
                Ok((weights, 1.0 / factor))
            }
            (dtype, Some(_), true) => Err(tensor.error(format!(
                "it is {dtype:?} with a weight_scale, but quantization_mode is \"online\", which \
                 means master weights without one"
            ))),
            (dtype, None, false) => Err(tensor.error(format!(
                "it is {dtype:?} without a weight_scale; master weights need \
                 \"quantization_mode\": \"online\" in config.json"
            ))),
        }
    }
}

/// Moves all ternary matrices into one piece of memory.
fn put_ternary_matrices_side_by_side(layers: &mut [Layer]) {
    let linears = layers.iter_mut().flat_map(Layer::projections_mut);
    let linears = linears.flat_map(Projections::linears_mut);
    let ternary = linears.filter_map(|linear| match linear {
        Linear::Ternary(linear) => Some(&mut linear.weights),
        Linear::Dense(_) => None,
    });
    TernaryMatrix::put_side_by_side(&mut ternary.collect::<Vec<_>>());
}
