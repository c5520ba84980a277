//! The correction of the cost model at run time: one factor, learned from the steps so far.

use crate::Nanos;

/// The ratio of actual to predicted time: about its 90th percentile, so that steps rarely exceed
/// their budget.
///
/// An observation above the estimate raises it by 9/256, and one below lowers it by 1/256. So it
/// settles where one observation in ten is above. The distance does not matter, so one very long
/// step moves it no more than any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Correction {
    scale: u64, // The ratio, in units of 1/UNIT.
}

impl Correction {
    const UNIT: u64 = 1 << 16;
    const MIN: u64 = Self::UNIT / 4;
    const MAX: u64 = Self::UNIT * 4;

    /// Learns from a step that took `actual`. `predicted` is the prediction without correction.
    pub(crate) fn observe(&mut self, predicted: Nanos, actual: Nanos) {
        let estimate = u128::from(predicted) * u128::from(self.scale);
        let step = self.scale / 256;
        let moved = if u128::from(actual) * u128::from(Self::UNIT) > estimate {
            self.scale + 9 * step
        } else {
            self.scale - step
        };
        self.scale = moved.clamp(Self::MIN, Self::MAX);
    }

    /// Returns the corrected prediction.
    pub(crate) fn apply(self, predicted: Nanos) -> Nanos {
        predicted.saturating_mul(self.scale) / Self::UNIT
    }

    /// Returns the prediction whose correction is `corrected`.
    pub(crate) fn unapply(self, corrected: Nanos) -> Nanos {
        let predicted = u128::from(corrected) * u128::from(Self::UNIT) / u128::from(self.scale);
        Nanos::try_from(predicted).unwrap_or(Nanos::MAX)
    }
}

impl Default for Correction {
    /// Returns the ratio 1.
    fn default() -> Correction {
        Correction { scale: Self::UNIT }
    }
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    #[test]
    fn the_correction_approaches_the_ninetieth_percentile() {
        let mut random = Random::new(3);
        let mut correction = Correction::default();
        for _ in 0..20_000 {
            // Uniform from 1 to 2 times the prediction: nine in ten are below 1.9 times.
            correction.observe(1_000_000, 1_000_000 + random.below(1_000_001));
        }
        let found = correction.apply(1_000);
        assert!((1_700..=2_000).contains(&found), "{found}");
    }

    #[test]
    fn a_very_long_step_moves_the_correction_no_more_than_any_other() {
        let after = |actual| {
            let mut correction = Correction::default();
            correction.observe(1_000, actual);
            correction
        };
        assert_eq!(after(1_001), after(1_000_000_000));
        assert_ne!(after(1_001), Correction::default());
    }

    #[test]
    fn the_correction_is_bounded() {
        let (mut high, mut low) = (Correction::default(), Correction::default());
        for _ in 0..10_000 {
            high.observe(1, Nanos::MAX);
            low.observe(Nanos::MAX, 0);
        }
        assert_eq!(high.apply(1_000), 4_000);
        assert_eq!(low.apply(1_000), 250);
    }
}
