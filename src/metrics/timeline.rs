//! The moments of one request, from which its latencies follow.

use std::time::{Duration, Instant};

use sterna_scheduler::TenantId;

/// The moments of one request, filled in as they pass.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    pub(super) arrived: Instant,
    pub(super) tenant: TenantId,
    pub(super) admitted: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    pub(super) prompt_tokens: u32,
    pub(super) generated_tokens: u32,
}

impl Timeline {
    /// Returns the timeline of a request that has just arrived.
    pub fn new(arrived: Instant, tenant: TenantId, prompt_tokens: u32) -> Timeline {
        Timeline {
            arrived,
            tenant,
            admitted: None,
            first_token: None,
            last_token: None,
            prompt_tokens,
            generated_tokens: 0,
        }
    }

    /// Returns the time from the first admission to `at`; `None` if the request was never admitted.
    pub fn service_time(&self, at: Instant) -> Option<Duration> {
        self.admitted
            .map(|admitted| at.saturating_duration_since(admitted))
    }

    /// Returns the time from the arrival to `at`.
    pub(super) fn since_arrival(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.arrived)
    }
}
