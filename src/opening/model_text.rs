//! The text side of a checkpoint: its tokenizer and its chat template.

use std::error::Error;

use crate::checkpoint::{Source, TOOL_TEMPLATE_FILE};
use crate::text::{ChatTemplate, Message, TemplateArguments, TextFiles, Tokenizer};

/// The tokenizer and the chat template that a checkpoint is served with.
pub(crate) struct ModelText {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
}

impl ModelText {
    /// Reads the files of `source`. `vocabulary` is the width of the logits. `named` are the tokens
    /// that the model's configuration names as begin and end of a text.
    ///
    /// # Errors
    /// If a file is missing or malformed, or needs something unsupported.
    pub(crate) fn read(
        source: &Source,
        vocabulary: usize,
        named: &[u32],
    ) -> Result<ModelText, Box<dyn Error>> {
        let name = "tokenizer.json";
        let tokenizer = source.read(name)?;
        let tokenizer = tokenizer.ok_or_else(|| source.missing_file(name))?;
        let config = source.read("tokenizer_config.json")?;
        let chat_template = source.read("chat_template.jinja")?;
        let chat_template = chat_template.as_deref().map(str::from_utf8).transpose();
        let tool_template = source.read(TOOL_TEMPLATE_FILE)?;
        let tool_template = tool_template.as_deref().map(str::from_utf8).transpose();
        let files = TextFiles {
            tokenizer: &tokenizer,
            config: config.as_deref(),
            chat_template: chat_template.map_err(|_| "chat_template.jinja is not valid UTF-8")?,
            tool_template: tool_template
                .map_err(|_| format!("{TOOL_TEMPLATE_FILE} is not valid UTF-8"))?,
        };
        let (tokenizer, template) = files.load_with_named(u32::try_from(vocabulary)?, named)?;
        let text = ModelText {
            tokenizer,
            template,
        };
        text.warm_up();
        Ok(text)
    }

    /// Encodes a conversation and a text. The first time takes two milliseconds longer than the
    /// next, and without this call a user would wait for that. The result does not matter, nor does
    /// a template that rejects the conversation.
    fn warm_up(&self) {
        let text = "Hello, it's 1 warm-up.";
        let message = Message {
            role: "user".into(),
            content: text.into(),
            ..Message::default()
        };
        let none = TemplateArguments::default();
        let template = self.template.as_ref();
        drop(template.map(|template| template.prompt(&self.tokenizer, &[message], &none)));
        drop(self.tokenizer.encode_prompt(text));
    }
}
