//! Compares a written checkpoint with the checkpoint that it was made from.

use super::parts::{ModelPart, PartContent, PartRole};
use super::sink::Watch;
use super::small::SmallTensor;
use super::with_parts;
use crate::checkpoint::config::ModelConfig;
use crate::checkpoint::values::{RowMemory, TernaryScales, TernaryTensor, read_floats};
use crate::checkpoint::{FileOrder, LoadError, LoadResult, Source, Storage, Tensor};

/// Reads both checkpoints and compares every code, scale and value bit by bit, and what the
/// configurations say.
///
/// # Errors
/// If they differ. The error names the tensor or the field.
pub fn compare(source: &Source, written: &Source, watch: &Watch) -> LoadResult<()> {
    let (expected, found) = (ModelConfig::read(source)?, ModelConfig::read(written)?);
    compare_configs(&expected, &found)?;
    with_parts(source, &expected, |model| {
        with_parts(written, &found, |written| {
            watch.progress.inc_length(model.bytes());
            if model.parts.len() != written.parts.len() {
                let (expected, found) = (model.parts.len(), written.parts.len());
                let problem = format!("{found} tensors were written instead of {expected}");
                return Err(LoadError::file("the conversion", problem));
            }
            for (expected, found) in model.parts.iter().zip(&written.parts) {
                compare_parts(expected, found, watch)?;
                model.release(expected);
                written.release(found);
            }
            Ok(())
        })
    })
}

/// Compares what the model computes with.
fn compare_configs(expected: &ModelConfig, found: &ModelConfig) -> LoadResult<()> {
    let lossy = |field: &str| {
        Err(LoadError::config(
            field,
            "the container cannot hold its value exactly",
        ))
    };
    let scaled = |config: &ModelConfig| (config.rope_theta, config.rope_scaling.clone());
    let input_norm = |config: &ModelConfig| config.quantization.input_norm_eps;
    if scaled(expected) != scaled(found) {
        return lossy("rope_parameters");
    }
    if input_norm(expected) != input_norm(found) {
        return lossy("quantization_config.rms_norm_eps");
    }
    if expected.eos_tokens != found.eos_tokens {
        return lossy("eos_token_id");
    }
    let same = ModelConfig {
        tied: expected.tied, // The tensors tell.
        quantization: expected.quantization.clone(),
        bos_token: expected.bos_token, // The tokenizer tells.
        unused_parts: expected.unused_parts.clone(), // They are left out.
        ..found.clone()
    };
    if same != *expected {
        let problem = format!("the configuration {expected:?} was written as {found:?}");
        return Err(LoadError::file("the conversion", problem));
    }
    Ok(())
}

fn compare_parts(expected: &ModelPart<'_>, found: &ModelPart<'_>, watch: &Watch) -> LoadResult<()> {
    let differs = |problem: &str| Err(LoadError::tensor(&expected.name, problem));
    if expected.name != found.name {
        return differs("it was not written");
    }
    match (&expected.content, &found.content) {
        (
            PartContent::Ternary { weights: one, .. },
            PartContent::Ternary { weights: other, .. },
        ) => compare_ternary(one, other, watch),
        (
            PartContent::Carried { tensor: one, role },
            PartContent::Carried { tensor: other, .. },
        ) => {
            watch.advance(one.bytes.len())?;
            if have_same_values(one, other, *role)? {
                return Ok(());
            }
            differs("its values were not written as they are")
        }
        (PartContent::Small(one), PartContent::Small(other)) => {
            watch.advance(one.tensor.bytes.len())?;
            let bits = |small: &SmallTensor<'_>| -> LoadResult<Vec<u32>> {
                Ok(small.values()?.into_iter().map(f32::to_bits).collect())
            };
            if bits(one)? == bits(other)? {
                return Ok(());
            }
            differs("the model would compute with other values")
        }
        _ => differs("it is ternary in one of the checkpoints only"),
    }
}

fn compare_ternary(
    expected: &TernaryTensor<'_>,
    found: &TernaryTensor<'_>,
    watch: &Watch,
) -> LoadResult<()> {
    let differs = |problem: String| Err(expected.error(problem));
    if expected.shape() != found.shape() {
        return differs(format!("it was written with the shape {:?}", found.shape()));
    }
    let [rows, columns] = expected.shape();
    let mut memory = [
        RowMemory::of_columns(columns),
        RowMemory::of_columns(columns),
    ];
    let mut is_zero = true;
    for row in 0..rows {
        let [one, other] = &mut memory;
        expected.read_row(row, one)?;
        found.read_row(row, other)?;
        if one.codes != other.codes {
            return differs(format!(
                "the codes of row {row} were not written as they are"
            ));
        }
        is_zero &= one.codes.iter().all(|code| *code == 1);
        let bits = |memory: &RowMemory| -> Vec<u32> {
            memory.scales.iter().map(|scale| scale.to_bits()).collect()
        };
        let is_grouped = matches!(expected.scales(), TernaryScales::Groups(_));
        if is_grouped && bits(one) != bits(other) {
            return differs(format!(
                "the scales of row {row} were not written as they are"
            ));
        }
        watch.advance(expected.bytes().len() / rows)?;
    }
    let is_same = match (expected.scales(), found.scales()) {
        // A scale of zeros does not matter, and some layouts cannot tell it.
        (TernaryScales::Tensor(a), TernaryScales::Tensor(b)) => {
            is_zero || a.to_bits() == b.to_bits()
        }
        (a, b) => a == b,
    };
    if is_same {
        return Ok(());
    }
    let (expected, found) = (expected.scales(), found.scales());
    differs(format!("its scale {expected:?} was written as {found:?}"))
}

/// Returns whether two float tensors have the same shape and values. Matrices must have the same
/// type too, because the engine computes with it. Routers may be wider.
fn have_same_values(expected: &Tensor<'_>, found: &Tensor<'_>, role: PartRole) -> LoadResult<bool> {
    if expected.shape != found.shape {
        return Ok(false);
    }
    if expected.storage == found.storage {
        if (expected.rows, found.rows) == (FileOrder::Same, FileOrder::Same) {
            return Ok(expected.bytes == found.bytes);
        }
        let is_same = |row| expected.row_bytes(row) == found.row_bytes(row);
        return Ok((0..expected.shape[0]).all(is_same));
    }
    let is_plain = |tensor: &Tensor<'_>| matches!(tensor.storage, Storage::Plain(_));
    let may_be_wider = expected.shape.len() == 1 || role == PartRole::Router;
    if !may_be_wider || !is_plain(expected) || !is_plain(found) {
        return Ok(false);
    }
    let values = |tensor: &Tensor<'_>| -> LoadResult<Vec<u32>> {
        let mut values = vec![0.0; tensor.shape.iter().product()];
        read_floats(tensor, tensor.bytes, &mut values)?;
        Ok(values.into_iter().map(f32::to_bits).collect())
    };
    Ok(values(expected)? == values(found)?)
}
