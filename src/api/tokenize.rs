//! `POST /tokenize` and `POST /detokenize`: text to token ids and back; `GET /tokenizer_info`: the
//! tokenizer itself. The model does not run.
//!
//! The requests have vLLM's fields. Text may also come as `content`, as clients of llama.cpp send
//! it. In this case, no special tokens are added by default.

use axum::Json;
use axum::extract::{Extension, Request, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::app::{App, Serving};
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::fields::conversation::ConversationFields;
use crate::api::fields::json_field::{Bool, Given, JsonText};
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::prompt::{check_length, encode, encoding_error};
use crate::api::fields::token_ids::TokenList;
use crate::api::fields::unsupported;
use crate::api::generation::logprobs::token_text;
use crate::api::middleware::authentication::Caller;
use crate::tenants::Tenant;

/// Whether a request has a conversation.
#[derive(Deserialize)]
struct HasMessages {
    messages: Option<Given>,
}

/// The fields of a text.
#[derive(Deserialize, ToSchema)]
pub(super) struct TokenizeTextFields {
    /// The text.
    prompt: Option<JsonText>,
    /// The text, as clients of llama.cpp name it.
    content: Option<JsonText>,
    /// Whether to add the special tokens of a prompt. Default: true for `prompt`, false for
    /// `content`.
    add_special_tokens: Option<Bool>,
    /// The same as `add_special_tokens`, as clients of llama.cpp name it.
    add_special: Option<Bool>,
    /// Whether the texts of control tokens become these tokens, as clients of llama.cpp ask for it.
    /// Default: false.
    parse_special: Option<Bool>,
}

/// The fields of both kinds of requests.
#[derive(Deserialize, ToSchema)]
pub(super) struct TokenizeFields {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// Whether to return the texts of the tokens.
    return_token_strs: Option<Bool>,
}

/// The tokens of a text.
#[derive(Serialize, ToSchema)]
pub(super) struct TokenizeAnswer {
    /// The number of tokens.
    count: usize,
    /// The maximum number of tokens of prompt and output together.
    max_model_len: u32,
    /// The token ids.
    tokens: Vec<u32>,
    /// The texts of the tokens, if the request asked for them; `\\x` and two digits for each byte
    /// of a token that is not valid UTF-8.
    token_strs: Option<Vec<String>>,
}

/// A request for the text of tokens.
#[derive(Deserialize, ToSchema)]
pub(super) struct DetokenizeRequest {
    /// A name of the served model. Default: the served model.
    model: Option<JsonText>,
    /// The token ids, at most as many as the model's context has.
    tokens: TokenList,
}

/// The text of tokens.
#[derive(Serialize, ToSchema)]
pub(super) struct DetokenizeAnswer {
    /// The text, special tokens included.
    prompt: String,
    /// The same text, as clients of llama.cpp name it.
    content: String,
}

/// The tokenizer of the served model, as its files describe it.
#[derive(Serialize, ToSchema)]
pub(super) struct TokenizerInfo {
    /// The class in `tokenizer_config.json`, if that states one.
    tokenizer_class: Option<String>,
    /// The chat template, if the model has one.
    chat_template: Option<String>,
    /// The text of the token that begins a text, if `tokenizer_config.json` names one.
    bos_token: Option<String>,
    /// The text of the token that ends a text, if `tokenizer_config.json` names one.
    eos_token: Option<String>,
    /// The text of the token for padding, if `tokenizer_config.json` names one.
    pad_token: Option<String>,
    /// The text of the token for unknown text, if `tokenizer_config.json` names one.
    unk_token: Option<String>,
    /// The maximum number of tokens of prompt and output together.
    model_max_length: u32,
    /// The number of tokens in the vocabulary of the model.
    vocab_size: u32,
}

/// `GET /tokenizer_info`: the tokenizer of the served model.
pub(super) async fn tokenizer_info(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<TokenizerInfo>, ApiError> {
    let serving = app.serving()?;
    serving.model.check(None, &caller.tenant)?;
    let tokenizer = &serving.tokenizer;
    let named = |name| tokenizer.named_token(name).map(str::to_owned);
    let template = serving.chat_template.as_ref();
    Ok(Json(TokenizerInfo {
        tokenizer_class: tokenizer.class().map(str::to_owned),
        chat_template: template.map(|template| template.source().to_owned()),
        bos_token: named("bos_token"),
        eos_token: named("eos_token"),
        pad_token: named("pad_token"),
        unk_token: named("unk_token"),
        model_max_length: serving.model.max_model_len,
        vocab_size: serving.model.vocabulary,
    }))
}

/// `POST /tokenize`: the tokens of a text or of a conversation.
pub(super) async fn tokenize(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<TokenizeAnswer>, ApiError> {
    body::read_text_only(&app, &caller, request, read_tokenize)
        .await
        .map(Json)
}

/// `POST /detokenize`: the text of tokens.
pub(super) async fn detokenize(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<DetokenizeAnswer>, ApiError> {
    body::read_text_only(&app, &caller, request, read_detokenize)
        .await
        .map(Json)
}

fn read_tokenize(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<TokenizeAnswer, ApiError> {
    let fields: TokenizeFields = body.read()?;
    check_model(fields.model, serving, tenant)?;
    unsupported::check(body, &[])?;
    let tokens = match body.read::<HasMessages>()?.messages {
        Some(_) => body.read::<ConversationFields>()?.prompt(serving)?.tokens,
        None => {
            unsupported::check(body, unsupported::OF_TEXT)?;
            body.read::<TokenizeTextFields>()?.tokens(serving)?
        }
    };
    let texts = |tokens: &[u32]| {
        let texts = tokens
            .iter()
            .map(|token| token_text(&serving.tokenizer, *token));
        texts.collect()
    };
    let wants_texts = matches!(fields.return_token_strs, Some(Bool(true)));
    Ok(TokenizeAnswer {
        count: tokens.len(),
        max_model_len: serving.model.max_model_len,
        token_strs: wants_texts.then(|| texts(&tokens)),
        tokens,
    })
}

impl TokenizeTextFields {
    fn tokens(self, serving: &Serving) -> Result<Vec<u32>, ApiError> {
        let (name, text, adds_special) = match (self.prompt, self.content) {
            (Some(JsonText(text)), None) => ("prompt", text, true),
            (None, Some(JsonText(text))) => ("content", text, false),
            (Some(_), Some(_)) => {
                let message = "'prompt' and 'content' exclude each other. Send one of them.";
                return Err(ApiError::invalid_value("content", message));
            }
            (None, None) => {
                let message = "'prompt' is missing. Send a 'prompt', 'content' or 'messages'.";
                return Err(ApiError::invalid_value("prompt", message));
            }
        };
        let wanted = self.add_special_tokens.or(self.add_special);
        let adds_special = wanted.map_or(adds_special, |Bool(wanted)| wanted);
        if !matches!(self.parse_special, Some(Bool(true))) {
            return encode(&text, name, adds_special, serving);
        }
        check_length(text.len(), serving, name)?;
        let tokens = serving.tokenizer.encode_with_controls(&text, adds_special);
        tokens.map_err(|error| encoding_error(&error, name))
    }
}

fn read_detokenize(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<DetokenizeAnswer, ApiError> {
    let DetokenizeRequest { model, tokens } = body.read()?;
    check_model(model, serving, tenant)?;
    let limit = serving.model.max_model_len;
    if tokens.len() > limit as usize {
        let count = tokens.len();
        let message = format!("'tokens' may contain at most {limit} token ids; got {count}.");
        return Err(ApiError::invalid_value("tokens", message));
    }
    let tokens = tokens.check("tokens", &serving.model)?;
    let prompt = serving.tokenizer.decode(&tokens, false);
    Ok(DetokenizeAnswer {
        content: prompt.clone(),
        prompt,
    })
}

fn check_model(
    requested: Option<JsonText>,
    serving: &Serving,
    tenant: &Tenant,
) -> Result<(), ApiError> {
    let requested = requested.as_ref().map(|JsonText(name)| name.as_str());
    serving.model.check(requested, tenant)
}
