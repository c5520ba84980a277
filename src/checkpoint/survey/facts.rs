//! The hyperparameters that the files of a checkpoint state, unchecked.

use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::config::text_part;
use crate::checkpoint::{Gguf, LoadResult, Source, parse_json};

/// The hyperparameters that the files of a checkpoint state. What they do not state is `None`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelFacts {
    /// The architecture, as the files name it.
    pub architecture: Option<String>,
    /// The number of layers.
    pub layers: Option<u64>,
    /// The number of values in a hidden state.
    pub hidden: Option<u64>,
    /// The number of values between gate and down.
    pub intermediate: Option<u64>,
    /// The number of query heads.
    pub heads: Option<u64>,
    /// The number of key-value heads.
    pub kv_heads: Option<u64>,
    /// The number of values in a head.
    pub head_dim: Option<u64>,
    /// The number of token ids.
    pub vocabulary: Option<u64>,
    /// The number of positions.
    pub context: Option<u64>,
    /// Whether the output head is the embedding.
    pub tied: Option<bool>,
}

impl ModelFacts {
    /// Reads what the files state.
    ///
    /// # Errors
    /// If `config.json` is missing or malformed.
    pub(super) fn read(source: &Source) -> LoadResult<ModelFacts> {
        let facts = match source.gguf() {
            Some(gguf) => ModelFacts::of_gguf(gguf),
            None => {
                let name = "config.json";
                let text = source.read(name)?;
                let text = text.ok_or_else(|| source.missing_file(name))?;
                let own: Value = parse_json(name, &text)?;
                // The sizes of a model with images are those of its text part.
                let part = text_part(name, text.to_vec())?;
                ModelFacts {
                    architecture: architecture(&own),
                    ..ModelFacts::of_json(&parse_json(name, &part)?)
                }
            }
        };
        Ok(ModelFacts {
            kv_heads: facts.kv_heads.or(facts.heads),
            head_dim: facts
                .head_dim
                .or_else(|| match (facts.hidden, facts.heads) {
                    (Some(hidden), Some(heads)) if heads > 0 => Some(hidden / heads),
                    _ => None,
                }),
            ..facts
        })
    }

    fn of_gguf(gguf: &Gguf) -> ModelFacts {
        let metadata = gguf.metadata();
        let architecture = metadata.text("general.architecture").ok().flatten();
        let size = |key: &str| {
            let key = format!("{}.{key}", architecture?);
            metadata.size(&key).ok().flatten().map(|size| size as u64)
        };
        let rows = |name: &str| gguf.shape(name).and_then(<[usize]>::first).copied();
        let embedding = rows("model.embed_tokens.weight");
        let tokens = || metadata.require_texts("tokenizer.ggml.tokens").ok();
        let vocabulary = embedding.or_else(|| tokens().map(<[_]>::len));
        ModelFacts {
            architecture: architecture.map(str::to_owned),
            layers: size("block_count"),
            hidden: size("embedding_length"),
            intermediate: size("feed_forward_length"),
            heads: size("attention.head_count"),
            kv_heads: size("attention.head_count_kv"),
            head_dim: size("attention.key_length"),
            vocabulary: vocabulary.map(|tokens| tokens as u64),
            context: size("context_length"),
            tied: embedding.map(|_| rows("lm_head.weight").is_none()),
        }
    }

    fn of_json(json: &Value) -> ModelFacts {
        let size = |key: &str| json[key].as_u64();
        ModelFacts {
            architecture: architecture(json),
            layers: size("num_hidden_layers"),
            hidden: size("hidden_size"),
            intermediate: size("intermediate_size"),
            heads: size("num_attention_heads"),
            kv_heads: size("num_key_value_heads"),
            head_dim: size("head_dim"),
            vocabulary: size("vocab_size"),
            context: size("max_position_embeddings"),
            tied: Some(json["tie_word_embeddings"].as_bool().unwrap_or(false)),
        }
    }
}

/// Returns what `config.json` calls the architecture.
fn architecture(json: &Value) -> Option<String> {
    let class = json["architectures"][0].as_str();
    class.or(json["model_type"].as_str()).map(str::to_owned)
}
