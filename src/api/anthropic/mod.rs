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
use axum::response::Response;

use crate::api::app::{App, Serving};
use crate::api::body;
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::generation::writer::{AnswerWriter, WholeAnswer};
use crate::api::ids::random_id;
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::{ReadRequest, respond};
use crate::tenants::Tenant;
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
    respond(&app, &caller, request, read).await
}

fn read(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
) -> Result<ReadRequest, ApiError> {
    let request = read_messages(serving, tenant, body)?;
    let (id, model) = (random_id("msg_"), serving.model.name.clone());
    let writer: Box<dyn AnswerWriter> = if request.params.is_stream() {
        Box::new(MessageEvents::new(id, model))
    } else {
        WholeAnswer::boxed(id.clone(), move |mut finished, choices, frames| {
            let choice = finished.pop().expect("the request has one choice");
            let (id, model) = (id.clone(), model.clone());
            frames.push(&AnthropicMessage::whole(id, model, choice, choices.usage()));
        })
    };
    Ok((request, writer))
}

/// `POST /v1/messages/count_tokens`: the number of tokens of a prompt.
pub(super) async fn count_tokens(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<TokenCount>, ApiError> {
    body::read_text_only(&app, &caller, request, read_count)
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
