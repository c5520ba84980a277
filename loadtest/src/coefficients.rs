//! The JSON file with the coefficients of a cost model. `drive` writes it, `simulate` reads it.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Coefficients of the scheduler's cost model, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Coefficients {
    /// The matrix products of steps of 1, 2, 4, …, 512 tokens.
    pub(crate) rows: [u64; 10],
    /// Attention of decodes, per 1,024 keys.
    pub(crate) kilo_decode_keys: u64,
    /// Attention of prefill chunks, per 1,024 keys.
    pub(crate) kilo_chunk_keys: u64,
    /// The lm_head, once per step that needs logits.
    pub(crate) head: u64,
    /// The logits of one token.
    pub(crate) logit: u64,
}

impl Coefficients {
    /// Reads a JSON file.
    pub(crate) fn read(path: &Path) -> Result<Coefficients, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        serde_json::from_str(&text)
            .map_err(|error| format!("not a JSON file of cost coefficients: {error}"))
    }

    /// Writes a JSON file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        let json = serde_json::to_string(self).expect("numbers are JSON");
        std::fs::write(path, json + "\n").map_err(|error| error.to_string())
    }
}
