//! One session: a conversation in which every turn repeats the whole conversation so far.
//!
//! Invariant: a token is a function of its text's seed and of its index in the text. So equal
//! prefixes are equal, and different texts differ from the first token.

use sterna_random::{GOLDEN, Random, mix};

use super::definition::SessionClass;
use super::distributions::{Zipf, exponential, stream};

/// The stop token. It ends every answer and occurs nowhere else.
pub(crate) const STOP: u32 = 0;

/// The vocabulary size.
const VOCABULARY: u64 = 32_000;

/// The distance between the random streams of two classes.
const CLASS_STREAMS: u64 = 1 << 40;

/// A text, given by its seed and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeededText {
    /// Identifies the text.
    pub(crate) seed: u64,
    /// The length of the text.
    pub(crate) tokens: u32,
}

/// A conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Session {
    /// The time of the first turn, in seconds.
    pub(crate) at: f64,
    /// The index of the session's class in the workload.
    pub(crate) class: usize,
    /// The tenant that sends the session.
    pub(crate) tenant: u32,
    /// The texts before the first turn, which other sessions may have too.
    pub(crate) shared: Vec<SeededText>,
    /// At least one turn.
    pub(crate) turns: Vec<ChatTurn>,
}

/// A question and its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ChatTurn {
    /// Seconds between the end of the previous answer and this question.
    pub(crate) think: f64,
    /// What the turn adds to the prompt.
    pub(crate) prompt: SeededText,
    /// The answer. Its last token is [`STOP`].
    pub(crate) answer: SeededText,
    /// The request's `max_tokens`.
    pub(crate) max_tokens: u32,
    /// Seconds from the request until its client disconnects. `None`: the client stays.
    pub(crate) disconnects_after: Option<f64>,
}

/// Identifies a session within a workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionKey {
    /// The seed of the workload.
    pub(super) seed: u64,
    /// The index of the session's class in the workload.
    pub(super) class: usize,
    /// The number of the session within its class.
    pub(super) index: u64,
}

/// Returns the token at `index` of the text `seed`.
pub(crate) fn token(seed: u64, index: u32) -> u32 {
    let hash = mix(seed.wrapping_add(u64::from(index).wrapping_mul(GOLDEN)));
    1 + (hash % (VOCABULARY - 1)) as u32
}

impl Session {
    /// Draws the session `key` of `class`, which starts at `at` seconds. `tenants` is the law of
    /// the class's tenants.
    pub(super) fn draw(class: &SessionClass, tenants: &Zipf, key: SessionKey, at: f64) -> Session {
        let streams = CLASS_STREAMS * (key.class as u64 + 1);
        let mut random = stream(key.seed, streams + key.index);
        let tenant = class.tenants.first + tenants.draw(&mut random);
        let count = u64::from(class.shared.count);
        let first = u64::from(tenant) * count * u64::from(class.shared.of_tenant);
        let shared = SeededText {
            seed: mix(key.seed ^ (streams + first + key.index % count)),
            tokens: class.shared.tokens,
        };
        let mut turns: Vec<ChatTurn> = Vec::new();
        let mut length = shared.tokens;
        for _ in 0..class.turns.draw(&mut random).max(1) {
            let turn = ChatTurn::draw(class, &mut random);
            let end = length + turn.prompt.tokens + turn.max_tokens;
            if end > class.context && !turns.is_empty() {
                break;
            }
            length += turn.prompt.tokens + turn.answer.tokens;
            turns.push(turn);
        }
        Session {
            at,
            class: key.class,
            tenant,
            shared: vec![shared],
            turns,
        }
    }

    /// Returns the length of the texts before the first turn.
    pub(crate) fn shared_tokens(&self) -> u32 {
        self.shared.iter().map(|text| text.tokens).sum()
    }

    /// Returns the length of the prompt of turn `turn`.
    pub(crate) fn prompt_len(&self, turn: usize) -> u32 {
        let earlier = self.turns[..turn].iter();
        let earlier: u32 = earlier
            .map(|turn| turn.prompt.tokens + turn.answer.tokens)
            .sum();
        self.shared_tokens() + earlier + self.turns[turn].prompt.tokens
    }

    /// Returns the prompt of turn `turn`: the conversation so far and the new question.
    pub(crate) fn prompt(&self, turn: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.prompt_len(turn) as usize);
        let text = |seeded: SeededText| (0..seeded.tokens).map(move |at| token(seeded.seed, at));
        tokens.extend(self.shared.iter().copied().flat_map(text));
        for earlier in &self.turns[..turn] {
            tokens.extend(text(earlier.prompt));
            tokens.extend((0..earlier.answer.tokens).map(|index| earlier.answer_token(index)));
        }
        tokens.extend(text(self.turns[turn].prompt));
        tokens
    }
}

impl ChatTurn {
    fn draw(class: &SessionClass, random: &mut Random) -> ChatTurn {
        let think = exponential(random, class.think);
        let limit = class.context.saturating_sub(class.shared.tokens).max(2);
        let prompt = class.prompt.draw(random).min(limit - 1);
        let answer = class.output.draw(random).clamp(1, limit - prompt);
        let max_tokens = class
            .declared
            .unwrap_or(answer)
            .clamp(answer, limit - prompt);
        let (prompt_seed, answer_seed) = (random.next_u64(), random.next_u64());
        let disconnects = random.fraction() < class.disconnects.fraction;
        let disconnects_after = random.fraction() * class.disconnects.within;
        ChatTurn {
            think,
            prompt: SeededText {
                seed: prompt_seed,
                tokens: prompt,
            },
            answer: SeededText {
                seed: answer_seed,
                tokens: answer,
            },
            max_tokens,
            disconnects_after: disconnects.then_some(disconnects_after),
        }
    }

    /// Returns the token at `index` of the answer.
    pub(crate) fn answer_token(&self, index: u32) -> u32 {
        if index + 1 >= self.answer.tokens {
            STOP
        } else {
            token(self.answer.seed, index)
        }
    }
}
