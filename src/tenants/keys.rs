//! Keys and whom they belong to.
//!
//! Invariant: how long a search takes tells nothing about the keys. A key is 256 random bits, so one plain SHA-256 of it is as good as
//! a slow hash, which would let anybody keep the server busy.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::{ANYONE, Deadlines, Tenant};

/// The SHA-256 of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Of this key.
    pub fn of(key: &[u8]) -> KeyHash {
        KeyHash(Sha256::digest(key).into())
    }

    /// From 64 hexadecimal digits; `None` if they are something else.
    pub fn from_hex(digits: &str) -> Option<KeyHash> {
        let digits: Vec<u8> = digits
            .chars()
            .map(|digit| digit.to_digit(16).map(|value| value as u8))
            .collect::<Option<_>>()?;
        let digits: [u8; 64] = digits.try_into().ok()?;
        let (pairs, _) = digits.as_chunks::<2>();
        let mut hash = [0; 32];
        for (byte, [high, low]) in hash.iter_mut().zip(pairs) {
            *byte = high << 4 | low;
        }
        Some(KeyHash(hash))
    }

    /// As 64 hexadecimal digits.
    pub(super) fn to_hex(self) -> String {
        hex(&self.0)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

/// Two digits for each byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Who may come in.
#[derive(Clone, Debug)]
pub struct Tenants {
    keys: Vec<(KeyHash, Arc<Tenant>)>,
    anyone: Option<Arc<Tenant>>, // When there are no keys.
}

impl Tenants {
    /// Everybody, with or without a key, as one tenant.
    pub fn anyone(deadlines: Deadlines) -> Tenants {
        let anyone = Tenant {
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

    /// Those who hold one of these keys.
    pub fn with_keys(keys: impl IntoIterator<Item = (KeyHash, Tenant)>) -> Tenants {
        let shared = |(key, tenant)| (key, Arc::new(tenant));
        Tenants {
            keys: keys.into_iter().map(shared).collect(),
            anyone: None,
        }
    }

    /// Whose `key` this is. Every hash is compared to its end, also after the right one.
    pub fn find(&self, key: Option<&[u8]>) -> Option<Arc<Tenant>> {
        if let Some(anyone) = &self.anyone {
            return Some(Arc::clone(anyone));
        }
        let presented = KeyHash::of(key?);
        let mut found = u64::MAX;
        for (place, (hash, _)) in (0..).zip(&self.keys) {
            found.conditional_assign(&place, hash.0.ct_eq(&presented.0));
        }
        let (_, tenant) = self.keys.get(usize::try_from(found).ok()?)?;
        Some(Arc::clone(tenant))
    }
}
