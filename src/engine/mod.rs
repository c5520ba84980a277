//! The engine: requests of token ids in, streams of generated tokens out.
//!
//! One thread owns all serving state (`serve.rs`). Two queues lead to it (`commands.rs`): the
//! bounded submit queue for requests (`submit_queue.rs`), and the control queue, so that a full
//! submit queue never delays a cancel. At the end of each turn, the engine thread sends one message
//! to the egress thread (`egress.rs`).
//!
//! Invariant: every submitted request ends with exactly one terminal event: `Finished`, `DeadEnd`,
//! `Failed` or `Refused`.

mod batch_runner;
mod batch_sampler;
mod calibrate;
mod clock;
mod commands;
mod config;
mod direct;
mod egress;
mod forward;
mod handle;
mod interference;
mod load;
mod refused_tenants;
mod request;
mod sampler;
mod sampling_costs;
mod sampling_params;
mod serve;
mod status;
mod step_loop;
mod stream;
mod submission;
mod submit_queue;
mod sync;
mod tenant_reports;
mod unmasked;
mod watchdog;

pub use crate::checkpoint::Pooling;
pub use batch_sampler::{BatchSampler, Continuation, Draw, DrawOutcome};
pub use config::EngineConfig;
pub use direct::Direct;
pub use forward::{CopyRow, Forward, LogitRows};
pub use handle::{Engine, EngineDied, EngineHandle};
pub use load::Load;
pub use request::{GenerationRequest, StreamEvent, SubmitError, TenantsRefused};
pub use sampler::Unsampleable;
pub use sampling_params::{SamplingParams, ScoredToken, TokenOutput, Unmasking};
pub use status::Status;
pub use step_loop::{PhaseTimes, StepOutcome, StepSize};
pub use sterna_scheduler::{
    Band, Budget, CostModel, Diffusion, FinishReason, Ledger, Limits, Meter, NoRoom, Policy,
    PublicPrefix, Rate, RateKind, RateState, Rates, Refusal, SequenceId, Share, SubTenant,
    TenantId, TenantPolicy, TenantsError, TokenId, quarter,
};
pub use stream::{EventStream, RequestEnder, StreamAccount};
