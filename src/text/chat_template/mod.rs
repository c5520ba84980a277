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
use super::reasoning;
use super::tokenizer::Tokenizer;
use jinja::JinjaTemplate;
use placeholders::Placeholders;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user` or `assistant`. Templates trust it, so it must not be a user's free text.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// The assistant's reasoning before that text, if the client sent it back. Templates call it
    /// `reasoning_content`.
    pub reasoning: Option<String>,
}

impl Message {
    /// Returns the texts that a user can have written.
    fn texts(&self) -> impl Iterator<Item = &str> {
        [Some(&self.content), self.reasoning.as_ref()]
            .into_iter()
            .flatten()
            .map(String::as_str)
    }

    fn to_jinja(&self) -> JinjaValue {
        let (role, content) = (self.role.as_str(), self.content.as_str());
        match &self.reasoning {
            None => context! { role, content },
            Some(reasoning) => context! { role, content, reasoning_content => reasoning.as_str() },
        }
    }
}

/// Variables for the template beside the conversation, such as `enable_thinking`, by name. A
/// template ignores those that it does not know.
pub type TemplateArguments = BTreeMap<String, TemplateValue>;

/// A value of a template's variable.
#[derive(Clone, Debug, PartialEq)]
pub enum TemplateValue {
    /// `true` or `false`.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// A number that is no integer.
    Float(f64),
    /// A text.
    Text(String),
}

impl TemplateValue {
    fn to_jinja(&self) -> JinjaValue {
        match self {
            TemplateValue::Bool(value) => (*value).into(),
            TemplateValue::Integer(value) => (*value).into(),
            TemplateValue::Float(value) => (*value).into(),
            TemplateValue::Text(value) => value.as_str().into(),
        }
    }
}

/// A conversation as the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Whether the template has opened the reasoning of the answer.
    pub opens_reasoning: bool,
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

    /// Renders a conversation up to where the assistant's next message begins. The conversation and
    /// the checkpoint's tokens take precedence over arguments of their names.
    ///
    /// # Errors
    /// If the template rejects the conversation or fails.
    pub fn render(
        &self,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<String, TemplateError> {
        let messages: Vec<JinjaValue> = messages.iter().map(Message::to_jinja).collect();
        let arguments = arguments.iter();
        let arguments = arguments.map(|(name, value)| (name.as_str(), value.to_jinja()));
        let tokens = self.tokens.iter();
        let tokens = tokens.map(|(name, text)| (name.as_str(), text.as_str().into()));
        // A token takes the place of an argument of its name.
        let beside: BTreeMap<&str, JinjaValue> = arguments.chain(tokens).collect();
        let beside = JinjaValue::from_pairs(beside);
        self.template.render(context! {
            messages,
            add_generation_prompt => true,
            tools => (),
            documents => (),
            ..beside
        })
    }

    /// Returns the tokens of a conversation. Nothing is added: the template itself writes the
    /// beginning-of-text token.
    ///
    /// Templates compare the texts of arguments, so these are not hidden from the search for
    /// control tokens. An argument that contains one is an error instead.
    ///
    /// # Errors
    /// If the template rejects the conversation or fails, or if the text cannot be encoded.
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<ChatPrompt, TemplateError> {
        let controls = tokenizer.control_tokens();
        for (name, value) in arguments {
            if matches!(value, TemplateValue::Text(text) if controls.occur_in(text)) {
                return Err(TemplateError::ControlInArgument(name.clone()));
            }
        }
        let rendered = self.render(messages, arguments)?;
        let texts = messages.iter().flat_map(Message::texts);
        let placeholders =
            Placeholders::new(controls.alphabet(), texts).ok_or(TemplateError::NoPlaceholder)?;
        let hidden: Vec<Message> = messages
            .iter()
            .map(|message| Message {
                role: message.role.clone(),
                content: placeholders.hide(&message.content),
                reasoning: message
                    .reasoning
                    .as_deref()
                    .map(|text| placeholders.hide(text)),
            })
            .collect();
        let rendered_hidden = self.render(&hidden, arguments)?;
        Ok(ChatPrompt {
            tokens: self.encode(
                tokenizer,
                messages,
                &placeholders,
                [&rendered, &rendered_hidden],
            )?,
            opens_reasoning: reasoning::is_opened(&rendered_hidden),
        })
    }

    /// Encodes a rendered conversation, given also as rendered with placeholders in the messages.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        placeholders: &Placeholders,
        [rendered, hidden]: [&str; 2],
    ) -> Result<Vec<u32>, TemplateError> {
        let controls = tokenizer.control_tokens();
        // The control tokens that remain are the template's own.
        let marked = placeholders.restore(hidden, &controls.find(hidden));

        let found = controls.find(rendered);
        let only_the_templates_own = if marked.text() == *rendered {
            marked.control_tokens() == found
        } else {
            // The template reads the messages, and behaves differently with placeholders in them.
            let ids = |found: &[FoundToken]| found.iter().map(|one| one.token).collect::<Vec<_>>();
            let clean = !messages
                .iter()
                .flat_map(Message::texts)
                .any(|text| controls.occur_in(text));
            clean && ids(&marked.control_tokens()) == ids(&found)
        };
        if only_the_templates_own {
            let tokens = tokenizer.encode_recognising(rendered);
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
