//! OpenAI's `POST /v1/responses`, without state: each request brings its whole conversation.
//!
//! A request becomes the same conversation as a chat, and its answer comes from the same parts.

mod answer;
mod items;
mod request;
mod stream;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::{IntoResponse, Response};

use crate::api::app::App;
use crate::api::error::ApiError;
use crate::api::generation::sse;
use crate::api::generation::typed_events::TypedEvents;
use crate::api::middleware::authentication::Caller;
use crate::api::openapi::{Components, Operation};
use crate::api::respond::begin;
use answer::ResponseAnswer;
use request::{ResponsesFields, read};
use stream::{ResponseEvent, ResponseEvents};

/// `POST /v1/responses`: answers a conversation.
pub(in crate::api) async fn create(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut choices, echo) = begin(&app, &caller, request, read).await?;
    let is_stream = echo.is_stream;
    let answer = ResponseAnswer::begun(app.serving()?.model.name.clone(), echo);
    choices.also_called(answer.id());
    if is_stream {
        return sse::respond(choices, TypedEvents(ResponseEvents::new(answer))).await;
    }
    let mut finished = choices.finished().await?;
    let choice = finished.pop().expect("the request has one choice");
    Ok(Json(answer.whole(choice, choices.usage())).into_response())
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
