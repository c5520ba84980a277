//! The engine's interface: submit a request, cancel it, drain, set tenants, read the status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_scheduler::{CacheChange, NoRoom, Rates, Refusal, TenantId, TenantPolicy};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

use super::commands::{CommandSender, Control, RequestCharge, command_queues};
use super::config::EngineConfig;
use super::egress;
use super::forward::Forward;
use super::load::Load;
use super::request::{GenerationRequest, StreamEvent, SubmitError, TenantsRefused};
use super::serve;
use super::status::{SharedState, Status};
use super::stream::{EngineLink, EventStream};
use super::submission::{
    RequestMoments, SharedRequest, Submission, SubmittedChoice, Ticket, event_channel,
};
use super::sync::thread::{self, JoinHandle};
use super::sync::{Ordering, mpsc};
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
    /// watchdog (`sterna-watchdog`). Reserves the memory of the KV store and measures the cost of a
    /// step before it returns, so that a server that is ready has both.
    ///
    /// # Errors
    /// If the system does not have the memory for keys and values, or does not start a thread.
    pub fn start<F: Forward + 'static>(
        model: F,
        config: EngineConfig,
        metrics: Metrics,
    ) -> std::io::Result<(EngineHandle, Engine)> {
        metrics.limits(&config.limits, &config.policy.budget);
        let kv_store = model.new_kv_store(&config.limits)?;
        let state = Arc::new(SharedState::new(&config, model.vocabulary()));
        let (sender, commands) = command_queues(Arc::clone(&state));
        let (calibrated, calibration) = mpsc::channel();
        let (outputs, egress) = egress::start(metrics.clone(), Arc::clone(&state))?;
        let watchdog = watchdog::start(Arc::clone(&state))?;
        let serving = thread::Builder::new()
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
    /// As for [`submit_prompts`](EngineHandle::submit_prompts).
    pub fn submit(&self, request: GenerationRequest) -> Result<EventStream, SubmitError> {
        let mut streams = self.submit_prompts(vec![request], 1)?;
        Ok(streams.remove(0))
    }

    /// Puts a request of several prompts, each with several choices, into the submit queue. Choice
    /// `i` of a prompt draws with the seed of the prompt plus `i`, wrapping. The engine accepts or
    /// refuses all prompts and choices together. Returns the stream of each choice, those of the
    /// first prompt first. Never blocks.
    ///
    /// # Errors
    /// If the engine can refuse the request without the scheduler. If the scheduler refuses it, the
    /// first event of each stream says so; see `EventStream::accepted`.
    ///
    /// # Panics
    /// If there is no prompt or no choice.
    pub fn submit_prompts(
        &self,
        prompts: Vec<GenerationRequest>,
        choices: u32,
    ) -> Result<Vec<EventStream>, SubmitError> {
        assert!(choices > 0, "a request has a choice");
        let tenant = prompts.first().expect("a request has a prompt").tenant;
        self.try_submit(prompts, choices)
            .inspect_err(|error| self.metrics.rejected(tenant, error.label()))
    }

    /// Refuses a request of `tenant` before anything is known of it, if every request of the tenant
    /// would be refused now. Never blocks, and costs the engine thread nothing.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn check_room(&self, tenant: TenantId) -> Result<(), SubmitError> {
        let of_scheduler = self.state.refused.refusal(tenant, Instant::now());
        let refusal = of_scheduler.or_else(|| {
            let no_room = self.state.submissions.check_place(tenant).err()?;
            Some(self.no_room(no_room))
        });
        let Some(refusal) = refusal else {
            return Ok(());
        };
        let error = SubmitError::from(refusal);
        self.metrics.rejected(tenant, error.label());
        Err(error)
    }

    fn no_room(&self, no_room: NoRoom) -> Refusal {
        let retry_after = self.state.load.retry_after();
        match no_room {
            NoRoom::OfOwner => Refusal::TenantQueueFull { retry_after },
            NoRoom::OfAll => Refusal::Overloaded { retry_after },
        }
    }

    fn try_submit(
        &self,
        prompts: Vec<GenerationRequest>,
        choices: u32,
    ) -> Result<Vec<EventStream>, SubmitError> {
        for request in &prompts {
            request.check(self.state.vocabulary)?;
        }
        if self.state.draining.load(Ordering::SeqCst) {
            return Err(Refusal::Draining.into());
        }
        let mut receivers = Vec::with_capacity(prompts.len() * choices as usize);
        let of_choices = prompts
            .iter()
            .flat_map(|prompt| (0..choices).map(move |_| prompt));
        let submitted = of_choices.map(|request| {
            let ticket = Ticket(self.state.tickets.fetch_add(1, Ordering::Relaxed));
            let (events, receiver) = event_channel();
            let shared = Arc::new(SharedRequest::default());
            let moments = Arc::new(RequestMoments::default());
            let stream = (ticket, receiver, Arc::clone(&shared), Arc::clone(&moments));
            receivers.push((stream, request.prompt.len() as u32));
            let grammar = request.sampling.grammar.as_ref();
            SubmittedChoice {
                ticket,
                events,
                shared,
                moments,
                constrained: grammar.map(|grammar| grammar.begin(&request.stop_tokens)),
            }
        });
        let choices = submitted.collect();
        self.enter(Submission { prompts, choices })?;
        let streams = receivers.into_iter().map(|(stream, prompt_tokens)| {
            let (ticket, events, shared, moments) = stream;
            EventStream::new(ticket, events, shared, moments, prompt_tokens, self.link())
        });
        Ok(streams.collect())
    }

    /// Puts a submission into the submit queue and rings the bell. The submission that it displaces
    /// is refused.
    fn enter(&self, submission: Submission) -> Result<(), SubmitError> {
        let entered = self.state.submissions.enter(submission);
        let displaced = entered.map_err(|no_room| self.no_room(no_room))?;
        // A bell that is full rings already. One that is disconnected is handled below.
        let _ = self.commands.bell.try_send(());
        if let Some(displaced) = displaced {
            let error = SubmitError::from(self.no_room(NoRoom::OfAll));
            self.metrics.rejected(displaced.tenant(), error.label());
            for choice in displaced.choices {
                // A client that has left needs no answer.
                let _ = choice.events.send(StreamEvent::Refused(error.clone()));
            }
        }
        // An engine thread that ends sets `ended` before it empties the queue. So either it saw
        // this submission, or this check sees that it has ended.
        if self.state.ended.load(Ordering::SeqCst) {
            drop(self.state.submissions.take_all());
            return Err(self.state.gone());
        }
        Ok(())
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

    /// Charges a request of this tenant that is never submitted, and returns the tenant's rates.
    /// Waits for the current step. Returns `None` if the engine has ended.
    ///
    /// # Errors
    /// If the tenant's rates allow no request now.
    pub fn charge_request(
        &self,
        tenant: TenantId,
    ) -> impl Future<Output = Option<(Result<(), SubmitError>, Rates)>> + use<> {
        let (done, answer) = oneshot::channel();
        self.send(Control::ChargeRequest { tenant, done });
        let metrics = self.metrics.clone();
        async move {
            let RequestCharge { charged, rates } = answer.await.ok()?;
            let charged = charged.map_err(SubmitError::from);
            if let Err(error) = &charged {
                metrics.rejected(tenant, error.label());
            }
            Some((charged, rates))
        }
    }

    /// Charges a tenant for the processor time that its requests took outside of steps: reading
    /// them, and their grammars.
    pub fn charge_time(&self, tenant: TenantId, time: Duration) {
        self.send(Control::ChargeTime { tenant, time });
    }

    /// Drops the cached prefixes that no running sequence uses, as soon as the current step ends.
    /// Returns the number of freed pages, or `None` if the engine has ended. A request that is
    /// submitted before the answer may still find a cached prefix: it comes by another queue.
    pub fn reset_prefix_cache(&self) -> impl Future<Output = Option<usize>> + use<> {
        let (done, freed) = oneshot::channel();
        self.send(Control::ResetPrefixCache { done });
        async { freed.await.ok() }
    }

    /// Returns what the prefix cache gains and loses from the next step on. The pages that are
    /// cached then come first. Only the last caller hears of changes.
    pub fn watch_cache(&self) -> UnboundedReceiver<Vec<CacheChange>> {
        // The engine thread never waits, so the channel has no limit. Its reader must not wait for
        // anything but the next changes.
        let (changes, receiver) = unbounded_channel();
        self.send(Control::WatchCache { changes });
        receiver
    }

    /// Returns the engine's load. Never waits for a step.
    pub fn load(&self) -> Load {
        self.state.load.read(self.state.clock)
    }

    /// Returns what says whether the engine computes answers. It keeps no engine alive.
    pub fn busy_reader(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let state = Arc::clone(&self.state);
        move || state.load.running() > 0
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
    use sterna_scheduler::{Limits, Policy};

    use super::*;
    use crate::engine::SamplingParams;
    use crate::engine::sync::channel::TryRecvError;
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
                states: None,
                diffusion: None,
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
            is_length_given: false,
            min_new_tokens: 0,
            stop_tokens: Vec::new(),
            tenant: TenantId(0),
            sub_tenant: None,
            band: None,
            arrived: Instant::now(),
            first_token_within: None,
            ends_within: None,
        }
    }

    #[test]
    fn a_stream_keeps_both_queues_open() {
        let config = config();
        let state = Arc::new(SharedState::new(&config, 10));
        let (sender, commands) = command_queues(Arc::clone(&state));
        let handle = EngineHandle {
            commands: sender,
            state,
            metrics: Metrics::new(&Identity {
                model_name: "none".into(),
                isa: "none".into(),
                kv_dtype: "f16".to_owned(),
                kv_pages: 8,
                page_tokens: 16,
            }),
        };
        let stream = handle.submit(request()).unwrap();
        assert_eq!(commands.take_submissions().len(), 1);
        drop(handle);
        // A queue without senders would keep the idle engine thread from blocking.
        assert_eq!(commands.bell.try_recv(), Err(TryRecvError::Empty));
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
