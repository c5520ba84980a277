//! Who may have masks computed and grammars compiled now, and how fast.
//!
//! Each tenant has a few turns at a time, so the system shares the processor evenly between tenants
//! that compute masks. While the engine computes other answers, a tenant's grammars have a part of
//! one core and no more. Ordinary masks do not count: a mask costs its tenant nothing up to
//! [`FREE_MASK`].
//!
//! ```text
//! before a job:  wait for a turn; while the engine is busy, wait until the meter conforms
//! during a job:  if the meter would not conform now, and the engine is busy: pause the worker
//! after a job:   charge its processor time
//! ```
//!
//! The engine also hears of the processor time, of free masks too, and counts it as service of the
//! tenant.
//!
//! A lower priority (`nice`) was rejected: a process cannot raise its priority again, and at a low
//! one ordinary masks would come late on a busy machine.

use std::collections::HashMap;
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sterna_scheduler::{Meter, Rate};

/// The processor time of a mask that is not charged.
const FREE_MASK: Duration = Duration::from_millis(1);

/// The part of a core that a tenant's compilations get, and its masks too, in microseconds of a
/// minute: a fortieth. The burst is 100 ms. Whatever a worker takes of a core holds up a whole
/// step, because the step waits for its slowest thread.
const RATE: Rate = Rate {
    per_minute: 1_500_000,
    burst: 100_000,
};

/// How long a job that is over its tenant's part runs until it is paused.
pub(super) const SLICE: Duration = Duration::from_millis(2);

/// How long the job is paused then, so that it gets its part.
pub(super) const PAUSE: Duration = Duration::from_millis(78);

/// The engine hears of a tenant's time once the time is this long, so that short masks do not fill
/// the engine's queue.
const LEAST_CHARGE: Duration = Duration::from_millis(1);

/// The turns of all tenants.
pub(super) struct WorkerTurns {
    tenants: Mutex<HashMap<u32, TenantTurns>>,
    freed: Condvar,
    at_once: usize,
    clock: Instant,
    is_busy: Box<dyn Fn() -> bool + Send + Sync>,
    charge: Box<dyn Fn(u32, Duration) + Send + Sync>,
}

/// What a worker does in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum WorkKind {
    Compilation,
    Mask,
}

/// A tenant's turns and its processor time.
struct TenantTurns {
    masks: usize,        // That are computed now.
    used: [Duration; 2], // In all: for compilations and for masks.
    uncharged: Duration, // That the engine has not heard of.
    meters: [Meter; 2],
}

impl WorkerTurns {
    /// Creates turns of which a tenant has `at_once` for masks. `is_busy` says whether the engine
    /// computes answers; `charge` tells the engine of a tenant's processor time.
    pub(super) fn new(
        at_once: usize,
        is_busy: impl Fn() -> bool + Send + Sync + 'static,
        charge: impl Fn(u32, Duration) + Send + Sync + 'static,
    ) -> WorkerTurns {
        WorkerTurns {
            tenants: Mutex::default(),
            freed: Condvar::new(),
            at_once,
            clock: Instant::now(),
            is_busy: Box::new(is_busy),
            charge: Box::new(charge),
        }
    }

    /// Waits for a turn of `tenant`.
    pub(super) fn begin(&self, tenant: u32, work: WorkKind) {
        let mut tenants = self.tenants();
        loop {
            let account = tenants.entry(tenant).or_insert_with(TenantTurns::new);
            let early = match account.meters[work as usize].conforms(self.now()) {
                Err(micros) if (self.is_busy)() => Some(Duration::from_micros(micros)),
                _ => None,
            };
            let has_turn = work == WorkKind::Compilation || account.masks < self.at_once;
            if early.is_none() && has_turn {
                account.masks += usize::from(work == WorkKind::Mask);
                return;
            }
            // The engine may be idle soon.
            let wait = early.map_or(PAUSE, |early| early.min(PAUSE));
            let woken = self.freed.wait_timeout(tenants, wait);
            tenants = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns whether a job that has run for `time` must pause.
    pub(super) fn must_pause(&self, tenant: u32, work: WorkKind, time: Duration) -> bool {
        let mut tenants = self.tenants();
        let account = tenants.entry(tenant).or_insert_with(TenantTurns::new);
        let mut meter = account.meters[work as usize];
        meter.charge(self.now(), charged(work, time));
        meter.conforms(self.now()).is_err() && (self.is_busy)()
    }

    /// Ends a turn that has taken this much processor time.
    pub(super) fn end(&self, tenant: u32, work: WorkKind, time: Duration) {
        let now = self.now();
        let mut tenants = self.tenants();
        let account = tenants.entry(tenant).or_insert_with(TenantTurns::new);
        account.used[work as usize] += time;
        account.uncharged += time;
        let due = account.uncharged >= LEAST_CHARGE;
        let due = due.then(|| mem::take(&mut account.uncharged));
        account.meters[work as usize].charge(now, charged(work, time));
        if work == WorkKind::Mask {
            account.masks -= 1;
            self.freed.notify_all();
        }
        drop(tenants);
        if let Some(due) = due {
            (self.charge)(tenant, due);
        }
    }

    /// Returns the processor time that each tenant has used: for compilations and for masks.
    pub(super) fn used(&self) -> Vec<(u32, [Duration; 2])> {
        let tenants = self.tenants();
        tenants.iter().map(|(id, own)| (*id, own.used)).collect()
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_micros() as u64
    }

    /// No method panics halfway through a change, so the state is right even if the lock is
    /// poisoned.
    fn tenants(&self) -> MutexGuard<'_, HashMap<u32, TenantTurns>> {
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TenantTurns {
    fn new() -> TenantTurns {
        TenantTurns {
            masks: 0,
            used: [Duration::ZERO; 2],
            uncharged: Duration::ZERO,
            meters: [Meter::new(RATE); 2],
        }
    }
}

fn charged(work: WorkKind, time: Duration) -> u64 {
    let free = match work {
        WorkKind::Compilation => Duration::ZERO,
        WorkKind::Mask => FREE_MASK,
    };
    time.saturating_sub(free).as_micros() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn costly_work_pauses_while_the_engine_is_busy() {
        let is_busy = Arc::new(AtomicBool::new(true));
        let busy = Arc::clone(&is_busy);
        let turns = WorkerTurns::new(1, move || busy.load(Ordering::Relaxed), |_, _| ());
        let mask = |tenant, time| {
            turns.begin(tenant, WorkKind::Mask);
            turns.end(tenant, WorkKind::Mask, time);
        };
        for _ in 0..10_000 {
            mask(1, FREE_MASK);
        }
        let must_pause = |tenant, kind| turns.must_pause(tenant, kind, SLICE);
        assert!(!must_pause(1, WorkKind::Mask), "ordinary masks are free");
        mask(1, Duration::from_secs(1));
        assert!(must_pause(1, WorkKind::Mask));
        assert!(
            !must_pause(1, WorkKind::Compilation),
            "it has a part of its own"
        );
        assert!(!must_pause(2, WorkKind::Mask), "another tenant");
        is_busy.store(false, Ordering::Relaxed);
        assert!(!must_pause(1, WorkKind::Mask), "nobody else needs the core");
        mask(1, Duration::ZERO); // It does not wait.
        let used = turns.used();
        let own = used.iter().find(|(tenant, _)| *tenant == 1);
        assert_eq!(own.unwrap().1, [Duration::ZERO, Duration::from_secs(11)]);
    }

    #[test]
    fn the_engine_hears_of_all_processor_time_and_not_of_each_short_mask() {
        let charges = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&charges);
        let charge = move |tenant, time| heard.lock().unwrap().push((tenant, time));
        let turns = WorkerTurns::new(1, || true, charge);
        let work = |tenant, kind, micros| {
            turns.begin(tenant, kind);
            turns.end(tenant, kind, Duration::from_micros(micros));
        };
        for _ in 0..40 {
            work(1, WorkKind::Mask, 50);
            work(2, WorkKind::Mask, 10);
        }
        work(2, WorkKind::Compilation, 3000);
        let expected = [(1, 1000), (1, 1000), (2, 3400)];
        let expected = expected.map(|(tenant, micros)| (tenant, Duration::from_micros(micros)));
        assert_eq!(*charges.lock().unwrap(), expected);
    }
}
