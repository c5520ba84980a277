//! The tokenizer of one checkpoint.
//!
//! Invariant: no text of a user becomes a control token.
//!
//! Invariant: every id that an encoding returns is in the model's vocabulary.

mod split;

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;
use tokenizers::{AddedToken, Encoding};

use super::control_tokens::{ControlTokens, has_control_form, is_control};
use super::encoder::{self, Encoder};
use super::error::TextError;
use super::reasoning::ReasoningTags;
use super::token_bytes::TokenBytes;

/// Turns text into token ids and back, for one checkpoint.
pub struct Tokenizer {
    /// Recognises control tokens in the text. It encodes rendered templates.
    recognising: Encoder,
    /// Reads the text of a control token as ordinary text. It encodes what users write.
    plain: Encoder,
    controls: ControlTokens,
    special: HashSet<u32>,
    reasoning_tags: Option<ReasoningTags>,
    vocabulary: u32,
    bytes: TokenBytes,
    class: Option<String>,
    named: BTreeMap<String, String>, // Their texts.
}

impl Tokenizer {
    /// Loads a tokenizer. An added token that `chat_template` writes can be a control token, and so
    /// can a token that the model's configuration has `named`.
    pub(super) fn new(
        json: &[u8],
        config: &Value,
        chat_template: Option<&str>,
        (vocabulary, named): (u32, &[u32]),
    ) -> Result<Tokenizer, TextError> {
        let recognising = encoder::read(json, config)?;
        let added = encoder::added_tokens(&recognising);
        let special = added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        let named: Vec<(u32, String)> = named
            .iter()
            .filter(|id| !added.contains_key(id))
            .filter_map(|id| Some((*id, recognising.id_to_token(*id)?)))
            .filter(|(_, text)| has_control_form(text))
            .collect();
        let reasoning_tags = ReasoningTags::find(added.iter(), chat_template);
        let (ids, controls): (Vec<u32>, Vec<AddedToken>) = added
            .into_iter()
            .filter(|(_, token)| is_control(token, chat_template))
            .unzip();
        let plain = encoder::without(&recognising, &controls)?;
        let texts = controls.into_iter().map(|token| token.content);
        let controls = ControlTokens::new(ids.into_iter().zip(texts).chain(named).collect());
        let bytes = TokenBytes::new(&recognising, vocabulary).map_err(encoder::bad)?;
        Ok(Tokenizer {
            recognising,
            plain,
            controls: controls.map_err(encoder::bad)?,
            special,
            reasoning_tags,
            vocabulary,
            bytes,
            class: config["tokenizer_class"].as_str().map(str::to_owned),
            named: encoder::named_texts(config),
        })
    }

    /// Encodes a prompt that a user wrote, with the special tokens that the checkpoint puts around
    /// a text. The text itself becomes no control token.
    ///
    /// Only the post-processor of `tokenizer.json` decides which tokens these are. As in
    /// `transformers`, `add_bos_token` and `add_eos_token` of `tokenizer_config.json` have no
    /// effect when a `tokenizer.json` exists.
    ///
    /// # Errors
    /// If the tokenizer fails, or produces a token that the model does not have or that no text of
    /// a user may become.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.encode_without_controls(text)?;
        let whole = self.plain.post_process(encoding, None, true);
        self.known_tokens(&whole.map_err(|error| TextError::Encoding(error.to_string()))?)
    }

    /// Decodes `tokens` as a complete text. Special tokens are skipped or spelled out.
    pub fn decode(&self, tokens: &[u32], skip_special_tokens: bool) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .filter(|token| !(skip_special_tokens && self.is_special(**token)))
            .flat_map(|token| self.token_bytes(*token))
            .copied()
            .collect();
        let text = String::from_utf8_lossy(&bytes);
        match text.strip_prefix(' ') {
            Some(rest) if self.bytes.strips_first_space() => rest.to_owned(),
            _ => text.into_owned(),
        }
    }

    /// Returns the bytes of `token`: not always whole characters, and none for an unassigned id.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.bytes.of(token)
    }

    /// Returns whether `token` marks structure, such as the end of a turn.
    pub fn is_special(&self, token: u32) -> bool {
        self.special.contains(&token)
    }

    /// Returns whether `token` gives a prompt its structure. No text of a user becomes one.
    pub fn is_control(&self, token: u32) -> bool {
        self.controls.contains(token) || self.is_special(token)
    }

    /// Returns the control token with exactly this text, if there is one.
    pub fn control_token(&self, text: &str) -> Option<u32> {
        match self.controls.find(text).as_slice() {
            [found] if found.bytes == (0..text.len()) => Some(found.token),
            _ => None,
        }
    }

    /// Returns how answers mark reasoning; `None` if they do not.
    pub fn reasoning_tags(&self) -> Option<ReasoningTags> {
        self.reasoning_tags
    }

    /// Returns the number of tokens that the model has. Every id is below it.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// Returns the class that `tokenizer_config.json` states.
    pub fn class(&self) -> Option<&str> {
        self.class.as_deref()
    }

    /// Returns the text of a token that `tokenizer_config.json` names, such as `bos_token`.
    pub fn named_token(&self, name: &str) -> Option<&str> {
        self.named.get(name).map(String::as_str)
    }

    /// Returns the length of the longest token in bytes. A text of `n` bytes has at least `n`
    /// divided by this many tokens.
    pub fn longest_token(&self) -> usize {
        self.bytes.longest()
    }

    /// Returns the control tokens of the checkpoint.
    pub(super) fn control_tokens(&self) -> &ControlTokens {
        &self.controls
    }

    /// Encodes a rendered template: control tokens in it are recognised, and none is added.
    pub(super) fn encode_recognising(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.recognising.encode_fast(text, false);
        self.known_tokens(&encoding.map_err(|error| TextError::Encoding(error.to_string()))?)
    }

    /// Encodes a text, or a part of one, as ordinary text: it becomes no control token, and no
    /// special token is added.
    ///
    /// # Errors
    /// As [`encode_prompt`](Self::encode_prompt).
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.known_tokens(&self.encode_without_controls(text)?)
    }

    fn known_tokens(&self, encoding: &Encoding) -> Result<Vec<u32>, TextError> {
        let tokens = encoding.get_ids();
        match tokens.iter().find(|token| **token >= self.vocabulary) {
            Some(&token) => Err(TextError::BeyondVocabulary {
                token,
                vocabulary: self.vocabulary,
            }),
            None => Ok(tokens.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests;
