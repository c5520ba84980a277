//! Tests of a tokenizer: prompts, special tokens, and files that do not fit together.

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use sterna_random::Random;

use crate::text::encoder;
use crate::text::test_tokenizer::byte_level_json;
use crate::text::{TextError, TextFiles, Tokenizer};

fn load(json: &[u8], config: &Value) -> Result<Tokenizer, TextError> {
    let config = config.to_string();
    let files = TextFiles {
        tokenizer: json,
        config: Some(config.as_bytes()),
        chat_template: None,
        tool_template: None,
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
            tool_template: None,
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

/// The folder of a tokenizer of each kind that real models have: words of a regular expression,
/// words of punctuation and digits, and SentencePiece with and without a space before a text.
const REAL: [(&str, &str); 5] = [
    ("words", "src/demo"),
    ("digits", "tests/fixtures/bitnet-packed"),
    ("punctuation", "tests/fixtures/llama-packed"),
    ("spaces", "tests/fixtures/embedding-gemma3"),
    ("prefix", "tests/fixtures/llama-masters-rms-norm"),
];
const VOCABULARY: u32 = 4096;

/// Returns the `tokenizer.json` of a real kind by its place in `REAL`.
fn real(kind: usize) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(REAL[kind].1);
    std::fs::read(folder.join("tokenizer.json")).unwrap()
}

/// Loads a tokenizer with a further token for `longest`.
fn load_with_long(json: &[u8], longest: &str) -> Tokenizer {
    let mut json: Value = serde_json::from_slice(json).unwrap();
    json["model"]["vocab"][longest] = json!(VOCABULARY - 1);
    TextFiles {
        tokenizer: json.to_string().as_bytes(),
        config: None,
        chat_template: None,
        tool_template: None,
    }
    .load(VOCABULARY)
    .unwrap()
    .0
}

fn random_text(random: &mut Random) -> String {
    let parts = [
        " the",
        "The",
        " a",
        "ing",
        "1",
        "23",
        "4567",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".",
        "!!",
        "'s",
        "é",
        "e\u{301}",
        "你好",
        "🦀",
        "\u{200d}",
        "<s>",
        "<|eot_id|>",
        "▁",
        "x",
        "Q",
        "#",
        "_",
        "==",
    ];
    (0..random.index(60)).map(|_| random.pick(&parts)).collect()
}

#[test]
fn no_text_has_fewer_tokens_than_its_least() {
    let mut random = Random::from_env();
    for (place, (kind, _)) in REAL.into_iter().enumerate() {
        let json = real(place);
        let tokenizer = load_with_long(&json, "never made of a text, and longer than all others");
        for _ in 0..1000 {
            let text = random_text(&mut random);
            let least = tokenizer.least_tokens(&text, 100_000);
            for tokens in [
                tokenizer.encode_plain(&text).unwrap(),
                tokenizer.encode_with_controls(&text, false).unwrap(),
            ] {
                assert!(least <= tokens.len(), "{kind}: {least} {text:?} {tokens:?}");
            }
        }
        for text in [
            "7".repeat(3000),
            "how is a lake made? ".repeat(200),
            "é".repeat(4000),
        ] {
            let tokens = tokenizer.encode_plain(&text).unwrap().len();
            let least = tokenizer.least_tokens(&text, 100_000);
            assert!(
                least <= tokens && tokens <= least * 2,
                "{kind}: {least} {tokens}"
            );
        }
    }
}

/// Before, only a text that had too many tokens even of the longest kind was not encoded.
#[test]
fn a_text_is_refused_as_soon_as_it_is_too_long() {
    let context = 100;
    for (place, (kind, _)) in REAL.into_iter().enumerate() {
        let json = real(place);
        for longest in ["x".repeat(700), "7".repeat(700)] {
            let tokenizer = load_with_long(&json, &longest).with_context(context);
            for text in ["7".repeat(100_000), "how is a lake made? ".repeat(5_000)] {
                let limit = 2 * context as usize;
                let refused = TextError::TooLong {
                    bytes: text.len(),
                    min_tokens: limit + 1,
                    context,
                };
                assert_eq!(
                    tokenizer.encode_prompt(&text),
                    Err(refused.clone()),
                    "{kind}"
                );
                assert_eq!(
                    tokenizer.encode_plain(&text),
                    Err(refused.clone()),
                    "{kind}"
                );
                let recognised = tokenizer.encode_with_controls(&text, true);
                assert_eq!(recognised, Err(refused), "{kind}");
                assert!(tokenizer.encode_plain(&text[..limit]).is_ok());
            }
        }
    }
}

/// Loads a tokenizer whose file `change` changes.
fn load_changed(json: &[u8], change: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json: Value = serde_json::from_slice(json).unwrap();
    change(&mut json);
    load_with_long(json.to_string().as_bytes(), "never made of a text")
}

/// Before, one such token in a text made all of it free except its ASCII characters.
#[test]
fn a_token_that_strips_makes_only_white_space_free() {
    for (place, (kind, _)) in REAL.into_iter().enumerate() {
        let json = real(place);
        let tokenizer = load_changed(&json, |json| {
            let token = json!({"id": 4090, "content": "<mask>", "single_word": false,
                "lstrip": true, "rstrip": true, "normalized": false, "special": true});
            let tokens = json["added_tokens"].as_array_mut().unwrap();
            tokens.push(token);
        });
        let least = |text: &str| tokenizer.least_tokens(text, 100_000);
        let tokens = |text: &str| tokenizer.encode_recognising(text).unwrap().len();
        for text in [
            format!("<mask>{}<mask>", "\u{3000}".repeat(2000)),
            format!("x{}<mask>", " \u{a0}\n\u{2003}\t".repeat(500)),
            format!("<mask>{}", "你好".repeat(500)),
        ] {
            let (least, tokens) = (least(&text), tokens(&text));
            assert!(least <= tokens, "{kind}: {least} {tokens}");
        }
        assert!(
            least(&format!("<mask>{}", "你好".repeat(500))) > 900,
            "{kind}"
        );
    }
}

/// Before, this token counted as one that is never made, because two spaces become one token.
#[test]
fn a_long_token_counts_if_a_text_makes_it_without_its_space() {
    let word = "abcdefghijklmnopqrstuvwxyz";
    let prefix = real(4);
    let tokenizer = load_changed(&prefix, |json| {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        let mut add = |token: String| {
            let next = 2000 + vocab.len();
            vocab.entry(token).or_insert(json!(next));
        };
        let mut merges = vec![json!(["▁", "▁"])];
        add("▁▁".into());
        for end in 0..word.len() {
            let (start, letter) = (format!("▁{}", &word[..end]), &word[end..=end]);
            merges.push(json!([start, letter]));
            add(letter.into());
            add(start + letter);
        }
        json["model"]["merges"] = merges.into();
    });
    let text = [word; 100].join(" ");
    let tokens = tokenizer.encode_plain(&text).unwrap();
    assert_eq!(tokens.len(), 100);
    assert!(tokenizer.least_tokens(&text, 100_000) <= 100);
}

/// Before, such a space counted only for tokenizers that mark spaces.
#[test]
fn a_space_that_a_byte_level_tokenizer_adds_is_no_part_of_a_text() {
    let tokenizer = load_changed(&byte_level_json(&[]), |json| {
        json["pre_tokenizer"]["add_prefix_space"] = true.into();
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        vocab.extend([
            ("Ġa".to_owned(), json!(300)),
            ("Ġab".to_owned(), json!(301)),
        ]);
        json["model"]["merges"] = json!([["Ġ", "a"], ["Ġa", "b"]]);
    });
    let text = "ab<|eot_id|>".repeat(10);
    let tokens = tokenizer.encode_recognising(&text).unwrap();
    assert_eq!(tokens.len(), 20);
    assert!(tokenizer.least_tokens(&text, 100_000) <= 20);
}

/// Before, each byte of a run took as long as the longest run in the vocabulary.
#[test]
fn a_run_of_spaces_is_read_as_fast_as_words() {
    let words = real(0);
    let tokenizer = load_changed(&words, |json| {
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        vocab.extend((2..=128).map(|len| ("Ġ".repeat(len), json!(3000 + len))));
        json["model"]["ignore_merges"] = true.into(); // So each run is a token.
    });
    let time = |text: &str| {
        let once = |_| {
            let began = Instant::now();
            assert!((1000..100_000).contains(&tokenizer.least_tokens(text, 1_000_000)));
            began.elapsed()
        };
        (0..3).map(once).min().unwrap()
    };
    let of_words = time(&"how is a lake made? ".repeat(10_000));
    let of_spaces = time(&" ".repeat(200_000));
    println!("200 KB of words: {of_words:?}; of spaces: {of_spaces:?}");
    assert!(of_spaces < 8 * of_words, "{of_spaces:?} {of_words:?}");
}
