//! `POST /v1/completions`: continues a prompt of text or tokens.

use std::collections::BTreeSet;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::chunks::Chunks;
use super::envelope::{self, Envelope, PromptFields, UsageField};
use super::read_params;
use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_field::{Bool, Integer};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{CommonFields, is_set};
use crate::api::fields::prompt::{MAX_CHOICES, Prompt, prompts};
use crate::api::fields::structure::StructureFields;
use crate::api::fields::unsupported;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd, Piece};
use crate::api::generation::choices::Choices;
use crate::api::generation::logprobs::CompletionLogprobs;
use crate::api::generation::prompt_logprobs::PromptLogprobs;
use crate::api::generation::request::{Params, ParsedRequest, ResponseMode};
use crate::api::generation::writer::{AnswerWriter, FinishedChoice, Frames, WholeAnswer};
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::{ReadRequest, respond};
use crate::engine::TokenId;
use crate::tenants::Tenant;

/// The prefix of the answer's id.
pub(super) const ID_PREFIX: &str = "cmpl-";

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The fields that only this endpoint has.
#[derive(Deserialize, ToSchema)]
struct CompletionFields {
    /// The prompt: a string, an array of token ids, or an array of strings and arrays of token ids.
    /// Each prompt of an array has `n` choices, in the order of the prompts; at most 128 in total.
    prompt: Prompt<{ MAX_CHOICES }>,
    /// Whether to add the special tokens of a prompt to text. Default: true.
    add_special_tokens: Option<Bool>,
    /// Return the log-probability of each token, and this many alternatives.
    logprobs: Option<Integer<0, 5>>,
    /// Whether the text begins with the text of the prompt. With `logprobs`, the log-probabilities
    /// begin with the prompt's too, `null` for its first token, and the prompt is computed whole.
    echo: Option<Bool>,
}

/// `POST /v1/completions`: continues prompts.
pub(in crate::api) async fn completions(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    respond(&app, &caller, request, read).await
}

pub(in crate::api) fn describe(components: &mut Components) -> Operation {
    let fields = vec![
        components.fields::<CommonFields>(),
        components.fields::<StructureFields>(),
        components.fields::<CompletionFields>(),
    ];
    let request = components.object(
        "CompletionRequest",
        fields,
        unsupported::schemas(unsupported::OF_COMPLETIONS),
    );
    envelope::describe::<CompletionChoice, CompletionChoice>(
        components,
        "Continues a prompt of text or tokens.",
        "Completion",
        request,
    )
}

/// Reads a request.
pub(super) fn read_request(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ParsedRequest, ApiError> {
    let mut params = read_params(serving, tenant, body, unsupported::OF_COMPLETIONS, &[])?;
    let own: CompletionFields = body.read()?;
    let logprobs = own.logprobs.map(|Integer(count)| count as u32);
    params.sampling.logprobs = logprobs;
    params.shape.echo = is_set(own.echo);
    if params.shape.echo {
        let of_prompt = &mut params.sampling.prompt_logprobs;
        *of_prompt = (*of_prompt).max(logprobs);
    }
    let adds_special = own.add_special_tokens.is_none_or(|Bool(adds)| adds);
    let prompts = prompts(own.prompt, "prompt", adds_special, serving)?;
    check_choices(prompts.len(), &params)?;
    ParsedRequest::new(prompts, params, serving, Some(DEFAULT_MAX_TOKENS), "prompt")
}

fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ReadRequest, ApiError> {
    let request = read_request(serving, tenant, body)?;
    let envelope = Envelope::new(ID_PREFIX, "text_completion", &serving.model);
    let writer: Box<dyn AnswerWriter> = match request.params.shape.mode {
        ResponseMode::Stream(usage) => Box::new(CompletionStream {
            chunks: Chunks { envelope, usage },
            has_prompt: BTreeSet::new(),
        }),
        ResponseMode::Whole => WholeAnswer::boxed(
            envelope.id().to_owned(),
            move |finished, choices, frames| {
                let choice = |(index, choice): (u32, FinishedChoice)| CompletionChoice {
                    finish_reason: Some(choice.end.finish_reason),
                    ..CompletionChoice::of_piece(
                        index,
                        choice.output,
                        choices,
                        choices.prompt(index),
                    )
                };
                let written = (0..).zip(finished).map(choice).collect();
                let usage = UsageField::Counts(choices.usage());
                let prompt = PromptFields::default();
                frames.push(&envelope.object::<CompletionChoice>(written, usage, prompt));
            },
        ),
    };
    Ok((request, writer))
}

/// Writes the stream of a completion.
struct CompletionStream {
    chunks: Chunks,
    has_prompt: BTreeSet<u32>, // The choices whose chunks have shown the prompt's tokens.
}

impl AnswerWriter for CompletionStream {
    fn id(&self) -> Option<&str> {
        Some(self.chunks.envelope.id())
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices, frames: &mut Frames) {
        let is_first = self.has_prompt.insert(index);
        let prompt = choices.prompt(index).filter(|_| is_first);
        let choice = CompletionChoice::of_piece(index, piece, choices, prompt);
        self.chunks.push(choice, choices, frames);
    }

    fn end(&mut self, index: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        let choice = CompletionChoice {
            index,
            finish_reason: Some(end.finish_reason),
            ..CompletionChoice::default()
        };
        self.chunks.end(choice, choices, frames);
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        Chunks::fail(error, frames);
    }
}

/// Checks that `n` choices of each prompt are not too many.
fn check_choices(prompts: usize, params: &Params) -> Result<(), ApiError> {
    let choices = prompts * params.n as usize;
    if choices <= MAX_CHOICES {
        return Ok(());
    }
    let message = format!(
        "'n' times the number of prompts must be at most {MAX_CHOICES}; got {} times {prompts}.",
        params.n
    );
    Err(ApiError::invalid_value("n", message))
}

/// A choice of an answer, or what a chunk of a stream adds to one.
#[derive(Default, Serialize, ToSchema)]
struct CompletionChoice {
    /// The number of the choice.
    index: u32,
    /// The text.
    text: String,
    /// The log-probabilities, if the request asked for them.
    logprobs: Option<CompletionLogprobs>,
    /// Why the choice ended; `null` in chunks before its end.
    finish_reason: Option<AnswerEnd>,
    /// The tokens of the text, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    /// The tokens of the prompt, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    /// The log-probabilities of the prompt, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
}

impl CompletionChoice {
    fn of_piece(
        index: u32,
        piece: Piece,
        choices: &Choices,
        prompt: Option<&[TokenId]>,
    ) -> CompletionChoice {
        CompletionChoice {
            index,
            text: piece.text,
            logprobs: choices.logprobs(&piece.logprobs, CompletionLogprobs::new),
            prompt_logprobs: choices.prompt_logprobs(&piece.scores),
            finish_reason: None,
            token_ids: choices.wants_token_ids().then_some(piece.tokens),
            prompt_token_ids: prompt.map(<[TokenId]>::to_vec),
        }
    }
}
