//! Where the files of a checkpoint are: in a directory, in memory, or in one GGUF or `.bin` file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use sterna_kernels::HugeSlice;

use super::bin::{self, BitnetBin};
use super::blocks::I2sOrder;
use super::error::{LoadError, LoadResult};
use super::gguf::{self, Gguf};

/// The file of the tensors, or the list of the files that have them.
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The largest JSON file that is read. The tokenizer of a vocabulary of 128 K has 9 MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// The files of a checkpoint, in the layout of Hugging Face.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory.
    Directory(PathBuf),
    /// Files by name.
    Memory(Arc<BTreeMap<String, Cow<'static, [u8]>>>),
    /// A GGUF file, which has the content of the files of a directory.
    Gguf(Arc<Gguf>),
    /// A `.bin` file, and the files of its tokenizer.
    Bin(Arc<BitnetBin>),
}

/// The content of a file.
#[derive(Debug)]
pub enum FileBytes<'a> {
    /// Content that is in memory anyway.
    Held(&'a [u8]),
    /// Content that was read, into pages that return to the system at once. An allocator would
    /// keep the megabytes of a tokenizer.
    Read(HugeSlice<u8>),
    /// Content that was made from the metadata of a GGUF file.
    Made(Vec<u8>),
}

impl Deref for FileBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Held(bytes) => bytes,
            FileBytes::Read(bytes) => bytes,
            FileBytes::Made(bytes) => bytes,
        }
    }
}

impl Source {
    /// Opens a checkpoint: a directory in the layout of Hugging Face, a GGUF or `.bin` file, or a
    /// directory with one such file and no safetensors.
    ///
    /// # Errors
    /// If the path does not exist, the directory has several GGUF or `.bin` files, or such a file
    /// is malformed.
    pub fn open(path: &Path) -> LoadResult<Source> {
        match locate(path)? {
            (store, None) => Ok(store),
            (store, Some(name)) if is_bin(&name) => store.with_bin(&name),
            (store, Some(name)) => store.with_gguf(&name),
        }
    }

    /// Opens a checkpoint as [`Source::open`] does, and returns what this engine cannot read of a
    /// GGUF file as problems.
    ///
    /// # Errors
    /// As [`Source::open`], except for tensors of an unknown type.
    pub(crate) fn open_leniently(path: &Path) -> LoadResult<(Source, Vec<LoadError>)> {
        let (store, name) = locate(path)?;
        match name {
            Some(name) if !is_bin(&name) => {
                let (gguf, problems) = Gguf::open_leniently(store, &name)?;
                Ok((Source::Gguf(Arc::new(gguf)), problems))
            }
            Some(name) => Ok((store.with_bin(&name)?, Vec::new())),
            None => Ok((store, Vec::new())),
        }
    }

    /// Returns the checkpoint in the GGUF file `name` of this source.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_gguf(self, name: &str) -> LoadResult<Source> {
        Gguf::open(self, name).map(|gguf| Source::Gguf(Arc::new(gguf)))
    }

    /// Returns the checkpoint in the `.bin` file `name` of this source.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_bin(self, name: &str) -> LoadResult<Source> {
        BitnetBin::open(self, name).map(|bin| Source::Bin(Arc::new(bin)))
    }

    /// Returns the checkpoint with this order of the weights in its I2_S tensors, if it has any.
    pub fn with_i2s_order(self, order: I2sOrder) -> Source {
        match self {
            Source::Gguf(gguf) => {
                let mut gguf = Gguf::clone(&gguf);
                gguf.set_i2s_order(order);
                Source::Gguf(Arc::new(gguf))
            }
            other => other,
        }
    }

    /// Returns whether the checkpoint has I2_S tensors.
    pub fn has_i2s(&self) -> bool {
        self.gguf().is_some_and(Gguf::has_i2s)
    }

    /// Returns the order of the weights in I2_S tensors, if the metadata states it.
    pub fn stated_i2s_order(&self) -> Option<I2sOrder> {
        self.gguf().and_then(Gguf::stated_i2s_order)
    }

    /// Returns the GGUF file, if the checkpoint is in one.
    pub(crate) fn gguf(&self) -> Option<&Gguf> {
        match self {
            Source::Gguf(gguf) => Some(gguf),
            _ => None,
        }
    }

    /// Returns the `.bin` file, if the checkpoint is in one.
    pub(crate) fn bin(&self) -> Option<&BitnetBin> {
        match self {
            Source::Bin(bin) => Some(bin),
            _ => None,
        }
    }

    /// Returns where the files are that hold tensors.
    pub(super) fn store(&self) -> &Source {
        match self {
            Source::Gguf(gguf) => gguf.store(),
            Source::Bin(bin) => bin.store(),
            Source::Directory(_) | Source::Memory(_) => self,
        }
    }

    /// Returns files that are part of the binary.
    pub fn embedded(files: &[(&str, &'static [u8])]) -> Source {
        let files = files.iter();
        let files = files.map(|&(name, bytes)| (name.to_owned(), Cow::Borrowed(bytes)));
        Source::Memory(Arc::new(files.collect()))
    }

    /// Returns files that were made at run time.
    pub fn in_memory(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Source {
        let files = files.into_iter();
        let files = files.map(|(name, bytes)| (name, Cow::Owned(bytes)));
        Source::Memory(Arc::new(files.collect()))
    }

    /// Reads a small file such as `tokenizer.json`. Returns `None` if there is no such file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a regular file, or is larger than 256 MiB.
    pub fn read(&self, name: &str) -> LoadResult<Option<FileBytes<'_>>> {
        match self {
            Source::Memory(files) => Ok(files.get(name).map(|bytes| FileBytes::Held(bytes))),
            Source::Directory(directory) => {
                let path = directory.join(name);
                let bytes = regular_file(&path)?.map(|length| read_file(&path, length));
                Ok(bytes.transpose()?.map(FileBytes::Read))
            }
            Source::Gguf(gguf) => gguf.read(name),
            Source::Bin(bin) => bin.read(name),
        }
    }

    /// Returns whether there is such a file.
    pub(crate) fn has(&self, name: &str) -> LoadResult<bool> {
        match self {
            Source::Memory(files) => Ok(files.contains_key(name)),
            Source::Directory(directory) => Ok(regular_file(&directory.join(name))?.is_some()),
            Source::Gguf(gguf) => gguf.store().has(name),
            Source::Bin(bin) => bin.has(name),
        }
    }

    /// Returns whether the file `name` exists, beside the GGUF or `.bin` file if there is one.
    pub fn has_file(&self, name: &str) -> bool {
        self.has(name).unwrap_or(false)
    }

    /// Returns the error that the file `name` is missing.
    pub(crate) fn missing_file(&self, name: &str) -> LoadError {
        let what = match self {
            Source::Directory(directory) if !directory.exists() => "directory",
            _ => "such file in",
        };
        LoadError::file(name, format!("there is no {what} {self}"))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Directory(directory) => directory.display().fmt(f),
            Source::Memory(_) => f.write_str("the embedded model"),
            Source::Gguf(gguf) => f.write_str(&gguf.names()[0]),
            Source::Bin(bin) => f.write_str(bin.name()),
        }
    }
}

/// Returns where the checkpoint at `path` is, and the name of its GGUF or `.bin` file if it is in
/// one.
fn locate(path: &Path) -> LoadResult<(Source, Option<String>)> {
    let metadata = std::fs::metadata(path).map_err(|error| match hub_name(path) {
        Some(name) if error.kind() == ErrorKind::NotFound => not_downloaded(name),
        _ => LoadError::file(path.display(), error),
    })?;
    if metadata.is_file() {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let store = Source::Directory(parent.unwrap_or(Path::new(".")).to_owned());
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.filter(|name| is_gguf(name) || is_bin(name));
        let problem = "must be a directory or a file with the extension .gguf or .bin";
        let name = name.ok_or_else(|| LoadError::file(path.display(), problem))?;
        return Ok((store, Some(name.to_owned())));
    }
    let store = Source::Directory(path.to_owned());
    if store.has("config.json")? && (store.has(SINGLE)? || store.has(INDEX)?) {
        return Ok((store, None));
    }
    let mut names = model_files(path)?;
    if names.len() > 1 {
        let problem = format!(
            "it has several model files ({}); give the path of one of them",
            names.join(", ")
        );
        return Err(LoadError::file(path.display(), problem));
    }
    Ok((store, names.pop()))
}

/// Returns the name of a model on the Hugging Face Hub, if the path looks like one: an owner, which
/// is no directory here, and a name.
fn hub_name(path: &Path) -> Option<&str> {
    let text = path.to_str()?;
    let (owner, name) = text.split_once('/')?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_part = |part: &str| {
        part.bytes().all(is_allowed) && part.starts_with(|first: char| first.is_alphanumeric())
    };
    let is_name = is_part(owner) && is_part(name) && !is_gguf(name) && !is_bin(name);
    (is_name && !Path::new(owner).exists()).then_some(text)
}

fn not_downloaded(name: &str) -> LoadError {
    let directory = name.split('/').next_back().unwrap_or(name);
    let problem = format!(
        "no such file or directory. If it is the name of a model on the Hugging Face Hub, download \
         it first (pip install huggingface_hub), then give the directory:\
         \n  hf download {name} --local-dir {directory}\
         \n  sterna {directory}"
    );
    LoadError::file(name, problem)
}

fn is_gguf(name: &str) -> bool {
    name.to_lowercase().ends_with(".gguf")
}

fn is_bin(name: &str) -> bool {
    name.to_lowercase().ends_with(".bin")
}

/// Returns the names of the GGUF and `.bin` files in a directory, ascending. Of the parts of a
/// split file it names the first. Other `.bin` files, such as those of PyTorch, do not count.
fn model_files(directory: &Path) -> LoadResult<Vec<String>> {
    let error = |error| LoadError::file(directory.display(), error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(error)? {
        let entry = entry.map_err(error)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_first = is_gguf(&name) && gguf::parts(&name).is_ok();
        if is_first || is_bin(&name) && has_magic(&entry.path()) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Returns whether a file begins as the `.bin` files do that this engine reads.
fn has_magic(path: &Path) -> bool {
    let mut bytes = [0; bin::MAGIC.len()];
    let is_regular = regular_file(path).is_ok_and(|length| length.is_some());
    let mut read = || File::open(path)?.read_exact(&mut bytes);
    is_regular && read().is_ok() && bytes == bin::MAGIC
}

/// Parses the content of a JSON file.
///
/// # Errors
/// If the content is malformed. The error names `file`.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(file: &str, text: &'a [u8]) -> LoadResult<T> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let field = error.path().to_string();
        let problem = in_words(&error.into_inner().to_string());
        match field.as_str() {
            "." => LoadError::file(file, problem),
            field => LoadError::file(file, format!("{field}: {problem}")),
        }
    })?;
    let end = reader.end();
    end.map_err(|error| LoadError::file(file, error))?;
    Ok(value)
}

/// Returns what serde says, with the kinds of JSON values instead of Rust's types.
fn in_words(problem: &str) -> String {
    [
        ("expected usize", "expected an integer of at least 0"),
        ("expected u32", "expected an integer of at least 0"),
        ("expected f64", "expected a number"),
        ("expected f32", "expected a number"),
        ("expected a sequence", "expected an array"),
        ("expected a map", "expected an object"),
    ]
    .into_iter()
    .fold(problem.to_owned(), |text, (rust, json)| {
        text.replace(rust, json)
    })
}

/// Returns the length of a regular file (or of the one that a link points to), or `None` if the
/// path does not exist.
pub(super) fn regular_file(path: &Path) -> LoadResult<Option<u64>> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
        Ok(_) => Err(LoadError::file(path.display(), "not a regular file")),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(LoadError::file(path.display(), error)),
    }
}

/// Reads a file of `length` bytes.
fn read_file(path: &Path, length: u64) -> LoadResult<HugeSlice<u8>> {
    if length > MAX_TEXT_BYTES {
        let problem = format!("it has {length} bytes; the limit is {MAX_TEXT_BYTES}");
        return Err(LoadError::file(path.display(), problem));
    }
    let mut bytes = HugeSlice::new(length as usize);
    let mut file = File::open(path).map_err(|error| LoadError::file(path.display(), error))?;
    let more = file
        .read_exact(&mut bytes)
        .and_then(|()| file.read(&mut [0]));
    match more {
        Ok(0) => Ok(bytes),
        Ok(_) => {
            let problem = format!("it is longer than the {length} bytes that the system reports");
            Err(LoadError::file(path.display(), problem))
        }
        Err(error) => Err(LoadError::file(path.display(), error)),
    }
}
