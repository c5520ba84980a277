//! The messages between the server and its grammar processes.
//!
//! A message is a header in MessagePack and a body of plain bytes. Before them stand the lengths of
//! both, as `u32` in little-endian order.

use std::io::{self, Read, Write};

use llguidance::api::TopLevelGrammar;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::TokenId;
use crate::text::TokenizerSource;

/// The longest header and the longest body in bytes. A tokenizer of 250,000 tokens has 20 MB.
const MAX_BYTES: u32 = 256 << 20;

/// What the template process gets first. The body is `tokenizer.json`.
#[derive(Deserialize)]
pub(super) struct SentVocabulary {
    pub(super) tokenizer: TokenizerSource,
    /// They end an answer of the model.
    pub(super) end_tokens: Vec<TokenId>,
}

/// The same, borrowed.
#[derive(Serialize)]
pub(super) struct BorrowedVocabulary<'a> {
    pub(super) tokenizer: &'a TokenizerSource,
    pub(super) end_tokens: &'a [TokenId],
}

/// What a worker should do.
#[derive(Serialize, Deserialize)]
pub(super) enum WorkerJob {
    /// Compile the grammar of this worker. This comes first and once.
    Compile(TopLevelGrammar),
    /// Compute the masks after a drawn token of an answer. Its first job begins the answer.
    Next { answer: u64, token: TokenId },
    /// Forget an answer. There is no reply.
    End { answer: u64 },
}

/// What a worker has done. The body has a bit for each token: whether it may be drawn after the
/// forced tokens.
#[derive(Serialize, Deserialize)]
pub(super) struct JobDone {
    pub(super) masks: Masks,
    /// The processor time of the job in microseconds.
    pub(super) micros: u64,
    /// After a compilation: the memory that no other process shares, in bytes, or 0 if the system
    /// does not tell.
    pub(super) memory: u64,
}

/// The next masks: see [`Window`](super::window::Window).
#[derive(Serialize, Deserialize)]
pub(super) struct Masks {
    pub(super) forced: Vec<TokenId>,
    /// Whether the grammar may end after the forced tokens, or why nothing may follow.
    pub(super) last: Result<bool, String>,
}

/// Sends a message.
pub(super) fn send(mut to: impl Write, header: &impl Serialize, body: &[u8]) -> io::Result<()> {
    let mut message = vec![0; 8];
    rmp_serde::encode::write_named(&mut message, header).map_err(io::Error::other)?;
    let header = u32::try_from(message.len() - 8).map_err(io::Error::other)?;
    message[..4].copy_from_slice(&header.to_le_bytes());
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    message[4..8].copy_from_slice(&length.to_le_bytes());
    message.extend_from_slice(body);
    to.write_all(&message)
}

/// Receives a message.
///
/// # Errors
/// If the other end is closed, or sends something else.
pub(super) fn receive<T: DeserializeOwned>(mut from: impl Read) -> io::Result<(T, Vec<u8>)> {
    let mut lengths = [[0; 4]; 2];
    from.read_exact(lengths.as_flattened_mut())?;
    let lengths = lengths.map(u32::from_le_bytes);
    if lengths.iter().any(|length| *length > MAX_BYTES) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"));
    }
    let [header, body] = lengths.map(|length| length as usize);
    let mut message = vec![0; header + body];
    from.read_exact(&mut message)?;
    let body = message.split_off(header);
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let header = rmp_serde::from_slice(&message).map_err(invalid)?;
    Ok((header, body))
}
