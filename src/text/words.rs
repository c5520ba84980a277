//! The vocabulary and merges of a checkpoint: how a word becomes tokens.
//!
//! Invariant: they are in memory once, however many tokenizers use them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Deserializer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{Model, Result, Token};

/// Words whose tokens the library remembers, most models on each thread. One can take eight kilobytes, and none is ever forgotten.
const REMEMBERED: usize = 1000;

/// The `model` of a `tokenizer.json`. A clone is the same one.
#[derive(Clone, Debug)]
pub(super) struct Words(Arc<ModelWrapper>);

impl Words {
    /// Whether both are the same model.
    #[cfg(test)]
    pub(super) fn are(&self, other: &Words) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Words, D::Error> {
        let mut model = ModelWrapper::deserialize(deserializer)?;
        model.resize_cache(REMEMBERED);
        Ok(Words(Arc::new(model)))
    }
}

impl Model for Words {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        self.0.tokenize(word)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.0.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.0.get_trainer()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_wrong_model_is_an_error() {
        let json = json!({"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}).to_string();
        assert!(serde_json::from_str::<Words>(&json).is_err());
    }
}
