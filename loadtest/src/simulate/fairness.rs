//! Measures how evenly backlogged tenants were served.
//!
//! A tenant is backlogged in a window of one minute if it had a queued request during the whole
//! window. Among backlogged tenants, service divided by weight should be equal. Jain's index
//! measures how equal it is; 1 is perfect (Jain, Chiu and Hawe, 1984).

use serde::Serialize;
use sterna_scheduler::Micros;

use crate::workload::Workload;

const WINDOW: Micros = 60_000_000;

const NOT_QUEUED: Micros = Micros::MAX;

/// The service of all tenants. Work that grows with their number is done once per window.
pub(super) struct Fairness {
    weights: Vec<u32>,
    queued: Vec<u32>, // Queued requests, by tenant.
    queued_since: Vec<Micros>,
    service: Vec<u64>,  // Nanoseconds in this window, by tenant.
    window_end: Micros, // The end of this window.
    now: Micros,
    backlogged: Vec<usize>, // The tenants that were backlogged in the previous window.
    // In the order of `backlogged`: service ÷ weight since this set became backlogged.
    together: Vec<f64>,
    sums: FairnessReport, // With sums in place of means.
}

/// The figures over all windows with at least two backlogged tenants.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct FairnessReport {
    /// The number of these windows.
    pub(super) windows: u64,
    /// The mean of Jain's index.
    pub(super) jain: f64,
    /// Jain's index of the worst window.
    pub(super) least_jain: f64,
    /// The mean of the largest deviation of a tenant from its due share, relative to that share.
    pub(super) share_error: f64,
    /// The same of the worst window.
    pub(super) largest_share_error: f64,
    /// The same over the whole time in which the last backlogged tenants were backlogged together.
    pub(super) long_run_share_error: f64,
    /// The largest lead of one tenant over another, in machine seconds over weight.
    pub(super) largest_lag_seconds: f64,
}

impl Fairness {
    /// Creates the record of a run in which no request is queued yet.
    pub(super) fn new(workload: &Workload) -> Fairness {
        let count = workload.tenants() as usize;
        Fairness {
            weights: (0..workload.tenants())
                .map(|tenant| workload.weight(tenant))
                .collect(),
            queued: vec![0; count],
            queued_since: vec![NOT_QUEUED; count],
            service: vec![0; count],
            window_end: WINDOW,
            now: 0,
            backlogged: Vec::new(),
            together: Vec::new(),
            sums: FairnessReport {
                least_jain: 1.0,
                ..FairnessReport::default()
            },
        }
    }

    /// Sets the time of the following events.
    pub(super) fn advance_to(&mut self, now: Micros) {
        self.now = now;
        if now >= self.window_end {
            self.close_window();
            self.window_end = (now / WINDOW + 1) * WINDOW;
        }
    }

    /// Records that one more request of the tenant is queued.
    pub(super) fn queued(&mut self, tenant: u32) {
        let tenant = tenant as usize;
        self.queued[tenant] += 1;
        self.queued_since[tenant] = self.queued_since[tenant].min(self.now);
    }

    /// Records that one request of the tenant is no longer queued.
    pub(super) fn dequeued(&mut self, tenant: u32) {
        let tenant = tenant as usize;
        self.queued[tenant] -= 1;
        if self.queued[tenant] == 0 {
            self.queued_since[tenant] = NOT_QUEUED;
        }
    }

    /// Records machine time spent on the tenant.
    pub(super) fn serve(&mut self, tenant: u32, nanos: u64) {
        self.service[tenant as usize] += nanos;
    }

    /// Returns the figures, or `None` if no window had two backlogged tenants.
    pub(super) fn report(&self) -> Option<FairnessReport> {
        let sums = self.sums;
        (sums.windows > 0).then(|| FairnessReport {
            jain: sums.jain / sums.windows as f64,
            share_error: sums.share_error / sums.windows as f64,
            ..sums
        })
    }

    fn close_window(&mut self) {
        let starts = self.window_end - WINDOW;
        let since = self.queued_since.iter().enumerate();
        let whole_window = since.filter(|(_, since)| **since <= starts);
        let backlogged: Vec<usize> = whole_window.map(|(tenant, _)| tenant).collect();
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
        let error = max_error(&shares);
        sums.windows += 1;
        sums.jain += index;
        sums.least_jain = sums.least_jain.min(index);
        sums.share_error += error;
        sums.largest_share_error = sums.largest_share_error.max(error);
        sums.long_run_share_error = max_error(&self.together);
        let max = self.together.iter().fold(0.0, |a: f64, b| a.max(*b));
        let min = self.together.iter().fold(f64::INFINITY, |a, b| a.min(*b));
        sums.largest_lag_seconds = sums.largest_lag_seconds.max((max - min) / 1e9);
    }
}

/// Returns Jain's index, (Σx)² / (n Σx²).
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 {
        return 1.0;
    }
    sum * sum / (shares.len() as f64 * squares)
}

/// Returns the largest deviation from the mean, relative to the mean.
fn max_error(shares: &[f64]) -> f64 {
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let error = |share: &f64| (share - mean).abs() / mean.max(1.0);
    shares.iter().map(error).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::named;

    #[test]
    fn equal_shares_are_fair_and_one_tenant_with_all_service_is_not() {
        assert!((jain(&[5.0, 5.0, 5.0, 5.0]) - 1.0).abs() < 1e-12);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((max_error(&[3.0, 1.0]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn shares_are_weighted_and_only_backlogged_tenants_count() {
        let mut fairness = Fairness::new(&named("weighted").unwrap());
        (0..3).for_each(|tenant| fairness.queued(tenant));
        fairness.serve(0, 1_000_000_000);
        fairness.serve(1, 2_000_000_000);
        fairness.serve(3, 9_000_000_000); // Tenant 3 is never queued.
        fairness.dequeued(2); // Tenant 2 is not queued for the whole window.
        fairness.advance_to(WINDOW);
        let report = fairness.report().unwrap();
        assert_eq!((report.windows, report.jain), (1, 1.0));
        fairness.serve(0, 3_000_000_000);
        fairness.serve(1, 2_000_000_000);
        fairness.advance_to(2 * WINDOW);
        let report = fairness.report().unwrap();
        assert!((report.least_jain - 0.8).abs() < 1e-9, "{report:?}");
        assert!(
            (report.largest_lag_seconds - 2.0).abs() < 1e-9,
            "{report:?}"
        );
    }
}
