//! Turns text into token ids and token ids into text.
//!
//! Invariant: text that a user wrote never becomes a control token, whichever way the tokenizer
//! would read it. `control_tokens` says which tokens are control tokens.
//!
//! Invariant: every token id that leaves this module is in the model's vocabulary.
//!
//! Invariant: a token sequence has the same text whether it is decoded at once or token by token.

mod bpe;
mod chat_template;
mod control_tokens;
mod detokenizer;
mod encoder;
mod error;
mod reasoning;
#[cfg(test)]
pub(crate) mod test_tokenizer;
mod token_bytes;
mod tokenizer;

use serde_json::Value;

pub use chat_template::{
    ChatPrompt, ChatTemplate, ConversationEnd, Message, TemplateArguments, TemplateValue,
    spaced_json,
};
pub use detokenizer::{Detokenizer, TextDelta, TextOptions};
pub use error::{TemplateError, TextError};
pub use reasoning::{ReasoningSplitter, ReasoningStart, ReasoningTags, SplitText};
pub use tokenizer::{Tokenizer, TokenizerSource};

/// The contents of a checkpoint's files about text.
#[derive(Clone, Copy, Debug)]
pub struct TextFiles<'a> {
    /// `tokenizer.json`.
    pub tokenizer: &'a [u8],
    /// `tokenizer_config.json`.
    pub config: Option<&'a [u8]>,
    /// `chat_template.jinja`. It takes precedence over a template in the configuration.
    pub chat_template: Option<&'a str>,
    /// `additional_chat_templates/tool_use.jinja`, the template of conversations with tools.
    pub tool_template: Option<&'a str>,
}

impl TextFiles<'_> {
    /// Loads the tokenizer and, if the checkpoint has one, the chat template. `vocabulary` is the
    /// width of the model's logits.
    ///
    /// # Errors
    /// If a file is malformed or needs something unsupported. The error names the file.
    pub fn load(&self, vocabulary: u32) -> Result<(Tokenizer, Option<ChatTemplate>), TextError> {
        self.load_with_named(vocabulary, &[])
    }

    /// As [`load`](Self::load). The model's configuration has `named` these tokens as the beginning
    /// and the end of a text. They can be control tokens although no file about text says so.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with_named(
        &self,
        vocabulary: u32,
        named: &[u32],
    ) -> Result<(Tokenizer, Option<ChatTemplate>), TextError> {
        let config: Value = match self.config {
            Some(bytes) => serde_json::from_slice(bytes).map_err(|error| TextError::BadFile {
                file: "tokenizer_config.json",
                why: error.to_string(),
            })?,
            None => Value::Null,
        };
        let template = ChatTemplate::find(&config, self.chat_template, self.tool_template)?;
        let tokenizer = Tokenizer::load(TokenizerSource {
            json: self.tokenizer.to_vec(),
            config,
            chat_template: template.as_ref().map(ChatTemplate::sources),
            vocabulary,
            named: named.to_vec(),
        })?;
        Ok((tokenizer, template))
    }
}
