//! The fields of requests: their types, limits and defaults, and which of them are refused.
//!
//! The types that read a field also describe it in the OpenAPI document. What only one endpoint has
//! stands in the file of that endpoint.

pub(in crate::api) mod conversation;
pub(in crate::api) mod json_field;
pub(in crate::api) mod json_object;
pub(in crate::api) mod messages;
pub(in crate::api) mod params;
pub(in crate::api) mod prompt;
pub(in crate::api) mod reasoning;
pub(in crate::api) mod sampling_defaults;
pub(in crate::api) mod structure;
pub(in crate::api) mod template_kwargs;
pub(in crate::api) mod token_ids;
pub(in crate::api) mod tool_calls;
pub(in crate::api) mod tool_fields;
pub(in crate::api) mod turn_list;
pub(in crate::api) mod unsupported;
