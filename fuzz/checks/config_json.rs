//! Reads the configuration of a checkpoint from a stranger.

use sterna::checkpoint::{ModelConfig, Source};

/// Checks that a configuration is read or refused, and that its sizes agree.
pub fn check(data: &[u8]) {
    let source = Source::in_memory([("config.json".to_owned(), data.to_vec())]);
    if let Ok(config) = ModelConfig::read(&source) {
        assert!(config.vocab > 0 && config.max_position > 0, "{config:?}");
    }
}
