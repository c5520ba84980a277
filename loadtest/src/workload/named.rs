//! The named workloads. A name, a seed and a load define a run completely.

use super::definition::{Arrivals, Disconnects, SessionClass, SharedPrefix, TenantRange, Workload};
use super::distributions::Count;

/// Returns all workloads, in the order of `simulate --list`.
pub(crate) fn all() -> [Workload; 18] {
    [
        chat(),
        questions(),
        flooder(),
        long_prompts(),
        one_long_prompt(),
        thrasher(),
        quiet_then_burst(),
        cancel_storm(),
        deadlines(),
        liars(),
        identical(),
        edges(),
        idle_tenants(),
        backlogged(),
        weighted(),
        memory_pressure(),
        scale(),
        fleet(),
    ]
}

/// Returns the names of all workloads.
pub(crate) fn names() -> [&'static str; 18] {
    all().map(|workload| workload.name)
}

/// Returns the workload `name`, or `None` if there is no such workload.
pub(crate) fn named(name: &str) -> Option<Workload> {
    all().into_iter().find(|workload| workload.name == name)
}

fn workload(
    name: &'static str,
    description: &'static str,
    load: f64,
    classes: impl Into<Vec<SessionClass>>,
) -> Workload {
    Workload {
        name,
        description,
        load,
        classes: classes.into(),
        weights: &[],
    }
}

fn tenants(first: u32, count: u32, zipf: f64) -> TenantRange {
    TenantRange { first, count, zipf }
}

fn shared_prefix(count: u32, tokens: u32) -> SharedPrefix {
    SharedPrefix {
        count,
        tokens,
        of_tenant: false,
    }
}

fn log_normal(median: f64, sigma: f64, min: u32, max: u32) -> Count {
    Count::LogNormal {
        median,
        sigma,
        min,
        max,
    }
}

/// Returns conversations with natural lengths, and with pauses to read and think.
fn conversations(tenants: TenantRange) -> SessionClass {
    SessionClass {
        name: "chat",
        tenants,
        shared: shared_prefix(1, 128),
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

fn chat() -> Workload {
    workload(
        "chat",
        "50 tenants hold conversations that share one system prompt",
        0.7,
        [conversations(tenants(0, 50, 1.0))],
    )
}

fn questions() -> Workload {
    let class = SessionClass {
        prompt: Count::Exactly(107),
        output: Count::Exactly(64),
        ..SessionClass::default()
    };
    workload(
        "questions",
        "questions of 107 tokens with answers of 64 tokens",
        0.7,
        [class],
    )
}

fn flooder() -> Workload {
    let flood = SessionClass {
        prompt: log_normal(60.0, 0.5, 8, 400),
        output: log_normal(60.0, 0.5, 8, 400),
        ..question("flood", 9.0, tenants(0, 1, 0.0))
    };
    workload(
        "flooder",
        "tenant 0 sends nine of ten requests",
        2.0,
        [flood, question("victim", 1.0, tenants(1, 1, 0.0))],
    )
}

fn long_prompts() -> Workload {
    let long = SessionClass {
        arrivals: Arrivals::Steady,
        prompt: Count::Exactly(4000),
        output: Count::Exactly(32),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    workload(
        "long-prompts",
        "a steady stream of 4,000-token prompts beside chats with 50-token prompts",
        0.9,
        [long, question("chat", 20.0, tenants(1, 4, 0.0))],
    )
}

/// Returns requests with one output token, so that no decode of theirs delays a question.
fn one_long_prompt() -> Workload {
    let long = SessionClass {
        prompt: Count::Exactly(4000),
        output: Count::Exactly(1),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    let chat = SessionClass {
        output: Count::Exactly(1),
        ..question("chat", 5.0, tenants(0, 1, 0.0))
    };
    workload(
        "one-long-prompt",
        "occasional 4,000-token prompts, with 50-token prompts queued behind them",
        0.5,
        [long, chat],
    )
}

fn thrasher() -> Workload {
    let thrasher = SessionClass {
        shared: shared_prefix(400, 512),
        prompt: Count::Exactly(16),
        output: Count::Exactly(8),
        ..question("thrasher", 3.0, tenants(0, 1, 0.0))
    };
    workload(
        "thrasher",
        "one tenant cycles through 400 prefixes and so fills the prefix cache",
        0.7,
        [thrasher, conversations(tenants(1, 4, 0.0))],
    )
}

fn quiet_then_burst() -> Workload {
    let returning = SessionClass {
        starts_at: 600.0,
        ..question("returning", 1.0, tenants(1, 1, 0.0))
    };
    workload(
        "quiet-then-burst",
        "one tenant is idle for ten minutes, then sends more than its share",
        1.5,
        [question("steady", 1.0, tenants(0, 1, 0.0)), returning],
    )
}

fn cancel_storm() -> Workload {
    let class = SessionClass {
        prompt: log_normal(200.0, 1.0, 16, 2000),
        output: log_normal(100.0, 0.6, 8, 400),
        disconnects: Disconnects {
            fraction: 0.5,
            within: 20.0,
        },
        tenants: tenants(0, 8, 0.5),
        ..SessionClass::default()
    };
    workload(
        "cancel-storm",
        "half of all clients disconnect early",
        1.0,
        [class],
    )
}

fn deadlines() -> Workload {
    let class = SessionClass {
        arrivals: Arrivals::Bursts {
            calm: 60.0,
            burst: 10.0,
            factor: 10.0,
        },
        prompt: log_normal(100.0, 0.8, 8, 1000),
        first_token_within: Some(5.0),
        tenants: tenants(0, 8, 0.5),
        ..SessionClass::default()
    };
    workload(
        "deadlines",
        "bursts of requests whose first token must come within five seconds",
        0.9,
        [class],
    )
}

fn liars() -> Workload {
    let liar = SessionClass {
        output: Count::Exactly(20),
        declared: Some(2048),
        ..question("liar", 1.0, tenants(0, 1, 0.0))
    };
    workload(
        "liars",
        "one tenant sets max_tokens to 2,048 but its answers have 20 tokens",
        0.9,
        [liar, question("honest", 1.0, tenants(1, 1, 0.0))],
    )
}

fn identical() -> Workload {
    let class = SessionClass {
        shared: shared_prefix(1, 512),
        prompt: Count::Exactly(0),
        output: Count::Exactly(16),
        ..SessionClass::default()
    };
    workload(
        "identical",
        "all requests have the same prompt",
        2.0,
        [class],
    )
}

fn edges() -> Workload {
    let class = SessionClass {
        shared: shared_prefix(3, 14),
        prompt: Count::Between(1, 3),
        output: Count::Between(1, 33),
        ..SessionClass::default()
    };
    workload(
        "edges",
        "prompts of 15, 16 and 17 tokens, around the page size of 16",
        0.7,
        [class],
    )
}

fn idle_tenants() -> Workload {
    let active = question("active", 1.0, tenants(0, 4, 0.0));
    let idle = question("idle", 0.01, tenants(0, 10_000, 0.0));
    workload(
        "idle-tenants",
        "10,000 tenants; four of them send most requests",
        0.9,
        [active, idle],
    )
}

fn backlogged() -> Workload {
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
    workload(
        "backlogged",
        "four tenants with different requests, each sending more than its share",
        4.0,
        [long_prompts, long_answers, short, mixed],
    )
}

fn weighted() -> Workload {
    Workload {
        name: "weighted",
        description: "the tenants of 'backlogged' with weights 1, 2, 3 and 4",
        load: 6.0,
        weights: &[1, 2, 3, 4],
        ..backlogged()
    }
}

fn memory_pressure() -> Workload {
    let class = SessionClass {
        prompt: log_normal(200.0, 0.5, 16, 1000),
        output: log_normal(600.0, 0.5, 100, 2000),
        declared: Some(2000),
        tenants: tenants(0, 4, 0.0),
        ..SessionClass::default()
    };
    workload(
        "memory-pressure",
        "long answers that need more KV pages than there are",
        1.2,
        [class],
    )
}

fn scale() -> Workload {
    let class = SessionClass {
        prompt: log_normal(80.0, 0.7, 4, 1000),
        output: log_normal(170.0, 0.6, 8, 1000),
        tenants: tenants(0, 10_000, 1.0),
        ..SessionClass::default()
    };
    workload(
        "scale",
        "10,000 tenants whose requests are mostly decode",
        0.8,
        [class],
    )
}

/// Returns conversations of many applications, whose system prompts do not fit into the cache of
/// one machine.
fn fleet() -> Workload {
    let class = SessionClass {
        tenants: tenants(0, 200, 0.7),
        shared: SharedPrefix {
            of_tenant: true,
            ..shared_prefix(8, 512)
        },
        prompt: log_normal(40.0, 0.8, 4, 600),
        output: log_normal(60.0, 0.6, 4, 400),
        turns: Count::Between(1, 5),
        think: 10.0,
        ..SessionClass::default()
    };
    workload(
        "fleet",
        "200 tenants hold conversations with 8 system prompts each, for many machines",
        0.4,
        [class],
    )
}
