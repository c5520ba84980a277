//! The cost model: a prediction of the duration of a step.
//!
//! ```text
//! t(step) = rows(n) + key · keys + [logits > 0] · head + logit · logits + sampling · s
//! ```
//!
//! `n` is the number of tokens in the step, and `keys` is the number of keys that these tokens
//! attend to. `s` is what the sampling parameters of requests add to plain draws, as the caller has
//! measured it. `rows` is linear between powers of two. A roofline, `max(weights, row · n)`, was
//! rejected: on shared cores its bend is far off. Measured: see `benches/record/scheduler.md`.
//!
//! In a mixture of experts, each of the first rows reads further experts, and later rows find
//! nearly all experts read. So `rows` rises fast, then slowly, and again faster where arithmetic
//! takes longer than reading. A term of its own, a · (1 − (1 − used / experts)^n), was rejected:
//! `rows` follows that curve up to its last knot.
//!
//! Invariant: coefficients are integers in nanoseconds, so equal inputs give equal plans.

use crate::limits::MAX_SCORED_TOKENS;

/// Nanoseconds of machine time.
pub type Nanos = u64;

/// The quantities of a step that determine its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens that the step computes.
    pub rows: u64,
    /// Keys that the tokens of decodes attend to, summed over the tokens.
    pub decode_keys: u64,
    /// Keys that the tokens of prefill chunks attend to, summed over the tokens.
    pub chunk_keys: u64,
    /// Tokens that need logits.
    pub logits: u64,
    /// What sampling these tokens takes beyond plain draws, summed over [`Request::draw_time`].
    ///
    /// [`Request::draw_time`]: crate::Request::draw_time
    pub sampling: Nanos,
}

/// The number of knots of [`CostModel::rows`]: the powers of two from 1 to 512.
pub(crate) const ROW_KNOTS: usize = 10;

/// The tokens of a step that computes about as many tokens per second as any step.
const FULL_STEP: u64 = 128;

/// The coefficients of the prediction, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// The time of a step of 1, 2, 4, up to 512 tokens without attention and logits; never falling.
    /// The time is linear between these knots. Beyond the last knot it rises as before that knot.
    pub rows: [Nanos; ROW_KNOTS],
    /// The time of 1024 keys that decodes attend to.
    pub kilo_decode_keys: Nanos,
    /// The time of 1024 keys that prefill chunks attend to.
    pub kilo_chunk_keys: Nanos,
    /// The time of streaming the output head, if any token needs logits.
    pub head: Nanos,
    /// The time of the logits of one token, including a plain draw.
    pub logit: Nanos,
    /// The time of [`SAMPLING_UNIT`] of [`StepShape::sampling`].
    pub sampling: Nanos,
}

/// The sampling time of which [`CostModel::sampling`] is the cost: about a millisecond.
pub const SAMPLING_UNIT: Nanos = 1 << 20;

impl StepShape {
    /// Returns the sum of two shapes.
    #[inline]
    #[must_use]
    pub fn plus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows + other.rows,
            decode_keys: self.decode_keys + other.decode_keys,
            chunk_keys: self.chunk_keys + other.chunk_keys,
            logits: self.logits + other.logits,
            sampling: self.sampling + other.sampling,
        }
    }

    /// Adds another shape to this one.
    #[inline]
    pub(crate) fn add(&mut self, other: StepShape) {
        self.rows += other.rows;
        self.decode_keys += other.decode_keys;
        self.chunk_keys += other.chunk_keys;
        self.logits += other.logits;
        self.sampling += other.sampling;
    }

    /// Returns this shape without `other`, which must be a part of it.
    #[must_use]
    pub(crate) fn minus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows - other.rows,
            decode_keys: self.decode_keys - other.decode_keys,
            chunk_keys: self.chunk_keys - other.chunk_keys,
            logits: self.logits - other.logits,
            sampling: self.sampling - other.sampling,
        }
    }

    /// Returns the shape of a decode of a sequence of `len` known tokens.
    #[inline]
    pub fn decode(len: usize) -> StepShape {
        StepShape {
            rows: 1,
            decode_keys: len as u64,
            chunk_keys: 0,
            logits: 1,
            sampling: 0,
        }
    }

    /// Returns the shape of a prefill chunk of `tokens` tokens after `history` earlier tokens.
    pub fn chunk(history: usize, tokens: usize, logits: usize) -> StepShape {
        let (history, tokens) = (history as u64, tokens as u64);
        StepShape {
            rows: tokens,
            decode_keys: 0,
            chunk_keys: tokens * history + tokens * (tokens + 1) / 2,
            logits: logits as u64,
            sampling: 0,
        }
    }

    /// Returns this shape with the time that each draw takes beyond a plain one.
    #[inline]
    #[must_use]
    pub fn with_draws(self, draw_time: Nanos) -> StepShape {
        StepShape {
            sampling: self.logits * draw_time,
            ..self
        }
    }
}

impl CostModel {
    /// The model before the first measurement: the costs of a small model on two cores.
    pub const UNMEASURED: CostModel = CostModel {
        rows: CostModel::roofline(1_000_000, 100_000),
        kilo_decode_keys: 50_000,
        kilo_chunk_keys: 50_000,
        head: 500_000,
        logit: 50_000,
        sampling: SAMPLING_UNIT,
    };

    /// Returns the `rows` of a machine whose step takes the longer of two times: streaming the
    /// `weights`, and `row` per token.
    pub const fn roofline(weights: Nanos, row: Nanos) -> [Nanos; ROW_KNOTS] {
        let mut rows = [weights; ROW_KNOTS];
        let mut knot = 0;
        while knot < ROW_KNOTS {
            if row << knot > weights {
                rows[knot] = row << knot;
            }
            knot += 1;
        }
        rows
    }

    /// Returns the duration of a step, which is 0 if the step has no tokens. A step with more of
    /// any quantity never takes less.
    pub fn predict(&self, shape: StepShape) -> Nanos {
        if shape.rows == 0 {
            return 0;
        }
        let head = if shape.logits > 0 { self.head } else { 0 };
        let logits = head + self.logit * shape.logits;
        self.rows_time(shape.rows) + self.keys(shape) + logits + self.draws(shape)
    }

    /// Returns the time of the smallest step that computes, as all larger ones do, at least
    /// `percent` of the tokens per second that a step of [`FULL_STEP`] tokens computes.
    pub(crate) fn efficient_step(&self, percent: u64) -> Nanos {
        let time = |rows| {
            self.predict(StepShape {
                rows,
                logits: 1,
                ..StepShape::default()
            })
        };
        let most = FULL_STEP;
        let (least, scaled_time) = (u128::from(percent * most), u128::from(100 * time(most)));
        // rows / time(rows) >= percent / 100 * most / time(most)
        let is_efficient = |rows| u128::from(rows) * scaled_time >= least * u128::from(time(rows));
        let mut enough = most;
        while enough > 1 && is_efficient(enough / 2) {
            enough /= 2;
        }
        // Between two knots the tokens per second only rise, or only fall.
        let mut too_few = enough / 2;
        while enough - too_few > 1 {
            let rows = (too_few + enough) / 2;
            if is_efficient(rows) {
                enough = rows;
            } else {
                too_few = rows;
            }
        }
        time(enough)
    }

    /// Returns the part of a step's time that grows with the number of keys.
    pub(crate) fn keys(&self, shape: StepShape) -> Nanos {
        (self.kilo_decode_keys * shape.decode_keys + self.kilo_chunk_keys * shape.chunk_keys) / 1024
    }

    /// Returns the part of a step's time that its requests' sampling parameters add.
    pub(crate) fn draws(&self, shape: StepShape) -> Nanos {
        self.sampling * shape.sampling / SAMPLING_UNIT
    }

    /// Returns how long the last `uncached` of `len` prompt tokens take in a step of their own.
    pub(crate) fn prefill_time(&self, len: usize, uncached: usize) -> Nanos {
        self.predict(StepShape::chunk(len - uncached, uncached, 1))
    }

    /// Returns how much longer than a plain draw a draw takes that took `draw_time` longer at the
    /// measurement.
    pub(crate) fn draw_time(&self, draw_time: Nanos) -> Nanos {
        self.draws(StepShape {
            sampling: draw_time,
            ..StepShape::default()
        })
    }

    /// Returns how much longer the prefill of a prompt of `tokens` tokens takes if all of them need
    /// logits. `draw_time` is what each of them adds beyond a plain draw.
    pub(crate) fn scoring_time(&self, tokens: usize, draw_time: Nanos) -> Nanos {
        let (steps, tokens) = (tokens.div_ceil(MAX_SCORED_TOKENS), tokens as u64);
        let per_token = self.logit + self.draw_time(draw_time);
        self.head * steps as u64 + per_token * tokens
    }

    /// Returns the time of `count` tokens, at least 1, without attention and logits.
    fn rows_time(&self, count: u64) -> Nanos {
        let knot = (count.ilog2() as usize).min(ROW_KNOTS - 2);
        let below = 1 << knot;
        let rise = self.rows[knot + 1].saturating_sub(self.rows[knot]);
        self.rows[knot] + rise * (count - below) / below
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use sterna_random::Random;

    use super::*;

    /// Returns a cost model whose `rows` never fall and at most double from knot to knot.
    pub(crate) fn random_model(random: &mut Random) -> CostModel {
        let mut time = 100_000;
        let rows = std::array::from_fn(|knot| {
            time += if knot == 0 { 0 } else { random.below(time) };
            time
        });
        CostModel {
            rows,
            kilo_decode_keys: random.below(100_000),
            kilo_chunk_keys: random.below(100_000),
            head: random.below(3_000_000),
            logit: random.below(500_000),
            sampling: random.below(3 * SAMPLING_UNIT),
        }
    }

    #[test]
    fn more_of_any_quantity_never_takes_less() {
        let mut random = Random::new(2);
        for _ in 0..2000 {
            let model = random_model(&mut random);
            let shape = StepShape::chunk(
                random.below(3000) as usize,
                1 + random.below(300) as usize,
                random.below(4) as usize,
            );
            let more = shape.plus(StepShape {
                rows: random.below(3),
                decode_keys: random.below(3000),
                chunk_keys: random.below(3000),
                logits: random.below(2),
                sampling: random.below(5_000_000),
            });
            assert!(model.predict(more) >= model.predict(shape), "{random:?}");
        }
    }

    #[test]
    fn the_efficient_step_is_that_of_trying_all_sizes() {
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let model = random_model(&mut random);
            let time = |rows| {
                let shape = StepShape {
                    rows,
                    logits: 1,
                    ..StepShape::default()
                };
                model.predict(shape)
            };
            let is_slow = |&rows: &u64| 4 * rows * time(128) < 3 * 128 * time(rows);
            let expected = time((1..128).rev().find(is_slow).map_or(1, |rows| rows + 1));
            assert_eq!(model.efficient_step(75), expected, "{model:?}");
        }
    }

    #[test]
    fn a_roofline_bends_where_arithmetic_takes_longer_than_the_weights() {
        let model = CostModel {
            rows: CostModel::roofline(1_600, 100),
            ..CostModel::UNMEASURED
        };
        assert_eq!(
            model.rows,
            [
                1_600, 1_600, 1_600, 1_600, 1_600, 3_200, 6_400, 12_800, 25_600, 51_200
            ]
        );
        assert_eq!(model.rows_time(200), 20_000);
        assert_eq!(model.rows_time(1000), 100_000);
        assert_eq!(model.predict(StepShape::default()), 0);
    }
}
