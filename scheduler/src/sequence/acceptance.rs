//! How likely the draft tokens of a sequence are to be right.
//!
//! Invariant: everything here is a function of its arguments, in integers.

/// The probability that a draft token is right if all drafts before it are right.
///
/// It is a moving average over the sequence's tested drafts, in units of 1/65,536. A draft behind
/// the first wrong one was not tested and does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acceptance {
    probability: u32,
}

/// The probability 1.
const ONE: u32 = 1 << 16;

/// The initial probability. It is high, because the first drafts cost little and tell much.
const INITIAL: u32 = ONE / 4 * 3;

/// A tested draft moves the probability towards its result by one part of this many.
const MEMORY: u32 = 8;

/// A step without a draft moves a low probability towards `INITIAL` by one part of this many. So a
/// sequence with wrong drafts drafts again after tens of tokens, not after a few.
const RECOVERY: u32 = 64;

/// The usual probabilities of all sequences change slower than those of one sequence by this
/// factor. So one sequence hardly moves them, and drafts that usually do not pay are tried again
/// after hundreds of tokens.
const USUAL_SLOWNESS: u32 = 16;

/// How likely the drafts of a sequence are to be right, by their origin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Acceptances {
    pub(crate) looked_up: Acceptance,
    pub(crate) own: Acceptance, // Those of the model itself.
}

impl Acceptances {
    /// Learns from a decode of one sequence with `drafted` draft tokens of one origin, of which the
    /// first `accepted` were right.
    pub(crate) fn record(&mut self, are_own: bool, drafted: u32, accepted: u32) {
        self.record_slowly(are_own, drafted, accepted, 1);
    }

    /// As [`record`](Acceptances::record), for what is usual among all sequences.
    pub(crate) fn record_usual(&mut self, are_own: bool, drafted: u32, accepted: u32) {
        self.record_slowly(are_own, drafted, accepted, USUAL_SLOWNESS);
    }

    /// Returns whether a decode without drafts changes nothing.
    #[inline]
    pub(crate) fn have_recovered(&self) -> bool {
        self.looked_up.probability >= INITIAL && self.own.probability >= INITIAL
    }

    fn record_slowly(&mut self, are_own: bool, drafted: u32, accepted: u32, slowness: u32) {
        let (tested, other) = match are_own {
            true => (&mut self.own, &mut self.looked_up),
            false => (&mut self.looked_up, &mut self.own),
        };
        tested.record(drafted, accepted, slowness);
        other.record(0, 0, slowness);
    }
}

impl Default for Acceptance {
    /// Returns the estimate before the first draft of all.
    fn default() -> Acceptance {
        Acceptance {
            probability: INITIAL,
        }
    }
}

impl Acceptance {
    /// Learns from a decode with `drafted` draft tokens, of which the first `accepted` were right,
    /// in steps smaller by the factor `slowness`.
    ///
    /// # Panics
    /// If more were accepted than drafted.
    fn record(&mut self, drafted: u32, accepted: u32, slowness: u32) {
        assert!(accepted <= drafted, "only draft tokens are accepted");
        if drafted == 0 {
            let missing = INITIAL.saturating_sub(self.probability);
            self.probability += missing / (RECOVERY * slowness);
            return;
        }
        for _ in 0..accepted {
            self.probability += (ONE - self.probability) / (MEMORY * slowness);
        }
        if accepted < drafted {
            self.probability -= self.probability / (MEMORY * slowness);
        }
    }

    /// Returns the expected number of accepted tokens of `drafts` draft tokens, in units of
    /// 1/65,536. A draft counts only if all drafts before it are right, so each further draft adds
    /// less.
    pub(crate) fn expected(self, drafts: u32) -> u32 {
        let (mut all_right, mut sum) = (ONE, 0);
        for _ in 0..drafts {
            all_right =
                (u64::from(all_right) * u64::from(self.probability) / u64::from(ONE)) as u32;
            sum += all_right;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probability_starts_high_falls_with_wrong_drafts_and_recovers_slowly() {
        let mut acceptance = Acceptance::default();
        assert!(acceptance.expected(1) > ONE / 2);
        for _ in 0..20 {
            acceptance.record(6, 0, 1);
        }
        assert!(acceptance.expected(6) < ONE / 10);
        for _ in 0..10 {
            acceptance.record(0, 0, 1);
        }
        assert!(acceptance.expected(1) < ONE / 4, "not at once");
        for _ in 0..100 {
            acceptance.record(0, 0, 1);
        }
        assert!(acceptance.expected(1) > ONE / 2, "but after many steps");
    }

    #[test]
    fn steps_without_drafts_do_not_lower_a_high_probability() {
        let mut acceptance = Acceptance::default();
        for _ in 0..20 {
            acceptance.record(6, 6, 1);
        }
        let good = acceptance;
        assert!(good.expected(6) > 5 * ONE);
        acceptance.record(0, 0, 1);
        assert_eq!(acceptance, good);
    }

    #[test]
    fn the_probability_approaches_the_share_of_right_drafts() {
        // Five drafts are right, then one is wrong: five of six tested drafts are right.
        let mut acceptance = Acceptance::default();
        let mut sum = 0;
        for round in 0..1000 {
            acceptance.record(5, 5, 1);
            acceptance.record(1, 0, 1);
            sum += u64::from(if round < 500 {
                0
            } else {
                acceptance.probability
            });
        }
        let mean = sum as f64 / 500.0 / f64::from(ONE);
        assert!((0.6..0.9).contains(&mean), "{mean}");
        // Drafts behind the first wrong one do not count.
        let (mut one, mut many) = (Acceptance::default(), Acceptance::default());
        one.record(3, 2, 1);
        many.record(30, 2, 1);
        assert_eq!(one, many);
    }

    #[test]
    fn each_further_draft_adds_less_to_the_expectation() {
        let mut acceptance = Acceptance::default();
        for accepted in [0, 6, 6, 6, 1, 0, 0, 0, 0] {
            acceptance.record(6, accepted, 1);
            let of = |drafts| acceptance.expected(drafts);
            assert_eq!((of(0), of(1)), (0, acceptance.probability));
            for drafts in 1..32 {
                let gain = of(drafts + 1) - of(drafts);
                assert!(gain <= of(drafts) - of(drafts - 1) && gain <= ONE);
            }
        }
    }

    #[test]
    fn the_probability_stays_between_zero_and_one() {
        let mut acceptance = Acceptance::default();
        for _ in 0..1000 {
            acceptance.record(32, 32, 1);
        }
        assert!(acceptance.probability <= ONE && acceptance.expected(32) <= 32 * ONE);
        for _ in 0..1000 {
            acceptance.record(32, 0, 1);
        }
        assert!(acceptance.probability < ONE / 100);
    }

    #[test]
    fn what_is_usual_changes_slowly_and_recovers() {
        let mut usual = Acceptances::default();
        usual.record_usual(true, 8, 0);
        assert!(usual.own.expected(1) > INITIAL - ONE / 100, "one sequence");
        for _ in 0..1000 {
            usual.record_usual(true, 8, 0);
            usual.record_usual(false, 2, 0);
        }
        let low = [usual.own, usual.looked_up].map(|one| one.expected(1));
        assert!(low.iter().all(|&low| low < ONE / 8), "{low:?}");
        for _ in 0..2000 {
            usual.record_usual(false, 0, 0);
        }
        // Otherwise no sequence would ever draft again.
        let high = [usual.own, usual.looked_up].map(|one| one.expected(1));
        assert!(high.iter().all(|&high| high > ONE / 2), "{high:?}");
    }

    #[test]
    fn drafts_of_one_origin_tell_nothing_of_the_others() {
        let mut both = Acceptances::default();
        for _ in 0..20 {
            both.record(true, 6, 0);
            both.record(false, 2, 2);
        }
        assert!(both.own.expected(1) < ONE / 4 && both.looked_up.expected(1) > ONE / 8 * 7);
    }
}
