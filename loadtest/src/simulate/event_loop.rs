//! The discrete-event simulation: arrivals, steps and failures of all servers in the order of
//! virtual time.
//!
//! Invariant: a choice of the router depends on nothing that happens later.
//!
//! One server behind any router gets every request, so the simulation of one machine is this one.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use sterna_scheduler::{FinishReason, Micros};

use super::failures::Failures;
use super::machine::SimulatedMachine;
use super::record::{SimulatedRequest, SimulationRecorder, TurnKey};
use super::router::{RoutedRequest, Router};
use super::server::{Departure, LostRequests, ServerSettings, ServerWork, SimulatedServer};
use crate::workload::{Session, Trace};

/// The servers behind their router, the simulated clients, and the virtual clock.
pub(super) struct EventLoop {
    settings: ServerSettings,
    places: Vec<ServerPlace>,
    router: Router,
    failures: Option<Failures>,
    trace: Trace,
    clients: Option<u32>, // Each opens its next session when its last one has ended.
    now: Micros,
    last_number: u64, // The last number given to a session or an event.
    due: BinaryHeap<Reverse<(Micros, DueEvent)>>,
    sessions: HashMap<u64, Session>,
    recorder: SimulationRecorder,
}

/// A server and its part in the event loop.
struct ServerPlace {
    server: SimulatedServer,
    state: ServerState,
}

/// What a server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerState {
    /// It waits until an event comes, perhaps at this time.
    Waiting(Option<Micros>),
    /// It computes a step.
    Stepping,
    /// It computes its last step before it fails.
    Failing,
    /// It has failed and has not returned.
    Failed,
}

/// An event of the future. Events of the same time happen in the order of this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DueEvent {
    StepEnd { server: usize },
    Return { server: usize },
    Failure { server: usize },
    Arrival { number: u64, turn: TurnKey },
    Wake { server: usize },
}

impl EventLoop {
    /// Creates the simulation at time 0, before the first arrival. There is a server on each
    /// machine.
    pub(super) fn new(
        settings: ServerSettings,
        machines: Vec<SimulatedMachine>,
        router: Router,
        trace: Trace,
        recorder: SimulationRecorder,
    ) -> EventLoop {
        let settings = settings.publish(router.reads_events());
        let place = |machine| ServerPlace {
            server: SimulatedServer::new(&settings, machine),
            state: ServerState::Waiting(None),
        };
        EventLoop {
            places: machines.into_iter().map(place).collect(),
            settings,
            router,
            failures: None,
            trace,
            clients: None,
            now: 0,
            last_number: 0,
            due: BinaryHeap::new(),
            sessions: HashMap::new(),
            recorder,
        }
    }

    /// Lets this many clients open the sessions one after the other. The sessions' own times do not
    /// count.
    pub(super) fn clients(mut self, clients: Option<u32>) -> EventLoop {
        self.clients = clients;
        self
    }

    /// Lets machines fail.
    pub(super) fn failures(mut self, failures: Option<Failures>) -> EventLoop {
        self.failures = failures;
        self
    }

    /// Runs until every request has ended. After each event, calls `progress` with the time and the
    /// number of ended requests. Returns the record, and the work of each server.
    pub(super) fn run(
        mut self,
        mut progress: impl FnMut(Micros, u64),
    ) -> (SimulationRecorder, Vec<ServerWork>) {
        for _ in 0..self.clients.unwrap_or(1) {
            self.open_next_session();
        }
        for server in 0..self.places.len() {
            self.plan_failure(server);
        }
        while let Some(Reverse((at, event))) = self.due.pop() {
            match event {
                DueEvent::Wake { server } => {
                    // The server may have other plans since then.
                    if self.places[server].state == ServerState::Waiting(Some(at)) {
                        self.now = at;
                        self.wake(server);
                    }
                }
                // The run ends with the last request, whatever fails later.
                DueEvent::Failure { .. } | DueEvent::Return { .. } if self.sessions.is_empty() => {}
                _ => {
                    self.now = at;
                    self.handle(event);
                }
            }
            progress(self.now, self.recorder.ended());
        }
        let mut evictions = 0;
        for place in &self.places {
            assert!(
                place.server.is_idle(),
                "the scheduler is idle although requests are queued"
            );
            evictions += place.server.evictions();
        }
        self.recorder.end(self.now, evictions);
        let work = self.places.iter().map(|place| place.server.work());
        (self.recorder, work.collect())
    }

    fn handle(&mut self, event: DueEvent) {
        match event {
            DueEvent::StepEnd { server } => self.end_step(server),
            DueEvent::Return { server } => {
                self.places[server].state = ServerState::Waiting(None);
                self.router.returned(server);
                self.plan_failure(server);
            }
            DueEvent::Failure { server } => match self.places[server].state {
                ServerState::Stepping => self.places[server].state = ServerState::Failing,
                _ => self.fail(server),
            },
            DueEvent::Arrival { turn, .. } => {
                // Without clients, the next session is always due.
                if turn.index == 0 && self.clients.is_none() {
                    self.open_next_session();
                }
                self.route(self.now, turn);
            }
            DueEvent::Wake { server } => self.wake(server),
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Adds the arrival of the trace's next session.
    fn open_next_session(&mut self) {
        if let Some(session) = self.trace.next() {
            let number = self.next_number();
            let turn = TurnKey {
                session: number,
                index: 0,
            };
            let arrival = DueEvent::Arrival { number, turn };
            let at = match self.clients {
                Some(_) => self.now,
                None => micros(session.at),
            };
            self.due.push(Reverse((at, arrival)));
            self.sessions.insert(number, session);
        }
    }

    /// Sends a turn that arrived at `at` to the server that the router chooses.
    fn route(&mut self, at: Micros, turn: TurnKey) {
        let session = &self.sessions[&turn.session];
        let prompt = if self.router.reads_prompts() {
            session.prompt(turn.index)
        } else {
            Vec::new()
        };
        let request = RoutedRequest {
            session: turn.session,
            tenant: session.tenant,
            prompt: &prompt,
        };
        let Some(server) = self.router.send(&request) else {
            self.recorder.unrouted();
            return self.end_session(turn.session);
        };
        let number = self.next_number();
        let place = &mut self.places[server];
        place.server.arrive(at, number, turn);
        if matches!(place.state, ServerState::Waiting(_)) {
            self.wake_at(server, self.now);
        }
    }

    fn wake_at(&mut self, server: usize, at: Micros) {
        self.places[server].state = ServerState::Waiting(Some(at));
        self.due.push(Reverse((at, DueEvent::Wake { server })));
    }

    /// Lets a server take its events and begin a step. If the scheduler is idle, the server waits.
    fn wake(&mut self, server: usize) {
        let EventLoop {
            places,
            settings,
            sessions,
            recorder,
            last_number,
            ..
        } = self;
        let place = &mut places[server];
        let mut numbers = || {
            *last_number += 1;
            *last_number
        };
        let refused = place
            .server
            .deliver(self.now, settings, sessions, &mut numbers, recorder);
        if !refused.is_empty() {
            // Clients may send other requests at once, which come before the step.
            self.depart(server, refused);
            return self.wake_at(server, self.now);
        }
        if let Some(end) = place.server.step(self.now, recorder) {
            place.state = ServerState::Stepping;
            self.due.push(Reverse((end, DueEvent::StepEnd { server })));
            return;
        }
        place.state = ServerState::Waiting(None);
        if self.handle_scheduler_events(server) {
            self.wake_at(server, self.now);
        } else if let Some(at) = self.places[server].server.next_event() {
            self.wake_at(server, at);
        }
    }

    fn end_step(&mut self, server: usize) {
        let fails = self.places[server].state == ServerState::Failing;
        self.handle_scheduler_events(server);
        if fails {
            self.fail(server);
        } else {
            self.wake_at(server, self.now);
        }
    }

    /// Handles the events of a server's scheduler. Returns whether there were any.
    fn handle_scheduler_events(&mut self, server: usize) -> bool {
        self.recorder.advance_to(self.now);
        let place = &mut self.places[server];
        let (has_events, departures) = place.server.handle_events(&mut self.recorder);
        if self.router.reads_events() {
            let changes = place.server.cache_changes();
            self.router.cache_changed(server, &changes);
        }
        self.depart(server, departures);
        has_events
    }

    /// Handles requests that have left a server.
    fn depart(&mut self, server: usize, departures: Vec<Departure>) {
        for departure in departures {
            match departure {
                Departure::Refused(key, refusal) => {
                    self.router.ended(server, key.session);
                    self.recorder.rejected(&refusal);
                    self.end_session(key.session);
                }
                Departure::Displaced(request, retry_after) => {
                    self.router.ended(server, request.key.session);
                    self.recorder.displaced(&request, retry_after);
                    self.end_session(request.key.session);
                }
                Departure::Finished(request, reason) => {
                    self.router.ended(server, request.key.session);
                    self.finish(&request, reason);
                }
            }
        }
    }

    /// Ends a request. If its answer is complete, adds the arrival of the session's next turn.
    fn finish(&mut self, request: &SimulatedRequest, reason: FinishReason) {
        self.recorder.finished(request, reason);
        let key = TurnKey {
            index: request.key.index + 1,
            ..request.key
        };
        let is_complete = matches!(reason, FinishReason::Stop | FinishReason::Length);
        let turn = self.sessions[&key.session].turns.get(key.index).copied();
        let Some(turn) = turn.filter(|_| is_complete) else {
            return self.end_session(key.session);
        };
        let number = self.next_number();
        let arrival = DueEvent::Arrival { number, turn: key };
        let at = self.now + micros(turn.think);
        self.due.push(Reverse((at, arrival)));
    }

    fn end_session(&mut self, number: u64) {
        self.sessions.remove(&number);
        if self.clients.is_some() {
            self.open_next_session();
        }
    }

    /// Adds the next failure of a server, if machines fail.
    fn plan_failure(&mut self, server: usize) {
        if let Some(failures) = &mut self.failures {
            let at = self.now + failures.time_to_failure(server);
            self.due.push(Reverse((at, DueEvent::Failure { server })));
        }
    }

    /// Fails a server. The router sends the requests without a token again. The others have an
    /// error, because no router can repeat half an answer.
    fn fail(&mut self, server: usize) {
        let down = self.failures.as_ref().map_or(0, Failures::down);
        let place = &mut self.places[server];
        place.state = ServerState::Failed;
        let LostRequests { unanswered, broken } = place.server.fail(&self.settings);
        self.router.failed(server);
        self.recorder.failed();
        let at = self.now + down;
        self.due.push(Reverse((at, DueEvent::Return { server })));
        let mut again = Vec::new();
        for (at, turn) in unanswered {
            self.router.ended(server, turn.session);
            again.push((at, turn));
        }
        for request in broken {
            self.router.ended(server, request.key.session);
            if request.has_begun() {
                self.finish(&request, FinishReason::Error);
            } else {
                self.recorder.lost(&request);
                again.push((request.submitted, request.key));
            }
        }
        for (at, turn) in again {
            self.recorder.sent_again();
            self.route(at, turn);
        }
    }
}

fn micros(seconds: f64) -> Micros {
    (seconds * 1e6) as Micros
}
