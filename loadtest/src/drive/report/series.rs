//! The points and bars of the plots.

use super::plot::Distribution;
use crate::drive::record::{BIN_SECONDS, RunRecord};
use crate::latency::Latencies;

/// The most points of a curve over time.
const POINTS: f64 = 120.0;

/// The number of bars of a distribution.
const BARS: usize = 44;

/// Returns the mean output tokens per second in equal parts of the run.
pub(super) fn output_rate(record: &RunRecord) -> Vec<f64> {
    let (from, to) = record.span();
    let mut parts = parts(from, to);
    let width = (to - from) / parts.len() as f64;
    for (bin, tokens) in record.token_bins.iter().enumerate() {
        let start = bin as f64 * BIN_SECONDS;
        // A bin that the run leaves early has all its tokens before.
        let (start, end) = (start.max(from), (start + BIN_SECONDS).min(to));
        if end > start {
            spread(
                &mut parts,
                (start - from, end - from),
                width,
                *tokens / (end - start),
            );
        }
    }
    parts
}

/// Returns the mean number of requests in flight in equal parts of the run.
pub(super) fn in_flight(record: &RunRecord) -> Vec<f64> {
    let (from, to) = record.span();
    let mut parts = parts(from, to);
    let width = (to - from) / parts.len() as f64;
    for request in &record.requests {
        let times = (request.start_seconds - from, request.end_seconds - from);
        spread(&mut parts, times, width, 1.0);
    }
    parts
}

/// Returns the parts of the time between two moments. None is shorter than a bin of tokens.
fn parts(from: f64, to: f64) -> Vec<f64> {
    let count = ((to - from) / BIN_SECONDS).floor().clamp(1.0, POINTS);
    vec![0.0; count as usize]
}

/// Adds `value`, which lasts from one time to another, to the means of the parts.
fn spread(parts: &mut [f64], (from, to): (f64, f64), width: f64, value: f64) {
    if width <= 0.0 {
        return;
    }
    let first = (from / width) as usize;
    let last = ((to / width) as usize).min(parts.len() - 1);
    for (index, part) in parts.iter_mut().enumerate().take(last + 1).skip(first) {
        let start = index as f64 * width;
        let seconds = (start + width).min(to) - start.max(from);
        *part += value * seconds.max(0.0) / width;
    }
}

/// Returns the bars of `latencies`, or `None` if there are no latencies.
pub(super) fn distribution_of(latencies: &Latencies) -> Option<Distribution> {
    let found = latencies.percentiles()?;
    let recorded: Vec<(f64, u64)> = latencies.recorded().collect();
    // Values below a tenth of a millisecond would take most of a logarithmic axis.
    let from = recorded.first()?.0.max(1e-4) * 0.97;
    let factor = (found.max.max(1e-4) * 1.03 / from).powf(1.0 / BARS as f64);
    let mut counts = vec![0; BARS];
    for (seconds, count) in recorded {
        let bar = ((seconds / from).ln() / factor.ln()).max(0.0) as usize;
        counts[bar.min(BARS - 1)] += count;
    }
    Some(Distribution {
        from,
        factor,
        counts,
        p50: found.p50.max(from),
        p99: found.p99.max(from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_spread_over_the_parts_that_it_lasts() {
        let mut parts = [0.0; 4];
        spread(&mut parts, (0.5, 2.25), 1.0, 2.0);
        assert_eq!(parts, [1.0, 2.0, 0.5, 0.0]);
        spread(&mut parts, (3.0, 9.0), 1.0, 1.0);
        assert_eq!(parts, [1.0, 2.0, 0.5, 1.0]);
    }

    #[test]
    fn every_latency_has_its_bar() {
        let millis: Vec<f64> = (1..=100).map(|ms| f64::from(ms) / 1e3).collect();
        let bars = distribution_of(&Latencies::of(millis.into_iter())).unwrap();
        assert_eq!(bars.counts.iter().sum::<u64>(), 100);
        assert!(
            bars.counts[0] == 1 && bars.counts[BARS - 1] > 1,
            "{:?}",
            bars.counts
        );
        assert!(distribution_of(&Latencies::default()).is_none());
        let zero = distribution_of(&Latencies::of([0.0].into_iter())).unwrap();
        assert_eq!(zero.counts.iter().sum::<u64>(), 1);
        assert!(zero.from > 0.0 && zero.p50 >= zero.from && zero.factor > 1.0);
    }
}
