//! The hashes of keys, and the search for the holder of a key.
//!
//! Invariant: the time of a search does not depend on the keys.
//!
//! A key is 256 random bits, so one plain SHA-256 protects it as well as a slow hash would. A slow
//! hash would let anyone keep the server busy.

use std::array;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::tenant::{ANYONE, Deadlines, Tenant};

/// The SHA-256 of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KeyHash([u8; 32]);

impl KeyHash {
    /// Returns the hash of `key`.
    pub(super) fn of(key: &[u8]) -> KeyHash {
        KeyHash(Sha256::digest(key).into())
    }

    /// Reads 64 hexadecimal digits. Returns `None` if `digits` is something else.
    pub(super) fn from_hex(digits: &str) -> Option<KeyHash> {
        let digits = digits.chars().map(|digit| Some(digit.to_digit(16)? as u8));
        let digits: [u8; 64] = digits.collect::<Option<Vec<u8>>>()?.try_into().ok()?;
        let byte = |index| digits[2 * index] << 4 | digits[2 * index + 1];
        Some(KeyHash(array::from_fn(byte)))
    }

    /// Writes 64 hexadecimal digits.
    pub(super) fn to_hex(self) -> String {
        hex(&self.0)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

/// Writes two hexadecimal digits for each byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The holder of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyHolder {
    /// A tenant, who may use the model.
    Tenant(Arc<Tenant>),
    /// The operator, who may read the metrics and end requests.
    Admin,
}

/// The tenants that may use the server now, and the keys of its operator.
#[derive(Clone, Debug)]
pub struct Tenants {
    keys: Vec<(KeyHash, KeyHolder)>,
    anyone: Option<Arc<Tenant>>, // Set if the server needs no keys.
}

impl Tenants {
    /// Accepts every client, with or without a key, as one tenant.
    pub fn anyone(deadlines: Deadlines) -> Tenants {
        let anyone = Tenant {
            trusted: false,
            id: "default".into(),
            number: ANYONE,
            deadlines,
            models: None,
            requests: None,
            tokens: None,
        };
        Tenants {
            keys: Vec::new(),
            anyone: Some(Arc::new(anyone)),
        }
    }

    /// Accepts these keys of the operator too.
    pub(super) fn with_admin(mut self, keys: Vec<KeyHash>) -> Tenants {
        let keys = keys.into_iter().map(|key| (key, KeyHolder::Admin));
        self.keys.extend(keys);
        self
    }

    /// Returns whether the operator has a key.
    pub fn has_admin(&self) -> bool {
        self.keys
            .iter()
            .any(|(_, holder)| *holder == KeyHolder::Admin)
    }

    /// Accepts the holders of these keys.
    pub(super) fn with_keys(keys: impl Iterator<Item = (KeyHash, KeyHolder)>) -> Tenants {
        Tenants {
            keys: keys.collect(),
            anyone: None,
        }
    }

    /// Returns the tenant that `key` belongs to.
    pub fn find(&self, key: Option<&[u8]>) -> Option<Arc<Tenant>> {
        match self.holder(key)? {
            KeyHolder::Tenant(tenant) => Some(tenant),
            KeyHolder::Admin => None,
        }
    }

    /// Returns the holder of `key`. Compares every hash in full, even after the match. If the
    /// server needs no keys, every key belongs to anyone, except the operator's key.
    pub fn holder(&self, key: Option<&[u8]>) -> Option<KeyHolder> {
        let anyone = self.anyone.as_ref();
        self.known(key)
            .or_else(|| Some(KeyHolder::Tenant(Arc::clone(anyone?))))
    }

    fn known(&self, key: Option<&[u8]>) -> Option<KeyHolder> {
        let wanted = KeyHash::of(key?);
        let mut found = u64::MAX;
        for (index, (hash, _)) in (0..).zip(&self.keys) {
            found.conditional_assign(&index, hash.0.ct_eq(&wanted.0));
        }
        let (_, holder) = self.keys.get(usize::try_from(found).ok()?)?;
        Some(holder.clone())
    }
}
