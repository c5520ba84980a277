//! Figures as a table and as JSON.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::limits::Limits;
use super::measure::Repetition;
use super::roofline::{Bound, Work};
use crate::engine::DirectStep;
use crate::model::{Model, Sizes, Stage};

/// All that a run found out.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Of this program.
    pub version: &'static str,
    /// What computed.
    pub machine: Machine,
    /// What was computed.
    pub model: ModelCard,
    /// What was found to hold before anything was timed.
    pub checks: Vec<String>,
    /// The figures.
    pub rows: Vec<Row>,
}

/// What computes.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// The kernels' instruction set.
    pub isa: String,
    /// Compute threads.
    pub threads: usize,
    /// Memory read in a pass that samples the bandwidth.
    pub probe_bytes: usize,
}

/// What is computed.
#[derive(Clone, Debug, Serialize)]
pub struct ModelCard {
    /// As the table calls it.
    pub name: String,
    /// Bits that a ternary weight takes, padding included.
    pub bits_per_weight: f64,
    /// Bytes of the layers' matrices.
    pub layer_bytes: usize,
    /// Bytes of the output head.
    pub head_bytes: usize,
    /// Bytes of one token's keys and values.
    pub kv_bytes_per_token: usize,
}

impl ModelCard {
    /// Of a loaded model.
    #[must_use]
    pub fn of(name: &str, model: &Model) -> ModelCard {
        let sizes = model.sizes();
        ModelCard {
            name: name.to_owned(),
            bits_per_weight: sizes.bits_per_weight(),
            layer_bytes: sizes.layer_bytes,
            head_bytes: sizes.head_bytes,
            kv_bytes_per_token: sizes.kv_bytes_per_token,
        }
    }
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Of what.
    #[serde(flatten)]
    pub what: What,
    /// It, or why there is none.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum What {
    /// Sequences that decode together.
    Decode {
        /// How many.
        streams: usize,
        /// Tokens before each.
        depth: usize,
    },
    /// A prompt, up to its first token.
    Prefill {
        /// How long.
        tokens: usize,
    },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&match self {
            What::Decode { streams, depth } => format!("decode {streams:>3} at {depth}"),
            What::Prefill { tokens } => format!("prefill {tokens}"),
        })
    }
}

/// A figure, or why there is none.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Outcome {
    /// Measured.
    Measured(Measured),
    /// Left out.
    Skipped {
        /// Why.
        skipped: String,
    },
}

/// A figure with its limits.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Generated, or of the prompt.
    pub tokens_per_second: Spread,
    /// How often it was measured.
    pub repetitions: usize,
    /// Steps of a repetition.
    pub steps: usize,
    /// The least time that the limits allow over the time that it took, each repetition by the limits beside it: the median.
    pub roofline: f64,
    /// The same, of the least time of the step's parts in turn.
    pub in_turn: f64,
    /// Which limit the roofline is, in the median repetition, as all that follows.
    pub bound: Bound,
    /// The machine's, sampled before and after.
    pub limits: Limits,
    /// A step's, on average, in milliseconds.
    pub step_ms: f64,
    /// Of these.
    pub parts_ms: Parts,
}

/// The median of some repetitions, and the worst and the best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Half of them are no better; of an even number, the worse of the two in the middle.
    pub median: f64,
    /// The worst.
    pub min: f64,
    /// The best.
    pub max: f64,
}

/// Milliseconds of a step's parts.
#[derive(Clone, Debug, Serialize)]
pub struct Parts {
    /// Deciding what to compute.
    pub plan: f64,
    /// The forward pass.
    pub forward: f64,
    /// From logits to tokens.
    pub sample: f64,
    /// Making it count.
    pub commit: f64,
    /// What the forward pass consists of.
    #[serde(serialize_with = "as_map")]
    pub stages: Vec<(&'static str, f64)>,
}

fn as_map<S: Serializer>(stages: &[(&'static str, f64)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(stages.iter().copied())
}

impl Measured {
    /// What repetitions come to, in the light of the limits beside each.
    ///
    /// # Panics
    /// If there are none, or one has no steps.
    #[must_use]
    pub fn of(what: &What, repetitions: &[Repetition], sizes: &Sizes) -> Measured {
        let rate = |repetition: &Repetition| {
            let tokens = repetition.steps.iter().map(|step| match what {
                What::Decode { .. } => step.logits,
                What::Prefill { .. } => step.tokens,
            });
            tokens.sum::<usize>() as f64 / seconds(&repetition.steps, DirectStep::total)
        };
        let mut ordered: Vec<&Repetition> = repetitions.iter().collect();
        ordered.sort_by(|a, b| rate(a).total_cmp(&rate(b)));
        let median = ordered[(ordered.len() - 1) / 2];
        let (steps, limits) = (&median.steps, median.limits);
        let works = steps.iter().map(|step| Work::of(step, sizes));
        let whole = works.fold(Work::default(), Work::plus);
        let least =
            |step: &DirectStep, limits: &Limits| Work::of(step, sizes).least_seconds(limits);
        let least_in_turn = |step: &DirectStep, limits: &Limits| {
            let parts = Work::parts(step, sizes);
            parts.iter().map(|part| part.least_seconds(limits)).sum()
        };
        let per_step =
            |part: fn(&DirectStep) -> Duration| 1e3 * seconds(steps, part) / steps.len() as f64;
        let stages = Stage::ALL.iter().zip(median.stages);
        Measured {
            tokens_per_second: Spread {
                median: rate(median),
                min: rate(ordered[0]),
                max: rate(ordered[ordered.len() - 1]),
            },
            repetitions: repetitions.len(),
            steps: steps.len(),
            roofline: median_share(repetitions, least),
            in_turn: median_share(repetitions, least_in_turn),
            bound: whole.bound(&limits),
            limits,
            step_ms: per_step(DirectStep::total),
            parts_ms: Parts {
                plan: per_step(|step| step.plan),
                forward: per_step(|step| step.forward),
                sample: per_step(|step| step.sample),
                commit: per_step(|step| step.commit),
                stages: stages
                    .map(|(stage, spent)| {
                        (stage.name(), 1e3 * spent.as_secs_f64() / steps.len() as f64)
                    })
                    .collect(),
            },
        }
    }
}

/// The least time of a repetition's steps over the time that they took, in the median of all repetitions; the less of two.
fn median_share(repetitions: &[Repetition], least: impl Fn(&DirectStep, &Limits) -> f64) -> f64 {
    let share = |repetition: &Repetition| {
        let steps = repetition.steps.iter();
        let least: f64 = steps.map(|step| least(step, &repetition.limits)).sum();
        least / seconds(&repetition.steps, DirectStep::total)
    };
    let mut shares: Vec<f64> = repetitions.iter().map(share).collect();
    shares.sort_by(f64::total_cmp);
    shares[(shares.len() - 1) / 2]
}

fn seconds(steps: &[DirectStep], part: fn(&DirectStep) -> Duration) -> f64 {
    steps.iter().map(part).sum::<Duration>().as_secs_f64()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, model, .. } = self;
        let gigabytes = |bytes: usize| bytes as f64 / 1e9;
        writeln!(
            f,
            "Sterna {} on {}: {}, {} compute threads",
            self.version, machine.cpu, machine.isa, machine.threads
        )?;
        writeln!(
            f,
            "{}: {:.3} GB of layers, {:.2} bits a ternary weight; {:.3} GB of head; {:.1} kB of keys and values a token (f16)",
            model.name,
            gigabytes(model.layer_bytes),
            model.bits_per_weight,
            gigabytes(model.head_bytes),
            model.kv_bytes_per_token as f64 / 1e3,
        )?;
        writeln!(f, "checked: {}", self.checks.join("; "))?;
        self.write_limits(f)?;
        self.write_figures(f)?;
        self.write_parts(f)
    }
}

impl Report {
    fn measured(&self) -> impl Iterator<Item = (&What, &Measured)> + Clone {
        self.rows.iter().filter_map(|row| match &row.outcome {
            Outcome::Measured(measured) => Some((&row.what, measured)),
            Outcome::Skipped { .. } => None,
        })
    }

    fn write_limits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let range = |limit: fn(&Limits) -> f64| {
            let limits = self.measured().map(|(_, measured)| limit(&measured.limits));
            (
                limits.clone().fold(f64::INFINITY, f64::min),
                limits.fold(0.0, f64::max),
            )
        };
        let (slow, fast) = range(|limits| limits.gigabytes_per_second);
        let (few, many) = range(|limits| limits.gigaops_per_second);
        writeln!(
            f,
            "limits, sampled beside each figure: reads {slow:.1} to {fast:.1} GB/s ({} MiB a pass), int8 peak {few:.0} to {many:.0} Gop/s",
            self.machine.probe_bytes >> 20,
        )
    }

    fn write_figures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<20}{:>9}{:>19}{:>11}{:>10}  {:<10}{:>9}{:>9}{:>8}",
            "", "tok/s", "min – max", "ms a step", "roofline", "of", "in turn", "GB/s", "Gop/s"
        )?;
        for row in &self.rows {
            match &row.outcome {
                Outcome::Skipped { skipped } => writeln!(f, "{:<20}  {skipped}", row.what)?,
                Outcome::Measured(measured) => {
                    let Spread { median, min, max } = measured.tokens_per_second;
                    let bound = match measured.bound {
                        Bound::Bandwidth => "bandwidth",
                        Bound::Int8 => "int8 peak",
                    };
                    writeln!(
                        f,
                        "{:<20}{median:>9.1}{:>19}{:>11.3}{:>8.0} %  {bound:<10}{:>7.0} %{:>9.1}{:>8.0}",
                        row.what,
                        format!("{min:.1} – {max:.1}"),
                        measured.step_ms,
                        100.0 * measured.roofline,
                        100.0 * measured.in_turn,
                        measured.limits.gigabytes_per_second,
                        measured.limits.gigaops_per_second,
                    )?;
                }
            }
        }
        Ok(())
    }

    /// What a step's time goes into.
    fn write_parts(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n{:<20}{:>10}", "ms a step", "plan")?;
        for stage in Stage::ALL {
            write!(f, "{:>11}", stage.name())?;
        }
        writeln!(f, "{:>10}{:>10}{:>18}", "sample", "commit", "not the model")?;
        for (what, measured) in self.measured() {
            let parts = &measured.parts_ms;
            write!(f, "{what:<20}{:>10.3}", parts.plan)?;
            for (_, spent) in &parts.stages {
                write!(f, "{spent:>11.3}")?;
            }
            let others = parts.plan + parts.sample + parts.commit;
            writeln!(
                f,
                "{:>10.3}{:>10.3}{:>16.1} %",
                parts.sample,
                parts.commit,
                100.0 * others / measured.step_ms
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes {
        layer_bytes: 1_000_000,
        ternary_bytes: 1_000_000,
        ternary_weights: 4_000_000,
        head_bytes: 1_000_000,
        head_weights: 1_000_000,
        kv_bytes_per_token: 0,
    };
    /// A step of one stream reads for 2 ms.
    const LIMITS: Limits = Limits {
        gigabytes_per_second: 1.0,
        gigaops_per_second: 1000.0,
    };

    /// Two steps of `streams` streams, each of so many milliseconds.
    fn repetition(streams: usize, milliseconds: u64) -> Repetition {
        let step = DirectStep {
            tokens: streams,
            logits: streams,
            forward: Duration::from_millis(milliseconds - 1),
            sample: Duration::from_millis(1),
            ..DirectStep::default()
        };
        Repetition {
            steps: vec![step; 2],
            limits: LIMITS,
            ..Repetition::default()
        }
    }

    fn check(streams: usize, milliseconds: &[u64]) -> Measured {
        let repetitions: Vec<_> = milliseconds
            .iter()
            .map(|&milliseconds| repetition(streams, milliseconds))
            .collect();
        let what = What::Decode { streams, depth: 9 };
        Measured::of(&what, &repetitions, &SIZES)
    }

    #[test]
    fn a_figure_is_the_median_of_its_repetitions() {
        let measured = check(4, &[10, 5, 20]);
        let Spread { median, min, max } = measured.tokens_per_second;
        assert!((median - 400.0).abs() < 1e-9 && (measured.step_ms - 10.0).abs() < 1e-9);
        assert!((min - 200.0).abs() < 1e-9 && (max - 800.0).abs() < 1e-9);
        assert!((measured.parts_ms.sample - 1.0).abs() < 1e-9);
        // Of an even number, the worse one.
        assert!((check(4, &[10, 5]).step_ms - 10.0).abs() < 1e-9);
    }

    #[test]
    fn the_share_of_the_roofline_is_the_least_time_over_the_time() {
        let measured = check(1, &[4]);
        assert_eq!(measured.bound, Bound::Bandwidth);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert!((measured.in_turn - 0.5).abs() < 1e-9);
        // 1,000 streams multiply for 2 × 5 M × 1,000 ÷ 1,000 G = 10 ms.
        let measured = check(1000, &[16]);
        assert_eq!(measured.bound, Bound::Int8);
        assert!((measured.roofline - 0.625).abs() < 1e-9);
        // 150 streams read for 2 ms in all; the layers alone multiply for 1.2, the head reads for 1.
        let measured = check(150, &[4]);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert!((measured.in_turn - (1.2 + 1.0) / 4.0).abs() < 1e-9);
    }

    #[test]
    fn each_repetition_has_the_limits_beside_it() {
        // A machine that is half as fast for a while: the steps take twice as long, and the share stays.
        let slow = Limits {
            gigabytes_per_second: LIMITS.gigabytes_per_second / 2.0,
            ..LIMITS
        };
        let mut repetitions = [4, 8, 8].map(|milliseconds| repetition(1, milliseconds));
        for repetition in &mut repetitions[1..] {
            repetition.limits = slow;
        }
        let what = What::Decode {
            streams: 1,
            depth: 9,
        };
        let measured = Measured::of(&what, &repetitions, &SIZES);
        assert!((measured.roofline - 0.5).abs() < 1e-9);
        assert_eq!(measured.limits, slow);
    }
}
