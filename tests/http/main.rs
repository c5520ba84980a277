//! Does the wire speak OpenAI? The router in process and over real sockets, on a model whose every word is known beforehand.

#![expect(
    clippy::unwrap_used,
    reason = "a test that finds nothing to unwrap has failed"
)]

#[path = "../harness/mod.rs"]
mod harness;

mod chat;
mod completions;
mod connections;
mod logprobs;
mod malformed;
mod page;
mod refusals;
mod routes;
mod status;
mod stops;
mod streams;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
