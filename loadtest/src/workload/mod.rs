//! What is asked, by whom and when: one definition, which `simulate` runs in virtual time and `drive` over HTTP.
//!
//! Always true: session `i` of a class and a seed is the same session whatever ran before it. When its later turns come
//! depends on the answers, as it does with people: a turn follows the end of the one before by its think time.

mod named;
mod random;
mod session;
mod trace;

pub(crate) use named::{NAMES, named};
pub(crate) use random::{Count, Rng, mix};
#[cfg(test)]
pub(crate) use session::token;
pub(crate) use session::{STOP, Segment, Session, Turn};
pub(crate) use trace::Trace;

/// Tokens that a prompt and its answer may come to: the context of the models that are simulated.
pub(crate) const CONTEXT: u32 = 4096;

/// Kinds of sessions that arrive side by side.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// By which it is asked for.
    pub(crate) name: &'static str,
    /// What it shows.
    pub(crate) about: &'static str,
    /// Work that arrives in a second, in seconds of the machine.
    pub(crate) load: f64,
    /// At least one.
    pub(crate) classes: Vec<Class>,
    /// Relative shares of the machine, of the first tenants; others have 1.
    pub(crate) weights: &'static [u32],
}

/// Sessions of one kind. Latencies are reported for each class.
#[derive(Clone, Debug)]
pub(crate) struct Class {
    /// By which it is reported.
    pub(crate) name: &'static str,
    /// Its part of all sessions, relative to the other classes'.
    pub(crate) share: f64,
    /// How sessions begin.
    pub(crate) arrivals: Arrivals,
    /// Nothing arrives before this many seconds.
    pub(crate) from: f64,
    /// Whose they are.
    pub(crate) tenants: Tenants,
    /// What stands before the first turn.
    pub(crate) shared: Shared,
    /// Tokens that a turn adds to the prompt: the user's, and the chat template's around them.
    pub(crate) prompt: Count,
    /// Tokens that the model answers, the stop token included.
    pub(crate) output: Count,
    /// Asked as `max_tokens`, whatever the answer; the answer's own length if absent.
    pub(crate) declared: Option<u32>,
    /// Turns of a session.
    pub(crate) turns: Count,
    /// Mean seconds between an answer and the next turn.
    pub(crate) think: f64,
    /// Part of the turns whose client leaves before the answer ends.
    pub(crate) leaving: f64,
    /// When those clients leave, in seconds after asking: evenly up to this.
    pub(crate) leave_within: f64,
    /// Seconds to the first token, after which the answer is of no use.
    pub(crate) first_token_within: Option<f64>,
}

/// How sessions of a class begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// At random.
    Poisson,
    /// At equal intervals.
    Steady,
    /// At random, `factor` times as often in bursts as between them (a Markov-modulated Poisson process).
    Bursts {
        /// Mean seconds of a calm.
        calm: f64,
        /// Mean seconds of a burst.
        burst: f64,
        /// Rate in a burst over the rate in a calm.
        factor: f64,
    },
}

/// Tenants `first..first + count`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Tenants {
    /// The one with the most sessions.
    pub(crate) first: u32,
    /// At least one.
    pub(crate) count: u32,
    /// Exponent of the Zipf law by which sessions fall to them; 0 for evenly.
    pub(crate) zipf: f64,
}

/// Texts at the head of all sessions of a class, taken in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shared {
    /// How many there are; at least one.
    pub(crate) count: u32,
    /// The length of each; 0 for none.
    pub(crate) tokens: u32,
}

impl Default for Class {
    /// Single short questions of one tenant.
    fn default() -> Class {
        Class {
            name: "chat",
            share: 1.0,
            arrivals: Arrivals::Poisson,
            from: 0.0,
            tenants: Tenants {
                first: 0,
                count: 1,
                zipf: 0.0,
            },
            shared: Shared {
                count: 1,
                tokens: 0,
            },
            prompt: Count::Exactly(50),
            output: Count::Exactly(50),
            declared: None,
            turns: Count::Exactly(1),
            think: 0.0,
            leaving: 0.0,
            leave_within: 0.0,
            first_token_within: None,
        }
    }
}

impl Workload {
    /// How many tenants there are, numbered from 0.
    pub(crate) fn tenants(&self) -> u32 {
        let end = |class: &Class| class.tenants.first + class.tenants.count;
        self.classes.iter().map(end).max().unwrap_or(0)
    }

    /// The place of a class among the others, or the names that there are.
    pub(crate) fn class_called(&self, name: &str) -> Result<usize, String> {
        let place = self.classes.iter().position(|class| class.name == name);
        place.ok_or_else(|| {
            let names: Vec<&str> = self.classes.iter().map(|class| class.name).collect();
            format!("{} has the classes {}", self.name, names.join(", "))
        })
    }

    /// A tenant's share of the machine, relative to the others'.
    pub(crate) fn weight(&self, tenant: u32) -> u32 {
        self.weights.get(tenant as usize).copied().unwrap_or(1)
    }
}
