//! Checks the structure of the repository: arrows between modules, files with `unsafe`, headers,
//! names, circles and the width of lines.

#![allow(
    clippy::unwrap_used,
    reason = "a test that unwraps fails, as it should"
)]

mod circles;
mod lines;
mod modules;
mod names;

use std::fs;
use std::path::{Path, PathBuf};

/// The modules of `src/` that each module may use. `main.rs` may use all.
const ARROWS: &[(&str, &[&str])] = &[
    (
        "api",
        &[
            "constraint",
            "engine",
            "text",
            "tools",
            "metrics",
            "tenants",
            "traces",
        ],
    ),
    (
        "bench",
        &[
            "checkpoint",
            "config",
            "cores",
            "demo",
            "engine",
            "model",
            "opening",
        ],
    ),
    ("checkpoint", &["cores"]),
    ("config", &["cores", "kv_events"]),
    ("constraint", &["text"]),
    (
        "convert",
        &[
            "checkpoint",
            "config",
            "model",
            "opening",
            "signals",
            "text",
        ],
    ),
    ("cores", &[]),
    ("demo", &["checkpoint"]),
    (
        "engine",
        &[
            "checkpoint",
            "constraint",
            "cores",
            "fault",
            "model",
            "metrics",
        ],
    ),
    ("fault", &[]),
    ("healthcheck", &["config"]),
    ("hub", &["checkpoint"]),
    (
        "inspect",
        &["checkpoint", "config", "cores", "model", "opening", "text"],
    ),
    ("kv_events", &[]),
    ("metrics", &[]),
    ("model", &["checkpoint", "cores", "fault"]),
    ("opening", &["checkpoint", "demo", "model", "text"]),
    ("signals", &[]),
    (
        "startup",
        &[
            "api",
            "checkpoint",
            "config",
            "constraint",
            "engine",
            "hub",
            "kv_events",
            "metrics",
            "model",
            "opening",
            "signals",
            "tenants",
            "text",
            "tools",
            "traces",
        ],
    ),
    ("synthesize", &["checkpoint", "demo"]),
    ("tenants", &["engine"]),
    ("text", &[]),
    ("tools", &["constraint", "text"]),
    ("traces", &[]),
];

/// The paths, from the root, where each of our crates and each package with one home may be named.
const HOMES: &[(&str, &[&str])] = &[
    (
        "sterna_kernels",
        &[
            "src/bench/",
            "src/checkpoint/",
            "src/engine/",
            "src/model/",
            "src/opening/",
            "src/startup/",
            "benches/",
            "tests/",
            "kernels/",
            "fuzz/",
        ],
    ),
    (
        "sterna_scheduler",
        &[
            "src/bench/",
            "src/config/",
            "src/constraint/",
            "src/engine/",
            "src/kv_events/",
            "src/metrics/",
            "src/model/",
            "src/opening/",
            "src/startup/",
            "benches/",
            "tests/",
            "scheduler/",
            "loadtest/src/simulate/",
        ],
    ),
    ("arc_swap", &["src/api/"]),
    ("axum", &["src/api/", "tests/", "fuzz/"]),
    (
        "chrono",
        &[
            "src/api/",
            "src/text/chat_template/",
            "loadtest/src/drive/facts.rs",
            "loadtest/src/workload/recorded.rs",
        ],
    ),
    ("core_affinity", &["src/cores.rs"]),
    ("crossbeam", &["src/engine/"]),
    ("getrandom", &["src/tenants/keygen.rs"]),
    ("httparse", &["src/api/connection/head_scan.rs"]),
    (
        "libc",
        &["src/startup/allocator.rs", "src/constraint/template.rs"],
    ),
    ("llguidance", &["src/constraint/"]),
    ("parking_lot", &["src/kv_events/", "src/model/pool/"]),
    (
        "rustix",
        &[
            "src/api/body/reading_time.rs",
            "src/constraint/",
            "src/startup/listen.rs",
        ],
    ),
    ("sd_notify", &["src/startup/service.rs"]),
    (
        "rmp_serde",
        &["src/constraint/", "src/kv_events/", "tests/http/"],
    ),
    (
        "sha2",
        &[
            "src/hub/partial_file.rs",
            "src/kv_events/blocks.rs",
            "src/opening/golden_tokens.rs",
            "src/tenants/keys.rs",
            "tests/hub/",
        ],
    ),
    ("sha1", &["src/hub/partial_file.rs", "tests/hub/"]),
    ("ureq", &["src/hub/", "src/traces/collector.rs"]),
    ("opentelemetry", &["src/traces/"]),
    ("opentelemetry_http", &["src/traces/"]),
    ("opentelemetry_otlp", &["src/traces/"]),
    ("opentelemetry_proto", &["tests/otlp.rs"]),
    ("opentelemetry_sdk", &["src/traces/"]),
    ("prost", &["tests/otlp.rs"]),
    ("percent_encoding", &["src/hub/client.rs"]),
    ("slab", &["scheduler/"]),
    (
        "sterna_random",
        &[
            "src/bench/",
            "src/checkpoint/",
            "src/engine/",
            "src/model/", // Its tests.
            "benches/",
            "tests/",
            "scheduler/",
            "kernels/tests/",
            "src/text/", // Its tests.
            "loadtest/",
        ],
    ),
    ("subtle", &["src/tenants/keys.rs"]),
    ("tokenizers", &["src/text/"]),
    ("tracing_appender", &["src/startup/mod.rs"]),
    ("toktrie", &["src/constraint/"]),
    (
        "memmap2",
        &["src/checkpoint/files.rs", "kernels/src/huge.rs"],
    ),
    ("zerocopy", &["kernels/"]),
    ("zeromq", &["src/kv_events/", "tests/http/"]),
    ("metrics_exporter_prometheus", &["src/metrics/"]),
    ("proc_macro2", &["tests/tidy/"]),
    ("procfs", &["src/constraint/worker.rs", "src/metrics/"]),
    (
        "flate2",
        &["src/api/status.rs", "tests/http/", "tests/otlp.rs"],
    ),
    ("toml", &["src/config/", "src/tenants/"]),
    ("utoipa", &["src/api/"]),
    ("jsonschema", &["tests/harness/", "tests/constraint/"]),
];

const UNSAFE_FORMS: &[&str] = &[
    "unsafe {",
    "unsafe fn",
    "unsafe impl",
    "unsafe trait",
    "unsafe extern",
];

const UNSAFE_FILES: &[&str] = &[
    "kernels/src/dispatch.rs",
    "kernels/src/x86_64/registers.rs",
    "src/model/pool/mod.rs",
    "src/model/pool/slots.rs",
    "src/checkpoint/files.rs",
    "src/constraint/template.rs",
    "src/startup/allocator.rs",
];

const TOP_LEVEL: &[&str] = &[
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "benches",
    "clippy.toml",
    "dashboards",
    "deploy",
    "deny.toml",
    "fuzz",
    "kernels",
    "loadtest",
    "scheduler",
    "src",
    "target",
    "tests",
];

struct Source {
    path: String,
    text: String,
}

#[test]
fn modules_use_only_what_their_arrows_allow() {
    let modules: Vec<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    for source in rust_files() {
        let Some(module) = module_of(&source.path) else {
            continue;
        };
        let allowed = ARROWS
            .iter()
            .find(|(name, _)| *name == module)
            .unwrap_or_else(|| {
                panic!(
                    "{}: module {module} is not in the table of arrows",
                    source.path
                )
            })
            .1;
        for used in used_modules(&source.text) {
            let known = modules.contains(&used.as_str());
            assert!(
                !known || used == module || allowed.contains(&used.as_str()),
                "{}: {module} may not use {used}",
                source.path
            );
        }
    }
}

#[test]
fn packages_stay_in_their_homes() {
    for source in rust_files() {
        for (package, homes) in HOMES {
            let named = code_lines(&source.text).any(|line| names_package(line, package));
            assert!(
                !named
                    || homes.iter().any(|home| source.path.starts_with(home))
                    || is_tidy(&source.path),
                "{}: {package} has its home in {homes:?}",
                source.path
            );
        }
    }
}

#[test]
fn unsafe_stands_only_in_the_listed_files() {
    for source in rust_files() {
        let has = code_lines(&source.text)
            .any(|line| UNSAFE_FORMS.iter().any(|form| line.contains(form)));
        let listed = UNSAFE_FILES.contains(&source.path.as_str()) || is_tidy(&source.path);
        assert!(
            !has || listed,
            "{}: unsafe is not allowed here",
            source.path
        );
    }
}

#[test]
fn every_unsafe_block_names_its_fact() {
    for source in rust_files().filter(|source| UNSAFE_FILES.contains(&source.path.as_str())) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            if !line.contains("unsafe {") && !line.contains("unsafe impl") {
                continue;
            }
            let above = &lines[number.saturating_sub(4)..=number];
            assert!(
                above.iter().any(|line| line.contains("SAFETY")),
                "{}:{}: no SAFETY comment",
                source.path,
                number + 1
            );
        }
    }
}

#[test]
fn every_file_begins_with_what_it_is_for() {
    for source in rust_files() {
        assert!(
            source.text.starts_with("//!"),
            "{}: the first line is not `//!`",
            source.path
        );
    }
}

#[test]
fn nothing_is_left_open() {
    let marks = [
        "TODO",
        "FIXME",
        "todo!(",
        "unimplemented!(",
        "#[ignore",
        "allow(dead_code)",
    ];
    for source in rust_files().filter(|source| !is_tidy(&source.path)) {
        for mark in marks {
            assert!(!source.text.contains(mark), "{}: {mark}", source.path);
        }
    }
}

#[test]
fn the_top_level_is_the_agreed_one() {
    for entry in fs::read_dir(root()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(
            name.starts_with('.') || TOP_LEVEL.contains(&name.as_str()),
            "{name} does not belong in the top level"
        );
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the repository's Rust files.
fn rust_files() -> impl Iterator<Item = Source> {
    text_files(&["rs"])
}

/// Returns the Rust files of the product: no tests, no benchmarks.
fn product_files() -> impl Iterator<Item = Source> {
    let folders = ["src/", "scheduler/src/", "kernels/src/", "loadtest/src/"];
    rust_files().filter(move |source| {
        let in_product = folders.iter().any(|folder| source.path.starts_with(folder));
        let stem = source.path.trim_end_matches(".rs");
        let for_tests = ["/tests", "/reference", "/random"];
        in_product && !for_tests.iter().any(|name| stem.ends_with(name))
    })
}

/// Returns the repository's files with one of these extensions.
fn text_files(extensions: &[&str]) -> impl Iterator<Item = Source> + use<> {
    let mut paths = Vec::new();
    collect(&root(), extensions, &mut paths);
    assert!(!paths.is_empty(), "the walk found no {extensions:?} files");
    paths.into_iter().map(|path| Source {
        text: fs::read_to_string(&path).unwrap(),
        path: path
            .strip_prefix(root())
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned(),
    })
}

fn collect(folder: &Path, extensions: &[&str], paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if path.is_dir() {
            if name != "target" && name != "fixtures" && !name.starts_with('.') {
                collect(&path, extensions, paths);
            }
        } else if path
            .extension()
            .is_some_and(|own| extensions.iter().any(|e| own == *e))
        {
            paths.push(path);
        }
    }
}

/// `src/api/chat.rs` and `src/api.rs` belong to `api`; `main.rs` and `lib.rs` to nobody.
fn module_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("src/")?;
    let module = rest.split('/').next()?.trim_end_matches(".rs");
    (!matches!(module, "main" | "lib")).then_some(module)
}

/// The names that follow `crate::`, also inside `crate::{a, b::c}`.
fn used_modules(text: &str) -> Vec<String> {
    let code: Vec<&str> = code_lines(text).collect();
    let code = code.join("\n");
    let mut used = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(list) => {
                let list = &list[..list.find('}').unwrap_or(list.len())];
                used.extend(list.split(',').map(|item| first_name(item.trim())));
            }
            None => used.push(first_name(rest)),
        }
    }
    used
}

fn first_name(text: &str) -> String {
    text.chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect()
}

fn code_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
}

fn names_package(line: &str, package: &str) -> bool {
    [
        format!("use {package}::"),
        format!("use {package};"),
        format!(" {package}::"),
        format!("({package}::"),
        format!("<{package}::"),
    ]
    .iter()
    .any(|form| line.contains(form.as_str()))
        || line.starts_with(&format!("{package}::"))
}

fn is_tidy(path: &str) -> bool {
    path.starts_with("tests/tidy/")
}
