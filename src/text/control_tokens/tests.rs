//! Tests that a user's text never becomes a control token, for each kind of tokenizer.

use serde_json::{Value, json};
use sterna_random::Random;

use crate::text::{ChatTemplate, Message, TemplateArguments, TextError, TextFiles, Tokenizer};

const UNK: u32 = 0;
const END: u32 = 1; // `</s>`, special.
const START: u32 = 2; // `<|im_start|>`, not special.
const INST: u32 = 3; // `[INST]`, not special.
const THINK: u32 = 4; // `<think>`, not special; the template writes it.
const TABLE: u32 = 5; // `<table>`, an ordinary added token.
const SPACES: u32 = 6; // Two spaces, an ordinary added token.
const CONTROLS: [u32; 4] = [END, START, INST, THINK];
const ADDED: [&str; 7] = [
    "<unk>",
    "</s>",
    "<|im_start|>",
    "[INST]",
    "<think>",
    "<table>",
    "  ",
];
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.content }}</s>\
    {% endfor %}<|im_start|><think>";

const KINDS: [&str; 6] = [
    "byte-level BPE",
    "BPE with merges",
    "BPE that ignores merges",
    "Unigram",
    "WordPiece",
    "WordLevel",
];

/// Returns a normalizer by its number: several of them make control tokens of harmless text.
fn normalizer(index: usize) -> Value {
    let replace = json!({"type": "Replace", "pattern": {"String": "-"}, "content": ""});
    match index {
        0 => Value::Null,
        1 => json!({"type": "NFKC"}),
        2 => json!({"type": "Lowercase"}),
        3 => replace,
        4 => json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        5 => json!({"type": "Prepend", "prepend": "▁"}),
        _ => json!({"type": "Sequence", "normalizers": [
            {"type": "NFKC"}, {"type": "Lowercase"}, replace]}),
    }
}
const NORMALIZERS: usize = 7;

/// Returns the tokens that the model knows: first the added tokens, then single characters.
fn vocabulary() -> Vec<String> {
    let byte_level = (0x21..0x144).filter_map(char::from_u32);
    let chars = byte_level.chain(['▁', ' ']).map(String::from);
    let merged = ["</", "</s", "he", "##s", "##>"].map(String::from);
    ADDED
        .map(String::from)
        .into_iter()
        .chain(chars)
        .chain(merged)
        .collect()
}

fn model(kind: &str) -> Value {
    let words = vocabulary();
    let ids: Value = words
        .iter()
        .zip(0..)
        .map(|(word, id)| (word.clone(), json!(id)))
        .collect();
    match kind {
        "Unigram" => {
            let scores = words
                .iter()
                .map(|word| json!([word, -10.0 + 0.1 * word.len() as f64]));
            json!({"type": "Unigram", "unk_id": UNK, "vocab": scores.collect::<Vec<_>>()})
        }
        "WordPiece" => json!({"type": "WordPiece", "unk_token": "<unk>", "vocab": ids,
            "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}),
        "WordLevel" => json!({"type": "WordLevel", "unk_token": "<unk>", "vocab": ids}),
        "BPE with merges" => json!({"type": "BPE", "unk_token": "<unk>", "vocab": ids,
            "merges": ["< /", "</ s", "</s >", "h e"]}),
        "BPE that ignores merges" => json!({"type": "BPE", "unk_token": "<unk>", "vocab": ids,
            "ignore_merges": true, "merges": []}),
        _ => json!({"type": "BPE", "vocab": ids, "ignore_merges": true, "merges": []}),
    }
}

fn tokenizer_json(kind: &str, normalizer: Value) -> Value {
    let added = ADDED.iter().zip(0..).map(|(content, id): (_, u32)| {
        json!({"id": id, "content": content, "special": id <= END, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": (START..SPACES).contains(&id)})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false,
        "trim_offsets": true});
    let (pre_tokenizer, decoder) = match kind {
        "byte-level BPE" => (byte_level.clone(), byte_level),
        "Unigram" => (Value::Null, spaces_decoder()),
        _ => (json!({"type": "WhitespaceSplit"}), spaces_decoder()),
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
        "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": pre_tokenizer,
        "post_processor": null, "decoder": decoder, "model": model(kind),
    })
}

fn spaces_decoder() -> Value {
    json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
}

fn load(json: &Value) -> (Tokenizer, ChatTemplate) {
    load_with(json, TEMPLATE)
}

fn load_with(json: &Value, template: &str) -> (Tokenizer, ChatTemplate) {
    let bytes = json.to_string().into_bytes();
    let files = TextFiles {
        tokenizer: &bytes,
        config: None,
        chat_template: Some(template),
        tool_template: None,
    };
    let (tokenizer, template) = files.load(1000).unwrap();
    (tokenizer, template.unwrap())
}

fn controls(tokens: &[u32]) -> Vec<u32> {
    let control = |token: &u32| CONTROLS.contains(token);
    tokens.iter().copied().filter(control).collect()
}

fn none() -> TemplateArguments {
    TemplateArguments::default()
}

fn user(content: &str) -> Message {
    Message {
        role: "user".into(),
        content: content.into(),
        ..Message::default()
    }
}

/// Returns a text of whole, halved and disguised control tokens.
fn hostile_text(random: &mut Random) -> String {
    let parts = [
        "</s>",
        "<",
        "/s>",
        "</",
        "s>",
        "<-/s>",
        "</S>",
        "＜/s＞",
        "＜|im_start|＞",
        "<|im_start|>",
        "<|im_",
        "start|>",
        "[INST]",
        "[inst]",
        "[IN",
        "ST]",
        "<think>",
        "<thi-nk>",
        "<table>",
        "  ",
        " ",
        "\n",
        "he",
        "é",
        "你",
        "-",
        "▁",
        "<unk>",
        "##s>",
        "\u{200d}",
    ];
    (0..random.index(9)).map(|_| random.pick(&parts)).collect()
}

#[test]
fn no_text_has_fewer_tokens_than_its_least_with_any_kind_of_tokenizer() {
    let mut random = Random::from_env();
    for kind in KINDS {
        for index in 0..NORMALIZERS {
            let (tokenizer, _) = load(&tokenizer_json(kind, normalizer(index)));
            let is_bounded = tokenizer.least_tokens(&"h".repeat(50), 1000) > 20;
            let is_known = matches!(kind, "byte-level BPE" | "Unigram");
            assert_eq!(is_bounded, is_known, "{kind}, normalizer {index}");
            for _ in 0..200 {
                let text = hostile_text(&mut random);
                let least = tokenizer.least_tokens(&text, 1000);
                for tokens in [
                    tokenizer.encode_plain(&text).unwrap(),
                    tokenizer.encode_with_controls(&text, false).unwrap(),
                ] {
                    let what = format!("{kind}, normalizer {index}: {text:?} {tokens:?}");
                    assert!(least <= tokens.len(), "{least} tokens: {what}");
                }
            }
        }
    }
}

#[test]
fn user_text_becomes_no_control_token_with_any_kind_of_tokenizer() {
    let mut random = Random::from_env();
    for kind in KINDS {
        for index in 0..NORMALIZERS {
            let (tokenizer, template) = load(&tokenizer_json(kind, normalizer(index)));
            for _ in 0..40 {
                let text = hostile_text(&mut random);
                let what = format!("{kind}, normalizer {index}: {text:?}");
                let prompt = tokenizer.encode_prompt(&text).unwrap();
                assert_eq!(controls(&prompt), [0; 0], "{what}");
                assert_eq!(tokenizer.encode_plain(&text).unwrap(), prompt, "{what}");
                let messages = [user(&text), user(&hostile_text(&mut random))];
                let chat = template
                    .prompt(&tokenizer, &messages, &none())
                    .unwrap()
                    .tokens;
                let own = [START, END, START, END, START, THINK];
                assert_eq!(controls(&chat), own, "{what} {messages:?}");
            }
        }
    }
}

#[test]
fn a_byte_level_text_is_spelled_out_whatever_it_contains() {
    let (tokenizer, _) = load(&tokenizer_json("byte-level BPE", Value::Null));
    let mut random = Random::from_env();
    for _ in 0..1000 {
        let text = hostile_text(&mut random);
        let tokens = tokenizer.encode_prompt(&text).unwrap();
        assert_eq!(tokenizer.decode(&tokens, false), text);
    }
}

#[test]
fn the_text_of_a_control_token_is_split_and_the_text_around_it_is_not() {
    let (tokenizer, _) = load(&tokenizer_json("Unigram", Value::Null));
    let text = |tokens: &[u32]| -> Vec<String> {
        let piece = |token: &u32| String::from_utf8_lossy(tokenizer.token_bytes(*token)).into();
        tokens.iter().map(piece).collect()
    };
    let tokens = tokenizer.encode_prompt("he</s>he").unwrap();
    assert_eq!(text(&tokens), ["he", "</", "s", ">", "he"]);
}

#[test]
fn ordinary_added_tokens_stay_whole() {
    for kind in KINDS {
        let (tokenizer, template) = load(&tokenizer_json(kind, Value::Null));
        let tokens = tokenizer.encode_prompt("<table>  <table>").unwrap();
        assert_eq!(tokens, [TABLE, SPACES, TABLE], "{kind}");
        let chat = template
            .prompt(&tokenizer, &[user("<table>  ")], &none())
            .unwrap()
            .tokens;
        assert_eq!(chat, [START, TABLE, SPACES, END, START, THINK], "{kind}");
    }
}

#[test]
fn an_unknown_word_is_the_unknown_token_but_its_own_text_is_not() {
    let (tokenizer, _) = load(&tokenizer_json("WordLevel", Value::Null));
    assert_eq!(tokenizer.encode_prompt("你好").unwrap(), [UNK]);
    let (tokenizer, _) = load(&tokenizer_json("Unigram", json!({"type": "NFKC"})));
    for text in ["<unk>", "＜unk＞"] {
        let tokens = tokenizer.encode_prompt(text).unwrap();
        assert!(!tokens.contains(&UNK), "{text} {tokens:?}");
    }
}

/// The files about text say nothing of control tokens, but the model's configuration names them.
#[test]
fn the_end_that_only_the_configuration_names_is_a_control_token() {
    for kind in [
        "Unigram",
        "BPE with merges",
        "BPE that ignores merges",
        "WordLevel",
    ] {
        let mut json = tokenizer_json(kind, Value::Null);
        json["added_tokens"] = json!([]);
        let bytes = json.to_string().into_bytes();
        let files = TextFiles {
            tokenizer: &bytes,
            config: None,
            chat_template: Some("{% for m in messages %}{{ m.content }} </s> {% endfor %}"),
            tool_template: None,
        };
        let text = "h </s> </s>";
        let load = |named: &[u32]| files.load_with_named(1000, named).unwrap();
        let (unnamed, _) = load(&[]);
        assert!(
            unnamed.encode_prompt(text).unwrap().contains(&END),
            "{kind}"
        );
        let (tokenizer, template) = load(&[END, START]);
        let prompt = tokenizer.encode_prompt(text).unwrap();
        assert_eq!(controls(&prompt), [0; 0], "{kind}");
        let chat = template.unwrap();
        let chat = chat.prompt(&tokenizer, &[user(text)], &none()).unwrap();
        assert_eq!(controls(&chat.tokens), [END], "{kind}: the template's own");
        let (tokenizer, _) = load(&[SPACES + 1]);
        let exclamation = tokenizer.encode_prompt("!").unwrap();
        assert_eq!(exclamation, [SPACES + 1], "{kind}: no control form");
    }
}

#[test]
fn a_control_token_affects_the_output_only_if_it_is_special() {
    let (tokenizer, _) = load(&tokenizer_json("Unigram", Value::Null));
    assert!(tokenizer.is_special(END));
    assert_eq!(
        tokenizer.decode(&[START, END, THINK], true),
        "<|im_start|><think>"
    );
}

#[test]
fn a_character_that_is_always_a_control_token_is_an_error() {
    let replace = json!({"type": "Replace", "pattern": {"String": "é"}, "content": "</s>"});
    let (tokenizer, template) = load(&tokenizer_json("Unigram", replace));
    let error = tokenizer.encode_prompt("hé").unwrap_err();
    let expected = TextError::BecomesControl {
        text: "é".into(),
        token: "</s>".into(),
    };
    assert_eq!(error, expected);
    assert!(template.prompt(&tokenizer, &[user("hé")], &none()).is_err());
}

#[test]
fn an_added_token_that_the_normalizer_makes_empty_is_refused() {
    let mut json = tokenizer_json("Unigram", normalizer(4));
    json["added_tokens"][6]["normalized"] = true.into();
    let bytes = json.to_string().into_bytes();
    let files = TextFiles {
        tokenizer: &bytes,
        config: None,
        chat_template: None,
        tool_template: None,
    };
    let error = files.load(1000).err().unwrap().to_string();
    assert!(
        error.contains("leaves nothing of the added token"),
        "{error}"
    );
}

#[test]
fn many_control_tokens_take_time_in_proportion() {
    let (tokenizer, _) = load(&tokenizer_json("Unigram", Value::Null));
    let tokens = tokenizer.encode_prompt(&"</s>".repeat(20_000)).unwrap();
    assert_eq!(controls(&tokens), [0; 0]);
    assert!(tokens.len() <= 80_000, "{}", tokens.len());
}

/// The tokenizer of a model with `Metaspace`, and with control tokens that take white space.
fn metaspace(scheme: &str, (lstrip, rstrip): (bool, bool)) -> Value {
    let mut json = tokenizer_json("BPE with merges", Value::Null);
    let space = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme,
        "split": false});
    (json["pre_tokenizer"], json["decoder"]) = (space.clone(), space);
    for token in json["added_tokens"].as_array_mut().unwrap() {
        (token["lstrip"], token["rstrip"]) = (lstrip.into(), rstrip.into());
    }
    json
}

/// Returns the tokens before and behind a message that begins and ends with `Q`, and their control
/// tokens.
fn around(tokens: &[u32], q: u32) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let first = tokens.iter().position(|token| *token == q).unwrap();
    let last = tokens.iter().rposition(|token| *token == q).unwrap();
    let (before, after) = (tokens[..=first].to_vec(), tokens[last..].to_vec());
    (before, after, controls(tokens))
}

#[test]
fn a_quoted_control_token_changes_no_other_message() {
    let template = "{% for message in messages %}<|im_start|>\n{{ message.content }}\n</s> {% \
        endfor %}<|im_start|>\n<think> ";
    let strips = [(false, false), (false, true), (true, false), (true, true)];
    let schemes = ["first", "always", "never"].into_iter();
    for (scheme, strips) in schemes.flat_map(|scheme| strips.map(|strips| (scheme, strips))) {
        let (tokenizer, chat) = load_with(&metaspace(scheme, strips), template);
        let q = *tokenizer.encode_plain("Q").unwrap().last().unwrap();
        for place in 0..3 {
            let around_with = |content: &str| {
                let mut messages = ["he said", " he  had ", "x he"].map(user);
                messages[place] = user(content);
                around(
                    &chat.prompt(&tokenizer, &messages, &none()).unwrap().tokens,
                    q,
                )
            };
            let expected = around_with("QhesheQ");
            for quoted in ["Qhe</s>heQ", "Q<|im_start|>Q", "Qhe </s> heQ"] {
                assert_eq!(around_with(quoted), expected, "{scheme} {strips:?} {place}");
            }
        }
    }
}
