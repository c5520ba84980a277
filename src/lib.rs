//! The server. A request passes through `api`, `text`, `engine`, `scheduler`, `model` and
//! `kernels`. Its tokens come back as events.
//!
//! ```text
//!                        startup
//!                           │ builds everything, then waits
//!         ┌─────────────────┼─────────────────┬──────────────┐
//!         ▼                 ▼                 ▼              ▼
//!        api ───────────► engine           opening         config
//!         │                 │                 │ loads and tests a model
//!         ▼                 ├───────► model ◄─┤
//!        text               │         │ │ │   │
//!                           ▼         │ │ │   ▼
//!                       scheduler ◄───┘ │ └► checkpoint
//!                                       ▼
//!                                    kernels
//! ```
//!
//! An arrow means "uses". ARCHITECTURE.md describes each module; `tests/tidy/` checks the arrows.

pub mod api; // The HTTP interface: parses requests, calls the engine, writes responses.
pub mod bench; // `sterna bench`: the speed of a model beside the limits of the machine.
pub mod checkpoint; // The files of models: formats, configurations, conversion.
pub mod config; // Every flag of the command line.
pub mod constraint; // Answers that follow a JSON schema, an expression or a grammar.
pub mod convert; // `sterna convert`: a model in another container.
pub mod cores; // The cores that this process may compute on.
pub mod demo; // The embedded demo checkpoint.
pub mod engine; // The thread that owns all serving state, and the handle to it.
pub mod fault; // Places at which tests make a step fail.
pub mod healthcheck; // `sterna healthcheck`: whether a server accepts requests.
pub mod hub; // Models by their name: downloads from the Hugging Face Hub.
pub mod inspect; // `sterna inspect`: what a checkpoint holds, and whether it would be served.
pub mod kv_events; // What the prefix cache holds, for routers.
pub mod metrics; // Every metric.
pub mod model; // The forward pass, the memory of keys and values.
mod opening; // From a path to a tested model with its text.
mod signals; // SIGTERM and Ctrl-C.
pub mod startup; // Starts and stops the server.
pub mod synthesize; // `sterna synthesize`: checkpoints with random weights.
pub mod tenants; // Who may use the server, and within which limits.
pub mod text; // Text to token ids and back.
pub mod tools; // Calls of tools: prompts, grammars, and parsers of answers.
pub mod traces; // Traces of requests, for collectors of OpenTelemetry.
