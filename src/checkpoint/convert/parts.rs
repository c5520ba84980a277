//! The parts of a model in the order in which they are written: what is ternary, and the rest.
//!
//! The loader reads the same tensors in the same way; `tests/convert/` holds both together.

use sterna_kernels::GroupSize;

use super::small::{SmallForm, SmallTensor};
use crate::checkpoint::architecture::{ExpertModules, RecurrentModules};
use crate::checkpoint::config::{Experts, ModelConfig, RecurrentLayers, StoredWeights};
use crate::checkpoint::values::{
    TernaryForm, TernaryTensor, is_ternary, of_model, one_float, order_value_heads,
};
use crate::checkpoint::{LeftOut, LoadResult, Storage, Tensor, TensorFiles, Tensors};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// The parts of a model.
pub(super) struct ModelParts<'a> {
    pub(super) parts: Vec<ModelPart<'a>>,
    /// The columns that share a scale, if the model has a scale for each group of columns.
    pub(super) group: Option<GroupSize>,
    /// The tensors that are no part of the model, such as those of images.
    pub(super) left_out: Vec<LeftOut>,
    files: &'a TensorFiles<'a>,
}

/// A tensor of a model, under the name of Hugging Face.
pub(super) struct ModelPart<'a> {
    pub(super) name: String,
    pub(super) content: PartContent<'a>,
}

/// What a part holds.
pub(super) enum PartContent<'a> {
    /// A linear, or an embedding or head in groups.
    Ternary {
        weights: TernaryTensor<'a>,
        /// The scale in a tensor beside it, if it has one.
        stored_scale: Option<Tensor<'a>>,
    },
    /// A float tensor that keeps its values.
    Carried { tensor: Tensor<'a>, role: PartRole },
    /// A float tensor whose form depends on the container.
    Small(SmallTensor<'a>),
}

/// What a float tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartRole {
    /// A norm that all checkpoints of the architecture have.
    Norm,
    /// A norm before a linear (`use_rms_norm`).
    InputNorm,
    /// The embedding or the head.
    Embedding,
    /// A linear that stays float (`modules_to_not_convert`).
    Linear,
    /// A linear of a recurrent layer that is never ternary.
    HeadLinear,
    /// The matrix that chooses the experts of a token.
    Router,
}

impl<'a> ModelParts<'a> {
    /// Lists the parts of a checkpoint.
    ///
    /// # Errors
    /// If a tensor is missing, unknown, mis-shaped or not ternary already.
    pub(super) fn list(
        config: &'a ModelConfig,
        files: &'a TensorFiles<'a>,
    ) -> LoadResult<ModelParts<'a>> {
        let mut tensors = files.tensors()?;
        let mixture = (config.architecture.layer.experts).zip(config.experts.as_ref());
        if let Some((modules, experts)) = mixture {
            tensors.split_experts(&modules, experts.count)?;
        }
        let left_out = tensors.leave_out(&config.unused_parts);
        let group = of_model(config, &tensors)?;
        order_value_heads(config, group, &mut tensors);
        let mut list = PartList {
            config,
            group,
            tensors,
            parts: Vec::new(),
            files,
        };
        list.embedding_and_head()?;
        for layer in 0..config.layers {
            list.layer(layer)?;
        }
        list.norm("model.norm", config.hidden)?;
        list.tensors.finish()?;
        Ok(ModelParts {
            parts: list.parts,
            group,
            left_out,
            files,
        })
    }

    /// Returns the bytes of all tensors in the files.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = self.parts.iter().map(|part| part.bytes().len() as u64);
        bytes.sum()
    }

    /// Returns the memory of a part's file to the system.
    pub(super) fn release(&self, part: &ModelPart<'a>) {
        self.files.release(part.bytes());
    }
}

impl<'a> ModelPart<'a> {
    /// Returns the bytes of the tensor in its file.
    pub(super) fn bytes(&self) -> &'a [u8] {
        match &self.content {
            PartContent::Ternary { weights, .. } => weights.bytes(),
            PartContent::Carried { tensor, .. }
            | PartContent::Small(SmallTensor { tensor, .. }) => tensor.bytes,
        }
    }
}

/// The parts that are listed already, and the tensors that are left.
struct PartList<'a> {
    config: &'a ModelConfig,
    group: Option<GroupSize>,
    tensors: Tensors<'a>,
    parts: Vec<ModelPart<'a>>,
    files: &'a TensorFiles<'a>,
}

impl<'a> PartList<'a> {
    fn embedding_and_head(&mut self) -> LoadResult<()> {
        let shape = [self.config.vocab, self.config.hidden];
        if !self.config.has_head {
            let embedding = self.tensors.require(EMBEDDING)?;
            return self.embedding(EMBEDDING, embedding, shape);
        }
        // Such a head is computed with, even if the configuration ties it to the embedding.
        let head = self.tensors.get(HEAD);
        let has_packed_head = head.is_some_and(|head| head.storage == Storage::Interleaved);
        if !self.config.tied || has_packed_head {
            let embedding = self.tensors.require(EMBEDDING)?;
            self.embedding(EMBEDDING, embedding, shape)?;
            if self.config.quantization.stored != StoredWeights::Unpacked {
                return self.linear("lm_head", shape);
            }
            let head = self.tensors.require(HEAD)?;
            return self.embedding(HEAD, head, shape);
        }
        // Either name may hold the shared matrix.
        let (embedding, head) = (self.tensors.take(EMBEDDING), self.tensors.take(HEAD));
        match (embedding, head) {
            (Some(embedding), Some(head)) => {
                let is_same = (embedding.storage, &embedding.shape, embedding.bytes)
                    == (head.storage, &head.shape, head.bytes);
                self.embedding(EMBEDDING, embedding, shape)?;
                if is_same {
                    return Ok(());
                }
                self.embedding(HEAD, head, shape)
            }
            (Some(shared), None) | (None, Some(shared)) => self.embedding(EMBEDDING, shared, shape),
            (None, None) => Err(self.tensors.missing(EMBEDDING)),
        }
    }

    fn embedding(&mut self, name: &str, tensor: Tensor<'a>, shape: [usize; 2]) -> LoadResult<()> {
        tensor.expect_shape(&shape)?;
        let is_ternary = is_ternary(&tensor, self.group)?;
        match self.group.filter(|_| is_ternary) {
            Some(group) => self.ternary(name, tensor, shape, TernaryForm::Groups(group)),
            None => {
                self.carried(name, tensor, PartRole::Embedding);
                Ok(())
            }
        }
    }

    fn layer(&mut self, layer: usize) -> LoadResult<()> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let (hidden, intermediate) = (config.hidden, config.intermediate);
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        match (&config.recurrent, &modules.recurrent) {
            (Some(heads), Some(modules)) if config.is_recurrent(layer) => {
                self.recurrence(layer, heads, modules)?;
            }
            _ => self.attention(layer)?,
        }
        match (&config.experts, &modules.experts) {
            (Some(experts), Some(modules)) if !experts.is_dense[layer] => {
                self.mixture(layer, experts, modules)?;
            }
            _ => {
                for (module, rows, columns) in [
                    (modules.gate, intermediate, hidden),
                    (modules.up, intermediate, hidden),
                    (modules.down, hidden, intermediate),
                ] {
                    self.linear(&name(module), [rows, columns])?;
                }
            }
        }
        for (module, width) in [
            (Some(modules.attention_norm), hidden),
            (Some(modules.feed_forward_norm), hidden),
            (modules.feed_forward_sub_norm, intermediate),
        ] {
            if let Some(module) = module {
                self.norm(&name(module), width)?;
            }
        }
        Ok(())
    }

    /// Lists a router and its experts. The same linear of all experts is in one run, because GGUF
    /// files have these in one tensor.
    fn mixture(
        &mut self,
        layer: usize,
        experts: &Experts,
        modules: &ExpertModules,
    ) -> LoadResult<()> {
        let (hidden, width) = (self.config.hidden, experts.intermediate);
        let router = format!("model.layers.{layer}.{}.weight", modules.router);
        let tensor = self.tensors.require(&router)?;
        tensor.expect_shape(&[experts.count, hidden])?;
        self.carried(&router, tensor, PartRole::Router);
        for (linear, rows, columns) in [
            (modules.gate, width, hidden),
            (modules.up, width, hidden),
            (modules.down, hidden, width),
        ] {
            for expert in 0..experts.count {
                let module = format!("model.layers.{layer}.{}.{expert}.{linear}", modules.experts);
                self.linear(&module, [rows, columns])?;
            }
        }
        Ok(())
    }

    fn attention(&mut self, layer: usize) -> LoadResult<()> {
        let (config, modules) = (self.config, &self.config.architecture.layer);
        let hidden = config.hidden;
        let q = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        for (module, rows, columns) in [
            (modules.query, config.query_rows(), hidden),
            (modules.key, kv, hidden),
            (modules.value, kv, hidden),
            (modules.attention_output, hidden, q),
        ] {
            self.linear(&name(module), [rows, columns])?;
        }
        for (module, width) in [
            (modules.query_norm, config.head_dim),
            (modules.key_norm, config.head_dim),
            (modules.attention_sub_norm, q),
        ] {
            if let Some(module) = module {
                self.norm(&name(module), width)?;
            }
        }
        Ok(())
    }

    fn recurrence(
        &mut self,
        layer: usize,
        heads: &RecurrentLayers,
        modules: &RecurrentModules,
    ) -> LoadResult<()> {
        let (hidden, values) = (self.config.hidden, heads.values());
        let (channels, taps) = (heads.channels(), heads.taps);
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        for (module, rows, columns) in [
            (modules.qkv, channels, hidden),
            (modules.gate, values, hidden),
            (modules.output, hidden, values),
        ] {
            self.linear(&name(module), [rows, columns])?;
        }
        for module in [modules.strength, modules.step] {
            let name = format!("{}.weight", name(module));
            let tensor = self.tensors.require(&name)?;
            tensor.expect_shape(&[heads.value_heads, hidden])?;
            self.carried(&name, tensor, PartRole::HeadLinear);
        }
        let of_heads = [heads.value_heads];
        self.small(&name(modules.step_bias), &[&of_heads], SmallForm::StepBias)?;
        self.small(&name(modules.decay), &[&of_heads], SmallForm::Rates)?;
        let convolution = format!("{}.weight", name(modules.convolution));
        let shapes = [&[channels, taps][..], &[channels, 1, taps]];
        self.small(
            &convolution,
            &shapes,
            SmallForm::Convolution { channels, taps },
        )?;
        let norm = format!("{}.weight", name(modules.norm));
        let tensor = self.tensors.require(&norm)?;
        tensor.expect_shape(&[heads.value_dim])?;
        self.carried(&norm, tensor, PartRole::Norm);
        Ok(())
    }

    fn linear(&mut self, module: &str, shape: [usize; 2]) -> LoadResult<()> {
        let name = format!("{module}.weight");
        let tensor = self.tensors.require(&name)?;
        if self.config.is_float(module) && !tensor.storage.is_ternary_blocks() {
            tensor.expect_shape(&shape)?;
            let role = match module {
                "lm_head" => PartRole::Embedding,
                _ => PartRole::Linear,
            };
            self.carried(&name, tensor, role);
            return Ok(());
        }
        for part in ["lrc_U", "lrc_V"] {
            if let Some(tensor) = self.tensors.take(&format!("{module}.{part}")) {
                return Err(tensor.error("low-rank corrections cannot be converted"));
            }
        }
        let stored_scale = self.tensors.take(&format!("{name}_scale"));
        let scale = stored_scale.as_ref().map(one_float).transpose()?;
        let form = TernaryForm::of(&tensor, scale, &self.config.quantization, self.group)?;
        self.ternary(&name, tensor, shape, form)?;
        if let Some(part) = self.parts.last_mut()
            && let PartContent::Ternary {
                stored_scale: own, ..
            } = &mut part.content
        {
            *own = stored_scale;
        }
        if self.config.architecture.has_bias(module) {
            let name = format!("{module}.bias");
            let tensor = self.tensors.require(&name)?;
            tensor.expect_shape(&shape[..1])?;
            self.carried(&name, tensor, PartRole::Norm);
        }
        if let Some((norm, _)) = self.config.input_norm(module) {
            let name = format!("{norm}.weight");
            let tensor = self.tensors.require(&name)?;
            tensor.expect_shape(&shape[1..])?;
            let role = match self.config.architecture.layer.input_norm {
                Some(_) => PartRole::Norm,
                None => PartRole::InputNorm,
            };
            self.carried(&name, tensor, role);
        }
        Ok(())
    }

    fn ternary(
        &mut self,
        name: &str,
        tensor: Tensor<'a>,
        shape: [usize; 2],
        form: TernaryForm,
    ) -> LoadResult<()> {
        let bytes = tensor.bytes;
        let content = PartContent::Ternary {
            weights: TernaryTensor::new(tensor, shape, form)?,
            stored_scale: None,
        };
        self.files.release(bytes); // Reading the scale may have read the whole tensor.
        let name = name.to_owned();
        self.parts.push(ModelPart { name, content });
        Ok(())
    }

    fn norm(&mut self, module: &str, width: usize) -> LoadResult<()> {
        let name = format!("{module}.weight");
        let offset = self.config.architecture.norm_offset;
        if offset != 0.0 {
            return self.small(&name, &[&[width]], SmallForm::Norm { offset });
        }
        let tensor = self.tensors.require(&name)?;
        tensor.expect_shape(&[width])?;
        self.carried(&name, tensor, PartRole::Norm);
        Ok(())
    }

    /// Lists a small tensor, which may have one of these shapes.
    fn small(&mut self, name: &str, shapes: &[&[usize]], form: SmallForm) -> LoadResult<()> {
        let tensor = self.tensors.require(name)?;
        if !shapes.contains(&&tensor.shape[..]) {
            tensor.expect_shape(shapes[0])?;
        }
        let is_gguf = self.tensors.are_gguf();
        self.parts.push(ModelPart {
            name: name.to_owned(),
            content: PartContent::Small(SmallTensor {
                tensor,
                form,
                is_gguf,
            }),
        });
        Ok(())
    }

    fn carried(&mut self, name: &str, tensor: Tensor<'a>, role: PartRole) {
        self.parts.push(ModelPart {
            name: name.to_owned(),
            content: PartContent::Carried { tensor, role },
        });
    }
}
