//! Batches of events as MessagePack, as vLLM writes them.
//!
//! A batch is `[seconds since 1970, [event…]]`. Older readers want events as arrays whose fields
//! have fixed places, newer ones as maps with the names of the fields.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::ValueEnum;
use serde::Serialize;
use sterna_scheduler::{PAGE_TOKENS, TokenId};

use super::blocks::BlockEvent;

/// Where the blocks are.
const MEDIUM: &str = "CPU";

/// How an event is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EventFormat {
    /// As an array whose first item is the type, as llm-d reads it.
    Arrays,
    /// As a map, as vllm-router reads it.
    Maps,
}

/// An event, with the fields in vLLM's order.
#[derive(Serialize)]
#[serde(untagged)]
enum EventFields<'a> {
    Stored {
        r#type: &'static str,
        block_hashes: [u64; 1],
        parent_block_hash: Option<u64>,
        token_ids: &'a [TokenId],
        block_size: usize,
        lora_id: Option<u32>, // Sterna has no adapters.
        medium: &'static str,
        lora_name: Option<&'a str>,
        extra_keys: Option<[[&'a str; 1]; 1]>,
    },
    Removed {
        r#type: &'static str,
        block_hashes: [u64; 1],
        medium: &'static str,
    },
}

/// Returns the events as a batch of this moment.
pub(super) fn encode(events: &[BlockEvent], format: EventFormat) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0.0, |now| now.as_secs_f64());
    let events: Vec<EventFields> = events.iter().map(fields).collect();
    let batch = (seconds, events);
    let encoded = match format {
        EventFormat::Arrays => rmp_serde::to_vec(&batch),
        EventFormat::Maps => rmp_serde::to_vec_named(&batch),
    };
    encoded.expect("numbers and texts can be written")
}

fn fields(event: &BlockEvent) -> EventFields<'_> {
    match event {
        BlockEvent::Stored {
            hash,
            parent,
            tokens,
            salt,
        } => EventFields::Stored {
            r#type: "BlockStored",
            block_hashes: [*hash],
            parent_block_hash: *parent,
            token_ids: tokens,
            block_size: PAGE_TOKENS,
            lora_id: None,
            medium: MEDIUM,
            lora_name: None,
            extra_keys: salt.as_ref().map(|salt| [[salt.as_str()]]),
        },
        BlockEvent::Removed { hash } => EventFields::Removed {
            r#type: "BlockRemoved",
            block_hashes: [*hash],
            medium: MEDIUM,
        },
    }
}
