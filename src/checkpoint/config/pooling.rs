//! How the hidden states of a text become its embedding.
//!
//! Hugging Face directories state it in the files of `sentence-transformers`, GGUF files in their
//! metadata.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::checkpoint::{Gguf, LoadError, LoadResult, Source, parse_json};

/// How the hidden states of a text become its embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The embedding is the state of the last token.
    #[default]
    LastToken,
    /// The embedding is the mean of the states of all tokens.
    Mean,
}

impl Pooling {
    /// Returns the name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::LastToken => "last token",
            Pooling::Mean => "mean",
        }
    }

    /// Returns the number in the metadata of GGUF files.
    pub(super) fn gguf_number(self) -> u32 {
        match self {
            Pooling::Mean => 1,
            Pooling::LastToken => 3,
        }
    }
}

/// Reads the pooling that a Hugging Face directory states. The default is the last token.
///
/// # Errors
/// If the embedding is computed in another way.
pub(super) fn read(source: &Source) -> LoadResult<Pooling> {
    #[derive(Deserialize)]
    struct Module {
        path: String,
        #[serde(rename = "type")]
        kind: String,
    }
    let list = "modules.json";
    let modules: Vec<Module> = match source.read(list)? {
        Some(text) => parse_json(list, &text)?,
        None => Vec::new(),
    };
    let is_known = |module: &&Module| {
        let known = ["Transformer", "Pooling", "Normalize"];
        known.iter().any(|name| module.kind.ends_with(name))
    };
    if let Some(module) = modules.iter().find(|module| !is_known(module)) {
        let problem = format!("a module of type {:?} is not supported", module.kind);
        return Err(LoadError::file(list, problem));
    }
    let stated = modules
        .iter()
        .find(|module| module.kind.ends_with("Pooling"));
    let folder = stated.map_or("1_Pooling", |module| &module.path);
    let name = format!("{folder}/config.json");
    let Some(text) = source.read(&name)? else {
        return Ok(Pooling::default());
    };
    let config: Map<String, Value> = parse_json(&name, &text)?;
    let modes = config.iter().filter_map(|(key, value)| {
        let mode = key.strip_prefix("pooling_mode_")?;
        (*value == Value::Bool(true)).then_some(mode)
    });
    match modes.collect::<Vec<_>>()[..] {
        [] | ["lasttoken"] => Ok(Pooling::LastToken),
        ["mean_tokens"] => Ok(Pooling::Mean),
        ref modes => {
            let modes = modes.join(", ");
            let problem = format!("pooling must be that of lasttoken or mean_tokens; got {modes}");
            Err(LoadError::file(&name, problem))
        }
    }
}

/// Reads the pooling that a GGUF file of the architecture `name` states, if it does. Files of
/// models that generate text state none.
///
/// # Errors
/// If the embedding is computed in another way.
pub(super) fn of_gguf(gguf: &Gguf, name: &str) -> LoadResult<Option<Pooling>> {
    let (metadata, key) = (gguf.metadata(), format!("{name}.pooling_type"));
    match metadata.size(&key)? {
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(Pooling::Mean)),
        Some(3) => Ok(Some(Pooling::LastToken)),
        Some(other) => {
            let problem = format!("must be 0 (none), 1 (mean) or 3 (last token); got {other}");
            Err(metadata.error(&key, problem))
        }
    }
}
