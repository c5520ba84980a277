//! The cost model as a sum of terms: each is a coefficient in nanoseconds times a factor of the
//! step's shape.
//!
//! The fit and the learner know the model only by its terms. A new term is a quantity in
//! [`StepShape`], a coefficient in [`CostModel`], and an entry in `linear_factors`,
//! `linear_coefficients` and `with_coefficients`.

use super::model::ROW_KNOTS;
use crate::{CostModel, Nanos, SAMPLING_UNIT, StepShape};

/// The number of terms whose factor is a quantity of the step.
const LINEAR_TERMS: usize = 5;

/// The number of terms: the rise of `rows` to each of its knots, and the linear terms.
pub(super) const TERMS: usize = ROW_KNOTS + LINEAR_TERMS;

/// The term of sampling, which is the last.
pub(super) const SAMPLING_TERM: usize = TERMS - 1;

/// One number for each term.
pub(super) type Terms = [f64; TERMS];

impl StepShape {
    fn linear_factors(self) -> [f64; LINEAR_TERMS] {
        [
            self.decode_keys as f64 / 1024.0,
            self.chunk_keys as f64 / 1024.0,
            f64::from(u8::from(self.logits > 0)),
            self.logits as f64,
            self.sampling as f64 / SAMPLING_UNIT as f64,
        ]
    }

    /// Returns the factor of each term.
    pub(super) fn factors(self) -> Terms {
        let mut factors = [0.0; TERMS];
        factors[0] = f64::from(u8::from(self.rows > 0));
        let rows = self.rows as f64;
        for (knot, factor) in factors.iter_mut().enumerate().take(ROW_KNOTS).skip(1) {
            let below = (1_u64 << (knot - 1)) as f64;
            let limit = if knot == ROW_KNOTS - 1 { f64::MAX } else { 1.0 };
            *factor = ((rows - below) / below).clamp(0.0, limit);
        }
        factors[ROW_KNOTS..].copy_from_slice(&self.linear_factors());
        factors
    }
}

impl CostModel {
    fn linear_coefficients(&self) -> [Nanos; LINEAR_TERMS] {
        [
            self.kilo_decode_keys,
            self.kilo_chunk_keys,
            self.head,
            self.logit,
            self.sampling,
        ]
    }

    /// Returns the coefficient of each term.
    pub(super) fn coefficients(&self) -> Terms {
        let mut coefficients = [0.0; TERMS];
        let mut below = 0;
        for (coefficient, &time) in coefficients.iter_mut().zip(&self.rows) {
            *coefficient = time.saturating_sub(below) as f64;
            below = time;
        }
        let linear = self.linear_coefficients();
        for (coefficient, time) in coefficients[ROW_KNOTS..].iter_mut().zip(linear) {
            *coefficient = time as f64;
        }
        coefficients
    }

    /// Returns the model with these coefficients, rounded to nanoseconds. None may be negative.
    pub(super) fn with_coefficients(coefficients: &Terms) -> CostModel {
        let mut time = 0.0;
        let rows = std::array::from_fn(|knot| {
            time += coefficients[knot];
            rounded(time)
        });
        let linear: [Nanos; LINEAR_TERMS] =
            std::array::from_fn(|term| rounded(coefficients[ROW_KNOTS + term]));
        let [kilo_decode_keys, kilo_chunk_keys, head, logit, sampling] = linear;
        CostModel {
            rows,
            kilo_decode_keys,
            kilo_chunk_keys,
            head,
            logit,
            sampling,
        }
    }
}

/// Rounds a time that is not negative. `f64::round` would be a function call.
fn rounded(nanoseconds: f64) -> Nanos {
    (nanoseconds + 0.5) as i64 as Nanos
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;
    use crate::cost::model::tests::random_model;

    #[test]
    fn the_terms_add_up_to_the_prediction() {
        let mut random = Random::new(4);
        for _ in 0..2000 {
            let model = random_model(&mut random);
            let coefficients = model.coefficients();
            assert_eq!(CostModel::with_coefficients(&coefficients), model);
            let shape = StepShape {
                decode_keys: random.below(3000),
                sampling: random.below(5_000_000),
                ..StepShape::chunk(
                    random.below(3000) as usize,
                    1 + random.below(300) as usize,
                    random.below(4) as usize,
                )
            };
            let factors = shape.factors();
            let sum: f64 = coefficients.iter().zip(&factors).map(|(a, b)| a * b).sum();
            let predicted = model.predict(shape) as f64;
            assert!(
                (sum - predicted).abs() <= 3.0,
                "{random:?} {model:?} {shape:?}"
            );
        }
    }
}
