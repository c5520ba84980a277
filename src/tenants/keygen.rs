//! `sterna keygen ID` and `sterna keygen --admin`: make a key and show it once.

use std::error::Error;
use std::io::Write;

use super::keys::{KeyHash, hex};
use super::tenant::check_tenant_id;

/// Makes a key of 256 bits from the system's random generator. Writes the key to `terminal` and
/// nowhere else. Writes a table for the tenants file, with the hash of the key, to `table`. Without
/// an `id` the key is the operator's.
///
/// The table starts with an empty line, so that it can be appended to a file whose last line has no
/// line break.
///
/// # Errors
/// If `id` is not a valid id, if the system has no randomness, or if a write fails.
pub fn keygen(
    id: Option<&str>,
    mut terminal: impl Write,
    mut table: impl Write,
) -> Result<(), Box<dyn Error>> {
    let (owner, header) = match id {
        Some(id) => {
            check_tenant_id(id)?;
            (id, format!("[[tenant]]\nid = \"{id}\""))
        }
        None => ("the admin", "[admin]".to_owned()),
    };
    let mut bits = [0; 32];
    getrandom::fill(&mut bits).map_err(|error| format!("the system has no randomness: {error}"))?;
    let key = format!("sk-{}", hex(&bits));
    let hash = KeyHash::of(key.as_bytes()).to_hex();
    write!(table, "\n{header}\nkey_sha256 = \"{hash}\"\n")?;
    table.flush()?;
    writeln!(
        terminal,
        "The key of {owner}. Save it now: it is shown only once, and the server keeps only its \
         hash.\n{key}"
    )?;
    Ok(())
}
