//! JSON Schemas of the types that requests and answers are made of.
//!
//! `utoipa` derives the schemas of structs. A type that is read by hand says its own, beside the
//! code that reads it.

use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::{ObjectBuilder, Ref, RefOr, Schema};

/// The key under which `embedded` hides a schema from `utoipa`, which cannot express all of them.
pub(super) const EMBEDDED: &str = "x-embedded";

/// Schemas by name.
pub(in crate::api) type NamedSchemas = Vec<(String, RefOr<Schema>)>;

/// Returns `schema` in a form that `utoipa` passes on. The document shows it in place of each
/// reference to its type.
pub(in crate::api) fn embedded(schema: Value) -> RefOr<Schema> {
    let hidden: Extensions = [(EMBEDDED.to_owned(), schema)].into_iter().collect();
    ObjectBuilder::new().extensions(Some(hidden)).into()
}

/// Returns a reference to the schema of `T`.
pub(in crate::api) fn reference<T: ToSchema>() -> Value {
    json!({ "$ref": Ref::from_schema_name(T::name()).ref_location })
}

/// Adds the schema of `T`, and the schemas that it refers to.
pub(in crate::api) fn collect<T: ToSchema>(schemas: &mut NamedSchemas) {
    schemas.push((T::name().into_owned(), T::schema()));
    T::schemas(schemas);
}
