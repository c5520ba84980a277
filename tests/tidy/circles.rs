//! Files that need each other.
//!
//! A file needs another one of its crate if its code names something that the other one defines: a
//! type, a function, a constant, a macro. The name may stand in a `use` or be written out as a
//! path. A path is followed through modules and re-exports to the file of the definition
//! (`modules.rs`).
//!
//! These are no arrows:
//! - A re-export by itself. It is one if the file's own code uses the name.
//! - What a file names of the `mod.rs`, `lib.rs` or `main.rs` above it: children may use what their
//!   parent defines.
//! - Test code, and calls of methods, which name no type.

use std::collections::{BTreeMap, BTreeSet};

use super::modules::mentions;
use super::{Source, product_files};

/// The names that each file needs of each other file.
type Needs = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Somewhat fewer arrows than there are. A gate that sees fewer has become blind to some kind.
const FEWEST_ARROWS: usize = 1_650;

#[test]
fn no_two_files_need_each_other() {
    let sources: Vec<Source> = product_files().collect();
    let needs = needs(&sources);
    let arrows: usize = needs.values().map(BTreeMap::len).sum();
    assert!(
        arrows >= FEWEST_ARROWS,
        "only {arrows} arrows between files were found"
    );
    let circles = circles(&needs);
    assert!(circles.is_empty(), "{}", describe(&needs, &circles));
}

/// A file that names others in every way.
const USER: &str = r#"
    use std::fmt;
    use super::block::Second;
    use crate::m::{self, constants::{LIMIT as MOST, OTHER}, reexported};
    use super::globbed::*;

    #[derive(Deserialize)]
    struct Own {
        #[serde(with = "super::serialized")]
        field: u64,
    }

    fn own(&self) -> Globbed {
        use super::local::inner;
        assert!(super::written::f(m::through_module::g()) < crate::m::written_constant::C);
        self.only_a_method();
        macro_made!()
    }

    #[cfg(test)]
    mod tests {
        use super::super::tested::T;
    }
"#;

#[test]
fn every_way_to_name_something_is_an_arrow() {
    let root = "
        pub(crate) use {renamed::original as reexported, unused::unused};
        pub(super) use used_here::Used;
        macro_rules! macro_made { () => { $crate::m::in_macro::f() } }
        struct OfParent(Used);
    ";
    let defined = [
        ("block", "pub struct Second;"),
        (
            "child",
            "use super::OfParent; fn f(_: crate::m::OfParent) {}",
        ),
        (
            "constants",
            "pub const LIMIT: u8 = 1; pub static OTHER: u8 = 2;",
        ),
        ("globbed", "pub type Globbed = u8;"),
        ("in_macro", "pub fn f() {}"),
        ("local", "pub(super) const fn inner() {}"),
        ("only_named", "pub fn only_a_method() {}"),
        ("renamed", "pub fn original() {}"),
        ("serialized", ""),
        ("tested", "pub struct T;"),
        ("through_module", "pub fn g() {}"),
        ("unused", "pub fn unused() {}"),
        ("used_here", "pub struct Used;"),
        ("user", USER),
        ("written", "pub fn f() {}"),
        ("written_constant", "pub const C: u8 = 1;"),
    ];
    let needs = needs_in(root, &defined);
    let of = |from: &str| {
        let needed = needs.get(from).into_iter().flat_map(BTreeMap::keys);
        needed.map(String::as_str).collect::<Vec<_>>()
    };
    let needed_by_user = [
        "src/m/block.rs",
        "src/m/constants.rs",
        "src/m/globbed.rs",
        "src/m/local.rs",
        "src/m/renamed.rs",
        "src/m/serialized.rs",
        "src/m/through_module.rs",
        "src/m/written.rs",
        "src/m/written_constant.rs",
    ];
    assert_eq!(of("src/m/user.rs"), needed_by_user);
    assert_eq!(
        of("src/m/mod.rs"),
        ["src/m/in_macro.rs", "src/m/used_here.rs"]
    );
    assert_eq!(needs.len(), 2, "{needs:?}");
}

#[test]
fn a_circle_is_found() {
    let needs = needs_in(
        "pub use a::Alpha;",
        &[
            (
                "a",
                "use std::fmt;\nuse super::b::{Beta, other};\npub struct Alpha;",
            ),
            ("b", "use std::fmt;\nuse super::c::LIMIT;\npub struct Beta;"),
            (
                "c",
                "pub const LIMIT: u8 = 1;\nfn f() { crate::m::Alpha::new() }",
            ),
            ("d", "use super::a::Alpha;"),
        ],
    );
    let expected = ["src/m/a.rs", "src/m/b.rs", "src/m/c.rs"].into();
    let circles = circles(&needs);
    assert_eq!(circles, [expected]);
    let report = describe(&needs, &circles);
    assert!(
        report.contains("src/m/b.rs -> src/m/c.rs: LIMIT"),
        "{report}"
    );
}

/// Returns the arrows in a crate with one module `m`, which has these files.
fn needs_in(root: &str, files: &[(&str, &str)]) -> Needs {
    let mods = files.iter().map(|(name, _)| format!("mod {name};\n"));
    let root = mods.chain([root.to_owned()]).collect();
    let mut sources = vec![
        source("src/lib.rs", "pub mod m;".to_owned()),
        source("src/m/mod.rs", root),
    ];
    let files = files.iter();
    sources
        .extend(files.map(|(name, text)| source(&format!("src/m/{name}.rs"), (*text).to_owned())));
    needs(&sources)
}

fn source(path: &str, text: String) -> Source {
    let path = path.to_owned();
    Source { path, text }
}

fn needs(sources: &[Source]) -> Needs {
    let mut needs = Needs::new();
    for mention in mentions(sources) {
        if !is_ancestor(&mention.to, &mention.from) {
            let needed = needs.entry(mention.from).or_default();
            needed.entry(mention.to).or_default().insert(mention.name);
        }
    }
    needs
}

/// Is `root` the `mod.rs`, `lib.rs` or `main.rs` of a folder that contains `path`?
fn is_ancestor(root: &str, path: &str) -> bool {
    ["mod.rs", "lib.rs", "main.rs"]
        .iter()
        .filter_map(|name| root.strip_suffix(name))
        .any(|folder| path.starts_with(folder))
}

/// Returns the largest sets of files in which each file needs each other one, over some way.
fn circles(needs: &Needs) -> Vec<BTreeSet<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> = needs
        .keys()
        .map(|file| (file.as_str(), reached_from(needs, file)))
        .collect();
    let circles = reached.iter().map(|(file, others)| {
        let back = |other: &&str| reached.get(other).is_some_and(|way| way.contains(file));
        others.iter().copied().filter(back).collect()
    });
    let circles: BTreeSet<BTreeSet<&str>> =
        circles.filter(|set: &BTreeSet<_>| set.len() > 1).collect();
    circles.into_iter().collect()
}

/// Returns the files that a file needs, directly or over others.
fn reached_from<'a>(needs: &'a Needs, file: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![file];
    while let Some(file) = open.pop() {
        for next in needs.get(file).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

/// Returns the arrows within each circle, and the names that cause them.
fn describe(needs: &Needs, circles: &[BTreeSet<&str>]) -> String {
    let mut text = format!("{} circles", circles.len());
    for circle in circles {
        text += &format!("\n\n{} files need each other:", circle.len());
        for from in circle {
            for (to, names) in &needs[*from] {
                if circle.contains(to.as_str()) {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    text += &format!("\n  {from} -> {to}: {}", names.join(", "));
                }
            }
        }
    }
    text
}
