//! Percentiles of latencies, as both subcommands report them.

use hdrhistogram::Histogram;
use serde::Serialize;

/// A histogram of latencies in microseconds, with three significant digits.
pub(crate) struct Latencies(Histogram<u64>);

/// Percentiles of a set of latencies, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    /// The number of latencies.
    pub(crate) count: u64,
    /// The mean.
    pub(crate) mean: f64,
    /// The median.
    pub(crate) p50: f64,
    /// The 90th percentile.
    pub(crate) p90: f64,
    /// The 99th percentile.
    pub(crate) p99: f64,
    /// The maximum.
    pub(crate) max: f64,
}

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(histogram())
    }
}

/// Creates an empty histogram with three significant digits. It grows with its values.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("the histogram supports three digits")
}

impl Latencies {
    /// Returns the latencies of `seconds`.
    pub(crate) fn of(seconds: impl Iterator<Item = f64>) -> Latencies {
        let mut latencies = Latencies::default();
        seconds.for_each(|seconds| latencies.record_seconds(seconds));
        latencies
    }

    /// Returns the latencies in seconds, in ascending order, each with how often it was recorded.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = (f64, u64)> {
        let values = self.0.iter_recorded();
        values.map(|value| {
            (
                value.value_iterated_to() as f64 / 1e6,
                value.count_at_value(),
            )
        })
    }

    /// Adds one latency.
    pub(crate) fn record_micros(&mut self, micros: u64) {
        self.0 += micros;
    }

    /// Adds one latency.
    pub(crate) fn record_seconds(&mut self, seconds: f64) {
        self.record_micros((seconds * 1e6).round() as u64);
    }

    /// Adds all latencies of `other`.
    pub(crate) fn add(&mut self, other: &Latencies) {
        self.0 += &other.0;
    }

    /// Returns the percentiles, or `None` if the histogram is empty.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e6;
        (!self.0.is_empty()).then(|| Percentiles {
            count: self.0.len(),
            mean: self.0.mean() / 1e6,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: self.0.max() as f64 / 1e6,
        })
    }
}
