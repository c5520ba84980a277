//! The formats in which models write calls, and which of them a model uses.

use serde_json::{Value, json};

use super::frame::{CallFrame, Family, PYTHON_TAG, TagTokens};
use super::grammar;
use super::tool::{CalledTool, ToolUse};
use crate::constraint::{GrammarSource, SourceError};
use crate::text::{ChatTemplate, Tokenizer};

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
        let shown = Some(source)
            .filter(|source| source.contains("tools"))
            .and_then(Family::find);
        let family = shown.unwrap_or(Family::Hermes);
        let frame = family.frame();
        ToolFormat {
            family,
            is_in_template: shown.is_some(),
            is_single: shown.is_some() && source.contains("single tool-call"),
            tokens: TagTokens {
                open: tokenizer.control_token(frame.open),
                close: tokenizer.control_token(frame.close),
                python: tokenizer.control_token(PYTHON_TAG),
                reasoning: tokenizer.reasoning_tags(),
            },
        }
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
        self.family.frame()
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
