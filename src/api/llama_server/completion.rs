//! `POST /completion`: continues a prompt, in the shapes of llama-server.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::app::{App, Serving};
use crate::api::error::ApiError;
use crate::api::fields::json_field::{Bool, Float, Integer, Seed};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::{CommonFields, is_set};
use crate::api::fields::prompt::PromptItem;
use crate::api::fields::structure::StructureFields;
use crate::api::fields::unsupported;
use crate::api::generation::choice::{AnswerEnd, ChoiceEnd, Piece, Stopper};
use crate::api::generation::choices::Choices;
use crate::api::generation::logprobs::{MIN_LOGPROB, TokenLogprob, token_text};
use crate::api::generation::request::{MaxTokens, Params, ParsedRequest};
use crate::api::generation::writer::{AnswerClock, AnswerWriter, Frames};
use crate::api::ids::random_u64;
use crate::api::middleware::authentication::Caller;
use crate::api::respond::{ReadRequest, respond};
use crate::engine::TokenId;
use crate::tenants::Tenant;
use crate::text::Tokenizer;

/// The fields that the server supports here and nowhere else.
pub(in crate::api) const SUPPORTED: &[&str] = &["n_predict", "n_probs", "repeat_penalty"];

/// The seeds that mean a random one: -1, as 64 bits and as 32.
const RANDOM_SEEDS: [u64; 2] = [u64::MAX, u32::MAX as u64];

/// The fields that only this endpoint has.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct LlamaFields {
    /// The prompt: a string or an array of token ids.
    prompt: PromptItem,
    /// Maximum number of output tokens. -1 means the rest of the context. Default: -1.
    n_predict: Option<Integer<-1, { i64::MAX }>>,
    /// Above 1, tokens of prompt and output become less likely. Default: 1.
    repeat_penalty: Option<Float<1, 10_000>>,
    /// Return the log-probability of each token, and this many alternatives. 0 is off.
    n_probs: Option<Integer<0, 20>>,
    /// Whether an answer in one piece has the ids of its tokens. Chunks always have them.
    return_tokens: Option<Bool>,
    /// The same request and seed give the same answer. -1 and 4294967295 are random.
    seed: Option<Seed>,
}

impl LlamaFields {
    /// Changes the parameters as these fields say.
    fn apply(&self, params: &mut Params) -> Result<(), ApiError> {
        match self.n_predict {
            Some(Integer(0)) => {
                let message = "'n_predict' must be -1 or at least 1; got 0.";
                return Err(ApiError::invalid_value("n_predict", message));
            }
            Some(Integer(tokens)) if tokens > 0 => {
                let tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
                let field = "n_predict";
                params.max_tokens = Some(MaxTokens {
                    field,
                    tokens,
                    is_cut_to_fit: false,
                });
            }
            _ => {}
        }
        if let Some(Float(penalty)) = self.repeat_penalty {
            params.sampling.repetition_penalty = penalty;
        }
        let probs = self.n_probs.map_or(0, |Integer(count)| count as u32);
        params.sampling.logprobs = (probs > 0).then_some(probs);
        if matches!(self.seed, Some(Seed(seed)) if RANDOM_SEEDS.contains(&seed)) {
            params.sampling.seed = random_u64();
        }
        params.shape.has_token_ids = true; // Chunks have the ids, even of a stop token.
        Ok(())
    }
}

/// An answer, or a chunk of one. The fields that are absent in chunks come with the last one.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::api) struct LlamaAnswer {
    /// 0: a request has one prompt.
    index: u32,
    /// The text, or what the chunk adds to it.
    content: String,
    /// The tokens of the text.
    tokens: Vec<u32>,
    /// Whether the answer has ended.
    stop: bool,
    /// The number of output tokens so far. A stop token counts.
    tokens_predicted: u32,
    /// The number of tokens of the prompt.
    tokens_evaluated: u32,
    /// The log-probabilities of the tokens, if the request asked for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<TokenProbability>>,
    /// The name of the served model.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Why the answer ended: `eos` (a stop token), `word` (a stop string) or `limit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_type: Option<&'static str>,
    /// The stop string that ended the answer, or an empty text.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopping_word: Option<String>,
    /// `false`: a prompt that does not fit is an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    truncated: Option<bool>,
    /// The number of prompt tokens that came from the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_cached: Option<u32>,
    /// How long the parts of the answer took.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<LlamaTimings>,
}

/// A token and its log-probability.
#[derive(Serialize, ToSchema)]
struct TokenProbability {
    /// The token.
    id: u32,
    /// Its text; `\\x` and two digits for each byte if it is not valid UTF-8.
    token: String,
    /// Its bytes.
    #[schema(value_type = Vec<u32>)]
    bytes: Vec<u8>,
    /// The model's own log-probability, at least -9999.
    logprob: f32,
    /// The most likely tokens at this position, most likely first; empty for one of these.
    #[schema(no_recursion)]
    top_logprobs: Vec<TokenProbability>,
}

impl TokenProbability {
    fn new(token: TokenId, logprob: f32, tokenizer: &Tokenizer) -> TokenProbability {
        TokenProbability {
            id: token,
            token: token_text(tokenizer, token),
            bytes: tokenizer.token_bytes(token).to_vec(),
            logprob: logprob.max(MIN_LOGPROB),
            top_logprobs: Vec::new(),
        }
    }

    fn with_top(entry: &TokenLogprob, tokenizer: &Tokenizer) -> TokenProbability {
        let logprob = entry.logprob.expect("a token of the output has one");
        let top = entry.top.iter();
        let top = top.map(|&(token, logprob)| TokenProbability::new(token, logprob, tokenizer));
        TokenProbability {
            top_logprobs: top.collect(),
            ..TokenProbability::new(entry.token, logprob, tokenizer)
        }
    }
}

/// How long the parts of an answer took, with the time in the queue.
#[derive(Serialize, ToSchema)]
struct LlamaTimings {
    /// Prompt tokens that came from the prefix cache.
    cache_n: u32,
    /// Prompt tokens that were computed.
    prompt_n: u32,
    /// Milliseconds until the first text.
    prompt_ms: f64,
    /// Output tokens.
    predicted_n: u32,
    /// Milliseconds from the first text to the end.
    predicted_ms: f64,
    /// Output tokens in each second of that.
    predicted_per_second: f64,
}

/// Writes the answer of a request of `/completion`.
struct LlamaWriter {
    tokenizer: Arc<Tokenizer>,
    model: String,
    prompt_tokens: u32,
    wants_tokens: bool,
    clock: AnswerClock,
    pending: LlamaAnswer, // The pieces that no chunk has yet.
}

impl LlamaWriter {
    fn new(serving: &Serving, request: &ParsedRequest, wants_tokens: bool) -> LlamaWriter {
        let params = &request.params;
        let wants_probs = params.sampling.logprobs.is_some();
        let mut writer = LlamaWriter {
            tokenizer: Arc::clone(&serving.tokenizer),
            model: serving.model.name.clone(),
            prompt_tokens: request.prompts[0].tokens.len() as u32,
            wants_tokens,
            clock: AnswerClock::default(),
            pending: LlamaAnswer::default(),
        };
        writer.pending.completion_probabilities = wants_probs.then(Vec::new);
        writer.pending.tokens_evaluated = writer.prompt_tokens;
        writer
    }

    /// Takes the pending pieces, and begins the next ones.
    fn take(&mut self) -> LlamaAnswer {
        let next = LlamaAnswer {
            tokens_predicted: self.pending.tokens_predicted,
            tokens_evaluated: self.prompt_tokens,
            completion_probabilities: (self.pending.completion_probabilities.as_ref())
                .map(|_| Vec::new()),
            ..LlamaAnswer::default()
        };
        std::mem::replace(&mut self.pending, next)
    }
}

/// Returns why an answer ended, and the stop string that ended it.
fn stop(end: &ChoiceEnd) -> (&'static str, String) {
    match (end.finish_reason, &end.stopped_at) {
        (AnswerEnd::Length, _) => ("limit", String::new()),
        (_, Some(Stopper::Text(stop))) => ("word", stop.clone()),
        (_, Some(Stopper::Token(_)) | None) => ("eos", String::new()),
    }
}

/// `POST /completion`: continues a prompt.
pub(in crate::api) async fn completion(
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
    let common: CommonFields = body.read()?;
    serving.model.check(common.model(), tenant)?;
    unsupported::check_except(body, unsupported::OF_NATIVE, SUPPORTED)?;
    let unmasking = serving.model.unmasking(common.model());
    let params = common.check(&serving.model, &serving.defaults)?;
    let mut params = params.with_unmasking(unmasking);
    params.check_plain()?;
    let own: LlamaFields = body.read()?;
    own.apply(&mut params)?;
    params.grammar = body.read::<StructureFields>()?.check(&params)?;
    let wants_tokens = is_set(own.return_tokens) || params.is_stream();
    let prompt = own.prompt.tokens("prompt", true, serving)?;
    let request = ParsedRequest::new(vec![prompt], params, serving, None, "prompt")?;
    let writer = LlamaWriter::new(serving, &request, wants_tokens);
    Ok((request, Box::new(writer)))
}

impl AnswerWriter for LlamaWriter {
    fn id(&self) -> Option<&str> {
        None
    }

    fn piece(&mut self, _: u32, piece: Piece, _: &Choices, frames: &mut Frames) {
        self.clock.tick();
        let pending = &mut self.pending;
        pending.content += &piece.text;
        if self.wants_tokens {
            pending.tokens.extend(piece.tokens);
        }
        pending.tokens_predicted = piece.completion_tokens;
        if let Some(probabilities) = &mut pending.completion_probabilities {
            let entries = piece.logprobs.iter();
            let entry = |entry| TokenProbability::with_top(entry, &self.tokenizer);
            probabilities.extend(entries.map(entry));
        }
        if frames.is_stream() {
            frames.push(&self.take());
        }
    }

    fn end(&mut self, _: u32, end: ChoiceEnd, choices: &Choices, frames: &mut Frames) {
        let times = self.clock.times(choices);
        let (stop_type, stopping_word) = stop(&end);
        let predicted = end.completion_tokens;
        frames.push(&LlamaAnswer {
            stop: true,
            tokens_predicted: predicted,
            model: Some(self.model.clone()),
            stop_type: Some(stop_type),
            stopping_word: Some(stopping_word),
            truncated: Some(false),
            tokens_cached: Some(end.cached_tokens),
            timings: Some(LlamaTimings {
                cache_n: end.cached_tokens,
                prompt_n: self.prompt_tokens - end.cached_tokens,
                prompt_ms: times.prompt * 1e3,
                predicted_n: predicted,
                predicted_ms: times.output * 1e3,
                predicted_per_second: f64::from(predicted) / times.output.max(1e-6),
            }),
            ..self.take()
        });
    }

    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        frames.push(&error.body());
    }
}
