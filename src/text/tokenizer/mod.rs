//! The tokenizer of one checkpoint.
//!
//! Invariant: no text of a user becomes a control token.
//!
//! Invariant: every id that an encoding returns is in the model's vocabulary.

mod automaton;
mod least_tokens;
mod split;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{AddedToken, Encoding};

use super::control_tokens::{ControlTokens, has_control_form, is_control};
use super::encoder::{self, Encoder};
use super::error::TextError;
use super::reasoning::ReasoningTags;
use super::token_bytes::TokenBytes;
use least_tokens::LeastTokens;

/// What a tokenizer is made of, from which another process makes an equal one.
#[derive(Serialize, Deserialize)]
pub struct TokenizerSource {
    /// `tokenizer.json`.
    #[serde(skip)]
    pub json: Vec<u8>,
    /// `tokenizer_config.json`, or null.
    pub config: Value,
    /// The text of all chat templates. An added token that one of them writes can be a control
    /// token.
    pub chat_template: Option<String>,
    /// The width of the model's logits.
    pub vocabulary: u32,
    /// Tokens that the model's configuration names. They can be control tokens too.
    pub named: Vec<u32>,
}

/// A text may have this many times the tokens of the context: a request can ask to have its prompt
/// cut to the context.
const CONTEXTS: usize = 2;

/// Turns text into token ids and back, for one checkpoint.
pub struct Tokenizer {
    source: TokenizerSource,
    /// Recognises control tokens in the text. It encodes rendered templates.
    recognising: Encoder,
    /// Reads the text of a control token as ordinary text. It encodes what users write.
    plain: Encoder,
    /// The same for text behind a control token, if the tokenizer reads it otherwise.
    inside: Option<Encoder>,
    controls: ControlTokens,
    strips: HashMap<u32, Strips>,
    special: HashSet<u32>,
    reasoning_tags: Option<ReasoningTags>,
    bytes: TokenBytes,
    context: Option<u32>,
    least_tokens: OnceLock<Option<LeastTokens>>, // Known after the first long text.
    named: BTreeMap<String, String>,             // Their texts.
}

/// On which sides a control token takes the white space beside it.
#[derive(Clone, Copy)]
struct Strips {
    left: bool,
    right: bool,
}

impl Tokenizer {
    /// Loads a tokenizer.
    ///
    /// # Errors
    /// If its files are malformed or need something unsupported.
    pub fn load(source: TokenizerSource) -> Result<Tokenizer, TextError> {
        let TokenizerSource { config, named, .. } = &source;
        let chat_template = source.chat_template.as_deref();
        let recognising = encoder::read(&source.json, config)?;
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
        let inside = encoder::behind_tokens(&plain)?;
        let strips = ids
            .iter()
            .zip(&controls)
            .filter(|(_, token)| token.lstrip || token.rstrip);
        let strips = strips.map(|(id, token)| {
            let (left, right) = (token.lstrip, token.rstrip);
            (*id, Strips { left, right })
        });
        let strips = strips.collect();
        let texts = controls.into_iter().map(|token| token.content);
        let controls = ControlTokens::new(ids.into_iter().zip(texts).chain(named).collect());
        let bytes = TokenBytes::new(&recognising, source.vocabulary).map_err(encoder::bad)?;
        Ok(Tokenizer {
            recognising,
            plain,
            inside,
            strips,
            controls: controls.map_err(encoder::bad)?,
            special,
            reasoning_tags,
            bytes,
            context: None,
            least_tokens: OnceLock::new(),
            named: encoder::named_texts(config),
            source,
        })
    }

    /// Returns what the tokenizer was made of.
    pub fn source(&self) -> &TokenizerSource {
        &self.source
    }

    /// Returns the tokenizer of a model whose context has this many tokens. It encodes no text that
    /// has more than twice as many, and finds this out in a time that depends on the context, not
    /// on the text.
    #[must_use]
    pub fn with_context(self, tokens: u32) -> Tokenizer {
        Tokenizer {
            context: Some(tokens),
            ..self
        }
    }

    /// Encodes a prompt that a user wrote, with the special tokens that the checkpoint puts around
    /// a text. The text itself becomes no control token.
    ///
    /// Only the post-processor of `tokenizer.json` decides which tokens these are. As in
    /// `transformers`, `add_bos_token` and `add_eos_token` of `tokenizer_config.json` have no
    /// effect when a `tokenizer.json` exists.
    ///
    /// # Errors
    /// If the text is far longer than the context, or if the tokenizer fails, or produces a token
    /// that the model does not have or that no text of a user may become.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding = self.encode_without_controls(text, &self.plain)?;
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
        self.source.vocabulary
    }

    /// Returns the class that `tokenizer_config.json` states.
    pub fn class(&self) -> Option<&str> {
        self.source.config["tokenizer_class"].as_str()
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
        self.encode_with_controls(text, false)
    }

    /// Encodes a text in which the texts of control tokens become these tokens. `adds_special` says
    /// whether the special tokens of a prompt are added. Never use it for a user's part of a
    /// prompt.
    ///
    /// # Errors
    /// If the text is far longer than the context, or if the tokenizer fails, or produces a token
    /// that the model does not have.
    pub fn encode_with_controls(
        &self,
        text: &str,
        adds_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        self.check_length(text)?;
        let encoding = self.recognising.encode_fast(text, adds_special);
        self.known_tokens(&encoding.map_err(|error| TextError::Encoding(error.to_string()))?)
    }

    /// Encodes a text, or a part of one, as ordinary text: it becomes no control token, and no
    /// special token is added.
    ///
    /// # Errors
    /// As [`encode_prompt`](Self::encode_prompt).
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.known_tokens(&self.encode_without_controls(text, &self.plain)?)
    }

    /// Returns tokens whose texts are exactly `text` somewhere inside of an answer; `None` if the
    /// tokenizer has none. Some tokenizers put a space before every text, so it is then encoded
    /// after a line break, with which no tokenizer merges it.
    pub fn spell(&self, text: &str) -> Option<Vec<u32>> {
        let spells = |tokens: &[u32]| {
            let bytes = tokens.iter().flat_map(|token| self.token_bytes(*token));
            bytes.eq(text.as_bytes())
        };
        let own = self.encode_plain(text).ok();
        own.filter(|tokens| spells(tokens)).or_else(|| {
            let after = self.encode_plain(&format!("\n{text}")).ok()?;
            let start = (1..after.len()).find(|start| spells(&after[*start..]))?;
            Some(after[start..].to_vec())
        })
    }

    /// Encodes ordinary text between two control tokens, as it is encoded beside them in one text.
    /// At the beginning or the end of a prompt, there is no token.
    ///
    /// # Errors
    /// As [`encode_prompt`](Self::encode_prompt).
    pub(super) fn encode_between(
        &self,
        mut text: &str,
        [before, after]: [Option<u32>; 2],
    ) -> Result<Vec<u32>, TextError> {
        let strips = |token: Option<u32>| self.strips.get(&token?);
        if strips(before).is_some_and(|strips| strips.right) {
            text = text.trim_start();
        }
        if strips(after).is_some_and(|strips| strips.left) {
            text = text.trim_end();
        }
        let encoder = match (before, &self.inside) {
            (Some(_), Some(inside)) => inside,
            _ => &self.plain,
        };
        if text.is_empty() {
            return Ok(Vec::new());
        }
        self.known_tokens(&self.encode_without_controls(text, encoder)?)
    }

    /// Refuses a text that has far more tokens than the context.
    pub(super) fn check_length(&self, text: &str) -> Result<(), TextError> {
        let Some(context) = self.context else {
            return Ok(());
        };
        let limit = context as usize * CONTEXTS;
        if text.len() <= limit {
            return Ok(()); // Without a look at it.
        }
        let min_tokens = self.least_tokens(text, limit);
        if min_tokens <= limit {
            return Ok(());
        }
        Err(TextError::TooLong {
            bytes: text.len(),
            min_tokens,
            context,
        })
    }

    /// Returns a number of tokens that `text` has at least. Stops as soon as this is over `limit`.
    pub(super) fn least_tokens(&self, text: &str, limit: usize) -> usize {
        let (encoder, vocabulary) = (&self.recognising, self.source.vocabulary);
        let least = self
            .least_tokens
            .get_or_init(|| LeastTokens::new(encoder, &self.bytes, vocabulary));
        least
            .as_ref()
            .map_or(0, |least| least.of(text, encoder, limit))
    }

    fn known_tokens(&self, encoding: &Encoding) -> Result<Vec<u32>, TextError> {
        let tokens = encoding.get_ids();
        match tokens
            .iter()
            .find(|token| **token >= self.source.vocabulary)
        {
            Some(&token) => Err(TextError::BeyondVocabulary {
                token,
                vocabulary: self.source.vocabulary,
            }),
            None => Ok(tokens.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests;
