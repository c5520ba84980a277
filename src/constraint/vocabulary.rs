//! The tokens of a model as `llguidance` needs them: as bytes, in a prefix tree.

use std::sync::Arc;

use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use super::TokenId;
use crate::text::{ReasoningTags, Tokenizer};

/// The longest token in bytes that a grammar may use. The prefix tree has a limit of 1,024.
const MAX_TOKEN_BYTES: usize = 512;

/// A text that no tokenizer merges with what follows.
const SEPARATOR: &str = "\n";

struct Vocabulary {
    tokenizer: Tokenizer,
    trie: TokTrie,
}

/// Returns the tokens of `tokenizer`. `end_tokens` end an answer of the model.
pub(super) fn environment(tokenizer: Tokenizer, end_tokens: &[TokenId]) -> TokEnv {
    let vocabulary = tokenizer.vocabulary();
    let words: Vec<Vec<u8>> = (0..vocabulary)
        .map(|token| word(&tokenizer, token, end_tokens))
        .collect();
    let end = end_tokens.first().copied();
    let info = TokRxInfo::new(vocabulary, end.unwrap_or(toktrie::INVALID_TOKEN));
    let mut trie = TokTrie::from(&info, &words);
    if !end_tokens.is_empty() {
        trie = trie.with_eos_tokens(end_tokens);
    }
    Arc::new(Vocabulary { tokenizer, trie })
}

/// Returns the bytes of a token. The bytes of a control token begin with a marker, so that no text
/// of a grammar matches them. A token that no grammar may use has no bytes.
fn word(tokenizer: &Tokenizer, token: TokenId, end_tokens: &[TokenId]) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token);
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    if bytes.len() > MAX_TOKEN_BYTES {
        return Vec::new();
    }
    let is_tag = match tokenizer.reasoning_tags() {
        Some(ReasoningTags::Tokens { open, close }) => token == open || token == close,
        Some(ReasoningTags::Text) | None => false,
    };
    if is_tag || tokenizer.is_control(token) || end_tokens.contains(&token) {
        return [&[marker], bytes].concat();
    }
    if bytes.len() > 1 && bytes[0] == marker {
        return Vec::new();
    }
    bytes.to_vec()
}

impl Vocabulary {
    /// Encodes a text that stands somewhere in an answer. Some tokenizers put a space before every
    /// text, so it is then encoded after a separator.
    fn encode(&self, text: &str) -> Vec<TokenId> {
        let own = self.tokenizer.encode_plain(text).ok();
        let own = own.filter(|tokens| self.spells(tokens, text));
        let tokens = own.or_else(|| {
            let after = format!("{SEPARATOR}{text}");
            let tokens = self.tokenizer.encode_plain(&after).ok()?;
            let begins = |start: &usize| self.spells(&tokens[*start..], text);
            let start = (1..tokens.len()).find(begins)?;
            Some(tokens[start..].to_vec())
        });
        tokens.unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
    }

    fn spells(&self, tokens: &[TokenId], text: &str) -> bool {
        let bytes = tokens.iter().flat_map(|token| self.trie.token(*token));
        bytes.eq(text.as_bytes())
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        (self.trie).tokenize_with_greedy_fallback(bytes, |text| self.encode(text))
    }
}
