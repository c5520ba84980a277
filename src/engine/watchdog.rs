//! Logs when the engine makes no progress although it has work, and when it does again.
//!
//! It only reports. `Status` decides what a stall is, and `/health` answers by the same rule. A
//! stalled step may still end, so the process is not aborted here.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::status::{SharedState, Status};
use super::sync::Ordering;
use super::sync::thread::{self, JoinHandle};

/// The time between two looks at the status.
const INTERVAL: Duration = Duration::from_secs(1);

/// Starts the thread. It ends after the engine thread, at the latest when `INTERVAL` has passed or
/// the thread is unparked.
pub(super) fn start(shared: Arc<SharedState>) -> io::Result<JoinHandle<()>> {
    let watch = move || {
        let mut watch = StallWatch::default();
        while !shared.ended.load(Ordering::SeqCst) {
            watch.report(&shared.status());
            thread::park_timeout(INTERVAL);
        }
    };
    let thread = thread::Builder::new().name("sterna-watchdog".into());
    thread.spawn(watch)
}

/// A stall begins or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StallChange {
    Stalled,
    Recovered,
}

/// Whether the engine was stalled at the last look.
#[derive(Default)]
struct StallWatch {
    is_stalled: bool,
}

impl StallWatch {
    fn report(&mut self, status: &Status) {
        match self.change(status) {
            Some(StallChange::Stalled) => tracing::error!(
                running = status.running,
                queued = status.queued,
                "no step has ended for {:.1} s; /health answers 503 until one does",
                status.stalled_for.as_secs_f64()
            ),
            Some(StallChange::Recovered) => tracing::info!("steps end again"),
            None => {}
        }
    }

    fn change(&mut self, status: &Status) -> Option<StallChange> {
        let is_stalled = status.alive && !status.healthy();
        let was_stalled = std::mem::replace(&mut self.is_stalled, is_stalled);
        match (was_stalled, is_stalled) {
            (false, true) => Some(StallChange::Stalled),
            (true, false) => Some(StallChange::Recovered),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_reported_once_and_so_is_its_end() {
        let after = |seconds| Status {
            alive: true,
            draining: false,
            steps: 7,
            running: 1,
            queued: 0,
            stalled_for: Duration::from_secs(seconds),
            stall_limit: Duration::from_secs(5),
        };
        let mut watch = StallWatch::default();
        let changes = [0, 5, 6, 7, 0, 1].map(|seconds| watch.change(&after(seconds)));
        let (stalled, recovered) = (Some(StallChange::Stalled), Some(StallChange::Recovered));
        assert_eq!(changes, [None, None, stalled, None, recovered, None]);
    }
}
