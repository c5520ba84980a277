//! The operator's key on a server without tenants.

use std::path::Path;

use super::fault::FileError;
use super::file;
use super::keys::Tenants;
use super::tenant::Deadlines;

/// Accepts every client as one tenant, as [`Tenants::anyone`] does, and the operator with the key
/// whose hash is in the `[admin]` table of the file at `path`.
///
/// # Errors
/// If the file cannot be read, or has anything but an `[admin]` table.
pub fn anyone_and_admin(deadlines: Deadlines, path: &Path) -> Result<Tenants, FileError> {
    let keys = file::read_admin(path)?;
    Ok(Tenants::anyone(deadlines).with_admin(keys))
}
