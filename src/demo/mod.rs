//! The demo checkpoint: a small ternary model in the binary, which answers without a download.
//!
//! The files beside this one are a checkpoint in Hugging Face layout. The README there tells how it
//! was made.

use crate::checkpoint::Source;

/// Returns the files of the checkpoint.
pub fn source() -> Source {
    Source::embedded(&[
        ("config.json", include_bytes!("config.json")),
        (
            "generation_config.json",
            include_bytes!("generation_config.json"),
        ),
        ("model.safetensors", include_bytes!("model.safetensors")),
        ("tokenizer.json", include_bytes!("tokenizer.json")),
        (
            "tokenizer_config.json",
            include_bytes!("tokenizer_config.json"),
        ),
    ])
}
