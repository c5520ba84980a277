//! The tokenizer of one checkpoint.
//!
//! Invariant: every id that an encoding returns is in the model's vocabulary.

use serde_json::Value;

use super::encoder::{self, Encoder};
use super::error::TextError;
use super::special_tokens::SpecialTokens;
use super::token_bytes::TokenBytes;

/// Turns text into token ids and back, for one checkpoint.
pub struct Tokenizer {
    /// Recognises special tokens in the text. It encodes rendered templates.
    recognising: Encoder,
    /// Encodes the text of a special token as ordinary text. It encodes what users write.
    plain: Encoder,
    specials: SpecialTokens,
    vocabulary: u32,
    bytes: TokenBytes,
}

impl Tokenizer {
    pub(super) fn new(
        json: &[u8],
        config: &Value,
        vocabulary: u32,
    ) -> Result<Tokenizer, TextError> {
        let bad = |why: String| TextError::BadFile {
            file: "tokenizer.json",
            why,
        };
        let recognising = encoder::read(json, config)?;
        let mut plain = recognising.clone();
        plain.set_encode_special_tokens(true);
        let specials = SpecialTokens::new(encoder::special_tokens(&recognising)).map_err(bad)?;
        let bytes = TokenBytes::new(&recognising, vocabulary).map_err(bad)?;
        Ok(Tokenizer {
            recognising,
            plain,
            specials,
            vocabulary,
            bytes,
        })
    }

    /// Encodes a prompt that a user wrote, with the special tokens that the checkpoint puts around
    /// a text.
    ///
    /// Only the post-processor of `tokenizer.json` decides which tokens these are. As in
    /// `transformers`, `add_bos_token` and `add_eos_token` of `tokenizer_config.json` have no
    /// effect when a `tokenizer.json` exists.
    ///
    /// # Errors
    /// If the tokenizer fails, or produces a token that the model does not have.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.plain, text, true)
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
        self.specials.contains(token)
    }

    /// Returns the number of tokens that the model has. Every id is below it.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// Returns the length of the longest token in bytes. A text of `n` bytes has at least `n`
    /// divided by this many tokens.
    pub fn longest_token(&self) -> usize {
        self.bytes.longest()
    }

    /// Returns the special tokens of the checkpoint.
    pub(super) fn special_tokens(&self) -> &SpecialTokens {
        &self.specials
    }

    /// Encodes a rendered template: special tokens in it are recognised, and none is added.
    pub(super) fn encode_recognising(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.recognising, text, false)
    }

    /// Encodes a part of a text as ordinary text.
    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.plain, text, false)
    }

    fn encode(
        &self,
        encoder: &Encoder,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TextError> {
        let encoding = encoder
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TextError::Encoding(error.to_string()))?;
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
