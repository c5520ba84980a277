//! Would the simulation notice? Each mutant is this crate with one mistake; the simulation must fail on it.
//!
//! The sources are copied, a text in them is replaced, and the copy's simulation is built and run by cargo. The crate
//! itself contains nothing for this. A copy without a mistake must pass.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Steps in which a mistake must show.
const STEPS: &str = "10000";

/// The tests in which one must show.
const WORLDS: [&str; 3] = [
    "nothing_ever_goes_wrong",
    "busy_tenants_are_served_by_weight",
    "nobody_is_passed_for_ever",
];

/// Its name begins with that of the invariant it breaks, where that is one of a plan or of a tenant.
struct Mutant {
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "published-before-computed",
        file: "step/commit.rs",
        right: "sequence.tokens[..sequence.computed].as_chunks",
        wrong: "sequence.tokens[..sequence.tokens.len() - 1].as_chunks",
    },
    Mutant {
        name: "skipped-pin",
        file: "admission/admit.rs",
        right: "            self.pool.pin(page);",
        wrong: "",
    },
    Mutant {
        name: "copy-not-pinned",
        file: "admission/admit.rs",
        right: "            self.pool.pin(from);",
        wrong: "",
    },
    Mutant {
        name: "parent-left-out-of-the-key",
        file: "pages/prefix.rs",
        right: "#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {",
        wrong: "impl PartialEq for Edge {
    fn eq(&self, other: &Edge) -> bool {
        (self.owner, self.tokens) == (other.owner, other.tokens)
    }
}
impl std::hash::Hash for Edge {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.owner, self.tokens).hash(state);
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
        name: "owner-ignored",
        file: "pages/prefix.rs",
        right: "            Owner::Tenant(tenant)
        };",
        wrong: "            Owner::Tenant(TenantId(0 * tenant.0))
        };",
    },
    Mutant {
        name: "failed-row-published",
        file: "step/commit.rs",
        right: "            sequence.draw(drafts, sampled); // What came before it has been seen.",
        wrong: "            sequence.computed += row.len();
            self.publish(slot);
            let drafts = &[];
            self.sequences[slot].draw(drafts, sampled);",
    },
    Mutant {
        name: "rejected-draft-kept",
        file: "step/commit.rs",
        right: "        sequence.computed += row.len() - drafts.len();",
        wrong: "        sequence.computed += row.len();",
    },
    Mutant {
        name: "copied-tokens-forgotten",
        file: "step/commit.rs",
        right: "            sequence.computed += copy.tokens;",
        wrong: "",
    },
    Mutant {
        name: "parents-evicted-first",
        file: "pages/mod.rs",
        right: "for &page in pages.iter().rev() {",
        wrong: "for &page in pages.iter() {",
    },
    Mutant {
        name: "charged-twice",
        file: "step/commit.rs",
        right: "            charged += cost;",
        wrong: "",
    },
    Mutant {
        name: "S1-correction-forgotten-in-chunks",
        file: "step/prefills.rs",
        right: "let budget = self.correction.unapply(self.budget);",
        wrong: "let budget = self.budget;",
    },
    Mutant {
        name: "S1-floor-for-every-prompt",
        file: "step/prefills.rs",
        right: "self.chunk(rank.slot, !is_fed)",
        wrong: "self.chunk(rank.slot, true)",
    },
    Mutant {
        name: "S1-nothing-learnt",
        file: "step/commit.rs",
        right: ".observe(predicted, (now - self.planned_at) * 1000);",
        wrong: ".observe(predicted, predicted);",
    },
    Mutant {
        name: "S2-rests-for-ever",
        file: "step/decodes.rs",
        right: "            && sequence.rested < MOST_PAUSES
",
        wrong: "",
    },
    Mutant {
        name: "S5-slack-of-virtual-time",
        file: "queue/mod.rs",
        right: "tenant.planned_time() - least <= slack / u64::from(tenant.policy.weight)",
        wrong: "tenant.planned_time() - least <= slack",
    },
    Mutant {
        name: "S6-earlier-ones-preempted",
        file: "step/preempt.rs",
        right: "self.running[place + 1..]",
        wrong: "self.running[..]",
    },
    Mutant {
        name: "S6-the-same-one-again-and-again",
        file: "step/preempt.rs",
        right: "                sequence.preempted >= MOST_PREEMPTIONS,",
        wrong: "                Reverse(sequence.preempted),",
    },
    Mutant {
        name: "S10-refusal-charged",
        file: "admission/submit.rs",
        right: "        self.check_welcome(&request, expected, estimate)?;",
        wrong: "        self.queue.tenants[tenant].charge_tokens(now, 1);
        self.check_welcome(&request, expected, estimate)?;",
    },
    Mutant {
        name: "S11-nobody-remembered",
        file: "admission/admit.rs",
        right: "self.kept_out[band as usize].get_or_insert(id);",
        wrong: "let _ = id;",
    },
    Mutant {
        name: "S11-free-pages-taken-for-own-room",
        file: "admission/admit.rs",
        right: "self.pool.room(tenant);
            let fits",
        wrong: "self.pool.available(tenant);
            let fits",
    },
    Mutant {
        name: "S12-rates-ignored",
        file: "queue/tenants.rs",
        right: "            Some(late) => Err(late),",
        wrong: "            Some(_) => Ok(()),",
    },
    Mutant {
        name: "S12-cap-ignored",
        file: "pages/mod.rs",
        right: "        while self.held(tenant) >= self.cap(tenant) {",
        wrong: "        while false {",
    },
    Mutant {
        name: "M7-evicted-in-vain",
        file: "pages/mod.rs",
        right: "        if self.available(tenant) == 0 {
            return None;",
        wrong: "        if self.available(tenant) == 0 {
            if let Some(page) = self.cold.coldest() {
                self.evict(Some(page));
            }
            return None;",
    },
    Mutant {
        name: "M9-pages-beyond-the-row",
        file: "step/plan.rs",
        right: "(sequence.table.first, pages),",
        wrong: "(sequence.table.first, sequence.table.len),",
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
        let broken = mutant
            .name
            .split('-')
            .next()
            .filter(|name| names_an_invariant(name));
        let is_named = broken.is_none_or(|name| report.contains(&format!("{name}: ")));
        assert!(is_named, "{} broke something else: {report}", mutant.name);
    }
}

/// Like S1.
fn names_an_invariant(name: &str) -> bool {
    name.starts_with(|first: char| "MSD".contains(first)) && name[1..].parse::<u32>().is_ok()
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
    for folder in ["src", "tests/simulation"] {
        copy_folder(&here.join(folder), &copy.join(folder), "", &edit);
    }
    write(&copy.join("Cargo.lock"), &read(&here.join("../Cargo.lock")));
    write(&copy.join("Cargo.toml"), MANIFEST);

    Command::new(env!("CARGO"))
        .args(["test", "--offline", "--test", "simulation"])
        .arg("--target-dir")
        .arg(scratch.join("target"))
        .arg("--")
        .args(WORLDS)
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

/// Copies a folder and those in it. `edit` is given each file's path in it.
fn copy_folder(from: &Path, to: &Path, inside: &str, edit: &impl Fn(&str, String) -> String) {
    fs::create_dir_all(to).expect("the target directory can be written");
    let entries = fs::read_dir(from).expect("the crate has sources");
    for entry in entries {
        let path = entry.expect("it can be listed").path();
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.expect("source files have plain names");
        let inside = format!("{inside}{name}");
        if path.is_dir() {
            copy_folder(&path, &to.join(name), &format!("{inside}/"), edit);
        } else {
            write(&to.join(name), &edit(&inside, read(&path)));
        }
    }
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
