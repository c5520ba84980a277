//! The formats in which models read tools and write calls, and which of them a model uses.
//!
//! Invariant: a template that prints tools itself is used as it is. The server describes tools in
//! its own words only to a model whose template prints none, or if a request forces a call in a
//! format that the server cannot read.

use serde_json::{Value, json};

use super::frame::{CallFrame, Family, PYTHON_TAG, TagTokens};
use super::grammar;
use super::printing::Printing;
use super::tool::{CalledTool, ToolChoice, ToolUse};
use crate::constraint::{GrammarSource, SourceError};
use crate::text::{ChatTemplate, Tokenizer};

/// How a model is told about tools, and how it writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolFormat {
    /// What the template prints if the conversation has tools, and if it has none.
    with_tools: Printing,
    without_tools: Printing,
    /// The format that the template shows, if the server can read it.
    shown: Option<CallFormat>,
    /// The format that the server describes itself.
    own: CallFormat,
}

/// The format of the calls in an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFormat {
    family: Family,
    /// Whether the template rejects messages of several calls.
    is_single: bool,
    tokens: TagTokens,
}

impl ToolFormat {
    /// Finds the format of a model.
    pub fn find(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> ToolFormat {
        let with_tools = template.map(|template| Printing::find(template, true));
        let without_tools = template.map(|template| Printing::find(template, false));
        let source = template.map(|one| one.tool_source().unwrap_or(one.source()));
        let source = source.unwrap_or_default();
        let family = Family::find(source);
        ToolFormat {
            with_tools: with_tools.unwrap_or_default(),
            without_tools: without_tools.unwrap_or_default(),
            shown: family.map(|family| CallFormat {
                is_single: source.contains("single tool-call"),
                ..CallFormat::new(family, tokenizer)
            }),
            own: CallFormat::new(Family::Hermes, tokenizer),
        }
    }

    /// Returns the format of the calls in an answer, if the server can read them. Otherwise a call
    /// is text.
    pub fn of_answer(&self, choice: ToolChoice) -> Option<&CallFormat> {
        match self.describes_own(choice) {
            true => Some(&self.own),
            false => self.shown.as_ref(),
        }
    }

    /// Returns whether the server describes the tools in its own words.
    fn describes_own(&self, choice: ToolChoice) -> bool {
        let is_forced = choice != ToolChoice::Auto;
        !self.with_tools.tools || (self.shown.is_none() && is_forced)
    }

    /// Returns what the template prints of a conversation. If the conversation has tools, `choice`
    /// says how they may be called.
    pub(super) fn printing(&self, choice: Option<ToolChoice>) -> Printing {
        match choice {
            None => self.without_tools,
            // Otherwise the model would see calls in two formats.
            Some(choice) if self.describes_own(choice) => Printing::default(),
            Some(_) => self.with_tools,
        }
    }

    /// Returns an earlier call as the template reads it. The template of Falcon prints calls as
    /// they are, so they have its format.
    pub(super) fn call_to_json(&self, call: &CalledTool, printing: Printing) -> Value {
        let arguments = printing.arguments(&call.arguments);
        let function = json!({"name": call.name, "arguments": arguments});
        match &self.shown {
            Some(shown) if shown.family == Family::Falcon => function,
            _ => json!({"id": printing.id(&call.id), "type": "function", "function": function}),
        }
    }
}

impl CallFormat {
    fn new(family: Family, tokenizer: &Tokenizer) -> CallFormat {
        let frame = family.frame();
        CallFormat {
            family,
            is_single: false,
            tokens: TagTokens {
                open: tokenizer.control_token(frame.open),
                close: tokenizer.control_token(frame.close),
                python: tokenizer.control_token(PYTHON_TAG),
            },
        }
    }

    /// Returns the tokens of the tags around calls.
    pub(super) fn tag_tokens(&self) -> Vec<u32> {
        let tokens = [self.tokens.open, self.tokens.close];
        tokens.into_iter().flatten().collect()
    }

    /// Returns whether the arguments of calls are XML.
    pub(super) fn is_xml(&self) -> bool {
        self.family == Family::Xml
    }

    pub(super) fn frame(&self) -> &'static CallFrame {
        self.family.frame()
    }

    /// Returns the grammar of an answer that may or must call tools. An answer without calls is in
    /// the grammar `otherwise`, if there is one.
    ///
    /// # Errors
    /// If the tools together are over the budget of a grammar.
    pub fn grammar(
        &self,
        tools: &ToolUse,
        otherwise: Option<GrammarSource>,
    ) -> Result<GrammarSource, SourceError> {
        let tools = ToolUse {
            is_parallel: tools.is_parallel && !self.is_single,
            ..tools.clone()
        };
        let has_text = otherwise.is_none();
        let call = match self.is_xml() {
            true => grammar::xml_call,
            false => grammar::json_call,
        };
        let calls = grammar::of_calls((self.frame(), call), &self.tokens, &tools, has_text);
        GrammarSource::calls(calls, otherwise)
    }
}
