//! What a workload consists of: classes of sessions, their arrivals, tenants and lengths.

use super::distributions::Count;

/// The context length of the simulated models: the limit for a prompt and its answer together.
pub(crate) const CONTEXT: u32 = 4096;

/// Classes of sessions that arrive side by side.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// The name on the command line.
    pub(crate) name: &'static str,
    /// What the workload shows.
    pub(crate) description: &'static str,
    /// The default load: machine seconds of work that arrive per second.
    pub(crate) load: f64,
    /// At least one class.
    pub(crate) classes: Vec<SessionClass>,
    /// The weights of the first tenants. All other tenants have weight 1.
    pub(crate) weights: &'static [u32],
}

/// Sessions of one kind. Latencies are reported for each class.
#[derive(Clone, Debug)]
pub(crate) struct SessionClass {
    /// The name in reports.
    pub(crate) name: &'static str,
    /// The class's share of all sessions, relative to the shares of the other classes.
    pub(crate) share: f64,
    /// How sessions arrive.
    pub(crate) arrivals: Arrivals,
    /// The time, in seconds, before which no session of the class arrives.
    pub(crate) starts_at: f64,
    /// The tenants that send the sessions.
    pub(crate) tenants: TenantRange,
    /// The text before the first turn.
    pub(crate) shared: SharedPrefix,
    /// Tokens that a turn adds to the prompt: the user's message and the chat template around it.
    pub(crate) prompt: Count,
    /// Tokens of an answer, including the stop token.
    pub(crate) output: Count,
    /// The `max_tokens` of each request. `None`: the length of the answer.
    pub(crate) declared: Option<u32>,
    /// Turns of a session.
    pub(crate) turns: Count,
    /// The mean think time: seconds between an answer and the next turn.
    pub(crate) think: f64,
    /// Clients that disconnect early.
    pub(crate) disconnects: Disconnects,
    /// The most tokens of a prompt and its answer together.
    pub(crate) context: u32,
    /// The deadline of the first token, in seconds. The scheduler ends a later request.
    pub(crate) first_token_within: Option<f64>,
}

/// How sessions of a class arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrivals {
    /// A Poisson process.
    Poisson,
    /// Equal intervals.
    Steady,
    /// A Markov-modulated Poisson process that alternates between calm phases and bursts.
    Bursts {
        /// The mean length of a calm phase, in seconds.
        calm: f64,
        /// The mean length of a burst, in seconds.
        burst: f64,
        /// The arrival rate in a burst over the rate in a calm phase.
        factor: f64,
    },
}

/// The tenants `first..first + count`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TenantRange {
    /// The first tenant. It sends the most sessions.
    pub(crate) first: u32,
    /// At least one tenant.
    pub(crate) count: u32,
    /// The exponent of the Zipf law that assigns sessions to tenants. 0: all are equally likely.
    pub(crate) zipf: f64,
}

/// Texts before the first turn, such as system prompts. The sessions of a class use them in
/// rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedPrefix {
    /// The number of texts, at least one.
    pub(crate) count: u32,
    /// The length of each text. 0: no text.
    pub(crate) tokens: u32,
    /// Whether each tenant has `count` texts of its own.
    pub(crate) of_tenant: bool,
}

/// Clients that disconnect before their answer ends.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Disconnects {
    /// The share of turns whose client disconnects, from 0 to 1.
    pub(crate) fraction: f64,
    /// The latest disconnect, in seconds after the request. All earlier times are equally likely.
    pub(crate) within: f64,
}

impl Default for SessionClass {
    /// Single short questions of one tenant.
    fn default() -> SessionClass {
        SessionClass {
            name: "chat",
            share: 1.0,
            arrivals: Arrivals::Poisson,
            starts_at: 0.0,
            tenants: TenantRange {
                first: 0,
                count: 1,
                zipf: 0.0,
            },
            shared: SharedPrefix {
                count: 1,
                tokens: 0,
                of_tenant: false,
            },
            prompt: Count::Exactly(50),
            output: Count::Exactly(50),
            declared: None,
            turns: Count::Exactly(1),
            think: 0.0,
            disconnects: Disconnects::default(),
            context: CONTEXT,
            first_token_within: None,
        }
    }
}

impl Workload {
    /// Returns the number of tenants. Tenants are numbered from 0.
    pub(crate) fn tenants(&self) -> u32 {
        let end = |class: &SessionClass| class.tenants.first + class.tenants.count;
        self.classes.iter().map(end).max().unwrap_or(0)
    }

    /// Returns the index of the class that the flag `--only` names, if it is given.
    ///
    /// # Errors
    /// If the workload has no such class. The error lists the classes.
    pub(crate) fn only_class(&self, only: Option<&str>) -> Result<Option<usize>, String> {
        let Some(name) = only else { return Ok(None) };
        let names: Vec<&str> = self.classes.iter().map(|class| class.name).collect();
        let index = names.iter().position(|class| *class == name);
        index.map(Some).ok_or_else(|| {
            let names = names.join(", ");
            let workload = self.name;
            format!("--only: workload {workload} has no class '{name}'; its classes are: {names}")
        })
    }

    /// Returns the weight of a tenant: its share of the machine relative to other tenants.
    pub(crate) fn weight(&self, tenant: u32) -> u32 {
        self.weights.get(tenant as usize).copied().unwrap_or(1)
    }
}
