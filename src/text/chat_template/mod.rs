//! Turns a conversation into a prompt with the checkpoint's own chat template.
//!
//! Invariant: text that a user wrote never becomes a control token, whatever the template does
//! with it.
//!
//! Invariant: a conversation whose messages contain no control tokens gets the tokens of the
//! reference, which renders the whole conversation and encodes the result as one text.

mod earlier_reasoning;
mod ending;
mod jinja;
mod output;
mod placeholders;
mod python;
mod python_methods;
mod python_text;
#[cfg(test)]
mod recorded;
mod syntax;
mod to_json;
mod turn_probes;

use std::collections::BTreeMap;

use minijinja::context;
use minijinja::value::{Serde, Value as JinjaValue};
use serde_json::Value;

use super::control_tokens::{ControlTokens, FoundToken};
use super::encoder::named_texts;
use super::error::{TemplateError, TextError};
use super::reasoning::ReasoningStart;
use super::tokenizer::Tokenizer;
pub use ending::ConversationEnd;
use jinja::JinjaTemplate;
use placeholders::{Placeholders, texts_of};
pub use to_json::spaced_json;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`. Templates trust it, so it must not be a user's
    /// free text.
    pub role: String,
    /// The text of the message.
    pub content: String,
    /// The assistant's reasoning before that text, if the client sent it back. Templates call it
    /// `reasoning_content`.
    pub reasoning: Option<String>,
    /// The calls of tools in the assistant's message, as the template reads them.
    pub tool_calls: Vec<Value>,
    /// The id of the call whose result this is, if the role is `tool`.
    pub tool_call_id: Option<String>,
}

impl Message {
    /// Adds the texts that a user can have written.
    fn add_texts<'a>(&'a self, texts: &mut Vec<&'a str>) {
        let own = [self.reasoning.as_ref(), self.tool_call_id.as_ref()];
        texts.push(&self.content);
        texts.extend(own.into_iter().flatten().map(String::as_str));
        self.tool_calls
            .iter()
            .for_each(|call| texts_of(call, texts));
    }

    fn hidden(&self, placeholders: &Placeholders) -> Message {
        let hide = |text: &String| placeholders.hide(text);
        let calls = self.tool_calls.iter();
        Message {
            role: self.role.clone(),
            content: hide(&self.content),
            reasoning: self.reasoning.as_ref().map(hide),
            tool_calls: calls.map(|call| placeholders.hide_json(call)).collect(),
            tool_call_id: self.tool_call_id.as_ref().map(hide),
        }
    }

    /// Returns the message with the fields that it has: templates look whether there are calls.
    fn to_jinja(&self) -> JinjaValue {
        let calls =
            (!self.tool_calls.is_empty()).then(|| JinjaValue::from(Serde(&self.tool_calls)));
        let fields = [
            ("role", Some(self.role.as_str().into())),
            ("content", Some(self.content.as_str().into())),
            (
                "reasoning_content",
                self.reasoning.as_deref().map(JinjaValue::from),
            ),
            ("tool_calls", calls),
            (
                "tool_call_id",
                self.tool_call_id.as_deref().map(JinjaValue::from),
            ),
        ];
        let given = fields
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        JinjaValue::from_pairs(given)
    }
}

/// What a chat template renders.
#[derive(Clone, Copy)]
struct Rendering<'a> {
    end: ConversationEnd,
    messages: &'a [Message],
    tools: &'a [Value],
    arguments: &'a TemplateArguments,
}

impl<'a> Rendering<'a> {
    /// Returns the texts that a user can have written.
    fn texts(&self) -> Vec<&'a str> {
        let mut texts = Vec::new();
        self.messages
            .iter()
            .for_each(|message| message.add_texts(&mut texts));
        self.tools
            .iter()
            .for_each(|tool| texts_of(tool, &mut texts));
        texts
    }
}

/// Variables for the template beside the conversation, such as `enable_thinking`, by name. A
/// template ignores variables that it does not know.
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
    /// Where the reasoning of the answer begins.
    pub reasoning: ReasoningStart,
}

/// A checkpoint's chat template.
pub struct ChatTemplate {
    default: NamedTemplate,
    /// The template of conversations with tools, if they have one of their own.
    tool_use: Option<NamedTemplate>,
    has_system_turns: bool,
    has_user_turns_in_a_row: bool,
    tokens: BTreeMap<String, String>, // `bos_token` and others that templates name.
}

/// One of the templates of a checkpoint.
struct NamedTemplate {
    template: JinjaTemplate,
    source: String,
}

impl NamedTemplate {
    fn compile(file: &'static str, source: &str) -> Result<NamedTemplate, TextError> {
        let template = JinjaTemplate::compile(source).map_err(|error| TextError::BadFile {
            file,
            why: format!("chat template: {error:#}"),
        })?;
        Ok(NamedTemplate {
            template,
            source: source.to_owned(),
        })
    }
}

/// The file of a template of conversations with tools.
pub(super) const TOOL_FILE: &str = "additional_chat_templates/tool_use.jinja";

impl ChatTemplate {
    /// Finds and compiles the templates of a checkpoint, if it has one. `file` and `tool_file` take
    /// precedence over the `chat_template` of the configuration. That field is one template or a
    /// list of named ones. As in `transformers`, `tool_use` is for conversations with tools, and
    /// `default` for all others.
    ///
    /// # Errors
    /// If a template does not compile.
    pub fn find(
        config: &Value,
        file: Option<&str>,
        tool_file: Option<&str>,
    ) -> Result<Option<ChatTemplate>, TextError> {
        let listed = |name: &str| match &config["chat_template"] {
            Value::Array(named) => named
                .iter()
                .find(|one| one["name"] == name)
                .and_then(|one| one["template"].as_str()),
            one => one.as_str().filter(|_| name == "default"),
        };
        let compile = |name: &'static str, file: Option<&str>, listed: Option<&str>| {
            let source = file.map(|source| (name, source));
            let source = source.or_else(|| Some(("tokenizer_config.json", listed?)));
            source
                .map(|(file, source)| NamedTemplate::compile(file, source))
                .transpose()
        };
        let default = compile("chat_template.jinja", file, listed("default"))?;
        // A file replaces the whole list.
        let of_list = listed("tool_use").filter(|_| file.is_none());
        let tool_use = compile(TOOL_FILE, tool_file, of_list)?;
        Ok(default.map(|default| {
            let template = ChatTemplate {
                default,
                tool_use,
                has_system_turns: false,
                has_user_turns_in_a_row: false,
                tokens: named_texts(config),
            };
            ChatTemplate {
                has_system_turns: turn_probes::writes_system_turns(&template),
                has_user_turns_in_a_row: turn_probes::writes_users_in_a_row(&template),
                ..template
            }
        }))
    }

    /// Returns whether the template can write a system message inside of a conversation.
    pub fn has_system_turns(&self) -> bool {
        self.has_system_turns
    }

    /// Returns whether the template can write messages of the user that follow each other.
    pub fn has_user_turns_in_a_row(&self) -> bool {
        self.has_user_turns_in_a_row
    }

    /// Returns the source of the template of conversations without tools.
    pub fn source(&self) -> &str {
        &self.default.source
    }

    /// Returns the source of the template of conversations with tools, if they have one of their
    /// own.
    pub fn tool_source(&self) -> Option<&str> {
        self.tool_use.as_ref().map(|named| named.source.as_str())
    }

    /// Returns the sources of all templates as one text.
    pub(super) fn sources(&self) -> String {
        format!(
            "{}\n{}",
            self.source(),
            self.tool_source().unwrap_or_default()
        )
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
        self.render_until(Rendering {
            end: ConversationEnd::NextMessage,
            messages,
            tools: &[],
            arguments,
        })
    }

    /// As [`render`](Self::render), with tools that the model may call.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[Value],
    ) -> Result<String, TemplateError> {
        self.render_until(Rendering {
            end: ConversationEnd::NextMessage,
            messages,
            tools,
            arguments: &TemplateArguments::new(),
        })
    }

    /// Renders a conversation up to its end.
    fn render_until(&self, conversation: Rendering<'_>) -> Result<String, TemplateError> {
        let Rendering {
            end,
            messages,
            tools,
            arguments,
        } = conversation;
        let last = messages.last().map_or("", |last| last.content.as_str());
        let messages: Vec<JinjaValue> = messages.iter().map(Message::to_jinja).collect();
        // A token takes the place of an argument of its name.
        let mut beside: BTreeMap<&str, JinjaValue> = BTreeMap::new();
        for (name, value) in arguments {
            beside.insert(name, value.to_jinja());
        }
        for (name, text) in &self.tokens {
            beside.insert(name, text.as_str().into());
        }
        let beside = JinjaValue::from_pairs(beside);
        let tools_value = (!tools.is_empty()).then(|| JinjaValue::from(Serde(tools)));
        let named = match &self.tool_use {
            Some(own) if !tools.is_empty() => own,
            _ => &self.default,
        };
        let rendered = named.template.render(context! {
            messages,
            add_generation_prompt => end.opens_next_message(),
            tools => tools_value,
            documents => (),
            ..beside
        })?;
        end.cut(rendered, last).ok_or(TemplateError::NoFinalMessage)
    }

    /// Returns the tokens of a conversation up to where the assistant's next message begins.
    ///
    /// # Errors
    /// As [`prompt_until`](Self::prompt_until).
    pub fn prompt(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<ChatPrompt, TemplateError> {
        self.prompt_until(ConversationEnd::NextMessage, tokenizer, messages, arguments)
    }

    /// Returns the tokens of a conversation up to `end`. Nothing is added: the template itself
    /// writes the beginning-of-text token.
    ///
    /// Templates compare the texts of arguments, so these are not hidden from the search for
    /// control tokens. An argument that contains one is an error instead.
    ///
    /// # Errors
    /// If the template rejects the conversation or fails, if it does not write the final message
    /// that is to be continued, or if the text cannot be encoded.
    pub fn prompt_until(
        &self,
        end: ConversationEnd,
        tokenizer: &Tokenizer,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<ChatPrompt, TemplateError> {
        self.prompt_with_tools(end, tokenizer, messages, &[], arguments)
    }

    /// As [`prompt_until`](Self::prompt_until), with tools that the model may call: an object for
    /// each, as the template reads it. Without tools, the template sees none.
    ///
    /// # Errors
    /// As [`prompt_until`](Self::prompt_until).
    pub fn prompt_with_tools(
        &self,
        end: ConversationEnd,
        tokenizer: &Tokenizer,
        messages: &[Message],
        tools: &[Value],
        arguments: &TemplateArguments,
    ) -> Result<ChatPrompt, TemplateError> {
        let controls = tokenizer.control_tokens();
        for (name, value) in arguments {
            if matches!(value, TemplateValue::Text(text) if controls.occur_in(text)) {
                return Err(TemplateError::ControlInArgument(name.clone()));
            }
        }
        let conversation = Rendering {
            end,
            messages,
            tools,
            arguments,
        };
        let rendered = self.render_until(conversation)?;
        tokenizer
            .check_length(&rendered)
            .map_err(TemplateError::Text)?;
        let texts = conversation.texts();
        let placeholders = Placeholders::new(controls.alphabet(), texts.iter().copied())
            .ok_or(TemplateError::NoPlaceholder)?;
        let rendered_hidden =
            self.render_hidden(conversation, &placeholders, controls, &rendered)?;
        Ok(ChatPrompt {
            tokens: self.encode(
                tokenizer,
                &texts,
                &placeholders,
                [&rendered, &rendered_hidden],
            )?,
            reasoning: match ReasoningStart::of(&rendered_hidden) {
                ReasoningStart::Possible if !end.opens_next_message() => ReasoningStart::Over,
                start => start,
            },
        })
    }

    /// Renders a conversation with placeholders in its texts. If the template looks for tags of
    /// reasoning, which placeholders hide, the reasoning is taken out of the messages before. This
    /// is done in the way that makes most control tokens of `rendered` the template's own.
    fn render_hidden(
        &self,
        conversation: Rendering<'_>,
        placeholders: &Placeholders,
        controls: &ControlTokens,
        rendered: &str,
    ) -> Result<String, TemplateError> {
        let tools = conversation.tools.iter();
        let tools: Vec<Value> = tools.map(|tool| placeholders.hide_json(tool)).collect();
        let render = |messages: &[Message]| {
            let messages = messages.iter().map(|message| message.hidden(placeholders));
            self.render_until(Rendering {
                messages: &messages.collect::<Vec<_>>(),
                tools: &tools,
                ..conversation
            })
        };
        let own_controls = |hidden: &str| {
            let marked = placeholders.restore(hidden, &controls.find(hidden));
            (marked.text() == rendered).then(|| marked.control_tokens().len())
        };
        let mut best = render(conversation.messages)?;
        let (mut most, all) = (own_controls(&best), controls.find(rendered).len());
        for split in earlier_reasoning::splits(conversation.messages) {
            if most == Some(all) {
                break;
            }
            let Ok(hidden) = render(&split) else { continue };
            let count = own_controls(&hidden);
            if count > most {
                (best, most) = (hidden, count);
            }
        }
        Ok(best)
    }

    /// Encodes a rendered conversation, given also as rendered with placeholders in the messages.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        texts: &[&str],
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
            let clean = !texts.iter().any(|text| controls.occur_in(text));
            clean && ids(&marked.control_tokens()) == ids(&found)
        };
        if only_the_templates_own {
            let tokens = tokenizer
                .encode_recognising(rendered)
                .map_err(TemplateError::Text)?;
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
