//! The hashes of keys.
//!
//! A key is 256 random bits, so one plain SHA-256 protects it as well as a slow hash would. A slow
//! hash would let anyone keep the server busy.

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

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

    /// Writes 64 hexadecimal digits.
    pub(super) fn to_hex(self) -> String {
        hex(&self.0)
    }

    /// Returns the index of this hash among `hashes`. Compares every hash in full, even after the
    /// match, so that the time of the search does not depend on the keys.
    pub(super) fn position<'a>(
        &self,
        hashes: impl IntoIterator<Item = &'a KeyHash>,
    ) -> Option<usize> {
        let mut found = u64::MAX;
        for (index, hash) in (0..).zip(hashes) {
            found.conditional_assign(&index, hash.0.ct_eq(&self.0));
        }
        usize::try_from(found).ok().filter(|_| found != u64::MAX)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash")
    }
}

/// Writes two hexadecimal digits for each byte.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
