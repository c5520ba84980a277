//! Writes `.bin` files, and the folder of their tokenizer.

use std::path::Path;

use safetensors::Dtype;

use super::hugging_face::{own_config, write_text_files};
use super::parts::{ModelPart, ModelParts, PartContent};
use super::sink::{Sink, Watch};
use super::small::SmallTensor;
use crate::checkpoint::architecture::ScaleDirection;
use crate::checkpoint::config::ModelConfig;
use crate::checkpoint::values::{RowMemory, TernaryScales, TernaryTensor, one_float};
use crate::checkpoint::{
    BlockLayout, I2sOrder, INTERLEAVED_WEIGHTS, LoadResult, Source, Storage, bin_entry, bin_head,
};

/// Writes the file `out`, and a folder with its name without the extension.
pub(super) fn write(
    source: &Source,
    config: &ModelConfig,
    model: &ModelParts<'_>,
    out: &Path,
    watch: &Watch,
) -> LoadResult<()> {
    let direction = config.quantization.scale;
    let entries = model.parts.iter().map(|part| entry(part, direction));
    let entries = entries.collect::<LoadResult<Vec<_>>>()?;
    write_text_files(source, config, &out.with_extension(""))?;
    watch.progress.inc_length(model.bytes());
    let mut sink = Sink::create(out)?;
    let own_config = own_config(source, config, embedding_type(model))?;
    sink.write(&bin_head(&own_config, entries.len()))?;
    for (part, entry) in model.parts.iter().zip(&entries) {
        sink.write(entry)?;
        match &part.content {
            PartContent::Ternary { weights, .. } => write_packed(weights, &mut sink, watch)?,
            PartContent::Carried { tensor, .. }
            | PartContent::Small(SmallTensor { tensor, .. }) => {
                sink.carry(tensor.bytes, watch)?;
            }
        }
        model.release(part);
    }
    sink.finish()
}

/// Returns what comes before the values of a part.
fn entry(part: &ModelPart<'_>, direction: ScaleDirection) -> LoadResult<Vec<u8>> {
    match &part.content {
        PartContent::Carried { tensor, .. } | PartContent::Small(SmallTensor { tensor, .. }) => {
            let entry = bin_entry(&part.name, tensor.storage, &tensor.shape, None);
            entry.ok_or_else(|| {
                let kind = tensor.storage.name();
                tensor.error(format!(
                    "its type is {kind}, which a .bin file cannot hold; F32, F16 and BF16 are \
                     carried as they are"
                ))
            })
        }
        PartContent::Ternary {
            weights,
            stored_scale,
        } => {
            let scale = match (weights.scales(), stored_scale) {
                (TernaryScales::Tensor(_), Some(stored)) if weights.has_stored_scale() => {
                    one_float(stored)?
                }
                (TernaryScales::Tensor(scale), _) => weights.weight_scale(direction, scale),
                (TernaryScales::Groups(group), _) => {
                    let group = group.columns();
                    return Err(weights.error(format!(
                        "it has a scale for each group of {group} columns, but a .bin file has \
                         one for the tensor. Convert the model to GGUF"
                    )));
                }
            };
            let [rows, columns] = weights.shape();
            let shape = [rows, columns.next_multiple_of(INTERLEAVED_WEIGHTS)];
            let entry = bin_entry(&part.name, Storage::Interleaved, &shape, Some(scale));
            entry.ok_or_else(|| weights.error("it is too large"))
        }
    }
}

/// Writes rows that are padded with zeros to a multiple of 128 columns.
fn write_packed(weights: &TernaryTensor<'_>, sink: &mut Sink, watch: &Watch) -> LoadResult<()> {
    let [rows, columns] = weights.shape();
    let mut memory = RowMemory::of_columns(columns);
    let mut codes = vec![1; columns.next_multiple_of(INTERLEAVED_WEIGHTS)];
    let mut bytes = Vec::new();
    for row in 0..rows {
        weights.read_row(row, &mut memory)?;
        codes[..columns].copy_from_slice(&memory.codes);
        bytes.clear();
        // The order of I2_S.
        let layout = BlockLayout::I2s(I2sOrder::X86);
        layout.write_ternary_row(&codes, &[1.0], &mut bytes);
        sink.write(&bytes)?;
        watch.advance(weights.bytes().len() / rows)?;
    }
    Ok(())
}

/// Returns what `transformers` calls the type of the embedding.
fn embedding_type(model: &ModelParts<'_>) -> &'static str {
    let embedding = model.parts.iter().find_map(|part| match &part.content {
        PartContent::Carried { tensor, .. } if part.name.contains("embed_tokens") => {
            Some(tensor.storage)
        }
        _ => None,
    });
    match embedding {
        Some(Storage::Plain(Dtype::F32)) => "float32",
        Some(Storage::Plain(Dtype::F16)) => "float16",
        _ => "bfloat16",
    }
}
