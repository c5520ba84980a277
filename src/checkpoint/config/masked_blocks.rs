//! Blocks of masked tokens that a model was trained to fill, beside predicting the next token.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{
    LoadError, LoadResult, Metadata, MetadataEntries, MetadataValue, Source, parse_json,
};

/// The largest block.
const MAX_BLOCK: usize = 256;

/// What a checkpoint says of its masked blocks.
///
/// A token of a block attends to all tokens before the block, and to all of the block. The token
/// at a place predicts the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MaskedBlocks {
    /// The largest number of tokens in a block, if the checkpoint says it.
    pub size: Option<usize>,
    /// The token in the place of an unknown token, if the checkpoint names it.
    pub mask_token: Option<u32>,
    /// Which attention the keys and values of known tokens come from.
    pub committed_attention: CommittedAttention,
}

/// Which attention the keys and values of known tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommittedAttention {
    /// Causal attention, so every way of decoding shares them.
    Causal,
    /// A token attends to all of its block too, as in Fast-dLLM v2. The model answers by block
    /// diffusion alone.
    BlockCausal,
}

/// The fields, as `config.json` or `dlm_config.json` has them.
#[derive(Default, Deserialize)]
pub(super) struct BlocksJson {
    block_size: Option<usize>,
    bd_size: Option<usize>,
    mask_token_id: Option<u32>,
    committed_attention: Option<CommittedAttention>,
}

/// The content of a mask token in the published tokenizers.
const MASK_CONTENT: &str = "|<MASK>|";

impl MaskedBlocks {
    /// Reads the fields of `dlm_config.json`, if there is such a file, and then of `config.json`.
    /// A file of that name is that of Fast-dLLM v2, unless it says otherwise, and so is an
    /// architecture that `is_block_causal`. If no field names the mask token, it is the added token
    /// `|<MASK>|`.
    ///
    /// # Errors
    /// If size or mask token are out of range, or if nothing says which attention the keys and
    /// values of known tokens come from.
    pub(super) fn read(
        source: &Source,
        of_config: &BlocksJson,
        (vocab, is_block_causal): (usize, bool),
    ) -> LoadResult<Option<MaskedBlocks>> {
        let name = "dlm_config.json";
        let (of_file, usual) = match source.read(name)? {
            Some(text) => (
                parse_json(name, &text)?,
                Some(CommittedAttention::BlockCausal),
            ),
            None => (
                BlocksJson::default(),
                is_block_causal.then_some(CommittedAttention::BlockCausal),
            ),
        };
        let files = [&of_file, of_config];
        let size = files
            .iter()
            .find_map(|json| json.bd_size.or(json.block_size));
        let mask_token = files.iter().find_map(|json| json.mask_token_id);
        let attention = files.iter().find_map(|json| json.committed_attention);
        let attention = attention.or(usual);
        if mask_token.is_none() && attention.is_none() {
            return Ok(None); // Other models have a `block_size` of their own.
        }
        let mask_token = match mask_token {
            None => added_mask_token(source)?,
            stated => stated,
        };
        MaskedBlocks::of(
            [size, mask_token.map(|token| token as usize)],
            attention,
            vocab,
            LoadError::config,
        )
        .map(Some)
    }

    /// Reads the metadata of a GGUF file, whose architecture is called `name`.
    pub(super) fn of_gguf(
        metadata: &Metadata,
        name: &str,
        (vocab, is_block_causal): (usize, bool),
    ) -> LoadResult<Option<MaskedBlocks>> {
        let key = |field: &str| match field {
            "block_size" => format!("{name}.block_size"),
            "mask_token_id" => MASK_TOKEN.to_owned(),
            _ => format!("{name}.attention.causal"),
        };
        let size = metadata.size(&key("block_size"))?;
        let attention = metadata.bool(&key("committed_attention"))?;
        if size.is_none() && attention != Some(false) && !is_block_causal {
            return Ok(None); // Vocabularies of other models have a mask token too.
        }
        let mask_token = metadata.size(MASK_TOKEN)?;
        let attention = attention.map(|is_causal| match is_causal {
            true => CommittedAttention::Causal,
            false => CommittedAttention::BlockCausal,
        });
        let usual = is_block_causal.then_some(CommittedAttention::BlockCausal);
        let attention = attention.or(usual);
        MaskedBlocks::of([size, mask_token], attention, vocab, |field, problem| {
            metadata.error(&key(field), problem)
        })
        .map(Some)
    }

    fn of(
        [size, mask_token]: [Option<usize>; 2],
        attention: Option<CommittedAttention>,
        vocab: usize,
        error: impl Fn(&str, String) -> LoadError,
    ) -> LoadResult<MaskedBlocks> {
        if let Some(size) = size.filter(|size| !(2..=MAX_BLOCK).contains(size)) {
            let problem = format!("must be between 2 and {MAX_BLOCK}; got {size}");
            return Err(error("block_size", problem));
        }
        if let Some(mask_token) = mask_token.filter(|token| *token >= vocab) {
            let problem = format!("must be one of the {vocab} tokens; got {mask_token}");
            return Err(error("mask_token_id", problem));
        }
        let missing = "missing, and the model fills masked blocks";
        let committed_attention =
            attention.ok_or_else(|| error("committed_attention", missing.to_owned()))?;
        Ok(MaskedBlocks {
            size,
            mask_token: mask_token.map(|token| token as u32),
            committed_attention,
        })
    }

    /// Returns the fields of `config.json`.
    pub(super) fn fields(self) -> impl Iterator<Item = (String, Value)> {
        let fields = [
            ("block_size", self.size.map(|size| json!(size))),
            ("mask_token_id", self.mask_token.map(|token| json!(token))),
            ("committed_attention", Some(json!(self.committed_attention))),
        ];
        fields
            .into_iter()
            .filter_map(|(field, value)| Some((field.to_owned(), value?)))
    }

    /// Returns the metadata of a GGUF file, whose architecture is called `name`.
    pub(super) fn metadata(self, name: &str) -> MetadataEntries {
        let size = self.size.map(|size| MetadataValue::Size(size as u32));
        let mask_token = self.mask_token.map(MetadataValue::Size);
        let is_causal = self.committed_attention == CommittedAttention::Causal;
        let entries = [
            (format!("{name}.block_size"), size),
            (MASK_TOKEN.to_owned(), mask_token),
            (
                format!("{name}.attention.causal"),
                Some(MetadataValue::Bool(is_causal)),
            ),
        ];
        let stated = entries.into_iter();
        stated
            .filter_map(|(key, value)| Some((key, value?)))
            .collect()
    }
}

/// Returns the token that the tokenizer's files add as `|<MASK>|`.
fn added_mask_token(source: &Source) -> LoadResult<Option<u32>> {
    #[derive(Deserialize)]
    struct TokenizerJson {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    #[derive(Deserialize)]
    struct AddedToken {
        id: u32,
        content: String,
    }
    let name = "added_tokens.json";
    if let Some(text) = source.read(name)? {
        let tokens: HashMap<String, u32> = parse_json(name, &text)?;
        if let Some(token) = tokens.get(MASK_CONTENT) {
            return Ok(Some(*token));
        }
    }
    let name = "tokenizer.json";
    let Some(text) = source.read(name)? else {
        return Ok(None);
    };
    let json: TokenizerJson = parse_json(name, &text)?;
    let mut tokens = json.added_tokens.into_iter();
    let found = tokens.find(|token| token.content == MASK_CONTENT);
    Ok(found.map(|token| token.id))
}

/// The key of the mask token in GGUF files.
const MASK_TOKEN: &str = "tokenizer.ggml.mask_token_id";
