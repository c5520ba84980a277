//! Where a checkpoint is: in a directory of Hugging Face, or in a GGUF or `.bin` file.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::bin::{self, BitnetBin};
use super::blocks::I2sOrder;
use super::error::{LoadError, LoadResult};
use super::folder::{FileBytes, Folder, regular_file};
use super::gguf::{self, Gguf};
use super::safetensors::{INDEX, SINGLE};

/// The file of the chat template of conversations with tools, if they have one of their own.
pub const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// A checkpoint. It reads as the files of a directory of Hugging Face.
#[derive(Clone, Debug)]
pub enum Source {
    /// The files themselves.
    Files(Folder),
    /// A GGUF file, which has the content of the files of a directory.
    Gguf(Arc<Gguf>),
    /// A `.bin` file, and the files of its tokenizer.
    Bin(Arc<BitnetBin>),
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
            (folder, None) => Ok(Source::Files(folder)),
            (folder, Some(name)) if is_bin(&name) => Source::of_bin(folder, &name),
            (folder, Some(name)) => Source::of_gguf(folder, &name),
        }
    }

    /// Opens a checkpoint as [`Source::open`] does, and returns what this engine cannot read of a
    /// GGUF file as problems.
    ///
    /// # Errors
    /// As [`Source::open`], except for tensors of an unknown type.
    pub(crate) fn open_leniently(path: &Path) -> LoadResult<(Source, Vec<LoadError>)> {
        match locate(path)? {
            (folder, Some(name)) if !is_bin(&name) => {
                let (gguf, problems) = Gguf::open_leniently(folder, &name)?;
                Ok((Source::Gguf(Arc::new(gguf)), problems))
            }
            (folder, Some(name)) => Ok((Source::of_bin(folder, &name)?, Vec::new())),
            (folder, None) => Ok((Source::Files(folder), Vec::new())),
        }
    }

    /// Returns the checkpoint in the GGUF file `name` beside the files of this source.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_gguf(&self, name: &str) -> LoadResult<Source> {
        Source::of_gguf(self.folder().clone(), name)
    }

    /// Returns the checkpoint in the `.bin` file `name` beside the files of this source.
    ///
    /// # Errors
    /// If the file is missing or malformed.
    pub fn with_bin(&self, name: &str) -> LoadResult<Source> {
        Source::of_bin(self.folder().clone(), name)
    }

    fn of_gguf(folder: Folder, name: &str) -> LoadResult<Source> {
        Gguf::open(folder, name).map(|gguf| Source::Gguf(Arc::new(gguf)))
    }

    fn of_bin(folder: Folder, name: &str) -> LoadResult<Source> {
        BitnetBin::open(folder, name).map(|bin| Source::Bin(Arc::new(bin)))
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

    /// Returns where the files are.
    pub(super) fn folder(&self) -> &Folder {
        match self {
            Source::Files(folder) => folder,
            Source::Gguf(gguf) => gguf.folder(),
            Source::Bin(bin) => bin.folder(),
        }
    }

    /// Returns the files of a directory.
    pub fn directory(path: impl Into<PathBuf>) -> Source {
        Source::Files(Folder::Directory(path.into()))
    }

    /// Returns files that are part of the binary.
    pub fn embedded(files: &[(&str, &'static [u8])]) -> Source {
        let own = |&(name, bytes): &(&str, _)| (name.to_owned(), Cow::Borrowed(bytes));
        Source::Files(Folder::Memory(Arc::new(files.iter().map(own).collect())))
    }

    /// Returns files that were made at run time.
    pub fn in_memory(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Source {
        let own = |(name, bytes)| (name, Cow::Owned(bytes));
        Source::Files(Folder::Memory(Arc::new(
            files.into_iter().map(own).collect(),
        )))
    }

    /// Reads a small file such as `tokenizer.json`. Returns `None` if there is no such file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a regular file, or is larger than 256 MiB.
    pub fn read(&self, name: &str) -> LoadResult<Option<FileBytes<'_>>> {
        match self {
            Source::Files(folder) => folder.read(name),
            Source::Gguf(gguf) => gguf.read(name),
            Source::Bin(bin) => bin.read(name),
        }
    }

    /// Returns whether the file `name` exists, beside the GGUF or `.bin` file if there is one.
    pub fn has_file(&self, name: &str) -> bool {
        let has = match self {
            Source::Files(folder) => folder.has(name),
            Source::Gguf(gguf) => gguf.folder().has(name),
            Source::Bin(bin) => bin.has(name),
        };
        has.unwrap_or(false)
    }

    /// Returns the error that the file `name` is missing.
    pub(crate) fn missing_file(&self, name: &str) -> LoadError {
        match self {
            Source::Files(folder) => folder.missing_file(name),
            _ => LoadError::file(name, format!("there is no such file in {self}")),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Files(folder) => folder.fmt(f),
            Source::Gguf(gguf) => f.write_str(&gguf.names()[0]),
            Source::Bin(bin) => f.write_str(bin.name()),
        }
    }
}

/// Returns where the checkpoint at `path` is, and the name of its GGUF or `.bin` file if it is in
/// one.
fn locate(path: &Path) -> LoadResult<(Folder, Option<String>)> {
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => {
            let problem = "there is no such file or directory. Give the path of a model, or one of \
                           the commands that sterna --help lists";
            LoadError::file(path.display(), problem)
        }
        _ => LoadError::file(path.display(), error),
    })?;
    if metadata.is_file() {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let folder = Folder::Directory(parent.unwrap_or(Path::new(".")).to_owned());
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.filter(|name| is_gguf(name) || is_bin(name));
        let problem = "must be a directory or a file with the extension .gguf or .bin";
        let name = name.ok_or_else(|| LoadError::file(path.display(), problem))?;
        return Ok((folder, Some(name.to_owned())));
    }
    let folder = Folder::Directory(path.to_owned());
    if folder.has("config.json")? && (folder.has(SINGLE)? || folder.has(INDEX)?) {
        return Ok((folder, None));
    }
    let mut names = model_files(path)?;
    if names.len() > 1 {
        let problem = format!(
            "it has several model files ({}); give the path of one of them",
            names.join(", ")
        );
        return Err(LoadError::file(path.display(), problem));
    }
    Ok((folder, names.pop()))
}

/// Returns whether a file is a GGUF file, by its name.
pub(crate) fn is_gguf(name: &str) -> bool {
    name.to_lowercase().ends_with(".gguf")
}

/// Returns whether a file is a `.bin` file, by its name.
pub(crate) fn is_bin(name: &str) -> bool {
    name.to_lowercase().ends_with(".bin")
}

/// Returns the names of the GGUF and `.bin` files in a directory, ascending. A split file counts
/// once, under the name of its first part. Other `.bin` files, such as PyTorch's, do not count.
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

/// Returns whether a file begins like the `.bin` files that this engine reads.
fn has_magic(path: &Path) -> bool {
    let mut bytes = [0; bin::MAGIC.len()];
    let is_regular = regular_file(path).is_ok_and(|length| length.is_some());
    let mut read = || File::open(path)?.read_exact(&mut bytes);
    is_regular && read().is_ok() && bytes == bin::MAGIC
}
