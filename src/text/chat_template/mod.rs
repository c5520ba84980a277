//! Turns a conversation into a prompt with the checkpoint's own chat template.
//!
//! Invariant: text that a user wrote never becomes a control token, whatever the template does
//! with it.
//!
//! Invariant: a conversation whose messages contain no control tokens gets the tokens of the
//! reference, which renders the whole conversation and encodes the result as one text.

mod byte_budget;
mod constants;
mod guarded;
mod jinja;
mod placeholders;

use std::collections::BTreeMap;

use minijinja::context;
use minijinja::value::Value as JinjaValue;
use serde_json::Value;

use super::control_tokens::FoundToken;
use super::encoder::token_text;
use super::error::{TemplateError, TextError};
use super::tokenizer::Tokenizer;
use jinja::JinjaTemplate;
use placeholders::Placeholders;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`. Templates trust it, so it must not be a user's free text.
    pub role: String,
    /// The text of the message.
    pub content: String,
}

/// A checkpoint's chat template.
pub struct ChatTemplate {
    template: JinjaTemplate,
    source: String,
    tokens: BTreeMap<String, String>, // `bos_token` and others that templates name.
}

impl ChatTemplate {
    /// Finds and compiles the template of a checkpoint, if it has one. `file` takes precedence over
    /// the `chat_template` of the configuration. That field is one template or a list of named
    /// ones, of which `default` is used.
    ///
    /// # Errors
    /// If the template does not compile.
    pub fn find(config: &Value, file: Option<&str>) -> Result<Option<ChatTemplate>, TextError> {
        let inline = match &config["chat_template"] {
            Value::Array(named) => named
                .iter()
                .find(|one| one["name"] == "default")
                .and_then(|one| one["template"].as_str()),
            one => one.as_str(),
        };
        let (name, source) = match (file, inline) {
            (Some(source), _) => ("chat_template.jinja", source),
            (None, Some(source)) => ("tokenizer_config.json", source),
            (None, None) => return Ok(None),
        };
        let template = JinjaTemplate::compile(source).map_err(|error| TextError::BadFile {
            file: name,
            why: format!("chat template: {error:#}"),
        })?;
        let tokens = config
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(key, _)| key.ends_with("_token"))
            .filter_map(|(key, value)| Some((key.clone(), token_text(value)?.to_owned())))
            .collect();
        Ok(Some(ChatTemplate {
            template,
            source: source.to_owned(),
            tokens,
        }))
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation up to where the assistant's next message begins.
    ///
    /// # Errors
    /// If the template rejects the conversation or fails.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let messages: Vec<JinjaValue> = messages
            .iter()
            .map(|message| {
                context! { role => message.role.as_str(), content => message.content.as_str() }
            })
            .collect();
        let tokens = JinjaValue::from_pairs(
            self.tokens
                .iter()
                .map(|(name, text)| (name.as_str(), text.as_str())),
        );
        self.template.render(context! {
            messages,
            add_generation_prompt => true,
            tools => (),
            documents => (),
            ..tokens
        })
    }

    /// Returns the tokens of a conversation. Nothing is added: the template itself writes the
    /// beginning-of-text token.
    ///
    /// # Errors
    /// If the template rejects the conversation or fails, or if the text cannot be encoded.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
    ) -> Result<Vec<u32>, TemplateError> {
        let rendered = self.render(messages)?;
        let controls = tokenizer.control_tokens();
        let contents = messages.iter().map(|message| message.content.as_str());
        let placeholders =
            Placeholders::new(controls.alphabet(), contents).ok_or(TemplateError::NoPlaceholder)?;
        let hidden: Vec<Message> = messages
            .iter()
            .map(|message| Message {
                role: message.role.clone(),
                content: placeholders.hide(&message.content),
            })
            .collect();
        let rendered_hidden = self.render(&hidden)?;
        // The control tokens that remain are the template's own.
        let marked = placeholders.restore(&rendered_hidden, &controls.find(&rendered_hidden));

        let found = controls.find(&rendered);
        let only_the_templates_own = if marked.text() == rendered {
            marked.control_tokens() == found
        } else {
            // The template reads the messages, and behaves differently with placeholders in them.
            let ids = |found: &[FoundToken]| found.iter().map(|one| one.token).collect::<Vec<_>>();
            let clean = !messages
                .iter()
                .any(|message| controls.occur_in(&message.content));
            clean && ids(&marked.control_tokens()) == ids(&found)
        };
        if only_the_templates_own {
            let tokens = tokenizer.encode_recognising(&rendered);
            let tokens = tokens.map_err(TemplateError::Text)?;
            // The tokenizer's normalizer and model can make more control tokens of the text.
            let became = tokens.iter().filter(|token| controls.contains(**token));
            if became.eq(found.iter().map(|control| &control.token)) {
                return Ok(tokens);
            }
        }
        marked.encode(tokenizer).map_err(TemplateError::Text)
    }
}

#[cfg(test)]
mod tests;
