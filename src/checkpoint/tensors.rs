//! The tensors of a checkpoint by name.
//!
//! Invariant: every tensor is taken exactly once, or is known to be of no use.

use std::collections::BTreeMap;
use std::fmt;

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::blocks::{self, BlockLayout};
use super::error::{LoadError, LoadResult};
use super::files::MappedFiles;
use super::gguf::FileNames;
use super::index::TensorFiles;
use super::source::Source;

/// The longest header of a safetensors file. The safetensors library has the same limit.
pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;

/// The maximum number of tensors in one file: about 20 times those of the largest models.
pub(super) const MAX_TENSORS: usize = 1 << 16;

/// The weights of a block of [`Storage::Interleaved`].
pub(crate) const INTERLEAVED_WEIGHTS: usize = 128;

/// How a file stores the values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// One number of this type for each value. U8 has four ternary weights in each number.
    Plain(Dtype),
    Blocks(BlockLayout),
    /// Ternary weights of the rows one after the other, each padded to a multiple of 128 columns.
    /// 128 weights have 32 bytes: bits 7:6 of byte j are the code of weight j, bits 5:4 that of
    /// j + 32, and so on. A code is a weight + 1. The tensor `weight_scale` has the scale.
    Interleaved,
}

impl Storage {
    /// Returns the name that errors and reports use.
    pub(crate) fn name(self) -> String {
        match self {
            Storage::Plain(dtype) => format!("{dtype:?}"),
            Storage::Blocks(layout) => layout.name().to_owned(),
            Storage::Interleaved => "packed ternary weights".to_owned(),
        }
    }

    /// Returns whether the values are blocks of ternary weights.
    pub(crate) fn is_ternary_blocks(self) -> bool {
        match self {
            Storage::Plain(_) => false,
            Storage::Blocks(layout) => layout.scale_span().is_some(),
            Storage::Interleaved => true,
        }
    }

    /// Returns the bytes of a tensor of `rows` rows of `columns` values, or `None` if it cannot be
    /// stored so.
    pub(super) fn tensor_bytes(self, rows: usize, columns: usize) -> Option<usize> {
        match self {
            Storage::Plain(dtype) => rows.checked_mul(columns)?.checked_mul(dtype.bitsize() / 8),
            Storage::Blocks(layout) => layout.tensor_bytes(rows, columns),
            Storage::Interleaved => {
                let is_padded = columns.is_multiple_of(INTERLEAVED_WEIGHTS);
                rows.checked_mul(columns / 4).filter(|_| is_padded)
            }
        }
    }
}

/// One tensor as it is in its file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<'a> {
    /// The name in the file.
    pub(crate) name: String,
    pub(crate) storage: Storage,
    /// The sizes, the outermost first.
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
    /// If the rows of each head of this many values are in the order for rotations of neighbouring
    /// values. This engine rotates value i together with value i + head_dim / 2.
    pub(crate) interleaved_head_dim: Option<usize>,
}

impl Tensor<'_> {
    /// Returns an error that names the tensor.
    pub(crate) fn error(&self, problem: impl fmt::Display) -> LoadError {
        LoadError::tensor(&self.name, problem)
    }

    /// Returns which row of the file is row `row` of the matrix.
    pub(crate) fn file_row(&self, row: usize) -> usize {
        let Some(head_dim) = self.interleaved_head_dim else {
            return row;
        };
        let (head, row) = (row / head_dim, row % head_dim);
        let (half, pair) = (row / (head_dim / 2), row % (head_dim / 2));
        head * head_dim + 2 * pair + half
    }

    /// # Errors
    /// If the shape is another.
    pub(crate) fn expect_shape(&self, shape: &[usize]) -> LoadResult<()> {
        let found = &self.shape;
        let problem =
            format_args!("its shape is {found:?}, but the configuration asks for {shape:?}");
        self.require(found == shape, problem)
    }

    /// Reads the codes of a row of [`Storage::Interleaved`] that has `codes.len()` columns without
    /// its padding.
    ///
    /// # Errors
    /// If a code is 3, or the padding holds a weight.
    pub(crate) fn read_interleaved_row(&self, row: usize, codes: &mut [u8]) -> LoadResult<()> {
        let row_bytes = self.shape[1] / 4;
        let bytes = &self.bytes[row * row_bytes..][..row_bytes];
        let whole = codes.len() - codes.len() % INTERLEAVED_WEIGHTS;
        let (first, rest) = codes.split_at_mut(whole);
        blocks::read_interleaved(bytes, first);
        if !rest.is_empty() {
            let mut last = [1; INTERLEAVED_WEIGHTS];
            blocks::read_interleaved(&bytes[whole / 4..], &mut last);
            let (weights, padding) = last.split_at(rest.len());
            let problem = format_args!("its padding in row {row} holds weights that are not zero");
            self.require(padding.iter().all(|code| *code == 1), problem)?;
            rest.copy_from_slice(weights);
        }
        self.refuse_code_3(row, codes)
    }

    /// # Errors
    /// If a code of a row is 3. Some formats allow it, but no published ternary file has it.
    pub(crate) fn refuse_code_3(&self, row: usize, codes: &[u8]) -> LoadResult<()> {
        // Without an early exit, so that the compiler vectorizes the loop.
        let largest = codes.iter().fold(0, |largest, code| largest.max(*code));
        let problem = || {
            let column = codes.iter().position(|code| *code > 2).unwrap_or(0);
            format!("the weight at row {row}, column {column} is +2; -1, 0 and 1 are valid")
        };
        (largest < 3)
            .then_some(())
            .ok_or_else(|| self.error(problem()))
    }

    /// # Errors
    /// Unless `holds`: an error that names the tensor.
    pub(crate) fn require(&self, holds: bool, problem: impl fmt::Display) -> LoadResult<()> {
        holds.then_some(()).ok_or_else(|| self.error(problem))
    }
}

/// Returns which row of the matrix is row `file_row` of a file whose heads of `head_dim` rows are
/// in the order for rotations of neighbouring values: the inverse of [`Tensor::file_row`].
pub(crate) fn interleaved_row(file_row: usize, head_dim: usize) -> usize {
    let (head, row) = (file_row / head_dim, file_row % head_dim);
    head * head_dim + row % 2 * (head_dim / 2) + row / 2
}

/// All tensors of a checkpoint that the loader has not taken yet.
pub(crate) struct Tensors<'a> {
    /// By the names of Hugging Face.
    pub(super) by_name: BTreeMap<String, Tensor<'a>>,
    file_names: FileNames,
}

impl<'a> Tensors<'a> {
    /// Lists the tensors of `source`. `contents` are the bytes of each file, in the order of
    /// `files.names`.
    pub(crate) fn read(
        source: &Source,
        files: &TensorFiles,
        contents: &[&'a [u8]],
    ) -> LoadResult<Tensors<'a>> {
        let (by_name, file_names) = match (source.gguf(), source.bin()) {
            (Some(gguf), _) => (gguf.tensors(contents)?, gguf.file_names()),
            (None, Some(bin)) => with_prefix(bin.tensors(contents[0])?),
            (None, None) => with_prefix(parse_safetensors(files, contents)?),
        };
        Ok(Tensors {
            by_name,
            file_names,
        })
    }

    /// Returns all tensors with the names of Hugging Face.
    pub(crate) fn into_list(self) -> Vec<(String, Tensor<'a>)> {
        self.by_name.into_iter().collect()
    }

    /// Returns whether the tensors are those of a GGUF file.
    pub(crate) fn are_gguf(&self) -> bool {
        matches!(self.file_names, FileNames::Gguf | FileNames::GgufGemma)
    }

    /// Returns a tensor without taking it.
    pub(crate) fn get(&self, name: &str) -> Option<&Tensor<'a>> {
        self.by_name.get(name)
    }

    /// Takes a tensor, if there is one of this name.
    pub(crate) fn take(&mut self, name: &str) -> Option<Tensor<'a>> {
        self.by_name.remove(name)
    }

    /// Takes a tensor that must exist.
    pub(crate) fn require(&mut self, name: &str) -> LoadResult<Tensor<'a>> {
        self.take(name).ok_or_else(|| self.missing(name))
    }

    /// Returns the error that a tensor is missing.
    pub(crate) fn missing(&self, name: &str) -> LoadError {
        LoadError::missing_tensor(&self.file_names.of(name))
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
        let files = TensorFiles::list(source)?;
        let mapped = MappedFiles::open(source, &files.names)?;
        let tensors = Tensors::read(source, &files, &mapped.contents())?;
        Ok(tensors.get(name).is_some())
    };
    has().unwrap_or(false)
}

/// Adds the prefix `model.` to the names of a model without an output head, which lack it.
fn with_prefix<'a>(
    tensors: BTreeMap<String, Tensor<'a>>,
) -> (BTreeMap<String, Tensor<'a>>, FileNames) {
    if !tensors.contains_key("embed_tokens.weight") {
        return (tensors, FileNames::HuggingFace);
    }
    let tensors = tensors.into_iter();
    let tensors = tensors.map(|(name, tensor)| (format!("model.{name}"), tensor));
    (tensors.collect(), FileNames::Headless)
}

/// Lists the tensors of safetensors files.
fn parse_safetensors<'a>(
    files: &TensorFiles,
    contents: &[&'a [u8]],
) -> LoadResult<BTreeMap<String, Tensor<'a>>> {
    let mut tensors = BTreeMap::new();
    for (file, bytes) in files.names.iter().zip(contents) {
        refuse_duplicate_names(file, bytes)?;
        let parsed = SafeTensors::deserialize(bytes).map_err(|error| {
            LoadError::file(file, format!("not a complete safetensors file: {error}"))
        })?;
        for (name, view) in parsed.iter() {
            if let Some(shard) = files.shard_of.get(name).filter(|&shard| shard != file) {
                let problem = format!("it is in {file}, but the index says {shard}");
                return Err(LoadError::tensor(name, problem));
            }
            let tensor = Tensor {
                name: name.to_owned(),
                storage: Storage::Plain(view.dtype()),
                shape: view.shape().to_vec(),
                bytes: view.data(),
                interleaved_head_dim: None,
            };
            if tensors.insert(name.to_owned(), tensor).is_some() {
                return Err(LoadError::tensor(name, "it is in two files"));
            }
        }
    }
    let mut indexed = files.shard_of.iter();
    match indexed.find(|(name, _)| !tensors.contains_key(*name)) {
        Some((name, shard)) => {
            let problem = format!("the index says it is in {shard}, but it is not");
            Err(LoadError::tensor(name, problem))
        }
        None => Ok(tensors),
    }
}

/// Refuses a header that names a tensor twice. The safetensors parser would keep the last one, but
/// which one the writer meant is unknown.
fn refuse_duplicate_names(file: &str, bytes: &[u8]) -> LoadResult<()> {
    let mut names: HeaderNames = serde_json::from_slice(header(file, bytes)?)
        .map_err(|error| LoadError::file(file, error))?;
    names.0.sort();
    match names.0.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(LoadError::tensor(
            &pair[0],
            format!("it is in {file} twice"),
        )),
        None => Ok(()),
    }
}

/// Returns the JSON header of a safetensors file.
fn header<'a>(file: &str, bytes: &'a [u8]) -> LoadResult<&'a [u8]> {
    let header = bytes.split_first_chunk::<8>().map(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        (length, rest)
    });
    if let Some((length, _)) = header.filter(|(length, _)| *length > MAX_HEADER_BYTES) {
        let problem = format!("its header of {length} bytes is too long; the limit is 100 MB");
        return Err(LoadError::file(file, problem));
    }
    let header = header.and_then(|(length, rest)| rest.get(..length));
    header.ok_or_else(|| {
        LoadError::file(
            file,
            "not a complete safetensors file: its header is cut off",
        )
    })
}

/// The names in the header of a safetensors file, with repetitions.
struct HeaderNames(Vec<String>);

impl<'de> Deserialize<'de> for HeaderNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<HeaderNames, D::Error> {
        deserializer.deserialize_map(HeaderNames(Vec::new()))
    }
}

impl<'de> Visitor<'de> for HeaderNames {
    type Value = HeaderNames;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<HeaderNames, A::Error> {
        while let Some((name, IgnoredAny)) = map.next_entry()? {
            if name == "__metadata__" {
                continue;
            }
            if self.0.len() == MAX_TENSORS {
                let problem = format!("more than {MAX_TENSORS} tensors");
                return Err(serde::de::Error::custom(problem));
            }
            self.0.push(name);
        }
        Ok(self)
    }
}
