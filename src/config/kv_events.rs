//! The flags of the events of the prefix cache.

use std::net::SocketAddr;

use clap::Args;

use crate::kv_events::{EventFormat, Scope};

/// Who hears which prefixes are cached.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Events of the prefix cache")]
pub struct KvEventFlags {
    /// Tell routers over ZeroMQ which blocks of tokens are cached, as vLLM does, for example at
    /// 127.0.0.1:5557 (see deploy/scale-out.md). A client of this address reads tokens of prompts
    /// without a key.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub kv_events: Option<SocketAddr>,
    /// Repeat earlier events here for routers that missed some, for example 127.0.0.1:5558.
    #[arg(long, value_name = "ADDRESS:PORT", requires = "kv_events")]
    pub kv_events_replay: Option<SocketAddr>,
    /// Blocks that the events show: only blocks of the public prefixes in the tenants file, or
    /// blocks of all prompts.
    #[arg(long, value_enum, value_name = "BLOCKS", default_value_t = Scope::Public)]
    pub kv_events_of: Scope,
    /// First frame of each batch, by which readers subscribe. If omitted, kv@ADDRESS@MODEL, as
    /// llm-d expects; vllm-router needs an empty one.
    #[arg(long, value_name = "TOPIC")]
    pub kv_events_topic: Option<String>,
    /// How events are written: arrays for llm-d, maps for vllm-router.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = EventFormat::Arrays)]
    pub kv_events_format: EventFormat,
}
