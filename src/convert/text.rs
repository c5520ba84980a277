//! Compares the text side of two checkpoints: tokenizers and chat templates.

use std::collections::BTreeMap;

use crate::opening::ModelText;
use crate::text::{Message, Tokenizer};

/// Texts in which tokenizers differ.
const TEXTS: [&str; 8] = [
    "The capital of France is Paris.",
    "Numbers: 1, 22, 333, 4444 and 55555; it's we'll DON'T you're",
    "  two  spaces\n\n\tand a tab,\r\n trailing   ",
    "Grüße aus Köln! 你好，世界。 Привет, мир. שלום こんにちは",
    "e\u{301} and \u{e9}, \u{fb01}ne, ﷺ, \u{200d}👩\u{200d}👧 🇩🇪",
    "fn main() { let x = \"<a href='#'>\"; } // snake_case CamelCase",
    "<|eot_id|><|im_start|></s> are no control tokens here",
    "",
];

/// How many tokens are encoded together.
const TOKENS_AT_ONCE: usize = 8;

/// # Errors
/// If a token has another text, or a text or a conversation has other tokens.
pub(super) fn compare(
    expected: &ModelText,
    found: &ModelText,
    vocabulary: usize,
) -> Result<(), String> {
    let (one, other) = (&expected.tokenizer, &found.tokenizer);
    let mut texts: Vec<String> = TEXTS.map(str::to_owned).into();
    let mut words = Vec::new();
    for id in 0..u32::try_from(vocabulary).unwrap_or(u32::MAX) {
        let is_same = one.token_bytes(id) == other.token_bytes(id);
        if !is_same || one.is_special(id) != other.is_special(id) {
            return Err(format!(
                "tokenizer.json: the container cannot hold the token {id} as it is"
            ));
        }
        words.extend(str::from_utf8(one.token_bytes(id)).ok());
    }
    texts.extend(words.chunks(TOKENS_AT_ONCE).map(|words| words.join(" ")));
    for text in &texts {
        let tokens = |tokenizer: &Tokenizer| tokenizer.encode_prompt(text).ok();
        if tokens(one) != tokens(other) {
            return Err(format!(
                "tokenizer.json: in the container the text {text:?} has other tokens"
            ));
        }
    }
    let conversations = [
        &["user"][..],
        &["user", "assistant", "user"],
        &["system", "user"],
    ];
    let of_tools = |served: &ModelText| {
        let template = served.template.as_ref();
        template.and_then(|template| template.tool_source().map(str::to_owned))
    };
    if of_tools(expected) != of_tools(found) {
        return Err("chat template: in the container the one of tools is another".to_owned());
    }
    for (roles, text) in conversations.into_iter().zip(TEXTS) {
        let prompt = |served: &ModelText| {
            let message = |role: &&str| Message {
                role: (*role).to_owned(),
                content: text.to_owned(),
                ..Message::default()
            };
            let messages: Vec<Message> = roles.iter().map(message).collect();
            let (template, no_arguments) = (served.template.as_ref(), BTreeMap::new());
            template.map(|template| {
                template
                    .prompt(&served.tokenizer, &messages, &no_arguments)
                    .ok()
            })
        };
        if prompt(expected) != prompt(found) {
            return Err(format!(
                "chat template: in the container a conversation of {roles:?} has other tokens"
            ));
        }
    }
    Ok(())
}
