//! What is asked, how long it is, when it arrives and whether its client walks away: a function of the seed alone.
//!
//! Always true: request `i` of a seed is the same request whatever ran before it and however many clients there are.

use std::time::Duration;

use crate::workload::Rng;

/// The knobs of a run.
pub(crate) struct Workload {
    /// Everything drawn here depends on it.
    pub(crate) seed: u64,
    /// Mean length of the user's message, in tokens of the served model.
    pub(crate) prompt_tokens: u32,
    /// Lengths vary evenly within this share of the mean, 0 to 1.
    pub(crate) prompt_spread: f64,
    /// Length of the system message that all requests share; 0 for none.
    pub(crate) shared_prefix_tokens: u32,
    /// Share of requests whose client leaves before the answer is complete, 0 to 1.
    pub(crate) disconnect_fraction: f64,
    /// Output tokens a request may have; bounds the moment of a disconnection.
    pub(crate) max_tokens: u32,
    /// How many tokens one word of these prompts is, as the server counts them.
    pub(crate) tokens_per_word: f64,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedRequest {
    /// The shared system message.
    pub(crate) system: Option<String>,
    /// The user's message.
    pub(crate) user: String,
    /// Seed of the server's sampler.
    pub(crate) sampling_seed: u64,
    /// When its client walks away, if it does.
    pub(crate) disconnect: Option<Disconnect>,
}

/// The client drops the connection at whichever comes first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Disconnect {
    /// This long after sending.
    pub(crate) after: Duration,
    /// Having read this many pieces of text.
    pub(crate) pieces: u32,
}

/// The latest a disconnecting client leaves: long enough to reach decoding, short enough to hit the queue too.
const DISCONNECT_WITHIN: Duration = Duration::from_secs(2);

impl Workload {
    /// Request number `index`.
    pub(crate) fn request(&self, index: u64) -> PlannedRequest {
        let mut rng = Rng::new(self.seed, index + 1);
        let spread = self.prompt_spread * (2.0 * rng.fraction() - 1.0);
        let user = text(
            &mut rng,
            self.words(f64::from(self.prompt_tokens) * (1.0 + spread)),
        );
        let sampling_seed = rng.next() >> 12; // Exact also for servers that read numbers as doubles.
        let leaves = rng.fraction() < self.disconnect_fraction;
        let disconnect = Disconnect {
            after: DISCONNECT_WITHIN.mul_f64(rng.fraction()),
            pieces: rng.below(u64::from(self.max_tokens.max(1))) as u32,
        };
        PlannedRequest {
            system: self.system(),
            user,
            sampling_seed,
            disconnect: leaves.then_some(disconnect),
        }
    }

    /// When each of `count` requests arrives: a Poisson process of `rate` requests a second.
    pub(crate) fn arrivals(&self, rate: f64, count: u64) -> Vec<Duration> {
        let mut rng = Rng::new(self.seed, 0);
        let mut at = 0.0;
        (0..count)
            .map(|_| {
                at -= (1.0 - rng.fraction()).ln() / rate;
                Duration::from_secs_f64(at)
            })
            .collect()
    }

    fn system(&self) -> Option<String> {
        let words = self.words(f64::from(self.shared_prefix_tokens));
        let mut rng = Rng::new(self.seed, u64::MAX);
        (self.shared_prefix_tokens > 0).then(|| text(&mut rng, words))
    }

    fn words(&self, tokens: f64) -> usize {
        (tokens / self.tokens_per_word).round().max(1.0) as usize
    }
}

/// `words` words of the kind that the prompts are made of, to learn how many tokens a word is.
pub(crate) fn sample_text(words: usize) -> String {
    text(&mut Rng::new(0, 0), words)
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

    fn workload(seed: u64) -> Workload {
        Workload {
            seed,
            prompt_tokens: 100,
            prompt_spread: 0.5,
            shared_prefix_tokens: 40,
            disconnect_fraction: 0.25,
            max_tokens: 32,
            tokens_per_word: 2.0,
        }
    }

    fn words(text: &str) -> usize {
        text.split_whitespace().count()
    }

    #[test]
    fn a_seed_is_a_workload() {
        let (a, b, other) = (workload(7), workload(7), workload(8));
        for index in (0..50).rev() {
            assert_eq!(a.request(index), b.request(index));
            assert_ne!(a.request(index).user, other.request(index).user);
        }
        assert_eq!(a.arrivals(3.0, 20), b.arrivals(3.0, 20));
        assert_ne!(a.arrivals(3.0, 20), other.arrivals(3.0, 20));
    }

    #[test]
    fn lengths_vary_within_the_spread_and_the_system_message_is_shared() {
        let workload = workload(1);
        let requests: Vec<PlannedRequest> = (0..400).map(|index| workload.request(index)).collect();
        let lengths: Vec<usize> = requests
            .iter()
            .map(|request| words(&request.user))
            .collect();
        assert!(
            lengths.iter().all(|length| (25..=75).contains(length)),
            "{lengths:?}"
        );
        assert!(
            *lengths.iter().min().unwrap() < 30 && *lengths.iter().max().unwrap() > 70,
            "{lengths:?}"
        );
        assert!(
            requests
                .iter()
                .all(|request| request.system == requests[0].system)
        );
        assert_eq!(requests[0].system.as_deref().map(words), Some(20));
    }

    #[test]
    fn exact_lengths_when_nothing_spreads() {
        let workload = Workload {
            prompt_spread: 0.0,
            shared_prefix_tokens: 0,
            ..workload(1)
        };
        assert!((0..20).all(|index| words(&workload.request(index).user) == 50));
        assert_eq!(workload.request(0).system, None);
    }

    #[test]
    fn the_asked_share_of_clients_leaves() {
        let leaving = |fraction| {
            let workload = Workload {
                disconnect_fraction: fraction,
                ..workload(5)
            };
            (0..1000)
                .filter(|index| workload.request(*index).disconnect.is_some())
                .count()
        };
        assert_eq!(leaving(0.0), 0);
        assert_eq!(leaving(1.0), 1000);
        assert!((200..300).contains(&leaving(0.25)), "{}", leaving(0.25));
    }

    #[test]
    fn arrivals_come_at_the_asked_rate() {
        let arrivals = workload(2).arrivals(10.0, 2000);
        assert!(arrivals.is_sorted());
        let seconds = arrivals.last().unwrap().as_secs_f64();
        assert!((180.0..220.0).contains(&seconds), "{seconds}");
    }
}
