//! OpenAI's endpoints, in its shapes, and those that show what they would compute (`render.rs`).

pub(in crate::api) mod chat;
pub(in crate::api) mod chunks;
pub(in crate::api) mod completions;
pub(in crate::api) mod embeddings;
pub(in crate::api) mod endpoint;
pub(in crate::api) mod envelope;
pub(in crate::api) mod render;
pub(in crate::api) mod respond;
pub(in crate::api) mod responses;
