//! The choice between all rows of a head and only its likely rows, by the time that they took.

use std::time::Duration;

/// The longest pause between two trials of likely rows, in steps.
const LONGEST_PAUSE: u32 = 256;
/// The most trials between two steps over all rows.
const LONGEST_RUN: u32 = 64;

/// When steps of a kind compute the likely rows only. Both ways have the same result, so the faster
/// one is chosen by its time: it depends on the model, the request, the processor and the load.
#[derive(Clone, Copy, Default)]
pub(super) struct Trials {
    /// The time of the last step over all rows.
    all_rows: Option<Duration>,
    /// The trials since that step.
    since: u32,
    /// The pause after the last trial, in steps, and the steps until the next trial.
    pause: u32,
    left: u32,
}

impl Trials {
    /// Returns whether the next step should compute likely rows only.
    pub(super) fn is_due(&mut self) -> bool {
        if self.all_rows.is_none() || self.since == LONGEST_RUN {
            return false;
        }
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Takes the time of a step over all rows.
    pub(super) fn took_all_rows(&mut self, time: Duration) {
        (self.all_rows, self.since) = (Some(time), 0);
    }

    /// Takes the time of a step that has computed the wanted logits from likely rows, or `None` if
    /// there were too many of these. A failure costs more than a success saves, so it counts as two
    /// successes.
    pub(super) fn took_likely_rows(&mut self, time: Option<Duration>) {
        let is_faster = time.is_some_and(|time| Some(time) <= self.all_rows);
        self.pause = match is_faster {
            true => self.pause / 2,
            false => (4 * self.pause).clamp(1, LONGEST_PAUSE),
        };
        self.left = self.pause + 1;
        self.since += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_way_is_rarely_tried() {
        let (slow, fast) = (Duration::from_millis(2), Duration::from_millis(1));
        let mut trials = Trials::default();
        assert!(!trials.is_due(), "all rows have no time yet");
        trials.took_all_rows(fast);
        // Each failure makes the pause four times as long.
        for pause in [1, 4, 16, 64, 256, 256] {
            assert!(trials.is_due());
            trials.took_likely_rows(Some(slow));
            for _ in 0..pause {
                assert!(!trials.is_due());
                trials.took_all_rows(fast);
            }
        }
        // Each success makes it half as long.
        for pause in [128, 64, 32, 16, 8, 4, 2, 1, 0, 0] {
            assert!(trials.is_due());
            trials.took_likely_rows(Some(fast));
            for _ in 0..pause {
                assert!(!trials.is_due());
                trials.took_all_rows(fast);
            }
        }
        assert!(trials.is_due());
        trials.took_likely_rows(None);
        assert!(!trials.is_due(), "too many rows were likely");
    }

    #[test]
    fn a_faster_way_is_compared_with_the_other_from_time_to_time() {
        let mut trials = Trials::default();
        trials.took_all_rows(Duration::from_millis(2));
        for _ in 0..LONGEST_RUN {
            assert!(trials.is_due());
            trials.took_likely_rows(Some(Duration::from_millis(1)));
        }
        assert!(!trials.is_due());
        trials.took_all_rows(Duration::from_millis(2));
        assert!(trials.is_due());
    }
}
