//! The figures of a simulation.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fairness::FairnessReport;
use super::record::{ClassRecord, PhaseRecords, PrefixTokens, SimulationRecorder, Totals};
use super::server::ServerWork;
use crate::latency::Percentiles;

/// The figures of one policy on one workload. Times are virtual seconds, except where noted.
#[derive(Serialize)]
pub(crate) struct SimulationReport {
    #[serde(flatten)]
    pub(super) label: RunLabel,
    /// The number of requests by how they ended.
    pub(super) ends: BTreeMap<&'static str, u64>,
    /// The number of rejected requests by reason.
    pub(super) refusals: BTreeMap<&'static str, u64>,
    /// The time until the last request ended.
    pub(super) seconds: f64,
    /// The time in which the machines computed steps, summed over them.
    pub(super) busy_seconds: f64,
    pub(super) steps: u64,
    pub(super) output_tokens: u64,
    pub(super) output_tokens_per_second: f64,
    /// Output tokens over busy seconds. Shows the cost of a policy independent of the load.
    pub(super) output_tokens_per_busy_second: f64,
    /// Complete requests per second that met the latency objective.
    pub(super) goodput: f64,
    pub(super) classes: BTreeMap<&'static str, ClassFigures>,
    /// The tenants in tenths. The tenants with the most requests come first.
    pub(super) tenant_deciles: Vec<Decile>,
    pub(super) fairness: Option<FairnessReport>,
    pub(super) prefix: PrefixHits,
    /// Pages evicted from the prefix cache.
    pub(super) evictions: u64,
    /// Prefill tokens recomputed after a preemption over all prefill tokens.
    pub(super) recompute_tax: f64,
    pub(super) preemptions_per_request: f64,
    /// The share of machine time spent on requests that did not complete.
    pub(super) wasted: f64,
    /// Real time of plan and commit per step in this process, in microseconds.
    pub(super) plan_micros: StepQuantiles,
    /// Actual time of a step over its predicted time.
    pub(super) prediction: Option<StepQuantiles>,
    /// The figures before, during and after the disturbance, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) phases: Option<PhaseReport>,
    /// The figures of the machines, if a router is before them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fleet: Option<FleetFigures>,
    /// Real seconds that this simulation took.
    pub(super) wall_seconds: f64,
}

/// The figures of machines behind a router.
#[derive(Serialize)]
pub(super) struct FleetFigures {
    /// The most tokens that a machine computed, over the mean.
    pub(super) token_imbalance: f64,
    /// The longest time that a machine computed, over the mean.
    pub(super) busy_imbalance: f64,
    /// The machines that computed any token.
    pub(super) used_machines: usize,
    /// How often a machine failed.
    pub(super) failures: u64,
    /// Requests that were sent again because their machine failed before their first token. A
    /// request counts each time.
    pub(super) sent_again: u64,
}

/// The figures of one class.
#[derive(Serialize)]
pub(super) struct ClassFigures {
    pub(super) complete: u64,
    pub(super) first_token_seconds: Option<Percentiles>,
    pub(super) inter_token_seconds: Option<Percentiles>,
    /// Steps from a request's submission up to the one that sampled its first token.
    pub(super) steps_to_first_token: StepCounts,
    pub(super) prefix: PrefixHits,
}

/// Percentiles of a number of steps.
#[derive(Serialize)]
pub(super) struct StepCounts {
    pub(super) p50: u64,
    pub(super) p99: u64,
    pub(super) max: u64,
}

/// The figures around a disturbance. A latency belongs to the phase in which it ends.
#[derive(Serialize)]
pub(super) struct PhaseReport {
    pub(super) before: PhaseFigures,
    pub(super) during: PhaseFigures,
    pub(super) after: PhaseFigures,
}

/// The figures of one phase.
#[derive(Serialize)]
pub(super) struct PhaseFigures {
    pub(super) seconds: f64,
    pub(super) output_tokens_per_second: f64,
    pub(super) first_token_seconds: Option<Percentiles>,
    pub(super) inter_token_seconds: Option<Percentiles>,
}

/// The figures of a tenth of the tenants.
#[derive(Serialize)]
pub(super) struct Decile {
    pub(super) tenants: usize,
    pub(super) requests: usize,
    pub(super) first_token_p50: f64,
    pub(super) first_token_p99: f64,
}

/// Prompt tokens that came from the prefix cache.
#[derive(Serialize)]
pub(super) struct PrefixHits {
    /// The cached share of all prompt tokens of admitted requests.
    pub(super) hits: f64,
    /// The same share for a cache that evicts nothing and has a prompt once it was submitted.
    pub(super) infinite_cache_hits: f64,
    /// `hits` over `infinite_cache_hits`. 1 if an infinite cache would have had no hits.
    pub(super) of_infinite_cache: f64,
}

/// Percentiles of a figure over all steps.
#[derive(Serialize)]
pub(super) struct StepQuantiles {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

/// Identifies a run in its report.
#[derive(Serialize)]
pub(super) struct RunLabel {
    pub(super) workload: &'static str,
    pub(super) policy: &'static str,
    pub(super) seed: u64,
    /// Machine seconds of work that arrive per second, for each machine.
    pub(super) load: f64,
    pub(super) sessions_per_second: f64,
    #[serde(flatten)]
    pub(super) fleet: Option<FleetLabel>,
}

/// Identifies the machines and their router.
#[derive(Clone, Copy, Serialize)]
pub(super) struct FleetLabel {
    pub(super) machines: usize,
    pub(super) router: &'static str,
}

impl SimulationReport {
    /// Computes the figures of a finished run that took `wall_seconds`. `work` is what each server
    /// did.
    pub(super) fn new(
        label: RunLabel,
        mut record: SimulationRecorder,
        work: &[ServerWork],
        wall_seconds: f64,
    ) -> SimulationReport {
        let totals = record.totals;
        let fleet = label.fleet.map(|_| fleet(work, &totals));
        let seconds = totals.end as f64 / 1e6;
        let busy_seconds = totals.busy_nanos as f64 / 1e9;
        let requests: u64 = record.ends.values().sum();
        let quantiles = |histogram: &hdrhistogram::Histogram<u64>| StepQuantiles {
            p50: histogram.value_at_quantile(0.5) as f64 / 1e3,
            p99: histogram.value_at_quantile(0.99) as f64 / 1e3,
        };
        let has_predictions = !record.steps.prediction.is_empty();
        SimulationReport {
            label,
            wall_seconds,
            seconds,
            busy_seconds,
            steps: totals.steps,
            output_tokens: totals.output_tokens,
            output_tokens_per_second: part(totals.output_tokens as f64, seconds),
            output_tokens_per_busy_second: part(totals.output_tokens as f64, busy_seconds),
            goodput: part(totals.good as f64, seconds),
            classes: record.classes.iter().map(class).collect(),
            tenant_deciles: deciles(&mut record.first_tokens),
            fairness: record.fairness.report(),
            prefix: prefix(record.classes.iter().map(|class| class.prefix)),
            evictions: totals.evictions,
            recompute_tax: ratio(totals.recomputed_tokens, totals.prefill_tokens),
            preemptions_per_request: ratio(totals.preemptions, requests),
            wasted: ratio(totals.wasted_nanos, totals.busy_nanos),
            plan_micros: quantiles(&record.steps.scheduling),
            phases: record
                .phases
                .as_ref()
                .map(|phases| phase_report(phases, totals.end)),
            fleet,
            prediction: has_predictions.then(|| quantiles(&record.steps.prediction)),
            ends: record.ends,
            refusals: record.refusals,
        }
    }

    /// Returns the number of complete requests.
    pub(super) fn complete(&self) -> u64 {
        self.ends.get("complete").copied().unwrap_or(0)
    }
}

fn phase_report(phases: &PhaseRecords, end: u64) -> PhaseReport {
    let seconds = phases.seconds(end);
    let figures = |phase: usize| {
        let record = &phases.records[phase];
        PhaseFigures {
            seconds: seconds[phase],
            output_tokens_per_second: part(record.output_tokens as f64, seconds[phase]),
            first_token_seconds: record.first_token.percentiles(),
            inter_token_seconds: record.inter_token.percentiles(),
        }
    };
    PhaseReport {
        before: figures(0),
        during: figures(1),
        after: figures(2),
    }
}

fn fleet(work: &[ServerWork], totals: &Totals) -> FleetFigures {
    let imbalance = |figure: fn(&ServerWork) -> u64| {
        let most = work.iter().map(figure).max().unwrap_or(0);
        let sum: u64 = work.iter().map(figure).sum();
        part(most as f64 * work.len() as f64, sum as f64)
    };
    FleetFigures {
        token_imbalance: imbalance(|work| work.tokens),
        busy_imbalance: imbalance(|work| work.busy_nanos),
        used_machines: work.iter().filter(|work| work.tokens > 0).count(),
        failures: totals.failures,
        sent_again: totals.sent_again,
    }
}

fn part(of: f64, all: f64) -> f64 {
    if all > 0.0 { of / all } else { 0.0 }
}

fn ratio(of: u64, all: u64) -> f64 {
    part(of as f64, all as f64)
}

fn class(record: &ClassRecord) -> (&'static str, ClassFigures) {
    let steps = &record.steps_to_first_token;
    let class = ClassFigures {
        complete: record.complete,
        first_token_seconds: record.first_token.percentiles(),
        inter_token_seconds: record.inter_token.percentiles(),
        steps_to_first_token: StepCounts {
            p50: steps.value_at_quantile(0.5),
            p99: steps.value_at_quantile(0.99),
            max: steps.max(),
        },
        prefix: prefix([record.prefix].into_iter()),
    };
    (record.name, class)
}

fn prefix(classes: impl Iterator<Item = PrefixTokens> + Clone) -> PrefixHits {
    let sum = |part: fn(&PrefixTokens) -> u64| classes.clone().map(|class| part(&class)).sum();
    let (prompt, cached) = (sum(|prefix| prefix.prompt), sum(|prefix| prefix.cached));
    let cacheable: u64 = sum(|prefix| prefix.cacheable);
    PrefixHits {
        hits: ratio(cached, prompt),
        infinite_cache_hits: ratio(cacheable, prompt),
        of_infinite_cache: if cacheable == 0 {
            1.0
        } else {
            ratio(cached, cacheable)
        },
    }
}

/// Returns the figures of each tenth of the tenants. Sorts `first_tokens`, pairs of tenant and
/// seconds, by tenant.
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
