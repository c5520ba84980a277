//! What the server's own histograms say about a run, beside the clients' figures.
//!
//! A histogram bounds a quantile by the ends of its bucket, and it has an exact mean. So two
//! latencies agree if their means differ by at most [`TOLERANCE`] and the client's median and 99th
//! percentile lie in the buckets where the server's are, each end moved by [`TOLERANCE`].

use serde::Serialize;

use crate::latency::Percentiles;

/// The largest difference of latencies that agree, as a share.
const TOLERANCE: f64 = 0.02;

/// The largest difference of latencies that agree however short they are, in seconds: what the
/// network and two processes on one machine take.
const TRANSPORT_SECONDS: f64 = 0.001;

const FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";
const END_TO_END: &str = "vllm:e2e_request_latency_seconds";

/// The two latency histograms that servers with vLLM's metrics have.
pub(super) struct ServerHistograms {
    first_token: Buckets,
    end_to_end: Buckets,
}

/// A cumulative histogram.
#[derive(Clone, Debug, PartialEq)]
struct Buckets {
    bounds: Vec<(f64, f64)>, // Upper bounds and the number of values up to them.
    sum: f64,
    count: f64,
}

/// The server's figures of a run, in seconds.
#[derive(Serialize)]
pub(super) struct ServerReport {
    pub(super) time_to_first_token: ServerLatency,
    pub(super) end_to_end: ServerLatency,
}

/// The server's figures of one latency.
#[derive(Serialize)]
pub(super) struct ServerLatency {
    /// The number of requests that the server recorded.
    pub(super) count: u64,
    /// The mean.
    pub(super) mean: f64,
    /// The bucket of the median.
    pub(super) p50: BucketRange,
    /// The bucket of the 99th percentile.
    pub(super) p99: BucketRange,
    /// Whether the clients' figures agree.
    pub(super) agrees: bool,
}

/// The ends of a bucket. `to` is `None` if the bucket has no upper end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct BucketRange {
    pub(super) from: f64,
    pub(super) to: Option<f64>,
}

impl ServerHistograms {
    /// Reads the histograms from `metrics`, in Prometheus's text format.
    ///
    /// # Errors
    /// If a histogram is missing.
    pub(super) fn read(metrics: &str) -> Result<ServerHistograms, String> {
        Ok(ServerHistograms {
            first_token: Buckets::read(metrics, FIRST_TOKEN)?,
            end_to_end: Buckets::read(metrics, END_TO_END)?,
        })
    }

    /// Returns the number of requests whose end the server has recorded since `before`.
    pub(super) fn ended_since(&self, before: &ServerHistograms) -> u64 {
        (self.end_to_end.count - before.end_to_end.count) as u64
    }

    /// Returns the figures since `before`, beside the figures of the clients. `None`: there was no
    /// request.
    pub(super) fn since(
        &self,
        before: &ServerHistograms,
        first_token: Option<Percentiles>,
        end_to_end: Option<Percentiles>,
    ) -> Option<ServerReport> {
        Some(ServerReport {
            time_to_first_token: self.first_token.since(&before.first_token, first_token?)?,
            end_to_end: self.end_to_end.since(&before.end_to_end, end_to_end?)?,
        })
    }
}

impl Buckets {
    /// Reads the histogram `name`, summed over its labels.
    fn read(metrics: &str, name: &str) -> Result<Buckets, String> {
        let lines = metrics.lines().filter_map(|line| line.strip_prefix(name));
        let mut buckets = Buckets {
            bounds: Vec::new(),
            sum: 0.0,
            count: 0.0,
        };
        for line in lines {
            let Some((series, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let Ok(value) = value.parse::<f64>() else {
                continue;
            };
            if series.starts_with("_bucket") {
                buckets.add(upper_bound(series)?, value);
            } else if series.starts_with("_sum") {
                buckets.sum += value;
            } else if series.starts_with("_count") {
                buckets.count += value;
            }
        }
        if buckets.bounds.is_empty() {
            return Err(format!("the server's /metrics has no histogram {name}"));
        }
        buckets.bounds.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(buckets)
    }

    fn add(&mut self, bound: f64, count: f64) {
        match self.bounds.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => self.bounds.push((bound, count)),
        }
    }

    /// Returns the figures of the values since `before`.
    fn since(&self, before: &Buckets, client: Percentiles) -> Option<ServerLatency> {
        let count = self.count - before.count;
        if count <= 0.0 || self.bounds.len() != before.bounds.len() {
            return None;
        }
        let mean = (self.sum - before.sum) / count;
        let range = |quantile: f64| {
            let rank = (quantile * count).ceil();
            let pairs = self.bounds.iter().zip(&before.bounds);
            let mut up_to = pairs.map(|(now, then)| (now.0, now.1 - then.1));
            let index = up_to.position(|(_, count)| count >= rank)?;
            Some(BucketRange {
                from: index
                    .checked_sub(1)
                    .map_or(0.0, |below| self.bounds[below].0),
                to: Some(self.bounds[index].0).filter(|bound| bound.is_finite()),
            })
        };
        let (p50, p99) = (range(0.5)?, range(0.99)?);
        let near = (client.mean - mean).abs() <= slack(mean);
        Some(ServerLatency {
            count: count as u64,
            mean,
            p50,
            p99,
            agrees: near && p50.holds(client.p50) && p99.holds(client.p99),
        })
    }
}

impl BucketRange {
    /// Returns whether a client's quantile lies in the bucket, or almost.
    fn holds(self, seconds: f64) -> bool {
        let above = seconds >= self.from - slack(self.from);
        above && self.to.is_none_or(|to| seconds <= to + slack(to))
    }
}

fn slack(seconds: f64) -> f64 {
    (seconds * TOLERANCE).max(TRANSPORT_SECONDS)
}

/// Returns the bound in the label `le` of a series.
fn upper_bound(series: &str) -> Result<f64, String> {
    let label = series
        .split_once("le=\"")
        .and_then(|(_, rest)| rest.split_once('"'));
    let bound = label.and_then(|(bound, _)| bound.parse::<f64>().ok()); // "+Inf" is a number.
    bound.ok_or_else(|| format!("a bucket without a bound: {series}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns metrics with these counts up to 10, 20, 40 ms and in all, over two engines.
    fn metrics(counts: [u64; 4], sum: f64) -> String {
        let mut text = String::from("# TYPE vllm:time_to_first_token_seconds histogram\n");
        for (name, engine) in [(FIRST_TOKEN, 0), (FIRST_TOKEN, 1), (END_TO_END, 0)] {
            let bounds = ["0.01", "0.02", "0.04", "+Inf"];
            for (bound, count) in bounds.iter().zip(counts) {
                text += &format!("{name}_bucket{{engine=\"{engine}\",le=\"{bound}\"}} {count}\n");
            }
            text += &format!("{name}_sum{{engine=\"{engine}\"}} {sum}\n");
            text += &format!("{name}_count{{engine=\"{engine}\"}} {}\n", counts[3]);
        }
        text
    }

    fn client(mean: f64, p50: f64, p99: f64) -> Option<Percentiles> {
        Some(Percentiles {
            count: 100,
            mean,
            p50,
            p90: p99,
            p99,
            max: p99,
        })
    }

    fn latency(client: Option<Percentiles>) -> ServerLatency {
        let before = ServerHistograms::read(&metrics([5, 5, 5, 5], 0.04)).unwrap();
        let after = ServerHistograms::read(&metrics([5, 65, 104, 105], 2.04)).unwrap();
        assert_eq!(after.ended_since(&before), 100);
        after.since(&before, client, client).unwrap().end_to_end
    }

    #[test]
    fn quantiles_are_the_buckets_of_their_ranks_since_the_start() {
        let found = latency(client(0.02, 0.015, 0.03));
        assert_eq!((found.count, found.mean), (100, 0.02));
        let (low, high) = (Some(0.02), Some(0.04));
        assert_eq!(
            found.p50,
            BucketRange {
                from: 0.01,
                to: low
            }
        );
        assert_eq!(
            found.p99,
            BucketRange {
                from: 0.02,
                to: high
            }
        );
        assert!(found.agrees);
    }

    #[test]
    fn a_difference_is_found() {
        assert!(latency(client(0.0209, 0.0209, 0.0405)).agrees);
        assert!(!latency(client(0.0211, 0.015, 0.03)).agrees, "the mean");
        assert!(!latency(client(0.02, 0.0211, 0.03)).agrees, "the median");
        assert!(
            !latency(client(0.02, 0.015, 0.0411)).agrees,
            "the 99th percentile"
        );
        assert!(
            !latency(client(0.02, 0.015, 0.018)).agrees,
            "the 99th percentile"
        );
    }

    #[test]
    fn a_server_without_histograms_is_an_error_that_names_them() {
        let error = ServerHistograms::read("up 1\n").err().unwrap();
        assert!(error.contains(FIRST_TOKEN), "{error}");
    }
}
