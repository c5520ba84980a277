//! Weights that are ternary already, and their scales: one for the tensor, or one for each group of
//! neighbouring columns.

use std::sync::atomic::{AtomicU32, Ordering};

use half::f16;
use sterna_kernels::GroupSize;

use super::floats::{read_floats, row_bytes};
use crate::checkpoint::config::{ModelConfig, StoredWeights};
use crate::checkpoint::{FileOrder, LoadResult, ScaleSpan, Storage, Tensor, Tensors};

/// Returns the size of the groups of a model, or `None` if its tensors have one scale each. The
/// first linear decides.
///
/// # Errors
/// If that tensor should be ternary but is not.
pub(crate) fn of_model(
    config: &ModelConfig,
    tensors: &Tensors<'_>,
) -> LoadResult<Option<GroupSize>> {
    let modules = &config.architecture.layer;
    let (module, rows) = match (&config.recurrent, modules.recurrent) {
        (Some(layers), Some(modules)) if config.is_recurrent(0) => (modules.qkv, layers.channels()),
        _ => (modules.query, config.query_rows()),
    };
    let Some(first) = tensors.get(&format!("model.layers.0.{module}.weight")) else {
        return Ok(None); // The loader names it when it takes it.
    };
    if config.quantization.stored == StoredWeights::Unpacked {
        first.expect_shape(&[rows, config.hidden])?;
    }
    of(first, config.quantization.stored)
}

/// Returns the columns that share a scale, or `None` if the tensor has one scale or is not ternary
/// already. Published models are of one kind throughout, so the first tensor of a model decides for
/// all.
///
/// # Errors
/// If the tensor should be ternary but is not, in groups of any size.
fn of(tensor: &Tensor<'_>, stored: StoredWeights) -> LoadResult<Option<GroupSize>> {
    match tensor.storage {
        Storage::Plain(_) if stored != StoredWeights::Unpacked => Ok(None),
        Storage::Plain(_) => {
            let groups = GroupSize::ALL.into_iter().rev().map(Some);
            for size in std::iter::once(None).chain(groups) {
                if has_one_magnitude(tensor, size)? {
                    return Ok(size);
                }
            }
            Err(tensor.error(
                "its values are not ternary: they have several magnitudes in groups of 64, 128 \
                 and 256 columns; this engine serves ternary models only",
            ))
        }
        Storage::Blocks(layout) => match layout.scale_span() {
            Some(ScaleSpan::Group(columns)) if !has_one_scale(tensor)? => {
                let size = GroupSize::of(columns);
                let problem = || format!("groups of {columns} columns are not supported");
                size.map(Some).ok_or_else(|| tensor.error(problem()))
            }
            _ => Ok(None),
        },
        Storage::Interleaved => Ok(None),
    }
}

/// Returns the columns that share a scale in a tensor of floats that are ternary already, or `None`
/// if it has one scale.
///
/// # Errors
/// If the floats are not ternary, in groups of any size.
pub(crate) fn group_of_values(tensor: &Tensor<'_>) -> LoadResult<Option<GroupSize>> {
    of(tensor, StoredWeights::Unpacked)
}

/// Returns whether the tensor can be stored as ternary weights in groups of this size.
pub(crate) fn is_ternary(tensor: &Tensor<'_>, group: Option<GroupSize>) -> LoadResult<bool> {
    match (tensor.storage, group) {
        (Storage::Blocks(_) | Storage::Interleaved, _) => Ok(tensor.storage.is_ternary_blocks()),
        (Storage::Plain(_), Some(_)) => has_one_magnitude(tensor, group),
        (Storage::Plain(_), None) => Ok(false),
    }
}

/// Returns whether all groups of ternary blocks have the same scale. Groups of zeros do not count.
fn has_one_scale(tensor: &Tensor<'_>) -> LoadResult<bool> {
    let (rows, mut memory) = (tensor.shape[0], RowMemory::new(tensor));
    let one = OneScale::default();
    for row in 0..rows {
        memory.read(tensor, row, None)?;
        if !memory
            .groups()
            .all(|(codes, scale)| one.is_same(codes, scale))
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether the values of each group, or of the tensor, are zero or of one magnitude.
pub(crate) fn has_one_magnitude(tensor: &Tensor<'_>, group: Option<GroupSize>) -> LoadResult<bool> {
    let [rows, columns] = tensor.shape[..] else {
        return Ok(false);
    };
    let is_whole = group.is_none();
    let group = group.map_or(columns, GroupSize::columns);
    if !columns.is_multiple_of(group) {
        return Ok(false);
    }
    let mut floats = vec![0.0; columns];
    let mut of_tensor = None;
    for row in 0..rows {
        read_float_row(tensor, row, &mut floats)?;
        for values in floats.chunks(group) {
            let Some(magnitude) = one_magnitude(values) else {
                return Ok(false);
            };
            let counts = is_whole && magnitude > 0.0;
            if counts && *of_tensor.get_or_insert(magnitude) != magnitude {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Returns the one magnitude of all values that are not zero, or 0 if all values are zero. Returns
/// `None` if there are several magnitudes.
fn one_magnitude(values: &[f32]) -> Option<f32> {
    let largest = values
        .iter()
        .fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let fits = |value: &f32| *value == 0.0 || value.abs() == largest; // False for NaN.
    values.iter().all(fits).then_some(largest)
}

/// Scratch memory for one row, and the row that was read last.
pub(crate) struct RowMemory {
    pub(crate) codes: Vec<u8>,
    pub(crate) floats: Vec<f32>,
    /// One for each group; one if the row or the tensor has one scale.
    pub(crate) scales: Vec<f32>,
}

impl RowMemory {
    /// Allocates the memory for rows of `tensor`.
    pub(crate) fn new(tensor: &Tensor<'_>) -> RowMemory {
        RowMemory::of_columns(tensor.shape.last().copied().unwrap_or(1))
    }

    /// Allocates the memory for rows of `columns` values.
    pub(crate) fn of_columns(columns: usize) -> RowMemory {
        RowMemory {
            codes: vec![1; columns],
            floats: vec![0.0; columns],
            scales: Vec::new(),
        }
    }

    /// Reads the codes and scales of a row of weights that are ternary already. With `group` there
    /// is one scale for each group of this size.
    pub(crate) fn read(
        &mut self,
        tensor: &Tensor<'_>,
        row: usize,
        group: Option<GroupSize>,
    ) -> LoadResult<()> {
        self.scales.clear();
        let columns = self.codes.len();
        let group = group.map(GroupSize::columns);
        match tensor.storage {
            Storage::Blocks(layout) if layout.scale_span().is_some() => {
                let (bytes, file_row) = (tensor.bytes, tensor.file_row(row));
                layout.read_ternary_row(bytes, file_row, &mut self.codes, &mut self.scales);
                tensor.refuse_code_3(row, &self.codes)?;
                if let Some(group) = group {
                    self.repeat_scales(tensor, columns / group)?;
                }
                self.reorder(tensor.columns, FileOrder::in_file);
            }
            Storage::Plain(_) => {
                read_float_row(tensor, row, &mut self.floats)?;
                self.round(tensor, row, group.unwrap_or(columns))?;
            }
            storage => {
                let name = storage.name();
                return Err(tensor.error(format!("its type {name} is not ternary")));
            }
        }
        Ok(())
    }

    /// Moves the columns of a row in the order of the matrix to their places in a file.
    pub(crate) fn put_in_file_order(&mut self, order: FileOrder) {
        self.reorder(order, FileOrder::in_matrix);
    }

    /// Moves the columns. `from` says where the column of a place is now.
    fn reorder(&mut self, order: FileOrder, from: fn(FileOrder, usize) -> usize) {
        let FileOrder::Tiled { dim, .. } = order else {
            return;
        };
        let codes = self.codes.clone();
        for (column, code) in self.codes.iter_mut().enumerate() {
            *code = codes[from(order, column)];
        }
        if self.scales.len() == 1 {
            return;
        }
        // A group may be larger than a head, so each part of a head gets the scale of its group.
        let group = codes.len() / self.scales.len();
        let part = 1 << group.trailing_zeros().min(dim.trailing_zeros());
        let parts = (0..codes.len()).step_by(part);
        let scales = parts.map(|column| self.scales[from(order, column) / group]);
        self.scales = scales.collect();
    }

    /// Returns the codes and the scale of each group of the row.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&[u8], f32)> {
        let groups = self.codes.chunks(self.codes.len() / self.scales.len());
        groups.zip(self.scales.iter().copied())
    }

    /// Writes the values of the row to `floats`.
    pub(crate) fn write_floats(&mut self) {
        let group = self.codes.len() / self.scales.len();
        let (codes, floats) = (self.codes.chunks(group), self.floats.chunks_mut(group));
        for ((codes, floats), scale) in codes.zip(floats).zip(&self.scales) {
            for (float, code) in floats.iter_mut().zip(codes) {
                *float = (f32::from(*code) - 1.0) * scale;
            }
        }
    }

    /// Repeats the scales of larger groups until there are `count`.
    fn repeat_scales(&mut self, tensor: &Tensor<'_>, count: usize) -> LoadResult<()> {
        let found = self.scales.len();
        let problem = format_args!("it has {found} scales in a row, but the model has {count}");
        tensor.require(count.is_multiple_of(found), problem)?;
        let repeated = count / found;
        if repeated > 1 {
            let scales = self.scales.iter();
            self.scales = scales
                .flat_map(|scale| std::iter::repeat_n(*scale, repeated))
                .collect();
        }
        Ok(())
    }

    /// Turns the floats of a row into codes and scales. Each group must have one magnitude.
    fn round(&mut self, tensor: &Tensor<'_>, row: usize, group: usize) -> LoadResult<()> {
        let (floats, codes) = (self.floats.chunks(group), self.codes.chunks_mut(group));
        for (index, (floats, codes)) in floats.zip(codes).enumerate() {
            let scale = one_magnitude(floats).ok_or_else(|| {
                let first = index * group;
                let last = first + floats.len() - 1;
                tensor.error(format!(
                    "its values are not ternary: those of row {row}, columns {first} to {last} \
                     have several magnitudes"
                ))
            })?;
            self.scales.push(scale);
            for (code, float) in codes.iter_mut().zip(floats) {
                *code = 1 + u8::from(*float > 0.0) - u8::from(*float < 0.0);
            }
        }
        Ok(())
    }
}

fn read_float_row(tensor: &Tensor<'_>, row: usize, floats: &mut [f32]) -> LoadResult<()> {
    let row_bytes = row_bytes(tensor, floats.len())?;
    let bytes = &tensor.bytes[tensor.file_row(row) * row_bytes..][..row_bytes];
    read_floats(tensor, bytes, floats)?;
    if tensor.columns != FileOrder::Same {
        let in_file = floats.to_vec();
        for (column, float) in floats.iter_mut().enumerate() {
            *float = in_file[tensor.columns.in_file(column)];
        }
    }
    Ok(())
}

/// Returns a scale as the bits of a half-precision number.
///
/// # Errors
/// If it is negative, not finite, or needs more precision.
pub(crate) fn half_bits(tensor: &Tensor<'_>, row: usize, scale: f32) -> LoadResult<u16> {
    let half = f16::from_f32(scale);
    let problem = format_args!(
        "the scale {scale} in row {row} must be finite, not negative and exact in half precision"
    );
    tensor.require(
        scale >= 0.0 && scale.is_finite() && half.to_f32() == scale,
        problem,
    )?;
    Ok(half.to_bits())
}

/// The one scale that all groups of a tensor must have. Workers share it.
#[derive(Default)]
pub(crate) struct OneScale {
    /// The bits of the scale, or 0 if no group has stated it yet.
    bits: AtomicU32,
}

impl OneScale {
    /// Returns whether a group has the scale of the groups before. A group of zeros fits any scale.
    fn is_same(&self, codes: &[u8], scale: f32) -> bool {
        let (order, bits) = (Ordering::Relaxed, scale.to_bits());
        codes.iter().all(|code| *code == 1)
            || self
                .bits
                .compare_exchange(0, bits, order, order)
                .is_ok_and(|_| true)
            || self.bits.load(order) == bits
    }

    /// Compares the scale of a group with the scale of the earlier groups. The scale of a group
    /// whose weights are all zero does not matter.
    pub(crate) fn accept(&self, tensor: &Tensor<'_>, codes: &[u8], scale: f32) -> LoadResult<()> {
        if codes.iter().all(|code| *code == 1) {
            return Ok(());
        }
        let problem = format_args!("a scale must be positive and finite; got {scale}");
        tensor.require(scale.is_normal() && scale > 0.0, problem)?;
        let (order, bits) = (Ordering::Relaxed, scale.to_bits());
        match self.bits.compare_exchange(0, bits, order, order) {
            Err(other) if other != bits => Err(tensor.error(format!(
                "its groups have different scales, such as {scale} and {}, but those of \
                 the first tensor are equal",
                f32::from_bits(other)
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the scale; 1 if all weights are zero.
    pub(crate) fn value(self) -> f32 {
        match self.bits.into_inner() {
            0 => 1.0,
            bits => f32::from_bits(bits),
        }
    }
}
