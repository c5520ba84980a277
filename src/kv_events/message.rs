//! Batches of events as MessagePack, as vLLM writes them: arrays whose fields have fixed places.
//!
//! A batch is `[seconds since 1970, [event…]]`. An event is one of
//!
//! - `["BlockStored", [hash], parent's hash or nil, [token…], tokens of a block, nil, "CPU", nil,
//!   [[salt]] or nil]`, where the two nils stand for adapters, which Sterna does not have;
//! - `["BlockRemoved", [hash], "CPU"]`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use sterna_scheduler::PAGE_TOKENS;

use super::blocks::BlockEvent;

/// Where the blocks are.
const MEDIUM: &str = "CPU";

/// Returns the events as a batch of this moment.
pub(super) fn encode(events: &[BlockEvent]) -> Vec<u8> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0.0, |now| now.as_secs_f64());
    rmp_serde::to_vec(&(seconds, events)).expect("numbers and texts can be written")
}

impl Serialize for BlockEvent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            BlockEvent::Stored {
                hash,
                parent,
                tokens,
                salt,
            } => {
                let salts = salt.as_ref().map(|salt| [[salt]]);
                let (kind, tokens) = ("BlockStored", tokens.as_slice());
                let (adapter, name) = ((), ());
                let block = (
                    kind,
                    [hash],
                    parent,
                    tokens,
                    PAGE_TOKENS,
                    adapter,
                    MEDIUM,
                    name,
                    salts,
                );
                block.serialize(serializer)
            }
            BlockEvent::Removed { hash } => ("BlockRemoved", [hash], MEDIUM).serialize(serializer),
        }
    }
}
