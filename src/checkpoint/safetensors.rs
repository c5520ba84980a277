//! Safetensors: one file, or the shards that an index lists.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use safetensors::SafeTensors;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::error::{LoadError, LoadResult};
use super::folder::{Folder, LFS_POINTER, LFS_PROBLEM};
use super::json::parse_json;
use super::order::FileOrder;
use super::tensor::{MAX_TENSORS, Storage, Tensor};

/// The file of the tensors, or the list of the files that have them.
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The longest header of a file. The safetensors library has the same limit.
pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;

/// The files of a checkpoint.
pub(super) struct Shards {
    pub(super) names: Vec<String>,
    /// The shard of each tensor, as the index states it. Empty without an index.
    shard_of: BTreeMap<String, String>,
}

impl Shards {
    /// Lists the files in `folder`.
    ///
    /// # Errors
    /// If there are none, or the index is malformed or lists a file that is missing.
    pub(super) fn list(folder: &Folder) -> LoadResult<Shards> {
        #[derive(Deserialize)]
        struct ShardIndex {
            weight_map: BTreeMap<String, String>,
        }
        if folder.has(SINGLE)? {
            return Ok(Shards {
                names: vec![SINGLE.to_owned()],
                shard_of: BTreeMap::new(),
            });
        }
        let text = folder.read(INDEX)?;
        let text = text.ok_or_else(|| folder.missing_file(&format!("{SINGLE} or {INDEX}")))?;
        let index: ShardIndex = parse_json(INDEX, &text)?;
        let mut names: Vec<String> = index.weight_map.values().cloned().collect();
        names.sort();
        names.dedup();
        for name in &names {
            if !is_plain_name(name) {
                let problem = format!("the shard {name:?} must be the name of a file beside it");
                return Err(LoadError::file(INDEX, problem));
            }
            if !folder.has(name)? {
                let problem = format!("the shard {name} is missing");
                return Err(LoadError::file(INDEX, problem));
            }
        }
        Ok(Shards {
            names,
            shard_of: index.weight_map,
        })
    }
    /// Lists the tensors by name. `contents` are the bytes of the files, in the order of `names`.
    pub(super) fn tensors<'a>(
        &self,
        contents: &[&'a [u8]],
    ) -> LoadResult<BTreeMap<String, Tensor<'a>>> {
        let mut tensors = BTreeMap::new();
        for (file, bytes) in self.names.iter().zip(contents) {
            refuse_duplicate_names(file, bytes)?;
            let parsed = SafeTensors::deserialize(bytes).map_err(|error| {
                LoadError::file(file, format!("not a complete safetensors file: {error}"))
            })?;
            for (name, view) in parsed.iter() {
                if let Some(shard) = self.shard_of.get(name).filter(|&shard| shard != file) {
                    let problem = format!("it is in {file}, but the index says {shard}");
                    return Err(LoadError::tensor(name, problem));
                }
                let tensor = Tensor {
                    name: name.to_owned(),
                    storage: Storage::Plain(view.dtype()),
                    shape: view.shape().to_vec(),
                    bytes: view.data(),
                    rows: FileOrder::Same,
                    columns: FileOrder::Same,
                };
                if tensors.insert(name.to_owned(), tensor).is_some() {
                    return Err(LoadError::tensor(name, "it is in two files"));
                }
            }
        }
        let mut indexed = self.shard_of.iter();
        match indexed.find(|(name, _)| !tensors.contains_key(*name)) {
            Some((name, shard)) => {
                let problem = format!("the index says it is in {shard}, but it is not");
                Err(LoadError::tensor(name, problem))
            }
            None => Ok(tensors),
        }
    }
}

fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let is_one = matches!(
        (components.next(), components.next()),
        (Some(Component::Normal(_)), None)
    );
    is_one && !name.contains('\\')
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
    if bytes.starts_with(LFS_POINTER) {
        return Err(LoadError::file(file, LFS_PROBLEM));
    }
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
