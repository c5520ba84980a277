//! Blocks of masked tokens that a model was trained to fill, beside predicting the next token.

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
/// at a place predicts the next one. The keys and values of known tokens are those of causal
/// attention, so every way of decoding shares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MaskedBlocks {
    /// The largest number of tokens in a block.
    pub size: usize,
    /// The token in the place of an unknown token.
    pub mask_token: u32,
}

/// The fields, as `config.json` or `dlm_config.json` has them.
#[derive(Default, Deserialize)]
pub(super) struct BlocksJson {
    block_size: Option<usize>,
    bd_size: Option<usize>,
    mask_token_id: Option<u32>,
    committed_attention: Option<String>,
}

impl MaskedBlocks {
    /// Reads the fields of `dlm_config.json`, if there is such a file, and then of `config.json`.
    ///
    /// # Errors
    /// If one of size and mask token is missing, out of range, or if the keys and values of known
    /// tokens are not those of causal attention.
    pub(super) fn read(
        source: &Source,
        of_config: &BlocksJson,
        vocab: usize,
    ) -> LoadResult<Option<MaskedBlocks>> {
        let name = "dlm_config.json";
        let of_file = match source.read(name)? {
            Some(text) => parse_json(name, &text)?,
            None => BlocksJson::default(),
        };
        let files = [&of_file, of_config];
        let size = files
            .iter()
            .find_map(|json| json.bd_size.or(json.block_size));
        let mask_token = files.iter().find_map(|json| json.mask_token_id);
        let attention = files
            .iter()
            .find_map(|json| json.committed_attention.as_deref());
        let attention = attention.map(|attention| attention == "causal");
        if mask_token.is_none() && attention.is_none() && of_file.bd_size.is_none() {
            return Ok(None); // Other models have a `block_size` of their own.
        }
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
        vocab: usize,
    ) -> LoadResult<Option<MaskedBlocks>> {
        let key = |field: &str| match field {
            "block_size" => format!("{name}.block_size"),
            "mask_token_id" => MASK_TOKEN.to_owned(),
            _ => format!("{name}.attention.causal"),
        };
        let size = metadata.size(&key("block_size"))?;
        if size.is_none() {
            return Ok(None); // Vocabularies of other models have a mask token too.
        }
        let mask_token = metadata.size(MASK_TOKEN)?;
        let is_causal = metadata.bool(&key("committed_attention"))?;
        MaskedBlocks::of([size, mask_token], is_causal, vocab, |field, problem| {
            metadata.error(&key(field), problem)
        })
        .map(Some)
    }

    fn of(
        [size, mask_token]: [Option<usize>; 2],
        is_causal: Option<bool>,
        vocab: usize,
        error: impl Fn(&str, String) -> LoadError,
    ) -> LoadResult<MaskedBlocks> {
        let missing =
            |field: &str| error(field, "missing, and the model fills masked blocks".into());
        let size = size.ok_or_else(|| missing("block_size"))?;
        let mask_token = mask_token.ok_or_else(|| missing("mask_token_id"))?;
        if !(2..=MAX_BLOCK).contains(&size) {
            let problem = format!("must be between 2 and {MAX_BLOCK}; got {size}");
            return Err(error("block_size", problem));
        }
        if mask_token >= vocab {
            let problem = format!("must be one of the {vocab} tokens; got {mask_token}");
            return Err(error("mask_token_id", problem));
        }
        if is_causal != Some(true) {
            let problem = "must say that the keys and values of known tokens are those of causal \
                           attention; block-causal attention is not supported";
            return Err(error("committed_attention", problem.into()));
        }
        Ok(MaskedBlocks {
            size,
            mask_token: mask_token as u32,
        })
    }

    /// Returns the fields of `config.json`.
    pub(super) fn fields(self) -> impl Iterator<Item = (String, Value)> {
        let fields = [
            ("block_size", json!(self.size)),
            ("mask_token_id", json!(self.mask_token)),
            ("committed_attention", json!("causal")),
        ];
        fields
            .into_iter()
            .map(|(field, value)| (field.to_owned(), value))
    }

    /// Returns the metadata of a GGUF file, whose architecture is called `name`.
    pub(super) fn metadata(self, name: &str) -> MetadataEntries {
        vec![
            (
                format!("{name}.block_size"),
                MetadataValue::Size(self.size as u32),
            ),
            (MASK_TOKEN.to_owned(), MetadataValue::Size(self.mask_token)),
            (
                format!("{name}.attention.causal"),
                MetadataValue::Bool(true),
            ),
        ]
    }
}

/// The key of the mask token in GGUF files.
const MASK_TOKEN: &str = "tokenizer.ggml.mask_token_id";
