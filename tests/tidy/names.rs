//! What files and types are called.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{Source, code_lines, product_files, root, rust_files};

#[test]
fn no_file_is_named_for_no_idea() {
    let banned: BTreeSet<&str> = [
        "utils", "util", "common", "helpers", "helper", "manager", "misc", "types",
    ]
    .into();
    for source in rust_files() {
        let path = Path::new(&source.path);
        for part in path
            .with_extension("")
            .iter()
            .filter_map(|part| part.to_str())
        {
            assert!(
                !banned.contains(part),
                "{}: name it for its idea",
                source.path
            );
        }
    }
}

#[test]
fn a_module_with_children_is_a_folder_with_mod_rs() {
    for source in rust_files() {
        let folder = root().join(source.path.trim_end_matches(".rs"));
        assert!(
            !folder.is_dir(),
            "{}: move it to {}/mod.rs",
            source.path,
            folder.display()
        );
    }
}

#[test]
fn no_type_name_stands_for_two_things() {
    let mut homes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in product_files() {
        for name in types_of(&source) {
            homes.entry(name).or_default().push(source.path.clone());
        }
    }
    assert!(homes.len() > 100, "only {} types were found", homes.len());
    homes.retain(|_, files| files.len() > 1);
    assert!(homes.is_empty(), "names with several meanings: {homes:#?}");
}

/// Returns the types and traits that a file defines. Indented ones belong to a trait or to tests.
fn types_of(source: &Source) -> Vec<String> {
    let names = code_lines(&source.text).filter_map(|line| {
        let mut words = line.split(' ').skip_while(|word| word.starts_with("pub"));
        let is_type = matches!(words.next()?, "struct" | "enum" | "trait" | "type");
        let name = words.next()?.chars();
        let name: String = name.take_while(|c| c.is_alphanumeric()).collect();
        (is_type && !name.is_empty()).then_some(name)
    });
    names.collect()
}
