//! How much other work disturbed this process: what the system counts of it.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A share of the processors or of the time beyond which work was disturbed.
const LIMIT: f64 = 0.03;

/// The counters at one moment. Counters that the system does not have are 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct InterferenceCounters {
    at: Instant,
    stolen: u64,         // Ticks in which the host ran another virtual machine.
    ticks: u64,          // Of all processors.
    throttled: Duration, // By the quota of the cgroup.
    waited: Duration,    // The time in which this thread was ready and did not run.
}

/// What other work took between two moments, as shares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Interference {
    /// The host's share of the processors' time.
    pub(super) stolen: f64,
    /// The time in which the cgroup's quota was used up.
    pub(super) throttled: f64,
    /// The time in which this thread waited for a processor.
    pub(super) waited: f64,
}

impl InterferenceCounters {
    /// Reads the counters.
    pub(super) fn read() -> InterferenceCounters {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (stolen, ticks) = stolen_ticks(&text("/proc/stat")).unwrap_or_default();
        let paths = cpu_stat_paths(&text("/proc/self/cgroup"));
        let throttled = paths.iter().find_map(|path| {
            let stat = fs::read_to_string(path).ok()?;
            throttled_time(&stat)
        });
        InterferenceCounters {
            at: Instant::now(),
            stolen,
            ticks,
            throttled: throttled.unwrap_or_default(),
            waited: waiting_time(&text("/proc/thread-self/schedstat")).unwrap_or_default(),
        }
    }

    /// Returns what other work took since `before`.
    pub(super) fn since(&self, before: &InterferenceCounters) -> Interference {
        let elapsed = (self.at - before.at).as_secs_f64().max(1e-9);
        let part =
            |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64() / elapsed;
        let ticks = self.ticks.saturating_sub(before.ticks).max(1);
        Interference {
            stolen: self.stolen.saturating_sub(before.stolen) as f64 / ticks as f64,
            throttled: part(self.throttled, before.throttled),
            waited: part(self.waited, before.waited),
        }
    }
}

impl Interference {
    /// Returns whether other work took so much that a measurement is not to be trusted.
    pub(super) fn is_large(&self) -> bool {
        self.stolen > LIMIT || self.throttled > LIMIT || self.waited > LIMIT
    }
}

/// Reads the stolen ticks and all ticks from `/proc/stat` (proc_stat(5)).
fn stolen_ticks(stat: &str) -> Option<(u64, u64)> {
    let all = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = all
        .split_whitespace()
        .map_while(|ticks| ticks.parse().ok())
        .collect();
    // The time of guests, after the eighth column, is part of the first two.
    let all = ticks.get(..8)?;
    Some((all[7], all.iter().sum()))
}

/// Returns where the counters of the processor's cgroup may be, of version 2 or 1. In a container,
/// the root of the mount is the process's own cgroup.
fn cpu_stat_paths(cgroups: &str) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for line in cgroups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let mount = match controllers {
            "" => "/sys/fs/cgroup",
            _ if controllers.split(',').any(|name| name == "cpu") => "/sys/fs/cgroup/cpu",
            _ => continue,
        };
        paths.push(PathBuf::from(format!("{mount}{path}/cpu.stat")));
        paths.push(PathBuf::from(format!("{mount}/cpu.stat")));
    }
    paths
}

/// Reads the throttled time from a `cpu.stat`: microseconds in version 2, nanoseconds in version 1.
fn throttled_time(stat: &str) -> Option<Duration> {
    stat.lines().find_map(|line| match line.split_once(' ')? {
        ("throttled_usec", time) => time.parse().ok().map(Duration::from_micros),
        ("throttled_time", time) => time.parse().ok().map(Duration::from_nanos),
        _ => None,
    })
}

/// Reads the time that a thread waited for a processor from its `schedstat`.
fn waiting_time(schedstat: &str) -> Option<Duration> {
    let waited = schedstat.split_whitespace().nth(1)?;
    waited.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_read() {
        let stat = "cpu  100 0 50 800 10 0 5 35 7 0\ncpu0 1 2 3 4 5 6 7 8\n";
        assert_eq!(stolen_ticks(stat), Some((35, 1000)));
        assert_eq!(stolen_ticks("cpu  1 2 3\n"), None);
        let second = "usage_usec 5\nnr_throttled 2\nthrottled_usec 1500\n";
        assert_eq!(throttled_time(second), Some(Duration::from_micros(1500)));
        let first = "nr_periods 0\nthrottled_time 2000000\n";
        assert_eq!(throttled_time(first), Some(Duration::from_millis(2)));
        assert_eq!(throttled_time("nr_periods 0\n"), None);
        assert_eq!(waiting_time("12 3000 7\n"), Some(Duration::from_micros(3)));
        let paths = cpu_stat_paths("4:memory:/a\n3:cpu,cpuacct:/b\n0::/c.slice\n");
        let expected = [
            "/sys/fs/cgroup/cpu/b/cpu.stat",
            "/sys/fs/cgroup/cpu/cpu.stat",
            "/sys/fs/cgroup/c.slice/cpu.stat",
            "/sys/fs/cgroup/cpu.stat",
        ];
        assert_eq!(paths, expected.map(PathBuf::from));
    }

    #[test]
    fn shares_are_of_the_time_between_two_readings() {
        let before = InterferenceCounters {
            at: Instant::now(),
            stolen: 10,
            ticks: 1000,
            throttled: Duration::from_millis(300),
            waited: Duration::ZERO,
        };
        let after = InterferenceCounters {
            at: before.at + Duration::from_secs(2),
            stolen: 50,
            ticks: 1400,
            throttled: Duration::from_millis(320),
            waited: Duration::from_secs(1),
        };
        let found = after.since(&before);
        assert!((found.stolen - 0.1).abs() < 1e-6);
        assert!((found.throttled - 0.01).abs() < 1e-6);
        assert!((found.waited - 0.5).abs() < 1e-6);
        assert!(found.is_large());
        assert!(!after.since(&after).is_large());
    }
}
