//! What `sterna inspect` reports. Its JSON is this, field by field: fields may be added later, but
//! none is renamed or removed.

use std::path::Path;

use serde::Serialize;

use crate::checkpoint::{
    CodeCounts, I2sOrder, LeftOut, MaskedBlocks, ModelConfig, ModelFacts, ScaleSummary, Survey,
    TensorKind,
};

/// The report of a checkpoint. What is not known is `null` or empty.
#[derive(Clone, Debug, Serialize)]
pub struct InspectReport {
    /// The path that was inspected.
    pub path: String,
    /// Whether `sterna serve` would serve it.
    pub served: bool,
    /// Why not.
    pub refusals: Vec<String>,
    /// What is unusual, although it would be served.
    pub warnings: Vec<String>,
    /// `huggingface`, `gguf`, `sglbitnt` or `unknown`.
    pub container: &'static str,
    /// What more is known of the container, such as its variant.
    pub container_detail: Option<String>,
    /// The files that hold tensors.
    pub files: Vec<String>,
    /// The bytes of these files.
    pub bytes: u64,
    /// The weights of all tensors.
    pub parameters: u64,
    /// The hyperparameters, as the files state them.
    pub model: ModelFacts,
    /// The tensors by kind.
    pub tensors: Vec<TensorKind>,
    /// The kinds of tensors that no architecture of this engine has.
    pub unknown_tensors: Vec<String>,
    /// The ternary weights. `null` if there are none, such as in a checkpoint of float masters.
    pub codes: Option<CodeCounts>,
    /// The scales of the ternary weights, as the files store them.
    pub scales: Option<ScaleSummary>,
    /// The stop tokens.
    pub stops: Vec<StopToken>,
    /// The chat template.
    pub template: Option<TemplateReport>,
    /// What the model computes: `text`, or `embeddings` of texts if it has no output head.
    pub computes: Option<&'static str>,
    /// How the hidden states of a text become its embedding: `last token` or `mean`.
    pub pooling: Option<&'static str>,
    /// The masked blocks that the model fills, if it was trained for that.
    pub masked_blocks: Option<MaskedBlocks>,
    /// The recurrent layers, if there are any.
    pub recurrent: Option<RecurrentReport>,
    /// The mixtures of experts, if there are any.
    pub experts: Option<ExpertsReport>,
    /// The layers that attend to near tokens only, if there are any.
    pub windows: Option<WindowReport>,
    /// How the weights are rotated, if they are.
    pub rotation: Option<RotationReport>,
    /// The tensors of parts that text generation does not need.
    pub left_out: Vec<LeftOut>,
    #[serde(skip)]
    pub(super) metadata_template: Option<String>,
}

/// The recurrent layers of a model.
#[derive(Clone, Debug, Serialize)]
pub struct RecurrentReport {
    /// The number of recurrent layers.
    pub recurrent_layers: usize,
    /// The number of layers that attend.
    pub attention_layers: usize,
    /// The number of heads of queries and keys.
    pub key_heads: usize,
    /// The number of heads of values.
    pub value_heads: usize,
    /// The number of values in a head of queries or keys.
    pub key_dim: usize,
    /// The number of values in a head of values.
    pub value_dim: usize,
    /// The tokens that the convolution sees.
    pub convolution_tokens: usize,
    /// The bytes of the states of one sequence, all layers.
    pub state_bytes: usize,
}

/// The mixtures of experts in the feed-forward halves of layers.
#[derive(Clone, Debug, Serialize)]
pub struct ExpertsReport {
    /// The number of layers with a mixture.
    pub mixture_layers: usize,
    /// The number of layers with a dense feed-forward half.
    pub dense_layers: usize,
    /// The experts of a layer.
    pub count: usize,
    /// The experts that a token uses.
    pub used: usize,
    /// The number of values between gate and down of an expert.
    pub intermediate: usize,
    /// Whether the weights of a token's experts add up to 1. Otherwise those of all experts do.
    pub normalizes: bool,
    /// The largest gate, and the largest magnitude of up, if they are limited.
    pub gate_limit: Option<f32>,
}

/// The layers that attend to near tokens only.
#[derive(Clone, Debug, Serialize)]
pub struct WindowReport {
    /// The number of these layers.
    pub local_layers: usize,
    /// The number of tokens that a token attends to there, itself included.
    pub tokens: usize,
}

/// A rotation of weights (`prism.hadamard`).
#[derive(Clone, Debug, Serialize)]
pub struct RotationReport {
    /// The version of the format.
    pub version: u32,
    /// The columns that are rotated together.
    pub block_size: usize,
    /// `identity` if all signs are 1, or `explicit`.
    pub sign_mode: &'static str,
    /// The number of matrices whose input is rotated.
    pub matrices: usize,
    /// Whether the rows of the embedding are rotated.
    pub embedding: bool,
    /// Whether output projections of recurrent layers take their input with the value heads of a
    /// key head side by side (`gdn_v_grouped`).
    pub groups_values: bool,
}

/// A stop token.
#[derive(Clone, Debug, Serialize)]
pub struct StopToken {
    /// Its id.
    pub id: u32,
    /// Its text, if the tokenizer can be read.
    pub text: Option<String>,
}

/// A chat template.
#[derive(Clone, Debug, Serialize)]
pub struct TemplateReport {
    /// The file that has it; `tokenizer.chat_template` for the metadata of a GGUF file; `built-in`
    /// if the metadata has none or a wrong one.
    pub source: &'static str,
    /// Its first lines, shortened.
    pub first_lines: Vec<String>,
}

impl InspectReport {
    /// Returns the report of a survey. What needs the tokenizer or the model is still missing.
    pub(super) fn new(path: &Path, survey: Survey) -> InspectReport {
        let unknown = survey.matrices.iter().filter(|kind| !kind.is_known);
        let stops = survey.stops.iter().map(|&id| StopToken { id, text: None });
        let mut warnings = Vec::new();
        if survey.codes.is_some_and(|codes| codes.unusual) {
            let warning = "the shares of -1, 0 and 1 are not those of a trained model; the \
                           checkpoint was probably converted wrongly";
            warnings.push(warning.to_owned());
        }
        let has_own_head = survey
            .matrices
            .iter()
            .any(|kind| kind.kind == "lm_head.weight");
        if survey.container == "sglbitnt" && survey.facts.tied == Some(true) && has_own_head {
            let warning = "tie_word_embeddings is set, but the file has an lm_head.weight of its \
                           own, which is used";
            warnings.push(warning.to_owned());
        }
        InspectReport {
            path: path.display().to_string(),
            served: false,
            refusals: survey.problems,
            warnings,
            container: survey.container,
            container_detail: survey.container_detail,
            files: survey.files,
            bytes: survey.bytes,
            parameters: survey.parameters,
            model: survey.facts,
            unknown_tensors: unknown.map(|kind| kind.kind.clone()).collect(),
            tensors: survey.matrices,
            codes: survey.codes,
            scales: survey.scales,
            stops: stops.collect(),
            template: None,
            computes: None,
            pooling: None,
            masked_blocks: None,
            recurrent: None,
            experts: None,
            windows: None,
            rotation: None,
            left_out: survey.left_out,
            metadata_template: survey.metadata_template,
        }
    }

    /// Returns the report of files that cannot be read at all.
    pub(super) fn unreadable(path: &Path, why: String) -> InspectReport {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let container = match extension.map(str::to_lowercase).as_deref() {
            Some("gguf") => "gguf",
            Some("bin") => "sglbitnt",
            _ => "unknown",
        };
        InspectReport {
            path: path.display().to_string(),
            served: false,
            refusals: vec![why],
            warnings: Vec::new(),
            container,
            container_detail: None,
            files: Vec::new(),
            bytes: std::fs::metadata(path).map_or(0, |metadata| metadata.len()),
            parameters: 0,
            model: ModelFacts::default(),
            tensors: Vec::new(),
            unknown_tensors: Vec::new(),
            codes: None,
            scales: None,
            stops: Vec::new(),
            template: None,
            computes: None,
            pooling: None,
            masked_blocks: None,
            recurrent: None,
            experts: None,
            windows: None,
            rotation: None,
            left_out: Vec::new(),
            metadata_template: None,
        }
    }

    /// Adds what a configuration says of what only some families have.
    pub(super) fn describe(&mut self, config: &ModelConfig) {
        self.masked_blocks = config.masked_blocks;
        let recurrent = config.recurrent.as_ref();
        self.recurrent = recurrent.map(|recurrent| RecurrentReport {
            recurrent_layers: recurrent.layers(),
            attention_layers: config.attention_layers(),
            key_heads: recurrent.key_heads,
            value_heads: recurrent.value_heads,
            key_dim: recurrent.key_dim,
            value_dim: recurrent.value_dim,
            convolution_tokens: recurrent.taps,
            state_bytes: recurrent.state_bytes(),
        });
        let experts = config.experts.as_ref();
        self.experts = experts.map(|experts| {
            let dense_layers = experts
                .is_dense
                .iter()
                .filter(|is_dense| **is_dense)
                .count();
            ExpertsReport {
                mixture_layers: config.layers - dense_layers,
                dense_layers,
                count: experts.count,
                used: experts.used,
                intermediate: experts.intermediate,
                normalizes: experts.normalizes,
                gate_limit: experts.gate_limit,
            }
        });
        self.windows = config.local.as_ref().map(|local| WindowReport {
            local_layers: local.is_local.iter().filter(|is_local| **is_local).count(),
            tokens: local.window,
        });
        let rotation = config.rotation.as_ref();
        self.rotation = rotation.map(|rotation| RotationReport {
            version: rotation.version(),
            block_size: rotation.block,
            sign_mode: rotation.sign_mode(),
            matrices: rotation.matrices(),
            embedding: rotation.has_rotated_embedding,
            groups_values: rotation.has_grouped_values,
        });
    }

    /// Adds a refusal, unless it is there already.
    pub(super) fn refuse(&mut self, why: String) {
        if !self.refusals.contains(&why) {
            self.refusals.push(why);
        }
    }

    /// Records the order of I2_S weights, if there are any, and how it was told.
    pub(super) fn set_i2s_order(&mut self, order: Option<I2sOrder>, told_by: &'static str) {
        let name = order.map_or("order unknown", I2sOrder::name);
        for kind in &mut self.tensors {
            if kind.layout.starts_with("I2_S") {
                kind.layout = format!("I2_S ({})", name);
                kind.told_by = told_by;
            }
        }
    }
}
