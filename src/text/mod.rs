//! Text to token ids and back.
//!
//! Invariants: what a user wrote never becomes a special token; every id that leaves this module is one the model has; the text of
//! a token sequence is the same whether it is decoded at once or token by token.

mod bpe;
mod chat_template;
mod detokenizer;
mod specials;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    TokenizerImpl,
};

pub use chat_template::{ChatTemplate, Message, TemplateError};
pub use detokenizer::{Detokenizer, TextDelta, TextOptions};

use bpe::SharedModel;
use specials::Specials;

/// The text side of a checkpoint, as the bytes of its files.
#[derive(Clone, Copy, Debug)]
pub struct TextFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`.
    pub config: Option<&'a [u8]>,
    /// `chat_template.jinja`; it counts more than a template inside the configuration.
    pub chat_template: Option<&'a str>,
}

impl TextFiles<'_> {
    /// Reads them. `vocabulary` is the width of the model's logits; without a chat template, chat is not offered.
    ///
    /// # Errors
    /// When a file is not what its name promises, or needs something that is not supported; the text names it.
    pub fn load(&self, vocabulary: u32) -> Result<(Tokenizer, Option<ChatTemplate>), TextError> {
        let config: Value = match self.config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(|error| TextError::BadFile {
                file: "tokenizer_config.json",
                why: error.to_string(),
            })?,
            None => Value::Null,
        };
        let tokenizer = Tokenizer::new(self.tokenizer, &config, vocabulary)?;
        let template = ChatTemplate::find(&config, self.chat_template)?;
        Ok((tokenizer, template))
    }
}

/// Why a text can't be loaded, or turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// A file of the checkpoint can't be used.
    BadFile {
        /// Its name.
        file: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The tokenizer could not encode a text.
    Encoding(String),
    /// The tokenizer produced a token that the model does not have.
    BeyondVocabulary {
        /// The token.
        token: u32,
        /// How many tokens the model has.
        vocabulary: u32,
    },
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextError::BadFile { file, why } => write!(f, "{file}: {why}"),
            TextError::Encoding(why) => write!(f, "the text can't be encoded: {why}"),
            TextError::BeyondVocabulary { token, vocabulary } => {
                write!(
                    f,
                    "the tokenizer made token {token}, but the model has only {vocabulary}"
                )
            }
        }
    }
}

impl std::error::Error for TextError {}

/// What `tokenizer.json` describes. A clone uses the same words.
type Encoder = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Text to token ids and back, for one checkpoint.
pub struct Tokenizer {
    /// Special tokens that stand in the text become themselves: for rendered templates.
    recognising: Encoder,
    /// Special tokens that stand in the text are text: for what users write.
    plain: Encoder,
    specials: Specials,
    vocabulary: u32,
    pieces: Pieces,
}

impl Tokenizer {
    fn new(json: &[u8], config: &Value, vocabulary: u32) -> Result<Tokenizer, TextError> {
        let bad = |why: String| TextError::BadFile {
            file: "tokenizer.json",
            why,
        };
        let mut recognising = Encoder::from_bytes(json).map_err(|error| bad(error.to_string()))?;
        // Neither is for serving: they would cut or fill prompts silently.
        recognising
            .with_padding(None)
            .with_truncation(None)
            .map_err(|error| bad(error.to_string()))?;
        add_configured_tokens(&mut recognising, config).map_err(|why| TextError::BadFile {
            file: "tokenizer_config.json",
            why,
        })?;
        let mut plain = recognising.clone();
        plain.set_encode_special_tokens(true);
        let specials = Specials::new(special_tokens(&recognising)).map_err(bad)?;
        let pieces = Pieces::new(&recognising, vocabulary).map_err(bad)?;
        Ok(Tokenizer {
            recognising,
            plain,
            specials,
            vocabulary,
            pieces,
        })
    }

    /// The tokens of a prompt that a user wrote, with whatever the checkpoint puts around a text.
    ///
    /// The post-processor of `tokenizer.json` alone says what that is. As in transformers, `add_bos_token` and
    /// `add_eos_token` of `tokenizer_config.json` do not count: it drops both wherever there is a `tokenizer.json`,
    /// whatever the class of the tokenizer.
    ///
    /// # Errors
    /// When the tokenizer can't, or makes a token that the model does not have.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.plain, text, true)
    }

    /// The text of `tokens`, as a text of its own; special tokens are left out, or spelled out.
    pub fn decode(&self, tokens: &[u32], skip_special_tokens: bool) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .filter(|token| !(skip_special_tokens && self.is_special(**token)))
            .flat_map(|token| self.token_bytes(*token))
            .copied()
            .collect();
        let text = String::from_utf8_lossy(&bytes);
        match text.strip_prefix(' ') {
            Some(rest) if self.pieces.first_space_is_a_mark => rest.to_owned(),
            _ => text.into_owned(),
        }
    }

    /// The bytes that `token` stands for; none for an id that no token has. They need not be whole characters.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.pieces.of(token)
    }

    /// The token is a mark of the format, like an end of turn, and no text.
    pub fn is_special(&self, token: u32) -> bool {
        self.specials.contains(token)
    }

    /// How many tokens the model has: the ids are below it.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    /// Bytes of the longest token: a text of `n` bytes has at least `n` divided by this many tokens.
    pub fn longest_token(&self) -> usize {
        self.pieces.longest
    }

    /// A whole text in which special tokens may stand, with nothing put before it.
    fn encode_recognising(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.recognising, text, false)
    }

    /// A part of a text, in which nothing is special.
    fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(&self.plain, text, false)
    }

    fn encode(&self, with: &Encoder, text: &str, whole: bool) -> Result<Vec<u32>, TextError> {
        let encoding = with
            .encode_fast(text, whole)
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

/// A token named in a configuration: a string, or an object around one.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// Adds the tokens that only `tokenizer_config.json` has, in the order in which transformers does, which gives them
/// their ids. What `tokenizer.json` says of a token stands, but that a token may become special.
fn add_configured_tokens(tokenizer: &mut Encoder, config: &Value) -> Result<(), String> {
    let listed = listed_tokens(config)?;
    let mut known: HashMap<String, AddedToken> = tokenizer
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
        tokenizer
            .add_tokens(tokens)
            .map_err(|error| error.to_string())?;
    }
    for (id, AddedToken { content, .. }) in &listed {
        match tokenizer.token_to_id(content) {
            Some(found) if found != *id => {
                return Err(format!(
                    "added_tokens_decoder: {content:?} is listed as token {id}, with tokenizer.json it is {found}"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// `added_tokens_decoder`, by id.
fn listed_tokens(config: &Value) -> Result<BTreeMap<u32, AddedToken>, String> {
    let listed = config["added_tokens_decoder"].as_object();
    listed
        .into_iter()
        .flatten()
        .map(|(id, token)| {
            let wrong = || format!("added_tokens_decoder: the entry {id:?} is no token");
            let number = id.parse().map_err(|_| wrong())?;
            let special = token["special"].as_bool().unwrap_or(false);
            Ok((number, added_token(token, special).ok_or_else(wrong)?))
        })
        .collect()
}

/// The tokens that have a part to play, such as `bos_token`: all of them are special.
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

fn special_tokens(tokenizer: &Encoder) -> Vec<(u32, String)> {
    let added = tokenizer.get_added_tokens_decoder();
    let mut special: Vec<(u32, String)> = added
        .into_iter()
        .filter(|(_, token)| token.special)
        .map(|(id, token)| (id, token.content))
        .collect();
    special.sort();
    special
}

/// The bytes of every token, one after the other.
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>, // Indexed by token.
    longest: usize,
    first_space_is_a_mark: bool, // A text begins with a space that nobody wrote.
}

/// How tokens spell bytes.
enum Spelling {
    /// A character for each byte (GPT-2, Llama 3).
    ByteLevel,
    /// Text with `▁` for a space, and `<0xNN>` for single bytes (SentencePiece: Llama 2).
    SentencePiece { strips_first_space: bool },
}

impl Pieces {
    fn new(tokenizer: &Encoder, vocabulary: u32) -> Result<Pieces, String> {
        let spelling = Spelling::of(tokenizer)?;
        let byte_of_char = byte_level_alphabet();
        let mut pieces = Pieces {
            bytes: Vec::new(),
            ends: Vec::with_capacity(vocabulary as usize),
            longest: 1,
            first_space_is_a_mark: matches!(
                spelling,
                Spelling::SentencePiece {
                    strips_first_space: true
                }
            ),
        };
        for id in 0..vocabulary {
            let token = tokenizer.id_to_token(id).unwrap_or_default();
            let before = pieces.bytes.len();
            match spelling {
                Spelling::ByteLevel => spell_byte_level(&token, &byte_of_char, &mut pieces.bytes),
                Spelling::SentencePiece { .. } => spell_sentence_piece(&token, &mut pieces.bytes),
            }
            pieces.longest = pieces.longest.max(pieces.bytes.len() - before);
            let end = u32::try_from(pieces.bytes.len()).map_err(|error| error.to_string())?;
            pieces.ends.push(end);
        }
        pieces.bytes.shrink_to_fit();
        Ok(pieces)
    }

    fn of(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let Some(&end) = self.ends.get(token) else {
            return &[];
        };
        let start = if token == 0 { 0 } else { self.ends[token - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

impl Spelling {
    /// From the tokenizer's decoder: `ByteLevel`, or the usual sequence of a SentencePiece conversion.
    fn of(tokenizer: &Encoder) -> Result<Spelling, String> {
        let decoder = match tokenizer.get_decoder() {
            Some(decoder) => serde_json::to_value(decoder).map_err(|error| error.to_string())?,
            None => {
                return Err(
                    "it has no decoder, so it is not known how its tokens become text".into(),
                );
            }
        };
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.clone(),
            None => vec![decoder],
        };
        let mut byte_level = false;
        let mut marks_spaces = false;
        let mut strips_first_space = false;
        for step in &steps {
            match step["type"].as_str().unwrap_or_default() {
                "ByteLevel" => byte_level = true,
                "Replace" if step["pattern"]["String"] == "▁" && step["content"] == " " => {
                    marks_spaces = true
                }
                "Metaspace" => {
                    marks_spaces = true;
                    strips_first_space = step["prepend_scheme"] != "never";
                }
                "Strip" if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                    strips_first_space = true
                }
                "ByteFallback" | "Fuse" => {}
                other => {
                    return Err(format!(
                        "its decoder has a step {other:?} that is not supported"
                    ));
                }
            }
        }
        match (byte_level, marks_spaces) {
            (true, false) => Ok(Spelling::ByteLevel),
            (false, true) => Ok(Spelling::SentencePiece { strips_first_space }),
            _ => Err("its decoder is neither byte-level nor SentencePiece's".into()),
        }
    }
}

/// GPT-2's alphabet: printable bytes stand for themselves, the others, in order, for the characters from U+0100 on.
fn byte_level_alphabet() -> [Option<u8>; 0x144] {
    let mut alphabet = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let char = if printable { usize::from(byte) } else { next };
        if !printable {
            next += 1;
        }
        alphabet[char] = Some(byte);
    }
    alphabet
}

/// A token with a character outside the alphabet was added by hand and is its own text.
fn spell_byte_level(token: &str, byte_of_char: &[Option<u8>], bytes: &mut Vec<u8>) {
    let spelled: Option<Vec<u8>> = token
        .chars()
        .map(|char| byte_of_char.get(char as usize).copied().flatten())
        .collect();
    match spelled {
        Some(spelled) => bytes.extend(spelled),
        None => bytes.extend_from_slice(token.as_bytes()),
    }
}

fn spell_sentence_piece(token: &str, bytes: &mut Vec<u8>) {
    let hex = token
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => bytes.push(byte),
        None => bytes.extend(token.replace('▁', " ").bytes()),
    }
}

#[cfg(test)]
mod tests;
