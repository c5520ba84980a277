//! Reads the tenants file.
//!
//! Invariant: no error repeats anything from the file that could be a key or its hash.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;

use super::fault::{Fault, FileError, fault};
use super::keys::KeyHash;
use super::table::{Defaults, KeyDigits, PublicText, SeenTables, TenantEntry, TenantTable};
use super::tenant::check_id;

/// The longest name of an unknown field that an error repeats, in bytes, with its quotes.
const MAX_FIELD_BYTES: usize = 32;

/// The checked contents of a tenants file.
#[derive(Debug)]
pub(super) struct FileContents {
    pub(super) admin: Vec<KeyHash>,
    pub(super) tenants: Vec<TenantEntry>,
    pub(super) public: Vec<PublicText>,
}

/// Reads and checks the file at `path`.
pub(super) fn read(path: &Path, defaults: &Defaults) -> Result<FileContents, FileError> {
    let text =
        fs::read_to_string(path).map_err(|error| FileError::whole(path, error.to_string()))?;
    parse(&text, defaults).map_err(|fault| FileError::at(path, &text, fault))
}

/// Reads the hashes of the operator's keys from a file that has nothing else.
pub(super) fn read_admin(path: &Path) -> Result<Vec<KeyHash>, FileError> {
    let text =
        fs::read_to_string(path).map_err(|error| FileError::whole(path, error.to_string()))?;
    parse_admin(&text).map_err(|fault| FileError::at(path, &text, fault))
}

fn parse_admin(text: &str) -> Result<Vec<KeyHash>, Fault> {
    let file: AdminToml = toml::from_str(text).map_err(|error| Fault {
        at: error.span(),
        why: without_values(error.message()),
    })?;
    SeenTables::new(text, &[]).add_keys(&file.admin.key_sha256)
}

fn parse(text: &str, defaults: &Defaults) -> Result<FileContents, Fault> {
    let file: TenantsToml = toml::from_str(text).map_err(|error| Fault {
        at: error.span(),
        why: without_values(error.message()),
    })?;
    if file.tenant.is_empty() {
        let why = "the file has no [[tenant]], so nobody could use the server; `sterna keygen ID` \
                   prints one"
            .into();
        return Err(Fault { at: None, why });
    }
    let mut public: Vec<PublicText> = Vec::new();
    for PrefixTable { name, system } in file.public_prefix {
        check_id(name.get_ref()).map_err(|why| fault(name.span(), why))?;
        if public.iter().any(|known| known.name == *name.get_ref()) {
            let why = format!(
                "the public prefix `{}` is already defined; rename this one",
                name.get_ref()
            );
            return Err(fault(name.span(), why));
        }
        let name = name.into_inner();
        public.push(PublicText { name, system });
    }
    let mut seen = SeenTables::new(text, &public);
    let admin = file.admin.map(|admin| seen.add_keys(&admin.key_sha256));
    let admin = admin.transpose()?.unwrap_or_default();
    let tables = file.tenant.into_iter();
    let tenants = tables
        .map(|table| table.entry(&mut seen, defaults))
        .collect::<Result<_, _>>()?;
    Ok(FileContents {
        admin,
        tenants,
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
    let given = if is_name { given } else { what.trim_end() };
    format!("{given}, expected {expected}")
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TenantsToml {
    admin: Option<AdminTable>,
    tenant: Vec<TenantTable>,
    public_prefix: Vec<PrefixTable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdminToml {
    admin: AdminTable,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdminTable {
    key_sha256: Spanned<KeyDigits>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefixTable {
    name: Spanned<String>,
    system: String,
}
