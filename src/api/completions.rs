//! `POST /v1/completions`: continues a prompt of text or tokens.

use std::collections::BTreeSet;

use serde::de::{Error, MapAccess, SeqAccess};
use serde::{Deserialize, Serialize};

use super::app::Serving;
use super::choices::{Choices, FinishedChoice};
use super::endpoint::Endpoint;
use super::error::ApiError;
use super::fields::{Given, Integer, JsonField, Scalar, count_rest, deserialize_fields, must_be};
use super::generation::Piece;
use super::json::JsonObject;
use super::logprobs::CompletionLogprobs;
use super::params::Params;
use super::parsed_request::{ParsedRequest, check_length, encoding_error};
use super::token_ids::TokenList;
use super::unsupported::{self, UnsupportedField};
use crate::engine::TokenId;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The fields that only this endpoint has.
#[derive(Default, Deserialize)]
#[serde(default)]
struct CompletionFields {
    prompt: Option<Prompt>,
    logprobs: Option<Integer<0, 5>>,
}

/// The field `prompt`: a string, an array of token ids, or an array that holds one of those.
enum Prompt {
    Text(String),
    Tokens(TokenList),
    /// More prompts than one: their number.
    Several(usize),
}

/// An item of the array in `prompt`.
enum PromptItem {
    Tokens(TokenList),
    Other(Given),
}

impl<'de> JsonField<'de> for PromptItem {
    const EXPECTED: &'static str = "a string or an array of token ids";

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<PromptItem, E> {
        Given::scalar(value).map(PromptItem::Other)
    }

    fn array<A: SeqAccess<'de>>(items: A) -> Result<PromptItem, A::Error> {
        TokenList::array(items).map(PromptItem::Tokens)
    }

    fn object<A: MapAccess<'de>>(entries: A) -> Result<PromptItem, A::Error> {
        Given::object(entries).map(PromptItem::Other)
    }
}

impl<'de> JsonField<'de> for Prompt {
    const EXPECTED: &'static str = PromptItem::EXPECTED;

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<Prompt, E> {
        match value {
            Scalar::Text(text) => Ok(Prompt::Text(text.to_owned())),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }

    fn array<A: SeqAccess<'de>>(mut items: A) -> Result<Prompt, A::Error> {
        let only = match items.next_element()? {
            None => return Ok(Prompt::Tokens(TokenList::default())),
            Some(PromptItem::Tokens(tokens)) => Prompt::Tokens(tokens),
            Some(PromptItem::Other(Given::Text(text))) => Prompt::Text(text),
            Some(PromptItem::Other(first)) => {
                let mut tokens = TokenList::default();
                tokens.push(&first);
                tokens.extend(&mut items)?;
                return Ok(Prompt::Tokens(tokens));
            }
        };
        match count_rest(&mut items)? {
            0 => Ok(only),
            more => Ok(Prompt::Several(1 + more)),
        }
    }
}

deserialize_fields!(Prompt, PromptItem);

/// `POST /v1/completions`.
#[derive(Default)]
pub(super) struct CompletionEndpoint {
    has_prompt: BTreeSet<u32>, // The choices whose chunks have shown the prompt's tokens.
}

impl Endpoint for CompletionEndpoint {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";
    const PROMPT_BESIDE_CHOICES: bool = false;
    const UNSUPPORTED: &[UnsupportedField] = unsupported::OF_COMPLETIONS;

    fn read_own(
        serving: &Serving,
        body: JsonObject<'_>,
        mut params: Params,
    ) -> Result<ParsedRequest, ApiError> {
        let model = &serving.model;
        let own: CompletionFields = body.read()?;
        params.sampling.logprobs = own.logprobs.map(|Integer(count)| count as u32);
        let prompt = prompt(own.prompt, serving)?;
        ParsedRequest::new(prompt, params, model, Some(DEFAULT_MAX_TOKENS), "prompt")
    }

    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> impl Serialize {
        CompletionChoice {
            finish_reason: choice.finish_reason,
            ..CompletionChoice::of_piece(index, choice.output, choices, choices.prompt())
        }
    }

    fn opening(&self, _: u32) -> Option<impl Serialize> {
        None::<()>
    }

    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> impl Serialize {
        let is_first = self.has_prompt.insert(index);
        let prompt = choices.prompt().filter(|_| is_first);
        CompletionChoice::of_piece(index, piece, choices, prompt)
    }

    fn end(&self, index: u32, finish_reason: &'static str) -> impl Serialize {
        CompletionChoice {
            index,
            finish_reason: Some(finish_reason),
            ..CompletionChoice::default()
        }
    }
}

/// Returns the tokens of the prompt.
fn prompt(prompt: Option<Prompt>, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    let invalid = |message| Err(ApiError::invalid_value("prompt", message));
    match prompt {
        None => invalid("'prompt' is missing."),
        Some(Prompt::Text(text)) => encode(&text, serving),
        Some(Prompt::Tokens(tokens)) if tokens.len() == 0 => {
            invalid("'prompt' must not be an empty array.")
        }
        Some(Prompt::Tokens(tokens)) => tokens.check("prompt", &serving.model),
        Some(Prompt::Several(count)) => {
            let message = format!(
                "'prompt' contains {count} prompts; this server accepts one prompt per request."
            );
            Err(ApiError::unsupported("prompt", message))
        }
    }
}

fn encode(text: &str, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
    check_length(text.len(), serving, "prompt")?;
    let tokens = serving.tokenizer.encode_prompt(text);
    tokens.map_err(|error| encoding_error(&error, "prompt"))
}

#[derive(Default, Serialize)]
struct CompletionChoice<'a> {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
}

impl<'a> CompletionChoice<'a> {
    fn of_piece(
        index: u32,
        piece: Piece,
        choices: &Choices,
        prompt: Option<&'a [TokenId]>,
    ) -> CompletionChoice<'a> {
        CompletionChoice {
            index,
            text: piece.text,
            logprobs: choices.logprobs(&piece.logprobs, CompletionLogprobs::new),
            finish_reason: None,
            token_ids: choices.wants_token_ids().then_some(piece.tokens),
            prompt_token_ids: prompt,
        }
    }
}
