//! `POST /generate`: continues a prompt, in the shapes of SGLang.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_field::{Bool, Integer, JsonText, Seed};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{CommonFields, is_set};
use crate::api::fields::prompt::encode;
use crate::api::fields::structure::StructureFields;
use crate::api::fields::token_ids::TokenList;
use crate::api::fields::unsupported;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd, Piece, Stopper};
use crate::api::generation::choices::Choices;
use crate::api::generation::logprobs::{MIN_LOGPROB, token_text};
use crate::api::generation::request::{MaxTokens, Params, ParsedRequest, ResponseMode};
use crate::api::generation::writer::{AnswerClock, AnswerWriter, Frames};
use crate::api::ids::random_id;
use crate::api::middleware::authentication::Caller;
use crate::api::respond::{ReadRequest, respond};
use crate::engine::TokenId;
use crate::tenants::Tenant;
use crate::text::Tokenizer;

/// The fields that the server supports here and nowhere else.
pub(in crate::api) const SUPPORTED: &[&str] = &["max_new_tokens"];

/// SGLang's default.
const DEFAULT_MAX_TOKENS: u32 = 128;

const MAX_ID_BYTES: usize = 128;

/// The fields of a request, except `sampling_params`.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct GenerateFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// The prompt as text.
    text: Option<JsonText>,
    /// The prompt as token ids, instead of `text`.
    input_ids: Option<TokenList>,
    /// The id of the answer, of 1 to 128 bytes. Default: a new one.
    rid: Option<JsonText>,
    /// Whether the answer is a stream of server-sent events. Each has the text so far.
    stream: Option<Bool>,
    /// Whether to return the log-probabilities of the output tokens.
    return_logprob: Option<Bool>,
    /// Number of alternatives for each token, with `return_logprob`.
    top_logprobs_num: Option<Integer<0, 20>>,
    /// Only -1 is supported: there are no log-probabilities of the prompt.
    #[expect(dead_code, reason = "reading it checks it")]
    logprob_start_len: Option<Integer<-1, -1>>,
    /// Whether log-probabilities have the texts of the tokens.
    return_text_in_logprobs: Option<Bool>,
}

/// The fields of `sampling_params` that the other endpoints do not have.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct GenerateSampling {
    /// Maximum number of output tokens. Default: 128, or the rest of the context if that is less.
    max_new_tokens: Option<Integer<1, { i64::MAX }>>,
    /// The output does not stop before it has this many tokens.
    min_new_tokens: Option<Integer<0, { u32::MAX as i64 }>>,
    /// The same as `seed`.
    sampling_seed: Option<Seed>,
}

/// The object `sampling_params`.
#[derive(Deserialize)]
struct SamplingObject<'a> {
    #[serde(borrow)]
    sampling_params: Option<&'a RawValue>,
}

impl GenerateFields {
    fn prompt(&mut self, serving: &Serving) -> Result<Vec<TokenId>, ApiError> {
        match (self.text.take(), self.input_ids.take()) {
            (Some(JsonText(text)), None) => encode(&text, "text", true, serving),
            (None, Some(tokens)) => tokens.check("input_ids", &serving.model),
            (Some(_), Some(_)) => {
                let message = "'text' and 'input_ids' exclude each other. Send one of them.";
                Err(ApiError::invalid_value("input_ids", message))
            }
            (None, None) => {
                let message = "'text' is missing. Send a 'text' or 'input_ids'.";
                Err(ApiError::invalid_value("text", message))
            }
        }
    }

    fn id(&mut self) -> Result<String, ApiError> {
        match self.rid.take() {
            None => Ok(random_id("gen-")),
            Some(JsonText(id)) if (1..=MAX_ID_BYTES).contains(&id.len()) => Ok(id),
            Some(JsonText(id)) => {
                let message = format!(
                    "'rid' must have 1 to {MAX_ID_BYTES} bytes; got {}.",
                    id.len()
                );
                Err(ApiError::invalid_value("rid", message))
            }
        }
    }

    fn apply(&self, params: &mut Params) -> Result<(), ApiError> {
        if is_set(self.stream) && is_set(self.return_logprob) {
            // Each chunk has everything so far, so they would grow without bounds.
            let message = "'return_logprob' is not supported with 'stream': true. Omit one.";
            return Err(ApiError::unsupported("return_logprob", message));
        }
        params.shape.mode = ResponseMode::of_stream(is_set(self.stream));
        let top = self.top_logprobs_num.map_or(0, |Integer(top)| top as u32);
        params.sampling.logprobs = is_set(self.return_logprob).then_some(top);
        params.shape.has_token_ids = true; // `output_ids`, with a stop token.
        Ok(())
    }
}

impl GenerateSampling {
    fn apply(&self, params: &mut Params) -> Result<(), ApiError> {
        if let Some(Integer(tokens)) = self.max_new_tokens {
            let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
            let field = "max_new_tokens";
            params.max_tokens = Some(MaxTokens {
                field,
                tokens,
                is_cut_to_fit: false,
            });
        }
        if let Some(Integer(min)) = self.min_new_tokens {
            params.min_tokens = min as u32;
            let max = params
                .max_tokens
                .map_or(DEFAULT_MAX_TOKENS.into(), |max| max.tokens);
            if u64::from(params.min_tokens) > max {
                let field = "sampling_params.min_new_tokens";
                let message =
                    format!("'{field}' must be at most 'max_new_tokens' ({max}); got {min}.");
                return Err(ApiError::invalid_value(field, message));
            }
        }
        if let Some(Seed(seed)) = self.sampling_seed {
            params.sampling.seed = seed;
        }
        Ok(())
    }
}

/// An answer, or a chunk of one. A chunk has all of the text so far.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct GenerateAnswer {
    /// The text so far.
    text: String,
    /// The tokens of the answer, at its end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    output_ids: Vec<u32>,
    /// What is known of the answer.
    meta_info: MetaInfo,
}

/// The log-probability of a token, its id, and its text if the request asked for texts.
type Likelihood = (f32, u32, Option<String>);

/// What is known of an answer.
#[derive(Serialize, ToSchema)]
struct MetaInfo {
    /// The id of the answer.
    id: String,
    /// Why it ended; `null` before its end.
    finish_reason: Option<GenerateEnd>,
    /// The number of tokens of the prompt.
    prompt_tokens: u32,
    /// The number of output tokens so far. A stop token counts.
    completion_tokens: u32,
    /// The number of prompt tokens that came from the prefix cache, at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u32>,
    /// Seconds from the arrival of the request to the end of its answer, at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    e2e_latency: Option<f64>,
    /// Of each token its log-probability, its id, and its text or `null`, if the request asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Vec<Value>>>)]
    output_token_logprobs: Option<Vec<Likelihood>>,
    /// The same of the most likely tokens at each position, if the request asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Vec<Vec<Value>>>>)]
    output_top_logprobs: Option<Vec<Vec<Likelihood>>>,
}

/// Why an answer ended.
#[derive(Serialize, ToSchema)]
struct GenerateEnd {
    /// `stop` or `length`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The stop token or the stop string that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<Matched>,
    /// The number of output tokens, if that is why it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u32>,
}

impl GenerateEnd {
    fn new(end: ChoiceEnd) -> GenerateEnd {
        match end.finish_reason {
            AnswerEnd::Length => GenerateEnd {
                kind: "length",
                matched: None,
                length: Some(end.completion_tokens),
            },
            AnswerEnd::Stop | AnswerEnd::ToolCalls => GenerateEnd {
                kind: "stop",
                matched: end.stopped_at.map(|stopper| match stopper {
                    Stopper::Token(token) => Matched::Token(token),
                    Stopper::Text(stop) => Matched::Text(stop),
                }),
                length: None,
            },
        }
    }
}

/// What ended an answer.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum Matched {
    Token(u32),
    Text(String),
}

/// Writes the answer of a request of `/generate`.
struct GenerateWriter {
    tokenizer: Arc<Tokenizer>,
    shows_texts: bool,
    answer: GenerateAnswer, // So far, except its tokens.
    tokens: Vec<TokenId>,
    clock: AnswerClock,
}

impl GenerateWriter {
    fn likelihood(&self, token: TokenId, logprob: f32) -> Likelihood {
        let text = self.shows_texts.then(|| token_text(&self.tokenizer, token));
        (logprob.max(MIN_LOGPROB), token, text)
    }
}

/// `POST /generate`: continues a prompt.
pub(in crate::api) async fn generate(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    respond(&app, &caller, request, read).await
}

fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ReadRequest, ApiError> {
    let mut fields: GenerateFields = body.read()?;
    let requested = fields.model.as_ref().map(|JsonText(name)| name.as_str());
    serving.model.check(requested, tenant)?;
    unsupported::check_except(body, unsupported::OF_NATIVE, SUPPORTED)?;
    let nested = body.read::<SamplingObject<'_>>()?.sampling_params;
    let nested = nested.map_or("{}", RawValue::get);
    let sampling = JsonObject::nested(nested, "sampling_params")?;
    let common: CommonFields = sampling.read()?;
    unsupported::check_except(&sampling, unsupported::OF_NATIVE, SUPPORTED)?;
    let params = common.check(&serving.model, &serving.defaults)?;
    let mut params = params.with_unmasking(serving.model.unmasking(requested));
    params.check_plain()?;
    sampling.read::<GenerateSampling>()?.apply(&mut params)?;
    fields.apply(&mut params)?;
    params.grammar = sampling.read::<StructureFields>()?.check(&params)?;
    let param = if fields.text.is_some() {
        "text"
    } else {
        "input_ids"
    };
    let (id, prompt) = (fields.id()?, fields.prompt(serving)?);
    let default = Some(DEFAULT_MAX_TOKENS);
    let request = ParsedRequest::new(vec![prompt], params, serving, default, param)?;
    let reports = request.params.sampling.logprobs;
    let writer = GenerateWriter {
        tokenizer: Arc::clone(&serving.tokenizer),
        shows_texts: is_set(fields.return_text_in_logprobs),
        tokens: Vec::new(),
        clock: AnswerClock::default(),
        answer: GenerateAnswer {
            text: String::new(),
            output_ids: Vec::new(),
            meta_info: MetaInfo {
                id,
                finish_reason: None,
                prompt_tokens: request.prompts[0].tokens.len() as u32,
                completion_tokens: 0,
                cached_tokens: None,
                e2e_latency: None,
                output_token_logprobs: reports.map(|_| Vec::new()),
                output_top_logprobs: reports.filter(|top| *top > 0).map(|_| Vec::new()),
            },
        },
    };
    Ok((request, Box::new(writer)))
}

impl AnswerWriter for GenerateWriter {
    fn id(&self) -> Option<&str> {
        Some(&self.answer.meta_info.id)
    }

    fn piece(&mut self, _: u32, piece: Piece, _: &Choices, frames: &mut Frames) {
        self.clock.tick();
        for entry in &piece.logprobs {
            let logprob = entry.logprob.expect("a token of the output has one");
            let chosen = self.likelihood(entry.token, logprob);
            let top = entry.top.iter();
            let top = top.map(|&(token, logprob)| self.likelihood(token, logprob));
            let top: Vec<_> = top.collect();
            let info = &mut self.answer.meta_info;
            info.output_token_logprobs
                .get_or_insert_default()
                .push(chosen);
            if let Some(tops) = &mut info.output_top_logprobs {
                tops.push(top);
            }
        }
        self.answer.text += &piece.text;
        self.tokens.extend(piece.tokens);
        self.answer.meta_info.completion_tokens = piece.completion_tokens;
        if frames.is_stream() {
            frames.push(&self.answer);
        }
    }

    fn end(&mut self, _: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        let times = self.clock.times(choices);
        self.answer.output_ids = std::mem::take(&mut self.tokens);
        let info = &mut self.answer.meta_info;
        info.completion_tokens = end.completion_tokens;
        info.cached_tokens = Some(end.cached_tokens);
        info.finish_reason = Some(GenerateEnd::new(end));
        info.e2e_latency = Some(times.prompt + times.output);
        frames.push(&self.answer);
        frames.push_done();
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.push(&error.body());
        frames.push_done();
    }
}
