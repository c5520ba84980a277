//! Where the files of a checkpoint are: in a directory or in memory.

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

use super::error::{LoadError, LoadResult};

/// The largest JSON file that is read. The tokenizer of a vocabulary of 128 K has 9 MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// The files of a checkpoint in Hugging Face layout.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory.
    Directory(PathBuf),
    /// Files by name.
    Memory(Arc<BTreeMap<String, Cow<'static, [u8]>>>),
}

/// The content of a file.
#[derive(Debug)]
pub enum FileBytes<'a> {
    /// Content that is in memory anyway.
    Held(&'a [u8]),
    /// Content that was read, into pages that return to the system at once. An allocator would
    /// keep the megabytes of a tokenizer.
    Read(HugeSlice<u8>),
}

impl Deref for FileBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Held(bytes) => bytes,
            FileBytes::Read(bytes) => bytes,
        }
    }
}

impl Source {
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
        }
    }

    /// Returns whether there is such a file.
    pub(super) fn has(&self, name: &str) -> LoadResult<bool> {
        match self {
            Source::Memory(files) => Ok(files.contains_key(name)),
            Source::Directory(directory) => Ok(regular_file(&directory.join(name))?.is_some()),
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
        }
    }
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
