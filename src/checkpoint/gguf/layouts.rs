//! Which layout a type number means in a file.
//!
//! Several layouts share a number. Their blocks differ in size, so the distance between tensors
//! tells them apart. `general.file_type` tells nothing.

use std::collections::BTreeMap;

use super::header::{Header, TensorEntry};
use super::type_numbers::candidates;
use crate::checkpoint::error::LoadError;
use crate::checkpoint::tensor::Storage;

/// Returns the storage of every type number that occurs in `headers`, and why there is none for
/// others.
pub(super) fn storages(headers: &[Header]) -> (BTreeMap<u32, Storage>, Vec<LoadError>) {
    let mut by_type: BTreeMap<u32, Vec<&TensorEntry>> = BTreeMap::new();
    for entry in headers.iter().flat_map(|header| &header.tensors) {
        by_type.entry(entry.type_number).or_default().push(entry);
    }
    let (mut storages, mut problems) = (BTreeMap::new(), Vec::new());
    for (type_number, entries) in by_type {
        match storage_of(type_number, &entries) {
            Ok(storage) => drop(storages.insert(type_number, storage)),
            Err((name, why)) => problems.push(LoadError::tensor(&name, why)),
        }
    }
    (storages, problems)
}

/// Returns the one layout that fits all `entries`, which are the tensors of this type number.
///
/// # Errors
/// If the number is unknown, or the sizes fit no layout or more than one. The error names a tensor.
fn storage_of(type_number: u32, entries: &[&TensorEntry]) -> Result<Storage, (String, String)> {
    let about = |entry: &TensorEntry, why: &str| {
        let problem = format!("type number {type_number}: {why}");
        (entry.name.clone(), problem)
    };
    let candidates = candidates(type_number).map_err(|why| about(entries[0], why))?;
    let fitting = |storage: &&Storage| entries.iter().all(|entry| entry.fits(**storage));
    let mut found = candidates.iter().filter(fitting);
    if let (Some(storage), None) = (found.next(), found.next()) {
        return Ok(*storage);
    }
    let misfit = |entry: &&&TensorEntry| !candidates.iter().any(|one| entry.fits(*one));
    let entry = entries.iter().find(misfit).unwrap_or(&entries[0]);
    let (rows, columns) = entry.rows_and_columns();
    let tried = candidates
        .iter()
        .map(|storage| match storage.tensor_bytes(rows, columns) {
            Some(bytes) => format!("{} needs {bytes}", storage.name()),
            None => format!("{} cannot store this shape", storage.name()),
        });
    let tried = tried.collect::<Vec<_>>().join(", ");
    let room = entry.room();
    let is_sparse = room as u128 * 256 == rows as u128 * columns as u128 * 42;
    let hint = match (type_number, is_sparse) {
        (42, true) => " (this size is that of a 3:4-sparse format, which is not supported)",
        _ => "",
    };
    let of_others = |storage: &&Storage| {
        let mut others = entries
            .iter()
            .filter(|other| !std::ptr::eq(**other, *entry));
        others.all(|other| other.fits(**storage))
    };
    let sizes = candidates.iter().filter(of_others);
    let needed = sizes
        .filter_map(|storage| storage.tensor_bytes(rows, columns))
        .min();
    let cut = match needed {
        Some(needed) if entry.is_last && needed > room => format!(
            "; or the file is cut: its tensors need {} bytes, and it has {}",
            entry.bytes.start + needed,
            entry.bytes.end
        ),
        _ => String::new(),
    };
    let why =
        format!("it has room for {room} bytes, which fits no known layout: {tried}{hint}{cut}");
    Err(about(entry, &why))
}
