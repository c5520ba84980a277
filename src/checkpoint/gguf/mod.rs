//! Checkpoints in GGUF files.
//!
//! A GGUF file holds what a directory of Hugging Face holds in several files. [`Gguf`] reads it as
//! such: tensors get the names of Hugging Face, and `tokenizer.json` and `tokenizer_config.json`
//! are made from the metadata. So the rest of the model and the tokenizer know no GGUF.
//!
//! Invariant: every size and offset is checked against the length of the file before memory is
//! allocated for it.

mod entries;
mod header;
mod layouts;
mod metadata;
mod names;
#[cfg(test)]
mod tests;
mod tokenizer;
mod tokenizer_writer;
mod type_numbers;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;

use self::header::{Header, TensorEntry};
use super::blocks::{BlockLayout, I2sOrder};
use super::error::{LoadError, LoadResult};
use super::files::MappedFiles;
use super::folder::{FileBytes, Folder};
use super::order::FileOrder;
use super::tensor::{Storage, Tensor};

pub(crate) use entries::{MetadataEntries, MetadataValue};
pub(crate) use metadata::{Metadata, STATED_I2S_ORDER, STOP_TOKENS};
pub(crate) use names::{
    FileNames, TEXT_PART, WORD_EMBEDDINGS, has_rotated_rows, head_dim, holds_experts, parts,
};
pub(crate) use tokenizer::TOOL_TEMPLATE;
pub(crate) use tokenizer_writer::tokenizer_metadata;
pub(crate) use writer::{GgufTensor, header, padding};

/// A checkpoint in one GGUF file, or in the parts that it was split into.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// Where the files are.
    folder: Folder,
    names: Vec<String>,
    headers: Arc<[Header]>,
    storages: BTreeMap<u32, Storage>,
    /// The order of the weights in I2_S tensors that the metadata states.
    stated_i2s_order: Option<I2sOrder>,
}

/// A tensor of a type that this engine does not read.
pub(crate) struct UnreadTensor<'a> {
    pub(crate) name: &'a str,
    pub(crate) hugging_face_name: String,
    /// The sizes, the outermost first.
    pub(crate) shape: &'a [usize],
    pub(crate) type_number: u32,
    /// The bytes up to the next tensor.
    pub(crate) bytes: usize,
}

impl Gguf {
    /// Reads the headers of the file `name` in `folder`, and of the other parts if it is the first
    /// of several.
    ///
    /// # Errors
    /// If a file is missing, malformed or truncated, or has a tensor of an unknown type.
    pub(super) fn open(folder: Folder, name: &str) -> LoadResult<Gguf> {
        let (gguf, problems) = Gguf::open_leniently(folder, name)?;
        problems.into_iter().next().map_or(Ok(gguf), Err)
    }

    /// Reads the headers as [`Gguf::open`] does, and returns the tensors of types that this engine
    /// does not read as problems.
    ///
    /// # Errors
    /// If a file is missing, malformed or truncated.
    pub(super) fn open_leniently(folder: Folder, name: &str) -> LoadResult<(Gguf, Vec<LoadError>)> {
        let names = names::parts(name).map_err(|why| LoadError::file(name, why))?;
        let files = MappedFiles::open(&folder, &names)?;
        let headers = names
            .iter()
            .zip(files.contents())
            .map(|(name, bytes)| Header::read(name, bytes))
            .collect::<LoadResult<Vec<_>>>()?;
        drop(files);
        check_parts(&headers)?;
        let (storages, problems) = layouts::storages(&headers);
        let mut gguf = Gguf {
            folder,
            names,
            headers: headers.into(),
            storages,
            stated_i2s_order: None,
        };
        let stated = gguf.metadata().text(STATED_I2S_ORDER)?.map(str::to_owned);
        if let Some(name) = stated {
            let order = I2sOrder::named(&name);
            let problem = || format!("must be x86, arm or four-rows; got {name:?}");
            let error = || gguf.metadata().error(STATED_I2S_ORDER, problem());
            let order = order.ok_or_else(error)?;
            gguf.set_i2s_order(order);
            gguf.stated_i2s_order = Some(order);
        }
        Ok((gguf, problems))
    }

    /// Sets the order of the weights in I2_S tensors.
    pub(super) fn set_i2s_order(&mut self, order: I2sOrder) {
        for storage in self.storages.values_mut() {
            if *storage == Storage::Blocks(BlockLayout::I2s(I2sOrder::X86)) {
                *storage = Storage::Blocks(BlockLayout::I2s(order));
            }
        }
    }

    /// Returns whether there are I2_S tensors.
    pub(super) fn has_i2s(&self) -> bool {
        let is_i2s = |storage: &Storage| matches!(storage, Storage::Blocks(BlockLayout::I2s(_)));
        self.storages.values().any(is_i2s)
    }

    /// Returns the order of the weights in I2_S tensors that the metadata states.
    pub(super) fn stated_i2s_order(&self) -> Option<I2sOrder> {
        self.stated_i2s_order
    }

    /// Returns where the files are.
    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the names of the files.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns the metadata. If there are several parts, the first one has it.
    pub(crate) fn metadata(&self) -> &Metadata {
        &self.headers[0].metadata
    }

    /// Returns how the files name tensors.
    pub(crate) fn file_names(&self) -> FileNames {
        let architecture = self.metadata().text("general.architecture");
        let name = architecture.ok().flatten().unwrap_or_default();
        let experts = self.metadata().size(&format!("{name}.expert_count"));
        let has_experts = experts.ok().flatten().is_some_and(|count| count > 0);
        FileNames::of_architecture(name, has_experts)
    }

    /// Returns the shape of the tensor that Hugging Face calls `name`, the outermost size first.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        let entries = self.headers.iter().flat_map(|header| &header.tensors);
        let names = self.file_names();
        let mut entries = entries.filter(|entry| names.hugging_face_name(&entry.name) == name);
        entries.next().map(|entry| &entry.shape[..])
    }

    /// Returns the type number of each tensor, by its name in the file.
    pub(crate) fn type_numbers(&self) -> BTreeMap<&str, u32> {
        let entries = self.headers.iter().flat_map(|header| &header.tensors);
        entries
            .map(|entry| (entry.name.as_str(), entry.type_number))
            .collect()
    }

    /// Returns the tensors of types that this engine does not read.
    pub(crate) fn unread_tensors(&self) -> impl Iterator<Item = UnreadTensor<'_>> {
        let entries = self.headers.iter().flat_map(|header| &header.tensors);
        let is_unread = |entry: &&TensorEntry| !self.storages.contains_key(&entry.type_number);
        entries.filter(is_unread).map(|entry| UnreadTensor {
            name: &entry.name,
            hugging_face_name: self.file_names().hugging_face_name(&entry.name),
            shape: &entry.shape,
            type_number: entry.type_number,
            bytes: entry.room(),
        })
    }

    /// Returns the tensors that this engine can read, with the names of Hugging Face as keys.
    /// `contents` are the bytes of the files.
    pub(super) fn tensors<'a>(
        &self,
        contents: &[&'a [u8]],
    ) -> LoadResult<BTreeMap<String, Tensor<'a>>> {
        let head_dim = self.interleaved_head_dim()?;
        let mut tensors = BTreeMap::new();
        for (header, contents) in self.headers.iter().zip(contents) {
            for entry in &header.tensors {
                let Some(&storage) = self.storages.get(&entry.type_number) else {
                    continue;
                };
                let tensor = tensor(entry, storage, contents, head_dim)?;
                let name = self.file_names().hugging_face_name(&entry.name);
                if tensors.insert(name, tensor).is_some() {
                    return Err(LoadError::tensor(&entry.name, "the name occurs twice"));
                }
            }
        }
        Ok(tensors)
    }

    /// Returns the size of a head if the rows of query and key are in the order for rotations of
    /// neighbouring values, as files of the `llama` architecture have them.
    fn interleaved_head_dim(&self) -> LoadResult<Option<usize>> {
        let metadata = self.metadata();
        if metadata.require_text("general.architecture")? != "llama" {
            return Ok(None);
        }
        names::head_dim(metadata, "llama").map(Some)
    }

    /// Reads a small file of Hugging Face's layout. A file beside the GGUF file wins; otherwise it
    /// is made from the metadata. Returns `None` if there is nothing to make it from.
    pub(super) fn read(&self, name: &str) -> LoadResult<Option<FileBytes<'_>>> {
        if let Some(bytes) = self.folder.read(name)? {
            return Ok(Some(bytes));
        }
        let json = match name {
            "tokenizer.json" => tokenizer::tokenizer_json(self.metadata())?,
            "tokenizer_config.json" => tokenizer::config_json(self.metadata())?,
            _ => return Ok(None),
        };
        Ok(Some(FileBytes::Made(json.to_string().into_bytes())))
    }
}

/// Returns a tensor of which `contents` are the bytes of its file. `head_dim` is the size of a head
/// if the rows of query and key are interleaved.
fn tensor<'a>(
    entry: &TensorEntry,
    storage: Storage,
    contents: &'a [u8],
    head_dim: Option<usize>,
) -> LoadResult<Tensor<'a>> {
    let (rows, columns) = entry.rows_and_columns();
    let bytes = storage.tensor_bytes(rows, columns).ok_or_else(|| {
        let (name, shape) = (storage.name(), &entry.shape);
        let problem = format!("{name} cannot store the shape {shape:?}");
        LoadError::tensor(&entry.name, problem)
    })?;
    let bytes = contents
        .get(entry.bytes.clone())
        .and_then(|room| room.get(..bytes));
    let cut = || LoadError::tensor(&entry.name, "the file is shorter than its header says");
    Ok(Tensor {
        name: entry.name.clone(),
        storage,
        shape: entry.shape.clone(),
        bytes: bytes.ok_or_else(cut)?,
        rows: match head_dim.filter(|_| names::has_rotated_rows(&entry.name)) {
            Some(head_dim) => FileOrder::Interleaved { head_dim },
            None => FileOrder::Same,
        },
        columns: FileOrder::Same,
    })
}

/// # Errors
/// If the parts of a split checkpoint disagree about their number or order.
fn check_parts(headers: &[Header]) -> LoadResult<()> {
    for (index, Header { metadata, .. }) in headers.iter().enumerate() {
        let count = metadata.size("split.count")?.unwrap_or(1);
        if count.max(1) != headers.len() {
            let problem = format!("there are {} files; got {count}", headers.len());
            return Err(metadata.error("split.count", problem));
        }
        let number = metadata.size("split.no")?.unwrap_or(0);
        if number != index {
            let problem = format!("must be {index} in this file; got {number}");
            return Err(metadata.error("split.no", problem));
        }
    }
    Ok(())
}
