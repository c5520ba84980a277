//! One file per fuzz target. Each has a function `check` that takes any bytes and panics if the
//! program does what it must never do.
//!
//! The fuzz targets call them with bytes that libFuzzer makes, and `tests/http/corpus.rs` with the
//! committed corpus and changes of it.

pub mod bin;
pub mod config_json;
pub mod gguf;
pub mod grammars;
pub mod http;
pub mod requests;
pub mod safetensors;
pub mod stop_strings;
pub mod template;
pub mod tenants;
pub mod tokenizer_json;
pub mod tokenizer_text;

use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use crate::harness::Server;

/// The server of the targets that send requests, and the runtime of its connections. They run on
/// the thread of the check: handing them to another one would take longer than most requests.
static SERVER: LazyLock<(tokio::runtime::Runtime, Server)> = LazyLock::new(|| {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    let server = runtime.block_on(async { Server::new() });
    server.gate.immune.store(true, Ordering::SeqCst);
    server.gate.terse.store(true, Ordering::SeqCst);
    (runtime, server)
});
