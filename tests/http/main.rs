//! Tests of the HTTP API: the router in process and over real sockets. The test model's output is
//! known in advance.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot unwrap a value has failed"
)]

#[path = "../harness/mod.rs"]
mod harness;

mod access;
mod chat;
mod completions;
mod connections;
mod corpus;
mod logprobs;
mod malformed;
mod malformed_random;
mod page;
mod reasoning;
mod refusals;
mod routes;
mod status;
mod stops;
mod streams;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
