//! Files by name: in a directory, or in memory.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_kernels::HugeSlice;

use super::error::{LoadError, LoadResult};

/// How a file begins that Git LFS has not replaced by its content, and what to do.
pub(super) const LFS_POINTER: &[u8] = b"version https://git-lfs";
pub(super) const LFS_PROBLEM: &str = "it is a pointer of Git LFS, not the weights. Run git lfs \
    pull in its directory, or give the model's name on the hub";

/// The largest file that is read into memory. The tokenizer of a vocabulary of 128 K has 9 MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Files by name.
#[derive(Clone, Debug)]
pub enum Folder {
    /// A directory.
    Directory(PathBuf),
    /// Files in memory.
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

impl Folder {
    /// Reads a small file. Returns `None` if there is no such file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a regular file, or is larger than 256 MiB.
    pub(crate) fn read(&self, name: &str) -> LoadResult<Option<FileBytes<'_>>> {
        match self {
            Folder::Memory(files) => Ok(files.get(name).map(|bytes| FileBytes::Held(bytes))),
            Folder::Directory(directory) => {
                let path = directory.join(name);
                let bytes = regular_file(&path)?.map(|length| read_file(&path, length));
                Ok(bytes.transpose()?.map(FileBytes::Read))
            }
        }
    }

    /// Returns whether there is such a file.
    pub(crate) fn has(&self, name: &str) -> LoadResult<bool> {
        match self {
            Folder::Memory(files) => Ok(files.contains_key(name)),
            Folder::Directory(directory) => Ok(regular_file(&directory.join(name))?.is_some()),
        }
    }

    /// Returns the error that the file `name` is missing.
    pub(super) fn missing_file(&self, name: &str) -> LoadError {
        let what = match self {
            Folder::Directory(directory) if !directory.exists() => "directory",
            _ => "such file in",
        };
        let expected = match name {
            "config.json" => {
                ". A model is a directory with config.json, tokenizer.json and *.safetensors, or \
                 a .gguf or .bin file"
            }
            _ => "",
        };
        LoadError::file(name, format!("there is no {what} {self}{expected}"))
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Folder::Directory(directory) => directory.display().fmt(f),
            Folder::Memory(_) => f.write_str("the embedded model"),
        }
    }
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
