//! Percentiles of latencies, for both clocks.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Latencies to the microsecond, with three significant digits.
pub(crate) struct Latencies(Histogram<u64>);

/// Of a set of latencies, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    /// How many were measured.
    pub(crate) count: u64,
    /// Median.
    pub(crate) p50: f64,
    /// Nine of ten are at most this.
    pub(crate) p90: f64,
    /// Ninety-nine of a hundred are at most this.
    pub(crate) p99: f64,
    /// The longest.
    pub(crate) max: f64,
}

impl Latencies {
    /// None yet.
    pub(crate) fn new() -> Latencies {
        Latencies(Histogram::new(3).expect("three digits are in the histogram's range"))
    }

    /// Adds one.
    pub(crate) fn record_micros(&mut self, micros: u64) {
        self.0
            .record(micros)
            .expect("the histogram grows with its values");
    }

    /// Nothing if there are none.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e6;
        (!self.0.is_empty()).then(|| Percentiles {
            count: self.0.len(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: self.0.max() as f64 / 1e6,
        })
    }
}
