//! The formats in which models write calls, and which of them a model uses.

use serde_json::{Value, json};

use super::frame::{CallFrame, TagTokens};
use super::tool::ToolUse;
use super::turn::CalledTool;
use super::{falcon, grammar, hermes, llama};
use crate::constraint::{GrammarSource, SourceError};
use crate::text::{ChatTemplate, Tokenizer};

/// A family of models that writes calls in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Hermes,
    Falcon,
    Llama,
}

/// How a model is told about tools, and how it writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolFormat {
    family: Family,
    /// Whether the chat template writes tools, calls and results itself.
    is_in_template: bool,
    /// Whether the template rejects messages of several calls.
    is_single: bool,
    tokens: TagTokens,
}

impl ToolFormat {
    /// Finds the format of a model. One whose template has no tools, or has them in a format that
    /// the server cannot read, gets the format of Hermes in its system message.
    pub fn find(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> ToolFormat {
        let source = template.map(ChatTemplate::source).unwrap_or_default();
        let has_tools = source.contains("tools");
        let family = match source {
            _ if !has_tools => None,
            _ if falcon::is_in(source) => Some(Family::Falcon),
            _ if hermes::is_in(source) => Some(Family::Hermes),
            _ if llama::is_in(source) => Some(Family::Llama),
            _ => None,
        };
        let format = ToolFormat {
            family: family.unwrap_or(Family::Hermes),
            is_in_template: family.is_some(),
            is_single: family.is_some() && source.contains("single tool-call"),
            tokens: TagTokens::default(),
        };
        let frame = format.frame();
        let tokens = TagTokens {
            open: tokenizer.control_token(frame.open),
            close: tokenizer.control_token(frame.close),
            python: tokenizer.control_token(llama::PYTHON_TAG),
            reasoning: tokenizer.reasoning_tags(),
        };
        ToolFormat { tokens, ..format }
    }

    /// Returns whether the chat template writes tools, calls and results itself.
    pub(super) fn is_in_template(&self) -> bool {
        self.is_in_template
    }

    /// Returns the tokens of the tags around calls.
    pub fn tag_tokens(&self) -> Vec<u32> {
        let tokens = [self.tokens.open, self.tokens.close];
        tokens.into_iter().flatten().collect()
    }

    pub(super) fn frame(&self) -> &'static CallFrame {
        match self.family {
            Family::Hermes => &hermes::FRAME,
            Family::Falcon => &falcon::FRAME,
            Family::Llama => &llama::FRAME,
        }
    }

    /// Returns an earlier call as the template reads it. The template of Falcon prints calls as
    /// they are, so they have its format.
    pub(super) fn call_to_json(&self, call: &CalledTool) -> Value {
        let function = json!({"name": call.name, "arguments": call.arguments});
        match self.family {
            Family::Falcon => function,
            Family::Hermes | Family::Llama => {
                json!({"id": call.id, "type": "function", "function": function})
            }
        }
    }

    /// Returns the grammar of an answer that may or must call tools. `is_opened` says that the
    /// prompt ends inside of reasoning. An answer without calls is in the grammar `otherwise`, if
    /// there is one.
    ///
    /// # Errors
    /// If the tools together are over the budget of a grammar.
    pub fn grammar(
        &self,
        tools: &ToolUse,
        is_opened: bool,
        otherwise: Option<GrammarSource>,
    ) -> Result<GrammarSource, SourceError> {
        let tools = ToolUse {
            is_parallel: tools.is_parallel && !self.is_single,
            ..tools.clone()
        };
        let reasoning = self.tokens.reasoning.filter(|_| !is_opened);
        let has_text = otherwise.is_none();
        let calls = grammar::of_calls(self.frame(), &self.tokens, &tools, reasoning, has_text);
        let source = GrammarSource::calls(calls, otherwise)?;
        Ok(match self.tokens.reasoning {
            Some(tags) if is_opened => source.after_reasoning(tags),
            _ => source,
        })
    }
}
