//! One session: a conversation whose every turn repeats what was said before.
//!
//! Always true: a token is a function of its text's seed and its place in the text, so that equal prefixes are equal, and
//! others differ at once.

use super::{CONTEXT, Class, Rng, mix};

/// Ends every answer and occurs nowhere else.
pub(crate) const STOP: u32 = 0;

/// Tokens are below this.
const VOCABULARY: u64 = 32_000;

/// How far apart the streams of randomness of two classes are.
const CLASS_STREAMS: u64 = 1 << 40;

/// A text, not spelled out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Says which text.
    pub(crate) seed: u64,
    /// Its length.
    pub(crate) tokens: u32,
}

/// A conversation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Session {
    /// Seconds at which the first turn comes.
    pub(crate) at: f64,
    /// Its place among the workload's classes.
    pub(crate) class: usize,
    /// Whose it is.
    pub(crate) tenant: u32,
    /// Stands before the first turn.
    pub(crate) shared: Segment,
    /// At least one.
    pub(crate) turns: Vec<Turn>,
}

/// A question and the length of its answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Turn {
    /// Seconds after the end of the turn before.
    pub(crate) think: f64,
    /// What the user adds.
    pub(crate) prompt: Segment,
    /// What the model says; its last token is [`STOP`].
    pub(crate) answer: Segment,
    /// Asked as `max_tokens`.
    pub(crate) max_tokens: u32,
    /// Seconds after asking at which the client leaves, if it does.
    pub(crate) leaves: Option<f64>,
}

/// The token at `place` of the text `seed`.
pub(crate) fn token(seed: u64, place: u32) -> u32 {
    let hash = mix(seed.wrapping_add(u64::from(place).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    1 + (hash % (VOCABULARY - 1)) as u32
}

impl Session {
    /// Session number `index` of a class; `tenant` is drawn by the caller, who has the law.
    pub(crate) fn draw(
        class: &Class,
        (seed, place): (u64, usize),
        index: u64,
        tenant: impl FnOnce(&mut Rng) -> u32,
    ) -> Session {
        let streams = CLASS_STREAMS * (place as u64 + 1);
        let mut rng = Rng::new(seed, streams + index);
        let shared = Segment {
            seed: mix(seed ^ (streams + index % u64::from(class.shared.count))),
            tokens: class.shared.tokens,
        };
        let tenant = tenant(&mut rng);
        let mut turns: Vec<Turn> = Vec::new();
        let mut length = shared.tokens;
        for _ in 0..class.turns.draw(&mut rng).max(1) {
            let turn = Turn::draw(class, &mut rng);
            let end = length + turn.prompt.tokens + turn.max_tokens;
            if end > CONTEXT && !turns.is_empty() {
                break;
            }
            length += turn.prompt.tokens + turn.answer.tokens;
            turns.push(turn);
        }
        Session {
            at: 0.0,
            class: place,
            tenant,
            shared,
            turns,
        }
    }

    /// Tokens of the prompt of turn `turn`.
    pub(crate) fn prompt_len(&self, turn: usize) -> u32 {
        let said = self.turns[..turn].iter();
        let said: u32 = said
            .map(|turn| turn.prompt.tokens + turn.answer.tokens)
            .sum();
        self.shared.tokens + said + self.turns[turn].prompt.tokens
    }

    /// The prompt of turn `turn`: the whole conversation so far, and what is new.
    pub(crate) fn prompt(&self, turn: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.prompt_len(turn) as usize);
        let text = |segment: Segment| (0..segment.tokens).map(move |at| token(segment.seed, at));
        tokens.extend(text(self.shared));
        for said in &self.turns[..turn] {
            tokens.extend(text(said.prompt));
            tokens.extend((0..said.answer.tokens).map(|place| said.answer_token(place)));
        }
        tokens.extend(text(self.turns[turn].prompt));
        tokens
    }
}

impl Turn {
    fn draw(class: &Class, rng: &mut Rng) -> Turn {
        let think = rng.pause(class.think);
        let most = CONTEXT - class.shared.tokens;
        let prompt = class.prompt.draw(rng).min(most - 1);
        let answer = class.output.draw(rng).clamp(1, most - prompt);
        let max_tokens = class
            .declared
            .unwrap_or(answer)
            .clamp(answer, most - prompt);
        let (prompt_seed, answer_seed) = (rng.next(), rng.next());
        let leaves = rng.fraction() < class.leaving;
        let leave_after = rng.fraction() * class.leave_within;
        Turn {
            think,
            prompt: Segment {
                seed: prompt_seed,
                tokens: prompt,
            },
            answer: Segment {
                seed: answer_seed,
                tokens: answer,
            },
            max_tokens,
            leaves: leaves.then_some(leave_after),
        }
    }

    /// The token at `place` of the answer.
    pub(crate) fn answer_token(&self, place: u32) -> u32 {
        if place + 1 >= self.answer.tokens {
            STOP
        } else {
            token(self.answer.seed, place)
        }
    }
}
