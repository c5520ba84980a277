//! What a step costs, as a file has it: `drive` writes it, `simulate` reads it.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// Coefficients of the scheduler's cost model, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Coefficients {
    /// Of steps of 1, 2, 4, up to 128 tokens.
    pub(crate) rows: [u64; 8],
    /// Of 1,024 keys that decodes look at.
    pub(crate) kilo_decode_keys: u64,
    /// Of 1,024 keys that chunks of prompts look at.
    pub(crate) kilo_chunk_keys: u64,
    /// Of the output head, if any logits are wanted.
    pub(crate) head: u64,
    /// Of a token's logits.
    pub(crate) logit: u64,
}

impl Coefficients {
    /// Reads a JSON file.
    pub(crate) fn read(path: &Path) -> Result<Coefficients, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        serde_json::from_str(&text)
            .map_err(|error| format!("not the JSON of a cost model's coefficients: {error}"))
    }

    /// Writes a JSON file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        let json = serde_json::to_string(self).expect("numbers are JSON");
        std::fs::write(path, json + "\n").map_err(|error| error.to_string())
    }
}
