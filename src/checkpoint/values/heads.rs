//! The order of value heads in GGUF files. Such a file has them in tiles, and this engine has the
//! value heads of a key head side by side, as Hugging Face has them. So a model computes the same
//! bits from both.

use sterna_kernels::GroupSize;

use crate::checkpoint::config::{ModelConfig, RecurrentLayers};
use crate::checkpoint::{FileOrder, Tensors};

/// The order of the value heads in the columns of an output projection, as a GGUF file has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputOrder {
    /// In tiles, which are put in order when the file is read.
    Reordered,
    /// In tiles, and the columns cannot change their places: they are rotated together, or those of
    /// several heads share a scale.
    Tiled,
    /// Side by side, although those of the other tensors are in tiles (`gdn_v_grouped`).
    SideBySide,
}

impl OutputOrder {
    /// Returns the order of the output projection of a recurrent layer. `group` is the size of the
    /// model's groups of columns.
    pub(crate) fn of(config: &ModelConfig, layer: usize, group: Option<GroupSize>) -> OutputOrder {
        let (Some(heads), Some(modules)) = (&config.recurrent, config.architecture.layer.recurrent)
        else {
            return OutputOrder::SideBySide;
        };
        if heads.group() == 1 {
            return OutputOrder::SideBySide;
        }
        let output = format!("model.layers.{layer}.{}.weight", modules.output);
        let rotation = config.rotation.as_ref();
        match rotation.filter(|rotation| rotation.is_of(&output)) {
            Some(rotation) if rotation.has_grouped_values => OutputOrder::SideBySide,
            Some(_) => OutputOrder::Tiled,
            None if group.is_some_and(|group| !heads.value_dim.is_multiple_of(group.columns())) => {
                OutputOrder::Tiled
            }
            None => OutputOrder::Reordered,
        }
    }
}

/// Says in which order the tensors of a GGUF file have the value heads of recurrent layers. `group`
/// is the size of the model's groups of columns.
pub(crate) fn order_value_heads(
    config: &ModelConfig,
    group: Option<GroupSize>,
    tensors: &mut Tensors<'_>,
) {
    let Some(heads) = &config.recurrent else {
        return;
    };
    if !tensors.are_gguf() || heads.group() == 1 {
        return;
    }
    for layer in (0..config.layers).filter(|layer| config.is_recurrent(*layer)) {
        for (name, rows) in tiled_rows(config, heads, layer) {
            if let Some(tensor) = tensors.get_mut(&name) {
                tensor.rows = rows;
            }
        }
        let Some(modules) = config.architecture.layer.recurrent else {
            continue;
        };
        let output = format!("model.layers.{layer}.{}.weight", modules.output);
        if let Some(output) = tensors.get_mut(&output)
            && OutputOrder::of(config, layer, group) == OutputOrder::Reordered
        {
            output.columns = heads.in_tiles(0, heads.value_dim);
        }
    }
}

/// Returns the tensors of a recurrent layer whose rows are in tiles in GGUF files, and the order of
/// these rows.
pub(crate) fn tiled_rows(
    config: &ModelConfig,
    heads: &RecurrentLayers,
    layer: usize,
) -> Vec<(String, FileOrder)> {
    let Some(modules) = config.architecture.layer.recurrent else {
        return Vec::new();
    };
    let keys = 2 * heads.key_heads * heads.key_dim;
    let channels = heads.in_tiles(keys, heads.value_dim);
    let (values, one) = (heads.in_tiles(0, heads.value_dim), heads.in_tiles(0, 1));
    let name = |name: &str| format!("model.layers.{layer}.{name}");
    let weight = |module: &str| format!("{}.weight", name(module));
    vec![
        (weight(modules.qkv), channels),
        (weight(modules.convolution), channels),
        (weight(modules.gate), values),
        (weight(modules.strength), one),
        (weight(modules.step), one),
        (name(modules.step_bias), one),
        (name(modules.decay), one),
    ]
}
