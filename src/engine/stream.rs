//! The events of one request, as its client reads them.
//!
//! Invariant: a stream ends with one terminal event, also when the engine dies.

use std::sync::Arc;
use std::time::Instant;

use sterna_scheduler::{FinishReason, Rates};

use super::commands::{CommandSender, Control};
use super::request::{StreamEvent, SubmitError};
use super::status::SharedState;
use super::submission::{EventReceiver, RequestMoments, SharedRequest, Ticket};
use crate::metrics::Metrics;

/// The events of one request. Dropping it before the terminal event cancels the request.
pub struct EventStream {
    ticket: Ticket,
    events: EventReceiver,
    request: Arc<SharedRequest>,
    moments: Arc<RequestMoments>,
    prompt_tokens: u32,
    is_accepted: bool,
    is_over: bool,
    received_tokens: u32,
    engine: EngineLink,
}

/// What is known of a request so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamAccount {
    /// The length of the prompt.
    pub prompt_tokens: u32,
    /// The number of prompt tokens that came from the prefix cache; 0 before the first admission.
    pub cached_tokens: u32,
    /// When the scheduler first admitted it.
    pub admitted: Option<Instant>,
    /// When its first token was drawn, or its embedding was complete.
    pub first_token: Option<Instant>,
    /// When its last token was drawn, or its embedding was complete, if it did not fail.
    pub ended: Option<Instant>,
}

/// The parts of the engine that a stream needs.
#[derive(Clone)]
pub(super) struct EngineLink {
    pub(super) commands: CommandSender,
    pub(super) state: Arc<SharedState>,
    pub(super) metrics: Metrics,
}

impl EventStream {
    pub(super) fn new(
        ticket: Ticket,
        events: EventReceiver,
        request: Arc<SharedRequest>,
        moments: Arc<RequestMoments>,
        prompt_tokens: u32,
        engine: EngineLink,
    ) -> EventStream {
        EventStream {
            ticket,
            events,
            request,
            moments,
            prompt_tokens,
            is_accepted: false,
            is_over: false,
            received_tokens: 0,
            engine,
        }
    }

    /// Waits until the scheduler has accepted or refused the request: until the end of the next
    /// step at the latest. Call it first, to choose an HTTP status.
    ///
    /// # Errors
    /// Why the engine refused the request.
    pub async fn accepted(&mut self) -> Result<(), SubmitError> {
        assert!(!self.is_accepted, "accepted() is called first and once");
        match self.recv().await {
            Some(StreamEvent::Refused(error)) => Err(error),
            Some(StreamEvent::Accepted) => Ok(()),
            other => unreachable!("the first event answers the submission, not {other:?}"),
        }
    }

    /// Returns the next event; `None` after the terminal one.
    pub async fn recv(&mut self) -> Option<StreamEvent> {
        while !self.is_over {
            let event = match self.events.recv().await {
                Some(event) => event,
                None if self.is_accepted => StreamEvent::Failed("the engine stopped".into()),
                None => StreamEvent::Refused(self.engine.state.gone()),
            };
            if let Some(event) = self.after_finish(event) {
                return Some(event);
            }
        }
        None
    }

    /// Returns the tenant's rates when the scheduler accepted or refused the request. `None` before
    /// its answer has been received, and if the request never reached the scheduler.
    pub fn rates(&self) -> Option<Rates> {
        let is_answered = self.is_accepted || self.is_over;
        self.request.rates.get().copied().filter(|_| is_answered)
    }

    /// Returns what is known of the request so far.
    pub fn account(&self) -> StreamAccount {
        StreamAccount {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.request.cached_tokens.get().copied().unwrap_or(0),
            admitted: self.moments.admitted.get().copied(),
            first_token: self.moments.first_token.get().copied(),
            ended: self.moments.ended.get().copied(),
        }
    }

    /// Ends the request early, as a stop string does. The stream drops later tokens. Its next event
    /// is the terminal one, which counts the tokens received so far.
    pub fn finish(&mut self, reason: FinishReason) {
        if !self.is_over && self.request.ending.set(reason).is_ok() {
            self.engine.end(self.ticket);
        }
    }

    /// Returns a handle that can end the request too.
    pub fn ender(&self) -> RequestEnder {
        RequestEnder {
            ticket: self.ticket,
            request: Arc::clone(&self.request),
            engine: self.engine.clone(),
        }
    }

    /// Returns the event that the client sees; `finish` may have changed or dropped it.
    fn after_finish(&mut self, mut event: StreamEvent) -> Option<StreamEvent> {
        match &event {
            StreamEvent::Accepted => self.is_accepted = true,
            StreamEvent::Token(_) | StreamEvent::Embedding(_)
                if self.request.ending.get().is_some() =>
            {
                return None;
            }
            StreamEvent::Token(_) => self.received_tokens += 1,
            StreamEvent::Scored(_) | StreamEvent::Embedding(_) => {}
            StreamEvent::Finished { .. } | StreamEvent::DeadEnd(_) | StreamEvent::Failed(_) => {
                self.is_over = true;
                // The engine may have continued, ended or failed before it received `End`. The
                // client's answer was complete when it called `finish`, so that is what it gets.
                if let Some(ending) = self.request.ending.get() {
                    event = StreamEvent::Finished {
                        reason: *ending,
                        prompt_tokens: self.prompt_tokens,
                        cached_tokens: self.account().cached_tokens,
                        completion_tokens: self.received_tokens,
                    };
                }
            }
            StreamEvent::Refused(_) => self.is_over = true,
        }
        Some(event)
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.is_over && self.request.ending.set(FinishReason::Cancelled).is_ok() {
            self.engine.end(self.ticket);
            self.engine.metrics.client_disconnected();
        }
    }
}

/// Ends a request whose stream is elsewhere.
pub struct RequestEnder {
    ticket: Ticket,
    request: Arc<SharedRequest>,
    engine: EngineLink,
}

impl RequestEnder {
    /// Ends the request, as [`EventStream::finish`] does. Has no effect on one that has ended.
    pub fn finish(&self, reason: FinishReason) {
        if self.request.ending.set(reason).is_ok() {
            self.engine.end(self.ticket);
        }
    }
}

impl EngineLink {
    /// Tells the engine thread that the stream has set its request's `ending`.
    fn end(&self, ticket: Ticket) {
        // An engine thread that has ended has no request left to cancel.
        let _ = self.commands.control.send(Control::End(ticket));
        self.state.refused.note_end();
    }
}
