//! `sterna keygen ID`: a new key, told once.

use std::error::Error;
use std::io::{self, Write};

use super::file::check_tenant;
use super::keys::{KeyHash, hex};

/// Draws a key of 256 bits from the system's generator. The key goes to `told`, and nowhere else; the lines of the tenants file with its
/// hash go to `lines`, so that they can be appended to the file, whose last line may have no end.
///
/// # Errors
/// When `id` can't be a tenant's, the system has no randomness, or nobody reads what is written.
pub fn keygen(id: &str, mut told: impl Write, mut lines: impl Write) -> Result<(), Box<dyn Error>> {
    check_tenant(id)?;
    let mut bits = [0; 32];
    getrandom::fill(&mut bits)
        .map_err(|error| io::Error::other(format!("no randomness: {error}")))?;
    let key = format!("sk-{}", hex(&bits));
    let hash = KeyHash::of(key.as_bytes()).to_hex();
    write!(
        lines,
        "\n[[tenant]]\nid = \"{id}\"\nkey_sha256 = \"{hash}\"\n"
    )?;
    lines.flush()?;
    writeln!(
        told,
        "The key of {id}, shown this once (the server keeps its hash only):\n{key}"
    )?;
    Ok(())
}
