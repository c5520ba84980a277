//! The engine's interface: submit a request, cancel it, drain, set tenants, read the status.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crossbeam::channel::TrySendError;
use sterna_scheduler::{Rates, Refusal, TenantId, TenantPolicy};
use tokio::sync::oneshot;

use super::commands::{
    CommandSender, Control, FailedCharge, SharedRequest, Submission, Ticket, command_queues,
};
use super::config::EngineConfig;
use super::egress;
use super::forward::Forward;
use super::request::{GenerationRequest, SubmitError, TenantsRefused};
use super::serve;
use super::status::{SharedState, Status};
use super::stream::{EngineLink, EventStream};
use super::watchdog;
use crate::metrics::Metrics;

/// The engine's threads.
pub struct Engine {
    serving: JoinHandle<()>,
    egress: JoinHandle<()>,
    watchdog: JoinHandle<()>,
}

/// An engine thread panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineDied;

impl Engine {
    /// Starts the engine thread (`sterna-engine`), the egress thread (`sterna-egress`) and the
    /// watchdog (`sterna-watchdog`). Takes the memory of the KV store and measures the cost of a
    /// step before it returns, so that a server that is ready has both.
    ///
    /// # Errors
    /// If the system does not have the memory for keys and values, or does not start a thread.
    pub fn start<F: Forward + 'static>(
        model: F,
        config: EngineConfig,
        metrics: Metrics,
    ) -> std::io::Result<(EngineHandle, Engine)> {
        let kv_store = model.new_kv_store(config.limits.pages as usize)?;
        let state = Arc::new(SharedState::new(&config, model.vocabulary()));
        let (sender, commands) = command_queues(config.submit_queue, Arc::clone(&state));
        let (calibrated, calibration) = mpsc::channel();
        let (outputs, egress) = egress::start(metrics.clone(), Arc::clone(&state))?;
        let watchdog = watchdog::start(Arc::clone(&state))?;
        let serving = std::thread::Builder::new()
            .name("sterna-engine".into())
            .spawn(move || serve::serve(model, kv_store, config, commands, outputs, calibrated))?;
        // An engine thread that panics during the calibration drops its sender, so `recv` fails.
        // Every submission is then refused.
        if let Ok(cost) = calibration.recv() {
            metrics.calibrated(&cost);
        }
        let handle = EngineHandle {
            commands: sender,
            state,
            metrics,
        };
        let threads = Engine {
            serving,
            egress,
            watchdog,
        };
        Ok((handle, threads))
    }

    /// Waits until a drain has ended, or every handle and stream is dropped. Blocks the calling
    /// thread.
    ///
    /// # Errors
    /// If an engine thread panicked.
    pub fn join(self) -> Result<(), EngineDied> {
        let serving = self.serving.join();
        let egress = self.egress.join();
        self.watchdog.thread().unpark();
        let watchdog = self.watchdog.join();
        serving.and(egress).and(watchdog).map_err(|_| EngineDied)
    }
}

/// A handle to a running engine. Clones refer to the same engine.
#[derive(Clone)]
pub struct EngineHandle {
    commands: CommandSender,
    state: Arc<SharedState>,
    metrics: Metrics,
}

impl EngineHandle {
    /// Puts a request into the submit queue. Never blocks.
    ///
    /// # Errors
    /// If the engine can refuse the request without the scheduler. If the scheduler refuses it, the
    /// stream's first event says so; see `EventStream::accepted`.
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        let tenant = request.tenant;
        self.try_submit(request)
            .inspect_err(|error| self.metrics.rejected(tenant, error.label()))
    }

    fn try_submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        request.check(self.state.vocabulary)?;
        if self.state.draining.load(Ordering::SeqCst) {
            return Err(Refusal::Draining.into());
        }
        let tenant = request.tenant;
        if !self.state.lane_quota.enter(tenant) {
            let retry_after = self.state.retry_after();
            return Err(Refusal::TenantQueueFull { retry_after }.into());
        }
        let ticket = Ticket(self.state.tickets.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = egress::event_channel();
        let shared = Arc::new(SharedRequest::default());
        let prompt_tokens = request.prompt.len() as u32;
        let stream = EventStream::new(
            ticket,
            events,
            Arc::clone(&shared),
            prompt_tokens,
            self.link(),
        );
        let submission = Submission {
            ticket,
            request,
            events: sender,
            shared,
        };
        match self.commands.submissions.try_send(submission) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.state.lane_quota.leave(tenant);
                let retry_after = self.state.retry_after();
                return Err(stream.refused(Refusal::Overloaded { retry_after }.into()));
            }
            Err(TrySendError::Disconnected(_)) => {
                self.state.lane_quota.leave(tenant);
                return Err(stream.refused(self.state.gone()));
            }
        }
        // An engine thread that ends sets `ended` before it empties the queue. So either it saw
        // this submission, or this check sees that it has ended.
        if self.state.ended.load(Ordering::SeqCst) {
            return Err(stream.refused(self.state.gone()));
        }
        Ok(stream)
    }

    fn link(&self) -> EngineLink {
        EngineLink {
            commands: self.commands.clone(),
            state: Arc::clone(&self.state),
            metrics: self.metrics.clone(),
        }
    }

    /// Refuses new requests from now on. Accepted requests may finish within the drain limit; the
    /// rest then end with `FinishReason::Shutdown`.
    pub fn drain(&self) {
        self.state.draining.store(true, Ordering::SeqCst);
        self.send(Control::Drain);
    }

    /// Sets the policies of these tenants; other tenants keep theirs. Requests that run or wait
    /// continue. Waits for the current step.
    ///
    /// # Errors
    /// If the scheduler cannot grant the policies. All tenants then keep their previous policies.
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

    /// Charges a request of this tenant that has failed before its submission, and returns the
    /// tenant's rates. Waits for the current step. Returns `None` if the engine has ended.
    ///
    /// # Errors
    /// If the tenant's rates allow no request now.
    pub async fn charge_failed(
        &self,
        tenant: TenantId,
    ) -> Option<(Result<(), SubmitError>, Rates)> {
        let (done, answer) = oneshot::channel();
        self.send(Control::ChargeFailed { tenant, done });
        let FailedCharge { charged, rates } = answer.await.ok()?;
        let charged = charged.map_err(SubmitError::from);
        if let Err(error) = &charged {
            self.metrics.rejected(tenant, error.label());
        }
        Some((charged, rates))
    }

    /// Drops the cached prefixes that no running sequence uses.
    pub fn reset_prefix_cache(&self) {
        self.send(Control::ResetPrefixCache);
    }

    /// Returns the engine's gauges. Never waits for a step.
    pub fn status(&self) -> Status {
        self.state.status()
    }

    fn send(&self, control: Control) {
        // An engine that has ended has nothing left to drain, set or reset.
        let _ = self.commands.control.send(control);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crossbeam::channel::TryRecvError;
    use sterna_scheduler::{Limits, Policy};

    use super::*;
    use crate::engine::SamplingParams;
    use crate::metrics::Identity;

    fn config() -> EngineConfig {
        EngineConfig {
            limits: Limits {
                pages: 8,
                max_running: 1,
                max_queued: 1,
                max_queued_time: u64::MAX,
                step_tokens: 16,
                prefill_chunk: 16,
                max_sequence_tokens: 16,
            },
            policy: Policy::default(),
            public_prefixes: Vec::new(),
            cost: None,
            submit_queue: 1,
            drain_limit: Duration::ZERO,
            stall_limit: Duration::ZERO,
            pin: false,
        }
    }

    fn request() -> GenerationRequest {
        GenerationRequest {
            prompt: vec![1],
            sampling: SamplingParams::default(),
            max_new_tokens: 1,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            tenant: TenantId(0),
            is_another_choice: false,
            arrived: Instant::now(),
            first_token_within: None,
            ends_within: None,
        }
    }

    #[test]
    fn a_stream_keeps_both_queues_open() {
        let config = config();
        let state = Arc::new(SharedState::new(&config, 10));
        let (sender, commands) = command_queues(config.submit_queue, Arc::clone(&state));
        let handle = EngineHandle {
            commands: sender,
            state,
            metrics: Metrics::new(&Identity {
                model_name: "none".into(),
                isa: "none".into(),
                kv_pages: 8,
                page_tokens: 16,
            }),
        };
        let stream = handle.submit(request()).unwrap();
        drop((handle, commands.take()));
        // A queue without senders would keep the idle engine thread from blocking.
        let submission = commands.submissions.try_recv().map(|_| ());
        assert_eq!(submission, Err(TryRecvError::Empty));
        let control = commands.control.try_recv().map(|_| ());
        assert_eq!(control, Err(TryRecvError::Empty));
        drop(stream); // Puts one `End` into the control queue.
        assert!(commands.control.try_recv().is_ok());
        commands.wait(None); // Returns, because the last sender is dropped.
        assert_eq!(
            commands.control.try_recv().map(|_| ()),
            Err(TryRecvError::Disconnected)
        );
    }
}
