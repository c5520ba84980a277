//! The engine, with the threads, locks and channels of shuttle: the files of `src/engine`, except
//! `sync.rs` and the watchdog.

#[path = "../../../../src/engine/batch_runner.rs"]
mod batch_runner;
#[path = "../../../../src/engine/batch_sampler/mod.rs"]
mod batch_sampler;
#[path = "../../../../src/engine/calibrate.rs"]
mod calibrate;
#[path = "../../../../src/engine/clock.rs"]
mod clock;
#[path = "../../../../src/engine/commands.rs"]
mod commands;
#[path = "../../../../src/engine/config.rs"]
mod config;
#[path = "../../../../src/engine/direct.rs"]
mod direct;
#[path = "../../../../src/engine/egress.rs"]
mod egress;
#[path = "../../../../src/engine/forward.rs"]
mod forward;
#[path = "../../../../src/engine/handle.rs"]
mod handle;
#[path = "../../../../src/engine/interference.rs"]
mod interference;
#[path = "../../../../src/engine/load.rs"]
mod load;
#[path = "../../../../src/engine/refused_tenants.rs"]
mod refused_tenants;
#[path = "../../../../src/engine/request.rs"]
mod request;
#[path = "../../../../src/engine/sampler/mod.rs"]
mod sampler;
#[path = "../../../../src/engine/sampling_costs.rs"]
mod sampling_costs;
#[path = "../../../../src/engine/sampling_params.rs"]
mod sampling_params;
#[path = "../../../../src/engine/serve.rs"]
mod serve;
#[path = "../../../../src/engine/status.rs"]
mod status;
#[path = "../../../../src/engine/step_loop.rs"]
mod step_loop;
#[path = "../../../../src/engine/stream.rs"]
mod stream;
#[path = "../../../../src/engine/submission.rs"]
mod submission;
#[path = "../../../../src/engine/submit_queue.rs"]
mod submit_queue;
mod sync;
#[path = "../../../../src/engine/tenant_reports.rs"]
mod tenant_reports;
#[path = "../../../../src/engine/unmasked.rs"]
mod unmasked;

/// The watchdog only reads the status. A thread that ends at once stands in for it.
mod watchdog {
    use std::io;
    use std::sync::Arc;

    use super::status::SharedState;
    use super::sync::thread::{self, JoinHandle};

    pub(super) fn start(_: Arc<SharedState>) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().spawn(|| {})
    }
}

pub use batch_sampler::{BatchSampler, Continuation, Draw, DrawOutcome};
pub use config::EngineConfig;
pub use direct::Direct;
pub use forward::{CopyRow, Forward, LogitRows};
pub use handle::{Engine, EngineDied, EngineHandle};
pub use request::{GenerationRequest, StreamEvent, SubmitError, TenantsRefused};
pub use sampler::Unsampleable;
pub use sampling_params::{SamplingParams, TokenOutput, Unmasking};
pub use status::Status;
pub use step_loop::{PhaseTimes, StepOutcome, StepSize};
pub use sterna_scheduler::{
    Band, Budget, CostModel, FinishReason, Limits, Policy, PublicPrefix, Rate, RateKind, RateState,
    Rates, Refusal, SequenceId, SubTenant, TenantId, TenantPolicy, TenantsError, TokenId,
};
pub use stream::EventStream;
