//! Writes directories in the layout of Hugging Face, with packed weights.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::parts::{ModelParts, PartContent};
use super::sink::{Sink, Watch, write_file};
use super::small::SmallTensor;
use super::{position_sections, read_json};
use crate::checkpoint::architecture::ScaleDirection;
use crate::checkpoint::config::{
    ModelConfig, StoredWeights, config_json, generation_json, quantization_json, text_part,
};
use crate::checkpoint::values::{RowMemory, TernaryScales, TernaryTensor};
use crate::checkpoint::{
    FileOrder, LoadError, LoadResult, Source, Storage, TOOL_TEMPLATE_FILE, Tensor, parse_json,
};

/// The files about text that are carried as they are, if the checkpoint has them.
const TEXT_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    TOOL_TEMPLATE_FILE,
    "special_tokens_map.json",
];

/// Writes the files of a model into a new directory `out`.
pub(super) fn write(
    source: &Source,
    config: &ModelConfig,
    model: &ModelParts<'_>,
    out: &Path,
    watch: &Watch,
) -> LoadResult<()> {
    let entries = model.parts.iter().map(|part| {
        let name = &part.name;
        match &part.content {
            PartContent::Ternary { weights, .. }
                if name == "lm_head.weight" && (config.tied || config.is_float("lm_head")) =>
            {
                Err(weights.error(
                    "the head is ternary, but config.json says that it is float or tied to the \
                     embedding, so a directory of Hugging Face would be read otherwise",
                ))
            }
            PartContent::Ternary {
                weights,
                stored_scale,
            } => packed(
                name,
                weights,
                stored_scale.as_ref(),
                config.quantization.scale,
            ),
            PartContent::Carried { tensor, .. } => Ok(vec![carried(name, tensor)?]),
            PartContent::Small(tensor) => Ok(vec![small(name, tensor)?]),
        }
    });
    let entries = entries.collect::<LoadResult<Vec<_>>>()?;
    let mut entries: Vec<SafeTensor<'_, '_>> = entries.into_iter().flatten().collect();
    // The widest values first, so that all are aligned.
    entries.sort_by(|a, b| {
        let key = |entry: &SafeTensor<'_, '_>| std::cmp::Reverse(entry.dtype.bitsize());
        key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name))
    });
    write_text_files(source, config, out)?;
    let own_config = own_config(source, config, embedding_type(&entries))?;
    write_file(&out.join("config.json"), &own_config)?;
    watch.progress.inc_length(model.bytes());
    let mut sink = Sink::create(&out.join("model.safetensors"))?;
    sink.write(&header(&entries))?;
    for entry in &entries {
        entry.write(&mut sink, watch)?;
    }
    model.parts.iter().for_each(|part| model.release(part));
    sink.finish()
}

/// Makes the directory `out` with the files about text and generation.
pub(super) fn write_text_files(
    source: &Source,
    config: &ModelConfig,
    out: &Path,
) -> LoadResult<()> {
    fs::create_dir(out).map_err(|error| LoadError::file(out.display(), error))?;
    let generation = match read_json(source, "generation_config.json")? {
        // A file beside a GGUF file says nothing of that file.
        own if source.gguf().is_none() => own,
        _ => generation_json(config),
    };
    if !generation.is_null() {
        write_file(&out.join("generation_config.json"), &to_text(&generation))?;
    }
    for name in TEXT_FILES {
        if let Some(content) = source.read(name)? {
            let path = out.join(name);
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)
                    .map_err(|error| LoadError::file(folder.display(), error))?;
            }
            write_file(&path, &content)?;
        }
    }
    Ok(())
}

/// Returns the `config.json` of the packed model. `dtype` is what `transformers` calls the type of
/// the embedding.
pub(super) fn own_config(
    source: &Source,
    config: &ModelConfig,
    dtype: &str,
) -> LoadResult<Vec<u8>> {
    let json = match source.gguf() {
        None => {
            let name = "config.json";
            let own = source.read(name)?.map(|own| own.to_vec());
            let own = text_part(name, own.unwrap_or_default())?;
            packed_config(parse_json(name, &own)?, config)
        }
        Some(_) => {
            let mut json = config_json(config, dtype)?;
            if config.recurrent.is_some()
                && let Some(sections) = position_sections(source)?
            {
                json["rope_parameters"]["mrope_section"] = json!(sections);
            }
            json
        }
    };
    Ok(to_text(&json))
}

fn to_text(json: &Value) -> Vec<u8> {
    format!("{json:#}\n").into_bytes()
}

/// Returns the `config.json` of a checkpoint, changed for packed weights.
fn packed_config(mut own: Value, config: &ModelConfig) -> Value {
    if let (Some(fields), true) = (own.as_object_mut(), config.recurrent.is_some()) {
        fields.remove("mtp_num_hidden_layers"); // These layers are left out.
    }
    let quantization = &mut own["quantization_config"];
    match config.quantization.stored {
        StoredWeights::Masters if !quantization.is_null() => {
            quantization["quantization_mode"] = json!("offline");
            // A `.bin` file made from masters has factors, whatever its configuration says.
            quantization["linear_class"] = json!(config.quantization.scale.linear_class());
        }
        StoredWeights::Packed if !quantization.is_null() => {}
        _ => *quantization = quantization_json(config),
    }
    own
}

/// Returns what `transformers` calls the type of the embedding.
fn embedding_type(entries: &[SafeTensor<'_, '_>]) -> &'static str {
    let embedding = entries
        .iter()
        .find(|entry| entry.name == "model.embed_tokens.weight");
    match embedding.map(|entry| entry.dtype) {
        Some(Dtype::F32) => "float32",
        Some(Dtype::F16) => "float16",
        _ => "bfloat16",
    }
}

/// A tensor that is written.
struct SafeTensor<'p, 'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    content: SafeContent<'p, 'a>,
}

/// What is written for a tensor.
enum SafeContent<'p, 'a> {
    /// Four codes in a byte.
    Packed(&'p TernaryTensor<'a>),
    /// One number.
    Scale(f32),
    /// The bytes of the input.
    Same(&'a [u8]),
    /// The rows of the input in the order of the matrix.
    Rows(&'p Tensor<'a>),
    /// These numbers.
    Values(Vec<f32>),
}

/// Returns the packed weights and their scale.
fn packed<'p, 'a>(
    name: &str,
    weights: &'p TernaryTensor<'a>,
    stored_scale: Option<&'p Tensor<'a>>,
    direction: ScaleDirection,
) -> LoadResult<Vec<SafeTensor<'p, 'a>>> {
    let [rows, columns] = weights.shape();
    let scale = match weights.scales() {
        TernaryScales::Tensor(scale) => scale,
        TernaryScales::Groups(group) => {
            let group = group.columns();
            return Err(weights.error(format!(
                "it has a scale for each group of {group} columns, but the packed weights of \
                 Hugging Face have one for the tensor. Convert the model to GGUF"
            )));
        }
    };
    if !rows.is_multiple_of(4) {
        let problem = format!("its {rows} rows are not a multiple of four, which packing needs");
        return Err(weights.error(problem));
    }
    let carried_scale = stored_scale.filter(|_| weights.has_stored_scale());
    let scale = match carried_scale {
        Some(stored) => carried(&format!("{name}_scale"), stored)?,
        None => SafeTensor {
            name: format!("{name}_scale"),
            dtype: Dtype::F32,
            shape: vec![1],
            content: SafeContent::Scale(weights.weight_scale(direction, scale)),
        },
    };
    let weights = SafeTensor {
        name: name.to_owned(),
        dtype: Dtype::U8,
        shape: vec![rows / 4, columns],
        content: SafeContent::Packed(weights),
    };
    Ok(vec![weights, scale])
}

fn carried<'p, 'a>(name: &str, tensor: &'p Tensor<'a>) -> LoadResult<SafeTensor<'p, 'a>> {
    let Storage::Plain(dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16)) = tensor.storage else {
        let kind = tensor.storage.name();
        return Err(tensor.error(format!(
            "its type is {kind}, which a directory of Hugging Face cannot hold; F32, F16 and BF16 \
             are carried as they are"
        )));
    };
    Ok(SafeTensor {
        name: name.to_owned(),
        dtype,
        shape: tensor.shape.clone(),
        content: match tensor.rows {
            FileOrder::Same => SafeContent::Same(tensor.bytes),
            _ => SafeContent::Rows(tensor),
        },
    })
}

/// Returns a small tensor as it is, or as Hugging Face stores what a GGUF file has.
fn small<'p, 'a>(name: &str, small: &'p SmallTensor<'a>) -> LoadResult<SafeTensor<'p, 'a>> {
    if !small.is_gguf {
        return carried(name, &small.tensor);
    }
    Ok(SafeTensor {
        name: name.to_owned(),
        dtype: Dtype::F32,
        shape: small.shape_for_hugging_face(),
        content: SafeContent::Values(small.for_hugging_face()?),
    })
}

/// Returns the length of the header, and the header.
fn header(entries: &[SafeTensor<'_, '_>]) -> Vec<u8> {
    let mut tensors = Map::new();
    // `transformers` refuses files without this.
    tensors.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut offset = 0;
    for entry in entries {
        let end = offset + entry.shape.iter().product::<usize>() * entry.dtype.bitsize() / 8;
        let description = json!({
            "dtype": format!("{:?}", entry.dtype),
            "shape": entry.shape,
            "data_offsets": [offset, end],
        });
        tensors.insert(entry.name.clone(), description);
        offset = end;
    }
    let mut text = Value::Object(tensors).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl SafeTensor<'_, '_> {
    fn write(&self, sink: &mut Sink, watch: &Watch) -> LoadResult<()> {
        match &self.content {
            SafeContent::Scale(scale) => sink.write(&scale.to_le_bytes()),
            SafeContent::Same(bytes) => sink.carry(bytes, watch),
            SafeContent::Rows(tensor) => {
                let mut rows = 0..tensor.shape[0];
                rows.try_for_each(|row| sink.carry(tensor.row_bytes(row), watch))
            }
            SafeContent::Values(values) => {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes());
                sink.carry(&bytes.collect::<Vec<u8>>(), watch)
            }
            SafeContent::Packed(weights) => write_packed(weights, sink, watch),
        }
    }
}

/// Writes codes: bits 2i and 2i + 1 of byte (j, c) are the code of row i · rows / 4 + j.
fn write_packed(weights: &TernaryTensor<'_>, sink: &mut Sink, watch: &Watch) -> LoadResult<()> {
    let [rows, columns] = weights.shape();
    let (mut memory, mut bytes) = (RowMemory::of_columns(columns), vec![0; columns]);
    let quarter = rows / 4;
    for row in 0..quarter {
        bytes.fill(0);
        for part in 0..4 {
            weights.read_row(part * quarter + row, &mut memory)?;
            for (byte, code) in bytes.iter_mut().zip(&memory.codes) {
                *byte |= code << (2 * part);
            }
        }
        sink.write(&bytes)?;
        watch.advance(weights.bytes().len() / quarter)?;
    }
    Ok(())
}
