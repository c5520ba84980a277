//! Makes prompt texts of about a given number of tokens.
//!
//! Invariant: a text is a function of its seed and length.

use sterna_random::Random;

use crate::workload::{SeededText, stream};

/// How the server turns words into tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextScale {
    /// The mean tokens of a word.
    pub(super) tokens_per_word: f64,
    /// The tokens of the chat template around a user's message.
    pub(super) template_tokens: u32,
}

impl TextScale {
    /// Returns a user's message of at least one word. With the chat template, it has about the
    /// tokens of `seeded`.
    pub(super) fn message(self, seeded: SeededText) -> String {
        let tokens = seeded.tokens.saturating_sub(self.template_tokens);
        self.text(SeededText { tokens, ..seeded })
    }

    /// Returns a text of at least one word with about the tokens of `seeded`.
    pub(super) fn text(self, seeded: SeededText) -> String {
        let words = (f64::from(seeded.tokens) / self.tokens_per_word).round() as usize;
        // An empty text adds nothing to the prompt, so it is the same word in every session.
        let seed = if seeded.tokens == 0 { 0 } else { seeded.seed };
        text(&mut stream(seed, 0), words.max(1))
    }
}

/// Returns a text in which all words of a list are equally frequent. The load test sends it to
/// learn the mean tokens of a word.
pub(super) fn all_words() -> Vec<&'static str> {
    const ROUNDS: usize = 24; // A multiple of the length of every list.
    let sentence = |round: usize| SENTENCE.map(|choices| choices[round % choices.len()]);
    (0..ROUNDS).flat_map(sentence).collect()
}

/// Returns exactly `words` words of simple questions.
fn text(random: &mut Random, words: usize) -> String {
    let mut all: Vec<&str> = Vec::with_capacity(words + SENTENCE.len());
    while all.len() < words {
        all.extend(SENTENCE.iter().map(|choices| random.pick(choices)));
    }
    all.truncate(words);
    all.join(" ")
}

/// A sentence has one word of each list.
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
    fn all_words_of_a_list_are_equally_frequent() {
        let words = all_words();
        for choices in SENTENCE {
            let count = |choice| words.iter().filter(|&&word| word == choice).count();
            let lists = SENTENCE
                .iter()
                .filter(|list| list.contains(&choices[0]))
                .count();
            let expected = lists * words.len() / SENTENCE.len() / choices.len();
            assert!(choices.iter().all(|&choice| count(choice) == expected));
        }
    }

    #[test]
    fn a_text_has_as_many_words_as_its_tokens_need() {
        let scale = TextScale {
            tokens_per_word: 2.0,
            template_tokens: 6,
        };
        let text = |seed, tokens| scale.text(SeededText { seed, tokens });
        for tokens in 2..200 {
            let words = text(9, tokens).split(' ').count();
            assert_eq!(words, (tokens as usize).div_ceil(2), "{tokens}");
        }
        assert_eq!(text(9, 50), text(9, 50));
        assert_ne!(text(9, 50), text(8, 50));
        assert!(text(9, 100).starts_with(&text(9, 50)));
        assert_eq!(text(1, 0), text(2, 0));
        let message = |seed, tokens| scale.message(SeededText { seed, tokens });
        assert_eq!(message(9, 56), text(9, 50));
        assert_eq!(message(9, 3), text(9, 0), "a message has at least one word");
    }
}
