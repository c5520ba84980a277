//! The load-time health check: do the weights look like those of a trained ternary model?

use std::ops::AddAssign;

/// How many weights are −1, 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census([u64; 3]);

impl Census {
    /// Counts codes (weight + 1).
    pub(crate) fn count(&mut self, codes: &[u8]) {
        // Short runs, so that the counts of a run fit bytes.
        for run in codes.chunks(255) {
            let (zeros, plus) = run.iter().fold((0, 0), |(zeros, plus), code| {
                (zeros + (code & 1), plus + (code >> 1))
            });
            self.0[1] += u64::from(zeros);
            self.0[2] += u64::from(plus);
            self.0[0] += run.len() as u64 - u64::from(zeros) - u64::from(plus);
        }
    }

    /// Shares of −1, 0 and 1, unless they are those of a trained ternary model.
    fn unusual(self) -> Option<[f64; 3]> {
        let total = self.0.iter().sum::<u64>() as f64;
        let shares = self.0.map(|count| count as f64 / total);
        let [minus, zero, plus] = shares;
        let usual = (0.2..=0.5).contains(&zero)
            && [minus, plus]
                .iter()
                .all(|sign| (0.25..=0.45).contains(sign));
        (total > 0.0 && !usual).then_some(shares)
    }

    pub(crate) fn warn_if_unusual(self) {
        if let Some([minus, zero, plus]) = self.unusual() {
            tracing::warn!(
                "the ternary weights are {:.1} % minus, {:.1} % zero, {:.1} % plus; a trained model has 20-50 % zeros and 25-45 % of each \
                 sign, so this checkpoint was probably converted wrongly",
                100.0 * minus,
                100.0 * zero,
                100.0 * plus
            );
        }
    }
}

impl AddAssign for Census {
    fn add_assign(&mut self, other: Census) {
        for (count, other) in self.0.iter_mut().zip(other.0) {
            *count += other;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_census_counts_and_knows_wrong_conversions() {
        let mut census = Census::default();
        let codes: Vec<u8> = (0..1000).map(|i| (i % 3) as u8).collect();
        census.count(&codes);
        assert_eq!(census, Census([334, 333, 333]));
        assert_eq!(census.unusual(), None);
        assert!(Census([500, 0, 500]).unusual().is_some(), "signs only");
        assert!(Census([50, 900, 50]).unusual().is_some(), "mostly zeros");
        assert!(Census([250, 250, 500]).unusual().is_some(), "one-sided");
    }
}
