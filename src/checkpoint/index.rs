//! Which files of a checkpoint hold tensors: one file, the shards that an index lists, the GGUF
//! files, or the `.bin` file.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;

use super::error::{LoadError, LoadResult};
use super::source::{INDEX, SINGLE, Source, parse_json};

/// The files that hold tensors.
pub(crate) struct TensorFiles {
    pub(crate) names: Vec<String>,
    /// The shard of each tensor, as the index states it. Empty without an index.
    pub(super) shard_of: BTreeMap<String, String>,
}

impl TensorFiles {
    /// Lists the files of `source` that hold tensors.
    ///
    /// # Errors
    /// If there are none, or the index is malformed or lists a file that is missing.
    pub(crate) fn list(source: &Source) -> LoadResult<TensorFiles> {
        #[derive(Deserialize)]
        struct ShardIndex {
            weight_map: BTreeMap<String, String>,
        }
        let without_index = |names| TensorFiles {
            names,
            shard_of: BTreeMap::new(),
        };
        if let Some(gguf) = source.gguf() {
            return Ok(without_index(gguf.names().to_vec()));
        }
        if let Some(bin) = source.bin() {
            return Ok(without_index(vec![bin.name().to_owned()]));
        }
        if source.has(SINGLE)? {
            return Ok(without_index(vec![SINGLE.to_owned()]));
        }
        let text = source.read(INDEX)?;
        let text = text.ok_or_else(|| source.missing_file(&format!("{SINGLE} or {INDEX}")))?;
        let index: ShardIndex = parse_json(INDEX, &text)?;
        let mut names: Vec<String> = index.weight_map.values().cloned().collect();
        names.sort();
        names.dedup();
        for name in &names {
            if !is_plain_name(name) {
                let problem = format!("the shard {name:?} must be the name of a file beside it");
                return Err(LoadError::file(INDEX, problem));
            }
            if !source.has(name)? {
                let problem = format!("the shard {name} is missing");
                return Err(LoadError::file(INDEX, problem));
            }
        }
        Ok(TensorFiles {
            names,
            shard_of: index.weight_map,
        })
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
