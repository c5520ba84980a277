//! The tensors of a checkpoint by name, and the files that hold them.
//!
//! Invariant: every tensor is taken exactly once, or is known to be of no use.

use std::collections::BTreeMap;

use serde::Serialize;

use super::architecture::ExpertModules;
use super::bin::BitnetBin;
use super::blocks::BlockLayout;
use super::error::{LoadError, LoadResult};
use super::files::MappedFiles;
use super::gguf::{FileNames, Gguf, TEXT_PART, WORD_EMBEDDINGS};
use super::safetensors::Shards;
use super::source::Source;
use super::tensor::{Storage, Tensor};

/// The files of a checkpoint that hold tensors, mapped into memory.
pub(crate) struct TensorFiles<'s> {
    format: TensorFormat<'s>,
    mapped: MappedFiles<'s>,
}

/// What lists the tensors.
enum TensorFormat<'s> {
    Gguf(&'s Gguf),
    Bin(&'s BitnetBin),
    Safetensors(Shards),
}

impl<'s> TensorFiles<'s> {
    /// Maps the files.
    ///
    /// # Errors
    /// If there are none, one of them is missing or cannot be mapped, or an index is malformed.
    pub(crate) fn open(source: &'s Source) -> LoadResult<TensorFiles<'s>> {
        let format = match source {
            Source::Gguf(gguf) => TensorFormat::Gguf(gguf),
            Source::Bin(bin) => TensorFormat::Bin(bin),
            Source::Files(folder) => TensorFormat::Safetensors(Shards::list(folder)?),
        };
        let mapped = MappedFiles::open(source.folder(), format.names())?;
        Ok(TensorFiles { format, mapped })
    }

    /// Returns the names of the files.
    pub(crate) fn names(&self) -> &[String] {
        self.format.names()
    }

    /// Returns the bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        let contents = self.mapped.contents();
        contents.iter().map(|bytes| bytes.len() as u64).sum()
    }

    /// Lists the tensors.
    ///
    /// # Errors
    /// If a file is malformed.
    pub(crate) fn tensors(&self) -> LoadResult<Tensors<'_>> {
        let contents = self.mapped.contents();
        let (by_name, file_names) = match &self.format {
            TensorFormat::Gguf(gguf) => (gguf.tensors(&contents)?, gguf.file_names()),
            TensorFormat::Bin(bin) => with_prefix(bin.tensors(contents[0])?),
            TensorFormat::Safetensors(shards) => with_prefix(shards.tensors(&contents)?),
        };
        Ok(Tensors {
            by_name,
            file_names,
        })
    }

    /// Returns the memory of `bytes`, a part of these files, to the system.
    pub(crate) fn release(&self, bytes: &[u8]) {
        self.mapped.release(bytes);
    }
}

impl TensorFormat<'_> {
    fn names(&self) -> &[String] {
        match self {
            TensorFormat::Gguf(gguf) => gguf.names(),
            TensorFormat::Bin(bin) => bin.names(),
            TensorFormat::Safetensors(shards) => &shards.names,
        }
    }
}

/// Tensors of a part that text generation does not need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// How the names of the tensors begin.
    pub prefix: String,
    /// The number of tensors.
    pub tensors: usize,
}

/// All tensors of a checkpoint that the loader has not taken yet.
pub(crate) struct Tensors<'a> {
    /// By the names of Hugging Face.
    by_name: BTreeMap<String, Tensor<'a>>,
    file_names: FileNames,
}

impl<'a> Tensors<'a> {
    /// Returns all tensors with the names of Hugging Face.
    pub(crate) fn into_list(self) -> Vec<(String, Tensor<'a>)> {
        self.by_name.into_iter().collect()
    }

    /// Returns whether the tensors come from a GGUF file.
    pub(crate) fn are_gguf(&self) -> bool {
        !matches!(
            self.file_names,
            FileNames::HuggingFace
                | FileNames::Headless
                | FileNames::TextPart
                | FileNames::WordEmbeddings
        )
    }

    /// Returns a tensor without taking it.
    pub(crate) fn get(&self, name: &str) -> Option<&Tensor<'a>> {
        self.by_name.get(name)
    }

    /// Returns a tensor without taking it.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Tensor<'a>> {
        self.by_name.get_mut(name)
    }

    /// Takes a tensor, if there is one of this name.
    pub(crate) fn take(&mut self, name: &str) -> Option<Tensor<'a>> {
        self.by_name.remove(name)
    }

    /// Takes a tensor that must exist.
    pub(crate) fn require(&mut self, name: &str) -> LoadResult<Tensor<'a>> {
        self.take(name).ok_or_else(|| self.missing(name))
    }

    /// Removes the tensors whose names in the files begin with one of `prefixes`. Returns the
    /// prefixes that there are.
    pub(crate) fn leave_out(&mut self, prefixes: &[String]) -> Vec<LeftOut> {
        let parts = prefixes.iter().map(|prefix| {
            let before = self.by_name.len();
            self.by_name
                .retain(|_, tensor| !tensor.name.starts_with(prefix));
            LeftOut {
                prefix: prefix.clone(),
                tensors: before - self.by_name.len(),
            }
        });
        parts.filter(|part| part.tensors > 0).collect()
    }

    /// Cuts tensors that hold the matrices of all experts of a layer into one for each expert. A
    /// tensor may also hold both gate and up, the rows of the gate first. Some exports name the
    /// modules of every family alike.
    ///
    /// # Errors
    /// If such a tensor does not have `count` experts, has a storage that cannot be cut, or has
    /// what another tensor has too.
    pub(crate) fn split_experts(
        &mut self,
        modules: &ExpertModules,
        count: usize,
    ) -> LoadResult<()> {
        let names: Vec<String> = self.by_name.keys().cloned().collect();
        for name in names {
            let Some((layer, module)) = layer_and_module(&name) else {
                continue;
            };
            if module == COMMON.router && module != modules.router {
                if let Some(tensor) = self.take(&name) {
                    self.put(format!("{layer}.{}.weight", modules.router), tensor)?;
                }
                continue;
            }
            let Some(linears) = modules.merged(module) else {
                continue;
            };
            let Some(tensor) = self.take(&name) else {
                continue;
            };
            let experts = experts_of(&tensor, count, linears.len())?;
            for (expert, parts) in experts.into_iter().enumerate() {
                for (linear, part) in linears.iter().zip(parts) {
                    let experts = modules.experts;
                    let name = format!("{layer}.{experts}.{expert}.{linear}.weight");
                    self.put(name, part)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a tensor under a name of Hugging Face that no other one has.
    fn put(&mut self, name: String, tensor: Tensor<'a>) -> LoadResult<()> {
        if let Some(other) = self.by_name.get(&name) {
            let other = &other.name;
            return Err(tensor.error(format_args!("{other} has the same matrix, {name}")));
        }
        self.by_name.insert(name, tensor);
        Ok(())
    }

    /// Returns what the files call the tensor that Hugging Face calls `name`.
    pub(crate) fn name_of(&self, name: &str) -> String {
        self.file_names.of(name)
    }

    /// Returns the error that a tensor is missing.
    pub(crate) fn missing(&self, name: &str) -> LoadError {
        LoadError::missing_tensor(&self.name_of(name))
    }

    /// # Errors
    /// If the loader has not taken every tensor. Stored rotary frequencies are ignored, because
    /// they follow from the configuration.
    pub(crate) fn finish(self) -> LoadResult<()> {
        let is_safetensors = !self.are_gguf();
        let is_unknown =
            |tensor: &Tensor<'_>| !(is_safetensors && tensor.name.ends_with("rotary_emb.inv_freq"));
        let mut unknown = self.by_name.into_values().filter(is_unknown);
        match unknown.next() {
            None => Ok(()),
            Some(tensor) => Err(tensor.error(format!(
                "this architecture has no such tensor ({} more are unknown)",
                unknown.count()
            ))),
        }
    }
}

/// The names of a mixture's modules that newer exports have for every family.
const COMMON: ExpertModules = ExpertModules {
    router: "mlp.gate",
    experts: "mlp.experts",
    gate: "gate_proj",
    up: "up_proj",
    down: "down_proj",
};

impl ExpertModules {
    /// Returns the linears that the merged tensor of all experts of a layer holds, if the module is
    /// such a tensor.
    pub(crate) fn merged(&self, module: &str) -> Option<Vec<&'static str>> {
        let of = |names: &ExpertModules| {
            let linear = module.strip_prefix(names.experts)?.strip_prefix('.')?;
            match linear {
                _ if linear == names.gate => Some(vec![self.gate]),
                _ if linear == names.up => Some(vec![self.up]),
                _ if linear == names.down || linear == COMMON.down => Some(vec![self.down]),
                "gate_up_proj" => Some(vec![self.gate, self.up]),
                _ => None,
            }
        };
        of(self).or_else(|| of(&COMMON))
    }
}

/// Returns the prefix of a layer's tensor, and its module. The name of a merged tensor may end with
/// the module.
fn layer_and_module(name: &str) -> Option<(&str, &str)> {
    let rest = name.strip_prefix("model.layers.")?;
    let (number, module) = rest.split_once('.')?;
    let prefix = &name[..name.len() - rest.len() + number.len()];
    Some((prefix, module.strip_suffix(".weight").unwrap_or(module)))
}

/// Returns the matrices of each expert in a tensor that has those of all `count`: `parts` of each,
/// of as many rows, one below the other.
pub(super) fn experts_of<'a>(
    tensor: &Tensor<'a>,
    count: usize,
    parts: usize,
) -> LoadResult<Vec<Vec<Tensor<'a>>>> {
    let shape = &tensor.shape;
    let problem = format_args!(
        "its shape is {shape:?}; the matrices of all {count} experts must be \
         [experts, rows, columns]"
    );
    let (experts, rows, columns) = match shape[..] {
        [experts, rows, columns]
            if experts == count && rows > 0 && columns > 0 && rows.is_multiple_of(parts) =>
        {
            (experts, rows / parts, columns)
        }
        _ => return Err(tensor.error(problem)),
    };
    let is_cut = match tensor.storage {
        Storage::Plain(dtype) => dtype != safetensors::Dtype::U8,
        Storage::Blocks(layout) => !matches!(layout, BlockLayout::I2s(_)),
        Storage::Interleaved => false,
    };
    let size = tensor.storage.tensor_bytes(rows, columns);
    let size = size.filter(|size| is_cut && size * experts * parts == tensor.bytes.len());
    let size = size.ok_or_else(|| {
        let storage = tensor.storage.name();
        tensor.error(format_args!(
            "the experts of a layer in one tensor of {storage} are not supported"
        ))
    })?;
    let part = |expert: usize, part: usize| Tensor {
        name: format!("{}, expert {expert}", tensor.name),
        shape: vec![rows, columns],
        bytes: &tensor.bytes[(expert * parts + part) * size..][..size],
        ..tensor.clone()
    };
    let experts = (0..experts).map(|expert| (0..parts).map(|i| part(expert, i)).collect());
    Ok(experts.collect())
}

/// Returns whether the checkpoint has a tensor that Hugging Face calls `name`. If its files cannot
/// be read, it has none; loading them says why.
pub(crate) fn has_tensor(source: &Source, name: &str) -> bool {
    let has = || -> LoadResult<bool> {
        let files = TensorFiles::open(source)?;
        Ok(files.tensors()?.get(name).is_some())
    };
    has().unwrap_or(false)
}

/// Adds the prefix `model.` to the names of a model without an output head, which lack it. Removes
/// the prefix of the text part of a model with images.
fn with_prefix<'a>(
    tensors: BTreeMap<String, Tensor<'a>>,
) -> (BTreeMap<String, Tensor<'a>>, FileNames) {
    if tensors.contains_key(&format!("{TEXT_PART}embed_tokens.weight")) {
        let renamed = |name: String| match name.strip_prefix(TEXT_PART) {
            Some(rest) => format!("model.{rest}"),
            None => name,
        };
        let tensors = tensors.into_iter();
        let tensors = tensors.map(|(name, tensor)| (renamed(name), tensor));
        return (tensors.collect(), FileNames::TextPart);
    }
    // With both names, the second one is unknown.
    let has_embedding = tensors.contains_key("model.embed_tokens.weight");
    if tensors.contains_key(WORD_EMBEDDINGS) && !has_embedding {
        let renamed = |name: String| match name.as_str() {
            WORD_EMBEDDINGS => "model.embed_tokens.weight".to_owned(),
            _ => name,
        };
        let tensors = tensors.into_iter();
        let tensors = tensors.map(|(name, tensor)| (renamed(name), tensor));
        return (tensors.collect(), FileNames::WordEmbeddings);
    }
    if !tensors.contains_key("embed_tokens.weight") {
        return (tensors, FileNames::HuggingFace);
    }
    let tensors = tensors.into_iter();
    let tensors = tensors.map(|(name, tensor)| (format!("model.{name}"), tensor));
    (tensors.collect(), FileNames::Headless)
}
