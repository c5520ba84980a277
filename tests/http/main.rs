//! Tests of the HTTP API: the router in process and over real sockets. The test model's output is
//! known in advance.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot unwrap a value has failed"
)]

#[path = "../harness/mod.rs"]
mod harness;

mod access;
mod agents;
mod anthropic;
mod chat;
mod completions;
mod connections;
mod corpus;
mod descriptions;
mod embeddings;
mod kv_events;
mod logprobs;
mod malformed;
mod malformed_random;
mod native;
mod openapi;
mod page;
mod prompt_logprobs;
mod prompts;
mod reasoning;
mod refusals;
mod render;
mod request_log;
mod responses;
mod routes;
mod speaker;
mod status;
mod stops;
mod streams;
mod structure;
mod tools;
mod traces;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
