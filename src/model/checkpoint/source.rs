//! Where the files of a checkpoint are: in a directory, in memory, or in one GGUF file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use sterna_kernels::HugeSlice;

use super::blocks::I2sOrder;
use super::error::{LoadError, LoadResult};
use super::gguf::{self, Gguf};

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
    /// Opens a checkpoint: a directory in the layout of Hugging Face, a GGUF file, or a directory
    /// with one GGUF file and no `config.json`.
    ///
    /// # Errors
    /// If the path does not exist, the directory has several GGUF files, or a GGUF file is
    /// malformed.
    pub fn open(path: &Path) -> LoadResult<Source> {
        let metadata = std::fs::metadata(path);
        let metadata = metadata.map_err(|error| LoadError::file(path.display(), error))?;
        if metadata.is_file() {
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            let store = Source::Directory(parent.unwrap_or(Path::new(".")).to_owned());
            let name = path.file_name().and_then(|name| name.to_str());
            let is_gguf = |name: &&str| name.to_lowercase().ends_with(".gguf");
            let name = name.filter(is_gguf).ok_or_else(|| {
                let problem = "must be a directory or a file with the extension .gguf";
                LoadError::file(path.display(), problem)
            })?;
            return store.with_gguf(name);
        }
        let store = Source::Directory(path.to_owned());
        if store.has("config.json")? {
            return Ok(store);
        }
        match gguf_files(path)?.as_slice() {
            [] => Ok(store),
            [name] => store.with_gguf(name),
            names => {
                let problem = format!(
                    "it has several GGUF files ({}); give the path of one of them",
                    names.join(", ")
                );
                Err(LoadError::file(path.display(), problem))
            }
        }
    }

    /// Returns the checkpoint in the GGUF file `name` of this source.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_gguf(self, name: &str) -> LoadResult<Source> {
        Gguf::open(self, name).map(|gguf| Source::Gguf(Arc::new(gguf)))
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

    /// Returns the GGUF file, if the checkpoint is in one.
    pub(in crate::model) fn gguf(&self) -> Option<&Gguf> {
        match self {
            Source::Gguf(gguf) => Some(gguf),
            _ => None,
        }
    }

    /// Returns where the files are that hold tensors.
    pub(super) fn store(&self) -> &Source {
        self.gguf().map_or(self, Gguf::store)
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
        }
    }

    /// Returns whether there is such a file.
    pub(super) fn has(&self, name: &str) -> LoadResult<bool> {
        match self {
            Source::Memory(files) => Ok(files.contains_key(name)),
            Source::Directory(directory) => Ok(regular_file(&directory.join(name))?.is_some()),
            Source::Gguf(gguf) => gguf.store().has(name),
        }
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
        }
    }
}

/// Returns the names of the GGUF files in a directory, ascending. Of the parts of a split file it
/// names the first.
fn gguf_files(directory: &Path) -> LoadResult<Vec<String>> {
    let error = |error| LoadError::file(directory.display(), error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        let name = name.to_string_lossy().into_owned();
        if name.to_lowercase().ends_with(".gguf") && gguf::parts(&name).is_ok() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Parses the content of a JSON file.
///
/// # Errors
/// If the content is malformed. The error names `file`.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(file: &str, text: &'a [u8]) -> LoadResult<T> {
    serde_json::from_slice(text).map_err(|error| LoadError::file(file, error))
}

/// Returns the length of a regular file (or of the one that a link points to), or `None` if the
/// path does not exist.
pub(super) fn regular_file(path: &Path) -> LoadResult<Option<u64>> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
        Ok(_) => Err(LoadError::file(path.display(), "not a regular file")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
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
