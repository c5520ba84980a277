//! The server. A request travels `api → text → engine → scheduler → model → kernels`; its tokens come back as events.
//!
//! ARCHITECTURE.md has the picture of the arrows; `tests/tidy/` holds the modules to them.

pub mod api; // HTTP: parse, call, shape the answer.
pub mod bench; // How fast a model runs, beside what the machine allows.
pub mod config; // Every knob.
pub mod cores; // The cores this process may compute on.
pub mod demo; // The embedded demo checkpoint.
pub mod engine; // The thread that owns all serving state, and the only door to it.
pub mod metrics; // Every metric.
pub mod model; // Checkpoint files, the forward pass, the memory of keys and values.
pub mod startup; // The way up and down.
pub mod synthesize; // Checkpoints of a given shape with random weights.
pub mod tenants; // Who may use the server, and how much of it.
pub mod text; // Text to tokens and back.
