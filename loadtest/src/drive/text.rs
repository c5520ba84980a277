//! Texts of about so many tokens: simple questions, a function of their seed.

use crate::workload::{Rng, Segment};

/// How tokens become words, as the server counts them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    /// Tokens of one word.
    pub(super) tokens_per_word: f64,
    /// What the chat template puts around a user's message.
    pub(super) marks: u32,
}

impl Scale {
    /// A user's message, which is that segment of a prompt together with the template's marks: at least one word.
    pub(super) fn message(self, segment: Segment) -> String {
        let tokens = segment.tokens.saturating_sub(self.marks);
        self.text(Segment { tokens, ..segment })
    }

    /// The text of a segment: at least one word.
    pub(super) fn text(self, segment: Segment) -> String {
        let words = (f64::from(segment.tokens) / self.tokens_per_word).round() as usize;
        // No tokens are no text of their own: they are the same word everywhere.
        let seed = if segment.tokens == 0 { 0 } else { segment.seed };
        text(&mut Rng::new(seed, 0), words.max(1))
    }
}

/// Every word of the prompts, each list's as often as another's: so many tokens are so many words on average.
pub(super) fn all_words() -> Vec<&'static str> {
    const ROUNDS: usize = 24; // A multiple of each list's length.
    let sentence = |round: usize| SENTENCE.map(|choices| choices[round % choices.len()]);
    (0..ROUNDS).flat_map(sentence).collect()
}

/// Exactly `words` words of simple questions.
fn text(rng: &mut Rng, words: usize) -> String {
    let mut all: Vec<&str> = Vec::with_capacity(words + SENTENCE.len());
    while all.len() < words {
        all.extend(
            SENTENCE
                .iter()
                .map(|choices| choices[rng.below(choices.len() as u64) as usize]),
        );
    }
    all.truncate(words);
    all.join(" ")
}

/// One word of each list in turn makes a sentence.
const SENTENCE: [&[&str]; 8] = [
    &[
        "Does", "Can", "Will", "Did", "Could", "Should", "Would", "Must",
    ],
    &["the", "a", "this", "that", "every", "one", "my", "your"],
    &[
        "small", "red", "old", "quick", "happy", "green", "tall", "new", "warm", "quiet", "bright",
        "kind",
    ],
    &[
        "bird", "fox", "teacher", "river", "train", "child", "garden", "friend", "king", "boat",
        "cat", "doctor",
    ],
    &[
        "see", "find", "know", "like", "follow", "carry", "paint", "count", "name", "hear",
        "visit", "help",
    ],
    &["the", "a", "this", "that", "every", "one", "my", "your"],
    &[
        "city", "house", "song", "number", "tree", "letter", "star", "bridge", "word", "colour",
        "stone", "door",
    ],
    &[
        "today?",
        "again?",
        "first?",
        "now?",
        "slowly?",
        "outside?",
        "alone?",
        "tomorrow?",
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_words_are_there_as_often_as_others_of_their_list() {
        let words = all_words();
        for choices in SENTENCE {
            let often = |choice| words.iter().filter(|&&word| word == choice).count();
            let places = SENTENCE
                .iter()
                .filter(|list| list.contains(&choices[0]))
                .count();
            let expected = places * words.len() / SENTENCE.len() / choices.len();
            assert!(choices.iter().all(|&choice| often(choice) == expected));
        }
    }

    #[test]
    fn a_segment_has_the_words_that_make_its_tokens() {
        let scale = Scale {
            tokens_per_word: 2.0,
            marks: 6,
        };
        let text = |seed, tokens| scale.text(Segment { seed, tokens });
        for tokens in 2..200 {
            let words = text(9, tokens).split(' ').count();
            assert_eq!(words, (tokens as usize).div_ceil(2), "{tokens}");
        }
        assert_eq!(text(9, 50), text(9, 50));
        assert_ne!(text(9, 50), text(8, 50));
        assert!(text(9, 100).starts_with(&text(9, 50)));
        assert_eq!(text(1, 0), text(2, 0));
        let message = |seed, tokens| scale.message(Segment { seed, tokens });
        assert_eq!(message(9, 56), text(9, 50));
        assert_eq!(message(9, 3), text(9, 0), "never without a word");
    }
}
