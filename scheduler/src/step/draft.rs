//! What a sequence may say next, guessed from what it said before, and how often such guesses came true.
//!
//! Prompt lookup (Saxena, 2023): answers repeat stretches of their prompt and of themselves, so the tokens that followed the
//! same few tokens before are a guess that costs no model. A step computes the guessed tokens in rows that would be empty;
//! what the model then draws decides, so a wrong guess costs time and never changes an answer.
//!
//! Invariant: everything here is a function of its arguments, in integers.

use crate::{Limits, TokenId};

/// Drafted tokens in a step, over all sequences. More do not pay: past this many rows a matrix product takes longer with
/// every one.
pub const MAX_DRAFTED_TOKENS: usize = 32;

impl Limits {
    /// The largest number of tokens of a batch whose logits are wanted: one for each sequence and each draft.
    pub fn max_logits(&self) -> usize {
        self.max_running as usize + MAX_DRAFTED_TOKENS
    }
}

/// The most tokens that must be equal: agreement that goes further back hardly tells more about what comes next.
const LONGEST_MATCH: usize = 4;

/// The fewest. A single token stands before too many different ones.
const SHORTEST_MATCH: usize = 2;

/// How far back an earlier occurrence is looked for, so that a long context costs no more than a few microseconds.
const WINDOW: usize = 4096;

/// Appends to `out` up to `most` tokens that may follow `tokens`: those that followed the most recent earlier occurrence of
/// the last 4 tokens, else of the last 3, else of the last 2; none if there is no such occurrence. When they reach the end
/// of `tokens` they go on with themselves, as a text that repeats itself does. Allocates nothing if `out` has room.
pub(crate) fn propose(tokens: &[TokenId], most: usize, out: &mut Vec<TokenId>) {
    let recent = &tokens[tokens.len().saturating_sub(WINDOW)..];
    if let Some(next) = best_continuation(recent) {
        let period = recent.len() - next;
        let begin = out.len();
        for place in 0..most {
            let token = match recent.get(next + place) {
                Some(&token) => token,
                None => out[begin + place - period],
            };
            out.push(token);
        }
    }
}

/// Where what followed the best earlier occurrence begins: the longest match wins, and of equal ones the most recent.
fn best_continuation(tokens: &[TokenId]) -> Option<usize> {
    let &[before_last, last] = tokens.last_chunk()?;
    let mut best = None;
    let mut best_length = SHORTEST_MATCH - 1;
    // Wherever else the last two tokens stand, the most recent place first.
    let earlier = &tokens[..tokens.len() - 1];
    let pairs = earlier.windows(SHORTEST_MATCH).enumerate().rev();
    for (at, _) in pairs.filter(|(_, pair)| pair[1] == last && pair[0] == before_last) {
        let next = at + SHORTEST_MATCH;
        let length = common_suffix(&tokens[..next], tokens);
        if length > best_length {
            (best, best_length) = (Some(next), length);
        }
        if length == LONGEST_MATCH {
            break;
        }
    }
    best
}

/// How many of the last tokens are the same, as far as it matters.
fn common_suffix(a: &[TokenId], b: &[TokenId]) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev()).take(LONGEST_MATCH);
    pairs.take_while(|(a, b)| a == b).count()
}

/// The odds that a draft comes true: a moving average over the sequence's tested drafts, in 65,536ths. A draft behind the
/// first wrong one was not tested, so it does not count: what this estimates is the chance of one draft after right ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Acceptance {
    odds: u32,
}

/// A certain draft.
const CERTAIN: u32 = 1 << 16;

/// What is believed of a sequence that has not drafted yet: high, for the first try costs little and tells much.
const OPTIMISM: u32 = CERTAIN / 4 * 3;

/// A tested draft moves the odds by this part of the way to its result: about as many drafts are remembered.
const MEMORY: u32 = 8;

/// A step without a draft takes low odds back by this part of the way to `OPTIMISM`: a sequence that failed is tried again,
/// after tens of tokens and not after a few.
const PATIENCE: u32 = 64;

impl Acceptance {
    /// Of a new sequence.
    pub(crate) fn new() -> Acceptance {
        Acceptance { odds: OPTIMISM }
    }

    /// Takes note of a decode: of `drafted` tokens the first `accepted` were right. With none drafted, faith recovers.
    ///
    /// # Panics
    /// If more were accepted than drafted.
    pub(crate) fn record(&mut self, drafted: u32, accepted: u32) {
        assert!(accepted <= drafted, "what is accepted was drafted");
        if drafted == 0 {
            self.odds += OPTIMISM.saturating_sub(self.odds) / PATIENCE;
            return;
        }
        for _ in 0..accepted {
            self.odds += (CERTAIN - self.odds) / MEMORY;
        }
        if accepted < drafted {
            self.odds -= self.odds / MEMORY;
        }
    }

    /// How many of `drafts` drafted tokens should be accepted, in 65,536ths of a token: each counts only if all before it
    /// were right. Grows with `drafts`, by less and less.
    pub(crate) fn expected(self, drafts: u32) -> u32 {
        let (mut all_right, mut sum) = (CERTAIN, 0);
        for _ in 0..drafts {
            all_right = (u64::from(all_right) * u64::from(self.odds) / u64::from(CERTAIN)) as u32;
            sum += all_right;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(tokens: &[TokenId], most: usize) -> Vec<TokenId> {
        let mut out = vec![77];
        propose(tokens, most, &mut out);
        assert_eq!(out.remove(0), 77, "what was there stays");
        out
    }

    #[test]
    fn what_followed_before_is_proposed() {
        let tokens = [5, 1, 2, 3, 4, 8, 9, 7, 6, 1, 2, 3, 4];
        assert_eq!(proposed(&tokens, 3), [8, 9, 7]);
        assert_eq!(proposed(&tokens, 0), []);
        assert_eq!(proposed(&[1, 2, 8, 9, 1, 2], 2), [8, 9]);
    }

    #[test]
    fn a_longer_match_beats_a_more_recent_one_and_recency_decides_between_equals() {
        // The last three stand at the beginning, the last two also later.
        assert_eq!(proposed(&[1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], 1), [40]);
        assert_eq!(proposed(&[9, 2, 3, 40, 8, 2, 3, 50, 1, 2, 3], 1), [50]);
        // More than four equal tokens are no better than four.
        let tokens = [0, 1, 2, 3, 4, 40, 9, 1, 2, 3, 4, 50, 0, 1, 2, 3, 4];
        assert_eq!(proposed(&tokens, 1), [50]);
    }

    #[test]
    fn one_equal_token_is_no_reason() {
        assert_eq!(proposed(&[1, 2, 3, 4, 2], 4), []);
        for tokens in [&[][..], &[1], &[1, 1], &[1, 2], &[1, 2, 1]] {
            assert_eq!(proposed(tokens, 4), [], "{tokens:?}");
        }
    }

    #[test]
    fn a_repetition_goes_on() {
        assert_eq!(proposed(&[7, 7, 7], 4), [7, 7, 7, 7]);
        assert_eq!(
            proposed(&[9, 1, 2, 3, 1, 2, 3, 1, 2], 7),
            [3, 1, 2, 3, 1, 2, 3]
        );
        assert_eq!(proposed(&[1, 2, 1, 2], 3), [1, 2, 1]);
    }

    #[test]
    fn far_past_is_forgotten() {
        let with_gap = |gap: usize| {
            let noise = 1000..1000 + gap as TokenId;
            [&[1, 2, 3][..], &noise.collect::<Vec<_>>(), &[1, 2]].concat()
        };
        assert_eq!(proposed(&with_gap(WINDOW - 5), 1), [3]);
        assert_eq!(proposed(&with_gap(WINDOW - 4), 1), []);
    }

    #[test]
    fn proposals_agree_with_a_plain_search() {
        for seed in 0..2000_u64 {
            let mut state = seed;
            let mut draw = |bound: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % bound
            };
            let (length, alphabet) = (draw(40) as usize, 1 + draw(4));
            let tokens: Vec<TokenId> = (0..length).map(|_| draw(alphabet) as TokenId).collect();
            let plain = (2..=4).rev().find_map(|n| {
                let suffix = &tokens[length.checked_sub(n)?..];
                (n..length)
                    .rev()
                    .find(|&end| tokens[end - n..end] == *suffix)
            });
            let expected: Vec<TokenId> = plain.map_or(Vec::new(), |next| {
                (0..6).map(|i| tokens[next + i % (length - next)]).collect()
            });
            assert_eq!(proposed(&tokens, 6), expected, "seed {seed}: {tokens:?}");
        }
    }

    #[test]
    fn room_is_enough() {
        let mut out = Vec::with_capacity(6);
        let memory = out.as_ptr();
        propose(&[1; 100], 6, &mut out);
        assert_eq!((out.len(), out.as_ptr()), (6, memory));
    }

    #[test]
    fn odds_start_high_fall_with_failures_and_come_back_slowly() {
        let mut acceptance = Acceptance::new();
        assert!(acceptance.expected(1) > CERTAIN / 2);
        for _ in 0..20 {
            acceptance.record(6, 0);
        }
        assert!(acceptance.expected(6) < CERTAIN / 10);
        for _ in 0..10 {
            acceptance.record(0, 0);
        }
        assert!(acceptance.expected(1) < CERTAIN / 4, "not at once");
        for _ in 0..100 {
            acceptance.record(0, 0);
        }
        assert!(acceptance.expected(1) > CERTAIN / 2, "but in time");
    }

    #[test]
    fn rest_takes_nothing_from_good_odds() {
        let mut acceptance = Acceptance::new();
        for _ in 0..20 {
            acceptance.record(6, 6);
        }
        let good = acceptance;
        assert!(good.expected(6) > 5 * CERTAIN);
        acceptance.record(0, 0);
        assert_eq!(acceptance, good);
    }

    #[test]
    fn odds_find_the_share_of_drafts_that_hold() {
        // In turn five right and none: of six tested drafts (five, and the one that failed) five hold.
        let mut acceptance = Acceptance::new();
        let mut sum = 0;
        for round in 0..1000 {
            acceptance.record(5, 5);
            acceptance.record(1, 0);
            sum += u64::from(if round < 500 { 0 } else { acceptance.odds });
        }
        let mean = sum as f64 / 500.0 / f64::from(CERTAIN);
        assert!((0.6..0.9).contains(&mean), "{mean}");
        // Drafts behind the first wrong one are no evidence.
        let (mut one, mut many) = (Acceptance::new(), Acceptance::new());
        one.record(3, 2);
        many.record(30, 2);
        assert_eq!(one, many);
    }

    #[test]
    fn expectation_grows_with_drafts_by_less_and_less() {
        let mut acceptance = Acceptance::new();
        for accepted in [0, 6, 6, 6, 1, 0, 0, 0, 0] {
            acceptance.record(6, accepted);
            let of = |drafts| acceptance.expected(drafts);
            assert_eq!((of(0), of(1)), (0, acceptance.odds));
            for drafts in 1..32 {
                let gain = of(drafts + 1) - of(drafts);
                assert!(gain <= of(drafts) - of(drafts - 1) && gain <= CERTAIN);
            }
        }
    }

    #[test]
    fn odds_stay_odds() {
        let mut acceptance = Acceptance::new();
        for _ in 0..1000 {
            acceptance.record(32, 32);
        }
        assert!(acceptance.odds <= CERTAIN && acceptance.expected(32) <= 32 * CERTAIN);
        for _ in 0..1000 {
            acceptance.record(32, 0);
        }
        assert!(acceptance.odds < CERTAIN / 100);
    }
}
