//! The table of a `.bin` file: its configuration, and where each tensor is.
//!
//! The format has no specification. Two programs write it, under the same magic and version, and
//! disagree about tensors without a scale: one program omits the scale, the other writes four bytes
//! that mean nothing. So both readings are tried, and the reading that ends where the file ends
//! counts.

use std::collections::BTreeSet;
use std::ops::Range;

use safetensors::Dtype;
use serde::de::IgnoredAny;

use crate::checkpoint::cursor::Cursor;
use crate::checkpoint::tensor::{MAX_TENSORS, Storage};

/// The first bytes of each file.
pub(in crate::checkpoint) const MAGIC: [u8; 8] = *b"SGLBITNT";

pub(super) const VERSION: u32 = 1;

/// The longest configuration. Published ones have some kilobytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The longest name of a tensor.
const MAX_NAME_BYTES: u64 = 1024;

const MAX_DIMENSIONS: u32 = 4;

/// Which tensors have the bytes of a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleField {
    /// The tensors whose `has_scale` is 1.
    IfPresent,
    /// All tensors.
    Always,
}

impl ScaleField {
    /// Returns the name that reports use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ScaleField::IfPresent => "A (a scale only where has_scale is 1)",
            ScaleField::Always => "B (bytes for a scale in every tensor)",
        }
    }
}

/// What a file has before, between and after the values of its tensors.
#[derive(Clone, Debug)]
pub(super) struct BinTable {
    /// The bytes of the configuration.
    pub(super) config: Range<usize>,
    pub(super) scale_field: ScaleField,
    pub(super) tensors: Vec<BinEntry>,
}

/// Where a tensor is, and what the file says of it.
#[derive(Clone, Debug)]
pub(super) struct BinEntry {
    pub(super) name: String,
    pub(super) storage: Storage,
    /// The sizes, the outermost first. The sizes of packed weights count weights, not bytes.
    pub(super) shape: Vec<usize>,
    /// The bytes of the scale of packed weights.
    pub(super) scale: Option<Range<usize>>,
    /// The bytes of the values.
    pub(super) bytes: Range<usize>,
}

impl BinTable {
    /// Reads the table of a file from the `bytes` of the whole file.
    pub(super) fn read(bytes: &[u8]) -> Result<BinTable, String> {
        let mut cursor = Cursor::new(bytes);
        check_version(&mut cursor)?;
        let length = cursor.u32("config_len")?.into();
        if length > MAX_CONFIG_BYTES {
            return Err(format!(
                "config_len: {length} bytes are too many; the limit is {MAX_CONFIG_BYTES}"
            ));
        }
        let config = cursor
            .range(length)
            .ok_or_else(|| format!("config_len: {length} bytes go beyond the end of the file"))?;
        serde_json::from_slice::<IgnoredAny>(&bytes[config.clone()])
            .map_err(|error| format!("config: {error}"))?;
        let count = cursor.u32("n_tensors")?;
        if count as usize > MAX_TENSORS {
            return Err(format!(
                "n_tensors: {count} are too many; the limit is {MAX_TENSORS}"
            ));
        }
        let read = |field| (field, read_tensors(&mut cursor.clone(), count, field));
        let (scale_field, tensors) = match [ScaleField::IfPresent, ScaleField::Always].map(read) {
            [(_, Ok(_)), (_, Ok(_))] => {
                return Err(
                    "both variants of the format fit this file (a scale in every tensor, or only \
                     where has_scale is 1), so its content is unclear; convert the model again"
                        .to_owned(),
                );
            }
            [(field, Ok(tensors)), _] | [_, (field, Ok(tensors))] => (field, tensors),
            // The reading that came further is more likely the one that was meant.
            [(_, Err(first)), (_, Err(second))] if first.at >= second.at => return Err(first.why),
            [_, (_, Err(second))] => return Err(second.why),
        };
        Ok(BinTable {
            config,
            scale_field,
            tensors,
        })
    }
}

fn check_version(cursor: &mut Cursor<'_>) -> Result<(), String> {
    if cursor.take("magic")? != MAGIC {
        return Err(
            "magic: the file does not begin with \"SGLBITNT\"; a .bin file of PyTorch must be \
             converted to safetensors first"
                .to_owned(),
        );
    }
    match cursor.u32("version")? {
        VERSION => Ok(()),
        other => Err(format!("version: must be {VERSION}; got {other}")),
    }
}

/// Why the tensors cannot be read in one of the two ways, and how far the reading came.
struct Misreading {
    at: usize,
    why: String,
}

/// Reads `count` tensors, which must end where the file ends.
fn read_tensors(
    cursor: &mut Cursor<'_>,
    count: u32,
    scale_field: ScaleField,
) -> Result<Vec<BinEntry>, Misreading> {
    let mut names = BTreeSet::new();
    let mut tensors = Vec::new();
    for index in 0..count {
        let at = cursor.position();
        let failure = |why| Misreading { at, why };
        if cursor.left() == 0 {
            let problem = format!("the file ends after {index} of {count} tensors");
            return Err(failure(format!("n_tensors: {problem}")));
        }
        let entry = read_entry(cursor, index, scale_field).map_err(failure)?;
        if !names.insert(entry.name.clone()) {
            let name = entry.name.escape_debug();
            return Err(failure(format!("name of tensor {name}: it occurs twice")));
        }
        tensors.push(entry);
    }
    match cursor.left() {
        0 => Ok(tensors),
        left => Err(Misreading {
            at: cursor.position(),
            why: format!("n_tensors: {left} bytes follow the last of {count} tensors"),
        }),
    }
}

fn read_entry(
    cursor: &mut Cursor<'_>,
    index: u32,
    scale_field: ScaleField,
) -> Result<BinEntry, String> {
    let length = cursor.u32(&format!("name_len of tensor {index}"))?.into();
    let name = cursor.text_of(length, MAX_NAME_BYTES, &format!("name of tensor {index}"))?;
    let field = |field: &str| format!("{field} of tensor {}", name.escape_debug());
    let error = |name: &str, problem: String| Err(format!("{}: {problem}", field(name)));
    let storage = match cursor.u32(&field("dtype"))? {
        0 => Storage::Interleaved,
        1 => Storage::Plain(Dtype::F32),
        2 => Storage::Plain(Dtype::F16),
        3 => Storage::Plain(Dtype::BF16),
        other => {
            let problem = "must be 0 (packed), 1 (f32), 2 (f16) or 3 (bf16)";
            return error("dtype", format!("{problem}; got {other}"));
        }
    };
    let dimensions = cursor.u32(&field("ndims"))?;
    if dimensions > MAX_DIMENSIONS {
        let problem = format!("must be at most {MAX_DIMENSIONS}; got {dimensions}");
        return error("ndims", problem);
    }
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        match cursor.u32(&field("shape"))? {
            0 => return error("shape", "a dimension is 0".to_owned()),
            size => shape.push(size as usize),
        }
    }
    let has_scale = match (cursor.u32(&field("has_scale"))?, storage) {
        (0, Storage::Interleaved) => {
            return error(
                "has_scale",
                "must be 1, because packed weights need one".to_owned(),
            );
        }
        (1, Storage::Plain(_)) => {
            return error(
                "has_scale",
                "must be 0, because floats have none".to_owned(),
            );
        }
        (has_scale @ 0..=1, _) => has_scale == 1,
        (other, _) => return error("has_scale", format!("must be 0 or 1; got {other}")),
    };
    let mut scale = None;
    if has_scale || scale_field == ScaleField::Always {
        let start = cursor.position();
        cursor.u32(&field("scale"))?;
        scale = has_scale.then_some(start..cursor.position());
    }
    let stated = cursor.u64(&field("nbytes"))?;
    let shape = match tensor_shape(storage, &shape, stated) {
        Ok(shape) => shape,
        Err((name, problem)) => return error(name, problem),
    };
    let Some(bytes) = cursor.range(stated) else {
        let problem = format!("{stated} bytes go beyond the end of the file");
        return error("nbytes", problem);
    };
    Ok(BinEntry {
        name: name.to_owned(),
        storage,
        shape,
        scale,
        bytes,
    })
}

/// Returns the shape in weights of a tensor whose values take `stated` bytes.
///
/// # Errors
/// If the shape cannot be stored so, or takes another number of bytes: the field, and what is wrong
/// with it.
fn tensor_shape(
    storage: Storage,
    shape: &[usize],
    stated: u64,
) -> Result<Vec<usize>, (&'static str, String)> {
    let shape = match (storage, shape) {
        (Storage::Interleaved, &[rows, bytes]) if bytes.is_multiple_of(32) => vec![rows, 4 * bytes],
        (Storage::Interleaved, _) => {
            let problem = "packed weights must have rows of whole blocks of 32 bytes";
            return Err(("shape", format!("{problem}; got {shape:?}")));
        }
        _ => shape.to_vec(),
    };
    let (columns, rows) = shape
        .split_last()
        .map_or((1, &[][..]), |(c, rows)| (*c, rows));
    let rows = rows
        .iter()
        .try_fold(1_usize, |product, size| product.checked_mul(*size));
    let bytes = rows.and_then(|rows| storage.tensor_bytes(rows, columns));
    match bytes {
        Some(bytes) if bytes as u64 == stated => Ok(shape),
        Some(bytes) => {
            let name = storage.name();
            let problem = format!("{shape:?} values in {name} take {bytes} bytes; got {stated}");
            Err(("nbytes", problem))
        }
        None => Err(("shape", format!("{shape:?} is too large"))),
    }
}
