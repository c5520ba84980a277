//! Tests of this module.

use serde_json::json;

use super::*;

/// Every byte is a token, `<|bos|>` is 256 and `<|eot_id|>` 257; then come `pieces`, which nothing is encoded to.
pub(super) fn byte_level_json(pieces: &[&[u8]]) -> Vec<u8> {
    let alphabet = byte_level_alphabet();
    let spell = |byte: &u8| {
        char::from_u32(alphabet.iter().position(|one| *one == Some(*byte)).unwrap() as u32).unwrap()
    };
    let bytes = (0..=u8::MAX).map(|byte| (spell(&byte).to_string(), json!(byte)));
    let pieces = pieces
        .iter()
        .zip(258..)
        .map(|(piece, id)| (piece.iter().map(spell).collect(), json!(id)));
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let vocabulary: serde_json::Map<String, Value> = bytes.chain(pieces).collect();
    serde_json::to_vec(&json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(256, "<|bos|>"), special(257, "<|eot_id|>")],
        "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": null,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }))
    .unwrap()
}

fn load(json: &[u8], config: &Value) -> Result<Tokenizer, TextError> {
    let config = config.to_string();
    let files = TextFiles {
        tokenizer: json,
        config: Some(config.as_bytes()),
        chat_template: None,
    };
    files.load(300).map(|(tokenizer, _)| tokenizer)
}

/// As [`byte_level_json`], with a post-processor that puts `<|bos|>` before a text.
fn with_beginning() -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(&byte_level_json(&[])).unwrap();
    let (bos, text) = (
        json!({"SpecialToken": {"id": "<|bos|>", "type_id": 0}}),
        json!({"Sequence": {"id": "A", "type_id": 0}}),
    );
    json["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [bos, text], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
    });
    json.to_string().into_bytes()
}

#[test]
fn both_ways_to_encode_use_the_same_words() {
    let tokenizer = load(&byte_level_json(&[]), &Value::Null).unwrap();
    let plain = tokenizer.plain.get_model();
    assert!(tokenizer.recognising.get_model().are(plain));
}

#[test]
fn a_prompt_gets_its_beginning_once_and_no_other_special_token() {
    let tokenizer = load(&with_beginning(), &json!({})).unwrap();
    assert_eq!(tokenizer.encode_prompt("hi").unwrap(), [256, 104, 105]);
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [256]);
    let spelled = tokenizer.encode_prompt("<|bos|>").unwrap();
    assert_eq!(spelled.len(), 8);
    assert_eq!(tokenizer.decode(&spelled, true), "<|bos|>");
    assert_eq!(tokenizer.decode(&spelled, false), "<|bos|><|bos|>");
}

/// Compared with transformers 5.23, for these files and every class of tokenizer named here.
#[test]
fn only_the_post_processor_says_what_is_put_around_a_prompt() {
    for class in ["PreTrainedTokenizerFast", "LlamaTokenizerFast"] {
        for keys in [
            json!({"add_bos_token": true}),
            json!({"add_bos_token": false}),
            json!({"add_eos_token": true}),
        ] {
            let mut config = keys;
            config["tokenizer_class"] = class.into();
            config["bos_token"] = "<|bos|>".into();
            config["eos_token"] = "<|eot_id|>".into();
            let encode = |json: &[u8]| load(json, &config).unwrap().encode_prompt("hi");
            assert_eq!(encode(&with_beginning()).unwrap(), [256, 104, 105]);
            assert_eq!(encode(&byte_level_json(&[])).unwrap(), [104, 105]);
        }
    }
}

/// The ids are those that transformers 5.23 gives.
#[test]
fn tokens_that_only_the_configuration_has_are_added_as_special() {
    let json = byte_level_json(&[]);
    let special = |config: &Value| {
        let tokenizer = load(&json, config).unwrap();
        let mut tokens = special_tokens(&tokenizer.recognising);
        tokens.retain(|(id, _)| !(256..258).contains(id));
        let texts: Vec<String> = tokens
            .iter()
            .map(|(id, text)| format!("{id}{text}"))
            .collect();
        (tokenizer, texts.join(" "))
    };
    let names = json!({"unk_token": "<u>", "pad_token": {"content": "<p>"}, "bos_token": "<b>", "eos_token": "<|eot_id|>"});
    assert_eq!(special(&names).1, "258<b> 259<u> 260<p>");
    let more = json!({"pad_token": "<p>", "additional_special_tokens": ["<x>"]});
    assert_eq!(special(&more).1, "258<p> 259<x>");
    let listed = json!({"eos_token": "<x>", "pad_token": "<p>", "added_tokens_decoder": {
        "260": {"content": "<z>", "special": false}, "259": {"content": "<y>", "special": true},
        "258": {"content": "<x>"}, "256": {"content": "<|bos|>", "special": false}}});
    let (tokenizer, texts) = special(&listed);
    assert_eq!(texts, "258<x> 259<y> 261<p>");
    assert!(tokenizer.is_special(256), "tokenizer.json says so");
    assert_eq!(tokenizer.encode_recognising("<y>").unwrap(), [259]);
    assert_eq!(tokenizer.encode_prompt("<y>").unwrap(), [60, 121, 62]);
    assert_eq!(tokenizer.token_bytes(258), b"<x>");
}

#[test]
fn listed_tokens_that_do_not_fit_are_refused() {
    let json = byte_level_json(&[]);
    for entry in [
        json!({"260": {"content": "<x>", "special": true}}),
        json!({"300": {"content": "<|bos|>", "special": true}}),
        json!({"258": {"special": true}}),
        json!({"x": {"content": "<x>"}}),
    ] {
        let config = json!({"added_tokens_decoder": entry});
        let error = load(&json, &config).err().unwrap().to_string();
        assert!(
            error.starts_with("tokenizer_config.json: added_tokens_decoder"),
            "{error}"
        );
    }
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let json = byte_level_json(&[]);
    let load = |tokenizer: &[u8], config: Option<&[u8]>, vocabulary| {
        TextFiles {
            tokenizer,
            config,
            chat_template: None,
        }
        .load(vocabulary)
        .map(|(tokenizer, _)| tokenizer)
    };
    let error = |result: Result<Tokenizer, TextError>| result.err().unwrap().to_string();
    assert!(error(load(b"{", None, 258)).starts_with("tokenizer.json: "));
    assert!(error(load(&json, Some(b"["), 258)).starts_with("tokenizer_config.json: "));
    let mut no_decoder: Value = serde_json::from_slice(&json).unwrap();
    no_decoder["decoder"] = Value::Null;
    assert!(error(load(no_decoder.to_string().as_bytes(), None, 258)).contains("no decoder"));
    let small = load(&json, None, 100).unwrap();
    assert_eq!(
        small.encode_prompt("~"),
        Err(TextError::BeyondVocabulary {
            token: 126,
            vocabulary: 100
        })
    );
}

#[test]
fn the_byte_level_alphabet_has_every_byte_once() {
    let mut bytes: Vec<u8> = byte_level_alphabet().into_iter().flatten().collect();
    bytes.sort_unstable();
    assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<u8>>());
    assert_eq!(byte_level_alphabet()['Ġ' as usize], Some(b' '));
}

#[test]
fn sentence_piece_tokens_spell_bytes_and_spaces() {
    let spelled = |token: &str| {
        let mut bytes = Vec::new();
        spell_sentence_piece(token, &mut bytes);
        bytes
    };
    assert_eq!(spelled("▁Paris"), b" Paris");
    assert_eq!(spelled("<0xE2>"), [0xE2]);
    assert_eq!(spelled("<0xZZ>"), b"<0xZZ>");
}
