//! The tensors of a checkpoint by name, and the files that hold them.
//!
//! Invariant: every tensor is taken exactly once, or is known to be of no use.

use std::collections::BTreeMap;

use serde::Serialize;

use super::bin::BitnetBin;
use super::error::{LoadError, LoadResult};
use super::files::MappedFiles;
use super::gguf::{FileNames, Gguf, TEXT_PART};
use super::safetensors::Shards;
use super::source::Source;
use super::tensor::Tensor;

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
            FileNames::HuggingFace | FileNames::Headless | FileNames::TextPart
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
    if !tensors.contains_key("embed_tokens.weight") {
        return (tensors, FileNames::HuggingFace);
    }
    let tensors = tensors.into_iter();
    let tensors = tensors.map(|(name, tensor)| (format!("model.{name}"), tensor));
    (tensors.collect(), FileNames::Headless)
}
