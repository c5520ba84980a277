//! The engine's clock: microseconds since the engine started.

use std::time::{Duration, Instant};

use sterna_scheduler::Micros;

/// Converts moments to the scheduler's time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    started: Instant,
}

impl Clock {
    /// Starts at 0 now.
    pub(super) fn start() -> Clock {
        Clock {
            started: Instant::now(),
        }
    }

    /// Returns the microseconds from the start to `at`; 0 for an earlier moment.
    pub(super) fn micros(self, at: Instant) -> Micros {
        micros(at.saturating_duration_since(self.started))
    }
}

/// Returns a duration in microseconds, or the largest number if it is longer.
pub(super) fn micros(duration: Duration) -> Micros {
    Micros::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}
