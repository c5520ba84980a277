//! `POST /v1/completions`: continues a prompt of text or tokens.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::endpoint::Endpoint;
use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::fields::json_field::{Bool, Integer};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::is_set;
use crate::api::fields::prompt::{MAX_PROMPTS, Prompt, prompts};
use crate::api::fields::unsupported::{self, UnsupportedField};
use crate::api::generation::choice::{AnswerEnd, Piece};
use crate::api::generation::choices::{Choices, FinishedChoice};
use crate::api::generation::logprobs::CompletionLogprobs;
use crate::api::generation::prompt_logprobs::PromptLogprobs;
use crate::api::generation::request::{Params, ParsedRequest};
use crate::api::openapi::{Components, ObjectSchema};
use crate::engine::TokenId;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The fields that only this endpoint has.
#[derive(Deserialize, ToSchema)]
pub(super) struct CompletionFields {
    /// The prompt: a string, an array of token ids, or an array of those. Each prompt of an array
    /// has `n` choices, in the order of the prompts; at most 128 in total.
    prompt: Prompt,
    /// Whether to add the special tokens of a prompt to text. Default: true.
    add_special_tokens: Option<Bool>,
    /// Return the log-probability of each token, and this many alternatives.
    logprobs: Option<Integer<0, 5>>,
    /// Whether the text begins with that of the prompt. With `logprobs`, they begin with those of
    /// the prompt, `null` for its first token, and the prompt is computed whole.
    echo: Option<Bool>,
}

/// `POST /v1/completions`.
#[derive(Default)]
pub(in crate::api) struct CompletionEndpoint {
    has_prompt: BTreeSet<u32>, // The choices whose chunks have shown the prompt's tokens.
}

impl Endpoint for CompletionEndpoint {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const PROMPT_BESIDE_CHOICES: bool = false;
    const UNSUPPORTED: &[UnsupportedField] = unsupported::OF_COMPLETIONS;
    const NAME: &'static str = "Completion";
    const SUMMARY: &'static str = "Continues a prompt of text or tokens.";
    type Choice = CompletionChoice;
    type ChunkChoice = CompletionChoice;

    fn fields(components: &mut Components) -> Vec<ObjectSchema> {
        vec![components.fields::<CompletionFields>()]
    }

    fn read_own(
        serving: &Serving,
        body: JsonObject<'_>,
        mut params: Params,
    ) -> Result<ParsedRequest, ApiError> {
        let own: CompletionFields = body.read()?;
        let logprobs = own.logprobs.map(|Integer(count)| count as u32);
        params.sampling.logprobs = logprobs;
        params.echo = is_set(own.echo);
        if params.echo {
            let of_prompt = &mut params.sampling.prompt_logprobs;
            *of_prompt = (*of_prompt).max(logprobs);
        }
        let adds_special = own.add_special_tokens.is_none_or(|Bool(adds)| adds);
        let prompts = prompts(own.prompt, "prompt", adds_special, serving)?;
        check_choices(prompts.len(), &params)?;
        ParsedRequest::new(prompts, params, serving, Some(DEFAULT_MAX_TOKENS), "prompt")
    }

    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> CompletionChoice {
        CompletionChoice {
            finish_reason: choice.finish_reason(),
            ..CompletionChoice::of_piece(index, choice.output, choices, choices.prompt(index))
        }
    }

    fn opening(&self, _: u32) -> Option<CompletionChoice> {
        None
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> Vec<CompletionChoice> {
        let is_first = self.has_prompt.insert(index);
        let prompt = choices.prompt(index).filter(|_| is_first);
        vec![CompletionChoice::of_piece(index, piece, choices, prompt)]
    }

    fn end(&self, index: u32, finish_reason: AnswerEnd) -> CompletionChoice {
        CompletionChoice {
            index,
            finish_reason: Some(finish_reason),
            ..CompletionChoice::default()
        }
    }
}

/// Checks that `n` choices of each prompt are not too many.
fn check_choices(prompts: usize, params: &Params) -> Result<(), ApiError> {
    let choices = prompts * params.n as usize;
    if choices <= MAX_PROMPTS {
        return Ok(());
    }
    let message = format!(
        "'n' times the number of prompts must be at most {MAX_PROMPTS}; got {} times {prompts}.",
        params.n
    );
    Err(ApiError::invalid_value("n", message))
}

/// A choice of an answer, or what a chunk of a stream adds to one.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::api) struct CompletionChoice {
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
