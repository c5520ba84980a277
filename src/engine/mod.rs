//! The engine's only door: submit a request, read its events, cancel, drain, ask how it is.
//!
//! One thread owns all serving state (`step.rs`). Two lanes lead to it: a bounded one for requests and one for control
//! (at most one message for each request, and the operator's), so that a full queue never delays a cancel.
//! One message a step leads out (`egress.rs`).
//!
//! Invariant: every submitted request ends in exactly one terminal event: `Finished`, `Failed` or `Refused`.

mod batch_sampler;
mod calibrate;
mod direct;
mod egress;
mod forward;
mod lane_quota;
mod lanes;
mod request;
mod sampler;
mod status;
mod step;
mod stream;
mod tenants;

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam::channel::{Sender, TrySendError, bounded, unbounded};
use tokio::sync::oneshot;

use crate::metrics::{Metrics, StepCost};

use lanes::{Common, Control, Lanes, Submission, Ticket};
use status::Shared;

pub use batch_sampler::{BatchSampler, Continued, Terms};
pub use direct::{Direct, DirectStep};
pub use forward::{CopyRow, Forward, LogitRows};
pub use request::{
    GenerationRequest, SamplingParams, StreamEvent, SubmitError, TenantsRefused, TokenOutput,
};
pub use sampler::Unsampleable;
pub use status::Status;
pub use sterna_scheduler::{
    Band, Budget, CostModel, FinishReason, Limits, Policy, PublicPrefix, Rate, RateKind, RateState,
    Rates, Refusal, SequenceId, TenantId, TenantPolicy, TenantsError, TokenId,
};
pub use stream::EventStream;

/// What the engine may use.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The scheduler's limits: pages, running, queued, tokens a step.
    pub limits: Limits,
    /// How it decides.
    pub policy: Policy,
    /// Tokens that the conversations of several tenants begin with; policies number them in this order.
    pub public_prefixes: Vec<Vec<TokenId>>,
    /// What a step costs; measured at the start, for about two seconds, where it is not given.
    pub cost: Option<CostModel>,
    /// Submissions that may wait for the engine thread to take them. A tenant that was set may fill a quarter, or 8 if that is more.
    pub submit_lane: usize,
    /// How long a drain lets requests finish.
    pub drain_limit: Duration,
    /// See `Status::stall_limit`.
    pub stall_limit: Duration,
    /// Pin the engine thread to the first core, as worker 0 of the model's pool.
    pub pin: bool,
}

/// The engine's threads, for whoever waits for their end.
pub struct Engine {
    serving: JoinHandle<()>,
    egress: JoinHandle<()>,
}

/// The engine ended by a panic instead of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineDied;

impl Engine {
    /// Starts the engine thread (`sterna-engine`) and its way out (`sterna-egress`). The memory of keys and values is made here:
    /// whether there is enough must be known before anyone calls the server ready. So is what a step costs.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub fn start<F: Forward>(
        model: F,
        config: EngineConfig,
        metrics: Metrics,
    ) -> std::io::Result<(EngineHandle, Engine)> {
        let kv_store = model.new_kv_store(config.limits.pages as usize);
        let shared = Arc::new(Shared::new(&config, model.vocabulary()));
        let (submissions, taken) = bounded(config.submit_lane);
        let (control, controls) = unbounded();
        let lanes = Lanes {
            submissions: taken,
            control: controls,
            shared: Arc::clone(&shared),
        };
        let (calibrated, calibration) = mpsc::channel();
        let (turns, egress) = egress::start(metrics.clone(), Arc::clone(&shared))?;
        let serving = std::thread::Builder::new()
            .name("sterna-engine".into())
            .spawn(move || step::serve(model, kv_store, config, lanes, turns, calibrated))?;
        // An engine thread that panics drops its end; whoever asks it for something is told then.
        if let Ok(cost) = calibration.recv() {
            metrics.calibrated(&StepCost {
                rows: cost.rows.map(Duration::from_nanos),
                kilo_decode_keys: Duration::from_nanos(cost.kilo_decode_keys),
                kilo_chunk_keys: Duration::from_nanos(cost.kilo_chunk_keys),
                head: Duration::from_nanos(cost.head),
                logit: Duration::from_nanos(cost.logit),
            });
        }
        let handle = EngineHandle {
            submissions,
            control,
            shared,
            metrics,
        };
        Ok((handle, Engine { serving, egress }))
    }

    /// Waits until a drain has ended, or every handle is gone. Blocks: call it off the async threads.
    ///
    /// # Errors
    /// When an engine thread panicked.
    pub fn join(self) -> Result<(), EngineDied> {
        let serving = self.serving.join();
        let egress = self.egress.join();
        serving.and(egress).map_err(|_| EngineDied)
    }
}

/// The door to the engine; clones lead to the same one.
#[derive(Clone)]
pub struct EngineHandle {
    submissions: Sender<Submission>,
    control: Sender<Control>,
    shared: Arc<Shared>,
    metrics: Metrics,
}

impl EngineHandle {
    /// Puts a request into the submit lane; never blocks.
    ///
    /// # Errors
    /// Why the request is rejected, if the engine knows it without the scheduler. The stream's first
    /// event tells the scheduler's refusal; see `EventStream::accepted`.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        let tenant = request.tenant;
        self.try_submit(request)
            .inspect_err(|error| self.metrics.rejected(tenant.0, error.label()))
    }

    fn try_submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        request.check(self.shared.vocabulary)?;
        if self.shared.draining.load(Ordering::SeqCst) {
            return Err(Refusal::Draining.into());
        }
        let tenant = request.tenant;
        if !self.shared.lane_quota.enter(tenant) {
            let retry_after = self.shared.retry_after();
            return Err(Refusal::TenantQueueFull { retry_after }.into());
        }
        let ticket = Ticket(self.shared.tickets.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = egress::event_lane();
        let common = Arc::new(Common::default());
        let prompt_tokens = request.prompt.len() as u32;
        let stream = EventStream::new(
            ticket,
            events,
            Arc::clone(&common),
            prompt_tokens,
            self.clone(),
        );
        let submission = Submission {
            ticket,
            request,
            events: sender,
            common,
        };
        match self.submissions.try_send(submission) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.shared.lane_quota.leave(tenant);
                let retry_after = self.shared.retry_after();
                return Err(stream.rejected(Refusal::Overloaded { retry_after }.into()));
            }
            Err(TrySendError::Disconnected(_)) => {
                self.shared.lane_quota.leave(tenant);
                return Err(stream.rejected(self.shared.gone()));
            }
        }
        // An engine thread that ends sets `ended` before it empties the lane. So either it saw this
        // submission, or this check sees that it has ended.
        if self.shared.ended.load(Ordering::SeqCst) {
            return Err(stream.rejected(self.shared.gone()));
        }
        Ok(stream)
    }

    /// Refuses new requests from now on; the others may finish within the drain limit, then end with `FinishReason::Shutdown`.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
        self.send(Control::Drain);
    }

    /// Sets what these tenants may have from now on; others keep what they had. What runs or waits goes on. Waits for the step under
    /// way.
    ///
    /// # Errors
    /// When it can't be had. Every tenant then has what it had before.
    pub async fn set_tenants(
        &self,
        tenants: Vec<(TenantId, TenantPolicy)>,
    ) -> Result<(), TenantsRefused> {
        let (done, answer) = oneshot::channel();
        self.send(Control::SetTenants { tenants, done });
        match answer.await {
            Ok(answer) => answer.map_err(TenantsRefused::Impossible),
            Err(_) => Err(TenantsRefused::Gone),
        }
    }

    /// Forgets the cached prefixes that no running sequence uses.
    pub fn reset_prefix_cache(&self) {
        self.send(Control::ResetPrefixCache);
    }

    /// The engine's gauges, at once.
    pub fn status(&self) -> Status {
        self.shared.status()
    }

    fn send(&self, control: Control) {
        // An engine that is gone has nothing left to cancel, drain or forget.
        let _ = self.control.send(control);
    }
}
