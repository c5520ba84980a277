//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! A request becomes the same conversation as a chat of OpenAI's API, and its answer comes from the
//! same parts.

mod answer;
mod content;
mod envelope;
mod request;
mod stream;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Response};

use crate::api::app::App;
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::generation::sse;
use crate::api::generation::typed_events::TypedEvents;
use crate::api::ids::random_id;
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::begin;
use answer::{AnthropicMessage, TokenCount};
use envelope::AnthropicErrorBody;
pub(super) use envelope::error_envelope;
use request::{CountFields, MessagesFields, read_count, read_messages};
use stream::{MessageEvent, MessageEvents};

const JSON: &str = "application/json";

/// `POST /v1/messages`: answers a conversation.
pub(super) async fn messages(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let begun = begin(&app, &caller, request, read_messages).await;
    let (mut choices, is_stream) = begun?;
    let (id, model) = (random_id("msg_"), app.serving()?.model.name.clone());
    choices.also_called(&id);
    if is_stream {
        return sse::respond(choices, TypedEvents(MessageEvents::new(id, model))).await;
    }
    let mut finished = choices.finished().await?;
    let choice = finished.pop().expect("the request has one choice");
    let message = AnthropicMessage::whole(id, model, choice, choices.usage());
    Ok(Json(message).into_response())
}

/// `POST /v1/messages/count_tokens`: the number of tokens of a prompt.
pub(super) async fn count_tokens(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<TokenCount>, ApiError> {
    body::read(&app, &caller, request, read_count)
        .await
        .map(Json)
}

pub(super) fn describe_messages(components: &mut Components) -> Operation {
    let request = vec![
        components.fields::<CountFields>(),
        components.fields::<MessagesFields>(),
    ];
    let refused = request::refused_fields();
    let request = components.object("MessagesRequest", request, refused);
    let answer = components.schema::<AnthropicMessage>();
    let event = components.schema::<MessageEvent>();
    let error = components.schema::<AnthropicErrorBody>();
    Operation::new("Answers a conversation, as Anthropic's API does.")
        .reads(request)
        .answers(200, JSON, answer)
        .streams(event)
        .fails(&[504])
        .fails_as(error)
}

pub(super) fn describe_count(components: &mut Components) -> Operation {
    let request = vec![components.fields::<CountFields>()];
    let refused = request::refused_fields();
    let request = components.object("CountTokensRequest", request, refused);
    let answer = components.schema::<TokenCount>();
    let error = components.schema::<AnthropicErrorBody>();
    Operation::new("Returns the number of tokens of a prompt. The model does not run.")
        .reads(request)
        .answers(200, JSON, answer)
        .fails_as(error)
}
