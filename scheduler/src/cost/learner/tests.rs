//! Tests of the learner on machines that change their speed.

use sterna_random::Random;

use super::*;
use crate::SAMPLING_UNIT;

/// The 2B-4T shape on two cores.
const CALIBRATED: CostModel = CostModel {
    rows: CostModel::roofline(13_200_000, 5_040_000),
    kilo_decode_keys: 3_950_000,
    kilo_chunk_keys: 2_160_000,
    head: 9_700_000,
    logit: 750_000,
    sampling: SAMPLING_UNIT,
};

const SECOND: Nanos = 1_000_000_000;

/// Returns every coefficient times `factor`.
fn scaled(cost: CostModel, factor: f64) -> CostModel {
    CostModel::with_coefficients(&cost.coefficients().map(|time| time * factor))
}

/// The same machine with half of its memory bandwidth.
fn half_bandwidth() -> CostModel {
    CostModel {
        rows: CostModel::roofline(26_400_000, 5_040_000),
        kilo_decode_keys: 7_900_000,
        head: 19_400_000,
        ..CALIBRATED
    }
}

fn decodes(count: u64, len: usize) -> StepShape {
    (0..count).fold(StepShape::default(), |all, _| {
        all.plus(StepShape::decode(len))
    })
}

/// Returns the steps of a server with chats and prompts.
fn mixed(random: &mut Random) -> StepShape {
    let decodes = decodes(1 + random.below(8), 50 + random.index(200));
    match random.below(2) {
        0 => decodes,
        _ => decodes.plus(StepShape::chunk(
            random.index(1000),
            1 + random.index(40),
            0,
        )),
    }
}

/// A machine that runs steps, and the learner that sees them.
struct Machine {
    random: Random,
    learner: Learner,
    truth: CostModel,
    noise: u64, // The largest deviation of a step, in percent.
}

impl Machine {
    fn new(calibrated: CostModel, truth: CostModel) -> Machine {
        Machine {
            random: Random::new(11),
            learner: Learner::new(&calibrated),
            truth,
            noise: 3,
        }
    }

    fn step(&mut self, shape: StepShape) -> Nanos {
        let percent = 100 - self.noise + self.random.below(2 * self.noise + 1);
        let time = self.truth.predict(shape) * percent / 100;
        self.learner.observe(shape, StepShape::default(), time);
        time
    }

    fn run(&mut self, time: Nanos, shape: impl Fn(&mut Random) -> StepShape) {
        let mut passed = 0;
        while passed < time {
            let shape = shape(&mut self.random);
            passed += self.step(shape);
        }
    }

    /// Returns the relative error of the prediction of a step, without the margin.
    fn error(&self, shape: StepShape) -> f64 {
        let predicted = self.learner.model().predict(shape) as f64 / self.learner.margin();
        predicted / self.truth.predict(shape) as f64 - 1.0
    }

    fn assert_learned(&mut self, limit: f64, shape: impl Fn(&mut Random) -> StepShape) {
        for _ in 0..200 {
            let shape = shape(&mut self.random);
            let error = self.error(shape);
            assert!(
                error.abs() <= limit,
                "{shape:?} is predicted {error:+.2} off"
            );
        }
    }
}

#[test]
fn another_speed_is_learned_within_two_seconds_of_steps() {
    for factor in [1.3, 2.0, 3.0, 5.0] {
        let slow = scaled(CALIBRATED, factor);
        for shape in [mixed, |_: &mut Random| decodes(6, 150)] {
            let mut machine = Machine::new(CALIBRATED, CALIBRATED);
            machine.run(30 * SECOND, shape);
            for truth in [slow, CALIBRATED] {
                machine.truth = truth;
                machine.run(2 * SECOND, shape);
                machine.assert_learned(0.15, shape);
                machine.run(30 * SECOND, shape);
                machine.assert_learned(0.08, shape);
            }
        }
    }
}

#[test]
fn a_disturbed_calibration_is_forgotten_within_two_seconds_of_steps() {
    // The steps of one and of eight tokens were measured 4.7 and 5.1 times too long.
    let disturbed = CostModel {
        rows: [70, 80, 120, 242, 400, 700, 1300, 2500, 4900, 9700].map(|time| time * 1_000_000),
        head: 30_000_000,
        ..CALIBRATED
    };
    let mut machine = Machine::new(disturbed, CALIBRATED);
    machine.run(2 * SECOND, mixed);
    machine.assert_learned(0.3, mixed);
    machine.run(10 * SECOND, mixed);
    machine.assert_learned(0.12, mixed);
}

/// Steps of many tokens take as long as before; steps of few tokens take twice as long.
#[test]
fn a_lower_bandwidth_is_learned_by_the_shape_of_steps() {
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    machine.run(10 * SECOND, mixed);
    machine.truth = half_bandwidth();
    machine.run(10 * SECOND, mixed);
    machine.assert_learned(0.15, mixed);
    machine.truth = CALIBRATED;
    machine.run(10 * SECOND, mixed);
    machine.assert_learned(0.15, mixed);
}

/// Attention over real histories takes longer than the calibration measured.
#[test]
fn the_cost_of_long_histories_is_learned_beside_short_chats() {
    let truth = CostModel {
        kilo_chunk_keys: 3 * CALIBRATED.kilo_chunk_keys,
        ..CALIBRATED
    };
    let steps = |random: &mut Random| {
        let chunk = StepShape::chunk(random.index(4000), 16 + random.index(16), 0);
        decodes(8, 100).plus(chunk)
    };
    let mut machine = Machine::new(CALIBRATED, truth);
    machine.run(30 * SECOND, steps);
    machine.assert_learned(0.1, steps);
}

#[test]
fn a_term_that_cost_nothing_in_the_calibration_is_learned() {
    let calibrated = CostModel {
        kilo_decode_keys: 0,
        ..CALIBRATED
    };
    let truth = CostModel {
        kilo_decode_keys: 600_000,
        ..CALIBRATED
    };
    let steps = |random: &mut Random| decodes(1 + random.below(8), random.index(4000));
    let mut machine = Machine::new(calibrated, truth);
    machine.run(60 * SECOND, steps);
    machine.assert_learned(0.15, steps);
}

#[test]
fn a_single_long_or_short_step_hardly_changes_a_prediction() {
    for factor in [0.1, 0.7, 1.5, 5.0, 100.0] {
        let mut machine = Machine::new(CALIBRATED, CALIBRATED);
        machine.run(10 * SECOND, mixed);
        for _ in 0..20 {
            let shape = mixed(&mut machine.random);
            let before = machine.error(shape);
            let time = CALIBRATED.predict(shape) as f64 * factor;
            machine
                .learner
                .observe(shape, StepShape::default(), time as Nanos);
            let moved = (machine.error(shape) - before).abs();
            assert!(moved < 0.03, "{factor}: {moved}");
            for _ in 0..10 {
                machine.step(shape);
            }
        }
        machine.assert_learned(0.08, mixed);
    }
}

#[test]
fn ordinary_noise_is_averaged() {
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    machine.noise = 15;
    for _ in 0..50 {
        machine.run(SECOND, mixed);
        machine.assert_learned(0.12, mixed);
    }
}

#[test]
fn the_margin_covers_nine_steps_in_ten() {
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    machine.noise = 20;
    machine.run(60 * SECOND, mixed);
    let mut over = 0;
    for _ in 0..1000 {
        let shape = mixed(&mut machine.random);
        let predicted = machine.learner.model().predict(shape);
        over += u32::from(machine.step(shape) > predicted);
    }
    assert!((50..200).contains(&over), "{over} of 1000");
}

#[test]
fn whatever_steps_take_the_predictions_stay_within_bounds() {
    for (time, bounds) in [(0, 0..=1), (Nanos::MAX, 15..=25)] {
        let mut machine = Machine::new(CALIBRATED, CALIBRATED);
        for _ in 0..1000 {
            let shape = mixed(&mut machine.random);
            machine.learner.observe(shape, StepShape::default(), time);
        }
        let shape = decodes(4, 100);
        let found = machine.learner.model().predict(shape);
        let factor = found / CALIBRATED.predict(shape);
        assert!(found > 0 && bounds.contains(&factor), "{time}: {factor}");
    }
}

/// Steps of about the same size do not tell how their time divides into terms.
#[test]
fn steps_of_one_size_keep_the_proportions_of_the_calibration() {
    let steps = |random: &mut Random| {
        let history = 1000 * random.index(4);
        decodes(8, 100).plus(StepShape::chunk(history, 12 - history / 500, 0))
    };
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    machine.noise = 15;
    for _ in 0..60 {
        machine.run(5 * SECOND, steps);
        machine.truth = scaled(CALIBRATED, 2.0);
        machine.run(SECOND / 2, steps);
        machine.truth = CALIBRATED;
    }
    machine.run(5 * SECOND, steps);
    for shape in [
        StepShape::decode(100),
        decodes(8, 100),
        StepShape::chunk(0, 128, 0),
    ] {
        let error = machine.error(shape);
        assert!(error.abs() < 0.25, "{shape:?} is predicted {error:+.2} off");
    }
    let rows = machine.learner.model().rows;
    for pair in rows.windows(2) {
        assert!(pair[1] <= 2 * pair[0] + 1, "{rows:?}");
    }
}

/// A disturbed step beside one with a history makes the history seem free.
#[test]
fn a_history_that_cost_nothing_in_the_calibration_is_learned() {
    let calibrated = CostModel {
        kilo_chunk_keys: 50_000,
        ..CALIBRATED
    };
    let steps = |random: &mut Random| {
        let history = random.index(4000);
        decodes(8, 100).plus(StepShape::chunk(history, 16, 0))
    };
    let mut machine = Machine::new(calibrated, CALIBRATED);
    machine.run(30 * SECOND, steps);
    machine.assert_learned(0.2, steps);
}

#[test]
fn caution_lasts_while_steps_take_longer_than_predicted() {
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    machine.run(10 * SECOND, mixed);
    assert_eq!(machine.learner.caution(), 1.0);
    machine.truth = scaled(CALIBRATED, 2.0);
    machine.step(decodes(6, 150));
    let caution = machine.learner.caution();
    assert!((1.6..2.1).contains(&caution), "{caution}");
    machine.run(2 * SECOND, |_| decodes(6, 150));
    machine.step(decodes(6, 150));
    assert_eq!(
        machine.learner.caution(),
        1.0,
        "the learned times are right"
    );
    machine.truth = CALIBRATED;
    machine.step(decodes(6, 150));
    assert_eq!(machine.learner.caution(), 1.0, "the step was shorter");
}

/// Beside short commands, which come every few seconds, a step seldom takes much longer than
/// predicted: the margin has room for the first step of most of them.
#[test]
fn one_step_in_a_hundred_takes_much_longer_than_predicted() {
    let mut machine = Machine::new(CALIBRATED, CALIBRATED);
    let mut over = 0;
    for step in 0..4000 {
        let factor = 1.0 + machine.random.fraction() * 0.8;
        machine.truth = match step % 25 {
            0 | 1 => scaled(CALIBRATED, factor),
            _ => CALIBRATED,
        };
        let shape = mixed(&mut machine.random);
        let learner = &machine.learner;
        let predicted = learner.model().predict(shape) as f64 * learner.caution();
        let actual = machine.step(shape) as f64;
        over += u32::from(step >= 1000 && actual > 1.25 * predicted);
    }
    assert!(over <= 30, "{over} of 3000");
}

/// Sampling takes three times as long as measured. The steps teach that to the term of sampling,
/// and predictions of plain steps stay right.
#[test]
fn sampling_that_takes_longer_than_measured_is_learned() {
    let truth = CostModel {
        sampling: 3 * SAMPLING_UNIT,
        ..CALIBRATED
    };
    let mut machine = Machine::new(CALIBRATED, truth);
    let shape = |random: &mut Random| {
        let costly = decodes(random.below(4), 100).with_draws(3_000_000);
        costly.plus(decodes(1 + random.below(5), 100))
    };
    machine.run(30 * SECOND, shape);
    machine.assert_learned(0.08, shape);
    machine.assert_learned(0.1, |random| decodes(1 + random.below(8), 100));
}

/// A machine so slow that a step of one token takes longer than a hundred milliseconds still
/// expects of sampling what was measured, before any step has taught it.
#[test]
fn a_slow_step_does_not_raise_the_price_of_sampling() {
    let slow = CostModel {
        sampling: SAMPLING_UNIT,
        ..scaled(CALIBRATED, 100.0)
    };
    let draws = decodes(1, 100).with_draws(1_000_000);
    let learned = Learner::new(&slow).model();
    assert_eq!(learned.draws(draws), slow.draws(draws));
}
