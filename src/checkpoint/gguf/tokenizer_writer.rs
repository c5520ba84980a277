//! Makes the metadata of a tokenizer from `tokenizer.json` and `tokenizer_config.json`: the inverse
//! of `tokenizer.rs`.
//!
//! Invariant: if the reader would not make the same tokenizer from the arrays, the metadata has the
//! whole `tokenizer.json` too.

use std::collections::BTreeMap;

use serde_json::Value;

use super::entries::{MetadataEntries, MetadataValue, put_entries};
use super::metadata::{HUGGING_FACE_TOKENIZER, Metadata};
use super::tokenizer::{self, padding_token};

use crate::checkpoint::cursor::Cursor;
use crate::checkpoint::error::{LoadError, LoadResult};

// The types of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Returns the metadata of a tokenizer. `vocab` is the number of rows of the embedding.
///
/// # Errors
/// If it is no byte-level BPE, or has tokens that the model does not have.
pub(crate) fn tokenizer_metadata(
    tokenizer: &Value,
    config: &Value,
    vocab: usize,
) -> LoadResult<MetadataEntries> {
    let error = |problem: String| LoadError::file("tokenizer.json", problem);
    let model = &tokenizer["model"];
    let falls_back = model["byte_fallback"] == true;
    if model["type"] != "BPE" || falls_back {
        return Err(error(format!(
            "its model is {}{}; only byte-level BPE is converted to GGUF",
            model["type"],
            if falls_back {
                " with byte fallback"
            } else {
                ""
            }
        )));
    }
    let added = added_tokens(tokenizer);
    let mut tokens: BTreeMap<usize, &str> = vocabulary(tokenizer).collect();
    let ids: BTreeMap<&str, usize> = tokens.iter().map(|(id, token)| (*token, *id)).collect();
    if let Some((id, token)) = tokens.range(vocab..).next() {
        let problem = format!("the token {token:?} has the id {id}, but the model has {vocab}");
        return Err(error(problem));
    }
    let kind = |id: usize| match (added.get(&id), tokens.contains_key(&id)) {
        (Some(token), _) if token["special"] == true => CONTROL,
        (Some(_), _) => USER_DEFINED,
        (None, true) => NORMAL,
        (None, false) => UNUSED,
    };
    let types = (0..vocab).map(kind).collect();
    let texts = (0..vocab).map(|id| match tokens.remove(&id) {
        Some(token) => token.to_owned(),
        None => padding_token(id),
    });
    let merges = merges(tokenizer).map_err(error)?;
    let merges = merges.into_iter().map(|pair| pair.join(" "));
    let mut entries: MetadataEntries = Vec::new();
    let mut put = |key: &str, value| entries.push((format!("tokenizer.{key}"), value));
    put("ggml.model", MetadataValue::Text("gpt2".to_owned()));
    if let Some(pre) = tokenizer::family_name(&tokenizer["pre_tokenizer"]) {
        put("ggml.pre", MetadataValue::Text(pre.to_owned()));
    }
    put("ggml.tokens", MetadataValue::Texts(texts.collect()));
    put("ggml.token_type", MetadataValue::Integers(types));
    put("ggml.merges", MetadataValue::Texts(merges.collect()));
    for (role, name) in [
        ("bos", "bos_token"),
        ("eos", "eos_token"),
        ("unknown", "unk_token"),
        ("padding", "pad_token"),
    ] {
        let token = &config[name];
        let token = token.as_str().or_else(|| token["content"].as_str());
        if let Some(id) = token.and_then(|token| ids.get(token)) {
            put(
                &format!("ggml.{role}_token_id"),
                MetadataValue::Size(*id as u32),
            );
        }
    }
    let (before, after) = tokens_around(&tokenizer["post_processor"]);
    put(
        "ggml.add_bos_token",
        MetadataValue::Bool(!before.is_empty()),
    );
    put("ggml.add_eos_token", MetadataValue::Bool(!after.is_empty()));
    if !is_made_again(&entries, tokenizer) {
        let whole = MetadataValue::Text(tokenizer.to_string());
        entries.push((HUGGING_FACE_TOKENIZER.to_owned(), whole));
    }
    Ok(entries)
}

/// Returns whether the reader makes this tokenizer from the entries.
fn is_made_again(entries: &MetadataEntries, tokenizer: &Value) -> bool {
    // The reader asks for the architecture only if there is no name of a pre-tokenizer.
    let architecture = MetadataValue::Text("llama".to_owned());
    let entries = [
        &[("general.architecture".to_owned(), architecture)],
        &entries[..],
    ]
    .concat();
    let mut bytes = Vec::new();
    put_entries(&entries, &mut bytes);
    let count = entries.len() as u64;
    let metadata = Metadata::read("tokenizer.json", &mut Cursor::new(&bytes), count);
    let made = metadata.and_then(|metadata| tokenizer::tokenizer_json(&metadata));
    made.is_ok_and(|made| are_alike(&made, tokenizer))
}

/// Returns whether two byte-level BPE tokenizers give every text the same tokens.
fn are_alike(a: &Value, b: &Value) -> bool {
    let flags = |tokenizer: &Value| {
        let model = &tokenizer["model"];
        [
            "ignore_merges",
            "unk_token",
            "dropout",
            "continuing_subword_prefix",
            "end_of_word_suffix",
        ]
        .map(|flag| match &model[flag] {
            Value::Bool(false) | Value::Null => Value::Null,
            other => other.clone(),
        })
    };
    let added = |tokenizer: &Value| {
        let tokens = added_tokens(tokenizer).into_iter();
        let tokens = tokens.map(|(id, token)| {
            let content = token["content"].as_str().unwrap_or_default();
            // Normalizing leaves ASCII as it is.
            let is_normalized = token["normalized"] == true && !content.is_ascii();
            let flags = ["special", "single_word", "lstrip", "rstrip"];
            let flags = flags.map(|flag| token[flag] == true);
            (id, content.to_owned(), flags, is_normalized)
        });
        tokens.collect::<Vec<_>>()
    };
    let all = |tokenizer: &Value| {
        let tokens = vocabulary(tokenizer).map(|(id, token)| (id, token.to_owned()));
        tokens.collect::<BTreeMap<_, _>>()
    };
    let words = |tokenizer: &Value| tokenizer::word_rules(&tokenizer["pre_tokenizer"]);
    let normalizer = |tokenizer: &Value| tokenizer["normalizer"].clone();
    let around = |tokenizer: &Value| tokens_around(&tokenizer["post_processor"]);
    let decoder = |tokenizer: &Value| tokenizer["decoder"]["type"].clone();
    words(a).is_some()
        && words(a) == words(b)
        && normalizer(a) == normalizer(b)
        && around(a) == around(b)
        && decoder(a) == decoder(b)
        && flags(a) == flags(b)
        && merges(a) == merges(b)
        && all(a) == all(b)
        && added(a) == added(b)
}

/// Returns the added tokens by id.
fn added_tokens(tokenizer: &Value) -> BTreeMap<usize, &Value> {
    let tokens = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let by_id = tokens.filter_map(|token| Some((token["id"].as_u64()? as usize, token)));
    by_id.collect()
}

/// Returns all tokens with their ids, the added ones last.
fn vocabulary(tokenizer: &Value) -> impl Iterator<Item = (usize, &str)> {
    let known = tokenizer["model"]["vocab"]
        .as_object()
        .into_iter()
        .flatten();
    let known = known.filter_map(|(token, id)| Some((id.as_u64()? as usize, token.as_str())));
    let added = added_tokens(tokenizer).into_iter();
    known.chain(added.filter_map(|(id, token)| Some((id, token["content"].as_str()?))))
}

/// Returns the pairs that merge.
fn merges(tokenizer: &Value) -> Result<Vec<[String; 2]>, String> {
    let merges = tokenizer["model"]["merges"]
        .as_array()
        .into_iter()
        .flatten();
    let merges = merges.map(|merge| {
        let pair = match merge {
            Value::String(text) => text.split_once(' '),
            pair => pair[0].as_str().zip(pair[1].as_str()),
        };
        let is_plain = |part: &str| !part.is_empty() && !part.contains(' ');
        pair.filter(|(a, b)| is_plain(a) && is_plain(b))
            .map(|(a, b)| [a.to_owned(), b.to_owned()])
            .ok_or_else(|| format!("the merge {merge} is not two tokens without spaces"))
    });
    merges.collect()
}

/// Returns the ids of the special tokens that a post-processor puts before and after a text.
fn tokens_around(processor: &Value) -> (Vec<u64>, Vec<u64>) {
    if let Some(parts) = processor["processors"].as_array() {
        let parts = parts.iter().map(tokens_around);
        return parts.fold(Default::default(), |mut all, part| {
            all.0.extend(part.0);
            all.1.extend(part.1);
            all
        });
    }
    let (mut before, mut after, mut is_after) = (Vec::new(), Vec::new(), false);
    for piece in processor["single"].as_array().into_iter().flatten() {
        is_after |= piece["Sequence"].is_object();
        let name = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
        let ids = &processor["special_tokens"][name]["ids"];
        let ids = ids
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_u64);
        if is_after { &mut after } else { &mut before }.extend(ids);
    }
    (before, after)
}
