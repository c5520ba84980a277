//! Tests of a tokenizer: prompts, special tokens, and files that do not fit together.

use serde_json::{Value, json};

use crate::text::encoder;
use crate::text::test_tokenizer::byte_level_json;
use crate::text::{TextError, TextFiles, Tokenizer};

fn load(json: &[u8], config: &Value) -> Result<Tokenizer, TextError> {
    let config = config.to_string();
    let files = TextFiles {
        tokenizer: json,
        config: Some(config.as_bytes()),
        chat_template: None,
    };
    files.load(300).map(|(tokenizer, _)| tokenizer)
}

/// Returns [`byte_level_json`] with a post-processor that puts `<|bos|>` before a text.
fn json_with_bos() -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(&byte_level_json(&[])).unwrap();
    let (bos, text) = (
        json!({"SpecialToken": {"id": "<|bos|>", "type_id": 0}}),
        json!({"Sequence": {"id": "A", "type_id": 0}}),
    );
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
    });
    json.to_string().into_bytes()
}

#[test]
fn both_encoders_share_one_vocabulary() {
    let tokenizer = load(&byte_level_json(&[]), &Value::Null).unwrap();
    let plain = tokenizer.plain.get_model();
    assert!(tokenizer.recognising.get_model().shares_memory_with(plain));
}

#[test]
fn a_prompt_gets_one_bos_and_no_other_special_token() {
    let tokenizer = load(&json_with_bos(), &json!({})).unwrap();
    assert_eq!(tokenizer.encode_prompt("hi").unwrap(), [256, 104, 105]);
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [256]);
    let spelled = tokenizer.encode_prompt("<|bos|>").unwrap();
    assert_eq!(spelled.len(), 8);
    assert_eq!(tokenizer.decode(&spelled, true), "<|bos|>");
    assert_eq!(tokenizer.decode(&spelled, false), "<|bos|><|bos|>");
}

/// The expected tokens come from transformers 5.23, for each tokenizer class named here.
#[test]
fn only_the_post_processor_adds_tokens_to_a_prompt() {
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
            assert_eq!(encode(&json_with_bos()).unwrap(), [256, 104, 105]);
            assert_eq!(encode(&byte_level_json(&[])).unwrap(), [104, 105]);
        }
    }
}

/// The expected ids come from transformers 5.23.
#[test]
fn tokens_of_the_configuration_alone_are_added() {
    let json = byte_level_json(&[]);
    let special = |config: &Value| {
        let tokenizer = load(&json, config).unwrap();
        let texts: Vec<String> = encoder::added_tokens(&tokenizer.recognising)
            .into_iter()
            .filter(|(id, token)| token.special && !(256..258).contains(id))
            .map(|(id, token)| format!("{id}{}", token.content))
            .collect();
        (tokenizer, texts.join(" "))
    };
    let names = json!({
        "unk_token": "<u>", "pad_token": {"content": "<p>"},
        "bos_token": "<b>", "eos_token": "<|eot_id|>",
    });
    assert_eq!(special(&names).1, "258<b> 259<u> 260<p>");
    let more = json!({"pad_token": "<p>", "additional_special_tokens": ["<x>"]});
    assert_eq!(special(&more).1, "258<p> 259<x>");
    let listed = json!({"eos_token": "<x>", "pad_token": "<p>", "added_tokens_decoder": {
        "260": {"content": "<z>", "special": false}, "259": {"content": "<y>", "special": true},
        "258": {"content": "<x>"}, "256": {"content": "<|bos|>", "special": false}}});
    let (tokenizer, texts) = special(&listed);
    assert_eq!(texts, "258<x> 259<y> 261<p>");
    assert!(tokenizer.is_special(256), "tokenizer.json makes it special");
    assert_eq!(tokenizer.encode_recognising("<y>").unwrap(), [259]);
    assert_eq!(tokenizer.encode_prompt("<y>").unwrap(), [60, 121, 62]);
    assert_eq!(tokenizer.token_bytes(258), b"<x>");
}

#[test]
fn a_contradictory_added_tokens_decoder_is_an_error() {
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
fn errors_name_the_file() {
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
    // The library panics on a decoder that is not JSON.
    let broken = String::from_utf8(json.clone()).unwrap();
    let broken = broken.replace(r#""decoder":{"#, r#""decoder":{;"#);
    assert!(error(load(broken.as_bytes(), None, 258)).starts_with("tokenizer.json: "));
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
