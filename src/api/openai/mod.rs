//! OpenAI's endpoints, in its shapes, and endpoints that show what the engine would get
//! (`render.rs`).

pub(in crate::api) mod chat;
mod chunks;
pub(in crate::api) mod completions;
pub(in crate::api) mod embeddings;
mod envelope;
pub(in crate::api) mod render;
pub(in crate::api) mod responses;

use super::app::Serving;
use super::error::ApiError;
use super::fields::json_object::JsonObject;
use super::fields::params::CommonFields;
use super::fields::structure::StructureFields;
use super::fields::unsupported::{self, UnsupportedField};
use super::generation::request::Params;
use crate::tenants::Tenant;

/// Reads the fields that both completion endpoints have. `refused` are the fields that only this
/// endpoint does not support, and `supported` those of the common list that it supports.
fn read_params(
    serving: &Serving,
    tenant: &Tenant,
    body: &JsonObject<'_>,
    refused: &[UnsupportedField],
    supported: &[&str],
) -> Result<Params, ApiError> {
    let model = &serving.model;
    let common: CommonFields = body.read()?;
    model.check(common.model(), tenant)?;
    unsupported::check_except(body, refused, supported)?;
    let unmasking = model.unmasking(common.model());
    let params = common.check(model, &serving.defaults)?;
    let mut params = params.with_unmasking(unmasking);
    params.grammar = body.read::<StructureFields>()?.check(&params)?;
    Ok(params)
}
