//! Finds the tenant that a key belongs to.
//!
//! Invariant: the time of a search does not depend on the keys.

use std::sync::Arc;

use super::keys::KeyHash;
use super::tenant::{Deadlines, Tenant};

/// The tenants that may use the server now.
#[derive(Clone, Debug)]
pub struct Tenants {
    keys: Vec<(KeyHash, Arc<Tenant>)>,
    anyone: Option<Arc<Tenant>>, // Set if the server needs no keys.
}

impl Tenants {
    /// Accepts every client, with or without a key, as one tenant.
    pub fn anyone(deadlines: Deadlines) -> Tenants {
        Tenants {
            keys: Vec::new(),
            anyone: Some(Arc::new(Tenant::anyone(deadlines))),
        }
    }

    /// Accepts the holders of these keys.
    pub(super) fn with_keys(keys: impl IntoIterator<Item = (KeyHash, Tenant)>) -> Tenants {
        let shared = |(key, tenant)| (key, Arc::new(tenant));
        Tenants {
            keys: keys.into_iter().map(shared).collect(),
            anyone: None,
        }
    }

    /// Returns the tenant that `key` belongs to.
    pub fn find(&self, key: Option<&[u8]>) -> Option<Arc<Tenant>> {
        if let Some(anyone) = &self.anyone {
            return Some(Arc::clone(anyone));
        }
        let index = KeyHash::of(key?).position(self.keys.iter().map(|(hash, _)| hash))?;
        Some(Arc::clone(&self.keys[index].1))
    }
}
