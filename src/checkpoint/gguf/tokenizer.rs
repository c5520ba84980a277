//! Makes `tokenizer.json` and `tokenizer_config.json` from the metadata of a GGUF file.
//!
//! The result describes the tokenizer that `transformers` has for the same family. Sources: the
//! keys `tokenizer.ggml.*` of the GGUF specification, and the published `tokenizer.json` of each
//! family for its pre-tokenizer.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

use super::metadata::{HUGGING_FACE_TOKENIZER, Metadata, STOP_TOKENS};
use crate::checkpoint::error::LoadResult;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

// The types of tokens that matter here.
const UNKNOWN: f64 = 2.0;
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;
const UNUSED: f64 = 5.0;

/// Where words end, in Llama 3: numbers have up to three digits.
const LLAMA3_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Where words end, in Qwen 2 and 3: each digit is alone.
const QWEN2_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Where words end, in Qwen 3.5: as in Qwen 2, but combining marks belong to words.
const QWEN3_5_WORDS: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// A part of the chat template in the GGUF files of BitNet b1.58 2B-4T. The model was not trained
/// with that template.
const WRONG_TEMPLATE: &str = "BITNETAssistant";

/// The chat template that BitNet b1.58 2B-4T was trained with.
const BITNET_TEMPLATE: &str = "{% for message in messages %}{% if loop.first %}{{ bos_token }}\
    {% endif %}{{ message['role'] | capitalize }}: {{ message['content'] | trim }}<|eot_id|>\
    {% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}";

/// How a family's BPE differs from other families.
struct BpeFamily {
    names: &'static [&'static str],
    words: Words,
    /// Whether a word that is a token needs no merges.
    ignores_merges: bool,
    normalizes: bool,
    /// Whether a text begins with the BOS token if the file does not say.
    adds_bos: bool,
}

/// How text is cut into words.
#[derive(Clone, Copy)]
enum Words {
    Pattern(&'static str),
    /// As in GPT-2.
    ByteLevel,
}

const FAMILIES: [BpeFamily; 4] = [
    BpeFamily {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon_e"],
        words: Words::Pattern(LLAMA3_WORDS),
        ignores_merges: true,
        normalizes: false,
        adds_bos: true,
    },
    BpeFamily {
        names: &["qwen2"],
        words: Words::Pattern(QWEN2_WORDS),
        ignores_merges: false,
        normalizes: true,
        adds_bos: false,
    },
    BpeFamily {
        names: &["qwen35"],
        words: Words::Pattern(QWEN3_5_WORDS),
        ignores_merges: false,
        normalizes: true,
        adds_bos: false,
    },
    BpeFamily {
        names: &["gpt-2"],
        words: Words::ByteLevel,
        ignores_merges: false,
        normalizes: false,
        adds_bos: false,
    },
];

/// Returns whether the file is one of Microsoft's BitNet models, which lack the name of their
/// pre-tokenizer and have the chat template of another model.
fn is_bitnet(metadata: &Metadata) -> LoadResult<bool> {
    let architecture = metadata.require_text("general.architecture")?;
    Ok(["bitnet-b1.58", "bitnet-25"].contains(&architecture))
}

/// Makes `tokenizer.json`. If the file has a whole `tokenizer.json`, returns that.
pub(super) fn tokenizer_json(metadata: &Metadata) -> LoadResult<Value> {
    if let Some(whole) = metadata.text(HUGGING_FACE_TOKENIZER)? {
        let error = |error| metadata.error(HUGGING_FACE_TOKENIZER, error);
        return serde_json::from_str(whole).map_err(error);
    }
    match metadata.require_text(MODEL)? {
        "gpt2" => byte_level_bpe(metadata),
        "llama" => sentence_piece_bpe(metadata),
        other => {
            let problem = format!("must be \"gpt2\" or \"llama\"; got {other:?}");
            Err(metadata.error(MODEL, problem))
        }
    }
}

/// The key of the chat template of conversations with tools.
pub(crate) const TOOL_TEMPLATE: &str = "tokenizer.chat_template.tool_use";

/// Makes `tokenizer_config.json`: the tokens with a role, and the chat template.
pub(super) fn config_json(metadata: &Metadata) -> LoadResult<Value> {
    let tokens = metadata.require_texts(TOKENS)?;
    let mut config = json!({});
    for role in ["bos", "eos", "unknown", "padding"] {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let Some(id) = metadata.size(&key)? else {
            continue;
        };
        let problem = || format!("must be below the {} tokens; got {id}", tokens.len());
        let token = tokens
            .get(id)
            .ok_or_else(|| metadata.error(&key, problem()))?;
        let role = match role {
            "unknown" => "unk",
            "padding" => "pad",
            role => role,
        };
        config[format!("{role}_token")] = json!(token);
    }
    let own = metadata.text("tokenizer.chat_template")?;
    // A file that Sterna wrote has the right template, or none.
    let is_doubtful = is_bitnet(metadata)? && metadata.numbers(STOP_TOKENS)?.is_none();
    let is_wrong = is_doubtful && own.is_none_or(|own| own.contains(WRONG_TEMPLATE));
    if let Some(template) = if is_wrong { Some(BITNET_TEMPLATE) } else { own } {
        config["chat_template"] = match metadata.text(TOOL_TEMPLATE)? {
            Some(of_tools) => json!([
                {"name": "default", "template": template},
                {"name": "tool_use", "template": of_tools},
            ]),
            None => json!(template),
        };
    }
    Ok(config)
}

fn byte_level_bpe(metadata: &Metadata) -> LoadResult<Value> {
    let family = bpe_family(metadata)?;
    let merges = metadata.require_texts(MERGES)?;
    let is_pair = |merge: &str| merge.split(' ').filter(|part| !part.is_empty()).count() == 2;
    if let Some(merge) = merges.iter().find(|merge| !is_pair(merge)) {
        let problem = format!("a merge must be two tokens with a space between; got {merge:?}");
        return Err(metadata.error(MERGES, problem));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": added_tokens(metadata)?,
        "normalizer": family.normalizes.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": pre_tokenizer(family.words),
        "post_processor": post_processor(metadata, family.adds_bos)?,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": family.ignores_merges,
            "vocab": vocabulary(metadata)?, "merges": merges,
        },
    }))
}

fn byte_level(uses_regex: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": uses_regex,
    })
}

fn pre_tokenizer(words: Words) -> Value {
    match words {
        Words::ByteLevel => byte_level(true),
        Words::Pattern(pattern) => json!({"type": "Sequence", "pretokenizers": [
            {
                "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                "invert": false,
            },
            byte_level(false),
        ]}),
    }
}

/// Returns what a pre-tokenizer does to words, without what only offsets depend on. `None` if it is
/// not of the kinds that GGUF files have.
pub(super) fn word_rules(pre_tokenizer: &Value) -> Option<Vec<String>> {
    let steps = match pre_tokenizer["type"].as_str()? {
        "Sequence" => pre_tokenizer["pretokenizers"].as_array()?.clone(),
        _ => vec![pre_tokenizer.clone()],
    };
    let rule = |step: &Value| {
        let is_plain = step["behavior"] == "Isolated" && step["invert"] == false;
        match step["type"].as_str()? {
            "Split" if is_plain => step["pattern"]["Regex"].as_str().map(str::to_owned),
            "ByteLevel" if step["add_prefix_space"] == false => {
                Some(format!("bytes {}", step["use_regex"] != false))
            }
            _ => None,
        }
    };
    steps.iter().map(rule).collect()
}

/// Returns the name of the pre-tokenizer that cuts text into the same words.
pub(super) fn family_name(pre_tokenizer_json: &Value) -> Option<&'static str> {
    let rules = word_rules(pre_tokenizer_json)?;
    let is_same =
        |family: &&BpeFamily| word_rules(&pre_tokenizer(family.words)).as_ref() == Some(&rules);
    FAMILIES.iter().find(is_same).map(|family| family.names[0])
}

fn bpe_family(metadata: &Metadata) -> LoadResult<&'static BpeFamily> {
    let name = match metadata.text(PRE)? {
        None if is_bitnet(metadata)? => "llama-bpe",
        None => return Err(metadata.error(PRE, "missing; put a tokenizer.json beside the file")),
        Some(name) => name,
    };
    let is_named = |family: &&BpeFamily| family.names.contains(&name);
    FAMILIES.iter().find(is_named).ok_or_else(|| {
        let known: Vec<_> = FAMILIES
            .iter()
            .flat_map(|family| family.names)
            .copied()
            .collect();
        let known = known.join(", ");
        let problem = format!(
            "must be one of {known}; got {name:?}. Put the model's tokenizer.json beside the file"
        );
        metadata.error(PRE, problem)
    })
}

/// A SentencePiece model as BPE: words begin with `▁`, and unknown characters become bytes.
fn sentence_piece_bpe(metadata: &Metadata) -> LoadResult<Value> {
    let tokens = metadata.require_texts(TOKENS)?;
    let missing = || metadata.error(SCORES, "missing");
    let scores = metadata.numbers(SCORES)?.ok_or_else(missing)?;
    same_length(metadata, SCORES, scores.len(), tokens.len())?;
    let types = types(metadata, tokens.len())?;
    let mut unknown = tokens
        .iter()
        .zip(&types)
        .filter(|(_, kind)| **kind == UNKNOWN);
    let unknown = unknown.next().map(|(token, _)| token);
    if let Some(token) = tokens.iter().find(|token| token.len() > MAX_PIECE_BYTES) {
        let bytes = token.len();
        let problem = format!("a token has {bytes} bytes; the limit is {MAX_PIECE_BYTES}");
        return Err(metadata.error(TOKENS, problem));
    }
    let prefixes = metadata
        .bool("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true);
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let mut normalizers = vec![replace];
    if prefixes {
        normalizers.insert(0, prepend);
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": added_tokens(metadata)?,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": post_processor(metadata, true)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocabulary(metadata)?, "merges": merges_of_scores(tokens, scores),
        },
    }))
}

/// The longest token of a SentencePiece model, which is cut in all places for its merges.
const MAX_PIECE_BYTES: usize = 1024;

/// Returns the merges that the scores of tokens stand for: a pair of tokens merges if the result
/// is a token, the one with the highest score first.
fn merges_of_scores(tokens: &[Box<str>], scores: &[f64]) -> Vec<[String; 2]> {
    let ids: HashMap<&str, usize> = tokens.iter().map(|t| &**t).zip(0..).collect();
    let mut merges = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let first = merges.len();
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&left_id), Some(&right_id)) = (ids.get(left), ids.get(right)) {
                merges.push((*score, (left_id, right_id), [left, right]));
            }
        }
        merges[first..].sort_by_key(|merge| merge.1);
    }
    let lengths = |pair: &[&str; 2]| pair.map(|part| part.chars().count());
    // The sort is stable: merges of equal rank stay in the order of the tokens.
    merges.sort_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then_with(|| lengths(&b.2).cmp(&lengths(&a.2)))
    });
    let merges = merges.into_iter();
    merges.map(|(_, _, pair)| pair.map(str::to_owned)).collect()
}

fn vocabulary(metadata: &Metadata) -> LoadResult<Value> {
    let tokens = metadata.require_texts(TOKENS)?;
    let mut seen = HashSet::new();
    if let Some(token) = tokens.iter().find(|token| !seen.insert(&***token)) {
        let problem = format!("the token {token:?} occurs twice");
        return Err(metadata.error(TOKENS, problem));
    }
    let types = metadata.numbers(TYPES)?.unwrap_or_default();
    let is_padding =
        |id: usize, token: &str| types.get(id) == Some(&UNUSED) && token == padding_token(id);
    let ids = tokens
        .iter()
        .enumerate()
        .filter(|(id, token)| !is_padding(*id, token))
        .map(|(id, token)| (token.to_string(), Value::from(id)))
        .collect();
    Ok(Value::Object(ids))
}

/// Returns what files call an id that has no token.
pub(super) fn padding_token(id: usize) -> String {
    format!("[PAD{id}]")
}

fn types(metadata: &Metadata, tokens: usize) -> LoadResult<Vec<f64>> {
    let Some(types) = metadata.numbers(TYPES)? else {
        return Err(metadata.error(TYPES, "missing"));
    };
    same_length(metadata, TYPES, types.len(), tokens)?;
    Ok(types.to_vec())
}

fn same_length(metadata: &Metadata, key: &str, found: usize, tokens: usize) -> LoadResult<()> {
    if found == tokens {
        return Ok(());
    }
    let problem = format!("must have an element for each of {tokens} tokens; got {found}");
    Err(metadata.error(key, problem))
}

fn added_tokens(metadata: &Metadata) -> LoadResult<Vec<Value>> {
    let tokens = metadata.require_texts(TOKENS)?;
    let types = types(metadata, tokens.len())?;
    let added = tokens
        .iter()
        .zip(types)
        .enumerate()
        .filter_map(|(id, (token, kind))| {
            let special = kind == CONTROL || kind == UNKNOWN;
            (special || kind == USER_DEFINED).then(|| {
                json!({
                    "id": id, "content": token, "special": special, "normalized": false,
                    "single_word": false, "lstrip": false, "rstrip": false,
                })
            })
        });
    Ok(added.collect())
}

/// Returns the post-processor: it puts BOS before a text and EOS after it, if the file asks for
/// them.
fn post_processor(metadata: &Metadata, adds_bos: bool) -> LoadResult<Value> {
    let tokens = metadata.require_texts(TOKENS)?;
    let mut specials = json!({});
    let mut token = |role: &str, default: bool| -> LoadResult<Option<Value>> {
        let adds = metadata.bool(&format!("tokenizer.ggml.add_{role}_token"))?;
        if !adds.unwrap_or(default) {
            return Ok(None);
        }
        let key = format!("tokenizer.ggml.{role}_token_id");
        let id = metadata.require_size(&key)?;
        let problem = || format!("must be below the {} tokens; got {id}", tokens.len());
        let token = tokens
            .get(id)
            .ok_or_else(|| metadata.error(&key, problem()))?;
        specials[&**token] = json!({"id": token, "ids": [id], "tokens": [token]});
        Ok(Some(json!({"SpecialToken": {"id": token, "type_id": 0}})))
    };
    let bos = token("bos", adds_bos)?;
    let eos = token("eos", false)?;
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
    }
    let sequence = |id: &str| Some(json!({"Sequence": {"id": id, "type_id": 0}}));
    let of = |sequences: &[&str]| -> Vec<Value> {
        let inner = sequences.iter().map(|id| sequence(id));
        let all = std::iter::once(bos.clone())
            .chain(inner)
            .chain([eos.clone()]);
        all.flatten().collect()
    };
    Ok(json!({
        "type": "TemplateProcessing", "single": of(&["A"]), "pair": of(&["A", "B"]),
        "special_tokens": specials,
    }))
}
