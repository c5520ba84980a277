//! Encodes a user's text, alone and through a chat template. The first byte chooses one of several
//! kinds of tokenizers.

use std::sync::LazyLock;

use sterna::text::{ChatTemplate, Message, TemplateArguments, TextFiles, Tokenizer};

/// The control tokens of the files: `</s>`, `<|im_start|>`, `[INST]` and `<think>`.
const CONTROLS: [u32; 4] = [1, 2, 3, 4];

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.content | trim }}</s>\
    {% endfor %}<|im_start|><think>";

const FILES: [&[u8]; 6] = [
    include_bytes!("../corpus/tokenizer_json/byte_level_bpe.json"),
    include_bytes!("../corpus/tokenizer_json/bpe_with_merges.json"),
    include_bytes!("../corpus/tokenizer_json/bpe_that_ignores_merges.json"),
    include_bytes!("../corpus/tokenizer_json/unigram.json"),
    include_bytes!("../corpus/tokenizer_json/word_piece.json"),
    include_bytes!("../corpus/tokenizer_json/word_level.json"),
];

static TOKENIZERS: LazyLock<Vec<(Tokenizer, ChatTemplate)>> = LazyLock::new(|| {
    let load = |tokenizer| {
        let files = TextFiles {
            tokenizer,
            config: None,
            chat_template: Some(TEMPLATE),
            tool_template: None,
        };
        let (tokenizer, template) = files.load(1000).expect("a valid file");
        (tokenizer, template.expect("a template"))
    };
    FILES.map(load).into()
});

/// Checks that no control token results from the text, and that bytes spell it exactly.
pub fn check(data: &[u8]) {
    let Some((&kind, text)) = data.split_first() else {
        return;
    };
    let index = usize::from(kind) % FILES.len();
    let (tokenizer, template) = &TOKENIZERS[index];
    let text = String::from_utf8_lossy(text);
    let (first, second) = text.split_once('\0').unwrap_or((&text, ""));
    let message = |content: &str| Message {
        role: "user".into(),
        content: content.into(),
        ..Message::default()
    };
    let messages = [message(first), message(second)];
    let tokens = tokenizer.encode_prompt(first);
    let tokens = tokens.expect("every text has tokens");
    assert!(
        tokens.iter().all(|token| !CONTROLS.contains(token)),
        "{index}: {tokens:?}"
    );
    if index == 0 {
        assert_eq!(tokenizer.decode(&tokens, false), first);
    }
    let prompt = template.prompt(tokenizer, &messages, &TemplateArguments::default());
    let mut prompt = prompt.expect("every text has a prompt").tokens;
    prompt.retain(|token| CONTROLS.contains(token));
    assert_eq!(prompt, [2, 1, 2, 1, 2, 4], "{index}: {messages:?}");
}
