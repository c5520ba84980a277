//! `POST /v1/embeddings`: the embeddings of texts, in OpenAI's shapes.
//!
//! Invariant: each text is a request of the engine, batched with all others. All succeed or fail
//! together.

use std::time::Instant;

use axum::Json;
use axum::extract::{Extension, Request, State};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::app::{App, EmbeddingShape, Serving};
use crate::api::body;
use crate::api::connection::arrival;
use crate::api::error::ApiError;
use crate::api::fields::json_field::{
    Bool, Integer, JsonField, JsonText, Scalar, deserialize_fields, must_be,
};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::prompt::{Prompt, prompts};
use crate::api::fields::unsupported;
use crate::api::generation::choice::finish_reason;
use crate::api::middleware::authentication::Caller;
use crate::api::middleware::request_log::RequestLog;
use crate::engine::{
    EventStream, FinishReason, GenerationRequest, SamplingParams, StreamEvent, TokenId,
};
use crate::tenants::Tenant;

/// The maximum number of texts of a request, as for OpenAI.
const MAX_TEXTS: usize = 2048;

/// A request for embeddings.
#[derive(Deserialize, ToSchema)]
pub(in crate::api) struct EmbeddingFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// The texts: a string, an array of token ids, or an array of strings and arrays of token ids.
    input: Prompt<{ MAX_TEXTS }>,
    /// `float` (the default) for numbers, `base64` for their 32 bits each, the lowest byte first.
    encoding_format: Option<EncodingFormat>,
    /// The number of dimensions, which must equal the model's.
    dimensions: Option<Integer<1, { i64::MAX }>>,
    /// Whether to add the special tokens of a prompt to text. Default: true.
    add_special_tokens: Option<Bool>,
}

/// How numbers are written.
#[derive(Clone, Copy, PartialEq)]
enum EncodingFormat {
    Float,
    Base64,
}

impl JsonField<'_> for EncodingFormat {
    const EXPECTED: &'static str = "'float' or 'base64'";

    fn schema() -> Value {
        json!({"type": "string", "enum": ["float", "base64"]})
    }

    fn scalar<E: Error>(value: Scalar<'_>) -> Result<EncodingFormat, E> {
        match value {
            Scalar::Text("float") => Ok(EncodingFormat::Float),
            Scalar::Text("base64") => Ok(EncodingFormat::Base64),
            other => Err(must_be(Self::EXPECTED, other)),
        }
    }
}

deserialize_fields!(EncodingFormat);

/// A request that has been read.
pub(in crate::api) struct EmbeddingRequest {
    texts: Vec<Vec<TokenId>>,
    shape: EmbeddingShape,
    format: EncodingFormat,
}

/// The embeddings of texts.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct EmbeddingList {
    /// `list`.
    object: &'static str,
    /// One embedding for each text, in their order.
    data: Vec<EmbeddingObject>,
    /// The name of the served model.
    model: String,
    /// The token counts.
    usage: EmbeddingUsage,
}

/// The embedding of a text.
#[derive(Serialize, ToSchema)]
struct EmbeddingObject {
    /// `embedding`.
    object: &'static str,
    /// The number of the text.
    index: u32,
    /// The embedding, of length 1.
    embedding: EmbeddingValues,
}

/// The values of an embedding, as numbers or in Base64.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
enum EmbeddingValues {
    Numbers(Vec<f32>),
    Base64(String),
}

impl EmbeddingValues {
    fn new(values: Vec<f32>, format: EncodingFormat) -> EmbeddingValues {
        if format == EncodingFormat::Float {
            return EmbeddingValues::Numbers(values);
        }
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        EmbeddingValues::Base64(STANDARD.encode(bytes.collect::<Vec<u8>>()))
    }
}

/// The token counts of embeddings.
#[derive(Serialize, ToSchema)]
struct EmbeddingUsage {
    /// The tokens of all texts.
    prompt_tokens: usize,
    /// The same.
    total_tokens: usize,
}

/// `POST /v1/embeddings`: the embeddings of texts.
pub(in crate::api) async fn embeddings(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<EmbeddingList>, ApiError> {
    let arrived = arrival(&request);
    let (request, reading) = body::read_for_engine(&app, &caller, request, read).await?;
    let serving = app.serving()?;
    let tokens = request.texts.iter().map(Vec::len).sum();
    let mut running = RunningTexts::start(serving, request.texts, request.shape, &caller, arrived)?;
    let registration = caller.running().register(&caller.request_id);
    registration.add_enders(running.streams.iter().map(EventStream::ender));
    let embeddings = running.finished(&caller).await?;
    reading.answered();
    let object = |(index, values)| EmbeddingObject {
        object: "embedding",
        index,
        embedding: EmbeddingValues::new(values, request.format),
    };
    Ok(Json(EmbeddingList {
        object: "list",
        data: (0..).zip(embeddings).map(object).collect(),
        model: serving.model.name.clone(),
        usage: EmbeddingUsage {
            prompt_tokens: tokens,
            total_tokens: tokens,
        },
    }))
}

fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<EmbeddingRequest, ApiError> {
    let fields: EmbeddingFields = body.read()?;
    let model = &serving.model;
    model.check(
        fields.model.as_ref().map(|JsonText(name)| name.as_str()),
        tenant,
    )?;
    unsupported::check(body, &[])?;
    let Some(shape) = model.embedding else {
        return Err(ApiError::no_embeddings(&model.name));
    };
    if let Some(Integer(given)) = fields.dimensions
        && given != i128::from(shape.dimensions)
    {
        let message = format!(
            "'dimensions' must be {}, those of this model; got {given}.",
            shape.dimensions
        );
        return Err(ApiError::invalid_value("dimensions", message));
    }
    let adds_special = fields.add_special_tokens.is_none_or(|Bool(adds)| adds);
    let texts = prompts(fields.input, "input", adds_special, serving)?;
    check_lengths(&texts, model.max_model_len)?;
    Ok(EmbeddingRequest {
        texts,
        shape,
        format: fields.encoding_format.unwrap_or(EncodingFormat::Float),
    })
}

/// Checks that each text has a token and fits the context.
fn check_lengths(texts: &[Vec<TokenId>], context: u32) -> Result<(), ApiError> {
    for (index, text) in texts.iter().enumerate() {
        let param = match texts.len() {
            1 => "input".to_owned(),
            _ => format!("input[{index}]"),
        };
        if text.is_empty() {
            return Err(ApiError::empty_prompt(&param));
        }
        if text.len() > context as usize {
            let found = format!("The text has {} tokens. Shorten it.", text.len());
            return Err(ApiError::context_length(&param, context, &found));
        }
    }
    Ok(())
}

/// The texts that the engine computes. Dropping them cancels them.
struct RunningTexts {
    streams: Vec<EventStream>,
    log: RequestLog,
}

impl RunningTexts {
    fn start(
        serving: &Serving,
        texts: Vec<Vec<TokenId>>,
        shape: EmbeddingShape,
        caller: &Caller,
        arrived: Instant,
    ) -> Result<RunningTexts, ApiError> {
        let submitted = texts.into_iter().map(|prompt| GenerationRequest {
            prompt,
            sampling: SamplingParams {
                pooling: Some(shape.pooling),
                ..SamplingParams::greedy()
            },
            max_new_tokens: 1,
            is_length_given: false,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            tenant: caller.tenant.number,
            sub_tenant: caller.precedence.sub_tenant,
            band: caller.precedence.band,
            arrived,
            first_token_within: caller.tenant.deadlines.first_token,
            ends_within: caller.tenant.deadlines.total,
        });
        let submitted_at = Instant::now();
        let streams = serving.engine.submit_prompts(submitted.collect(), 1)?;
        caller.log.submit(submitted_at);
        Ok(RunningTexts {
            streams,
            log: caller.log.clone(),
        })
    }

    /// Waits for all embeddings.
    async fn finished(&mut self, caller: &Caller) -> Result<Vec<Vec<f32>>, ApiError> {
        let mut embeddings = Vec::with_capacity(self.streams.len());
        for index in 0..self.streams.len() {
            match embedding(&mut self.streams[index], caller).await {
                Ok(embedding) => embeddings.push(embedding),
                Err(error) => {
                    self.cancel();
                    return Err(error);
                }
            }
        }
        Ok(embeddings)
    }

    /// Ends the texts while the client is still connected.
    fn cancel(&mut self) {
        for stream in &mut self.streams {
            stream.finish(FinishReason::Cancelled);
        }
    }
}

impl Drop for RunningTexts {
    fn drop(&mut self) {
        for stream in &self.streams {
            let account = stream.account();
            self.log.add_prompt(&account);
            self.log.add_output(&account, 0, None);
        }
    }
}

/// Waits for one embedding.
async fn embedding(stream: &mut EventStream, caller: &Caller) -> Result<Vec<f32>, ApiError> {
    let mut complete = None;
    while let Some(event) = stream.recv().await {
        if let Some(rates) = stream.rates() {
            caller.set_rates(rates);
        }
        match event {
            StreamEvent::Embedding(values) => complete = Some(values),
            StreamEvent::Refused(refusal) => return Err(refusal.into()),
            StreamEvent::Failed(why) => return Err(ApiError::internal(&why)),
            StreamEvent::Finished { reason, .. } => finish_reason(reason).map(|_| ())?,
            StreamEvent::Accepted
            | StreamEvent::Scored(_)
            | StreamEvent::Token(_)
            | StreamEvent::DeadEnd(_) => {}
        }
    }
    complete.ok_or_else(|| ApiError::internal("the engine ended a text without its embedding"))
}
