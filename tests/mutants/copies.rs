//! Copies of parts of this workspace, with and without a mistake.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// A mistake: a text of a file, and what stands there instead.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    /// The file, as a path below `src`.
    pub(crate) file: &'static str,
    pub(crate) original: &'static str,
    pub(crate) mistake: &'static str,
}

/// What is copied, and which tests run on the copy.
pub(crate) struct Copy {
    pub(crate) name: &'static str,
    /// Folders of this workspace, and where they go.
    pub(crate) folders: &'static [(&'static str, &'static str)],
    /// The text of `src/lib.rs`, if the folders have none.
    pub(crate) root: Option<&'static str>,
    /// The manifest, up to the dependencies of the tests.
    pub(crate) manifest: &'static str,
    /// The tests as arguments of `cargo test`, up to `--`.
    pub(crate) tests: &'static [&'static str],
    /// Names of tests, or parts of names.
    pub(crate) filters: &'static [&'static str],
    pub(crate) variables: &'static [(&'static str, &'static str)],
}

impl Copy {
    /// Fails if a mutant cannot be made of today's sources.
    pub(crate) fn has_the_place_of_each(&self, mutants: &[Mutant]) {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR"));
        for mutant in mutants {
            mutant.apply(mutant.file, read(&workspace.join(self.origin(mutant))));
        }
    }

    /// Returns the mutants that `STERNA_MUTANTS` chooses: with `all`, every one; with paths of
    /// changed files, the mutants of these files, and every mutant if a test of the copy has
    /// changed.
    pub(crate) fn chosen<'a>(&self, mutants: &'a [Mutant]) -> Vec<&'a Mutant> {
        let choice = std::env::var("STERNA_MUTANTS").unwrap_or_default();
        let changed: Vec<&str> = choice.split_whitespace().collect();
        let all = choice == "all"
            || changed.iter().any(|path| {
                let mut tests = self
                    .folders
                    .iter()
                    .filter(|(_, to)| to.starts_with("tests/"));
                path.starts_with("tests/mutants/") || tests.any(|(from, _)| path.starts_with(from))
            });
        let is_chosen = |mutant: &&Mutant| all || changed.contains(&&*self.origin(mutant));
        mutants.iter().filter(is_chosen).collect()
    }

    /// Returns the path of a mutant's file in this workspace.
    fn origin(&self, mutant: &Mutant) -> String {
        let inside = |(from, to): &(&str, &str)| {
            let below = format!("src/{}", mutant.file);
            let below = below.strip_prefix(to)?.strip_prefix('/')?;
            Some(format!("{from}/{below}"))
        };
        let origin = self.folders.iter().find_map(inside);
        origin.unwrap_or_else(|| panic!("{}: no folder has {}", mutant.name, mutant.file))
    }

    pub(crate) fn passes_without_mistakes(&self) {
        let control = self.run(|_, text| text);
        let passes = control.status.success();
        let report = text(&control);
        assert!(passes, "the copy without a mistake fails: {report}");
        let runs_none = report.contains("running 0 tests") && !report.contains("... ok");
        assert!(!runs_none, "the copy runs no test: {report}");
    }

    /// Returns what the tests say of the copy with a mistake. They must fail.
    pub(crate) fn report_of_failure(&self, mutant: &Mutant) -> String {
        let run = self.run(|file, text| mutant.apply(file, text));
        let name = mutant.name;
        assert!(!run.status.success(), "the tests do not find {name}");
        let report = text(&run);
        let compiles = !report.contains("could not compile");
        assert!(compiles, "{name} does not compile: {report}");
        report
    }

    /// Copies the folders with each source changed to `edit(path below src, text)`, and runs the
    /// tests.
    fn run(&self, edit: impl Fn(&str, String) -> String) -> Output {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR"));
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("mutants")
            .join(self.name);
        // The same folder each time: cargo then compiles only what the mistake changes.
        let copy = scratch.join("copy");
        if copy.exists() {
            // A file of an earlier run may have moved since.
            fs::remove_dir_all(&copy).expect("the target directory can be written");
        }
        for (from, to) in self.folders {
            let inside = match to.strip_prefix("src/") {
                Some(inside) => format!("{inside}/"),
                None => String::new(),
            };
            copy_folder(&workspace.join(from), &copy.join(to), &inside, &edit);
        }
        if let Some(root) = self.root {
            write(&copy.join("src/lib.rs"), root);
        }
        // The copy is a workspace of its own. The copied lock file gives it the same dependencies.
        write(
            &copy.join("Cargo.lock"),
            &read(&workspace.join("Cargo.lock")),
        );
        let random = workspace.join("tests/random");
        let manifest = self.manifest;
        let rest = "[workspace]\n[dev-dependencies]\n";
        let manifest = format!("{manifest}{rest}sterna-random = {{ path = {random:?} }}\n");
        write(&copy.join("Cargo.toml"), &manifest);

        Command::new(env!("CARGO"))
            .args(["test", "--offline", "--target-dir"])
            .arg(scratch.join("target"))
            .args(self.tests)
            .args(self.filters)
            .current_dir(&copy)
            .envs(self.variables.iter().copied())
            .env_remove("STERNA_SEED")
            .output()
            .expect("cargo runs")
    }
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
