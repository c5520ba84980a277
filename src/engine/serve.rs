//! The engine thread, which works in turns. A turn is one round of it, always in this order:
//!
//! 1. It takes the commands that are in the queues.
//! 2. It runs one step, or none if no request runs or waits.
//! 3. It publishes the output: one message to the egress thread.
//!
//! After a turn without a step, the thread waits for the next command.
//!
//! Invariant: a panic outside the model and the sampler is a bug in serving state itself. It ends
//! the thread, and with it every stream, at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_scheduler::{
    CacheChange, CostModel, Event, FinishReason, Micros, Nanos, Page, Request, Scheduler,
    SequenceId, StateSlab, Step, TenantId,
};
use tokio::sync::mpsc::UnboundedSender;

use super::batch_runner::BatchRunner;
use super::batch_sampler::{Draw, DrawOutcome};
use super::calibrate::{FreeMemory, Recalibration, calibrate};
use super::clock::micros;
use super::commands::{CommandReceiver, Control, RequestCharge};
use super::config::EngineConfig;
use super::egress::{EndedSequence, RequestUpdate, StepOutput};
use super::forward::Forward;
use super::request::GenerationRequest;
use super::sampler::Unsampleable;
use super::sampling_costs::SamplingCosts;
use super::sampling_params::SamplingParams;
use super::step_loop::{DrawRules, StepLoop, StepOutcome};
use super::submission::{SharedRequest, Submission, SubmittedChoice, Ticket};
use super::sync::channel::TryRecvError;
use super::sync::{mpsc, thread};
use super::tenant_reports::TenantReports;
use super::unmasked::UnmaskedTokens;
use crate::checkpoint::Pooling;
use crate::constraint::ConstrainedOutput;
use crate::cores;
use crate::metrics::{StepTimes, Timeline};
use crate::model::TextEmbedding;

/// How long the engine thread waits for a mask if it has nothing else to do.
const MAX_MASK_WAIT: Duration = Duration::from_millis(1);

/// Runs the engine thread until a drain has ended, or every handle and stream is dropped.
pub(super) fn serve<F: Forward>(
    model: F,
    kv_store: F::KvStore,
    config: EngineConfig,
    commands: CommandReceiver,
    outputs: mpsc::Sender<StepOutput>,
    calibrated: mpsc::Sender<CostModel>,
) {
    if config.pin {
        pin_to_first_core();
    }
    let mut runner = BatchRunner::new(model, kv_store);
    let (cost, sampling_costs, recalibration) = match config.cost {
        Some(cost) => (cost, SamplingCosts::default(), None),
        None => {
            // All memory is free before the first request.
            let pages: Vec<Page> = (0..config.limits.pages).map(Page::new).collect();
            let states = config.limits.states;
            let slabs = states.map(|states| (0..states.slabs).map(StateSlab::new));
            let slabs: Option<Vec<StateSlab>> = slabs.map(Iterator::collect);
            let free = FreeMemory {
                pages: &pages,
                slabs: slabs.as_deref(),
            };
            let calibration = calibrate(&mut runner, &config.limits, free);
            let again = Recalibration::after(&calibration, &config.limits);
            let sampling = SamplingCosts::measure(&mut runner, free);
            (calibration.cost, sampling, again)
        }
    };
    let mut scheduler = Scheduler::new(config.limits, config.policy);
    match recalibration {
        Some(_) => scheduler.calibrate_unsure(cost),
        None => scheduler.calibrate(cost),
    }
    for prefix in config.public_prefixes {
        scheduler.declare_public(&prefix);
    }
    // `Engine::start` waits for the cost, unless its caller has given up.
    let _ = calibrated.send(cost);
    let mut thread = EngineThread {
        steps: StepLoop::new(scheduler, runner, commands.shared.clock),
        requests: HashMap::new(),
        tickets: HashMap::new(),
        updates: Vec::new(),
        endings: Vec::new(),
        refused_now: Vec::new(),
        unmasked: UnmaskedTokens::default(),
        tenants: TenantReports::default(),
        drain_limit: config.drain_limit,
        drain_deadline: None,
        commands,
        outputs,
        publishing: Duration::ZERO,
        sampling_costs,
        recalibration,
        recalibrated: None,
        has_reserved_memory: true,
        cache_changes: None,
    };
    while !thread.is_over() {
        thread.turn();
    }
}

/// Pins the engine thread as worker 0 of the model's pool, whose other workers take the next cores.
fn pin_to_first_core() {
    if !cores::physical().first().copied().is_some_and(cores::pin) {
        tracing::warn!("the engine thread could not be pinned to a core");
    }
}

/// All serving state.
struct EngineThread<F: Forward> {
    steps: StepLoop<F>,
    requests: HashMap<SequenceId, RequestState>,
    tickets: HashMap<Ticket, SequenceId>,
    updates: Vec<RequestUpdate>, // Since the last publication.
    endings: Vec<RequestUpdate>, // Empty between turns; kept for its memory.
    refused_now: Vec<TenantId>,  // The same: the tenants of the submissions refused in this turn.
    unmasked: UnmaskedTokens,
    tenants: TenantReports,
    drain_limit: Duration,
    drain_deadline: Option<Micros>, // Set when a drain begins.
    commands: CommandReceiver,
    outputs: mpsc::Sender<StepOutput>,
    sampling_costs: SamplingCosts,
    publishing: Duration, // The time that the last publication took.
    recalibration: Option<Recalibration>, // Due when the engine is idle for a while.
    recalibrated: Option<CostModel>, // Since the last publication.
    has_reserved_memory: bool, // Perhaps there is memory to take while the engine is idle.
    cache_changes: Option<UnboundedSender<Vec<CacheChange>>>, // After `WatchCache`.
}

/// The engine thread's part of a request's state. The scheduler and the egress thread have the
/// other parts.
struct RequestState {
    ticket: Ticket,
    sampling: SamplingParams,
    shared: Arc<SharedRequest>,
    constrained: Option<ConstrainedOutput>,
    embedding: Option<TextEmbedding>, // Of the states so far.
}

impl RequestState {
    fn draw_rules(&self) -> DrawRules<'_> {
        DrawRules {
            params: &self.sampling,
            masks: self.constrained.as_ref().map(ConstrainedOutput::masks),
        }
    }
}

impl<F: Forward> EngineThread<F> {
    /// Runs one turn; see the module's header.
    fn turn(&mut self) {
        let began = Instant::now();
        self.take_commands(began);
        let commanded = Instant::now();
        if !self.requests.is_empty() {
            self.commands.shared.begin_turn(commanded);
        }
        for (&id, request) in &self.requests {
            if let Some(constrained) = &request.constrained {
                self.steps.scheduler.force(id, constrained.forced());
            }
        }
        let (requests, shared) = (&self.requests, &self.commands.shared);
        let rules = |id: SequenceId| requests[&id].draw_rules();
        let begin = |step: &Step<'_>| {
            shared.begin_step(Instant::now(), Duration::from_micros(step.predicted()));
            shared.refused.note_departures(step.departures());
        };
        let outcome = self.steps.step(began, rules, begin);
        let Some(outcome) = outcome else {
            self.publish(began, began, None);
            self.commands.shared.refused.forget_full_queue();
            return self.wait();
        };
        let times = self.step_times(&outcome, began, commanded);
        let committed = Instant::now();
        let has_drawn = self.has_drawn();
        self.publish(began, outcome.drawn_at, Some(times));
        self.publishing = committed.elapsed();
        if !has_drawn {
            self.wait_for_masks();
        }
    }

    /// Returns whether the step drew a token, or had nothing to draw.
    fn has_drawn(&mut self) -> bool {
        let draws = self.steps.runner.sampler().draws();
        !(draws.iter()).any(|draw| draw.outcome == DrawOutcome::Deferred)
            || (draws.iter()).any(|draw| matches!(draw.outcome, DrawOutcome::Token(_)))
    }

    /// Lets the workers of grammars work, because a step now would draw no token either. Returns
    /// after a millisecond at the latest: prompts may be left to compute.
    fn wait_for_masks(&self) {
        let began = Instant::now();
        let outputs = || self.requests.values().flat_map(|own| &own.constrained);
        while began.elapsed() < MAX_MASK_WAIT && !outputs().any(|output| output.is_ready()) {
            thread::yield_now();
        }
    }

    fn step_times(&self, outcome: &StepOutcome, began: Instant, commanded: Instant) -> StepTimes {
        let times = &outcome.times;
        let deciding = times.plan + times.commit;
        StepTimes {
            tokens: outcome.size.tokens,
            predicted: outcome.predicted,
            calibrated: outcome.calibrated,
            whole: outcome.drawn_at - began,
            computing: times.forward + times.sample,
            deciding,
            overhead: (commanded - began) + deciding + times.sample + self.publishing,
        }
    }

    fn is_over(&self) -> bool {
        self.drain_deadline.is_some()
            && self.requests.is_empty()
            && self.commands.shared.submissions.is_empty()
    }

    fn take_commands(&mut self, at: Instant) {
        let now = self.commands.shared.clock.micros(at);
        loop {
            match self.commands.control.try_recv() {
                Ok(Control::End(ticket)) => self.end(ticket),
                Ok(Control::Drain) => {
                    self.drain(now, now.saturating_add(micros(self.drain_limit)));
                }
                Ok(Control::SetTenants { tenants, done }) => {
                    let answer = self.steps.scheduler.set_tenants(&tenants);
                    if answer.is_ok() {
                        self.commands.shared.submissions.set(&tenants);
                    }
                    // The caller may have stopped waiting.
                    let _ = done.send(answer);
                }
                Ok(Control::ChargeRequest { tenant, done }) => {
                    let scheduler = &mut self.steps.scheduler;
                    let charged = scheduler.charge_request(now, tenant);
                    let rates = scheduler.rates(now, tenant);
                    if charged.is_err() {
                        self.refused_now.push(tenant); // HTTP threads refuse the next ones.
                    }
                    // The client may have left.
                    let _ = done.send(RequestCharge { charged, rates });
                }
                Ok(Control::ChargeTime { tenant, time }) => {
                    let time = Nanos::try_from(time.as_nanos()).unwrap_or(Nanos::MAX);
                    self.steps.scheduler.charge_time(tenant, time);
                    self.tenants.ended(tenant);
                }
                Ok(Control::ResetPrefixCache { done }) => {
                    let freed = self.steps.scheduler.reset_prefix_cache();
                    self.tenants.changed();
                    // The caller may not wait for it.
                    let _ = done.send(freed);
                }
                Ok(Control::WatchCache { changes }) => {
                    self.steps.scheduler.watch_cache();
                    self.cache_changes = Some(changes);
                }
                Err(TryRecvError::Empty) => break,
                // Every handle and stream is gone, so no command can follow.
                Err(TryRecvError::Disconnected) => {
                    self.drain(now, now);
                    break;
                }
            }
        }
        self.take_submissions(now);
        if self.drain_deadline.is_some_and(|deadline| deadline <= now) {
            for &id in self.requests.keys() {
                self.steps.scheduler.cancel(id, FinishReason::Shutdown);
            }
        }
    }

    /// Takes the submissions that are in the queue now. Later ones wait for the next turn, so that
    /// a flood cannot delay a step.
    fn take_submissions(&mut self, now: Micros) {
        for submission in self.commands.take_submissions() {
            self.take(submission, now);
        }
        self.update_refused(now);
    }

    /// Asks the scheduler how many places it has for the tenants that it has refused. Until the
    /// next turn, only the plan can make more.
    fn update_refused(&mut self, now: Micros) {
        let (scheduler, refused) = (&mut self.steps.scheduler, &self.commands.shared.refused);
        refused.note_departures(scheduler.departures());
        self.refused_now.dedup();
        for tenant in self.refused_now.drain(..) {
            if let Err(refusal) = scheduler.places_for(now, tenant) {
                refused.add(tenant, refusal, Instant::now());
            }
        }
        refused.update(Instant::now(), |tenant| scheduler.places_for(now, tenant));
    }

    fn take(&mut self, submission: Submission, now: Micros) {
        let tenant = submission.tenant();
        let Submission { prompts, choices } = submission;
        let of_prompt = choices.len() / prompts.len();
        let (mut scheduled, mut samplings) = (Vec::new(), Vec::new());
        for request in prompts {
            let (arrived, prompt_tokens) = (request.arrived, request.prompt.len() as u32);
            let timeline = move || Timeline::new(arrived, tenant, prompt_tokens);
            let waited = now.saturating_sub(self.commands.shared.clock.micros(arrived));
            let draw_time = self.sampling_costs.of(&request);
            let (request, sampling) = for_scheduler(request, draw_time, waited);
            scheduled.push(request);
            samplings.push((sampling, timeline));
        }
        let scheduler = &mut self.steps.scheduler;
        let answer = scheduler.submit_prompts(now, scheduled, of_prompt);
        let rates = scheduler.rates(now, tenant);
        for choice in &choices {
            choice.shared.rates.get_or_init(|| rates);
        }
        match answer {
            Ok(ids) => {
                self.tenants.begun(tenant);
                for (index, (id, choice)) in ids.into_iter().zip(choices).enumerate() {
                    let (sampling, timeline) = &samplings[index / of_prompt];
                    let sampling = sampling.of_choice((index % of_prompt) as u64);
                    self.begin(id, choice, timeline(), sampling);
                }
            }
            Err(refusal) => {
                self.refused_now.push(tenant);
                self.updates.push(RequestUpdate::Refused {
                    events: choices.into_iter().map(|choice| choice.events).collect(),
                    tenant,
                    error: refusal.into(),
                });
            }
        }
    }

    /// Registers a choice that the scheduler has accepted.
    fn begin(
        &mut self,
        id: SequenceId,
        choice: SubmittedChoice,
        timeline: Timeline,
        sampling: SamplingParams,
    ) {
        let SubmittedChoice {
            ticket,
            events,
            shared,
            moments,
            constrained,
        } = choice;
        self.updates.push(RequestUpdate::Accepted {
            id,
            events,
            moments,
            timeline,
        });
        self.tickets.insert(ticket, id);
        let state = RequestState {
            ticket,
            sampling,
            shared,
            constrained,
            embedding: None,
        };
        self.requests.insert(id, state);
        self.end_if_requested(id); // Its `End` may have overtaken the submission.
    }

    /// Ends the request of a ticket. An unknown ticket belongs to a request that has ended or is
    /// still in the submit queue.
    fn end(&mut self, ticket: Ticket) {
        if let Some(&id) = self.tickets.get(&ticket) {
            self.end_if_requested(id);
        }
    }

    fn end_if_requested(&mut self, id: SequenceId) {
        if let Some(reason) = self.requests[&id].shared.ending.get() {
            self.steps.scheduler.cancel(id, *reason);
        }
    }

    /// Begins a drain that ends at `deadline` at the latest. Submissions already in the queue came
    /// before the drain, so they are taken first.
    fn drain(&mut self, now: Micros, deadline: Micros) {
        self.take_submissions(now);
        self.steps.scheduler.drain();
        let earlier = self.drain_deadline.unwrap_or(Micros::MAX);
        self.drain_deadline = Some(earlier.min(deadline));
    }

    /// Sends this turn's output to the egress thread. A request's updates leave in the order in
    /// which its client should see them.
    fn publish(&mut self, began: Instant, drawn: Instant, times: Option<StepTimes>) {
        let mut updates = std::mem::take(&mut self.updates);
        let embedded = self.take_states(); // Before the ends of requests.
        self.take_events(&mut updates);
        updates.extend(embedded);
        for draw in self.steps.runner.sampler().take_draws() {
            let id = draw.sequence;
            match draw.outcome {
                DrawOutcome::Token(output) => {
                    // A request that has ended needs no further mask.
                    let request = self.requests.get(&id);
                    if let Some(constrained) = request.and_then(|own| own.constrained.as_ref()) {
                        constrained.drawn(output.token);
                    }
                    updates.push(RequestUpdate::Token { id, output });
                }
                DrawOutcome::Unmasked {
                    position, output, ..
                } => self.unmasked.add(id, position, output),
                DrawOutcome::Scored(score) => updates.push(RequestUpdate::Scored { id, score }),
                DrawOutcome::Failed(Unsampleable::DeadEnd) => {} // The client hears why.
                DrawOutcome::Failed(error) => {
                    tracing::error!("no token can be drawn from a row of logits: {error:?}");
                }
                DrawOutcome::State { .. } | DrawOutcome::Deferred | DrawOutcome::Void => {}
            }
        }
        self.take_unmasked(&mut updates);
        updates.append(&mut self.endings);
        self.report_cache();
        self.updates = Vec::with_capacity(updates.len()); // The next turn usually has as many.
        let has_stepped = times.is_some();
        let scheduler = &self.steps.scheduler;
        let snapshot = scheduler.snapshot();
        let tenants = (self.tenants).report(drawn, has_stepped, |id| scheduler.tenant(id));
        (self.commands.shared).end_turn(drawn, has_stepped, &snapshot);
        let output = StepOutput {
            began,
            drawn,
            times,
            snapshot,
            experts: self.steps.runner.expert_use(),
            tenants,
            recalibrated: self.recalibrated.take(),
            updates,
        };
        self.outputs
            .send(output)
            .expect("the egress thread lives as long as this thread");
    }

    /// Takes the tokens of blocks that are final now.
    fn take_unmasked(&mut self, updates: &mut Vec<RequestUpdate>) {
        let (scheduler, endings) = (&self.steps.scheduler, &self.endings);
        let at_end = |id: SequenceId| {
            endings.iter().find_map(|ending| match ending {
                RequestUpdate::Ended(ended) if ended.id == id => {
                    Some(ended.prompt_tokens as usize + ended.output_tokens as usize)
                }
                _ => None,
            })
        };
        let known = |id| match scheduler.known_tokens(id) {
            Some(known) => (known, false),
            None => (at_end(id).unwrap_or(0), true),
        };
        let tell = |id, output| updates.push(RequestUpdate::Token { id, output });
        self.unmasked.take_final(known, tell);
    }

    /// Tells the watcher of the prefix cache, if there is one, what has changed.
    fn report_cache(&mut self) {
        let Some(watcher) = &self.cache_changes else {
            return;
        };
        let changes = self.steps.scheduler.cache_changes();
        if !changes.is_empty() {
            // The watcher may have ended.
            let _ = watcher.send(changes);
        }
    }

    /// Adds the hidden states of the step to the embeddings that are wanted. Returns the complete
    /// embeddings.
    fn take_states(&mut self) -> Vec<RequestUpdate> {
        let mut complete = Vec::new();
        for draw in self.steps.runner.sampler().draws() {
            let DrawOutcome::State { state, is_last } = &draw.outcome else {
                continue;
            };
            let id = draw.sequence;
            let request = self.requests.get_mut(&id);
            let request = request.expect("it ends after its last state");
            let pooling = request.sampling.pooling.expect("it wants an embedding");
            let embedding = &mut request.embedding;
            let begin = || TextEmbedding::of(pooling, state.len());
            embedding.get_or_insert_with(begin).add(state);
            if *is_last && let Some(embedding) = embedding.take() {
                let embedding = embedding.finish().expect("each state is finite");
                complete.push(RequestUpdate::Embedded { id, embedding });
            }
        }
        complete
    }

    /// Takes the scheduler's events. The ends of requests come after their tokens, so they go to
    /// `endings`.
    fn take_events(&mut self, updates: &mut Vec<RequestUpdate>) {
        for event in self.steps.scheduler.events() {
            match event {
                Event::Admitted { id, cached_tokens } => {
                    if let Some(request) = self.requests.get(&id) {
                        let shared = &request.shared.cached_tokens;
                        shared.get_or_init(|| cached_tokens);
                    }
                    updates.push(RequestUpdate::Admitted { id });
                }
                Event::Displaced {
                    id,
                    tenant,
                    retry_after,
                } => {
                    self.tenants.ended(tenant);
                    drop(forget(id, &mut self.requests, &mut self.tickets));
                    self.endings.push(RequestUpdate::Displaced {
                        id,
                        tenant,
                        retry_after,
                    });
                }
                Event::Preempted { .. } => {} // Clients do not see it; the snapshot counts it.
                Event::Finished {
                    id,
                    reason,
                    tenant,
                    prompt_tokens,
                    cached_tokens,
                    output_tokens,
                } => {
                    self.tenants.ended(tenant);
                    let request = forget(id, &mut self.requests, &mut self.tickets);
                    let draws = self.steps.runner.sampler().draws();
                    self.endings.push(RequestUpdate::Ended(EndedSequence {
                        id,
                        dead_end: dead_end(id, &request, draws),
                        reason,
                        prompt_tokens,
                        cached_tokens,
                        output_tokens,
                    }));
                }
            }
        }
    }

    /// Called when no request runs or waits: blocks until a command comes or the drain deadline
    /// passes. Meanwhile it prepares faster steps and takes the memory that is only reserved. If
    /// the cost of a step is to be measured again, it does that after a pause.
    fn wait(&mut self) {
        if self.is_over() {
            return;
        }
        // First what requests have asked for. The memory takes seconds, and no step needs it yet.
        while !self.commands.is_ready() && self.steps.runner.prepare() {}
        while self.has_reserved_memory && !self.commands.is_ready() {
            self.has_reserved_memory = self.steps.runner.take_memory();
        }
        if let Some(recalibration) = &self.recalibration
            && self.drain_deadline.is_none()
        {
            let (pause, began) = (recalibration.pause(), Instant::now());
            self.commands.wait(Some(pause));
            if began.elapsed() >= pause && !self.commands.is_ready() {
                self.recalibrate();
            }
            return;
        }
        let now = self.commands.shared.clock.micros(Instant::now());
        let left = |deadline: Micros| Duration::from_micros(deadline.saturating_sub(now));
        self.commands.wait(self.drain_deadline.map(left));
    }

    /// Measures the cost of a step again, until a command comes. The cached prefixes stay, because
    /// the measurement writes only into free pages.
    fn recalibrate(&mut self) {
        let Some(recalibration) = &mut self.recalibration else {
            return;
        };
        let (commands, steps) = (&self.commands, &mut self.steps);
        let (pages, slabs) = (steps.scheduler.free_pages(), steps.scheduler.free_slabs());
        if pages.is_empty() || slabs.is_some_and(<[StateSlab]>::is_empty) {
            return; // Cached prefixes take all memory.
        }
        let free = FreeMemory { pages, slabs };
        let measured = recalibration.measure(&mut steps.runner, free, || commands.is_ready());
        if let Some(cost) = measured {
            self.sampling_costs = SamplingCosts::measure(&mut steps.runner, free);
            steps.scheduler.calibrate(cost);
            self.recalibration = None;
            self.recalibrated = Some(cost);
        }
    }
}

/// Forgets a sequence that has ended.
fn forget(
    id: SequenceId,
    requests: &mut HashMap<SequenceId, RequestState>,
    tickets: &mut HashMap<Ticket, SequenceId>,
) -> RequestState {
    let request = requests.remove(&id).expect("a sequence ends once");
    tickets.remove(&request.ticket);
    request
}

/// Returns why no token can follow in an output that follows a grammar, if a draw failed for that.
fn dead_end(id: SequenceId, request: &RequestState, draws: &[Draw]) -> Option<String> {
    let constrained = request.constrained.as_ref()?;
    let mut own = draws.iter().filter(|draw| draw.sequence == id);
    own.find_map(|draw| match draw.outcome {
        DrawOutcome::Failed(Unsampleable::DeadEnd) => {
            let failure = constrained.masks().failure();
            Some(failure.unwrap_or("no token may follow").to_owned())
        }
        DrawOutcome::Failed(Unsampleable::NothingAllowed) => {
            let why = "the bias and the minimum length forbid every token that may follow";
            Some(why.to_owned())
        }
        _ => None,
    })
}

/// Splits a request into the scheduler's part and its sampling parameters. `waited` is the time
/// since its arrival, which its deadlines include.
fn for_scheduler(
    request: GenerationRequest,
    draw_time: Nanos,
    waited: Micros,
) -> (Request, SamplingParams) {
    let left = |limit: Duration| micros(limit).saturating_sub(waited);
    let scheduled = Request {
        prompt: request.prompt,
        max_new_tokens: request.max_new_tokens,
        is_length_given: request.is_length_given,
        min_new_tokens: request.min_new_tokens,
        stop_tokens: request.stop_tokens,
        scores_prompt: request.sampling.prompt_logprobs.is_some()
            || request.sampling.pooling == Some(Pooling::Mean),
        is_diffused: request.sampling.unmasking.is_some(),
        draw_time,
        tenant: request.tenant,
        sub_tenant: request.sub_tenant,
        band: request.band,
        first_token_within: request.first_token_within.map(left),
        ends_within: request.ends_within.map(left),
    };
    (scheduled, request.sampling)
}
