//! The header of a GGUF file: metadata, and where each tensor is.
//!
//! Source: the GGUF specification, versions 2 and 3.

use std::ops::Range;

use super::metadata::Metadata;
use super::type_numbers;
use crate::checkpoint::cursor::Cursor;
use crate::checkpoint::error::{LoadError, LoadResult};
use crate::checkpoint::folder::{LFS_POINTER, LFS_PROBLEM};
use crate::checkpoint::tensor::{MAX_TENSORS, Storage};

/// The longest header. A vocabulary of 262,144 tokens with its merges has about 15 MB.
const MAX_HEADER_BYTES: usize = 48 << 20;

/// The alignment of tensors if the file does not state another one.
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: usize = 4096;

/// The header of one file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: Metadata,
    /// In the order of their offsets.
    pub(super) tensors: Vec<TensorEntry>,
}

/// Where a tensor is, and what the file says of it.
#[derive(Clone, Debug)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    /// The sizes, the outermost first. The file has them the other way round.
    pub(super) shape: Vec<usize>,
    pub(super) type_number: u32,
    /// The bytes of the file up to the next tensor, or to the end.
    pub(super) bytes: Range<usize>,
    alignment: usize,
    /// Whether the file ends after it.
    pub(super) is_last: bool,
}

impl TensorEntry {
    /// Returns the product of all sizes but the last, and the last.
    pub(super) fn rows_and_columns(&self) -> (usize, usize) {
        rows_and_columns(&self.shape)
    }

    /// Returns the bytes up to the next tensor, or to the end of the file.
    pub(super) fn room(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the tensor, stored so, and the padding after it take exactly its room.
    pub(super) fn fits(&self, storage: Storage) -> bool {
        let (rows, columns) = self.rows_and_columns();
        let bytes = storage.tensor_bytes(rows, columns);
        bytes.is_some_and(|bytes| bytes <= self.room() && self.room() - bytes < self.alignment)
    }
}

fn rows_and_columns(shape: &[usize]) -> (usize, usize) {
    match shape.split_last() {
        Some((columns, rows)) => (rows.iter().product(), *columns),
        None => (1, 1),
    }
}

impl Header {
    /// Reads the header of a file from the `bytes` of the whole file.
    pub(super) fn read(file: &str, bytes: &[u8]) -> LoadResult<Header> {
        let error = |why: String| LoadError::file(file, why);
        let mut cursor = Cursor::new(&bytes[..bytes.len().min(MAX_HEADER_BYTES)]);
        check_version(&mut cursor).map_err(error)?;
        let tensors = cursor.u64("tensor count").map_err(error)?;
        let keys = cursor.u64("metadata count").map_err(error)?;
        if tensors > MAX_TENSORS as u64 {
            let problem = format!("{tensors} tensors are too many; the limit is {MAX_TENSORS}");
            return Err(error(problem));
        }
        let metadata = Metadata::read(file, &mut cursor, keys)?;
        let alignment = alignment(&metadata)?;
        let entries = (0..tensors).map(|index| read_entry(&mut cursor, index));
        let entries = entries.collect::<Result<Vec<_>, String>>().map_err(error)?;
        let data = cursor.position().next_multiple_of(alignment);
        let tensors = place(entries, data, bytes.len(), alignment);
        Ok(Header {
            metadata,
            tensors: tensors.map_err(|(name, why)| LoadError::tensor(&name, why))?,
        })
    }
}

fn check_version(cursor: &mut Cursor<'_>) -> Result<(), String> {
    let magic = cursor.take("magic")?;
    if LFS_POINTER.starts_with(&magic) {
        return Err(LFS_PROBLEM.to_owned());
    }
    if magic != *b"GGUF" {
        return Err("not a GGUF file: it does not begin with \"GGUF\"".to_owned());
    }
    match cursor.u32("version")? {
        2 | 3 => Ok(()),
        1 => Err("GGUF version 1 is not supported; convert the model again".to_owned()),
        version if (1..=3).contains(&version.swap_bytes()) => {
            Err("the file is big-endian; only little-endian files are supported".to_owned())
        }
        version => Err(format!(
            "GGUF version {version} is not supported; 2 and 3 are"
        )),
    }
}

fn alignment(metadata: &Metadata) -> LoadResult<usize> {
    let key = "general.alignment";
    let alignment = metadata.size(key)?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
        return Ok(alignment);
    }
    let problem = format!("must be a power of two up to {MAX_ALIGNMENT}; got {alignment}");
    Err(metadata.error(key, problem))
}

/// A tensor as the header describes it. The offset counts from the begin of the data.
struct RawEntry {
    name: String,
    shape: Vec<usize>,
    type_number: u32,
    offset: u64,
}

fn read_entry(cursor: &mut Cursor<'_>, index: u64) -> Result<RawEntry, String> {
    let name = cursor.text(&format!("name of tensor {index}"))?.to_owned();
    let what = format!("tensor {name}");
    let dimensions = cursor.u32(&what)?;
    if !(1..=4).contains(&dimensions) {
        return Err(format!(
            "{what}: must have 1 to 4 dimensions; got {dimensions}"
        ));
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let size = cursor.u64(&what)?;
        let size = usize::try_from(size).ok().filter(|size| *size > 0);
        shape.push(size.ok_or_else(|| format!("{what}: a dimension is 0 or too large"))?);
    }
    shape.reverse();
    let weights = shape
        .iter()
        .try_fold(1_usize, |product, size| product.checked_mul(*size));
    weights.ok_or_else(|| format!("{what}: the shape {shape:?} is too large"))?;
    Ok(RawEntry {
        name,
        shape,
        type_number: cursor.u32(&what)?,
        offset: cursor.u64(&what)?,
    })
}

/// Returns the fewest bytes that the file has if nothing of it is lost. `data` is where the data of
/// the tensors begins.
fn needed_bytes(entries: &[RawEntry], data: usize) -> u64 {
    let end = |entry: &RawEntry| {
        let (rows, columns) = rows_and_columns(&entry.shape);
        let bytes = type_numbers::least_bytes(entry.type_number, rows, columns);
        (data as u64)
            .saturating_add(entry.offset)
            .saturating_add(bytes)
    };
    entries.iter().map(end).max().unwrap_or(0)
}

/// Computes where each tensor is. `data` is where the data begins, `end` where the file ends.
fn place(
    mut entries: Vec<RawEntry>,
    data: usize,
    end: usize,
    alignment: usize,
) -> Result<Vec<TensorEntry>, (String, String)> {
    entries.sort_by_key(|entry| entry.offset);
    let needed = needed_bytes(&entries, data);
    let mut placed: Vec<TensorEntry> = Vec::with_capacity(entries.len());
    for entry in entries {
        let start = usize::try_from(entry.offset).ok();
        let start = start.and_then(|offset| offset.checked_add(data));
        let RawEntry {
            name,
            shape,
            offset,
            ..
        } = entry;
        let Some(start) = start.filter(|start| *start < end) else {
            let problem = format!(
                "its offset {offset} is beyond the end of the file; the file is cut: its tensors \
                 need {needed} bytes, and it has {end}"
            );
            return Err((name, problem));
        };
        if !offset.is_multiple_of(alignment as u64) {
            let problem = format!("its offset {offset} is not a multiple of {alignment}");
            return Err((name, problem));
        }
        match placed.last_mut() {
            Some(last) if last.bytes.start == start => {
                let problem = format!("it begins where the tensor {} begins", last.name);
                return Err((name, problem));
            }
            Some(last) => last.bytes.end = start,
            None => {}
        }
        placed.push(TensorEntry {
            name,
            shape,
            type_number: entry.type_number,
            bytes: start..end,
            alignment,
            is_last: false,
        });
    }
    if let Some(last) = placed.last_mut() {
        last.is_last = true;
    }
    Ok(placed)
}
