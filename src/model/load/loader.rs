//! Takes the tensors of a checkpoint one after the other, and builds the layers from them.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use sterna_kernels::{GroupSize, Int8Matrix, PANEL_ROWS, TernaryMatrix};

use super::packing::{Packer, Rounding};
use crate::checkpoint::{
    ExpertModules, Experts, FileOrder, LoadError, LoadResult, ModelConfig, OutputOrder,
    RecurrentLayers, RecurrentModules, Rotation, ScaleDirection, Source, Storage, StoredWeights,
    Tensor, TensorFiles, Tensors, TernaryForm, WeightStatistics, is_ternary, master_factor,
    of_model, one_float, order_value_heads, read_matrix, refuse_non_finite,
};
use crate::model::attention::{Attention, HeadNorms};
use crate::model::embedding::{Embedding, EmbeddingMatrix};
use crate::model::layer::{DenseFeedForward, FeedForward, Layer, Mixer};
use crate::model::linear::{Linear, Projections, TernaryLinear};
use crate::model::low_rank::LowRankCorrection;
use crate::model::mixture::{Expert, Mixture};
use crate::model::norm::Norm;
use crate::model::options::LoadOptions;
use crate::model::output_head::{OutputHead, ScreenedHead};
use crate::model::placement::{GLOBAL, LOCAL};
use crate::model::pool::Pool;
use crate::model::recurrent::Recurrence;
use crate::model::recurrent_head::{LENGTH_EPS, RecurrentWeights};
use crate::model::rotation::RowRotation;
use crate::model::weights::Weights;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// How often the log says how far the loading is.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Reads, checks and packs all tensors of `source`, on all workers of `pool`.
pub(crate) fn load_weights(
    source: &Source,
    config: &ModelConfig,
    pool: &mut Pool,
    options: &LoadOptions,
) -> LoadResult<Weights> {
    let files = TensorFiles::open(source)?;
    let bytes = files.bytes();
    let mut tensors = files.tensors()?;
    for part in tensors.leave_out(&config.unused_parts) {
        tracing::info!(
            part = part.prefix,
            count = part.tensors,
            "leaving out tensors that text generation does not need"
        );
    }
    let mixture = (config.architecture.layer.experts).zip(config.experts.as_ref());
    if let Some((modules, experts)) = mixture {
        tensors.split_experts(&modules, experts.count)?;
    }
    let group = of_model(config, &tensors)?;
    order_value_heads(config, group, &mut tensors);
    let mut loader = Loader {
        config,
        options,
        group,
        tensors,
        packer: Packer {
            pool,
            packing: options.kernels.packing(),
            statistics: WeightStatistics::default(),
            progress: progress_bar(bytes, options.progress),
            files: &files,
        },
        reported: Instant::now(),
    };
    tracing::info!(bytes, layers = config.layers, "loading the weights");
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
    let template = "loading {bar:40} {bytes}/{total_bytes} {msg}";
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(bytes).with_style(style.expect("the template is well-formed"))
}

/// Builds the weights from the tensors that are left.
struct Loader<'a> {
    config: &'a ModelConfig,
    options: &'a LoadOptions,
    /// The columns that share a scale, if the model has a scale for each group of columns.
    group: Option<GroupSize>,
    tensors: Tensors<'a>,
    packer: Packer<'a>,
    reported: Instant, // When the log last said how far it is.
}

impl Loader<'_> {
    /// Shows which layer is loaded: in the progress bar, and in the log every few seconds.
    fn report(&mut self, layer: usize) {
        let (number, layers) = (layer + 1, self.config.layers);
        let progress = &self.packer.progress;
        progress.set_message(format!("layer {number} of {layers}"));
        if self.reported.elapsed() >= REPORT_INTERVAL {
            self.reported = Instant::now();
            let percent = 100 * layer / layers;
            tracing::info!(layer = number, layers, percent, "loading the weights");
        }
    }

    fn weights(&mut self) -> LoadResult<Weights> {
        let config = self.config;
        let (embedding, head, is_shared) = if config.has_head {
            let (embedding, head, is_shared) = self.embedding_and_head()?;
            (embedding, Some(head), is_shared)
        } else {
            (self.only_embedding()?, None, false)
        };
        let layers = (0..config.layers).map(|layer| {
            self.report(layer);
            self.layer(layer)
        });
        let mut layers = layers.collect::<Result<Vec<_>, _>>()?;
        put_ternary_matrices_side_by_side(&mut layers);
        let norm = self.norm("model.norm", config.hidden)?;
        let own_head = head.as_ref().filter(|_| !is_shared);
        let head_bytes = own_head.map_or(0, Linear::bytes);
        let head = head.map(|head| self.output_head(head)).transpose()?;
        let screen_bytes = match &head {
            Some(OutputHead::Screened(head)) => head.screen_bytes(),
            Some(OutputHead::Exact(_)) | None => 0,
        };
        let rotation = config.rotation.as_ref();
        let rotation = rotation.filter(|rotation| rotation.has_rotated_embedding);
        let linears = layers.iter().flat_map(Layer::linears);
        let layer_bytes = linears.map(Linear::bytes).sum::<usize>();
        let mixtures = layers.iter().filter_map(Layer::mixture);
        let layer_bytes = layer_bytes + mixtures.map(Mixture::bytes).sum::<usize>();
        Ok(Weights {
            bytes: embedding.bytes() + layer_bytes + head_bytes + screen_bytes,
            embedding: Embedding {
                matrix: embedding,
                rotation: rotation.map(|rotation| RowRotation::new(rotation, config.hidden)),
            },
            layers,
            norm,
            head,
        })
    }

    /// Returns the embedding of a model without a head.
    fn only_embedding(&mut self) -> LoadResult<EmbeddingMatrix> {
        let embedding = self.tensors.require(EMBEDDING)?;
        self.embedding(&embedding, [self.config.vocab, self.config.hidden])
    }

    /// Returns the embedding, the head, and whether both are one matrix.
    fn embedding_and_head(&mut self) -> LoadResult<(EmbeddingMatrix, Linear, bool)> {
        let shape = [self.config.vocab, self.config.hidden];
        let has_packed_head = self.has_packed_head(HEAD)?;
        if !self.config.tied || has_packed_head {
            let embedding = self.tensors.require(EMBEDDING)?;
            let embedding = self.embedding(&embedding, shape)?;
            if self.config.quantization.stored != StoredWeights::Unpacked {
                return Ok((embedding, self.linear("lm_head", shape)?, false));
            }
            // Such a checkpoint does not say whether its head is ternary.
            let head = self.tensors.require(HEAD)?;
            return Ok((embedding, self.embedding(&head, shape)?.as_head(), false));
        }
        // Either name may hold the shared matrix. If both names exist and the tensors differ, the
        // checkpoint means both.
        let (embedding, head) = (self.tensors.take(EMBEDDING), self.tensors.take(HEAD));
        let (embedding, head) = match (embedding, head) {
            (Some(embedding), Some(head)) => {
                let is_same = (embedding.storage, &embedding.shape, embedding.bytes)
                    == (head.storage, &head.shape, head.bytes);
                (embedding, (!is_same).then_some(head))
            }
            (Some(shared), None) | (None, Some(shared)) => (shared, None),
            (None, None) => return Err(self.tensors.missing(EMBEDDING)),
        };
        let embedding = self.embedding(&embedding, shape)?;
        let own_head = head.map(|head| {
            tracing::warn!(
                "tie_word_embeddings is set, but {HEAD} differs from {EMBEDDING}: using both"
            );
            self.embedding(&head, shape)
        });
        let own_head = own_head.transpose()?;
        let head = own_head.as_ref().unwrap_or(&embedding).as_head();
        Ok((embedding, head, own_head.is_none()))
    }

    /// Returns whether the file has a packed output head beside a float embedding. The file's own
    /// program computes with such a head, even if the configuration ties the head to the embedding.
    fn has_packed_head(&self, name: &str) -> LoadResult<bool> {
        let head = self.tensors.get(name);
        let Some(head) = head.filter(|head| head.storage == Storage::Interleaved) else {
            return Ok(false);
        };
        if self.config.tied {
            // The converter computes the scale of a tied head itself, always as a factor.
            let is_factor = self.config.quantization.scale == ScaleDirection::Multiply;
            let problem = "tie_word_embeddings is set, and the scales of the other tensors are \
                           divisors, so the meaning of its scale is unclear; convert the model \
                           again without --pack-lm-head";
            head.require(is_factor, problem)?;
            tracing::warn!(
                "tie_word_embeddings is set, but the file has a ternary {name}: using it, which \
                 gives worse answers; convert the model again without --pack-lm-head"
            );
        }
        Ok(true)
    }

    /// Reads an embedding: with a scale for each group if the model has them and the tensor is
    /// ternary, otherwise as floats.
    fn embedding(&mut self, tensor: &Tensor<'_>, shape: [usize; 2]) -> LoadResult<EmbeddingMatrix> {
        let is_ternary = is_ternary(tensor, self.group)?;
        Ok(match self.group.filter(|_| is_ternary) {
            Some(group) => EmbeddingMatrix::Ternary(self.packer.grouped(tensor, shape, group)?),
            None => EmbeddingMatrix::Dense(Arc::new(self.packer.dense(tensor, shape)?)),
        })
    }

    /// Screens a large float head, unless its rows are too wide for the 8-bit kernels.
    fn output_head(&mut self, head: Linear) -> LoadResult<OutputHead> {
        let options = self.options;
        let rotation = self.rotation(&["lm_head".to_owned()], head.columns())?;
        Ok(match head {
            Linear::Dense(exact)
                if exact.bytes() > options.exact_head_bytes
                    && exact.columns() <= Int8Matrix::MAX_COLUMNS =>
            {
                let pool = &mut *self.packer.pool;
                let max_tokens = options.max_logits_rows;
                let kernels = options.kernels;
                let choice = options.head_choice;
                let head = ScreenedHead::new(kernels, pool, exact, max_tokens, rotation, choice);
                OutputHead::Screened(Box::new(head))
            }
            head => OutputHead::Exact(Projections::new(vec![head], rotation)),
        })
    }

    /// Returns the rotation of the rows that some linears read, if the linears are stored rotated.
    ///
    /// # Errors
    /// If only some of them are stored rotated.
    fn rotation(&self, modules: &[String], columns: usize) -> LoadResult<Option<RowRotation>> {
        let Some(rotation) = &self.config.rotation else {
            return Ok(None);
        };
        let is_rotated = |module: &&String| rotation.is_of(&format!("{module}.weight"));
        let Some(rotated) = modules.iter().find(is_rotated) else {
            return Ok(None);
        };
        if let Some(plain) = modules.iter().find(|module| !is_rotated(module)) {
            let [rotated, plain] =
                [rotated, plain].map(|module| self.tensors.name_of(&format!("{module}.weight")));
            let problem = format!(
                "must be rotated, because it reads the input of {rotated}, which is rotated"
            );
            return Err(LoadError::tensor(&plain, problem));
        }
        Ok(Some(RowRotation::new(rotation, columns)))
    }

    /// Builds a layer as the architecture describes it.
    fn layer(&mut self, layer: usize) -> LoadResult<Layer> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let hidden = config.hidden;
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let mixer = match (&config.recurrent, modules.recurrent) {
            (Some(heads), Some(modules)) if config.is_recurrent(layer) => {
                Mixer::Recurrent(self.recurrence(layer, heads, &modules)?)
            }
            _ => Mixer::Attention(self.attention(layer)?),
        };
        let feed_forward = match (config.experts_of(layer), modules.experts) {
            (Some(shape), Some(modules)) => {
                FeedForward::Mixture(self.mixture(layer, shape, &modules)?)
            }
            _ => FeedForward::Dense(self.dense_feed_forward(layer)?),
        };
        Ok(Layer {
            mixer,
            feed_forward,
            mixer_norm: self.norm(&name(modules.attention_norm), hidden)?,
            feed_forward_norm: self.norm(&name(modules.feed_forward_norm), hidden)?,
        })
    }

    fn dense_feed_forward(&mut self, layer: usize) -> LoadResult<DenseFeedForward> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let mut linears = |linears: &[_]| self.linears(layer, linears);
        let gate_up = linears(&[
            (modules.gate, intermediate, hidden),
            (modules.up, intermediate, hidden),
        ])?;
        let down = linears(&[(modules.down, hidden, intermediate)])?;
        let mut optional_norm = |module: Option<&str>, width| {
            let norm = module.map(|module| self.norm(&name(module), width));
            norm.transpose()
        };
        Ok(DenseFeedForward {
            gate_up,
            activation: config.activation,
            sub_norm: optional_norm(modules.feed_forward_sub_norm, intermediate)?,
            down,
            post_norm: optional_norm(modules.feed_forward_post_norm, hidden)?,
        })
    }

    fn mixture(
        &mut self,
        layer: usize,
        shape: &Experts,
        modules: &ExpertModules,
    ) -> LoadResult<Mixture> {
        let (hidden, width) = (self.config.hidden, shape.intermediate);
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let router = self
            .tensors
            .require(&format!("{}.weight", name(modules.router)))?;
        let router = self.packer.exact(&router, [shape.count, hidden])?;
        let router = Linear::Dense(Arc::new(router));
        let mut experts = Vec::with_capacity(shape.count);
        for expert in 0..shape.count {
            let mut linear = |module: &str, rows, columns| {
                let name = name(&format!("{}.{expert}.{module}", modules.experts));
                self.expert_linear(&name, [rows, columns])
            };
            experts.push(Expert {
                gate: linear(modules.gate, width, hidden)?,
                up: linear(modules.up, width, hidden)?,
                down: linear(modules.down, hidden, width)?,
            });
        }
        Ok(Mixture {
            router: Projections::new(vec![router], None),
            experts,
            shape: shape.clone(),
            activation: self.config.activation,
        })
    }

    /// Reads a linear of an expert, which must be ternary, without a norm or a correction of its
    /// own.
    fn expert_linear(&mut self, module: &str, shape: [usize; 2]) -> LoadResult<TernaryLinear> {
        let weights = format!("{module}.weight");
        let linear = self.linear(module, shape)?;
        let error = |problem: &str| Err(LoadError::tensor(&weights, problem.to_owned()));
        let is_rotated = |rotation: &Rotation| rotation.is_of(&weights);
        if self.config.rotation.as_ref().is_some_and(is_rotated) {
            return error("an expert that is stored rotated is not supported");
        }
        match linear {
            Linear::Dense(_) => error("an expert must be ternary"),
            Linear::Ternary(linear)
                if linear.input_norm.is_some() || linear.correction.is_some() =>
            {
                error("an expert with an input norm or a low-rank correction is not supported")
            }
            Linear::Ternary(linear) => Ok(linear),
        }
    }

    /// Reads linears that read the same rows: the module, its rows, its columns.
    fn linears(
        &mut self,
        layer: usize,
        linears: &[(&str, usize, usize)],
    ) -> LoadResult<Projections> {
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let names: Vec<String> = linears.iter().map(|(module, ..)| name(module)).collect();
        let rotation = self.rotation(&names, linears[0].2)?;
        let linears = names.iter().zip(linears);
        let linears = linears.map(|(name, &(_, rows, columns))| self.linear(name, [rows, columns]));
        Ok(Projections::new(
            linears.collect::<Result<_, _>>()?,
            rotation,
        ))
    }

    fn attention(&mut self, layer: usize) -> LoadResult<Attention> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let hidden = config.hidden;
        let q = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let qkv = self.linears(
            layer,
            &[
                (modules.query, config.query_rows(), hidden),
                (modules.key, kv, hidden),
                (modules.value, kv, hidden),
            ],
        )?;
        let output = self.linears(layer, &[(modules.attention_output, hidden, q)])?;
        let head_norms = match (modules.query_norm, modules.key_norm) {
            (Some(query), Some(key)) => {
                let mut query = self.norm(&name(query), config.head_dim)?;
                let factor = config.query_factor;
                query.weight.iter_mut().for_each(|weight| *weight *= factor);
                let key = self.norm(&name(key), config.head_dim)?;
                Some(HeadNorms { query, key })
            }
            _ => None,
        };
        let mut optional_norm = |module: Option<&str>, width| {
            let norm = module.map(|module| self.norm(&name(module), width));
            norm.transpose()
        };
        Ok(Attention {
            layer: (0..layer)
                .filter(|layer| !config.is_recurrent(*layer))
                .count(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            qkv,
            head_norms,
            sub_norm: optional_norm(modules.attention_sub_norm, q)?,
            output,
            post_norm: optional_norm(modules.attention_post_norm, hidden)?,
            kind: if config.is_local(layer) {
                LOCAL
            } else {
                GLOBAL
            },
            rotary_dim: config.rotary_dim,
            has_gate: config.architecture.has_attention_gate,
        })
    }

    fn recurrence(
        &mut self,
        layer: usize,
        heads: &RecurrentLayers,
        modules: &RecurrentModules,
    ) -> LoadResult<Recurrence> {
        let config = self.config;
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        let (hidden, values) = (config.hidden, heads.values());
        let large = [name(modules.qkv), name(modules.gate)];
        let rotation = self.rotation(&large, hidden)?;
        let [qkv, gate] = &large;
        let mut input = vec![
            self.linear(qkv, [heads.channels(), hidden])?,
            self.linear(gate, [values, hidden])?,
        ];
        for module in [modules.strength, modules.step] {
            let tensor = self.tensors.require(&format!("{}.weight", name(module)))?;
            let weights = self.packer.dense(&tensor, [heads.value_heads, hidden])?;
            input.push(Linear::Dense(Arc::new(weights)));
        }
        let output = self.linears(layer, &[(modules.output, hidden, values)])?;
        let order = OutputOrder::of(config, layer, self.group);
        let is_tiled = self.tensors.are_gguf() && order == OutputOrder::Tiled;
        let mut rates = self.floats(&name(modules.decay), &[heads.value_heads])?;
        if !self.tensors.are_gguf() {
            // GGUF files hold the rates themselves.
            rates
                .iter_mut()
                .for_each(|rate| *rate = -f64::from(*rate).exp() as f32);
        }
        let length_norm = |weight: f32| Norm {
            weight: vec![weight; heads.key_dim],
            eps: LENGTH_EPS / heads.key_dim as f32,
        };
        Ok(Recurrence {
            layer: (0..layer)
                .filter(|layer| config.is_recurrent(*layer))
                .count(),
            input: Projections::with_floats(input, rotation, false),
            weights: RecurrentWeights {
                heads: heads.clone(),
                convolution: self.convolution(&name(modules.convolution), heads)?,
                rates,
                step_bias: self.floats(&name(modules.step_bias), &[heads.value_heads])?,
                query_norm: length_norm(1.0 / heads.key_dim as f32),
                key_norm: length_norm((1.0 / (heads.key_dim as f64).sqrt()) as f32),
                norm: self.plain_norm(&name(modules.norm), heads.value_dim)?,
            },
            output,
            has_tiled_output: is_tiled,
        })
    }

    /// Reads the weights of a convolution, `[channel][tap]` with or without a size of 1 between.
    /// Returns those of the channels of each key head, `[key head][tap][channel]`.
    fn convolution(&mut self, module: &str, heads: &RecurrentLayers) -> LoadResult<Vec<f32>> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        let (channels, taps) = (heads.channels(), heads.taps);
        let problem = || {
            let shape = &tensor.shape;
            format!("its shape is {shape:?}, but must be [{channels}, {taps}]")
        };
        let is_known = [&[channels, taps][..], &[channels, 1, taps]].contains(&&tensor.shape[..]);
        is_known
            .then_some(())
            .ok_or_else(|| tensor.error(problem()))?;
        let weights = read_matrix(&tensor)?;
        refuse_non_finite(&tensor, &weights, f32::MAX)?;
        let (queries, dim) = (heads.key_heads * heads.key_dim, heads.key_dim);
        let mut sorted = Vec::with_capacity(weights.len());
        for head in 0..heads.key_heads {
            let mut own: Vec<usize> = (head * dim..(head + 1) * dim).collect();
            own.extend(queries + head * dim..queries + (head + 1) * dim);
            for member in 0..heads.group() {
                let first = 2 * queries + heads.value_head(head, member) * heads.value_dim;
                own.extend(first..first + heads.value_dim);
            }
            for tap in 0..taps {
                sorted.extend(own.iter().map(|channel| weights[channel * taps + tap]));
            }
        }
        Ok(sorted)
    }

    /// Reads a small tensor of floats.
    fn floats(&mut self, name: &str, shape: &[usize]) -> LoadResult<Vec<f32>> {
        let tensor = self.tensors.require(name)?;
        tensor.expect_shape(shape)?;
        let values = read_matrix(&tensor)?;
        refuse_non_finite(&tensor, &values, f32::MAX)?;
        Ok(values)
    }

    /// Reads a norm whose weights may be stored with an offset.
    fn norm(&mut self, module: &str, width: usize) -> LoadResult<Norm> {
        let mut norm = self.plain_norm(module, width)?;
        let offset = self.config.architecture.norm_offset;
        if offset != 0.0 && !self.tensors.are_gguf() {
            norm.weight.iter_mut().for_each(|weight| *weight += offset);
        }
        Ok(norm)
    }

    fn plain_norm(&mut self, module: &str, width: usize) -> LoadResult<Norm> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        tensor.expect_shape(&[width])?;
        let weight = read_matrix(&tensor)?;
        refuse_non_finite(&tensor, &weight, f32::MAX)?;
        Ok(Norm {
            weight,
            eps: self.config.norm_eps,
        })
    }

    /// Reads a linear in the form in which the checkpoint stores it.
    fn linear(&mut self, module: &str, shape: [usize; 2]) -> LoadResult<Linear> {
        let tensor = self.tensors.require(&format!("{module}.weight"))?;
        let has_bias = self.config.architecture.has_bias(module);
        if self.config.is_float(module) && !tensor.storage.is_ternary_blocks() {
            tensor.require(!has_bias, "a float linear with a bias is not supported")?;
            let weights = self.packer.dense(&tensor, shape)?;
            return Ok(Linear::Dense(Arc::new(weights)));
        }
        let (weights, scale) = self.ternary_weights(module, &tensor, shape)?;
        let input_norm = self.config.input_norm(module).map(|(name, eps)| {
            let norm = self.plain_norm(&name, shape[1])?;
            Ok(Norm { eps, ..norm })
        });
        let input_norm = input_norm.transpose()?;
        let correction = self.correction(module, shape, &tensor)?;
        let bias = if has_bias {
            let mut bias = self.floats(&format!("{module}.bias"), &shape[..1])?;
            bias.resize(shape[0].next_multiple_of(PANEL_ROWS), 0.0);
            Some(bias)
        } else {
            None
        };
        Ok(Linear::Ternary(TernaryLinear {
            weights,
            scale,
            input_norm,
            correction,
            bias,
        }))
    }

    /// Reads the low-rank correction of the ternary linear whose weights are `weights`, if it has
    /// one.
    fn correction(
        &mut self,
        module: &str,
        [rows, columns]: [usize; 2],
        weights: &Tensor<'_>,
    ) -> LoadResult<Option<LowRankCorrection>> {
        let [u, v] = ["lrc_U", "lrc_V"].map(|part| format!("{module}.{part}"));
        let (up, down) = match (self.tensors.take(&u), self.tensors.take(&v)) {
            (None, None) => return Ok(None),
            (Some(up), Some(down)) => (up, down),
            (None, Some(_)) => return Err(self.tensors.missing(&u)),
            (Some(_), None) => return Err(self.tensors.missing(&v)),
        };
        let has_norm = self.config.input_norm(module).is_some();
        up.require(
            !has_norm,
            "a low-rank correction of a linear with an input norm is not supported",
        )?;
        let rotation = self.config.rotation.as_ref();
        up.require(
            !rotation.is_some_and(|rotation| rotation.is_of(&format!("{module}.weight"))),
            "a low-rank correction of a linear that is stored rotated is not supported",
        )?;
        up.require(
            (weights.rows, weights.columns) == (FileOrder::Same, FileOrder::Same),
            "a low-rank correction is not supported for a matrix that GGUF files reorder, as query \
             and key of the llama architecture, because the order of the correction is not known",
        )?;
        let (shape, limit) = (&up.shape, rows.min(columns));
        let rank = match shape[..] {
            [up_rows, rank] if up_rows == rows && (1..=limit).contains(&rank) => rank,
            _ => {
                let problem = format!(
                    "its shape is {shape:?}, but must be [{rows}, rank], with a rank from 1 to \
                     {limit}"
                );
                return Err(up.error(problem));
            }
        };
        let down = self.packer.transposed(&down, [columns, rank])?;
        let up = self.packer.dense(&up, [rows, rank])?;
        Ok(Some(LowRankCorrection::new(down, up)))
    }

    /// Returns ternary weights and the scale that their product is multiplied by.
    fn ternary_weights(
        &mut self,
        module: &str,
        tensor: &Tensor<'_>,
        shape: [usize; 2],
    ) -> LoadResult<(TernaryMatrix, f32)> {
        let scale_name = format!("{module}.weight_scale");
        let scale = self.tensors.take(&scale_name);
        let scale = scale.map(|scale| one_float(&scale)).transpose()?;
        let form = TernaryForm::of(tensor, scale, &self.config.quantization, self.group)?;
        let packer = &mut self.packer;
        match form {
            TernaryForm::Packed { scale } => Ok((packer.packed(tensor, shape)?, scale)),
            TernaryForm::Interleaved { scale } => Ok((packer.interleaved(tensor, shape)?, scale)),
            TernaryForm::Signs { scale } => {
                let weights = packer.masters(tensor, shape, Rounding::MustBeTernary)?;
                Ok((weights, scale))
            }
            TernaryForm::Masters => {
                let factor = master_factor(packer.mean_magnitude(tensor, shape)?);
                let weights = packer.masters(tensor, shape, Rounding::Scaled(factor))?;
                Ok((weights, 1.0 / factor))
            }
            TernaryForm::OneScale { factor } => {
                let (weights, scale) = packer.ternary_values(tensor, shape)?;
                Ok((weights, scale * factor))
            }
            TernaryForm::Groups(group) => Ok((packer.grouped(tensor, shape, group)?, 1.0)),
        }
    }
}

/// Moves all ternary matrices into one piece of memory.
fn put_ternary_matrices_side_by_side(layers: &mut [Layer]) {
    let ternary = layers.iter_mut().flat_map(Layer::ternary_mut);
    TernaryMatrix::put_side_by_side(&mut ternary.collect::<Vec<_>>());
}
