//! The contents of a tenants file after all checks.

use std::time::Duration;

use super::keys::KeyHash;
use super::tenant::Deadlines;
use crate::engine::TenantPolicy;

/// The limits of a tenant whose table does not set its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// The deadlines of its requests.
    pub deadlines: Deadlines,
    /// The number of its requests that may wait.
    pub max_queued: u32,
    /// The predicted machine time of its requests that wait.
    pub max_queued_time: Duration,
}

/// A system message whose keys and values several tenants share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicText {
    /// Its name in the file.
    pub name: String,
    /// The system message.
    pub system: String,
}

/// A `[[tenant]]` table. An entry without keys is a tenant that the file no longer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TenantEntry {
    pub(super) id: String,
    pub(super) keys: Vec<KeyHash>,
    pub(super) policy: TenantPolicy,
    pub(super) deadlines: Deadlines,
    pub(super) models: Option<Vec<String>>,
}

impl TenantEntry {
    /// Returns the entry of a tenant that the file no longer has: no key is valid for it, and no
    /// pages are reserved for it.
    pub(super) fn removed(&self) -> TenantEntry {
        let mut removed = self.clone();
        removed.keys.clear();
        removed.policy.guaranteed_pages = 0;
        removed
    }

    /// Returns whether the file has this tenant.
    pub(super) fn is_present(&self) -> bool {
        !self.keys.is_empty()
    }
}
