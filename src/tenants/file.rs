//! The tenants file: TOML in, checked tables out.
//!
//! Invariant: whatever is wrong is named with its line, and nothing that could be a key or its hash is repeated.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::table::{Known, TenantTable};
use super::{Defaults, Member};
use crate::engine::PublicPrefix;

const MOST_ID_BYTES: usize = 64;
/// In metrics, all who have no series of their own, and whoever needs no key.
const RESERVED: [&str; 2] = ["other", "default"];
/// Bytes of an unknown field's name, quotes included, that are repeated.
const LONGEST_FIELD: usize = 32;

/// What is wrong with a tenants file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    path: PathBuf,
    line: Option<usize>,
    why: String,
}

impl FileError {
    /// About no line of its own.
    pub(super) fn whole(path: &Path, why: impl Into<String>) -> FileError {
        FileError {
            path: path.to_owned(),
            line: None,
            why: why.into(),
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileError { path, line, why } = self;
        match line {
            Some(line) => write!(f, "{}, line {line}: {why}", path.display()),
            None => write!(f, "{}: {why}", path.display()),
        }
    }
}

impl std::error::Error for FileError {}

/// A text that several tenants' conversations begin with, and whose keys and values they share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicText {
    /// Its name in the file.
    pub name: String,
    /// The system message.
    pub system: String,
}

/// A file's tables.
#[derive(Debug)]
pub(super) struct Listing {
    pub(super) members: Vec<Member>,
    pub(super) public: Vec<PublicText>,
}

/// Reads and checks the file at `path`.
pub(super) fn read(path: &Path, defaults: &Defaults) -> Result<Listing, FileError> {
    let text =
        fs::read_to_string(path).map_err(|error| FileError::whole(path, error.to_string()))?;
    parse(&text, defaults).map_err(|fault| FileError {
        path: path.to_owned(),
        line: fault.at.map(|at| line(&text, at.start)),
        why: fault.why,
    })
}

/// # Errors
/// When `id` is no name for a tenant; the text says what is.
pub(super) fn check_id(id: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=MOST_ID_BYTES).contains(&id.len()) && id.chars().all(fits) {
        return Ok(());
    }
    Err(format!(
        "a name is 1 to {MOST_ID_BYTES} letters, digits, `.`, `_` or `-`"
    ))
}

/// # Errors
/// As `check_id`; also for the names that metrics use for tenants without series, or keys, of their own.
pub(super) fn check_tenant(id: &str) -> Result<(), String> {
    check_id(id)?;
    match RESERVED.contains(&id) {
        true => Err(format!("`{id}` is a name that the metrics use themselves")),
        false => Ok(()),
    }
}

/// Serde's complaint without what the file says where it should say something else: that may be a key. A field's name stays if it
/// looks like one.
fn without_values(message: &str) -> String {
    let Some((given, expected)) = message.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    let Some(quote) = given.find(['`', '"']) else {
        return message.to_owned();
    };
    let (what, quoted) = given.split_at(quote);
    let is_name = what == "unknown field "
        && quoted.len() <= LONGEST_FIELD
        && quoted
            .chars()
            .all(|c| c.is_ascii_lowercase() || "_`".contains(c));
    let name = if is_name { quoted } else { "" };
    let given = format!("{what}{name}");
    format!("{}, expected {expected}", given.trim_end())
}

/// The line of a byte, counted from 1.
pub(super) fn line(text: &str, byte: usize) -> usize {
    let before = &text.as_bytes()[..byte.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// What is wrong, and at which bytes.
pub(super) struct Fault {
    pub(super) at: Option<Range<usize>>,
    pub(super) why: String,
}

/// What is wrong with the value at `at`.
pub(super) fn fault<T>(at: &Spanned<T>, why: impl Into<String>) -> Fault {
    Fault {
        at: Some(at.span()),
        why: why.into(),
    }
}

fn parse(text: &str, defaults: &Defaults) -> Result<Listing, Fault> {
    let tables: Tables = toml::from_str(text).map_err(|error| Fault {
        at: error.span(),
        why: without_values(error.message()),
    })?;
    if tables.tenant.is_empty() {
        let why = "there is no [[tenant]], so nobody could come in".into();
        return Err(Fault { at: None, why });
    }
    let mut prefixes = HashMap::new();
    let mut public = Vec::new();
    for table in tables.public_prefix {
        check_id(table.name.get_ref()).map_err(|why| fault(&table.name, why))?;
        let place = PublicPrefix(public.len() as u32);
        let name = table.name.get_ref().clone();
        if prefixes.insert(name.clone(), place).is_some() {
            let why = format!("there is a public prefix `{name}` already");
            return Err(fault(&table.name, why));
        }
        let system = table.system;
        public.push(PublicText { name, system });
    }
    let mut known = Known {
        text,
        ids: HashMap::new(),
        keys: HashMap::new(),
        prefixes,
    };
    let members: Result<_, Fault> = tables
        .tenant
        .into_iter()
        .map(|table| table.member(&mut known, defaults))
        .collect();
    Ok(Listing {
        members: members?,
        public,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    #[serde(default)]
    tenant: Vec<TenantTable>,
    #[serde(default)]
    public_prefix: Vec<PrefixTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefixTable {
    name: Spanned<String>,
    system: String,
}
