//! The named workloads. A name, a seed and a load define a run completely.

use super::definition::{Arrivals, Disconnects, SessionClass, SharedPrefix, TenantRange, Workload};
use super::distributions::Count;

/// A row of the table of named workloads, with the fields of [`Workload`].
struct NamedWorkload {
    name: &'static str,
    description: &'static str,
    load: f64,
    classes: fn() -> Vec<SessionClass>,
    weights: &'static [u32],
}

const ALL: [NamedWorkload; 16] = [
    workload(
        "chat",
        "50 tenants hold conversations that share one system prompt",
        0.7,
        || vec![chat(tenants(0, 50, 1.0))],
    ),
    workload(
        "flooder",
        "tenant 0 sends nine of ten requests",
        2.0,
        flooder,
    ),
    workload(
        "long-prompts",
        "a steady stream of 4,000-token prompts beside chats with 50-token prompts",
        0.9,
        long_prompts,
    ),
    workload(
        "one-long-prompt",
        "occasional 4,000-token prompts, with 50-token prompts queued behind them",
        0.5,
        one_long_prompt,
    ),
    workload(
        "thrasher",
        "one tenant cycles through 400 prefixes and so fills the prefix cache",
        0.7,
        thrasher,
    ),
    workload(
        "quiet-then-burst",
        "one tenant is idle for ten minutes, then sends more than its share",
        1.5,
        quiet_then_burst,
    ),
    workload(
        "cancel-storm",
        "half of all clients disconnect early",
        1.0,
        cancel_storm,
    ),
    workload(
        "deadlines",
        "bursts of requests whose first token must come within five seconds",
        0.9,
        deadlines,
    ),
    workload(
        "liars",
        "one tenant sets max_tokens to 2,048 but its answers have 20 tokens",
        0.9,
        liars,
    ),
    workload(
        "identical",
        "all requests have the same prompt",
        2.0,
        identical,
    ),
    workload(
        "edges",
        "prompts of 15, 16 and 17 tokens, around the page size of 16",
        0.7,
        edges,
    ),
    workload(
        "idle-tenants",
        "10,000 tenants; four of them send most requests",
        0.9,
        idle_tenants,
    ),
    workload(
        "backlogged",
        "four tenants with different requests, each sending more than its share",
        4.0,
        backlogged,
    ),
    NamedWorkload {
        weights: &[1, 2, 3, 4],
        ..workload(
            "weighted",
            "the tenants of 'backlogged' with weights 1, 2, 3 and 4",
            6.0,
            backlogged,
        )
    },
    workload(
        "memory-pressure",
        "long answers that need more KV pages than there are",
        1.2,
        memory_pressure,
    ),
    workload(
        "scale",
        "10,000 tenants whose requests are mostly decode",
        0.8,
        scale,
    ),
];

/// The names of all workloads, in the order of `simulate --list`.
pub(crate) const NAMES: [&str; ALL.len()] = {
    let mut names = [""; ALL.len()];
    let mut index = 0;
    while index < ALL.len() {
        names[index] = ALL[index].name;
        index += 1;
    }
    names
};

/// Returns the workload `name`, or `None` if there is no such workload.
pub(crate) fn named(name: &str) -> Option<Workload> {
    let found = ALL.iter().find(|workload| workload.name == name)?;
    Some(Workload {
        name: found.name,
        description: found.description,
        load: found.load,
        classes: (found.classes)(),
        weights: found.weights,
    })
}

const fn workload(
    name: &'static str,
    description: &'static str,
    load: f64,
    classes: fn() -> Vec<SessionClass>,
) -> NamedWorkload {
    NamedWorkload {
        name,
        description,
        load,
        classes,
        weights: &[],
    }
}

const fn tenants(first: u32, count: u32, zipf: f64) -> TenantRange {
    TenantRange { first, count, zipf }
}

const fn log_normal(median: f64, sigma: f64, min: u32, max: u32) -> Count {
    Count::LogNormal {
        median,
        sigma,
        min,
        max,
    }
}

/// Returns conversations with natural lengths, and with pauses to read and think.
fn chat(tenants: TenantRange) -> SessionClass {
    SessionClass {
        name: "chat",
        tenants,
        shared: SharedPrefix {
            count: 1,
            tokens: 128,
        },
        prompt: log_normal(40.0, 0.8, 4, 600),
        output: log_normal(80.0, 0.6, 4, 600),
        turns: Count::Between(1, 6),
        think: 20.0,
        ..SessionClass::default()
    }
}

fn question(name: &'static str, share: f64, tenants: TenantRange) -> SessionClass {
    SessionClass {
        name,
        share,
        tenants,
        ..SessionClass::default()
    }
}

fn flooder() -> Vec<SessionClass> {
    let flood = SessionClass {
        prompt: log_normal(60.0, 0.5, 8, 400),
        output: log_normal(60.0, 0.5, 8, 400),
        ..question("flood", 9.0, tenants(0, 1, 0.0))
    };
    vec![flood, question("victim", 1.0, tenants(1, 1, 0.0))]
}

fn long_prompts() -> Vec<SessionClass> {
    let long = SessionClass {
        arrivals: Arrivals::Steady,
        prompt: Count::Exactly(4000),
        output: Count::Exactly(32),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    vec![long, question("chat", 20.0, tenants(1, 4, 0.0))]
}

/// Returns requests with one output token, so that no decode of theirs delays a question.
fn one_long_prompt() -> Vec<SessionClass> {
    let long = SessionClass {
        prompt: Count::Exactly(4000),
        output: Count::Exactly(1),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    let chat = SessionClass {
        output: Count::Exactly(1),
        ..question("chat", 5.0, tenants(0, 1, 0.0))
    };
    vec![long, chat]
}

fn thrasher() -> Vec<SessionClass> {
    let thrasher = SessionClass {
        shared: SharedPrefix {
            count: 400,
            tokens: 512,
        },
        prompt: Count::Exactly(16),
        output: Count::Exactly(8),
        ..question("thrasher", 3.0, tenants(0, 1, 0.0))
    };
    vec![
        thrasher,
        SessionClass {
            share: 1.0,
            ..chat(tenants(1, 4, 0.0))
        },
    ]
}

fn quiet_then_burst() -> Vec<SessionClass> {
    let returning = SessionClass {
        starts_at: 600.0,
        ..question("returning", 1.0, tenants(1, 1, 0.0))
    };
    vec![question("steady", 1.0, tenants(0, 1, 0.0)), returning]
}

fn cancel_storm() -> Vec<SessionClass> {
    vec![SessionClass {
        prompt: log_normal(200.0, 1.0, 16, 2000),
        output: log_normal(100.0, 0.6, 8, 400),
        disconnects: Disconnects {
            fraction: 0.5,
            within: 20.0,
        },
        tenants: tenants(0, 8, 0.5),
        ..SessionClass::default()
    }]
}

fn deadlines() -> Vec<SessionClass> {
    vec![SessionClass {
        arrivals: Arrivals::Bursts {
            calm: 60.0,
            burst: 10.0,
            factor: 10.0,
        },
        prompt: log_normal(100.0, 0.8, 8, 1000),
        first_token_within: Some(5.0),
        tenants: tenants(0, 8, 0.5),
        ..SessionClass::default()
    }]
}

fn liars() -> Vec<SessionClass> {
    let liar = SessionClass {
        output: Count::Exactly(20),
        declared: Some(2048),
        ..question("liar", 1.0, tenants(0, 1, 0.0))
    };
    vec![liar, question("honest", 1.0, tenants(1, 1, 0.0))]
}

fn identical() -> Vec<SessionClass> {
    vec![SessionClass {
        shared: SharedPrefix {
            count: 1,
            tokens: 512,
        },
        prompt: Count::Exactly(0),
        output: Count::Exactly(16),
        ..SessionClass::default()
    }]
}

fn edges() -> Vec<SessionClass> {
    vec![SessionClass {
        shared: SharedPrefix {
            count: 3,
            tokens: 14,
        },
        prompt: Count::Between(1, 3),
        output: Count::Between(1, 33),
        ..SessionClass::default()
    }]
}

fn idle_tenants() -> Vec<SessionClass> {
    let idle = SessionClass {
        name: "idle",
        share: 0.01,
        tenants: tenants(0, 10_000, 0.0),
        ..SessionClass::default()
    };
    vec![question("active", 1.0, tenants(0, 4, 0.0)), idle]
}

fn backlogged() -> Vec<SessionClass> {
    let long_prompts = SessionClass {
        prompt: log_normal(600.0, 0.5, 100, 2000),
        output: Count::Exactly(8),
        ..question("long prompts", 1.0, tenants(0, 1, 0.0))
    };
    let long_answers = SessionClass {
        prompt: Count::Exactly(20),
        output: log_normal(200.0, 0.5, 50, 800),
        ..question("long answers", 2.0, tenants(1, 1, 0.0))
    };
    let short = question("short", 10.0, tenants(2, 1, 0.0));
    let mixed = SessionClass {
        prompt: log_normal(100.0, 1.0, 8, 2000),
        output: log_normal(100.0, 1.0, 8, 1000),
        ..question("mixed", 3.0, tenants(3, 1, 0.0))
    };
    vec![long_prompts, long_answers, short, mixed]
}

fn memory_pressure() -> Vec<SessionClass> {
    vec![SessionClass {
        prompt: log_normal(200.0, 0.5, 16, 1000),
        output: log_normal(600.0, 0.5, 100, 2000),
        declared: Some(2000),
        tenants: tenants(0, 4, 0.0),
        ..SessionClass::default()
    }]
}

fn scale() -> Vec<SessionClass> {
    vec![SessionClass {
        prompt: log_normal(80.0, 0.7, 4, 1000),
        output: log_normal(170.0, 0.6, 8, 1000),
        tenants: tenants(0, 10_000, 1.0),
        ..SessionClass::default()
    }]
}
