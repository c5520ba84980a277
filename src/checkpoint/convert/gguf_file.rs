//! Writes GGUF files.

use std::path::Path;

use half::f16;
use safetensors::Dtype;

use super::parts::{ModelPart, ModelParts, PartContent, PartRole};
use super::sink::{Sink, Watch};
use super::{ChatTemplates, read_json};
use crate::checkpoint::config::{ModelConfig, gguf_metadata};
use crate::checkpoint::values::{RowMemory, TernaryScales, TernaryTensor, read_floats};
use crate::checkpoint::{
    BlockLayout, FileNames, FileOrder, Folder, GgufTensor, LoadResult, MetadataEntries,
    MetadataValue, STATED_I2S_ORDER, STOP_TOKENS, ScaleSpan, Source, Storage, TOOL_TEMPLATE,
    Tensor, gguf_header, gguf_padding, has_rotated_rows, tokenizer_metadata,
};

/// What a file says of the model's text, beside its tokenizer.
pub(super) struct FileText<'a> {
    pub(super) name: Option<String>,
    pub(super) templates: ChatTemplates<'a>,
}

/// Writes the file `out`.
pub(super) fn write(
    (source, config): (&Source, &ModelConfig),
    model: &ModelParts<'_>,
    layout: BlockLayout,
    (out, text): (&Path, &FileText<'_>),
    watch: &Watch,
) -> LoadResult<()> {
    let metadata = metadata(source, config, layout, text)?;
    let head_dim = match metadata.first() {
        Some((_, MetadataValue::Text(name))) if name == "llama" => Some(config.head_dim),
        _ => None,
    };
    let planned = model
        .parts
        .iter()
        .map(|part| planned(part, layout, head_dim));
    let planned: Vec<Planned<'_, '_>> = planned
        .collect::<LoadResult<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    let entries: Vec<GgufTensor> = planned.iter().map(Planned::entry).collect();
    watch.progress.inc_length(model.bytes());
    let mut sink = Sink::create(out)?;
    sink.write(&gguf_header(&metadata, &entries))?;
    for (tensor, entry) in planned.iter().zip(&entries) {
        tensor.write(layout, &mut sink, watch)?;
        sink.write(&vec![0; gguf_padding(entry.bytes)])?;
        model.release(tensor.part);
    }
    sink.finish()
}

fn metadata(
    source: &Source,
    config: &ModelConfig,
    layout: BlockLayout,
    text: &FileText<'_>,
) -> LoadResult<MetadataEntries> {
    let mut entries = gguf_metadata(config)?;
    let mut put = |key: &str, value| entries.push((key.to_owned(), value));
    if let Some(name) = &text.name {
        put("general.name", MetadataValue::Text(name.clone()));
    }
    if let BlockLayout::I2s(order) = layout {
        put(
            STATED_I2S_ORDER,
            MetadataValue::Text(order.name().to_owned()),
        );
    }
    let stops = config.eos_tokens.iter().map(|token| *token as i32);
    put(STOP_TOKENS, MetadataValue::Integers(stops.collect()));
    if let Some(template) = text.templates.default {
        let template = MetadataValue::Text(template.to_owned());
        put("tokenizer.chat_template", template);
    }
    if let Some(template) = text.templates.tool_use {
        let names = MetadataValue::Texts(vec!["tool_use".to_owned()]);
        put("tokenizer.chat_templates", names);
        put(TOOL_TEMPLATE, MetadataValue::Text(template.to_owned()));
    }
    let of_tokenizer = match source.gguf() {
        // The arrays hold more than `tokenizer.json`, such as the scores of SentencePiece.
        Some(gguf) if !has_text_files(gguf.folder())? => gguf.metadata().tokenizer_entries()?,
        _ => {
            let [tokenizer, words] = ["tokenizer.json", "tokenizer_config.json"];
            let (tokenizer, words) = (read_json(source, tokenizer)?, read_json(source, words)?);
            tokenizer_metadata(&tokenizer, &words, config.vocab)?
        }
    };
    entries.extend(of_tokenizer);
    // Other programs read these keys.
    let [eos, eot] = ["eos", "eot"].map(|role| format!("tokenizer.ggml.{role}_token_id"));
    let mut stops: Vec<u32> = config.eos_tokens.clone();
    for key in [eos, eot] {
        let stated = entries.iter().find(|(other, _)| *other == key);
        match stated.map(|(_, value)| value.clone()) {
            Some(value) => stops.retain(|stop| MetadataValue::Size(*stop) != value),
            None if !stops.is_empty() => {
                entries.push((key, MetadataValue::Size(stops.remove(0))));
            }
            None => {}
        }
    }
    Ok(entries)
}

fn has_text_files(folder: &Folder) -> LoadResult<bool> {
    Ok(folder.has("tokenizer.json")? || folder.has("tokenizer_config.json")?)
}

/// A tensor that is written.
struct Planned<'p, 'a> {
    part: &'p ModelPart<'a>,
    name: String,
    shape: Vec<usize>,
    storage: Storage,
    bytes: usize,
    content: PlannedContent<'p, 'a>,
}

/// What is written for a tensor.
enum PlannedContent<'p, 'a> {
    /// Rows of blocks, all with this scale if the tensor has one.
    Blocks {
        weights: &'p TernaryTensor<'a>,
        scale: Option<f32>,
        head_dim: Option<usize>,
    },
    /// One number.
    Scale(f32),
    /// The bytes of the input.
    Same(&'a [u8]),
    /// The values of the input in single precision.
    Single(&'p Tensor<'a>),
}

/// Returns the tensors that a part becomes.
fn planned<'p, 'a>(
    part: &'p ModelPart<'a>,
    layout: BlockLayout,
    head_dim: Option<usize>,
) -> LoadResult<Vec<Planned<'p, 'a>>> {
    let name = FileNames::Gguf.of(&part.name);
    match &part.content {
        PartContent::Ternary { weights, .. } => ternary(part, name, weights, layout, head_dim),
        PartContent::Carried { tensor, role } => {
            let (storage, bytes, content) = carried(tensor, *role)?;
            Ok(vec![Planned {
                part,
                name,
                shape: tensor.shape.clone(),
                storage,
                bytes,
                content,
            }])
        }
    }
}

fn ternary<'p, 'a>(
    part: &'p ModelPart<'a>,
    name: String,
    weights: &'p TernaryTensor<'a>,
    layout: BlockLayout,
    head_dim: Option<usize>,
) -> LoadResult<Vec<Planned<'p, 'a>>> {
    let ([rows, columns], written) = (weights.shape(), layout.name());
    let refuse = |problem: String| Err(weights.error(problem));
    let (scale, beside) = match (weights.scales(), layout.scale_span()) {
        (TernaryScales::Groups(group), Some(ScaleSpan::Group(columns)))
            if group.columns() == columns =>
        {
            (None, None)
        }
        (TernaryScales::Groups(group), _) => {
            let group = group.columns();
            return refuse(format!(
                "it has a scale for each group of {group} columns, which {written} does not have. \
                 The inputs are quantised in the groups of the weights, so other groups would \
                 change the answers"
            ));
        }
        (TernaryScales::Tensor(_), _) if part.name == "lm_head.weight" => {
            return refuse(format!(
                "the head is ternary with one scale; in GGUF it would be read as floats ({written})"
            ));
        }
        (TernaryScales::Tensor(scale), Some(ScaleSpan::Tensor)) => (Some(scale), None),
        (TernaryScales::Tensor(scale), _) if f16::from_f32(scale).to_f32() == scale => {
            (Some(scale), None)
        }
        // Blocks have scales in half precision, which would round this one.
        (TernaryScales::Tensor(scale), _) => (Some(1.0), Some(scale)),
    };
    let Some(bytes) = layout.tensor_bytes(rows, columns) else {
        let block = layout.block().0;
        return refuse(format!(
            "its rows of {columns} weights are not whole blocks of {block}, so {written} cannot \
             hold it"
        ));
    };
    let head_dim = head_dim.filter(|_| has_rotated_rows(&name));
    let mut tensors = vec![Planned {
        part,
        name,
        shape: vec![rows, columns],
        storage: Storage::Blocks(layout),
        bytes,
        content: PlannedContent::Blocks {
            weights,
            scale,
            head_dim,
        },
    }];
    if let Some(scale) = beside {
        tensors.push(Planned {
            part,
            name: FileNames::Gguf.of(&format!("{}_scale", part.name)),
            shape: vec![1],
            storage: Storage::Plain(Dtype::F32),
            bytes: 4,
            content: PlannedContent::Scale(scale),
        });
    }
    Ok(tensors)
}

/// Returns how a float tensor is stored.
fn carried<'p, 'a>(
    tensor: &'p Tensor<'a>,
    role: PartRole,
) -> LoadResult<(Storage, usize, PlannedContent<'p, 'a>)> {
    let is_norm = tensor.shape.len() == 1;
    let single = Storage::Plain(Dtype::F32);
    let same = || {
        (
            tensor.storage,
            tensor.bytes.len(),
            PlannedContent::Same(tensor.bytes),
        )
    };
    let refuse = |problem: &str| -> LoadResult<_> { Err(tensor.error(problem)) };
    match (tensor.storage, role) {
        (_, PartRole::Linear) => refuse(
            "it is a linear that stays float (modules_to_not_convert), which GGUF files of this \
             architecture do not have",
        ),
        (_, PartRole::InputNorm) => {
            refuse("it is a norm before a linear (use_rms_norm), which GGUF has no name for")
        }
        // Other programs expect norms in single precision. Widening changes no value.
        (Storage::Plain(Dtype::F16 | Dtype::BF16), _) if is_norm => {
            let bytes = tensor.shape.iter().product::<usize>() * 4;
            Ok((single, bytes, PlannedContent::Single(tensor)))
        }
        (Storage::Plain(Dtype::F32 | Dtype::F16 | Dtype::BF16), _) => Ok(same()),
        (Storage::Blocks(BlockLayout::I2s(_)) | Storage::Plain(_) | Storage::Interleaved, _) => {
            let name = tensor.storage.name();
            refuse(&format!("an embedding of type {name} is not converted"))
        }
        (Storage::Blocks(_), _) => Ok(same()),
    }
}

impl Planned<'_, '_> {
    fn entry(&self) -> GgufTensor {
        GgufTensor {
            name: self.name.clone(),
            shape: self.shape.clone(),
            storage: self.storage,
            bytes: self.bytes,
        }
    }

    fn write(&self, layout: BlockLayout, sink: &mut Sink, watch: &Watch) -> LoadResult<()> {
        match &self.content {
            PlannedContent::Scale(scale) => sink.write(&scale.to_le_bytes()),
            PlannedContent::Same(bytes) => sink.carry(bytes, watch),
            PlannedContent::Single(tensor) => {
                let mut values = vec![0.0; self.bytes / 4];
                read_floats(tensor, tensor.bytes, &mut values)?;
                watch.advance(tensor.bytes.len())?;
                let bytes: Vec<u8> = values
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
                sink.write(&bytes)
            }
            PlannedContent::Blocks {
                weights,
                scale,
                head_dim,
            } => {
                let [rows, columns] = weights.shape();
                let (mut memory, mut bytes) = (RowMemory::of_columns(columns), Vec::new());
                for file_row in 0..rows {
                    let order = head_dim.map_or(FileOrder::Same, |head_dim| {
                        FileOrder::Interleaved { head_dim }
                    });
                    let row = order.in_matrix(file_row);
                    weights.read_row(row, &mut memory)?;
                    let scales = scale
                        .as_ref()
                        .map_or(&memory.scales[..], std::slice::from_ref);
                    bytes.clear();
                    layout.write_ternary_row(&memory.codes, scales, &mut bytes);
                    sink.write(&bytes)?;
                    watch.advance(weights.bytes().len() / rows)?;
                }
                bytes.clear();
                layout.finish_ternary(scale.unwrap_or(1.0), &mut bytes);
                sink.write(&bytes)
            }
        }
    }
}
