//! The fields of a request that hold a conversation, and how they become a prompt.

use serde::Deserialize;
use utoipa::ToSchema;

use super::json_field::Bool;
use super::messages::Messages;
use super::prompt::{check_length, encoding_error};
use super::reasoning::{Effort, ReasoningWish};
use super::structure::check_end;
use super::template_kwargs::TemplateKwargs;
use super::tool_fields::Tools;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::generation::request::{FieldGrammar, Params, ParsedRequest, ReasoningField};
use crate::constraint::GrammarSource;
use crate::text::{
    ChatPrompt, ConversationEnd, Message, ReasoningStart, TemplateArguments, TemplateError,
};
use crate::tools::{CallFormat, CallParser, Tool, ToolChoice, ToolUse, Turn};

/// A conversation, and how the chat template writes it.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct ConversationFields {
    /// The conversation.
    messages: Messages,
    /// Functions that the model may call.
    tools: Option<Tools>,
    /// Variables of the chat template.
    chat_template_kwargs: Option<TemplateKwargs>,
    /// The same as in `chat_template_kwargs`, which takes precedence.
    enable_thinking: Option<Bool>,
    /// How much the model reasons: the variable `reasoning_effort` of the chat template. `none`
    /// also sets `enable_thinking` to false.
    reasoning_effort: Option<Effort>,
    /// Whether the prompt ends with the beginning of the assistant's next message. Default: true,
    /// and false with `continue_final_message`.
    add_generation_prompt: Option<Bool>,
    /// Whether the answer continues the text of the final message.
    continue_final_message: Option<Bool>,
}

impl ConversationFields {
    /// Returns the conversation.
    ///
    /// # Errors
    /// If a message or a tool is not valid.
    pub(in crate::api) fn check(self) -> Result<Conversation, ApiError> {
        let kwargs = self.chat_template_kwargs.unwrap_or_default();
        let end = end(self.continue_final_message, self.add_generation_prompt)?;
        Ok(Conversation {
            end,
            turns: self.messages.check()?,
            tools: self.tools.unwrap_or_default().check()?,
            arguments: kwargs.with_thinking(self.enable_thinking, self.reasoning_effort),
            param: "messages",
        })
    }

    /// Returns the prompt of the conversation.
    ///
    /// # Errors
    /// If the conversation is not valid, the model has no chat template, or its template rejects
    /// the conversation.
    pub(in crate::api) fn prompt(self, serving: &Serving) -> Result<ChatPrompt, ApiError> {
        self.check()?.prompt(serving, ToolChoice::Auto)
    }
}

/// A conversation, and how the chat template writes it.
pub(in crate::api) struct Conversation {
    pub(in crate::api) turns: Vec<Turn>,
    pub(in crate::api) tools: Vec<Tool>,
    pub(in crate::api) arguments: TemplateArguments,
    pub(in crate::api) end: ConversationEnd,
    /// The field that holds the messages.
    pub(in crate::api) param: &'static str,
}

impl Conversation {
    /// Returns the tools that the model may call.
    pub(in crate::api) fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Returns the prompt. `choice` says how the tools may be called.
    ///
    /// # Errors
    /// If the model has no chat template, or its template rejects the conversation.
    pub(in crate::api) fn prompt(
        self,
        serving: &Serving,
        choice: ToolChoice,
    ) -> Result<ChatPrompt, ApiError> {
        let Some(template) = &serving.chat_template else {
            return Err(ApiError::no_chat_template(&serving.model.name));
        };
        let (param, format) = (self.param, &serving.tool_format);
        let (messages, tools) = format.conversation(self.turns, &self.tools, choice);
        let bytes = |message: &Message| {
            let calls = message.tool_calls.iter().map(|call| call.to_string().len());
            let reasoning = message.reasoning.as_ref().map_or(0, String::len);
            message.content.len() + reasoning + calls.sum::<usize>()
        };
        let tool_bytes: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
        let bytes = messages.iter().map(bytes).sum::<usize>() + tool_bytes;
        check_length(bytes, serving, param)?;
        let (end, arguments) = (self.end, &self.arguments);
        let prompt =
            template.prompt_with_tools(end, &serving.tokenizer, &messages, &tools, arguments);
        prompt.map_err(|error| template_error(error, param))
    }

    /// Returns the request for an answer to the conversation, which may call `tools`. The model
    /// does not see other tools of the conversation.
    ///
    /// # Errors
    /// As [`prompt`](Self::prompt), and if the prompt does not fit.
    pub(in crate::api) fn request(
        mut self,
        serving: &Serving,
        mut params: Params,
        tools: Option<ToolUse>,
        reasoning: ReasoningWish,
    ) -> Result<ParsedRequest, ApiError> {
        let param = self.param;
        if tools.is_none() {
            self.tools.clear();
        }
        let choice = tools
            .as_ref()
            .map_or(ToolChoice::Auto, |tools| tools.choice);
        let prompt = self.prompt(serving, choice)?;
        let tags = serving.tokenizer.reasoning_tags();
        params.sampling.thinking = reasoning.limit(prompt.reasoning, &serving.tokenizer)?;
        // Calls in a format that the server cannot read are text.
        let format = serving.tool_format.of_answer(choice);
        let calls = format.zip(tools);
        if let Some((format, tools)) = &calls {
            let grammar = params.grammar.take();
            let grammar = calls_grammar(format, tools, grammar)?;
            check_end("tools", &params)?;
            params.grammar = Some(grammar);
        }
        params.grammar = params.grammar.map(|grammar| FieldGrammar {
            source: match tags {
                Some(tags) => grammar.source.after_reasoning(tags, prompt.reasoning),
                None => grammar.source,
            },
            ..grammar
        });
        params.shape.reasoning = tags.map(|tags| ReasoningField {
            tags,
            is_opened: prompt.reasoning == ReasoningStart::Opened,
            is_wanted: reasoning.is_shown,
        });
        params.shape.calls = calls.map(|(format, tools)| CallParser::new(format, &tools));
        ParsedRequest::new(vec![prompt.tokens], params, serving, None, param)
    }
}

/// Returns the grammar of an answer that may call tools. `otherwise` is the grammar of an answer
/// without calls; it changes nothing if the answer has to be a call.
fn calls_grammar(
    format: &CallFormat,
    tools: &ToolUse,
    otherwise: Option<FieldGrammar>,
) -> Result<FieldGrammar, ApiError> {
    // An answer that has to be a call has no other structure in this turn. Agents send the format
    // of their last answer with every turn.
    let otherwise = otherwise.filter(|_| tools.choice == ToolChoice::Auto);
    let parts = tools.tools.iter().filter_map(Tool::own_grammar);
    let mut parts: Vec<(String, GrammarSource)> = parts.collect();
    if let Some(FieldGrammar { field, source, .. }) = &otherwise {
        parts.push(((*field).to_owned(), source.clone()));
    }
    let otherwise = otherwise.map(|grammar| grammar.source);
    let source = format.grammar(tools, otherwise);
    let source = source.map_err(|why| {
        ApiError::invalid_value("tools", format!("The grammar of 'tools' {why}."))
    })?;
    Ok(FieldGrammar {
        field: "tools",
        source,
        parts,
    })
}

/// Returns where the prompt of a conversation ends.
fn end(
    continue_final_message: Option<Bool>,
    add_generation_prompt: Option<Bool>,
) -> Result<ConversationEnd, ApiError> {
    let is = |field: Option<Bool>| field.map(|Bool(value)| value);
    let opens_next = is(add_generation_prompt);
    match (is(continue_final_message), opens_next) {
        (Some(true), Some(true)) => {
            let message = "'continue_final_message' and 'add_generation_prompt' exclude each \
                               other: a prompt continues a message or begins a new one. Omit one.";
            Err(ApiError::invalid_value("continue_final_message", message))
        }
        (Some(true), _) => Ok(ConversationEnd::Continued),
        (_, Some(false)) => Ok(ConversationEnd::LastMessage),
        _ => Ok(ConversationEnd::NextMessage),
    }
}

fn template_error(error: TemplateError, param: &str) -> ApiError {
    let param = match &error {
        TemplateError::Text(error) => return encoding_error(error, param),
        TemplateError::ControlInArgument(_) => "chat_template_kwargs",
        TemplateError::NoFinalMessage => "continue_final_message",
        _ => param,
    };
    ApiError::invalid_value(param, format!("{error}."))
}
