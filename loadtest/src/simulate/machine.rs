//! The simulated machine: how long a step takes, and what share of it each row costs.

use std::path::Path;

use sterna_random::Random;
use sterna_scheduler::{Batch, CostModel, Micros, Row, SAMPLING_UNIT, StepShape};

use super::disturbance::{Burst, Disturbance, DisturbanceKind, RunPhase};
use crate::coefficients::Coefficients;
use crate::workload::{CONTEXT, ChatTurn, Session, stream};

/// The step time, in nanoseconds, that limits the concurrent answers of a load of 1.
const TARGET: u64 = 200_000_000;

/// The 2B-4T shape on two cores of a Xeon.
const TWO_CORES: CostModel = CostModel {
    rows: CostModel::roofline(40_000_000, 4_500_000),
    kilo_decode_keys: 600_000,
    kilo_chunk_keys: 500_000,
    head: 25_000_000,
    logit: 1_000_000,
    sampling: SAMPLING_UNIT,
};

/// The 2B-4T shape on two Zen 4 cores, about as a server measured it on an otherwise idle host.
const TWO_ZEN_4_CORES: CostModel = CostModel {
    rows: CostModel::roofline(13_200_000, 5_040_000),
    kilo_decode_keys: 3_950_000,
    kilo_chunk_keys: 2_160_000,
    head: 9_700_000,
    logit: 750_000,
    sampling: SAMPLING_UNIT,
};

/// The 2B-4T shape on 32 cores: 16 times the compute and 8 times the memory bandwidth of
/// [`TWO_CORES`].
const THIRTY_TWO_CORES: CostModel = CostModel {
    rows: CostModel::roofline(5_000_000, 280_000),
    kilo_decode_keys: 60_000,
    kilo_chunk_keys: 32_000,
    head: 3_000_000,
    logit: 65_000,
    sampling: SAMPLING_UNIT,
};

/// The embedded demo model on two cores.
const DEMO: CostModel = CostModel {
    rows: CostModel::roofline(400_000, 60_000),
    kilo_decode_keys: 30_000,
    kilo_chunk_keys: 30_000,
    head: 150_000,
    logit: 60_000,
    sampling: SAMPLING_UNIT,
};

/// Returns the cost model of a preset or of a JSON file.
pub(super) fn cost_model(name: &str) -> Result<CostModel, String> {
    match name {
        "2b-2core" => Ok(TWO_CORES),
        "2b-2core-zen4" => Ok(TWO_ZEN_4_CORES),
        "2b-32core" => Ok(THIRTY_TWO_CORES),
        "demo" => Ok(DEMO),
        path => from_file(Path::new(path)),
    }
}

fn from_file(path: &Path) -> Result<CostModel, String> {
    let read = Coefficients::read(path).map_err(|error| {
        format!(
            "--cost: {}: {error}; give the path of a JSON file, or one of the presets \
             2b-2core, 2b-2core-zen4, 2b-32core and demo",
            path.display()
        )
    })?;
    Ok(CostModel {
        rows: read.rows,
        kilo_decode_keys: read.kilo_decode_keys,
        kilo_chunk_keys: read.kilo_chunk_keys,
        head: read.head,
        logit: read.logit,
        sampling: SAMPLING_UNIT,
    })
}

/// A machine that takes the step times of a cost model, with noise and at times a disturbance.
pub(super) struct SimulatedMachine {
    cost: CostModel,
    noise: f64,
    disturbance: Option<Disturbance>,
    burst: Burst,
    random: Random,
}

impl SimulatedMachine {
    /// Creates the machine `number` of a run. A step's time deviates from its cost by at most the
    /// share `noise`, and all deviations are equally likely.
    pub(super) fn new(cost: CostModel, noise: f64, seed: u64, number: u64) -> SimulatedMachine {
        SimulatedMachine {
            cost,
            noise,
            disturbance: None,
            burst: Burst::default(),
            random: stream(seed, u64::MAX / 2 + number),
        }
    }

    /// Adds a disturbance.
    pub(super) fn disturbed(mut self, disturbance: Option<Disturbance>) -> SimulatedMachine {
        self.disturbance = disturbance;
        self
    }

    /// Returns the cost model that a server measures at its start.
    pub(super) fn calibrated(&mut self) -> CostModel {
        self.cost_at(0)
    }

    /// Returns the cost of a step at a moment.
    fn cost_at(&mut self, now: Micros) -> CostModel {
        match self.disturbance {
            Some(disturbance) if disturbance.phase(now) == RunPhase::During => {
                let part = match disturbance.kind {
                    DisturbanceKind::Bursts(_) => self.burst.share(now, &mut self.random),
                    _ => self.random.fraction(),
                };
                disturbance.kind.apply(&self.cost, part)
            }
            _ => self.cost,
        }
    }

    /// Returns the cost model without noise and disturbance.
    pub(super) fn cost(&self) -> CostModel {
        self.cost
    }

    /// Runs a step that begins at `now`. Returns its time in nanoseconds.
    pub(super) fn run(&mut self, shape: StepShape, now: Micros) -> u64 {
        let factor = 1.0 + self.noise * (2.0 * self.random.fraction() - 1.0);
        (self.cost_at(now).predict(shape) as f64 * factor) as u64
    }
}

/// Returns the shape of one row. `prompt_len` is the prompt length of its sequence.
pub(super) fn row_shape(row: &Row, prompt_len: usize) -> StepShape {
    let start = row.start as usize;
    let logits = row.logits as usize;
    if start < prompt_len || logits < row.len() {
        return StepShape::chunk(start, row.len(), logits);
    }
    (start + 1..=row.end())
        .map(StepShape::decode)
        .fold(StepShape::default(), StepShape::plus)
}

/// Returns the shape of a whole batch. `prompt_len` returns the prompt length of a row's sequence.
pub(super) fn batch_shape(batch: &Batch, prompt_len: impl Fn(&Row) -> usize) -> StepShape {
    let rows = batch.rows().iter();
    rows.map(|row| row_shape(row, prompt_len(row)))
        .fold(StepShape::default(), StepShape::plus)
}

/// Divides the cost of a step among its rows: the weights by tokens, the lm_head by logits.
pub(super) struct RowCosts {
    cost: CostModel,
    token: u64,
    logit: u64,
}

impl RowCosts {
    /// Prepares to divide the cost of a step of this shape.
    pub(super) fn new(cost: CostModel, step: StepShape) -> RowCosts {
        let tokens = cost.predict(StepShape {
            rows: step.rows,
            ..StepShape::default()
        });
        RowCosts {
            token: tokens / step.rows.max(1),
            logit: cost.logit + cost.head / step.logits.max(1),
            cost,
        }
    }

    /// Returns the share of a row of this shape, in nanoseconds.
    pub(super) fn of(&self, row: StepShape) -> u64 {
        let keys = self.cost.kilo_decode_keys * row.decode_keys
            + self.cost.kilo_chunk_keys * row.chunk_keys;
        self.token * row.rows + self.logit * row.logits + keys / 1024
    }
}

/// Returns the sessions per second that keep the machine exactly busy.
///
/// Earlier turns are assumed to be in the prefix cache. As many answers are decoded at a time as
/// the target inter-token latency allows.
pub(super) fn session_rate(cost: &CostModel, sessions: &[Session]) -> f64 {
    let answers = decodes_within_target(cost);
    let [.., half, all] = cost.rows;
    let prompt_token = (all - half) as f64 / f64::from(1 << (cost.rows.len() - 2));
    let token = cost.predict(decodes(answers)) as f64 / answers as f64;
    let work = |session: &Session| -> f64 {
        let turns = session.turns.iter();
        let new = |turn: &ChatTurn| {
            f64::from(turn.prompt.tokens) * prompt_token + f64::from(turn.answer.tokens) * token
        };
        turns.map(new).sum()
    };
    let total: f64 = sessions.iter().map(work).sum();
    1e9 * sessions.len() as f64 / total
}

fn decodes_within_target(cost: &CostModel) -> u64 {
    let fits = |&answers: &u64| cost.predict(decodes(answers)) <= TARGET;
    (1..=64).take_while(fits).last().unwrap_or(1)
}

fn decodes(count: u64) -> StepShape {
    StepShape {
        rows: count,
        decode_keys: count * u64::from(CONTEXT) / 8,
        chunk_keys: 0,
        logits: count,
        sampling: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_the_rows_add_up_to_the_step() {
        let rows = [
            StepShape::decode(100),
            StepShape::decode(3000),
            StepShape::chunk(512, 40, 0),
            StepShape::chunk(0, 17, 1),
        ];
        let step = rows.into_iter().fold(StepShape::default(), StepShape::plus);
        let costs = RowCosts::new(TWO_CORES, step);
        let sum: u64 = rows.into_iter().map(|row| costs.of(row)).sum();
        let whole = TWO_CORES.predict(step);
        assert!(whole - sum < 100, "{sum} of {whole}");
    }

    #[test]
    fn noise_is_bounded_and_a_function_of_its_seed() {
        let step = StepShape::decode(100);
        let times = |seed| {
            let mut machine = SimulatedMachine::new(TWO_CORES, 0.03, seed, 0);
            (0..1000)
                .map(|_| machine.run(step, 0))
                .collect::<Vec<u64>>()
        };
        assert_eq!(times(1), times(1));
        assert_ne!(times(1), times(2));
        let mean = TWO_CORES.predict(step) as f64;
        let ratios: Vec<f64> = times(1).iter().map(|time| *time as f64 / mean).collect();
        assert!(ratios.iter().all(|ratio| (0.97..=1.03).contains(ratio)));
        assert!(ratios.iter().any(|ratio| *ratio > 1.025));
    }
}
