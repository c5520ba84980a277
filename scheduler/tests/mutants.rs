//! Each mutant is this crate with one mistake, and the simulation must fail on it.
//!
//! The test copies the sources, replaces a text in the copy, and runs the copy's simulation with
//! cargo. The crate itself contains nothing for this test. A copy without a mistake must pass.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// The number of simulated steps in which each mistake must be found.
const STEPS: &str = "60000";

/// The simulation's tests that must find the mistakes.
const TESTS: [&str; 4] = [
    "every_rule_holds_in_random_worlds",
    "busy_tenants_are_served_by_weight",
    "newcomers_do_not_bypass_a_large_request_forever",
    "a_tenant_gets_its_guaranteed_pages_from_one_that_fills_the_memory",
];

/// A mistake. A name that begins with a rule such as `S1` must break that rule.
struct Mutant {
    name: &'static str,
    file: &'static str,
    original: &'static str,
    mistake: &'static str,
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "published-before-computed",
        file: "sequence/kv.rs",
        original: "self.tokens[..self.kv.computed].as_chunks",
        mistake: "self.tokens[..self.tokens.len() - 1].as_chunks",
    },
    Mutant {
        name: "prefix-not-pinned",
        file: "sequence/kv.rs",
        original: "            pool.pin(page);",
        mistake: "",
    },
    Mutant {
        name: "copy-not-pinned",
        file: "sequence/kv.rs",
        original: "            pool.pin(from);",
        mistake: "",
    },
    Mutant {
        name: "parent-ignored-in-the-key",
        file: "pages/prefix.rs",
        original: "#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Edge {",
        mistake: "impl PartialEq for Edge {
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
        name: "whole-prompt-from-the-cache",
        file: "sequence/mod.rs",
        original: "&self.tokens[..self.tokens.len() - 1]",
        mistake: "&self.tokens",
    },
    Mutant {
        name: "owner-ignored",
        file: "pages/prefix.rs",
        original: "            Owner::Tenant(tenant)
        };",
        mistake: "            Owner::Tenant(TenantId(0 * tenant.0))
        };",
    },
    Mutant {
        name: "failed-row-published",
        file: "step/commit.rs",
        original: "        sequence.draw(drafts, sampled);",
        mistake: "        sequence.commit_row(now, row.len(), &[], &[]);
        sequence.publish(&mut state.pool, &mut state.batch.tables);
        sequence.draw(&[], sampled);",
    },
    Mutant {
        name: "rejected-draft-kept",
        file: "sequence/mod.rs",
        original: "        self.kv.computed += row_tokens - drafts.len();",
        mistake: "        self.kv.computed += row_tokens;",
    },
    Mutant {
        name: "copied-tokens-forgotten",
        file: "sequence/kv.rs",
        original: "        self.kv.computed += copy.tokens;",
        mistake: "",
    },
    Mutant {
        name: "parents-evicted-first",
        file: "pages/mod.rs",
        original: "for &page in pages.iter().rev() {
            self.release(page);",
        mistake: "for &page in pages.iter() {
            self.release(page);",
    },
    Mutant {
        name: "charged-twice",
        file: "step/commit.rs",
        original: "        charged += cost;",
        mistake: "",
    },
    Mutant {
        name: "S1-calibration-instead-of-learned-time-in-chunks",
        file: "cost/predictor.rs",
        original: "self.model.predict(base.plus(chunk)) <= budget",
        mistake: "self.calibrated.predict(base.plus(chunk)) <= budget",
    },
    Mutant {
        name: "S1-floor-for-every-prompt",
        file: "step/prefills.rs",
        original: "chunk(sequence, plan, &state.conditions, is_first);",
        mistake: "chunk(sequence, plan, &state.conditions, true);",
    },
    Mutant {
        name: "S1-steps-teach-nothing",
        file: "cost/predictor.rs",
        original: "self.learner.observe(step, actual);",
        mistake: "",
    },
    Mutant {
        name: "S2-pause-without-end",
        file: "step/decodes.rs",
        original: "        && sequence.pacing.paused_steps < MAX_PAUSES
",
        mistake: "",
    },
    Mutant {
        name: "S5-slack-not-divided-by-weight",
        file: "queue/mod.rs",
        original: "tenant.planned_time() - least <= slack / tenant.weight()",
        mistake: "tenant.planned_time() - least <= slack",
    },
    Mutant {
        name: "S6-earlier-sequence-preempted",
        file: "step/preempt.rs",
        original: "Givers::OwnLater | Givers::Later => place + 1,",
        mistake: "Givers::OwnLater | Givers::Later => 0,",
    },
    Mutant {
        name: "S6-same-sequence-preempted-again",
        file: "step/preempt.rs",
        original: "            sequence.record.times_preempted >= MAX_PREEMPTIONS,",
        mistake: "            Reverse(sequence.record.times_preempted),",
    },
    Mutant {
        name: "S10-refusal-charged",
        file: "admission/submit.rs",
        original: "    check_possible(state, request)?;",
        mistake:
            "    state.queue.rates_mut(request.tenant).reserve(state.conditions.now, None, 1, 1);
    check_possible(state, request)?;",
    },
    Mutant {
        name: "S11-blocked-head-forgotten",
        file: "admission/admit.rs",
        original: "self.blocked_heads[band as usize].get_or_insert(id);",
        mistake: "let _ = id;",
    },
    Mutant {
        name: "S11-free-pages-taken-for-quota",
        file: "admission/admit.rs",
        original: "if prefix.needed > state.pool.remaining_cap(",
        mistake: "if prefix.needed > state.pool.available(",
    },
    Mutant {
        name: "S12-rates-ignored",
        file: "queue/rates.rs",
        original: "            Some(exhausted) => Err(exhausted),",
        mistake: "            Some(_) => Ok(()),",
    },
    Mutant {
        name: "S13-refused-before-fairness",
        file: "admission/room.rs",
        original: "            Ordering::Greater => true,",
        mistake: "            Ordering::Greater => false,",
    },
    Mutant {
        name: "S13-started-request-displaced",
        file: "queue/tenant_queue.rs",
        original: "        !self.has_run && self.arrival == self.first_choice",
        mistake: "        self.arrival == self.first_choice",
    },
    Mutant {
        name: "S14-output-not-reserved",
        file: "queue/rates.rs",
        original: "            meter.charge(now, reserved.prompt + reserved.output);",
        mistake: "            meter.charge(now, reserved.prompt);",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-the-victim",
        file: "step/preempt.rs",
        original: "            Givers::Later => is_own || pool.exceeds_guarantee(tenant),",
        mistake: "            Givers::Later => true,",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-admission",
        file: "admission/load.rs",
        original: "    needed + promised <= left
",
        mistake: "    needed + promised <= left && false
",
    },
    Mutant {
        name: "S15-guarantee-ignored-by-the-taker",
        file: "step/preempt.rs",
        original: "        if pool.guaranteed_left(taker) > 0 {",
        mistake: "        if pool.guaranteed_left(taker) > usize::MAX - 1 {",
    },
    Mutant {
        name: "S16-sampling-not-charged",
        file: "step/commit.rs",
        original: "            cost += predictor.draw_time(sampling);",
        mistake: "            let _ = sampling;",
    },
    Mutant {
        name: "S16-sampling-not-planned",
        file: "sequence/mod.rs",
        original: "            sampling: self.draw_time,",
        mistake: "            sampling: 0,",
    },
    Mutant {
        name: "S12-cap-ignored",
        file: "pages/mod.rs",
        original: "        while self.held(tenant) >= self.cap(tenant) {",
        mistake: "        while false {",
    },
    Mutant {
        name: "M7-eviction-without-a-page",
        file: "pages/mod.rs",
        original: "        if self.available(tenant) == 0 {
            return None;",
        mistake: "        if self.available(tenant) == 0 {
            if let Some(page) = self.cold.coldest() {
                self.evict(Some(page));
            }
            return None;",
    },
    Mutant {
        name: "M9-pages-beyond-the-row",
        file: "step/plan.rs",
        original: "page_count: pages,",
        mistake: "page_count: table.len,",
    },
];

#[test]
fn the_simulation_catches_every_mutant() {
    let control = simulate("none", |_, text| text);
    assert!(
        control.status.success(),
        "the copy without a mistake fails: {}",
        text(&control)
    );
    for mutant in MUTANTS {
        let run = simulate(mutant.name, |file, text| mutant.apply(file, text));
        assert!(
            !run.status.success(),
            "the simulation does not find {}",
            mutant.name
        );
        let report = text(&run);
        let is_in_a_world = report.contains("to see this world again");
        assert!(
            is_in_a_world,
            "{} fails outside a world: {report}",
            mutant.name
        );
        let rule = mutant
            .name
            .split('-')
            .next()
            .filter(|name| names_a_rule(name));
        let is_named = rule.is_none_or(|name| report.contains(&format!("{name}: ")));
        assert!(is_named, "{} breaks another rule: {report}", mutant.name);
    }
}

/// Returns whether the name is that of a rule, such as S1.
fn names_a_rule(name: &str) -> bool {
    name.starts_with(|first: char| "MSD".contains(first)) && name[1..].parse::<u32>().is_ok()
}

impl Mutant {
    fn apply(&self, file: &str, text: String) -> String {
        if file != self.file {
            return text;
        }
        let places = text.matches(self.original).count();
        assert_eq!(
            places, 1,
            "{}: the text to replace must occur once",
            self.name
        );
        text.replace(self.original, self.mistake)
    }
}

/// Copies the crate with each source changed to `edit(file name, text)`, and runs its simulation.
fn simulate(name: &str, edit: impl Fn(&str, String) -> String) -> Output {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutants");
    let copy = scratch.join(name);
    if copy.exists() {
        // A file of an earlier run may have moved since.
        fs::remove_dir_all(&copy).expect("the target directory can be written");
    }
    for folder in ["src", "tests/simulation"] {
        copy_folder(&here.join(folder), &copy.join(folder), "", &edit);
    }
    write(&copy.join("Cargo.lock"), &read(&here.join("../Cargo.lock")));
    let random = here.join("../tests/random");
    let manifest = format!("{MANIFEST}sterna-random = {{ path = {random:?} }}\n");
    write(&copy.join("Cargo.toml"), &manifest);

    Command::new(env!("CARGO"))
        .args(["test", "--offline", "--test", "simulation"])
        .arg("--target-dir")
        .arg(scratch.join("target"))
        .arg("--")
        .args(TESTS)
        .current_dir(&copy)
        .env("STERNA_SIM_STEPS", STEPS)
        .env_remove("STERNA_SEED")
        .output()
        .expect("cargo runs")
}

/// The copy is a workspace of its own; the copied lock file gives it the same `slab`. The path of
/// `sterna-random` follows.
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
[dev-dependencies]
"#;

/// Copies a folder and its subfolders. `edit` gets the path of each file inside the folder.
fn copy_folder(from: &Path, to: &Path, inside: &str, edit: &impl Fn(&str, String) -> String) {
    fs::create_dir_all(to).expect("the target directory can be written");
    let entries = fs::read_dir(from).expect("the crate has sources");
    for entry in entries {
        let path = entry.expect("the folder can be read").path();
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
