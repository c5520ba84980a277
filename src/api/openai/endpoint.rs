//! The interface of the two completion endpoints.

use serde::Serialize;
use utoipa::ToSchema;

use crate::api::app::Serving;
use crate::api::error::ApiError;
use crate::api::fields::json_object::JsonObject;
use crate::api::fields::params::CommonFields;
use crate::api::fields::structure::StructureFields;
use crate::api::fields::unsupported::{self, UnsupportedField};
use crate::api::generation::choice::{AnswerEnd, Piece};
use crate::api::generation::choices::{Choices, FinishedChoice};
use crate::api::generation::request::{Params, ParsedRequest};
use crate::api::openapi::{Components, ObjectSchema};
use crate::tenants::Tenant;

/// What differs between the endpoints: how they read a request and write its choices.
///
/// A value of this type belongs to one request.
pub(in crate::api) trait Endpoint: Default + Send + 'static {
    /// The prefix of the response's id.
    const ID_PREFIX: &'static str;
    /// The `object` of a response in one piece.
    const OBJECT: &'static str;
    /// The `object` of a chunk.
    const CHUNK_OBJECT: &'static str;
    /// Whether the ids of the prompt's tokens stand beside the choices, in a stream in its first
    /// chunk. Otherwise each choice has them, in a stream its first chunk.
    const PROMPT_BESIDE_CHOICES: bool;
    /// The fields that this endpoint does not support, beside those that neither supports.
    const UNSUPPORTED: &'static [UnsupportedField];
    /// The name of a response in one piece in the OpenAPI document.
    const NAME: &'static str;
    /// What the endpoint does, for the OpenAPI document.
    const SUMMARY: &'static str;

    /// A choice of a response in one piece.
    type Choice: Serialize + ToSchema;
    /// A choice of a chunk.
    type ChunkChoice: Serialize + ToSchema;

    /// Describes the fields that only this endpoint has.
    fn fields(components: &mut Components) -> Vec<ObjectSchema>;

    /// Reads a request's body.
    fn read(
        serving: &Serving,
        tenant: &Tenant,
        body: JsonObject<'_>,
    ) -> Result<ParsedRequest, ApiError> {
        let model = &serving.model;
        let common: CommonFields = body.read()?;
        model.check(common.model(), tenant)?;
        unsupported::check(body, Self::UNSUPPORTED)?;
        let mut params = common.check(model, &serving.defaults)?;
        params.grammar = body.read::<StructureFields>()?.check(&params)?;
        Self::read_own(serving, body, params)
    }

    /// Reads the fields that only this endpoint has. `params` are those that both have.
    fn read_own(
        serving: &Serving,
        body: JsonObject<'_>,
        params: Params,
    ) -> Result<ParsedRequest, ApiError>;

    /// Writes the complete choice `index`.
    fn whole(&self, index: u32, choice: FinishedChoice, choices: &Choices) -> Self::Choice;

    /// Writes the chunk that comes before all text of choice `index`, if the endpoint has one.
    fn opening(&self, index: u32) -> Option<Self::ChunkChoice>;

    /// Writes a piece of choice `index`, in one chunk or several.
    fn piece(&mut self, index: u32, piece: Piece, choices: &Choices) -> Vec<Self::ChunkChoice>;

    /// Writes the end of choice `index`.
    fn end(&self, index: u32, finish_reason: AnswerEnd) -> Self::ChunkChoice;
}
