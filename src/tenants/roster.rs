//! The tenants of one file, for the life of the process.
//!
//! Invariant: the index of an entry never changes, because it determines the tenant's number.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::fault::FileError;
use super::file;
use super::keys::{KeyHash, KeyHolder, Tenants};
use super::table::{Defaults, PublicText, TenantEntry};
use super::tenant::{Tenant, allows};
use crate::engine::{TenantId, TenantPolicy, TenantsError};

/// The tenants of one file. A tenant that the file has lost since the start stays as an entry
/// without keys, so that its running requests can finish.
#[derive(Clone, Debug)]
pub struct Roster {
    path: PathBuf,
    defaults: Defaults,
    admin: Vec<KeyHash>,
    public: Vec<PublicText>,
    entries: Vec<TenantEntry>, // The first has the number 1.
}

impl Roster {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// If the file cannot be read or has a fault. The error names the file and the line.
    pub fn open(path: &Path, defaults: Defaults) -> Result<Roster, FileError> {
        let contents = file::read(path, &defaults)?;
        Ok(Roster {
            path: path.to_owned(),
            defaults,
            admin: contents.admin,
            public: contents.public,
            entries: contents.tenants,
        })
    }

    /// Reads the file again. Known tenants keep their numbers.
    ///
    /// # Errors
    /// As for [`open`](Roster::open), and if the public prefixes have changed.
    pub fn reread(mut self) -> Result<Roster, FileError> {
        let contents = file::read(&self.path, &self.defaults)?;
        if contents.public != self.public {
            let why = "the public prefixes have changed; restart the server to use the new ones";
            return Err(FileError::whole(&self.path, why));
        }
        self.admin = contents.admin;
        self.entries.iter_mut().for_each(TenantEntry::remove);
        let ids = self.entries.iter().map(|entry| entry.id.clone());
        let indices: HashMap<String, usize> = ids.zip(0..).collect();
        for entry in contents.tenants {
            match indices.get(&entry.id) {
                Some(&index) => self.entries[index] = entry,
                None => self.entries.push(entry),
            }
        }
        Ok(self)
    }

    /// Returns the public prefixes in the order in which policies number them.
    pub fn public(&self) -> &[PublicText] {
        &self.public
    }

    /// Returns the keys that are valid now, with their holders.
    pub fn tenants(&self) -> Tenants {
        let admin = self.admin.iter().map(|key| (*key, KeyHolder::Admin));
        let tenants = self.numbered().flat_map(|(number, entry)| {
            let tenant = Arc::new(Tenant {
                id: entry.id.clone(),
                number,
                deadlines: entry.deadlines,
                models: entry.models.clone(),
                trusted: entry.trusted,
                requests: entry.policy.requests,
                tokens: entry.policy.tokens,
            });
            let keys = entry.keys.iter();
            keys.map(move |key| (*key, KeyHolder::Tenant(Arc::clone(&tenant))))
        });
        Tenants::with_keys(admin.chain(tenants))
    }

    /// Returns the numbers and ids of all tenants.
    pub fn names(&self) -> Vec<(TenantId, String)> {
        self.numbered()
            .map(|(number, entry)| (number, entry.id.clone()))
            .collect()
    }

    /// Returns the limits and shares of all tenants.
    pub fn policies(&self) -> Vec<(TenantId, TenantPolicy)> {
        self.numbered()
            .map(|(number, entry)| (number, entry.policy.clone()))
            .collect()
    }

    /// Returns the ids of the tenants that may not use the model `name`. `answers_to` tells whether
    /// a name is one of the model's names. Such tenants are not a fault: servers of other models
    /// may read the same file.
    ///
    /// # Errors
    /// If no tenant may use the model.
    pub fn excluded_from(
        &self,
        name: &str,
        answers_to: impl Fn(&str) -> bool,
    ) -> Result<Vec<&str>, FileError> {
        let present = || self.entries.iter().filter(|entry| !entry.keys.is_empty());
        let excluded: Vec<&str> = present()
            .filter(|entry| !allows(entry.models.as_deref(), &answers_to))
            .map(|entry| entry.id.as_str())
            .collect();
        if excluded.len() < present().count() {
            return Ok(excluded);
        }
        let why = format!(
            "no tenant may use `{name}`, the model of this server; add it to the `models` of a \
             tenant"
        );
        Err(FileError::whole(&self.path, why))
    }

    /// Explains why the scheduler rejects `policies`, in terms of the file.
    pub fn explain(&self, error: TenantsError) -> FileError {
        let id = |tenant: TenantId| {
            let found = self.numbered().find(|(number, _)| *number == tenant);
            found.map_or("", |(_, entry)| &entry.id)
        };
        let why = match error {
            TenantsError::Invalid(tenant) => format!(
                "the limits of tenant `{}` contradict each other",
                id(tenant)
            ),
            TenantsError::UnknownPrefix(tenant, _) => format!(
                "tenant `{}` names a public prefix that the engine does not have",
                id(tenant)
            ),
            TenantsError::TooManyGuaranteed { guaranteed, limit } => format!(
                "the `guaranteed_pages` of all tenants add up to {guaranteed}, but only {limit} \
                 pages can be guaranteed; lower some of them"
            ),
        };
        FileError::whole(&self.path, why)
    }

    fn numbered(&self) -> impl Iterator<Item = (TenantId, &TenantEntry)> {
        (1..).map(TenantId).zip(&self.entries)
    }
}
