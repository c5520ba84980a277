//! Loads a tokenizer from a stranger, and encodes a text with it. Another file may follow after a
//! zero byte: the `tokenizer_config.json`.

use sterna::text::TextFiles;

/// Checks that a tokenizer loads or is refused, and that its tokens are in the vocabulary.
pub fn check(data: &[u8]) {
    let end = data
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(data.len());
    let files = TextFiles {
        tokenizer: &data[..end],
        config: data.get(end + 1..),
        chat_template: None,
        tool_template: None,
    };
    let Ok((tokenizer, _)) = files.load(1000) else {
        return;
    };
    for text in [
        "",
        "Hello </s> you, [INST] é 你好 \u{200d}  <|im_start|>",
        "\n\n  x",
    ] {
        if let Ok(tokens) = tokenizer.encode_prompt(text) {
            assert!(tokens.iter().all(|token| *token < 1000), "{tokens:?}");
            drop(tokenizer.decode(&tokens, true));
        }
    }
}
