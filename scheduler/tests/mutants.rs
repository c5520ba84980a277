//! Would the simulation notice? Each mutant is this crate with one mistake; the simulation must fail on it.
//!
//! The sources are copied, a text in them is replaced, and the copy's simulation is built and run by cargo. The crate
//! itself contains nothing for this. A copy without a mistake must pass.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Steps in which a mistake must show.
const STEPS: &str = "10000";

struct Mutant {
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "publish-at-allocate",
        file: "plan.rs",
        right: "self.shares.push(Share { slot, tokens });",
        wrong: "self.shares.push(Share { slot, tokens });
            self.sequences[slot].computed += tokens;
            self.publish(slot);
            self.sequences[slot].computed -= tokens;",
    },
    Mutant {
        name: "skipped-pin",
        file: "plan.rs",
        right: "self.pool.pin(page);",
        wrong: "",
    },
    Mutant {
        name: "parent-left-out-of-the-key",
        file: "prefix.rs",
        right: "#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {",
        wrong: "impl PartialEq for Edge {
    fn eq(&self, other: &Edge) -> bool {
        (self.namespace, self.tokens) == (other.namespace, other.tokens)
    }
}
impl std::hash::Hash for Edge {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.namespace, self.tokens).hash(state);
    }
}
#[derive(Clone, Copy, Debug, Eq)]
pub(crate) struct Edge {",
    },
    Mutant {
        name: "full-hit-not-capped",
        file: "sequence.rs",
        right: "&self.tokens[..self.tokens.len() - 1]",
        wrong: "&self.tokens",
    },
    Mutant {
        name: "namespace-ignored",
        file: "plan.rs",
        right: "namespace: sequence.namespace,",
        wrong: "namespace: crate::Namespace(0),",
    },
    Mutant {
        name: "failed-row-published",
        file: "plan.rs",
        right: "return self.finish(id, FinishReason::Error);",
        wrong: "self.sequences[id.slot()].computed += computed;
            self.publish(id.slot());
            return self.finish(id, FinishReason::Error);",
    },
    Mutant {
        name: "parents-evicted-first",
        file: "pages.rs",
        right: "for &page in pages.iter().rev() {",
        wrong: "for &page in pages.iter() {",
    },
    Mutant {
        name: "own-hits-counted-as-evictable",
        file: "plan.rs",
        right: "missing + revived + promised <= ",
        wrong: "missing + promised <= ",
    },
];

#[test]
fn the_simulation_catches_every_mutant() {
    let control = simulate("none", |_, text| text);
    assert!(control.status.success(), "no mistake: {}", text(&control));
    for mutant in MUTANTS {
        let run = simulate(mutant.name, |file, text| mutant.apply(file, text));
        assert!(!run.status.success(), "{} went unnoticed", mutant.name);
        let report = text(&run);
        let in_a_world = report.contains("to see this world again");
        assert!(in_a_world, "{} failed elsewhere: {report}", mutant.name);
    }
}

impl Mutant {
    fn apply(&self, file: &str, text: String) -> String {
        if file != self.file {
            return text;
        }
        let places = text.matches(self.right).count();
        assert_eq!(places, 1, "{}: the text to replace", self.name);
        text.replace(self.right, self.wrong)
    }
}

/// Copies the crate, with its sources changed by `edit(file name, text)`, and runs the copy's simulation.
fn simulate(name: &str, edit: impl Fn(&str, String) -> String) -> Output {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutants");
    let copy = scratch.join(name);
    fs::create_dir_all(copy.join("src")).expect("the target directory can be written");
    fs::create_dir_all(copy.join("tests")).expect("the target directory can be written");
    for path in files(&here.join("src")) {
        let file = path.file_name().and_then(|name| name.to_str());
        let file = file.expect("source files have plain names");
        write(&copy.join("src").join(file), &edit(file, read(&path)));
    }
    let simulation = read(&here.join("tests/simulation.rs"));
    write(&copy.join("tests/simulation.rs"), &simulation);
    write(&copy.join("Cargo.lock"), &read(&here.join("../Cargo.lock")));
    write(&copy.join("Cargo.toml"), MANIFEST);

    Command::new(env!("CARGO"))
        .args(["test", "--offline", "--test", "simulation"])
        .args(["nothing_ever_goes_wrong", "--target-dir"])
        .arg(scratch.join("target"))
        .current_dir(&copy)
        .env("STERNA_SIM_STEPS", STEPS)
        .env_remove("STERNA_SEED")
        .output()
        .expect("cargo runs")
}

/// The copy stands alone; its lock file gives it the same `slab`.
const MANIFEST: &str = r#"
[package]
name = "sterna-scheduler"
version = "0.0.0"
edition = "2024"
[dependencies]
slab = "0.4"
[profile.dev]
debug = false
[workspace]
"#;

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the crate has sources");
    let paths = entries.map(|entry| entry.expect("it can be listed").path());
    paths.collect()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}
