//! Reads the model of a `tokenizer.json`: the vocabulary, and the merges that turn words into
//! tokens.
//!
//! Invariant: a model is in memory once, however many tokenizers use it.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{Model, Result, Token};

/// The number of words whose tokens the library caches, for most models on each thread. An entry
/// can take eight kilobytes, and the library never evicts one.
const CACHED_WORDS: usize = 1000;

/// The `model` of a `tokenizer.json`. A clone shares the memory of the original.
#[derive(Clone, Debug)]
pub(super) struct SharedModel {
    model: Arc<ModelWrapper>,
    unknown: Option<u32>,
}

impl SharedModel {
    /// Returns the token that stands for text that the model cannot spell.
    pub(super) fn unknown_token(&self) -> Option<u32> {
        self.unknown
    }

    /// Returns whether the text of each token, except the unknown one, is the part of a text that
    /// becomes the token.
    pub(super) fn spells_text(&self) -> bool {
        let is_none = |mark: &Option<String>| mark.as_ref().is_none_or(String::is_empty);
        match &*self.model {
            ModelWrapper::BPE(bpe) => {
                is_none(&bpe.continuing_subword_prefix) && is_none(&bpe.end_of_word_suffix)
            }
            ModelWrapper::Unigram(_) => true,
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
        }
    }

    /// Returns whether a character that is no token becomes the tokens of its bytes.
    pub(super) fn falls_back_to_bytes(&self) -> bool {
        match &*self.model {
            ModelWrapper::BPE(bpe) => bpe.byte_fallback,
            ModelWrapper::Unigram(unigram) => unigram.byte_fallback(),
            ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => false,
        }
    }
}

impl<'de> Deserialize<'de> for SharedModel {
    fn deserialize<D: Deserializer<'de>>(
        deserializer: D,
    ) -> std::result::Result<SharedModel, D::Error> {
        let (mut model, unigram_unknown) = deserializer.deserialize_map(ModelVisitor)?;
        if let ModelWrapper::BPE(bpe) = &mut model {
            // Dropout is for training. It makes the tokens of a text random.
            bpe.dropout = None;
        }
        model.resize_cache(CACHED_WORDS);
        let unknown = match &model {
            ModelWrapper::BPE(bpe) => bpe.unk_token.as_ref(),
            ModelWrapper::WordPiece(words) => Some(&words.unk_token),
            ModelWrapper::WordLevel(words) => Some(&words.unk_token),
            ModelWrapper::Unigram(_) => None,
        };
        let unknown = unknown.and_then(|text| model.token_to_id(text));
        Ok(SharedModel {
            unknown: unknown.or(unigram_unknown),
            model: Arc::new(model),
        })
    }
}

/// Reads a model without intermediate copies. The library's own deserializer makes several copies
/// of the whole model, and the allocator keeps their memory.
struct ModelVisitor;

impl<'de> Visitor<'de> for ModelVisitor {
    type Value = (ModelWrapper, Option<u32>); // With the `unk_id` of a Unigram model.

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a model")
    }

    fn visit_map<A: MapAccess<'de>>(
        self,
        mut map: A,
    ) -> std::result::Result<Self::Value, A::Error> {
        let first: Option<(String, Value)> = map.next_entry()?;
        let rest = MapAccessDeserializer::new(map);
        match first {
            Some((key, kind)) if key == "type" && kind == "BPE" => BpeFile::deserialize(rest)?
                .build()
                .map(|model| (model, None))
                .map_err(A::Error::custom),
            first => {
                let mut whole = serde_json::Map::deserialize(rest)?;
                whole.extend(first);
                // Older files omit the type. Only BPE models have merges.
                let is_bpe = match whole.get("type") {
                    Some(kind) => kind == "BPE",
                    None => whole.contains_key("merges"),
                };
                let whole = Value::Object(whole);
                let unknown = whole["unk_id"]
                    .as_u64()
                    .and_then(|id| u32::try_from(id).ok());
                let model = if is_bpe {
                    let bpe = BpeFile::deserialize(whole).map_err(A::Error::custom)?;
                    bpe.build().map_err(A::Error::custom)?
                } else {
                    ModelWrapper::deserialize(whole).map_err(A::Error::custom)?
                };
                Ok((model, unknown))
            }
        }
    }
}

/// A model of the type `BPE`, as the file has it.
#[derive(Deserialize)]
struct BpeFile {
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Vec<Merge>,
}

/// Two tokens that become one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    /// Both tokens with a space between them, as in older files.
    Line(String),
}

impl BpeFile {
    fn build(self) -> Result<ModelWrapper> {
        let merges = self
            .merges
            .into_iter()
            .filter(|merge| !merge.is_comment())
            .map(Merge::pair)
            .collect::<Result<Vec<_>>>()?;
        // The library removes the prefix and writes both tokens into a buffer as long as the
        // longest token, without a check. It would panic.
        let prefix = self
            .continuing_subword_prefix
            .as_ref()
            .map_or(0, String::len);
        let longest = self.vocab.keys().map(String::len).max().unwrap_or(0);
        for (left, right) in &merges {
            let rest = right.get(prefix..);
            if rest.is_none_or(|rest| left.len() + rest.len() > longest) {
                return Err(format!("{left:?} and {right:?} do not merge into a token").into());
            }
        }
        let mut builder = BPE::builder().vocab_and_merges(self.vocab, merges);
        if let Some(prefix) = self.continuing_subword_prefix {
            builder = builder.continuing_subword_prefix(prefix);
        }
        let mut bpe = builder.build()?;
        bpe.unk_token = self.unk_token;
        bpe.end_of_word_suffix = self.end_of_word_suffix;
        bpe.fuse_unk = self.fuse_unk.unwrap_or(false);
        bpe.byte_fallback = self.byte_fallback.unwrap_or(false);
        bpe.ignore_merges = self.ignore_merges.unwrap_or(false);
        Ok(ModelWrapper::BPE(bpe))
    }
}

impl Merge {
    fn is_comment(&self) -> bool {
        matches!(self, Merge::Line(line) if line.starts_with("#version"))
    }

    fn pair(self) -> Result<(String, String)> {
        match self {
            Merge::Pair(left, right) => Ok((left, right)),
            Merge::Line(line) => match line.split_once(' ') {
                Some((left, right)) if !right.contains(' ') => Ok((left.into(), right.into())),
                _ => Err(format!("the merge {line:?} must be two tokens").into()),
            },
        }
    }
}

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        self.model.tokenize(word)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.model.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.model.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.model.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.model.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        self.model.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.model.get_trainer()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    impl SharedModel {
        /// Returns whether both share one model.
        pub(in crate::text) fn shares_memory_with(&self, other: &SharedModel) -> bool {
            Arc::ptr_eq(&self.model, &other.model)
        }
    }

    /// Compares the model with the library's, once as the text is and once with its type first.
    fn check_as_the_library(json: &Value) {
        let mut texts = vec![json.to_string()];
        if json["type"] == "BPE" {
            let mut rest = json.as_object().unwrap().clone();
            rest.remove("type");
            let rest = Value::Object(rest).to_string();
            texts.push(format!(r#"{{"type":"BPE",{}"#, &rest[1..]));
        }
        for text in texts {
            let library: ModelWrapper = serde_json::from_str(&text).unwrap();
            let model: SharedModel = serde_json::from_str(&text).unwrap();
            assert_eq!(*model.model, library, "{text}");
        }
    }

    #[test]
    fn a_model_equals_the_librarys() {
        let vocab = json!({"a": 0, "b": 1, "##b": 2, "ab": 3, "<unk>": 4, "aba": 5});
        let pairs = json!([["a", "b"], ["ab", "a"]]);
        let lines = json!(["#version: 0.2", "a b", "ab a"]);
        for merges in [json!([]), pairs.clone(), lines] {
            check_as_the_library(&json!({"type": "BPE", "vocab": vocab, "merges": merges}));
        }
        for (key, value) in [
            ("unk_token", json!("<unk>")),
            ("end_of_word_suffix", json!("b")),
            ("fuse_unk", json!(true)),
            ("byte_fallback", json!(true)),
            ("ignore_merges", json!(true)),
            ("something_else", json!({})),
        ] {
            let mut model = json!({"type": "BPE", "vocab": vocab, "merges": pairs});
            for value in [Value::Null, value] {
                model[key] = value;
                check_as_the_library(&model);
            }
        }
        check_as_the_library(&json!({
            "type": "BPE", "continuing_subword_prefix": "##",
            "vocab": vocab, "merges": [["a", "##b"]],
        }));
    }

    #[test]
    fn the_type_can_be_last_or_missing_or_another_than_bpe() {
        check_as_the_library(&json!({"vocab": {"a": 0}, "merges": [], "type": "BPE"}));
        check_as_the_library(&json!({"vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]]}));
        check_as_the_library(&json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}));
        check_as_the_library(&json!({
            "type": "Unigram", "unk_id": 0, "vocab": [["a", -1.5]], "byte_fallback": false,
        }));
    }

    #[test]
    fn dropout_is_ignored() {
        for json in [
            r#"{"type":"BPE","dropout":0.5,"vocab":{"a":0,"aa":1},"merges":["a a"]}"#,
            r#"{"dropout":0.5,"vocab":{"a":0,"aa":1},"merges":["a a"]}"#,
        ] {
            let model: SharedModel = serde_json::from_str(json).unwrap();
            let ModelWrapper::BPE(bpe) = &*model.model else {
                panic!("another model");
            };
            assert_eq!(bpe.dropout, None);
        }
    }

    #[test]
    fn a_merge_whose_result_is_no_token_is_an_error() {
        // The library panics on these.
        for rest in [
            r####""vocab":{"a":0,"b":1},"merges":["a b"]"####,
            r####""vocab":{"a":0,"##":1,"aa":2},"merges":["a a"],
                "continuing_subword_prefix":"##""####,
            r####""vocab":{"a":0,"é":1,"aé":2},"merges":["a é"],
                "continuing_subword_prefix":"#""####,
        ] {
            for json in [
                format!(r#"{{"type":"BPE",{rest}}}"#),
                format!(r#"{{{rest},"type":"BPE"}}"#),
                format!("{{{rest}}}"),
            ] {
                let error = serde_json::from_str::<SharedModel>(&json).expect_err(&json);
                assert!(
                    error.to_string().contains("do not merge into a token"),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn a_malformed_model_is_an_error() {
        for merges in [
            json!(["a b"]),
            json!(["a"]),
            json!(["a a a"]),
            json!([["a"]]),
            json!([1]),
            Value::Null,
        ] {
            let json = json!({"type": "BPE", "vocab": {"a": 0}, "merges": merges}).to_string();
            assert!(
                serde_json::from_str::<ModelWrapper>(&json).is_err(),
                "{json}"
            );
            assert!(
                serde_json::from_str::<SharedModel>(&json).is_err(),
                "{json}"
            );
        }
        for json in [
            "{}",
            "[]",
            "null",
            r#"{"type": "BPE"}"#,
            r#"{"type": "Other"}"#,
        ] {
            assert!(serde_json::from_str::<SharedModel>(json).is_err(), "{json}");
        }
    }
}
