//! The tokenizers and chat templates of checkpoints.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use sterna::checkpoint::{ModelConfig, Source, TOOL_TEMPLATE_FILE};
use sterna::text::{ChatTemplate, TextFiles, Tokenizer};

/// Returns the tokenizer of a checkpoint, and its chat template if it has one.
pub(crate) fn text_of(source: &Source) -> (Tokenizer, Option<ChatTemplate>) {
    let vocab = ModelConfig::read(source).unwrap().vocab;
    let tokenizer = source.read("tokenizer.json").unwrap().unwrap();
    let config = source.read("tokenizer_config.json").unwrap();
    let template = source.read("chat_template.jinja").unwrap();
    let tool_template = source.read(TOOL_TEMPLATE_FILE).unwrap();
    let [template, tool_template] = [&template, &tool_template].map(|template| {
        let bytes = template.as_deref();
        bytes.map(|bytes| str::from_utf8(bytes).unwrap())
    });
    let files = TextFiles {
        tokenizer: &tokenizer,
        config: config.as_deref(),
        chat_template: template,
        tool_template,
    };
    files.load(u32::try_from(vocab).unwrap()).unwrap()
}
