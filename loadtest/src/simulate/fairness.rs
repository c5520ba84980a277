//! Who got how much of the machine while they had work waiting.
//!
//! A tenant is *backlogged* in a window of a minute if some request of it waited all the time. Among those, service over
//! weight should be equal: Jain's index says how nearly (1 is perfect; Jain, Chiu, Hawe 1984).

use serde::Serialize;
use sterna_scheduler::Micros;

use crate::workload::Workload;

const WINDOW: Micros = 60_000_000;

const NOT_WAITING: Micros = Micros::MAX;

/// Service of all tenants; work that grows with their number is done once a window.
pub(super) struct Fairness {
    weights: Vec<u32>,
    waiting: Vec<u32>,
    waits_since: Vec<Micros>,
    service: Vec<u64>, // Nanoseconds, in this window.
    ends: Micros,      // Of this window.
    now: Micros,
    backlogged: Vec<usize>, // In the window before.
    together: Vec<f64>, // What each of those got since they are backlogged together, over its weight.
    sums: Sums,
}

#[derive(Default)]
struct Sums {
    windows: u64,
    jain: f64,
    least_jain: f64,
    error: f64,
    largest_error: f64,
    largest_lag: f64,
    long_run_error: f64,
}

/// The figures. Absent ones had no window with two backlogged tenants.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct FairnessReport {
    /// Windows of a minute in which at least two tenants were backlogged.
    pub(super) windows: u64,
    /// Jain's index, on average over the windows.
    pub(super) jain: f64,
    /// In the worst window.
    pub(super) least_jain: f64,
    /// By how much of its due share the worst-served or best-served tenant was off, on average over the windows.
    pub(super) share_error: f64,
    /// In the worst window.
    pub(super) largest_share_error: f64,
    /// The same over the whole time that the last ones were backlogged together.
    pub(super) long_run_share_error: f64,
    /// Seconds of machine time over weight by which one tenant was ever ahead of another.
    pub(super) largest_lag_seconds: f64,
}

impl Fairness {
    /// Nobody waits.
    pub(super) fn new(workload: &Workload) -> Fairness {
        let count = workload.tenants() as usize;
        Fairness {
            weights: (0..workload.tenants())
                .map(|tenant| workload.weight(tenant))
                .collect(),
            waiting: vec![0; count],
            waits_since: vec![NOT_WAITING; count],
            service: vec![0; count],
            ends: WINDOW,
            now: 0,
            backlogged: Vec::new(),
            together: Vec::new(),
            sums: Sums {
                least_jain: 1.0,
                ..Sums::default()
            },
        }
    }

    /// It is `now`.
    pub(super) fn tell_time(&mut self, now: Micros) {
        self.now = now;
        if now >= self.ends {
            self.close_window();
            self.ends = (now / WINDOW + 1) * WINDOW;
        }
    }

    /// One more request of this tenant waits.
    pub(super) fn waits(&mut self, tenant: u32) {
        let tenant = tenant as usize;
        self.waiting[tenant] += 1;
        self.waits_since[tenant] = self.waits_since[tenant].min(self.now);
    }

    /// One less.
    pub(super) fn waits_no_more(&mut self, tenant: u32) {
        let tenant = tenant as usize;
        self.waiting[tenant] -= 1;
        if self.waiting[tenant] == 0 {
            self.waits_since[tenant] = NOT_WAITING;
        }
    }

    /// The machine worked for this tenant.
    pub(super) fn serve(&mut self, tenant: u32, nanos: u64) {
        self.service[tenant as usize] += nanos;
    }

    /// The figures, if tenants ever competed.
    pub(super) fn report(&self) -> Option<FairnessReport> {
        let Sums { windows, .. } = self.sums;
        (windows > 0).then(|| FairnessReport {
            windows,
            jain: self.sums.jain / windows as f64,
            least_jain: self.sums.least_jain,
            share_error: self.sums.error / windows as f64,
            largest_share_error: self.sums.largest_error,
            long_run_share_error: self.sums.long_run_error,
            largest_lag_seconds: self.sums.largest_lag,
        })
    }

    fn close_window(&mut self) {
        let starts = self.ends - WINDOW;
        let since = self.waits_since.iter().enumerate();
        let waited = since.filter(|(_, since)| **since <= starts);
        let backlogged: Vec<usize> = waited.map(|(tenant, _)| tenant).collect();
        if backlogged.len() > 1 {
            self.measure(backlogged);
        }
        self.service.fill(0);
    }

    fn measure(&mut self, backlogged: Vec<usize>) {
        let due = |&tenant: &usize| self.service[tenant] as f64 / f64::from(self.weights[tenant]);
        let shares: Vec<f64> = backlogged.iter().map(due).collect();
        if backlogged != self.backlogged {
            self.together = vec![0.0; backlogged.len()];
            self.backlogged = backlogged;
        }
        for (sum, share) in self.together.iter_mut().zip(&shares) {
            *sum += share;
        }
        let sums = &mut self.sums;
        let index = jain(&shares);
        let error = largest_error(&shares);
        sums.windows += 1;
        sums.jain += index;
        sums.least_jain = sums.least_jain.min(index);
        sums.error += error;
        sums.largest_error = sums.largest_error.max(error);
        sums.long_run_error = largest_error(&self.together);
        let most = self.together.iter().fold(0.0, |a: f64, b| a.max(*b));
        let least = self.together.iter().fold(f64::INFINITY, |a, b| a.min(*b));
        sums.largest_lag = sums.largest_lag.max((most - least) / 1e9);
    }
}

/// (Σx)² / (n Σx²).
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 {
        return 1.0;
    }
    sum * sum / (shares.len() as f64 * squares)
}

/// How far the furthest is from the mean, as part of the mean.
fn largest_error(shares: &[f64]) -> f64 {
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let error = |share: &f64| (share - mean).abs() / mean.max(1.0);
    shares.iter().map(error).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::named;

    #[test]
    fn one_who_gets_everything_is_unfair() {
        assert!((jain(&[5.0, 5.0, 5.0, 5.0]) - 1.0).abs() < 1e-12);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((largest_error(&[3.0, 1.0]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn weights_are_shares_and_only_the_backlogged_count() {
        let mut fairness = Fairness::new(&named("weighted").unwrap());
        (0..3).for_each(|tenant| fairness.waits(tenant));
        fairness.serve(0, 1_000_000_000);
        fairness.serve(1, 2_000_000_000);
        fairness.serve(3, 9_000_000_000); // Never waits.
        fairness.waits_no_more(2); // Waits no more.
        fairness.tell_time(WINDOW);
        let report = fairness.report().unwrap();
        assert_eq!((report.windows, report.jain), (1, 1.0));
        fairness.serve(0, 3_000_000_000);
        fairness.serve(1, 2_000_000_000);
        fairness.tell_time(2 * WINDOW);
        let report = fairness.report().unwrap();
        assert!((report.least_jain - 0.8).abs() < 1e-9, "{report:?}");
        assert!(
            (report.largest_lag_seconds - 2.0).abs() < 1e-9,
            "{report:?}"
        );
    }
}
