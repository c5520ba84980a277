//! A request seen from its client: events in, at most one early ending out.
//!
//! Invariant: exactly one terminal event is delivered, whatever happens to the engine; a stream dropped before it is a cancel.

use std::sync::Arc;

use sterna_scheduler::{FinishReason, Rates};

use super::lanes::{Common, Control, Ticket};
use super::{EngineHandle, StreamEvent, SubmitError, egress};

/// The events of one request. Dropping it before the terminal event cancels the request.
pub struct EventStream {
    ticket: Ticket,
    events: egress::EventReceiver,
    common: Arc<Common>,
    prompt_tokens: u32,
    accepted: bool,
    over: bool,
    received_tokens: u32,
    engine: EngineHandle,
}

impl EventStream {
    pub(super) fn new(
        ticket: Ticket,
        events: egress::EventReceiver,
        common: Arc<Common>,
        prompt_tokens: u32,
        engine: EngineHandle,
    ) -> EventStream {
        EventStream {
            ticket,
            events,
            common,
            prompt_tokens,
            accepted: false,
            over: false,
            received_tokens: 0,
            engine,
        }
    }

    /// Waits until the scheduler has taken the request: for the step under way and the next at most.
    /// Call it first to choose an HTTP status.
    ///
    /// # Errors
    /// Why the engine rejected the request.
    pub async fn accepted(&mut self) -> Result<(), SubmitError> {
        assert!(!self.accepted, "accepted() comes before everything else");
        match self.recv().await {
            Some(StreamEvent::Refused(error)) => Err(error),
            Some(StreamEvent::Accepted) => Ok(()),
            other => unreachable!("the first event is an answer to the submission, not {other:?}"),
        }
    }

    /// The next event; `None` after the terminal one.
    pub async fn recv(&mut self) -> Option<StreamEvent> {
        while !self.over {
            let event = match self.events.recv().await {
                Some(event) => event,
                None if self.accepted => StreamEvent::Failed("the engine stopped".into()),
                None => StreamEvent::Refused(self.engine.shared.gone()),
            };
            if let Some(event) = self.as_seen_from_here(event) {
                return Some(event);
            }
        }
        None
    }

    /// Where the tenant's rates stood when the scheduler took or refused the request; `None` until its answer has been received, and
    /// when it was never asked.
    pub fn rates(&self) -> Option<Rates> {
        let answered = self.accepted || self.over;
        self.common.rates.get().copied().filter(|_| answered)
    }

    /// Ends the request early, as a stop string does. Later tokens are swallowed; the next event is the terminal one, and
    /// counts the tokens received so far.
    pub fn finish(&mut self, reason: FinishReason) {
        if !self.over && self.common.ending.set(reason).is_ok() {
            self.engine.send(Control::End(self.ticket));
        }
    }

    fn as_seen_from_here(&mut self, mut event: StreamEvent) -> Option<StreamEvent> {
        match &event {
            StreamEvent::Accepted => self.accepted = true,
            StreamEvent::Token(_) if self.common.ending.get().is_some() => return None,
            StreamEvent::Token(_) => self.received_tokens += 1,
            StreamEvent::Finished { .. } | StreamEvent::Failed(_) => {
                self.over = true;
                // The engine may have gone on, ended by itself, or failed, before it heard of `finish`: the answer was complete.
                if let Some(ending) = self.common.ending.get() {
                    event = StreamEvent::Finished {
                        reason: *ending,
                        prompt_tokens: self.prompt_tokens,
                        cached_tokens: self.common.cached_tokens.get().copied().unwrap_or(0),
                        completion_tokens: self.received_tokens,
                    };
                }
            }
            StreamEvent::Refused(_) => self.over = true,
        }
        Some(event)
    }

    /// Nothing was queued, so there is nothing to cancel.
    pub(super) fn rejected(mut self, error: SubmitError) -> SubmitError {
        self.over = true;
        error
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.over && self.common.ending.set(FinishReason::Cancelled).is_ok() {
            self.engine.metrics.client_disconnected();
            self.engine.send(Control::End(self.ticket));
        }
    }
}
