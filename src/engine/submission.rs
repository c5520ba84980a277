//! A request on its way to the engine thread, and what its stream shares with that thread.

use std::sync::Arc;
use std::time::Instant;

use sterna_scheduler::{FinishReason, Rates, TenantId};

use super::request::{GenerationRequest, StreamEvent};
use super::sync::OnceLock;
use super::sync::events::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use crate::constraint::ConstrainedOutput;

pub(super) type EventSender = UnboundedSender<StreamEvent>;
pub(super) type EventReceiver = UnboundedReceiver<StreamEvent>;

/// Returns the channel of one choice. Its type is unbounded, but `max_new_tokens` bounds how many
/// events are ever sent.
pub(super) fn event_channel() -> (EventSender, EventReceiver) {
    unbounded_channel()
}

/// The number of a request, never reused. A client may leave before the request has a `SequenceId`,
/// so its stream names it by this ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(pub(super) u64);

/// State of a request that its stream and the engine thread share.
#[derive(Default)]
pub(super) struct SharedRequest {
    /// Set by the stream, once, if it ends the request.
    pub(super) ending: OnceLock<FinishReason>,
    /// Set by the engine thread at the first admission, before the first token.
    pub(super) cached_tokens: OnceLock<u32>,
    /// The tenant's rates. Set by the engine thread before it sends `Accepted` or `Refused`.
    pub(super) rates: OnceLock<Rates>,
}

/// The moments of a request. The egress thread sets them.
#[derive(Default)]
pub(super) struct RequestMoments {
    /// The first admission.
    pub(super) admitted: OnceLock<Instant>,
    /// When the first token was drawn, or the embedding was complete.
    pub(super) first_token: OnceLock<Instant>,
    /// When the last token was drawn, or the embedding was complete, if the request did not fail.
    pub(super) ended: OnceLock<Instant>,
}

/// A request on its way to the engine thread, with all its prompts and their choices.
pub(super) struct Submission {
    pub(super) prompts: Vec<GenerationRequest>, // At least one, all of one tenant.
    pub(super) choices: Vec<SubmittedChoice>,   // As many of each prompt, at least one.
}

impl Submission {
    pub(super) fn tenant(&self) -> TenantId {
        self.prompts[0].tenant
    }
}

/// One choice of a request: where its events go.
pub(super) struct SubmittedChoice {
    pub(super) ticket: Ticket,
    pub(super) events: EventSender,
    pub(super) shared: Arc<SharedRequest>,
    pub(super) moments: Arc<RequestMoments>,
    /// Its output, if that follows a grammar.
    pub(super) constrained: Option<ConstrainedOutput>,
}
