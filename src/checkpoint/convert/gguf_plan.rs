//! Plans the tensors of a GGUF file, and writes them.

use std::collections::BTreeMap;

use half::f16;
use safetensors::Dtype;
use sterna_kernels::GroupSize;

use super::parts::{ModelPart, ModelParts, PartContent, PartRole};
use super::sink::{Sink, Watch};
use super::small::SmallTensor;
use crate::checkpoint::config::ModelConfig;
use crate::checkpoint::values::{
    OutputOrder, RowMemory, TernaryScales, TernaryTensor, read_floats, tiled_rows,
};
use crate::checkpoint::{
    BlockLayout, FileNames, FileOrder, GgufTensor, LoadResult, MetadataEntries, MetadataValue,
    ScaleSpan, Source, Storage, Tensor, has_rotated_rows, holds_experts,
};

/// A tensor that is written.
pub(super) struct Planned<'p, 'a> {
    pub(super) part: &'p ModelPart<'a>,
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
        rows: FileOrder,
        columns: FileOrder,
    },
    /// One number.
    Scale(f32),
    /// The bytes of the input.
    Same(&'a [u8]),
    /// The values of the input in single precision.
    Single(&'p Tensor<'a>),
    /// The rows of the input in this order.
    Rows(&'p Tensor<'a>, FileOrder),
    /// The values that the model computes with, in this order of their rows.
    Values(&'p SmallTensor<'a>, FileOrder),
}

/// How the tensors of a model are stored.
pub(super) struct GgufPlan<'m> {
    config: &'m ModelConfig,
    layout: BlockLayout,
    names: FileNames,
    /// The columns that share a scale, if the model has a scale for each group of columns.
    group: Option<GroupSize>,
    /// Whether the input is a GGUF file.
    is_from_gguf: bool,
    /// The size of a head, if the rows of query and key are interleaved.
    head_dim: Option<usize>,
    /// The order of the rows of tensors with value heads, by the names of Hugging Face.
    tiled: BTreeMap<String, FileOrder>,
}

impl<'m> GgufPlan<'m> {
    pub(super) fn new(
        (source, config): (&Source, &'m ModelConfig),
        model: &ModelParts<'_>,
        layout: BlockLayout,
        metadata: &MetadataEntries,
    ) -> GgufPlan<'m> {
        let name = match metadata.first() {
            Some((_, MetadataValue::Text(name))) => name,
            _ => "",
        };
        let heads = config.recurrent.as_ref();
        let layers = (0..config.layers).filter(|layer| config.is_recurrent(*layer));
        let tiled = layers.zip(heads.into_iter().cycle());
        GgufPlan {
            config,
            layout,
            names: FileNames::of_architecture(name, config.experts.is_some()),
            group: model.group,
            is_from_gguf: source.gguf().is_some(),
            head_dim: (name == "llama").then_some(config.head_dim),
            tiled: tiled
                .flat_map(|(layer, heads)| tiled_rows(config, heads, layer))
                .collect(),
        }
    }

    /// Returns the tensors that a part becomes.
    pub(super) fn part<'p, 'a>(&self, part: &'p ModelPart<'a>) -> LoadResult<Vec<Planned<'p, 'a>>> {
        let name = self.names.of(&part.name);
        let rows = self.rows(&part.name, &name);
        let (shape, (storage, bytes, content)) = match &part.content {
            PartContent::Ternary { weights, .. } => return self.ternary(part, name, weights),
            PartContent::Carried { tensor, role } => {
                (tensor.shape.clone(), carried(tensor, *role, rows)?)
            }
            PartContent::Small(small) => {
                let shape = small.shape_for_gguf();
                let bytes = shape.iter().product::<usize>() * 4;
                let content = PlannedContent::Values(small, rows);
                (shape, (Storage::Plain(Dtype::F32), bytes, content))
            }
        };
        Ok(vec![Planned {
            part,
            name,
            shape,
            storage,
            bytes,
            content,
        }])
    }

    /// Returns the order of the rows of a tensor, given both of its names.
    fn rows(&self, hugging_face_name: &str, name: &str) -> FileOrder {
        match self.head_dim.filter(|_| has_rotated_rows(name)) {
            Some(head_dim) => FileOrder::Interleaved { head_dim },
            None => self
                .tiled
                .get(hugging_face_name)
                .copied()
                .unwrap_or_default(),
        }
    }

    /// Returns the order of the columns of a ternary tensor.
    fn columns(&self, name: &str, weights: &TernaryTensor<'_>) -> LoadResult<FileOrder> {
        let modules = self.config.architecture.layer.recurrent;
        let (Some(heads), Some(modules)) = (&self.config.recurrent, modules) else {
            return Ok(FileOrder::Same);
        };
        let layer = name
            .strip_suffix(&format!(".{}.weight", modules.output))
            .and_then(|rest| rest.rsplit('.').next()?.parse().ok());
        let Some(layer) = layer else {
            return Ok(FileOrder::Same);
        };
        match OutputOrder::of(self.config, layer, self.group) {
            OutputOrder::Reordered => Ok(heads.in_tiles(0, heads.value_dim)),
            OutputOrder::Tiled if !self.is_from_gguf => {
                let (group, dim) = (self.group.map_or(0, GroupSize::columns), heads.value_dim);
                Err(weights.error(format!(
                    "its groups of {group} columns are not whole parts of a value head of {dim}, \
                     so GGUF, which has another order of the value heads, cannot hold its scales"
                )))
            }
            OutputOrder::Tiled | OutputOrder::SideBySide => Ok(FileOrder::Same),
        }
    }

    fn ternary<'p, 'a>(
        &self,
        part: &'p ModelPart<'a>,
        name: String,
        weights: &'p TernaryTensor<'a>,
    ) -> LoadResult<Vec<Planned<'p, 'a>>> {
        let layout = self.layout;
        let ([rows, columns], written) = (weights.shape(), layout.name());
        let refuse = |problem: String| Err(weights.error(problem));
        let (scale, beside) = self.scales(part, weights)?;
        let has_own_scale = beside.is_some() || matches!(layout, BlockLayout::I2s(_));
        if holds_experts(&name) && has_own_scale {
            return refuse(format!(
                "{written} has no scale for each expert in a tensor of all experts of a layer"
            ));
        }
        let Some(bytes) = layout.tensor_bytes(rows, columns) else {
            let block = layout.block().0;
            return refuse(format!(
                "its rows of {columns} weights are not whole blocks of {block}, so {written} \
                 cannot hold it"
            ));
        };
        let file_rows = self.rows(&part.name, &name);
        let mut tensors = vec![Planned {
            part,
            name,
            shape: vec![rows, columns],
            storage: Storage::Blocks(layout),
            bytes,
            content: PlannedContent::Blocks {
                weights,
                scale,
                rows: file_rows,
                columns: self.columns(&part.name, weights)?,
            },
        }];
        if let Some(scale) = beside {
            tensors.push(Planned {
                part,
                name: self.names.of(&format!("{}_scale", part.name)),
                shape: vec![1],
                storage: Storage::Plain(Dtype::F32),
                bytes: 4,
                content: PlannedContent::Scale(scale),
            });
        }
        Ok(tensors)
    }

    /// Returns the scale in the blocks of a tensor, and the scale in a tensor beside it. Blocks of
    /// a tensor with groups have their own.
    fn scales(
        &self,
        part: &ModelPart<'_>,
        weights: &TernaryTensor<'_>,
    ) -> LoadResult<(Option<f32>, Option<f32>)> {
        let (layout, written) = (self.layout, self.layout.name());
        let refuse = |problem: String| Err(weights.error(problem));
        Ok(match (weights.scales(), layout.scale_span()) {
            (TernaryScales::Groups(group), Some(ScaleSpan::Group(columns)))
                if group.columns() == columns =>
            {
                (None, None)
            }
            (TernaryScales::Groups(group), _) => {
                let group = group.columns();
                return refuse(format!(
                    "it has a scale for each group of {group} columns, which {written} does not \
                     have. The inputs are quantised in the groups of the weights, so other groups \
                     would change the answers"
                ));
            }
            (TernaryScales::Tensor(_), _) if part.name == "lm_head.weight" => {
                return refuse(format!(
                    "the head is ternary with one scale; in GGUF it would be read as floats \
                     ({written})"
                ));
            }
            (TernaryScales::Tensor(scale), Some(ScaleSpan::Tensor)) => (Some(scale), None),
            (TernaryScales::Tensor(scale), _) if f16::from_f32(scale).to_f32() == scale => {
                (Some(scale), None)
            }
            // Blocks have scales in half precision, which would round this one.
            (TernaryScales::Tensor(scale), _) => (Some(1.0), Some(scale)),
        })
    }
}

/// Returns how a float tensor is stored.
fn carried<'p, 'a>(
    tensor: &'p Tensor<'a>,
    role: PartRole,
    rows: FileOrder,
) -> LoadResult<(Storage, usize, PlannedContent<'p, 'a>)> {
    let is_small = tensor.shape.len() == 1 || role == PartRole::Router;
    let single = Storage::Plain(Dtype::F32);
    let same = || {
        (
            tensor.storage,
            tensor.bytes.len(),
            match (rows, tensor.rows) {
                (FileOrder::Same, FileOrder::Same) => PlannedContent::Same(tensor.bytes),
                _ => PlannedContent::Rows(tensor, rows),
            },
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
        // Other programs expect norms and routers in single precision. Widening changes no value.
        (Storage::Plain(Dtype::F16 | Dtype::BF16), _) if is_small => {
            let bytes = tensor.shape.iter().product::<usize>() * 4;
            Ok((single, bytes, PlannedContent::Single(tensor)))
        }
        (Storage::Plain(Dtype::F32 | Dtype::F16 | Dtype::BF16), _) => Ok(same()),
        (Storage::Blocks(BlockLayout::I2s(_)) | Storage::Plain(_) | Storage::Interleaved, _) => {
            let name = tensor.storage.name();
            let what = match role {
                PartRole::HeadLinear => "a linear of value heads",
                PartRole::Router => "a router",
                _ => "an embedding",
            };
            refuse(&format!("{what} of type {name} is not converted"))
        }
        (Storage::Blocks(_), _) => Ok(same()),
    }
}

impl Planned<'_, '_> {
    /// Returns the parts of each tensor of the file: one, or those of all experts of a layer.
    pub(super) fn tensors<'s, 'p, 'a>(
        planned: &'s [Planned<'p, 'a>],
    ) -> impl Iterator<Item = &'s [Planned<'p, 'a>]> + Clone {
        planned.chunk_by(|one, next| one.name == next.name)
    }

    /// Returns the entry of a tensor of these parts.
    pub(super) fn entry(parts: &[Planned<'_, '_>]) -> GgufTensor {
        let Planned { name, shape, .. } = &parts[0];
        let experts = holds_experts(name).then_some(parts.len());
        GgufTensor {
            name: name.clone(),
            shape: experts.into_iter().chain(shape.iter().copied()).collect(),
            storage: parts[0].storage,
            bytes: parts.iter().map(|part| part.bytes).sum(),
        }
    }

    pub(super) fn write(
        &self,
        layout: BlockLayout,
        sink: &mut Sink,
        watch: &Watch,
    ) -> LoadResult<()> {
        match &self.content {
            PlannedContent::Scale(scale) => sink.write(&scale.to_le_bytes()),
            PlannedContent::Same(bytes) => sink.carry(bytes, watch),
            PlannedContent::Rows(tensor, rows) => {
                let mut file_rows = 0..self.shape[0];
                file_rows
                    .try_for_each(|row| sink.carry(tensor.row_bytes(rows.in_matrix(row)), watch))
            }
            PlannedContent::Values(small, rows) => {
                let values = small.values()?;
                let width = values.len() / self.shape[0];
                let in_file = (0..self.shape[0]).flat_map(|row| {
                    let values = &values[rows.in_matrix(row) * width..][..width];
                    values.iter().flat_map(|value| value.to_le_bytes())
                });
                watch.advance(small.tensor.bytes.len())?;
                sink.write(&in_file.collect::<Vec<u8>>())
            }
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
                rows: file_rows,
                columns: file_columns,
            } => {
                let [rows, columns] = weights.shape();
                let (mut memory, mut bytes) = (RowMemory::of_columns(columns), Vec::new());
                for file_row in 0..rows {
                    let row = file_rows.in_matrix(file_row);
                    weights.read_row(row, &mut memory)?;
                    memory.put_in_file_order(*file_columns);
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
