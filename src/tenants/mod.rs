//! Who may use the server: the tenants of a file, their keys' hashes, and what each may have.
//!
//! Invariants: a key is never kept, only its hash, and neither is ever printed or logged; a tenant keeps its number for the life of the
//! process, also when the file loses it and finds it again; a file with a fault changes nothing.

mod file;
mod keygen;
mod keys;
mod table;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::engine::{Rate, TenantId, TenantPolicy, TenantsError};

pub use file::{FileError, PublicText};
pub use keygen::keygen;
pub use keys::{KeyHash, Tenants};

/// How long a request may take, from its arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadlines {
    /// To its first token.
    pub first_token: Option<Duration>,
    /// To its end.
    pub total: Option<Duration>,
}

/// The number of everybody, where nobody needs a key.
const ANYONE: TenantId = TenantId(0);

/// Whom a key belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name in the file.
    pub id: String,
    /// Its number in the engine.
    pub number: TenantId,
    /// Of its requests.
    pub deadlines: Deadlines,
    /// The models it may use, each by any of its names; all of them where there is no list.
    pub models: Option<Vec<String>>,
    /// Its rate of requests.
    pub requests: Option<Rate>,
    /// Its rate of tokens.
    pub tokens: Option<Rate>,
}

impl Tenant {
    /// Whether this is everybody, because nobody needs a key.
    pub fn is_anyone(&self) -> bool {
        self.number == ANYONE
    }

    /// Whether it may use a model that answers to the names for which `answers_to` holds.
    pub fn may_use(&self, answers_to: impl Fn(&str) -> bool) -> bool {
        listed(self.models.as_deref(), answers_to)
    }
}

/// Whether `models` leaves in a model that answers to these names.
fn listed(models: Option<&[String]>, answers_to: impl Fn(&str) -> bool) -> bool {
    models.is_none_or(|models| models.iter().any(|name| answers_to(name)))
}

/// What a tenant has whose table in the file says nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// Of its requests.
    pub deadlines: Deadlines,
    /// Its requests that may wait.
    pub max_queued: u32,
    /// The machine time that they may come to.
    pub max_queued_time: Duration,
}

/// One tenant of a file. Without keys it is one that the file has lost.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    id: String,
    keys: Vec<KeyHash>,
    policy: TenantPolicy,
    deadlines: Deadlines,
    models: Option<Vec<String>>,
}

/// The tenants of one file. Those that it has lost since the start stay as members without keys, so that what runs for them may end.
#[derive(Clone, Debug)]
pub struct Roster {
    path: PathBuf,
    defaults: Defaults,
    public: Vec<PublicText>,
    members: Vec<Member>, // The first has the number after `ANYONE`.
}

impl Roster {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// When it can't be read, or something in it is wrong; the text names the file and the line.
    pub fn open(path: &Path, defaults: Defaults) -> Result<Roster, FileError> {
        let listing = file::read(path, &defaults)?;
        Ok(Roster {
            path: path.to_owned(),
            defaults,
            public: listing.public,
            members: listing.members,
        })
    }

    /// Reads the file again: a roster in which known tenants have their old numbers.
    ///
    /// # Errors
    /// As `open`; also when the public prefixes have changed, which are fixed at the start.
    pub fn reread(&self) -> Result<Roster, FileError> {
        let listing = file::read(&self.path, &self.defaults)?;
        if listing.public != self.public {
            let why =
                "the public prefixes differ from those of the start; changing them takes a restart";
            return Err(FileError::whole(&self.path, why));
        }
        let mut members: Vec<Member> = self.members.iter().map(Member::lost).collect();
        let numbers: HashMap<String, usize> = (0..)
            .zip(&self.members)
            .map(|(place, member)| (member.id.clone(), place))
            .collect();
        for member in listing.members {
            match numbers.get(&member.id) {
                Some(&place) => members[place] = member,
                None => members.push(member),
            }
        }
        Ok(Roster {
            members,
            ..self.clone()
        })
    }

    /// The prefixes that tenants may share, in the order in which policies number them.
    pub fn public(&self) -> &[PublicText] {
        &self.public
    }

    /// The keys, and whom they belong to.
    pub fn tenants(&self) -> Tenants {
        Tenants::with_keys(self.numbered().flat_map(|(number, member)| {
            let tenant = Tenant {
                id: member.id.clone(),
                number,
                deadlines: member.deadlines,
                models: member.models.clone(),
                requests: member.policy.requests,
                tokens: member.policy.tokens,
            };
            let keys = member.keys.iter();
            keys.map(move |key| (*key, tenant.clone()))
        }))
    }

    /// The numbers and ids of all.
    pub fn names(&self) -> Vec<(u32, String)> {
        self.numbered()
            .map(|(number, member)| (number.0, member.id.clone()))
            .collect()
    }

    /// What each tenant may have.
    pub fn policies(&self) -> Vec<(TenantId, TenantPolicy)> {
        self.numbered()
            .map(|(number, member)| (number, member.policy.clone()))
            .collect()
    }

    /// The ids of those who may not use the model called `name`, which answers to the names for which `answers_to` holds. That is no
    /// fault: servers of other models may read the same file.
    ///
    /// # Errors
    /// When nobody may use it.
    pub fn shut_out(
        &self,
        name: &str,
        answers_to: impl Fn(&str) -> bool,
    ) -> Result<Vec<&str>, FileError> {
        let present = || self.members.iter().filter(|member| !member.keys.is_empty());
        let out: Vec<&str> = present()
            .filter(|member| !listed(member.models.as_deref(), &answers_to))
            .map(|member| member.id.as_str())
            .collect();
        if out.len() < present().count() {
            return Ok(out);
        }
        let why = format!(
            "nobody may use `{name}`, the model of this server: every `models` leaves it out"
        );
        Err(FileError::whole(&self.path, why))
    }

    /// The scheduler's objection to `policies`, in the words of the file.
    pub fn explain(&self, error: TenantsError) -> FileError {
        let name = |tenant: TenantId| {
            let mut members = self.numbered();
            let found = members.find(|(number, _)| *number == tenant);
            found.map_or("", |(_, member)| &member.id)
        };
        let why = match error {
            TenantsError::Invalid(tenant) => format!(
                "the limits of tenant `{}` contradict each other",
                name(tenant)
            ),
            TenantsError::UnknownPrefix(tenant, _) => format!(
                "tenant `{}` names a public prefix that the engine does not have",
                name(tenant)
            ),
            TenantsError::TooManyGuaranteed { guaranteed, limit } => format!(
                "all `guaranteed_pages` together are {guaranteed}; there are {limit} pages to guarantee"
            ),
        };
        FileError::whole(&self.path, why)
    }

    fn numbered(&self) -> impl Iterator<Item = (TenantId, &Member)> {
        (1..).map(TenantId).zip(&self.members)
    }
}

impl Member {
    /// Nobody can come in as this tenant any more, and nothing is kept free for it.
    fn lost(&self) -> Member {
        let mut lost = self.clone();
        lost.keys.clear();
        lost.policy.guaranteed_pages = 0;
        lost
    }
}

#[cfg(test)]
mod tests;
