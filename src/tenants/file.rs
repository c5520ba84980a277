//! Reads the tenants file.
//!
//! Invariant: no error repeats anything from the file that could be a key or its hash.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::entry::{Defaults, PublicText, TenantEntry};
use super::fault::{Fault, FileError, fault};
use super::ids::check_id;
use super::table::{SeenTables, TenantTable};
use crate::engine::PublicPrefix;

/// The longest name of an unknown field that an error repeats, in bytes, with its quotes.
const MAX_FIELD_BYTES: usize = 32;

/// The checked contents of a tenants file.
#[derive(Debug)]
pub(super) struct FileContents {
    pub(super) tenants: Vec<TenantEntry>,
    pub(super) public: Vec<PublicText>,
}

/// Reads and checks the file at `path`.
pub(super) fn read(path: &Path, defaults: &Defaults) -> Result<FileContents, FileError> {
    let text =
        fs::read_to_string(path).map_err(|error| FileError::whole(path, error.to_string()))?;
    parse(&text, defaults).map_err(|fault| FileError::at(path, &text, fault))
}

fn parse(text: &str, defaults: &Defaults) -> Result<FileContents, Fault> {
    let file: TenantsToml = toml::from_str(text).map_err(|error| Fault {
        at: error.span(),
        why: without_values(error.message()),
    })?;
    if file.tenant.is_empty() {
        let why = "the file has no [[tenant]], so nobody could use the server; `sterna keygen ID` \
                   prints one";
        return Err(Fault {
            at: None,
            why: why.into(),
        });
    }
    let mut prefixes = HashMap::new();
    let mut public = Vec::new();
    for table in file.public_prefix {
        check_id(table.name.get_ref()).map_err(|why| fault(&table.name, why))?;
        let index = PublicPrefix(public.len() as u32);
        let name = table.name.get_ref().clone();
        if prefixes.insert(name.clone(), index).is_some() {
            let why = format!("the public prefix `{name}` is already defined; rename this one");
            return Err(fault(&table.name, why));
        }
        let system = table.system;
        public.push(PublicText { name, system });
    }
    let mut seen = SeenTables::new(text, prefixes);
    let tenants: Result<_, Fault> = file
        .tenant
        .into_iter()
        .map(|table| table.entry(&mut seen, defaults))
        .collect();
    Ok(FileContents {
        tenants: tenants?,
        public,
    })
}

/// Removes from serde's message the values of the file, because they may be keys. The name of an
/// unknown field stays if it looks like a name.
fn without_values(message: &str) -> String {
    let Some((given, expected)) = message.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    let Some(quote) = given.find(['`', '"']) else {
        return message.to_owned();
    };
    let (what, quoted) = given.split_at(quote);
    let is_name = what == "unknown field "
        && quoted.len() <= MAX_FIELD_BYTES
        && quoted
            .chars()
            .all(|c| c.is_ascii_lowercase() || "_`".contains(c));
    let name = if is_name { quoted } else { "" };
    let given = format!("{what}{name}");
    format!("{}, expected {expected}", given.trim_end())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantsToml {
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
