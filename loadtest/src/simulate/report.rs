//! What a simulation showed, in numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fairness::FairnessReport;
use super::record::{ClassRecord, PrefixTokens, Recorder};
use crate::latency::Percentiles;

/// The figures of one policy on one workload. Times are in seconds of the virtual clock, unless they say otherwise.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(super) workload: &'static str,
    pub(super) policy: &'static str,
    pub(super) seed: u64,
    pub(super) load: f64,
    pub(super) sessions_per_second: f64,
    /// How requests ended.
    pub(super) ends: BTreeMap<&'static str, u64>,
    /// How they were refused.
    pub(super) refusals: BTreeMap<&'static str, u64>,
    /// Until the last one ended.
    pub(super) seconds: f64,
    /// Of those, how many the machine computed.
    pub(super) busy_seconds: f64,
    pub(super) steps: u64,
    pub(super) output_tokens: u64,
    pub(super) output_tokens_per_second: f64,
    /// Output tokens over the time that the machine computed: what fairness costs shows here, whatever the load.
    pub(super) output_tokens_per_busy_second: f64,
    /// Complete requests a second whose latencies met the objective.
    pub(super) goodput: f64,
    pub(super) classes: BTreeMap<&'static str, Class>,
    /// Tenants by the number of their requests, the busiest tenth first.
    pub(super) tenant_deciles: Vec<Decile>,
    pub(super) fairness: Option<FairnessReport>,
    pub(super) prefix: Prefix,
    /// Pages dropped from the cache.
    pub(super) evictions: u64,
    /// Tokens computed again after a preemption ÷ all tokens of prefills.
    pub(super) recompute_tax: f64,
    pub(super) preemptions_per_request: f64,
    /// Of the machine's time, the part that went into requests that did not complete.
    pub(super) wasted: f64,
    /// Real time that plan and commit took in this process, in microseconds.
    pub(super) plan_micros: Plan,
    /// Actual ÷ predicted time of a step.
    pub(super) prediction: Option<Ratio>,
    /// Real seconds that this simulation took.
    pub(super) wall_seconds: f64,
}

/// Latencies of the requests of one class.
#[derive(Serialize)]
pub(super) struct Class {
    pub(super) complete: u64,
    pub(super) first_token_seconds: Option<Percentiles>,
    pub(super) inter_token_seconds: Option<Percentiles>,
    /// Steps that began since the request was asked, up to the one that drew its first token.
    pub(super) steps_to_first_token: Steps,
    pub(super) prefix: Prefix,
}

/// A number of steps.
#[derive(Serialize)]
pub(super) struct Steps {
    pub(super) p50: u64,
    pub(super) p99: u64,
    pub(super) max: u64,
}

/// A tenth of the tenants.
#[derive(Serialize)]
pub(super) struct Decile {
    pub(super) tenants: usize,
    pub(super) requests: usize,
    pub(super) first_token_p50: f64,
    pub(super) first_token_p99: f64,
}

/// Prompt tokens that came from the cache.
#[derive(Serialize)]
pub(super) struct Prefix {
    /// Part of all prompt tokens of admitted requests.
    pub(super) hits: f64,
    /// The same for a cache that forgets nothing and knows a prompt once it was asked.
    pub(super) infinite_cache_hits: f64,
    /// The one over the other; 1 when there was nothing to find.
    pub(super) of_infinite_cache: f64,
}

/// Of a step.
#[derive(Serialize)]
pub(super) struct Plan {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

/// Of a step.
#[derive(Serialize)]
pub(super) struct Ratio {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

/// Which run it was.
pub(super) struct Heading {
    pub(super) workload: &'static str,
    pub(super) policy: &'static str,
    pub(super) seed: u64,
    pub(super) load: f64,
    pub(super) sessions_per_second: f64,
    pub(super) wall_seconds: f64,
}

impl Report {
    /// Sums up.
    pub(super) fn new(heading: &Heading, record: &mut Recorder) -> Report {
        let seconds = record.until as f64 / 1e6;
        let busy_seconds = record.busy as f64 / 1e9;
        let requests: u64 = record.ends.values().sum();
        Report {
            workload: heading.workload,
            policy: heading.policy,
            seed: heading.seed,
            load: heading.load,
            sessions_per_second: heading.sessions_per_second,
            wall_seconds: heading.wall_seconds,
            ends: record.ends.clone(),
            refusals: record.refusals.clone(),
            seconds,
            busy_seconds,
            steps: record.steps,
            output_tokens: record.output_tokens,
            output_tokens_per_second: part(record.output_tokens as f64, seconds),
            output_tokens_per_busy_second: part(record.output_tokens as f64, busy_seconds),
            goodput: part(record.good as f64, seconds),
            classes: record.classes.iter().map(class).collect(),
            tenant_deciles: deciles(&mut record.first_tokens),
            fairness: record.fairness.report(),
            prefix: prefix(record.classes.iter().map(|class| class.prefix)),
            evictions: record.evictions,
            recompute_tax: ratio(record.recomputed_tokens, record.prefill_tokens),
            preemptions_per_request: ratio(record.preemptions, requests),
            wasted: ratio(record.wasted, record.busy),
            plan_micros: Plan {
                p50: record.deciding.value_at_quantile(0.5) as f64 / 1e3,
                p99: record.deciding.value_at_quantile(0.99) as f64 / 1e3,
            },
            prediction: (!record.prediction.is_empty()).then(|| Ratio {
                p50: record.prediction.value_at_quantile(0.5) as f64 / 1e3,
                p99: record.prediction.value_at_quantile(0.99) as f64 / 1e3,
            }),
        }
    }

    /// Requests that completed.
    pub(super) fn complete(&self) -> u64 {
        self.ends.get("complete").copied().unwrap_or(0)
    }
}

fn part(of: f64, all: f64) -> f64 {
    if all > 0.0 { of / all } else { 0.0 }
}

fn ratio(of: u64, all: u64) -> f64 {
    part(of as f64, all as f64)
}

fn class(record: &ClassRecord) -> (&'static str, Class) {
    let steps = &record.steps_to_first_token;
    let class = Class {
        complete: record.complete,
        first_token_seconds: record.first_token.percentiles(),
        inter_token_seconds: record.inter_token.percentiles(),
        steps_to_first_token: Steps {
            p50: steps.value_at_quantile(0.5),
            p99: steps.value_at_quantile(0.99),
            max: steps.max(),
        },
        prefix: prefix([record.prefix].into_iter()),
    };
    (record.class.name, class)
}

fn prefix(classes: impl Iterator<Item = PrefixTokens> + Clone) -> Prefix {
    let sum = |part: fn(&PrefixTokens) -> u64| classes.clone().map(|class| part(&class)).sum();
    let (asked, cached) = (sum(|prefix| prefix.asked), sum(|prefix| prefix.cached));
    let cacheable: u64 = sum(|prefix| prefix.cacheable);
    Prefix {
        hits: ratio(cached, asked),
        infinite_cache_hits: ratio(cacheable, asked),
        of_infinite_cache: if cacheable == 0 {
            1.0
        } else {
            ratio(cached, cacheable)
        },
    }
}

/// `first_tokens` are (tenant, seconds); they are sorted here.
fn deciles(first_tokens: &mut [(u32, f32)]) -> Vec<Decile> {
    first_tokens.sort_unstable_by_key(|(tenant, _)| *tenant);
    let mut tenants: Vec<&[(u32, f32)]> = first_tokens.chunk_by(|a, b| a.0 == b.0).collect();
    tenants.sort_by_key(|requests| std::cmp::Reverse(requests.len()));
    let size = tenants.len().div_ceil(10).max(1);
    let decile = |tenants: &[&[(u32, f32)]]| {
        let all = tenants.iter().flat_map(|requests| requests.iter());
        let mut seconds: Vec<f32> = all.map(|(_, seconds)| *seconds).collect();
        seconds.sort_unstable_by(f32::total_cmp);
        let at = |part: f64| f64::from(seconds[((seconds.len() - 1) as f64 * part) as usize]);
        Decile {
            tenants: tenants.len(),
            requests: seconds.len(),
            first_token_p50: at(0.5),
            first_token_p99: at(0.99),
        }
    };
    tenants.chunks(size).map(decile).collect()
}
