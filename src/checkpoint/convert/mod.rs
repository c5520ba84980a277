//! Writes the tensors and the configuration of a checkpoint into another container.
//!
//! Invariant: nothing is rounded. Ternary tensors keep their codes and scales, and other tensors
//! keep their values and type. If the container cannot hold a tensor or field exactly, the error
//! names it.
//!
//! Invariant: one tensor at a time is in memory, so the size of the model does not matter.

mod bin_file;
mod compare;
mod gguf_file;
mod gguf_plan;
mod hugging_face;
mod parts;
mod sink;
mod small;

use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::architecture::BITNET_GEMMA3;
use super::{
    BlockLayout, I2sOrder, LeftOut, LoadResult, ModelConfig, Source, TensorFiles, parse_json,
    require,
};
use parts::ModelParts;

pub use compare::compare;
pub use sink::Watch;

/// The key of the sections of positions in a GGUF file: three sizes, and a zero.
const POSITION_SECTIONS: &str = "qwen35.rope.dimension_sections";

/// A container that a checkpoint can be converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A directory in the layout of Hugging Face, with four weights in a byte.
    HuggingFace,
    /// A `.bin` file of sgl-kernel, and a folder with the files of its tokenizer.
    Bin,
    /// A GGUF file with this layout of its ternary weights.
    Gguf(TernaryLayout),
}

/// The layouts of ternary weights in the GGUF files that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TernaryLayout {
    /// One scale for each tensor, in single precision. The weights are in the order of x86.
    I2S,
    /// 256 weights in 54 bytes.
    Tq1,
    /// 256 weights in 66 bytes.
    Tq2,
    /// 64 weights in 18 bytes.
    Q2,
    /// 128 weights in 34 bytes.
    Pq2,
}

impl TernaryLayout {
    /// All layouts.
    pub const ALL: [TernaryLayout; 5] = [
        TernaryLayout::I2S,
        TernaryLayout::Tq1,
        TernaryLayout::Tq2,
        TernaryLayout::Q2,
        TernaryLayout::Pq2,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TernaryLayout::I2S => "i2_s",
            TernaryLayout::Tq1 => "tq1_0",
            TernaryLayout::Tq2 => "tq2_0",
            TernaryLayout::Q2 => "q2_0",
            TernaryLayout::Pq2 => "pq2_0",
        }
    }

    /// Returns the layout of this name.
    pub fn named(name: &str) -> Option<TernaryLayout> {
        TernaryLayout::ALL
            .into_iter()
            .find(|layout| layout.name() == name)
    }

    fn blocks(self) -> BlockLayout {
        match self {
            TernaryLayout::I2S => BlockLayout::I2s(I2sOrder::X86),
            TernaryLayout::Tq1 => BlockLayout::Tq1,
            TernaryLayout::Tq2 => BlockLayout::Tq2,
            TernaryLayout::Q2 => BlockLayout::Q2Group64,
            TernaryLayout::Pq2 => BlockLayout::Q2Group128,
        }
    }
}

impl fmt::Display for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Container::HuggingFace => f.write_str("a Hugging Face directory"),
            Container::Bin => f.write_str("a .bin file"),
            Container::Gguf(layout) => write!(f, "GGUF with {}", layout.blocks().name()),
        }
    }
}

/// The sources of chat templates.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatTemplates<'a> {
    /// The template of conversations without tools.
    pub default: Option<&'a str>,
    /// The template of conversations with tools, if they have one of their own.
    pub tool_use: Option<&'a str>,
}

/// Writes the checkpoint `source` to `out`, a directory or a file that does not exist yet.
/// `templates` are the chat templates that the checkpoint is served with. Returns what was left
/// out.
///
/// # Errors
/// If the checkpoint is malformed or not ternary already, the container cannot hold a part of it,
/// or writing fails.
pub fn write(
    source: &Source,
    container: Container,
    out: &Path,
    templates: ChatTemplates<'_>,
    watch: &Watch,
) -> LoadResult<Vec<LeftOut>> {
    let config = ModelConfig::read(source)?;
    let class = config.architecture.class_of(config.has_head);
    let is_known = *config.architecture != BITNET_GEMMA3;
    let problem = format_args!("models of {class} are not converted");
    require(is_known, "architectures", problem)?;
    let can_hold = config.recurrent.is_none() || container != Container::Bin;
    let problem = format_args!("models of {class} are not written to .bin files");
    require(can_hold, "architectures", problem)?;
    let can_hold = config.experts.is_none() || matches!(container, Container::Gguf(_));
    let problem = format_args!("models of {class} are written to GGUF files only");
    require(can_hold, "architectures", problem)?;
    let can_hold = config.rotation.is_none() || matches!(container, Container::Gguf(_));
    let problem = "only GGUF files can hold rotated weights";
    require(can_hold, "prism.hadamard", problem)?;
    let mut left_out = Vec::new();
    with_parts(source, &config, |model| {
        left_out.clone_from(&model.left_out);
        match container {
            Container::HuggingFace => hugging_face::write(source, &config, model, out, watch),
            Container::Bin => bin_file::write(source, &config, model, out, watch),
            Container::Gguf(layout) => {
                let text = gguf_file::FileText {
                    name: out
                        .file_stem()
                        .map(|stem| stem.to_string_lossy().into_owned()),
                    templates,
                };
                gguf_file::write(
                    (source, &config),
                    model,
                    layout.blocks(),
                    (out, &text),
                    watch,
                )
            }
        }
    })?;
    Ok(left_out)
}

/// Calls `use_parts` with the parts of a checkpoint.
fn with_parts(
    source: &Source,
    config: &ModelConfig,
    use_parts: impl FnOnce(&ModelParts<'_>) -> LoadResult<()>,
) -> LoadResult<()> {
    let files = TensorFiles::open(source)?;
    use_parts(&ModelParts::list(config, &files)?)
}

/// Reads a JSON file of a checkpoint; `null` if there is none.
fn read_json(source: &Source, name: &str) -> LoadResult<Value> {
    match source.read(name)? {
        Some(text) => parse_json(name, &text),
        None => Ok(Value::Null),
    }
}

/// Returns how many frequencies belong to time, height and width in the positions of images, if
/// the checkpoint says it. In texts all three positions are the same, so this engine needs no
/// sections. Other programs do.
fn position_sections(source: &Source) -> LoadResult<Option<Vec<i32>>> {
    let Some(gguf) = source.gguf() else {
        let text = read_json(source, "config.json")?;
        let text = text.get("text_config").unwrap_or(&text);
        let sections = text["rope_parameters"]["mrope_section"].as_array();
        let size = |size: &Value| size.as_i64().and_then(|size| size.try_into().ok());
        return Ok(sections.and_then(|sections| sections.iter().map(size).collect()));
    };
    let sections = gguf.metadata().numbers(POSITION_SECTIONS)?;
    let first = |sections: &[f64]| sections.iter().take(3).map(|size| *size as i32).collect();
    Ok(sections.map(first))
}
