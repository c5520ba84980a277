//! A checkpoint's files, and their tensors by name.
//!
//! Always true: every tensor is taken exactly once or is known to be of no use, and whatever is wrong
//! with a file is an error that names the file or the tensor. Nothing here trusts a length that a file
//! states.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::ops::Deref;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use sterna_kernels::HugeSlice;

/// The largest JSON file that is read (the tokenizer of a vocabulary of 128 K has 9 MB).
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// The longest header of a safetensors file, as in its own library.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// The most tensors in one file: some 20 times those of the largest models.
const MAX_TENSORS: usize = 1 << 16;

/// Where a checkpoint is: a directory in Hugging Face layout, or files in memory.
#[derive(Clone, Debug)]
pub enum Source {
    /// A directory.
    Directory(PathBuf),
    /// Files by name.
    Memory(Arc<BTreeMap<String, Cow<'static, [u8]>>>),
}

impl Source {
    /// Files that are part of the binary.
    #[must_use]
    pub fn embedded(files: &[(&str, &'static [u8])]) -> Source {
        let files = files
            .iter()
            .map(|&(name, bytes)| (name.to_owned(), Cow::Borrowed(bytes)));
        Source::Memory(Arc::new(files.collect()))
    }

    /// Files that were made while running.
    #[must_use]
    pub fn in_memory(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Source {
        Source::Memory(Arc::new(
            files
                .into_iter()
                .map(|(name, bytes)| (name, Cow::Owned(bytes)))
                .collect(),
        ))
    }

    /// The content of a (small) file such as `tokenizer.json`, or `None` if there is no such file.
    ///
    /// # Errors
    /// If it is there and cannot be read, is not a regular file, or is too large to be what its name says.
    pub fn read(&self, name: &str) -> Result<Option<FileBytes<'_>>, LoadError> {
        match self {
            Source::Memory(files) => Ok(files.get(name).map(|bytes| FileBytes::Held(bytes))),
            Source::Directory(directory) => {
                let path = directory.join(name);
                let Some(length) = regular_file(&path)? else {
                    return Ok(None);
                };
                if length > MAX_TEXT_BYTES {
                    return Err(LoadError::file(
                        &path,
                        format!("{length} bytes are too many for this file"),
                    ));
                }
                let mut bytes = HugeSlice::new(length as usize);
                let mut file =
                    std::fs::File::open(&path).map_err(|error| LoadError::file(&path, error))?;
                let more = file
                    .read_exact(&mut bytes)
                    .and_then(|()| file.read(&mut [0]));
                match more {
                    Ok(0) => Ok(Some(FileBytes::Read(bytes))),
                    Ok(_) => Err(LoadError::file(
                        &path,
                        "it is longer than it was a moment ago",
                    )),
                    Err(error) => Err(LoadError::file(&path, error)),
                }
            }
        }
    }

    /// Whether there is such a file.
    fn has(&self, name: &str) -> Result<bool, LoadError> {
        match self {
            Source::Memory(files) => Ok(files.contains_key(name)),
            Source::Directory(directory) => Ok(regular_file(&directory.join(name))?.is_some()),
        }
    }

    /// The files that hold tensors: one, or the shards that an index names.
    pub(crate) fn tensor_files(&self) -> Result<TensorFiles, LoadError> {
        const SINGLE: &str = "model.safetensors";
        const INDEX: &str = "model.safetensors.index.json";
        if self.has(SINGLE)? {
            return Ok(TensorFiles {
                names: vec![SINGLE.to_owned()],
                shard_of: BTreeMap::new(),
            });
        }
        let Some(text) = self.read(INDEX)? else {
            return Err(LoadError::missing_file(
                self,
                &format!("{SINGLE} or {INDEX}"),
            ));
        };
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let index: Index =
            serde_json::from_slice(&text).map_err(|error| LoadError::named_file(INDEX, error))?;
        let mut names: Vec<String> = index.weight_map.values().cloned().collect();
        names.sort();
        names.dedup();
        for name in &names {
            let mut parts = Path::new(name).components();
            if !matches!(
                (parts.next(), parts.next()),
                (Some(Component::Normal(_)), None)
            ) || name.contains('\\')
            {
                return Err(LoadError::named_file(
                    INDEX,
                    format!("the shard {name:?} is not the name of a file beside it"),
                ));
            }
            if !self.has(name)? {
                return Err(LoadError::named_file(
                    INDEX,
                    format!("the shard {name} is missing"),
                ));
            }
        }
        Ok(TensorFiles {
            names,
            shard_of: index.weight_map,
        })
    }
}

/// The content of a file.
#[derive(Debug)]
pub enum FileBytes<'a> {
    /// It was in memory already.
    Held(&'a [u8]),
    /// It was read, into pages that go back to the system at once: an allocator would keep the megabytes of a tokenizer.
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

/// The length of a regular file (or a link to one), or `None` if there is nothing of this name.
pub(crate) fn regular_file(path: &Path) -> Result<Option<u64>, LoadError> {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata.len())),
        Ok(_) => Err(LoadError::file(path, "not a regular file")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LoadError::file(path, error)),
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

/// Names of the files with tensors.
pub(crate) struct TensorFiles {
    pub(crate) names: Vec<String>,
    shard_of: BTreeMap<String, String>, // By tensor, as the index says; empty without an index.
}

/// One tensor as it stands in a file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
}

impl Tensor<'_> {
    pub(crate) fn error(&self, problem: impl fmt::Display) -> LoadError {
        LoadError::tensor(&self.name, problem)
    }

    /// # Errors
    /// If the shape is another.
    pub(crate) fn expect_shape(&self, shape: &[usize]) -> Result<(), LoadError> {
        if self.shape == shape {
            return Ok(());
        }
        Err(self.error(format!(
            "its shape is {:?}, the configuration asks for {shape:?}",
            self.shape
        )))
    }
}

/// All tensors of a checkpoint that have not been taken yet.
pub(crate) struct Tensors<'a>(BTreeMap<String, Tensor<'a>>);

impl<'a> Tensors<'a> {
    /// Lists the tensors of the files, whose contents are given in the order of `files.names`.
    pub(crate) fn parse(
        files: &TensorFiles,
        contents: &[&'a [u8]],
    ) -> Result<Tensors<'a>, LoadError> {
        let mut tensors = BTreeMap::new();
        for (file, bytes) in files.names.iter().zip(contents) {
            refuse_duplicate_names(file, bytes)?;
            let parsed = SafeTensors::deserialize(bytes).map_err(|error| {
                LoadError::named_file(file, format!("not a whole safetensors file: {error}"))
            })?;
            for (name, view) in parsed.iter() {
                if let Some(shard) = files.shard_of.get(name).filter(|&shard| shard != file) {
                    return Err(LoadError::tensor(
                        name,
                        format!("it is in {file}, the index says {shard}"),
                    ));
                }
                let name = name.to_owned();
                let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data());
                let tensor = Tensor {
                    name: name.clone(),
                    dtype,
                    shape,
                    bytes,
                };
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(LoadError::tensor(name, "it is in two files"));
                }
            }
        }
        match files
            .shard_of
            .iter()
            .find(|(name, _)| !tensors.contains_key(*name))
        {
            Some((name, shard)) => Err(LoadError::tensor(
                name,
                format!("it is not in {shard}, as the index says"),
            )),
            None => Ok(Tensors(tensors)),
        }
    }

    /// Takes a tensor out, if it is there.
    pub(crate) fn take(&mut self, name: &str) -> Option<Tensor<'a>> {
        self.0.remove(name)
    }

    /// Takes a tensor out that must be there.
    pub(crate) fn require(&mut self, name: &str) -> Result<Tensor<'a>, LoadError> {
        self.take(name)
            .ok_or_else(|| LoadError::tensor(name, "missing"))
    }

    /// # Errors
    /// If a tensor is left that nothing asked for. Stored rotary frequencies follow from the
    /// configuration and are passed over.
    pub(crate) fn finish(self) -> Result<(), LoadError> {
        let unknown = self
            .0
            .into_values()
            .filter(|tensor| !tensor.name.ends_with("rotary_emb.inv_freq"));
        let mut unknown = unknown.peekable();
        match unknown.peek().cloned() {
            None => Ok(()),
            Some(tensor) => {
                let others = unknown.count() - 1;
                Err(tensor.error(format!(
                    "this architecture has no such tensor ({others} more are unknown)"
                )))
            }
        }
    }
}

/// The parser keeps the last of two tensors with one name; which of them was meant is not for us to say.
fn refuse_duplicate_names(file: &str, bytes: &[u8]) -> Result<(), LoadError> {
    struct Names(Vec<String>);
    impl<'de> Deserialize<'de> for Names {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Names, D::Error> {
            deserializer.deserialize_map(Names(Vec::new()))
        }
    }
    impl<'de> Visitor<'de> for Names {
        type Value = Names;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("tensors by name")
        }
        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Names, A::Error> {
            while let Some((name, IgnoredAny)) = map.next_entry()? {
                if name == "__metadata__" {
                    continue;
                }
                if self.0.len() == MAX_TENSORS {
                    return Err(serde::de::Error::custom(format!(
                        "more than {MAX_TENSORS} tensors"
                    )));
                }
                self.0.push(name);
            }
            Ok(self)
        }
    }
    let stated = bytes.split_first_chunk::<8>().map(|(length, rest)| {
        let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        (length, rest)
    });
    if let Some((length, _)) = stated.filter(|(length, _)| *length > MAX_HEADER_BYTES) {
        return Err(LoadError::named_file(
            file,
            format!("a header of {length} bytes is too long for a safetensors file"),
        ));
    }
    let whole = stated.and_then(|(length, rest)| rest.get(..length));
    let header = whole.ok_or_else(|| {
        LoadError::named_file(file, "not a whole safetensors file: the header is cut off")
    })?;
    let mut names: Names =
        serde_json::from_slice(header).map_err(|error| LoadError::named_file(file, error))?;
    names.0.sort();
    match names.0.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(LoadError::tensor(
            &pair[0],
            format!("it is in {file} twice"),
        )),
        None => Ok(()),
    }
}

/// Why a checkpoint cannot be loaded. Each names the thing that is wrong.
#[derive(Debug)]
pub enum LoadError {
    /// A file is missing, unreadable or malformed.
    File {
        /// Its name, or its path where there is one.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The configuration is contradictory, or asks for something that this engine does not compute.
    Config {
        /// The key.
        key: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// A tensor is missing, unknown, or not what the configuration asks for.
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl LoadError {
    pub(crate) fn file(path: &Path, problem: impl fmt::Display) -> LoadError {
        LoadError::File {
            file: path.display().to_string(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn named_file(name: &str, problem: impl fmt::Display) -> LoadError {
        LoadError::File {
            file: name.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn missing_file(source: &Source, name: &str) -> LoadError {
        let what = match source {
            Source::Directory(directory) if !directory.exists() => "directory",
            _ => "such file in",
        };
        LoadError::File {
            file: name.to_owned(),
            problem: format!("there is no {what} {source}"),
        }
    }

    pub(crate) fn tensor(name: impl Into<String>, problem: impl fmt::Display) -> LoadError {
        LoadError::Tensor {
            name: name.into(),
            problem: problem.to_string(),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::File { file, problem } => write!(f, "{file}: {problem}"),
            LoadError::Config { key, problem } => write!(f, "config.json: {key}: {problem}"),
            LoadError::Tensor { name, problem } => write!(f, "tensor {name}: {problem}"),
        }
    }
}

impl std::error::Error for LoadError {}

#[cfg(test)]
mod tests;
