//! OpenAI's `POST /v1/responses`, without state: each request brings its whole conversation.
//!
//! A request becomes the same conversation as a chat, and its answer comes from the same parts.

mod answer;
mod items;
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
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::{ReadRequest, respond};
use crate::tenants::Tenant;
use answer::{InputTokens, ResponseAnswer};
use request::ResponsesFields;
use stream::{ResponseEvent, ResponseEvents};

/// `POST /v1/responses`: answers a conversation.
pub(in crate::api) async fn create(
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
    let (request, echo) = request::read(serving, tenant, body)?;
    let answer = ResponseAnswer::begun(serving.model.name.clone(), echo);
    let writer: Box<dyn AnswerWriter> = if request.params.is_stream() {
        Box::new(ResponseEvents::new(answer))
    } else {
        WholeAnswer::boxed(
            answer.id().to_owned(),
            move |mut finished, choices, frames| {
                let choice = finished.pop().expect("the request has one choice");
                frames.push(&answer.clone().whole(choice, choices.usage()));
            },
        )
    };
    Ok((request, writer))
}

/// `POST /v1/responses/input_tokens`: the number of tokens of a prompt.
pub(in crate::api) async fn input_tokens(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<InputTokens>, ApiError> {
    body::read_text_only(&app, &caller, request, request::read_count)
        .await
        .map(|tokens| Json(InputTokens::new(tokens)))
}

pub(in crate::api) fn describe_count(components: &mut Components) -> Operation {
    let request = vec![components.fields::<ResponsesFields>()];
    let refused = request::refused_fields();
    let request = components.object("InputTokensRequest", request, refused);
    let answer = components.schema::<InputTokens>();
    Operation::new("Returns the number of tokens of a prompt. The model does not run.")
        .reads(request)
        .answers(200, "application/json", answer)
}

pub(in crate::api) fn describe(components: &mut Components) -> Operation {
    let fields = vec![components.fields::<ResponsesFields>()];
    let refused = request::refused_fields();
    let request = components.object("ResponsesRequest", fields, refused);
    let answer = components.schema::<ResponseAnswer>();
    let event = components.schema::<ResponseEvent>();
    Operation::new("Answers a conversation, as OpenAI's responses do. Keeps no state.")
        .reads(request)
        .answers(200, "application/json", answer)
        .streams(event)
        .fails(&[504])
}
