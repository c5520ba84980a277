//! Whether drafts of the model itself pay, by the tokens per second of steps with and without them.
//!
//! The cost model predicts a pass that drafts and the check of its drafts as two steps. Where a
//! step takes a fraction of a millisecond, that is off by up to a factor of two: what such a step
//! takes depends on what ran before it. So what steps gave decides, after some of each kind. Now
//! and then the slower kind runs once more, because acceptance and load change.
//!
//! Steps are told apart by their number of decodes. A step with a part of a prompt tells nothing,
//! nor does one in which a grammar forces tokens.

use super::Nanos;

/// Classes of steps: 1, 2 to 3, 4 to 7, 8 to 15, and 16 decodes. More never draft.
const CLASSES: usize = 5;

/// Whether the model drafts in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drafting {
    Never,
    /// If the cost model expects a gain.
    IfItPays,
    /// To measure what it brings.
    Always,
}

/// The first steps of a class, which have no drafts.
const FIRST_STEPS: u32 = 4;

/// The steps over which the speed of each kind is the mean.
const PLAIN_STEPS: u32 = 64;
const DRAFTED_STEPS: u32 = 8;

/// While drafts pay, one step runs without them after this many steps with them.
const STEPS_TO_PLAIN: u32 = 64;

/// While drafts do not pay, one step runs with them after this many steps without them. Such a step
/// loses about the time of two or three others, so all such steps lose less than a hundredth.
const STEPS_TO_DRAFTED: u32 = 512;

/// A step counts as at most this many times the mean, and the mean as at most this many times the
/// step. Other work of the machine makes single steps take many times as long.
const MOST: f64 = 3.0;

/// What decodes gave lately.
#[derive(Debug, Default)]
pub(crate) struct DecodeSpeeds {
    classes: [Class; CLASSES],
}

#[derive(Debug, Default)]
struct Class {
    plain: Speed,
    drafted: Speed,
    in_a_row: u32, // Steps of the kind of the last one.
    was_drafted: bool,
}

/// The tokens and the time of a step, in the mean of the last ones.
#[derive(Debug, Default)]
struct Speed {
    tokens: f64,
    time: f64,
    steps: u32, // At most those over which it is the mean.
}

impl DecodeSpeeds {
    /// Returns whether the model drafts in a step of `decodes` decodes, at least 1.
    pub(crate) fn drafting(&self, decodes: usize) -> Drafting {
        let class = &self.classes[class_of(decodes)];
        if class.plain.steps < FIRST_STEPS {
            return Drafting::Never; // It begins with some steps to compare with.
        }
        if class.drafted.steps < DRAFTED_STEPS {
            return Drafting::Always;
        }
        if class.drafted.is_faster_than(&class.plain) {
            return match !class.was_drafted || class.in_a_row < STEPS_TO_PLAIN {
                true => Drafting::IfItPays,
                false => Drafting::Never,
            };
        }
        match !class.was_drafted && class.in_a_row >= STEPS_TO_DRAFTED {
            true => Drafting::Always,
            false => Drafting::Never,
        }
    }

    /// Learns from a step of `decodes` decodes and nothing else, which gave `tokens` tokens.
    pub(crate) fn observe(&mut self, decodes: usize, drafted: bool, tokens: usize, time: Nanos) {
        let class = &mut self.classes[class_of(decodes)];
        class.in_a_row = if class.was_drafted == drafted {
            class.in_a_row.saturating_add(1)
        } else {
            1
        };
        class.was_drafted = drafted;
        let (speed, steps) = match drafted {
            true => (&mut class.drafted, DRAFTED_STEPS),
            false => (&mut class.plain, PLAIN_STEPS),
        };
        speed.observe(tokens as f64, time as f64, steps);
    }
}

impl Speed {
    fn observe(&mut self, tokens: f64, time: f64, most_steps: u32) {
        let time = if self.time > 0.0 {
            // A first step that took long must not count for long either.
            self.time = self.time.min(MOST * time);
            time.min(MOST * self.time)
        } else {
            time
        };
        self.steps = most_steps.min(self.steps + 1);
        let part = 1.0 / f64::from(self.steps);
        self.tokens += (tokens - self.tokens) * part;
        self.time += (time - self.time) * part;
    }

    fn is_faster_than(&self, other: &Speed) -> bool {
        self.tokens * other.time >= other.tokens * self.time
    }
}

fn class_of(decodes: usize) -> usize {
    (decodes.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps of one decode, in which drafts bring `tokens` in `time`, and a plain step brings
    /// one in 1,000. Returns the share of steps with drafts.
    fn share(speeds: &mut DecodeSpeeds, tokens: usize, time: Nanos, steps: u32) -> f64 {
        let mut drafted = 0;
        for _ in 0..steps {
            match speeds.drafting(1) {
                Drafting::Never => speeds.observe(1, false, 1, 1000),
                _ => speeds.observe(1, true, tokens, time),
            }
            drafted += u32::from(speeds.classes[0].was_drafted);
        }
        f64::from(drafted) / f64::from(steps)
    }

    #[test]
    fn what_is_faster_runs_and_the_other_is_tried_again() {
        let mut speeds = DecodeSpeeds::default();
        assert!(share(&mut speeds, 4, 2000, 100) > 0.8);
        assert!((0.97..1.0).contains(&share(&mut speeds, 4, 2000, 10_000)));
        // They become slower, and then faster again.
        share(&mut speeds, 4, 6000, 100);
        let slower = share(&mut speeds, 4, 6000, 50_000);
        assert!((0.001..0.004).contains(&slower), "{slower}");
        share(&mut speeds, 4, 2000, 10_000);
        assert!(share(&mut speeds, 4, 2000, 10_000) > 0.9);
    }

    #[test]
    fn each_number_of_decodes_has_speeds_of_its_own() {
        let mut speeds = DecodeSpeeds::default();
        share(&mut speeds, 4, 6000, 1000);
        assert_eq!(speeds.drafting(1), Drafting::Never);
        for _ in 0..FIRST_STEPS {
            assert_eq!(speeds.drafting(2), Drafting::Never);
            speeds.observe(2, false, 2, 1000);
        }
        let of = [2, 3, 4].map(|decodes| speeds.drafting(decodes));
        assert_eq!(of, [Drafting::Always, Drafting::Always, Drafting::Never]);
    }

    #[test]
    fn one_long_step_changes_little() {
        let mut speeds = DecodeSpeeds::default();
        share(&mut speeds, 4, 5000, 1000);
        let four_in_the_time_of_five = speeds.drafting(1);
        assert_eq!(four_in_the_time_of_five, Drafting::Never);
        speeds.observe(1, false, 1, 1_000_000);
        assert_eq!(speeds.drafting(1), Drafting::Never);
    }

    #[test]
    fn steps_without_time_allow_drafts() {
        let mut speeds = DecodeSpeeds::default();
        for drafted in [false, true] {
            for _ in 0..PLAIN_STEPS {
                speeds.observe(1, drafted, 1, 0);
            }
        }
        speeds.observe(1, false, 1, 0);
        assert_eq!(speeds.drafting(1), Drafting::IfItPays);
    }
}
