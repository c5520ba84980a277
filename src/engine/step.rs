//! The engine thread: take commands, plan, forward, sample, commit, publish. It does nothing outside this order.
//!
//! Invariant: a panic in forward or sampling ends the requests of that step and nothing else. A panic anywhere else here is a bug
//! in serving state itself: it ends the thread, and with it every stream, at once.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crossbeam::channel::TryRecvError;
use sterna_scheduler::{
    CostModel, Event as Happened, FinishReason, Micros, Plan, Request, Scheduler, SequenceId,
};

use super::batch_sampler::{BatchSampler, Continued, Terms};
use super::calibrate::calibrate;
use super::egress::{Notice, StepTimes, Turn};
use super::lanes::{Common, Control, Lanes, Submission, Ticket};
use super::tenants::Tenants;
use super::{EngineConfig, Forward};
use crate::cores;
use crate::metrics::Timeline;

/// The body of the engine thread: serves until a drain has ended or every handle is gone.
pub(super) fn serve<F: Forward>(
    mut model: F,
    mut kv_store: F::KvStore,
    config: EngineConfig,
    lanes: Lanes,
    turns: mpsc::Sender<Turn>,
    calibrated: mpsc::Sender<CostModel>,
) {
    if config.pin {
        pin_to_first_core();
    }
    let mut sampler = BatchSampler::new(model.vocabulary());
    let cost = config
        .cost
        .unwrap_or_else(|| calibrate(&mut model, &mut kv_store, &mut sampler, &config.limits));
    let mut scheduler = Scheduler::new(config.limits, config.policy);
    scheduler.calibrate(cost);
    for prefix in config.public_prefixes {
        scheduler.declare_public(&prefix);
    }
    // Who waits for it goes on, unless it has left.
    let _ = calibrated.send(cost);
    let mut serving = Serving {
        kv_store,
        scheduler,
        sampler,
        model,
        drain_limit: config.drain_limit,
        drain_deadline: None,
        tenants: Tenants::default(),
        sequences: HashMap::new(),
        tickets: HashMap::new(),
        notices: Vec::new(),
        endings: Vec::new(),
        lanes,
        turns,
        publishing: Duration::ZERO,
    };
    while !serving.is_over() {
        serving.step();
    }
}

/// As worker 0 of the model's pool, whose other workers take the cores after it.
fn pin_to_first_core() {
    if !cores::physical().first().copied().is_some_and(cores::pin) {
        tracing::warn!("the engine thread could not be pinned to a core");
    }
}

/// `limit` after `now`; the end of time if there is no such moment.
fn deadline(now: Micros, limit: Duration) -> Micros {
    now.saturating_add(micros(limit))
}

fn micros(duration: Duration) -> Micros {
    Micros::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}

/// All serving state.
struct Serving<F: Forward> {
    scheduler: Scheduler,
    model: F,
    kv_store: F::KvStore,
    sampler: BatchSampler,
    sequences: HashMap<SequenceId, Asked>,
    tickets: HashMap<Ticket, SequenceId>,
    notices: Vec<Notice>, // Since the last publication.
    endings: Vec<Notice>, // Empty between turns; kept for its memory.
    tenants: Tenants,
    drain_limit: Duration,
    drain_deadline: Option<Micros>, // Once a drain has begun.
    lanes: Lanes,
    turns: mpsc::Sender<Turn>,
    publishing: Duration, // What telling of the last step took.
}

/// What the engine keeps of a request, beside what the scheduler does.
struct Asked {
    ticket: Ticket,
    terms: Terms,
    common: Arc<Common>,
}

impl<F: Forward> Serving<F> {
    /// One turn.
    fn step(&mut self) {
        let began = Instant::now();
        self.take_commands(began);
        let planning = Instant::now();
        let step = match self.scheduler.plan(self.lanes.shared.micros(began)) {
            Plan::Idle => {
                self.publish(began, began, None);
                return self.wait();
            }
            Plan::Step(step) => step,
        };
        let planned = Instant::now();
        self.lanes.shared.begin_step(planned);
        let tokens = step.batch().token_count();
        let predicted = Duration::from_micros(step.predicted());
        let calibrated = Duration::from_micros(step.calibrated());
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut logits = self.model.forward(step.batch(), &mut self.kv_store);
            let forwarded = Instant::now();
            let sequences = &self.sequences;
            self.sampler
                .sample(step.batch(), &mut logits, |id| Continued {
                    terms: &sequences[&id].terms,
                    known: step.history(id),
                    prompt_tokens: step.prompt_len(id),
                });
            forwarded
        }));
        let computed = Instant::now();
        let forwarded = *outcome.as_ref().unwrap_or(&computed);
        match outcome {
            Ok(_) => step.commit(self.lanes.shared.micros(computed), &self.sampler.sampled),
            Err(panic) => {
                tracing::error!("a step of {tokens} tokens panicked: {}", message(&*panic));
                let ids: Vec<SequenceId> =
                    step.batch().rows().iter().map(|row| row.sequence).collect();
                step.fail(&ids);
                self.sampler.outputs.clear();
            }
        }
        let committed = Instant::now();
        let times = StepTimes {
            tokens,
            predicted,
            calibrated,
            computing: computed - planned,
            deciding: (planned - planning) + (committed - computed),
            overhead: (planned - began) + (committed - forwarded) + self.publishing,
        };
        self.publish(began, computed, Some(times));
        self.publishing = committed.elapsed();
    }

    fn is_over(&self) -> bool {
        self.drain_deadline.is_some()
            && self.sequences.is_empty()
            && self.lanes.submissions.is_empty()
    }

    fn take_commands(&mut self, at: Instant) {
        let now = self.lanes.shared.micros(at);
        loop {
            match self.lanes.control.try_recv() {
                Ok(Control::End(ticket)) => self.end(ticket),
                Ok(Control::Drain) => self.drain(now, deadline(now, self.drain_limit)),
                Ok(Control::SetTenants { tenants, done }) => {
                    let answer = self.scheduler.set_tenants(&tenants);
                    if answer.is_ok() {
                        let set = tenants.iter().map(|(tenant, _)| *tenant);
                        self.lanes.shared.lane_quota.set(set);
                    }
                    // Whoever asked may have left.
                    let _ = done.send(answer);
                }
                Ok(Control::ResetPrefixCache) => {
                    self.scheduler.reset_prefix_cache();
                    self.tenants.changed();
                }
                Err(TryRecvError::Empty) => break,
                // Every handle and stream is gone: nobody can ask for anything any more.
                Err(TryRecvError::Disconnected) => {
                    self.drain(now, now);
                    break;
                }
            }
        }
        self.take_lane(now);
        if self.drain_deadline.is_some_and(|deadline| deadline <= now) {
            for &id in self.sequences.keys() {
                self.scheduler.cancel(id, FinishReason::Shutdown);
            }
        }
    }

    /// Takes what lies in the submit lane. What comes meanwhile waits for the next turn, so that a flood cannot hold up a step.
    fn take_lane(&mut self, now: Micros) {
        for _ in 0..self.lanes.submissions.len() {
            let Some(submission) = self.lanes.take() else {
                break;
            };
            self.take(submission, now);
        }
    }

    fn take(&mut self, submission: Submission, now: Micros) {
        let Submission {
            ticket,
            request,
            events,
            common,
        } = submission;
        let tenant = request.tenant;
        let timeline = Timeline::new(request.arrived, tenant.0, request.prompt.len() as u32);
        let waited = now.saturating_sub(self.lanes.shared.micros(request.arrived));
        let left = |limit: Duration| micros(limit).saturating_sub(waited);
        let asked = Asked {
            ticket,
            terms: Terms {
                sampling: request.sampling,
                min_new_tokens: request.min_new_tokens as usize,
                max_new_tokens: request.max_new_tokens as usize,
                stop_tokens: request.stop_tokens.clone(),
            },
            common,
        };
        let request = Request {
            prompt: request.prompt,
            max_new_tokens: request.max_new_tokens,
            min_new_tokens: request.min_new_tokens,
            stop_tokens: request.stop_tokens,
            tenant,
            is_another_choice: request.is_another_choice,
            first_token_within: request.first_token_within.map(left),
            ends_within: request.ends_within.map(left),
        };
        let answer = self.scheduler.submit(now, request);
        let rates = self.scheduler.rates(now, tenant);
        asked.common.rates.get_or_init(|| rates);
        match answer {
            Ok(id) => {
                self.tenants.begun(tenant);
                self.notices.push(Notice::Accepted {
                    id,
                    events,
                    timeline,
                });
                self.tickets.insert(ticket, id);
                self.sequences.insert(id, asked);
                self.end_if_asked(id); // Its `End` may have overtaken it on the control lane.
            }
            Err(refusal) => {
                self.notices.push(Notice::Refused {
                    events,
                    tenant,
                    error: refusal.into(),
                });
            }
        }
    }

    /// A ticket that is not known belongs to a request that has ended, or that lies in the submit lane still.
    fn end(&mut self, ticket: Ticket) {
        if let Some(&id) = self.tickets.get(&ticket) {
            self.end_if_asked(id);
        }
    }

    fn end_if_asked(&mut self, id: SequenceId) {
        if let Some(reason) = self.sequences[&id].common.ending.get() {
            self.scheduler.cancel(id, *reason);
        }
    }

    /// Whatever lies in the submit lane was let in before the drain, so it is taken first.
    fn drain(&mut self, now: Micros, deadline: Micros) {
        self.take_lane(now);
        self.scheduler.drain();
        self.drain_deadline = Some(
            self.drain_deadline
                .map_or(deadline, |earlier| earlier.min(deadline)),
        );
    }

    /// Tells the world about this turn. Every event leaves in the order in which its client should see it.
    fn publish(&mut self, planned: Instant, committed: Instant, step: Option<StepTimes>) {
        let mut notices = std::mem::take(&mut self.notices);
        for happened in self.scheduler.events() {
            match happened {
                Happened::Admitted { id, cached_tokens } => {
                    if let Some(asked) = self.sequences.get(&id) {
                        asked.common.cached_tokens.get_or_init(|| cached_tokens);
                    }
                    notices.push(Notice::Admitted { id });
                }
                Happened::Preempted { .. } => {} // Invisible, but for the snapshot's count.
                Happened::Finished {
                    id,
                    reason,
                    tenant,
                    prompt_tokens,
                    cached_tokens,
                    output_tokens,
                } => {
                    self.tenants.ended(tenant);
                    let asked = self.sequences.remove(&id).expect("a sequence ends once");
                    self.tickets.remove(&asked.ticket);
                    self.endings.push(Notice::Finished {
                        id,
                        reason,
                        prompt_tokens,
                        cached_tokens,
                        output_tokens,
                    });
                }
            }
        }
        for (id, outcome) in self.sampler.outputs.drain(..) {
            match outcome {
                Ok(output) => notices.push(Notice::Token { id, output }),
                Err(why) => tracing::error!("a row of logits has no token: {why:?}"),
            }
        }
        notices.append(&mut self.endings);
        self.notices = Vec::with_capacity(notices.len()); // The next turn most often has as many.
        let snapshot = self.scheduler.snapshot();
        let tenants = self.tenants.report(committed, step.is_some(), |tenant| {
            self.scheduler.tenant(tenant)
        });
        self.lanes
            .shared
            .end_turn(committed, step.is_some(), &snapshot);
        let turn = Turn {
            planned,
            committed,
            step,
            snapshot,
            tenants,
            notices,
        };
        self.turns
            .send(turn)
            .expect("the egress thread lives as long as this one");
    }

    /// Nothing can run: waits for a command, or for the end of a drain.
    fn wait(&self) {
        if self.is_over() {
            return;
        }
        let now = self.lanes.shared.micros(Instant::now());
        let moment = self.drain_deadline;
        self.lanes
            .wait(moment.map(|moment| Duration::from_micros(moment.saturating_sub(now))));
    }
}

/// What a panic said.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
