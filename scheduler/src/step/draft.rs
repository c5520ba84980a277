//! Draft tokens: a guess of the next tokens of a sequence from its own past.
//!
//! Prompt lookup (Saxena, 2023): an output repeats parts of its prompt and of itself, so the tokens
//! that followed the same few tokens before are a guess that needs no model. A step computes the
//! draft tokens in rows that cost little. The model's own draw decides, so a wrong draft costs time
//! and never changes an output.
//!
//! Invariant: everything here is a function of its arguments, in integers.

use crate::TokenId;

/// The longest match in tokens. A longer match hardly tells more about the next token.
const MAX_MATCH: usize = 4;

/// The shortest match in tokens. A single token has too many different successors.
const MIN_MATCH: usize = 2;

/// The number of last tokens in which an earlier occurrence is searched. It bounds the cost of a
/// long context to a few microseconds.
const WINDOW: usize = 4096;

/// Appends to `out` up to `count` draft tokens that may follow `tokens`.
///
/// The drafts are the tokens after the most recent earlier occurrence of the last 4 tokens,
/// otherwise of the last 3, otherwise of the last 2. Without such an occurrence there are no
/// drafts. Drafts that reach the end of `tokens` continue with themselves, like a text that repeats
/// itself. Allocates nothing if `out` has the capacity.
pub(crate) fn propose(tokens: &[TokenId], count: usize, out: &mut Vec<TokenId>) {
    let recent = &tokens[tokens.len().saturating_sub(WINDOW)..];
    if let Some(next) = best_continuation(recent) {
        let period = recent.len() - next;
        let begin = out.len();
        for offset in 0..count {
            let token = match recent.get(next + offset) {
                Some(&token) => token,
                None => out[begin + offset - period],
            };
            out.push(token);
        }
    }
}

/// Returns the index after the best earlier occurrence. The longest match is the best, and among
/// equals the most recent.
fn best_continuation(tokens: &[TokenId]) -> Option<usize> {
    let &[before_last, last] = tokens.last_chunk()?;
    let mut best = None;
    let mut best_length = MIN_MATCH - 1;
    // Every other occurrence of the last two tokens, the most recent first.
    let earlier = &tokens[..tokens.len() - 1];
    let pairs = earlier.windows(MIN_MATCH).enumerate().rev();
    for (index, _) in pairs.filter(|(_, pair)| pair[1] == last && pair[0] == before_last) {
        let next = index + MIN_MATCH;
        let length = common_suffix(&tokens[..next], tokens);
        if length > best_length {
            (best, best_length) = (Some(next), length);
        }
        if length == MAX_MATCH {
            break;
        }
    }
    best
}

/// Returns the length of the common suffix, at most [`MAX_MATCH`].
fn common_suffix(a: &[TokenId], b: &[TokenId]) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH);
    pairs.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use sterna_random::Random;

    use super::*;

    fn proposed(tokens: &[TokenId], count: usize) -> Vec<TokenId> {
        let mut out = vec![77];
        propose(tokens, count, &mut out);
        assert_eq!(out.remove(0), 77, "earlier entries stay");
        out
    }

    #[test]
    fn the_tokens_after_an_earlier_occurrence_are_proposed() {
        let tokens = [5, 1, 2, 3, 4, 8, 9, 7, 6, 1, 2, 3, 4];
        assert_eq!(proposed(&tokens, 3), [8, 9, 7]);
        assert_eq!(proposed(&tokens, 0), []);
        assert_eq!(proposed(&[1, 2, 8, 9, 1, 2], 2), [8, 9]);
    }

    #[test]
    fn the_longest_match_wins_and_then_the_most_recent() {
        // The last three tokens occur at the beginning, the last two also later.
        assert_eq!(proposed(&[1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], 1), [40]);
        assert_eq!(proposed(&[9, 2, 3, 40, 8, 2, 3, 50, 1, 2, 3], 1), [50]);
        // More than four equal tokens count as four.
        let tokens = [0, 1, 2, 3, 4, 40, 9, 1, 2, 3, 4, 50, 0, 1, 2, 3, 4];
        assert_eq!(proposed(&tokens, 1), [50]);
    }

    #[test]
    fn one_equal_token_proposes_nothing() {
        assert_eq!(proposed(&[1, 2, 3, 4, 2], 4), []);
        for tokens in [&[][..], &[1], &[1, 1], &[1, 2], &[1, 2, 1]] {
            assert_eq!(proposed(tokens, 4), [], "{tokens:?}");
        }
    }

    #[test]
    fn a_repetition_continues() {
        assert_eq!(proposed(&[7, 7, 7], 4), [7, 7, 7, 7]);
        assert_eq!(
            proposed(&[9, 1, 2, 3, 1, 2, 3, 1, 2], 7),
            [3, 1, 2, 3, 1, 2, 3]
        );
        assert_eq!(proposed(&[1, 2, 1, 2], 3), [1, 2, 1]);
    }

    #[test]
    fn tokens_before_the_window_are_not_searched() {
        let with_gap = |gap: usize| {
            let others = 1000..1000 + gap as TokenId;
            [&[1, 2, 3][..], &others.collect::<Vec<_>>(), &[1, 2]].concat()
        };
        assert_eq!(proposed(&with_gap(WINDOW - 5), 1), [3]);
        assert_eq!(proposed(&with_gap(WINDOW - 4), 1), []);
    }

    #[test]
    fn proposals_agree_with_a_plain_search() {
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let (length, alphabet) = (random.index(40), 1 + random.below(4));
            let tokens: Vec<TokenId> = (0..length)
                .map(|_| random.below(alphabet) as TokenId)
                .collect();
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
    fn proposing_into_enough_capacity_does_not_allocate() {
        let mut out = Vec::with_capacity(6);
        let memory = out.as_ptr();
        propose(&[1; 100], 6, &mut out);
        assert_eq!((out.len(), out.as_ptr()), (6, memory));
    }
}
