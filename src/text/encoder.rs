//! Reads the encoder that `tokenizer.json` and `tokenizer_config.json` describe together.
//!
//! Invariant: added tokens have the ids that `transformers` gives them.

use std::collections::{BTreeMap, HashMap};
use std::panic;

use serde::de::IgnoredAny;
use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper,
    PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

use super::bpe::SharedModel;
use super::error::TextError;

/// The pipeline of `tokenizer.json`. A clone shares the vocabulary and the merges.
pub(super) type Encoder = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Reads `tokenizer.json` and adds the tokens that only `tokenizer_config.json` has.
pub(super) fn read(json: &[u8], config: &Value) -> Result<Encoder, TextError> {
    let mut encoder = parse(json)?;
    // Padding and truncation are for training. In serving they would change prompts silently.
    encoder
        .with_padding(None)
        .with_truncation(None)
        .map_err(|error| bad(error.to_string()))?;
    add_configured_tokens(&mut encoder, config).map_err(|why| TextError::BadFile {
        file: "tokenizer_config.json",
        why,
    })?;
    check_added_tokens(&encoder)?;
    Ok(encoder)
}

/// Parses `tokenizer.json`. The library panics on some malformed files.
fn parse(json: &[u8]) -> Result<Encoder, TextError> {
    serde_json::from_slice::<IgnoredAny>(json).map_err(|error| bad(error.to_string()))?;
    match panic::catch_unwind(|| Encoder::from_bytes(json)) {
        Ok(encoder) => encoder.map_err(|error| bad(error.to_string())),
        Err(_) => Err(bad("the tokenizer library panics on this file".to_owned())),
    }
}

/// Refuses an added token that the normalizer makes empty: the library would find it everywhere.
fn check_added_tokens(encoder: &Encoder) -> Result<(), TextError> {
    let Some(normalizer) = encoder.get_normalizer() else {
        return Ok(());
    };
    for token in added_tokens(encoder).into_values() {
        let mut text = NormalizedString::from(token.content.as_str());
        let normalized = normalizer.normalize(&mut text);
        if token.normalized && (normalized.is_err() || text.is_empty()) {
            let content = token.content;
            return Err(bad(format!(
                "the normalizer leaves nothing of the added token {content:?}"
            )));
        }
    }
    Ok(())
}

/// Returns the added tokens with their ids, in the order of ids.
pub(super) fn added_tokens(encoder: &Encoder) -> BTreeMap<u32, AddedToken> {
    encoder.get_added_tokens_decoder().into_iter().collect()
}

/// Returns an encoder that reads the text of `controls` as ordinary text. It still recognises the
/// other added tokens.
pub(super) fn without(encoder: &Encoder, controls: &[AddedToken]) -> Result<Encoder, TextError> {
    let mut plain = encoder.clone();
    let hidden: Vec<AddedToken> = controls
        .iter()
        .filter(|token| !token.special)
        .map(|token| token.clone().special(true))
        .collect();
    if !hidden.is_empty() {
        plain
            .add_tokens(hidden)
            .map_err(|error| bad(error.to_string()))?;
    }
    plain.set_encode_special_tokens(true);
    Ok(plain)
}

/// Returns an encoder that reads a text as `encoder` reads it behind an added token. There is none
/// if `encoder` reads both alike.
///
/// `Metaspace` can mark the beginning of a text, and does not do so behind a token.
pub(super) fn behind_tokens(encoder: &Encoder) -> Result<Option<Encoder>, TextError> {
    let error = |error: serde_json::Error| bad(error.to_string());
    let old = serde_json::to_value(encoder.get_pre_tokenizer()).map_err(error)?;
    let mut new = old.clone();
    let steps = match new.get("pretokenizers").is_some() {
        true => new["pretokenizers"].as_array_mut().map(Vec::as_mut_slice),
        false => Some(std::slice::from_mut(&mut new)),
    };
    for step in steps.unwrap_or_default() {
        if step["type"] == "Metaspace" && step["prepend_scheme"] == "first" {
            step["prepend_scheme"] = "never".into();
        }
    }
    if new == old {
        return Ok(None);
    }
    let pre_tokenizer: PreTokenizerWrapper = serde_json::from_value(new).map_err(error)?;
    let mut behind = encoder.clone();
    behind.with_pre_tokenizer(Some(pre_tokenizer));
    Ok(Some(behind))
}

/// Returns the error of a `tokenizer.json` that cannot be used.
pub(super) fn bad(why: String) -> TextError {
    TextError::BadFile {
        file: "tokenizer.json",
        why,
    }
}

/// Returns the text of a token in a configuration: the value is a string or an object around one.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// Returns the texts of the tokens that a configuration names, such as `bos_token`, by name.
pub(super) fn named_texts(config: &Value) -> BTreeMap<String, String> {
    config
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, _)| key.ends_with("_token"))
        .filter_map(|(key, value)| Some((key.clone(), token_text(value)?.to_owned())))
        .collect()
}

/// Adds the tokens that only `tokenizer_config.json` has. They are in the order of `transformers`,
/// because the order determines the ids. An entry of `tokenizer.json` stays as it is, except that
/// the configuration can make its token special.
fn add_configured_tokens(encoder: &mut Encoder, config: &Value) -> Result<(), String> {
    let listed = listed_tokens(config)?;
    let mut known: HashMap<String, AddedToken> = encoder
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| (token.content.clone(), token))
        .collect();
    let mut tokens = Vec::new();
    let in_order = listed.values().cloned().chain(named_tokens(config));
    for token in in_order.filter(|token| !token.content.is_empty()) {
        let token = match known.get(&token.content) {
            Some(old) if old.special || !token.special => continue,
            Some(old) => old.clone().special(true),
            None => token,
        };
        known.insert(token.content.clone(), token.clone());
        tokens.push(token);
    }
    if !tokens.is_empty() {
        encoder
            .add_tokens(tokens)
            .map_err(|error| error.to_string())?;
    }
    for (id, AddedToken { content, .. }) in &listed {
        match encoder.token_to_id(content) {
            Some(found) if found != *id => {
                return Err(format!(
                    "added_tokens_decoder: {content:?} has the id {id} here, but {found} in \
                     tokenizer.json"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reads `added_tokens_decoder`, in the order of ids.
fn listed_tokens(config: &Value) -> Result<BTreeMap<u32, AddedToken>, String> {
    let listed = config["added_tokens_decoder"].as_object();
    listed
        .into_iter()
        .flatten()
        .map(|(id, token)| {
            let wrong = || format!("added_tokens_decoder: the entry {id:?} is not a token");
            let number = id.parse().map_err(|_| wrong())?;
            let special = token["special"].as_bool().unwrap_or(false);
            Ok((number, added_token(token, special).ok_or_else(wrong)?))
        })
        .collect()
}

/// Returns the tokens with a role, such as `bos_token`. All of them are special.
fn named_tokens(config: &Value) -> impl Iterator<Item = AddedToken> {
    const ROLES: [&str; 7] = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
    let of_roles = ROLES.map(|role| &config[format!("{role}_token")]);
    let more = ["extra_special_tokens", "additional_special_tokens"]
        .into_iter()
        .filter_map(|key| config[key].as_array())
        .find(|tokens| !tokens.is_empty());
    of_roles
        .into_iter()
        .chain(more.into_iter().flatten())
        .filter_map(|token| added_token(token, true))
}

fn added_token(value: &Value, special: bool) -> Option<AddedToken> {
    let is = |key: &str| value[key].as_bool();
    let token = AddedToken::from(token_text(value)?, special)
        .single_word(is("single_word").unwrap_or(false))
        .lstrip(is("lstrip").unwrap_or(false))
        .rstrip(is("rstrip").unwrap_or(false));
    Some(match is("normalized") {
        Some(normalized) => token.normalized(normalized),
        None => token,
    })
}
