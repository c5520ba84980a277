//! Files that need each other.
//!
//! A file needs another one if a `use` of it names something that the other one defines. The paths
//! are followed through re-exports by name, which works because no two types share a name. Children
//! may use what their `mod.rs` defines.

use std::collections::{BTreeMap, BTreeSet};

use super::names::types_of;
use super::{Source, code_lines, product_files};

#[test]
fn no_two_files_need_each_other() {
    let sources: Vec<Source> = product_files().collect();
    let needs = needs(&sources);
    let arrows: usize = needs.values().map(BTreeSet::len).sum();
    assert!(
        arrows > 100,
        "only {arrows} arrows between files were found"
    );
    let circle = find_circle(&needs);
    assert!(circle.is_none(), "a circle: {circle:?}");
}

#[test]
fn a_circle_is_found() {
    let source = |path: &str, text: &str| Source {
        path: path.into(),
        text: text.into(),
    };
    let a = source(
        "src/m/a.rs",
        "use super::b::{Beta, other};\npub struct Alpha;\n",
    );
    let b = source("src/m/b.rs", "use super::c::Gamma;\npub struct Beta;\n");
    let c = source("src/m/c.rs", "use crate::m::Alpha;\npub struct Gamma;\n");
    let root = source("src/m/mod.rs", "mod a; mod b; mod c;\npub use a::Alpha;\n");
    let needs = needs(&[a, b, c, root]);
    let circle = find_circle(&needs).expect("a needs b, b needs c, c needs a");
    assert_eq!(circle.len(), 3, "{circle:?}");
}

type Needs = BTreeMap<String, BTreeSet<String>>;

/// Returns the files that each file needs.
fn needs(sources: &[Source]) -> Needs {
    let mut home_of_type: BTreeMap<String, &str> = BTreeMap::new();
    for source in sources {
        for name in types_of(source) {
            home_of_type.insert(name, &source.path);
        }
    }
    let mut needs = Needs::new();
    for source in sources {
        let needed = needs.entry(source.path.clone()).or_default();
        for word in words_of_imports(&source.text) {
            let Some(home) = home_of_type.get(&word) else {
                continue;
            };
            let same_crate = crate_of(home) == crate_of(&source.path);
            if same_crate && *home != source.path && !is_ancestor(home, &source.path) {
                needed.insert((*home).to_owned());
            }
        }
    }
    needs
}

fn crate_of(path: &str) -> &str {
    path.split("src/").next().unwrap_or_default()
}

/// Is `mod_rs` the `mod.rs` or `lib.rs` of a folder that contains `path`?
fn is_ancestor(mod_rs: &str, path: &str) -> bool {
    ["mod.rs", "lib.rs"]
        .iter()
        .filter_map(|name| mod_rs.strip_suffix(name))
        .any(|folder| path.starts_with(folder))
}

/// Returns every word of the `use` declarations that name our own modules, tests excepted.
fn words_of_imports(text: &str) -> Vec<String> {
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code: Vec<&str> = code_lines(product).collect();
    let code = code.join("\n");
    let mut words = Vec::new();
    for (at, _) in code.match_indices("use ") {
        let is_declaration = code[..at].lines().next_back().is_none_or(|line| {
            let before = line.trim();
            before.is_empty() || (before.starts_with("pub") && !before.contains(' '))
        });
        let declaration = &code[at + 4..][..code[at + 4..].find(';').unwrap_or(0)];
        let is_reexport = code[..at].ends_with("pub ") || code[..at].ends_with(") ");
        let is_ours = ["super::", "crate::", "self::"]
            .iter()
            .any(|start| declaration.starts_with(start));
        if is_declaration && is_ours && !is_reexport {
            let split = declaration.split(|c: char| !c.is_alphanumeric() && c != '_');
            words.extend(split.filter(|word| !word.is_empty()).map(str::to_owned));
        }
    }
    words
}

/// Returns the files of one circle, or `None`.
fn find_circle(needs: &Needs) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    let mut path = Vec::new();
    needs
        .keys()
        .find_map(|file| follow(needs, file, &mut path, &mut done))
}

fn follow(
    needs: &Needs,
    file: &str,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(start) = path.iter().position(|other| other == file) {
        return Some(path[start..].to_vec());
    }
    if done.contains(file) {
        return None;
    }
    path.push(file.to_owned());
    let circle = needs
        .get(file)
        .into_iter()
        .flatten()
        .find_map(|next| follow(needs, next, path, done));
    path.pop();
    done.insert(file.to_owned());
    circle
}
