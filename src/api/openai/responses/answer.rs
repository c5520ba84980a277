//! Answers of `POST /v1/responses`.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::request::RequestEcho;
use crate::api::error::ApiError;
use crate::api::fields::tool_calls::whole_calls;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd};
use crate::api::generation::choices::Usage;
use crate::api::generation::writer::FinishedChoice;
use crate::api::ids::{random_id, unix_seconds};

/// A response.
#[derive(Clone, Serialize, ToSchema)]
pub(super) struct ResponseAnswer {
    /// The id of the response.
    id: String,
    /// `response`.
    object: &'static str,
    /// When the server received the request, in Unix seconds.
    created_at: u64,
    /// Whether the response is complete.
    status: ResponseStatus,
    /// Always false.
    background: bool,
    /// What went wrong, if the response has failed.
    error: Option<ResponseError>,
    /// Why the response is incomplete.
    incomplete_details: Option<IncompleteDetails>,
    /// The instructions of the request.
    instructions: Option<String>,
    /// The maximum number of output tokens, if the request has one.
    max_output_tokens: Option<u64>,
    /// The name of the served model.
    model: String,
    /// What the response consists of, in its order.
    output: Vec<OutputItem>,
    /// Whether the answer may have several calls.
    parallel_tool_calls: bool,
    /// Always `null`.
    previous_response_id: Option<String>,
    /// Always without a value.
    reasoning: Value,
    /// Always false: the server keeps no answers.
    store: bool,
    /// Randomness of the draw.
    temperature: f32,
    /// The format of the text.
    text: Value,
    /// Which tools the model had to call.
    tool_choice: Value,
    /// The tools of the request.
    tools: Vec<Value>,
    /// The total probability of the tokens that were drawn from.
    top_p: f32,
    /// Always `disabled`.
    truncation: &'static str,
    /// The token counts, once the response has ended.
    usage: Option<ResponseUsage>,
    /// Always empty.
    metadata: Value,
}

/// Whether a response is complete.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResponseStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl ResponseStatus {
    fn name(self) -> &'static str {
        match self {
            ResponseStatus::InProgress => "in_progress",
            ResponseStatus::Completed => "completed",
            ResponseStatus::Incomplete | ResponseStatus::Failed => "incomplete",
        }
    }
}

/// What went wrong.
#[derive(Clone, Serialize, ToSchema)]
struct ResponseError {
    /// The name of the error.
    code: &'static str,
    /// What is wrong.
    message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Serialize, ToSchema)]
struct IncompleteDetails {
    /// `max_output_tokens`.
    reason: &'static str,
}

/// The token counts of a response.
#[derive(Clone, Copy, Serialize, ToSchema)]
struct ResponseUsage {
    /// The tokens of the prompt.
    input_tokens: u32,
    /// Details of the prompt.
    input_tokens_details: InputDetails,
    /// The tokens of the response, reasoning included.
    output_tokens: u32,
    /// Details of the response.
    output_tokens_details: OutputDetails,
    /// The sum of both.
    total_tokens: u32,
}

/// Details of a prompt.
#[derive(Clone, Copy, Serialize, ToSchema)]
struct InputDetails {
    /// The tokens of the prompt that came from the prefix cache.
    cached_tokens: u32,
}

/// Details of a response.
#[derive(Clone, Copy, Serialize, ToSchema)]
struct OutputDetails {
    /// Always 0: the tokens of reasoning are not counted apart.
    reasoning_tokens: u32,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> ResponseUsage {
        ResponseUsage {
            input_tokens: usage.prompt_tokens(),
            input_tokens_details: InputDetails {
                cached_tokens: usage.cached_tokens(),
            },
            output_tokens: usage.completion_tokens(),
            output_tokens_details: OutputDetails {
                reasoning_tokens: 0,
            },
            total_tokens: usage.prompt_tokens() + usage.completion_tokens(),
        }
    }
}

/// A part of a response: a message, reasoning, or a call of a function.
#[derive(Clone, Default, Serialize, ToSchema)]
pub(super) struct OutputItem {
    /// The id of the item.
    pub(super) id: String,
    /// `message`, `reasoning` or `function_call`.
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    /// `in_progress`, `completed` or `incomplete`.
    pub(super) status: &'static str,
    /// `assistant`, in a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// The text of a message or of reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Vec<OutputPart>>,
    /// Always empty, in reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Vec<String>>,
    /// The id of a call. The output names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    /// The function that the model calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    /// The arguments of a call: a JSON object in a string.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) arguments: Option<String>,
}

/// A text of an item.
#[derive(Clone, Serialize, ToSchema)]
pub(super) struct OutputPart {
    /// `output_text` or `reasoning_text`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The text.
    text: String,
    /// Always empty, beside the text of a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<Vec<String>>,
    /// Always empty, beside the text of a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<f32>>,
}

impl OutputPart {
    pub(super) fn text(text: String) -> OutputPart {
        OutputPart {
            kind: "output_text",
            text,
            annotations: Some(Vec::new()),
            logprobs: Some(Vec::new()),
        }
    }
}

impl OutputItem {
    /// Returns a message of the assistant without text.
    pub(super) fn message() -> OutputItem {
        OutputItem {
            id: random_id("msg_"),
            kind: "message",
            status: "in_progress",
            role: Some("assistant"),
            content: Some(Vec::new()),
            ..OutputItem::default()
        }
    }

    /// Returns reasoning without text.
    pub(super) fn reasoning() -> OutputItem {
        OutputItem {
            id: random_id("rs_"),
            kind: "reasoning",
            status: "in_progress",
            content: Some(Vec::new()),
            summary: Some(Vec::new()),
            ..OutputItem::default()
        }
    }

    /// Returns a call of a function without arguments.
    pub(super) fn call(name: String) -> OutputItem {
        OutputItem {
            id: random_id("fc_"),
            kind: "function_call",
            status: "in_progress",
            call_id: Some(random_id("call_")),
            name: Some(name),
            arguments: Some(String::new()),
            ..OutputItem::default()
        }
    }

    /// Returns the item with all of its text or arguments.
    pub(super) fn finished(self, text: String, status: &'static str) -> OutputItem {
        let item = OutputItem { status, ..self };
        match item.kind {
            "function_call" => OutputItem {
                arguments: Some(text),
                ..item
            },
            "reasoning" => OutputItem {
                content: Some(vec![OutputPart {
                    kind: "reasoning_text",
                    text,
                    annotations: None,
                    logprobs: None,
                }]),
                ..item
            },
            _ => OutputItem {
                content: Some(vec![OutputPart::text(text)]),
                ..item
            },
        }
    }
}

/// The number of tokens of a prompt.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct InputTokens {
    /// `response.input_tokens`.
    object: &'static str,
    /// The tokens of the prompt.
    input_tokens: usize,
}

impl InputTokens {
    pub(super) fn new(input_tokens: usize) -> InputTokens {
        InputTokens {
            object: "response.input_tokens",
            input_tokens,
        }
    }
}

impl ResponseAnswer {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Returns a response that has begun.
    pub(super) fn begun(model: String, echo: RequestEcho) -> ResponseAnswer {
        ResponseAnswer {
            id: random_id("resp_"),
            object: "response",
            created_at: unix_seconds(),
            status: ResponseStatus::InProgress,
            background: false,
            error: None,
            incomplete_details: None,
            instructions: echo.instructions,
            max_output_tokens: echo.max_output_tokens,
            model,
            output: Vec::new(),
            parallel_tool_calls: echo.is_parallel,
            previous_response_id: None,
            reasoning: json!({"effort": null, "summary": null}),
            store: false,
            temperature: echo.temperature,
            text: json!({ "format": echo.format }),
            tool_choice: echo.tool_choice,
            tools: echo.tools,
            top_p: echo.top_p,
            truncation: "disabled",
            usage: None,
            metadata: json!({}),
        }
    }

    /// Returns the response with its output.
    pub(super) fn whole(self, choice: FinishedChoice, usage: Usage) -> ResponseAnswer {
        let FinishedChoice { output, end } = choice;
        let mut items = Vec::new();
        if !output.reasoning.is_empty() {
            items.push((OutputItem::reasoning(), output.reasoning));
        }
        let calls = whole_calls(output.calls);
        if !output.text.is_empty() || calls.is_empty() && items.is_empty() {
            items.push((OutputItem::message(), output.text));
        }
        let calls = calls.into_iter();
        items.extend(calls.map(|(name, arguments)| (OutputItem::call(name), arguments)));
        let last = items.len().saturating_sub(1);
        let status = status_of(&end).name();
        let items = items.into_iter().enumerate().map(|(index, (item, text))| {
            let status = if index == last { status } else { "completed" };
            item.finished(text, status)
        });
        let items = items.collect();
        self.ended(items, &end, usage)
    }

    /// Returns the response with all of its items.
    pub(super) fn ended(
        self,
        output: Vec<OutputItem>,
        end: &ChoiceEnd,
        usage: Usage,
    ) -> ResponseAnswer {
        let is_cut = end.finish_reason == AnswerEnd::Length;
        ResponseAnswer {
            status: status_of(end),
            incomplete_details: is_cut.then_some(IncompleteDetails {
                reason: "max_output_tokens",
            }),
            output,
            usage: Some(usage.into()),
            ..self
        }
    }

    /// Returns the response of a request that has failed.
    pub(super) fn failed(self, error: &ApiError) -> ResponseAnswer {
        let error = ResponseError {
            code: error.code(),
            message: error.message().to_owned(),
        };
        ResponseAnswer {
            status: ResponseStatus::Failed,
            error: Some(error),
            ..self
        }
    }

    /// Returns whether the response is complete.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.status, ResponseStatus::Completed)
    }
}

/// Returns the status of an answer that has ended.
fn status_of(end: &ChoiceEnd) -> ResponseStatus {
    match end.finish_reason {
        AnswerEnd::Length => ResponseStatus::Incomplete,
        AnswerEnd::Stop | AnswerEnd::ToolCalls => ResponseStatus::Completed,
    }
}

/// Returns the status of the last item of an answer that has ended.
pub(super) fn item_status(end: &ChoiceEnd) -> &'static str {
    status_of(end).name()
}
