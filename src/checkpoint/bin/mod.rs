//! Checkpoints in `.bin` files that begin with `SGLBITNT`, as sgl-kernel's converters write them.
//!
//! Such a file holds the `config.json` of the checkpoint that it was made from, and its tensors
//! under the names of Hugging Face. The files of the tokenizer lie beside it, or in a folder with
//! its name without the extension.
//!
//! Ternary weights have a scale in the table of the file. [`BitnetBin`] yields it as the tensor
//! `weight_scale`, as a directory of Hugging Face has it. So the rest of the model knows nothing of
//! this format except how rows are packed ([`Storage::Interleaved`]).
//!
//! Invariant: every size is checked against the length of the file before memory is allocated for
//! it.

mod table;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::slice;

use safetensors::Dtype;

use self::table::{BinEntry, BinTable};
use super::error::{LoadError, LoadResult};
use super::files::MappedFiles;
use super::folder::{FileBytes, Folder};
use super::order::FileOrder;
use super::tensor::{Storage, Tensor};

pub(super) use table::MAGIC;
pub(crate) use writer::{entry, head};

/// The files of the tokenizer that must exist.
const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];

/// A checkpoint in a `.bin` file.
#[derive(Clone, Debug)]
pub struct BitnetBin {
    /// Where the file is.
    folder: Folder,
    name: String,
    /// What comes before the names of the files of the tokenizer.
    text_prefix: String,
    config: Vec<u8>,
    table: BinTable,
}

impl BitnetBin {
    /// Reads the table of the file `name` in `folder`.
    ///
    /// # Errors
    /// If the file is missing, malformed or truncated.
    pub(super) fn open(folder: Folder, name: &str) -> LoadResult<BitnetBin> {
        let names = [name.to_owned()];
        let files = MappedFiles::open(&folder, &names)?;
        let contents = files.contents();
        let table = BinTable::read(contents[0]).map_err(|why| LoadError::file(name, why))?;
        let config = contents[0][table.config.clone()].to_vec();
        drop(files);
        tracing::info!(
            file = name,
            variant = table.scale_field.name(),
            "read the table of a file"
        );
        let stem = name.rsplit_once('.').map_or("", |(stem, _)| stem);
        let text_prefix = format!("{stem}/");
        let has_folder = folder.has(&format!("{text_prefix}{}", TOKENIZER_FILES[0]))?;
        Ok(BitnetBin {
            folder,
            name: name.to_owned(),
            text_prefix: if has_folder {
                text_prefix
            } else {
                String::new()
            },
            config,
            table,
        })
    }

    /// Returns which variant of the format the file has.
    pub(crate) fn variant(&self) -> &'static str {
        self.table.scale_field.name()
    }

    /// Returns where the file is.
    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the name of the file.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the names of all files with tensors.
    pub(super) fn names(&self) -> &[String] {
        slice::from_ref(&self.name)
    }

    /// Returns the tensors by name. `contents` are the bytes of the file.
    pub(super) fn tensors<'a>(
        &self,
        contents: &'a [u8],
    ) -> LoadResult<BTreeMap<String, Tensor<'a>>> {
        let mut tensors = BTreeMap::new();
        for entry in &self.table.tensors {
            tensors.insert(entry.name.clone(), tensor(entry, contents)?);
        }
        for entry in &self.table.tensors {
            let Some(scale) = scale(entry, contents)? else {
                continue;
            };
            // Converters keep the scale of a packed checkpoint as a tensor of its own, too.
            let other = tensors.get(&scale.name);
            let is_other = other.is_some_and(|other| value(other) != value(&scale));
            let problem = format!("it differs from the scale in the table of {}", self.name);
            scale.require(!is_other, problem)?;
            tensors.insert(scale.name.clone(), scale);
        }
        Ok(tensors)
    }

    /// Returns whether there is such a small file.
    pub(super) fn has(&self, name: &str) -> LoadResult<bool> {
        self.folder.has(&format!("{}{name}", self.text_prefix))
    }

    /// Reads a small file of Hugging Face's layout. Returns `None` if the checkpoint may lack it.
    pub(super) fn read(&self, name: &str) -> LoadResult<Option<FileBytes<'_>>> {
        if name == "config.json" {
            return Ok(Some(FileBytes::Held(&self.config)));
        }
        let path = format!("{}{name}", self.text_prefix);
        match self.folder.read(&path)? {
            None if TOKENIZER_FILES.contains(&name) => {
                let problem = format!(
                    "there is no such file beside {}; copy tokenizer.json, tokenizer_config.json \
                     and chat_template.jinja (if there is one) from the checkpoint that it was \
                     made from",
                    self.name
                );
                Err(LoadError::file(path, problem))
            }
            bytes => Ok(bytes),
        }
    }
}

fn tensor<'a>(entry: &BinEntry, contents: &'a [u8]) -> LoadResult<Tensor<'a>> {
    let cut = || LoadError::tensor(&entry.name, "the file is shorter than its table says");
    Ok(Tensor {
        name: entry.name.clone(),
        storage: entry.storage,
        shape: entry.shape.clone(),
        bytes: contents.get(entry.bytes.clone()).ok_or_else(cut)?,
        rows: FileOrder::Same,
        columns: FileOrder::Same,
    })
}

/// Returns the scale of packed weights as a tensor.
fn scale<'a>(entry: &BinEntry, contents: &'a [u8]) -> LoadResult<Option<Tensor<'a>>> {
    let scale = entry.scale.clone().map(|bytes| BinEntry {
        name: format!("{}_scale", entry.name),
        storage: Storage::Plain(Dtype::F32),
        shape: vec![1],
        scale: None,
        bytes,
    });
    scale.map(|scale| tensor(&scale, contents)).transpose()
}

/// Returns the bits of a tensor of one value, as an f32.
fn value(tensor: &Tensor<'_>) -> Option<u32> {
    let value = match (tensor.storage, tensor.bytes) {
        (Storage::Plain(Dtype::F32), &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Storage::Plain(Dtype::F16), &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
        (Storage::Plain(Dtype::BF16), &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
        _ => return None,
    };
    Some(value.to_bits())
}
