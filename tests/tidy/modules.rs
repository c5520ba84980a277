//! Which file defines what a path names.
//!
//! Each crate is read from its root along its `mod` lines, as the compiler reads it, so
//! `#[cfg(test)]` leaves out what it marks. The reader works on tokens, not on a syntax tree: the
//! arguments of macros are tokens, and paths stand in them too.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use super::Source;

/// One name in the code of `from` that the file `to` defines.
pub(super) struct Mention {
    pub(super) from: String,
    pub(super) to: String,
    pub(super) name: String,
}

/// Returns what the files of every crate name of their own crate, each file's own names excepted.
pub(super) fn mentions(sources: &[Source]) -> Vec<Mention> {
    let texts: BTreeMap<&str, &str> = sources
        .iter()
        .map(|source| (source.path.as_str(), source.text.as_str()))
        .collect();
    let is_root = |path: &&&str| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
    let roots = texts.keys().filter(is_root);
    roots
        .flat_map(|root| Crate::read(root, &texts).mentions())
        .collect()
}

type Names = Vec<String>;

struct Crate<'a> {
    texts: &'a BTreeMap<&'a str, &'a str>, // By path.
    modules: Vec<Module>,                  // The first one is the root.
}

struct Module {
    file: String,
    parent: usize,
    /// A module and a function may share a name.
    scope: BTreeMap<String, Vec<Meaning>>,
    globs: Vec<Names>,
    /// Every path that the module's code writes out, and what its `use` declarations name.
    paths: Vec<Names>,
}

/// What a name means in its module. An import is not followed yet.
enum Meaning {
    Item,
    Module(usize),
    Import(Names),
}

enum Found {
    Module(usize),
    Item { file: String, name: String },
}

impl<'a> Crate<'a> {
    fn read(root: &str, texts: &'a BTreeMap<&'a str, &'a str>) -> Crate<'a> {
        let modules = Vec::new();
        let mut own = Crate { texts, modules };
        own.add_file(root, 0);
        own
    }

    /// Adds the module of a file, and all modules below it. Returns its number.
    fn add_file(&mut self, file: &str, parent: usize) -> usize {
        let tokens = self.texts[file].parse();
        let tokens = tokens.unwrap_or_else(|error| panic!("{file}: {error}"));
        self.add(file, parent, tokens)
    }

    fn add(&mut self, file: &str, parent: usize, tokens: TokenStream) -> usize {
        let number = self.modules.len();
        let mut module = Module {
            file: file.to_owned(),
            parent,
            scope: BTreeMap::new(),
            globs: Vec::new(),
            paths: Vec::new(),
        };
        let mut children = Vec::new();
        let mut reader = Reader {
            module: &mut module,
            children: &mut children,
        };
        reader.read(tokens, true);
        self.modules.push(module);
        for (name, body) in children {
            let child = match body {
                Some(body) => self.add(file, number, body),
                None => self.add_file(&self.file_of(&name, file), number),
            };
            self.modules[number].define(name, Meaning::Module(child));
        }
        number
    }

    /// Returns the file of `mod name;` in a file, which is the root or a `mod.rs`.
    fn file_of(&self, name: &str, parent: &str) -> String {
        let (folder, _) = parent.rsplit_once('/').expect("a file is in a folder");
        let places = [
            format!("{folder}/{name}.rs"),
            format!("{folder}/{name}/mod.rs"),
        ];
        places
            .into_iter()
            .find(|place| self.texts.contains_key(place.as_str()))
            .unwrap_or_else(|| panic!("{parent}: `mod {name};` has no file"))
    }

    fn mentions(&self) -> Vec<Mention> {
        let mut mentions = Vec::new();
        for (number, module) in self.modules.iter().enumerate() {
            for path in &module.paths {
                let found = self.resolve(number, path, 0);
                if let Some(Found::Item { file: to, name }) = found
                    && to != module.file
                {
                    let from = module.file.clone();
                    mentions.push(Mention { from, to, name });
                }
            }
        }
        mentions
    }

    /// Follows a path from a module to a module or to the file of an item. What stands behind an
    /// item, such as a method or a variant, belongs to the item. A module's name that the reader
    /// has not seen defined, as a macro defines it, belongs to the module.
    fn resolve(&self, from: usize, path: &[String], depth: usize) -> Option<Found> {
        let (first, mut rest) = path.split_first()?;
        let mut found = match first.as_str() {
            "crate" => Found::Module(0),
            "self" => Found::Module(from),
            "super" => Found::Module(self.modules[from].parent),
            name => self.look_up(from, name, !rest.is_empty(), depth)?,
        };
        while let (Found::Module(module), Some((name, behind))) = (&found, rest.split_first()) {
            let module = *module;
            rest = behind;
            found = match name.as_str() {
                "self" => Found::Module(module),
                "super" => Found::Module(self.modules[module].parent),
                name => self
                    .look_up(module, name, !rest.is_empty(), depth)
                    .unwrap_or_else(|| self.item_of(module, name)),
            };
        }
        Some(found)
    }

    fn item_of(&self, module: usize, name: &str) -> Found {
        Found::Item {
            file: self.modules[module].file.clone(),
            name: name.to_owned(),
        }
    }

    /// Returns what a name means in a module. If a path goes on behind the name, it is a module
    /// rather than a function.
    fn look_up(&self, module: usize, name: &str, goes_on: bool, depth: usize) -> Option<Found> {
        if depth > 8 {
            return None; // Two globs that name each other.
        }
        let own = &self.modules[module];
        let mut found: Vec<Found> = Vec::new();
        for meaning in own.scope.get(name).into_iter().flatten() {
            match meaning {
                Meaning::Item => found.push(self.item_of(module, name)),
                Meaning::Module(child) => found.push(Found::Module(*child)),
                Meaning::Import(path) => found.extend(self.resolve(module, path, depth + 1)),
            }
        }
        if found.is_empty() && !own.scope.contains_key(name) {
            for glob in &own.globs {
                if let Some(Found::Module(other)) = self.resolve(module, glob, depth + 1) {
                    found.extend(self.look_up(other, name, goes_on, depth + 1));
                }
            }
        }
        let wanted = found
            .iter()
            .position(|found| matches!(found, Found::Module(_)) == goes_on);
        (!found.is_empty()).then(|| found.swap_remove(wanted.unwrap_or(0)))
    }
}

impl Module {
    fn define(&mut self, name: String, meaning: Meaning) {
        self.scope.entry(name).or_default().push(meaning);
    }
}

/// Reads the tokens of one module.
struct Reader<'a> {
    module: &'a mut Module,
    /// The modules that this one declares, and the bodies that stand here.
    children: &'a mut Vec<(String, Option<TokenStream>)>,
}

impl Reader<'_> {
    /// Reads tokens that are the module's items or, inside a group, the code of one of them.
    fn read(&mut self, tokens: TokenStream, items: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            at = match &tokens[at] {
                TokenTree::Group(group) if is_attribute(&tokens, at) => {
                    let text = group.stream().to_string();
                    if text.replace(' ', "") == "cfg(test)" {
                        end_of_item(&tokens, at + 1)
                    } else {
                        if !text.starts_with("doc") {
                            self.read_attribute(group);
                        }
                        at + 1
                    }
                }
                TokenTree::Group(group) => {
                    self.read(group.stream(), false);
                    at + 1
                }
                TokenTree::Ident(word) if word == "use" && !is_punct(&tokens, at + 1, '<') => {
                    self.read_use(&tokens, at)
                }
                TokenTree::Ident(word) if items => {
                    self.read_item(&word.to_string(), &tokens, at);
                    if word == "mod" {
                        at + 3
                    } else {
                        self.read_path(&tokens, at)
                    }
                }
                TokenTree::Ident(_) => self.read_path(&tokens, at),
                TokenTree::Punct(_) | TokenTree::Literal(_) => at + 1,
            };
        }
    }

    /// Notes what an item defines, if a keyword of an item stands at `at`.
    fn read_item(&mut self, keyword: &str, tokens: &[TokenTree], at: usize) {
        let name_at = match keyword {
            "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "mod" => at + 1,
            "macro_rules" => at + 2,
            _ => return,
        };
        let Some(name) = word_at(tokens, name_at) else {
            return;
        };
        if keyword != "mod" {
            self.module.define(name, Meaning::Item);
        } else if let Some(TokenTree::Group(body)) = tokens.get(at + 2) {
            self.children.push((name, Some(body.stream())));
        } else {
            self.children.push((name, None));
        }
    }

    /// Reads a path from its first word and returns where it ends. Fields, methods, lifetimes and
    /// names that are defined here are no paths.
    fn read_path(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        let before = |back: usize, c: char| at >= back && is_punct(tokens, at - back, c);
        let is_member = before(1, '.') && !before(2, '.');
        let is_behind = before(1, ':') && before(2, ':');
        let is_named_here = at > 0 && word_at(tokens, at - 1).is_some_and(|word| word == "fn");
        let mut path: Names = word_at(tokens, at).into_iter().collect();
        let mut end = at + 1;
        while is_punct(tokens, end, ':') && is_punct(tokens, end + 1, ':') {
            let Some(next) = word_at(tokens, end + 2) else {
                break;
            };
            path.push(next);
            end += 3;
        }
        let is_label = path.len() == 1 && is_punct(tokens, end, ':');
        if !(is_member || is_behind || is_named_here || is_label || before(1, '\'')) {
            self.module.paths.push(path);
        }
        end
    }

    /// Reads an attribute. A text in it may be the path of a function or, as serde's `with`, of a
    /// module with a function `serialize`.
    fn read_attribute(&mut self, group: &Group) {
        self.read(group.stream(), false);
        for token in group.stream() {
            match token {
                TokenTree::Group(inner) => self.read_attribute(&inner),
                TokenTree::Literal(text) if text.to_string().contains("::") => {
                    let text = text.to_string();
                    let path = text.trim_matches('"').split("::");
                    let path = path.chain(["serialize"]).map(str::to_owned);
                    self.module.paths.push(path.collect());
                }
                _ => {}
            }
        }
    }

    /// Reads a `use` declaration and returns where it ends.
    fn read_use(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        let end = (at..tokens.len())
            .find(|at| is_punct(tokens, *at, ';'))
            .unwrap_or(tokens.len());
        let is_reexport = at > 0
            && match &tokens[at - 1] {
                TokenTree::Ident(word) => word == "pub",
                TokenTree::Group(group) => group.delimiter() == Delimiter::Parenthesis,
                _ => false,
            };
        self.read_tree(&tokens[at + 1..end], &[], is_reexport);
        end + 1
    }

    /// Reads `a::{b, c as d, e::*}` behind a prefix.
    fn read_tree(&mut self, tokens: &[TokenTree], prefix: &[String], is_reexport: bool) {
        let mut path = prefix.to_vec();
        let mut name = None;
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    name = Some(word_at(tokens, at + 1).unwrap_or_default());
                    break;
                }
                TokenTree::Ident(word) if word == "self" && !path.is_empty() => {}
                TokenTree::Ident(word) => path.push(word.to_string()),
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for tree in inner.split(|token| token.to_string() == ",") {
                        self.read_tree(tree, &path, is_reexport);
                    }
                    return;
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' => {
                    self.module.globs.push(path);
                    return;
                }
                _ => {}
            }
        }
        let Some(name) = name.or_else(|| path.last().cloned()) else {
            return; // Behind a trailing comma.
        };
        if !is_reexport {
            self.module.paths.push(path.clone());
        }
        self.module.define(name, Meaning::Import(path));
    }
}

fn word_at(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at)? {
        TokenTree::Ident(word) => Some(word.to_string()),
        _ => None,
    }
}

fn is_punct(tokens: &[TokenTree], at: usize, c: char) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == c)
}

/// Does the group at `at` stand behind `#` or `#!`?
fn is_attribute(tokens: &[TokenTree], at: usize) -> bool {
    let inner = at > 1 && is_punct(tokens, at - 1, '!') && is_punct(tokens, at - 2, '#');
    inner || (at > 0 && is_punct(tokens, at - 1, '#'))
}

/// Returns where the item ends that begins at `at`: behind its `;` or its body.
fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let is_use = (at..tokens.len()).find_map(|at| word_at(tokens, at).filter(|word| word != "pub"));
    let is_use = is_use.is_some_and(|word| word == "use");
    let end = (at..tokens.len()).find(|at| {
        let is_body = matches!(&tokens[*at], TokenTree::Group(group)
            if group.delimiter() == Delimiter::Brace);
        is_punct(tokens, *at, ';') || (is_body && !is_use)
    });
    end.map_or(tokens.len(), |end| end + 1)
}
