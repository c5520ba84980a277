//! How long a step will take.
//!
//! ```text
//! t(step) = rows(n) + key · keys + [logits > 0] · head + logit · logits
//! ```
//!
//! `n` counts the tokens that the step computes, and `keys` the keys that each of them looks at, over all tokens. `rows` is
//! linear between powers of two. On a quiet machine a roofline, `max(weights, row · n)`, would do within a tenth; where the cores
//! are shared with other work its bend is far off. What n tokens take apart from their attention and logits, fastest of a few on virtual
//! cores; the last two lines are two starts of a server within an hour, the second while others used the machine:
//!
//! ```text
//! n                                     1     2     4     8    16    32    64   128
//! demo model, one thread, µs           33    47    90   161   318   635  1273
//! 2B-4T's shape, two threads, ms       13    13    22    42    81   161   322   644
//! the same                             22    28    45    83   116   232   464   927
//! ```
//!
//! The head has a bend as well, which `head + logit · logits` smooths: for four to eight sequences it is up to a fifth of
//! the step too long.
//!
//! Coefficients are integers, in nanoseconds, so that equal inputs give equal plans.

/// Nanoseconds of machine time.
pub type Nanos = u64;

/// What a step consists of, as far as its cost goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens computed.
    pub rows: u64,
    /// Keys that the tokens of decodes look at, summed.
    pub decode_keys: u64,
    /// Keys that the tokens of prefill chunks look at, summed.
    pub chunk_keys: u64,
    /// Tokens whose logits are wanted.
    pub logits: u64,
}

/// Powers of two at which the time of a step's tokens is known: 1, 2, 4, up to 128.
pub(crate) const ROW_KNOTS: usize = 8;

/// The coefficients, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Of a step of 1, 2, 4, up to 128 tokens that look at nothing and want no logits; never falling. In between it is
    /// linear, and beyond the last it goes on as before it.
    pub rows: [Nanos; ROW_KNOTS],
    /// Of 1024 keys that decodes look at.
    pub kilo_decode_keys: Nanos,
    /// Of 1024 keys that prefill chunks look at.
    pub kilo_chunk_keys: Nanos,
    /// Of streaming the output head, if any logits are wanted.
    pub head: Nanos,
    /// Of the logits after one token, sampling included.
    pub logit: Nanos,
}

impl StepShape {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows + other.rows,
            decode_keys: self.decode_keys + other.decode_keys,
            chunk_keys: self.chunk_keys + other.chunk_keys,
            logits: self.logits + other.logits,
        }
    }

    /// This without `other`, which is a part of it.
    #[must_use]
    pub(crate) fn minus(self, other: StepShape) -> StepShape {
        StepShape {
            rows: self.rows - other.rows,
            decode_keys: self.decode_keys - other.decode_keys,
            chunk_keys: self.chunk_keys - other.chunk_keys,
            logits: self.logits - other.logits,
        }
    }

    /// A decode of a sequence of `len` known tokens.
    pub fn decode(len: usize) -> StepShape {
        StepShape {
            rows: 1,
            decode_keys: len as u64,
            chunk_keys: 0,
            logits: 1,
        }
    }

    /// A chunk of `tokens` tokens after `history` others.
    pub fn chunk(history: usize, tokens: usize, logits: usize) -> StepShape {
        let (history, tokens) = (history as u64, tokens as u64);
        StepShape {
            rows: tokens,
            decode_keys: 0,
            chunk_keys: tokens * history + tokens * (tokens + 1) / 2,
            logits: logits as u64,
        }
    }
}

impl CostModel {
    /// A guess for before the first measurement: the shape of a small model on two cores.
    pub const UNMEASURED: CostModel = CostModel {
        rows: CostModel::roofline(1_000_000, 100_000),
        kilo_decode_keys: 50_000,
        kilo_chunk_keys: 50_000,
        head: 500_000,
        logit: 50_000,
    };

    /// The times of a machine that streams the weights once a step, unless the arithmetic of its tokens takes longer.
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

    /// How long a step takes; nothing if it has no rows. A step that has more of anything never takes less.
    pub fn predict(&self, shape: StepShape) -> Nanos {
        if shape.rows == 0 {
            return 0;
        }
        let head = if shape.logits > 0 { self.head } else { 0 };
        self.rows_time(shape.rows) + self.keys(shape) + head + self.logit * shape.logits
    }

    /// The part of a step's time that grows with the keys its tokens look at.
    pub(crate) fn keys(&self, shape: StepShape) -> Nanos {
        (self.kilo_decode_keys * shape.decode_keys + self.kilo_chunk_keys * shape.chunk_keys) / 1024
    }

    /// Of `count` tokens, at least one, apart from their attention and logits.
    fn rows_time(&self, count: u64) -> Nanos {
        let knot = (count.ilog2() as usize).min(ROW_KNOTS - 2);
        let below = 1 << knot;
        let rise = self.rows[knot + 1].saturating_sub(self.rows[knot]);
        self.rows[knot] + rise * (count - below) / below
    }

    /// The most tokens of a chunk after `history` others, up to `most`, with which `base` fits the budget; 0 if not even
    /// one does. `logits` of the chunk's tokens want logits.
    pub fn largest_chunk(
        &self,
        budget: Nanos,
        base: StepShape,
        history: usize,
        most: usize,
        logits: usize,
    ) -> usize {
        let fits = |tokens: u64| {
            let chunk = StepShape::chunk(history, tokens as usize, logits);
            self.predict(base.plus(chunk)) <= budget
        };
        largest(most as u64, fits) as usize
    }
}

/// The largest of `1..=most` that fits, if none fits after one that does not; 0 if none fits.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut fitting, mut left) = (0, most);
    while left > 0 {
        let tried = fitting + left.div_ceil(2);
        if fits(tried) {
            left -= tried - fitting;
            fitting = tried;
        } else {
            left = tried - fitting - 1;
        }
    }
    fitting
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Numbers from a seed (SplitMix64).
    #[derive(Debug)]
    pub(crate) struct Random(pub(crate) u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        }

        pub(crate) fn below(&mut self, bound: u64) -> u64 {
            self.next() % bound
        }

        pub(crate) fn model(&mut self) -> CostModel {
            let mut time = 100_000;
            let rows = std::array::from_fn(|knot| {
                time += if knot == 0 { 0 } else { self.below(time) };
                time
            });
            CostModel {
                rows,
                kilo_decode_keys: self.below(100_000),
                kilo_chunk_keys: self.below(100_000),
                head: self.below(3_000_000),
                logit: self.below(500_000),
            }
        }
    }

    #[test]
    fn the_largest_chunk_is_that_of_trying_all() {
        let mut random = Random(1);
        for _ in 0..2000 {
            let model = random.model();
            let base = match random.below(3) {
                0 => StepShape::default(),
                decodes => (0..decodes * 5).fold(StepShape::default(), |shape, _| {
                    shape.plus(StepShape::decode(1 + random.below(4000) as usize))
                }),
            };
            let (history, most) = (random.below(4000) as usize, random.below(300) as usize);
            let logits = random.below(2) as usize;
            let cost = |tokens| model.predict(base.plus(StepShape::chunk(history, tokens, logits)));
            let budget = random.below(cost(400) + 1);
            let expected = (1..=most).rev().find(|&tokens| cost(tokens) <= budget);
            assert_eq!(
                model.largest_chunk(budget, base, history, most, logits),
                expected.unwrap_or(0),
                "{random:?} {model:?} {budget}"
            );
        }
    }

    #[test]
    fn more_of_anything_never_takes_less() {
        let mut random = Random(2);
        for _ in 0..2000 {
            let model = random.model();
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
            });
            assert!(model.predict(more) >= model.predict(shape), "{random:?}");
        }
    }

    #[test]
    fn a_roofline_bends_where_the_arithmetic_outweighs_the_weights() {
        let model = CostModel {
            rows: CostModel::roofline(1_600, 100),
            ..CostModel::UNMEASURED
        };
        assert_eq!(
            model.rows,
            [1_600, 1_600, 1_600, 1_600, 1_600, 3_200, 6_400, 12_800]
        );
        assert_eq!(model.rows_time(200), 20_000);
        assert_eq!(model.predict(StepShape::default()), 0);
    }
}
