//! The stop tokens of a checkpoint. Three files may name them.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::Value;

use crate::checkpoint::{LoadError, LoadResult, Source, parse_json};

/// One token id or a list of them.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    pub(super) fn as_slice(&self) -> &[u32] {
        match self {
            TokenIds::One(id) => std::slice::from_ref(id),
            TokenIds::Many(ids) => ids,
        }
    }
}

/// Returns the union of the stop tokens that `config.json` (`configured`),
/// `generation_config.json` and the tokenizer name, ascending. Warns of tokens outside the
/// vocabulary and leaves them out.
pub(super) fn read(
    source: &Source,
    configured: Option<&TokenIds>,
    vocab: usize,
) -> LoadResult<Vec<u32>> {
    #[derive(Deserialize)]
    struct GenerationConfig {
        eos_token_id: Option<TokenIds>,
    }
    let mut tokens = BTreeSet::new();
    tokens.extend(configured.into_iter().flat_map(TokenIds::as_slice));
    if let Some(text) = source.read("generation_config.json")? {
        let generation: GenerationConfig = parse_json("generation_config.json", &text)?;
        tokens.extend(generation.eos_token_id.iter().flat_map(TokenIds::as_slice));
    }
    tokens.extend(tokenizer_eos(source)?);
    tokens.retain(|&token| {
        let is_known = (token as usize) < vocab;
        if !is_known {
            tracing::warn!(
                token,
                vocab,
                "a stop token is outside the vocabulary, so it can never occur"
            );
        }
        is_known
    });
    Ok(tokens.into_iter().collect())
}

/// Returns the id of the tokenizer's `eos_token`.
fn tokenizer_eos(source: &Source) -> LoadResult<Option<u32>> {
    let name = "tokenizer_config.json";
    let Some(text) = source.read(name)? else {
        return Ok(None);
    };
    let config: Value = parse_json(name, &text)?;
    let eos = &config["eos_token"];
    let Some(eos) = eos.as_str().or_else(|| eos["content"].as_str()) else {
        return Ok(None);
    };
    if let Some(added) = config["added_tokens_decoder"].as_object() {
        let found = added.iter().find(|(_, token)| token["content"] == eos);
        let id = found.and_then(|(id, _)| id.parse().ok());
        if id.is_some() {
            return Ok(id);
        }
    }
    let Some(text) = source.read("tokenizer.json")? else {
        return Ok(None);
    };
    match token_id(eos, &text)? {
        Some(id) => Ok(Some(id)),
        None => Err(LoadError::file(
            name,
            format!("eos_token {eos:?} is not a token of tokenizer.json"),
        )),
    }
}

/// Returns the id of `token` in a `tokenizer.json`. The vocabulary is large, so it is parsed only
/// if the added tokens lack the token.
pub(super) fn token_id(token: &str, tokenizer: &[u8]) -> LoadResult<Option<u32>> {
    #[derive(Deserialize)]
    struct AddedTokens {
        #[serde(default)]
        added_tokens: Value,
    }
    let AddedTokens { added_tokens } = parse_json("tokenizer.json", tokenizer)?;
    let mut added = added_tokens.as_array().into_iter().flatten();
    let id = match added.find(|added| added["content"] == token) {
        Some(added) => added["id"].as_u64(),
        None => {
            let whole: Value = parse_json("tokenizer.json", tokenizer)?;
            whole["model"]["vocab"][token].as_u64()
        }
    };
    Ok(id.and_then(|id| u32::try_from(id).ok()))
}
