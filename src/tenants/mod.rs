//! The tenants of a server: who may use it, with which keys, and within which limits.
//!
//! `README.md` beside this file is the operator's reference of the tenants file.
//!
//! Invariant: only the hash of a key is kept. Neither a key nor a hash is ever printed or logged.
//!
//! Invariant: a tenant keeps its number for the life of the process, even if the file loses the
//! tenant for a time.
//!
//! Invariant: a file with a fault changes nothing.

mod admin;
mod fault;
mod file;
mod keygen;
mod keys;
mod roster;
mod table;
mod tenant;

pub use admin::anyone_and_admin;
pub use fault::FileError;
pub use keygen::keygen;
pub use keys::{KeyHolder, Tenants};
pub use roster::Roster;
pub use table::{Defaults, PublicText};
pub use tenant::{Deadlines, Tenant};

#[cfg(test)]
mod tests;
