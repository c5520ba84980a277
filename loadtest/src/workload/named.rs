//! The workloads that have a name. A name, a seed and a load say everything about a run.

use super::{Arrivals, Class, Count, Shared, Tenants, Workload};

/// A workload's name, what it shows, its load, and its classes.
type Entry = (&'static str, &'static str, f64, fn() -> Vec<Class>);

const ALL: [Entry; 16] = [
    (
        "chat",
        "conversations of 50 tenants behind one system prompt",
        0.7,
        || vec![chat(tenants(0, 50, 1.0))],
    ),
    (
        "flooder",
        "tenant 0 makes nine of ten arrivals",
        2.0,
        flooder,
    ),
    (
        "long-prompts",
        "a constant stream of 4 k prompts against chats of 50 tokens",
        0.9,
        long_prompts,
    ),
    (
        "one-long-prompt",
        "now and then a 4 k prompt, and questions of 50 tokens behind it",
        0.5,
        one_long_prompt,
    ),
    (
        "thrasher",
        "one tenant cycles through prefixes that nobody asks for again soon",
        0.7,
        thrasher,
    ),
    (
        "quiet-then-burst",
        "one tenant is quiet for ten minutes, then asks for more than its share",
        1.5,
        quiet_then_burst,
    ),
    (
        "cancel-storm",
        "half of all clients leave",
        1.0,
        cancel_storm,
    ),
    (
        "deadlines",
        "bursts of answers that are of use for five seconds",
        0.9,
        deadlines,
    ),
    (
        "liars",
        "one tenant asks for 2,048 tokens and stops after 20",
        0.9,
        liars,
    ),
    ("identical", "one prompt, again and again", 2.0, identical),
    ("edges", "prompts of 15, 16 and 17 tokens", 0.7, edges),
    (
        "idle-tenants",
        "10,000 tenants, of whom four have work",
        0.9,
        idle_tenants,
    ),
    (
        "backlogged",
        "four tenants, all with more than their share, of unlike requests",
        4.0,
        backlogged,
    ),
    (
        "weighted",
        "the same four with weights 1, 2, 3 and 4",
        6.0,
        backlogged,
    ),
    (
        "memory-pressure",
        "long answers, more than memory holds",
        1.2,
        memory_pressure,
    ),
    ("scale", "10,000 tenants, mostly answers", 0.8, scale),
];

/// All names, in the order in which they are listed.
pub(crate) const NAMES: [&str; ALL.len()] = {
    let mut names = [""; ALL.len()];
    let mut place = 0;
    while place < ALL.len() {
        names[place] = ALL[place].0;
        place += 1;
    }
    names
};

/// The workload of that name.
pub(crate) fn named(wanted: &str) -> Option<Workload> {
    let &(name, about, load, classes) = ALL.iter().find(|(name, ..)| *name == wanted)?;
    Some(Workload {
        name,
        about,
        load,
        classes: classes(),
        weights: if name == "weighted" {
            &[1, 2, 3, 4]
        } else {
            &[]
        },
    })
}

const fn tenants(first: u32, count: u32, zipf: f64) -> Tenants {
    Tenants { first, count, zipf }
}

const fn about(median: f64, sigma: f64, least: u32, most: u32) -> Count {
    Count::LogNormal {
        median,
        sigma,
        least,
        most,
    }
}

/// Prompts and answers as people have them, with pauses to read and think.
fn chat(tenants: Tenants) -> Class {
    Class {
        name: "chat",
        tenants,
        shared: Shared {
            count: 1,
            tokens: 128,
        },
        prompt: about(40.0, 0.8, 4, 600),
        output: about(80.0, 0.6, 4, 600),
        turns: Count::Between(1, 6),
        think: 20.0,
        ..Class::default()
    }
}

fn question(name: &'static str, share: f64, tenants: Tenants) -> Class {
    Class {
        name,
        share,
        tenants,
        ..Class::default()
    }
}

fn flooder() -> Vec<Class> {
    let flood = Class {
        prompt: about(60.0, 0.5, 8, 400),
        output: about(60.0, 0.5, 8, 400),
        ..question("flood", 9.0, tenants(0, 1, 0.0))
    };
    vec![flood, question("victim", 1.0, tenants(1, 1, 0.0))]
}

fn long_prompts() -> Vec<Class> {
    let long = Class {
        arrivals: Arrivals::Steady,
        prompt: Count::Exactly(4000),
        output: Count::Exactly(32),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    vec![long, question("chat", 20.0, tenants(1, 4, 0.0))]
}

/// Answers of one token, so that a question meets nothing but the prompt.
fn one_long_prompt() -> Vec<Class> {
    let long = Class {
        prompt: Count::Exactly(4000),
        output: Count::Exactly(1),
        ..question("long", 1.0, tenants(0, 1, 0.0))
    };
    let chat = Class {
        output: Count::Exactly(1),
        ..question("chat", 5.0, tenants(0, 1, 0.0))
    };
    vec![long, chat]
}

fn thrasher() -> Vec<Class> {
    let thrasher = Class {
        shared: Shared {
            count: 400,
            tokens: 512,
        },
        prompt: Count::Exactly(16),
        output: Count::Exactly(8),
        ..question("thrasher", 3.0, tenants(0, 1, 0.0))
    };
    vec![
        thrasher,
        Class {
            share: 1.0,
            ..chat(tenants(1, 4, 0.0))
        },
    ]
}

fn quiet_then_burst() -> Vec<Class> {
    let returning = Class {
        from: 600.0,
        ..question("returning", 1.0, tenants(1, 1, 0.0))
    };
    vec![question("steady", 1.0, tenants(0, 1, 0.0)), returning]
}

fn cancel_storm() -> Vec<Class> {
    vec![Class {
        prompt: about(200.0, 1.0, 16, 2000),
        output: about(100.0, 0.6, 8, 400),
        leaving: 0.5,
        leave_within: 20.0,
        tenants: tenants(0, 8, 0.5),
        ..Class::default()
    }]
}

fn deadlines() -> Vec<Class> {
    vec![Class {
        arrivals: Arrivals::Bursts {
            calm: 60.0,
            burst: 10.0,
            factor: 10.0,
        },
        prompt: about(100.0, 0.8, 8, 1000),
        first_token_within: Some(5.0),
        tenants: tenants(0, 8, 0.5),
        ..Class::default()
    }]
}

fn liars() -> Vec<Class> {
    let liar = Class {
        output: Count::Exactly(20),
        declared: Some(2048),
        ..question("liar", 1.0, tenants(0, 1, 0.0))
    };
    vec![liar, question("honest", 1.0, tenants(1, 1, 0.0))]
}

fn identical() -> Vec<Class> {
    vec![Class {
        shared: Shared {
            count: 1,
            tokens: 512,
        },
        prompt: Count::Exactly(0),
        output: Count::Exactly(16),
        ..Class::default()
    }]
}

fn edges() -> Vec<Class> {
    vec![Class {
        shared: Shared {
            count: 3,
            tokens: 14,
        },
        prompt: Count::Between(1, 3),
        output: Count::Between(1, 33),
        ..Class::default()
    }]
}

fn idle_tenants() -> Vec<Class> {
    let idle = Class {
        name: "idle",
        share: 0.01,
        tenants: tenants(0, 10_000, 0.0),
        ..Class::default()
    };
    vec![question("active", 1.0, tenants(0, 4, 0.0)), idle]
}

fn backlogged() -> Vec<Class> {
    let long_prompts = Class {
        prompt: about(600.0, 0.5, 100, 2000),
        output: Count::Exactly(8),
        ..question("long prompts", 1.0, tenants(0, 1, 0.0))
    };
    let long_answers = Class {
        prompt: Count::Exactly(20),
        output: about(200.0, 0.5, 50, 800),
        ..question("long answers", 2.0, tenants(1, 1, 0.0))
    };
    let short = question("short", 10.0, tenants(2, 1, 0.0));
    let mixed = Class {
        prompt: about(100.0, 1.0, 8, 2000),
        output: about(100.0, 1.0, 8, 1000),
        ..question("mixed", 3.0, tenants(3, 1, 0.0))
    };
    vec![long_prompts, long_answers, short, mixed]
}

fn memory_pressure() -> Vec<Class> {
    vec![Class {
        prompt: about(200.0, 0.5, 16, 1000),
        output: about(600.0, 0.5, 100, 2000),
        declared: Some(2000),
        tenants: tenants(0, 4, 0.0),
        ..Class::default()
    }]
}

fn scale() -> Vec<Class> {
    vec![Class {
        prompt: about(80.0, 0.7, 4, 1000),
        output: about(170.0, 0.6, 8, 1000),
        tenants: tenants(0, 10_000, 1.0),
        ..Class::default()
    }]
}
