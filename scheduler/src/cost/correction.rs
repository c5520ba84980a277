//! What a step truly takes, as learnt from those before it: one factor for the whole cost model.

use crate::Nanos;

/// What steps take in truth, relative to the prediction: about the 90th percentile, so that a budget is rarely exceeded.
///
/// Each observation above the estimate raises it by nine parts in 256, each below lowers it by one: it rests where one in
/// ten is above. How far above does not matter, so a single very long step moves it no more than any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Correction {
    scale: u64, // Actual ÷ predicted, of UNIT.
}

impl Correction {
    const UNIT: u64 = 1 << 16;
    const LEAST: u64 = Self::UNIT / 4;
    const MOST: u64 = Self::UNIT * 4;

    /// A step that was predicted without correction took `actual`.
    pub(crate) fn observe(&mut self, predicted: Nanos, actual: Nanos) {
        let estimate = u128::from(predicted) * u128::from(self.scale);
        let step = self.scale / 256;
        let moved = if u128::from(actual) * u128::from(Self::UNIT) > estimate {
            self.scale + 9 * step
        } else {
            self.scale - step
        };
        self.scale = moved.clamp(Self::LEAST, Self::MOST);
    }

    /// A prediction, corrected.
    pub(crate) fn apply(self, predicted: Nanos) -> Nanos {
        predicted.saturating_mul(self.scale) / Self::UNIT
    }

    /// The prediction that is corrected to this.
    pub(crate) fn unapply(self, corrected: Nanos) -> Nanos {
        let predicted = u128::from(corrected) * u128::from(Self::UNIT) / u128::from(self.scale);
        Nanos::try_from(predicted).unwrap_or(Nanos::MAX)
    }
}

impl Default for Correction {
    /// The prediction as it is.
    fn default() -> Correction {
        Correction { scale: Self::UNIT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::model::tests::Random;

    #[test]
    fn the_correction_finds_the_ninetieth_percentile() {
        let mut random = Random(3);
        let mut correction = Correction::default();
        for _ in 0..20_000 {
            // Evenly from 1 to 2 times the prediction: nine in ten are below 1.9 times.
            correction.observe(1_000_000, 1_000_000 + random.below(1_000_001));
        }
        let found = correction.apply(1_000);
        assert!((1_700..=2_000).contains(&found), "{found}");
    }

    #[test]
    fn one_very_long_step_moves_the_correction_no_more_than_another() {
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
