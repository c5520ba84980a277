//! The figures of a benchmark run: what was measured, and what its repetitions amount to.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::machine_limits::MachineLimits;
use super::roofline::{Bound, Work};
use crate::engine::{PhaseTimes, StepOutcome};
use crate::model::{Sizes, Stage};

/// One repetition: its steps, and the durations of the stages of their forward passes.
#[derive(Clone, Debug, Default)]
pub struct Repetition {
    /// The steps, in their order.
    pub steps: Vec<StepOutcome>,
    /// The time of each stage in all steps together, in the order of [`Stage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
    /// The machine's limits, sampled before and after.
    pub limits: MachineLimits,
}

impl Repetition {
    /// Returns the duration of all steps together, in seconds.
    fn seconds(&self) -> f64 {
        let times = self.steps.iter().map(|step| step.times.total());
        times.sum::<Duration>().as_secs_f64()
    }
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What it measures.
    #[serde(flatten)]
    pub kind: FigureKind,
    /// Its value, or why it has none.
    #[serde(flatten)]
    pub result: FigureResult,
}

/// What a figure measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum FigureKind {
    /// Sequences that decode together.
    Decode {
        /// The number of sequences.
        streams: usize,
        /// Tokens before the decoded ones, in each sequence.
        depth: usize,
    },
    /// One prompt, up to its first token.
    Prefill {
        /// The length of the prompt.
        tokens: usize,
    },
}

impl fmt::Display for FigureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&match self {
            FigureKind::Decode { streams, depth } => format!("decode {streams:>3} at {depth}"),
            FigureKind::Prefill { tokens } => format!("prefill {tokens}"),
        })
    }
}

/// The value of a figure, or why it has none.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum FigureResult {
    /// It was measured.
    Measured(Measurement),
    /// It was left out.
    Skipped {
        /// The reason.
        skipped: String,
    },
}

/// A measured figure with its limits. All fields after `repetitions` describe the median
/// repetition; `roofline` and `in_turn` are medians of their own.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// Tokens per second: generated ones in decode, prompt tokens in prefill.
    pub tokens_per_second: Spread,
    /// The number of repetitions.
    pub repetitions: usize,
    /// The number of steps.
    pub steps: usize,
    /// The median share of the roofline: shortest possible time ÷ measured time, with each
    /// repetition's own limits.
    pub roofline: f64,
    /// The same with the roofline of the step's parts in turn.
    pub in_turn: f64,
    /// The limit that the roofline reaches first.
    pub bound: Bound,
    /// The machine's limits, sampled before and after.
    pub limits: MachineLimits,
    /// The mean duration of a step, in milliseconds.
    pub step_ms: f64,
    /// The mean durations of a step's parts, in milliseconds.
    pub parts_ms: StepParts,
}

/// The median, the worst and the best of some repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The median; of an even number, the worse of the two in the middle.
    pub median: f64,
    /// The worst.
    pub min: f64,
    /// The best.
    pub max: f64,
}

/// The durations of a step's parts, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct StepParts {
    /// The scheduler's plan.
    pub plan: f64,
    /// The forward pass.
    pub forward: f64,
    /// The draws.
    pub sample: f64,
    /// The scheduler's commit.
    pub commit: f64,
    /// The stages of the forward pass.
    #[serde(serialize_with = "as_map")]
    pub stages: Vec<(&'static str, f64)>,
}

fn as_map<S: Serializer>(stages: &[(&'static str, f64)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(stages.iter().copied())
}

impl Measurement {
    /// Summarizes repetitions.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(kind: &FigureKind, repetitions: &[Repetition], sizes: &Sizes) -> Measurement {
        let rate = |repetition: &Repetition| {
            let tokens = repetition.steps.iter().map(|step| match kind {
                FigureKind::Decode { .. } => step.size.logits,
                FigureKind::Prefill { .. } => step.size.tokens,
            });
            tokens.sum::<usize>() as f64 / repetition.seconds()
        };
        let mut ordered: Vec<&Repetition> = repetitions.iter().collect();
        ordered.sort_by(|a, b| rate(a).total_cmp(&rate(b)));
        let median = ordered[(ordered.len() - 1) / 2];
        let works = median.steps.iter().map(|step| Work::of(&step.size, sizes));
        let whole = works.fold(Work::default(), Work::plus);
        let roofline = |step: &StepOutcome, limits: &MachineLimits| {
            Work::of(&step.size, sizes).min_seconds(limits)
        };
        let in_turn = |step: &StepOutcome, limits: &MachineLimits| {
            let parts = Work::parts(&step.size, sizes);
            parts.iter().map(|part| part.min_seconds(limits)).sum()
        };
        Measurement {
            tokens_per_second: Spread {
                median: rate(median),
                min: rate(ordered[0]),
                max: rate(ordered[ordered.len() - 1]),
            },
            repetitions: repetitions.len(),
            steps: median.steps.len(),
            roofline: median_share(repetitions, roofline),
            in_turn: median_share(repetitions, in_turn),
            bound: whole.bound(&median.limits),
            limits: median.limits,
            step_ms: 1e3 * median.seconds() / median.steps.len() as f64,
            parts_ms: StepParts::of(median),
        }
    }
}

impl StepParts {
    fn of(repetition: &Repetition) -> StepParts {
        let steps = &repetition.steps;
        let per_step = |spent: Duration| 1e3 * spent.as_secs_f64() / steps.len() as f64;
        let mean = |phase: fn(&PhaseTimes) -> Duration| {
            per_step(steps.iter().map(|step| phase(&step.times)).sum())
        };
        let stages = Stage::ALL.iter().zip(repetition.stages);
        StepParts {
            plan: mean(|times| times.plan),
            forward: mean(|times| times.forward),
            sample: mean(|times| times.sample),
            commit: mean(|times| times.commit),
            stages: stages
                .map(|(stage, spent)| (stage.name(), per_step(spent)))
                .collect(),
        }
    }
}

/// For each repetition, divides the shortest possible time by the measured time. Returns the
/// median; of an even number, the smaller of the two in the middle.
fn median_share(
    repetitions: &[Repetition],
    min_seconds: impl Fn(&StepOutcome, &MachineLimits) -> f64,
) -> f64 {
    let share = |repetition: &Repetition| {
        let steps = repetition.steps.iter();
        let min: f64 = steps
            .map(|step| min_seconds(step, &repetition.limits))
            .sum();
        min / repetition.seconds()
    };
    let mut shares: Vec<f64> = repetitions.iter().map(share).collect();
    shares.sort_by(f64::total_cmp);
    shares[(shares.len() - 1) / 2]
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::engine::StepSize;

    const SIZES: Sizes = Sizes {
        layer_bytes: 1_000_000,
        expert_bytes: 0,
        experts_per_token: 0,
        ternary_bytes: 1_000_000,
        ternary_weights: 4_000_000,
        head_bytes: 1_000_000,
        head_weights: 1_000_000,
        kv_bytes_per_token: 0,
        local_kv_bytes_per_token: 0,
        window: 0,
        state_bytes: 0,
    };
    /// With these limits, a step of one stream reads for 2 ms.
    const LIMITS: MachineLimits = MachineLimits {
        gigabytes_per_second: 1.0,
        gigaops_per_second: 1000.0,
    };

    /// Returns two steps of `streams` streams, each of `milliseconds`.
    fn repetition(streams: usize, milliseconds: u64) -> Repetition {
        let step = StepOutcome {
            size: StepSize {
                tokens: streams,
                logits: streams,
                keys: 0,
                rows: 1,
                expert_hits: 0,
            },
            times: PhaseTimes {
                forward: Duration::from_millis(milliseconds - 1),
                sample: Duration::from_millis(1),
                ..PhaseTimes::default()
            },
            predicted: Duration::ZERO,
            calibrated: Duration::ZERO,
            drawn_at: Instant::now(),
            panicked: false,
        };
        Repetition {
            steps: vec![step; 2],
            limits: LIMITS,
            ..Repetition::default()
        }
    }

    fn check(streams: usize, milliseconds: &[u64]) -> Measurement {
        let repetitions: Vec<_> = milliseconds
            .iter()
            .map(|&milliseconds| repetition(streams, milliseconds))
            .collect();
        let kind = FigureKind::Decode { streams, depth: 9 };
        Measurement::of(&kind, &repetitions, &SIZES)
    }

    #[test]
    fn a_figure_is_the_median_of_its_repetitions() {
        let measured = check(4, &[10, 5, 20]);
        let Spread { median, min, max } = measured.tokens_per_second;
        assert!((median - 400.0).abs() < 1e-9 && (measured.step_ms - 10.0).abs() < 1e-9);
        assert!((min - 200.0).abs() < 1e-9 && (max - 800.0).abs() < 1e-9);
        assert!((measured.parts_ms.sample - 1.0).abs() < 1e-9);
        // Of an even number, the worse of the two in the middle.
        assert!((check(4, &[10, 5]).step_ms - 10.0).abs() < 1e-9);
    }

    #[test]
    fn the_roofline_share_is_the_shortest_time_over_the_measured_time() {
        let measured = check(1, &[4]);
        assert_eq!(measured.bound, Bound::Bandwidth);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert!((measured.in_turn - 0.5).abs() < 1e-9);
        // 1,000 streams multiply for 2 × 5 M × 1,000 ÷ 1,000 G = 10 ms.
        let measured = check(1000, &[16]);
        assert_eq!(measured.bound, Bound::Int8);
        assert!((measured.roofline - 0.625).abs() < 1e-9);
        // 150 streams read for 2 ms in all. The layers alone multiply for 1.2 ms, and reading the
        // head takes 1 ms.
        let measured = check(150, &[4]);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert!((measured.in_turn - (1.2 + 1.0) / 4.0).abs() < 1e-9);
    }

    #[test]
    fn each_repetition_is_compared_with_its_own_limits() {
        // The machine is half as fast for a while: the steps take twice as long, and the share
        // stays the same.
        let slow = MachineLimits {
            gigabytes_per_second: LIMITS.gigabytes_per_second / 2.0,
            ..LIMITS
        };
        let mut repetitions = [4, 8, 8].map(|milliseconds| repetition(1, milliseconds));
        for repetition in &mut repetitions[1..] {
            repetition.limits = slow;
        }
        let kind = FigureKind::Decode {
            streams: 1,
            depth: 9,
        };
        let measured = Measurement::of(&kind, &repetitions, &SIZES);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert_eq!(measured.limits, slow);
    }
}
