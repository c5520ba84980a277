//! Tells systemd that the server is ready, makes progress, or stops (`sd_notify(3)`).
//!
//! Without systemd, in whose services `NOTIFY_SOCKET` is set, nothing is sent.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::runtime::Runtime;
use tokio::time::{MissedTickBehavior, interval};

use crate::engine::{EngineHandle, Status};

/// Tells systemd that the server is ready. If systemd waits for signs of life, sends them from now
/// on, twice in systemd's limit.
pub(super) fn ready(runtime: &Runtime, engine: &EngineHandle) {
    notify(NotifyState::Ready);
    if let Some(limit) = sd_notify::watchdog_enabled() {
        runtime.spawn(send_signs_of_life(limit / 2, engine.clone()));
    }
}

/// Tells systemd that the server stops.
pub(super) fn stopping() {
    notify(NotifyState::Stopping);
}

/// Sends a sign of life in each `period`, as long as the engine makes progress or is idle. So
/// systemd restarts a server whose engine hangs. It also restarts a server whose async threads
/// hang, because these threads send the signs.
async fn send_signs_of_life(period: Duration, engine: EngineHandle) {
    let mut ticks = interval(period.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Some(sign) = sign_of_life(&engine.status()) {
            notify(sign);
        }
    }
}

fn sign_of_life(engine: &Status) -> Option<NotifyState<'static>> {
    engine.healthy().then_some(NotifyState::Watchdog)
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_engine_that_makes_progress_gives_signs_of_life() {
        let engine = |stalled_for, alive| Status {
            alive,
            draining: false,
            steps: 7,
            running: 1,
            queued: 0,
            stalled_for: Duration::from_secs(stalled_for),
            stall_limit: Duration::from_secs(5),
        };
        for (stalled_for, alive, has_sign) in [
            (0, true, true),
            (5, true, true),
            (6, true, false),
            (0, false, false),
        ] {
            let sign = sign_of_life(&engine(stalled_for, alive));
            assert_eq!(sign.is_some(), has_sign, "{stalled_for} s, alive: {alive}");
        }
    }
}
