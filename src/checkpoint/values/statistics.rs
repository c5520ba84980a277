//! Weight statistics: they tell whether ternary weights look like a trained model's.

/// How many weights are −1, 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WeightStatistics([u64; 3]);

impl WeightStatistics {
    /// Counts codes; a code is weight + 1.
    pub(crate) fn count(&mut self, codes: &[u8]) {
        // The counts of 255 codes fit bytes, so the compiler counts many codes at once.
        for run in codes.chunks(255) {
            let (zeros, plus) = run.iter().fold((0, 0), |(zeros, plus), code| {
                (zeros + (code & 1), plus + (code >> 1))
            });
            self.0[1] += u64::from(zeros);
            self.0[2] += u64::from(plus);
            self.0[0] += run.len() as u64 - u64::from(zeros) - u64::from(plus);
        }
    }

    /// Adds the counts of other weights.
    pub(crate) fn add(&mut self, other: WeightStatistics) {
        for (count, other) in self.0.iter_mut().zip(other.0) {
            *count += other;
        }
    }

    /// Returns how many weights are −1, 0 and 1.
    pub(crate) fn counts(self) -> [u64; 3] {
        self.0
    }

    /// Returns the fractions of −1, 0 and 1 if a trained ternary model would not have them.
    pub(crate) fn unusual(self) -> Option<[f64; 3]> {
        let total = self.0.iter().sum::<u64>() as f64;
        let fractions = self.0.map(|count| count as f64 / total);
        let [minus, zero, plus] = fractions;
        let is_usual = (0.2..=0.5).contains(&zero)
            && [minus, plus]
                .iter()
                .all(|sign| (0.25..=0.45).contains(sign));
        (total > 0.0 && !is_usual).then_some(fractions)
    }

    /// Logs a warning if the weights do not look like a trained model's.
    pub(crate) fn warn_if_unusual(self) {
        if let Some([minus, zero, plus]) = self.unusual() {
            tracing::warn!(
                "the ternary weights are {:.1} % minus, {:.1} % zero, {:.1} % plus; a trained \
                 model has 20-50 % zeros and 25-45 % of each sign, so this checkpoint was probably \
                 converted wrongly",
                100.0 * minus,
                100.0 * zero,
                100.0 * plus
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_counted_and_wrong_conversions_are_unusual() {
        let mut statistics = WeightStatistics::default();
        let codes: Vec<u8> = (0..1000).map(|i| (i % 3) as u8).collect();
        statistics.count(&codes);
        assert_eq!(statistics, WeightStatistics([334, 333, 333]));
        assert_eq!(statistics.unusual(), None);
        let is_unusual = |counts| WeightStatistics(counts).unusual().is_some();
        assert!(is_unusual([500, 0, 500]), "signs only");
        assert!(is_unusual([50, 900, 50]), "mostly zeros");
        assert!(is_unusual([250, 250, 500]), "one-sided");
    }
}
