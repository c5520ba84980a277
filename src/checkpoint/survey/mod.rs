//! A survey of a checkpoint: what its files say, whether or not this engine can load it.
//!
//! Invariant: a part that cannot be read is missing in the survey, and the reason is among its
//! problems. It does not hide the other parts.

mod codes;
mod facts;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use self::codes::{WeightCodes, codes_of_all};
use super::{
    Gguf, LeftOut, LoadError, LoadResult, Source, Storage, Tensor, TensorFiles, architecture,
    config,
};

pub use self::codes::{CodeCounts, ScaleSummary};
pub use self::facts::ModelFacts;

/// What the files of a checkpoint say.
#[derive(Debug)]
pub struct Survey {
    /// `huggingface`, `gguf` or `sglbitnt`.
    pub container: &'static str,
    /// What more is known of the container, such as its variant.
    pub container_detail: Option<String>,
    /// The files that hold tensors.
    pub files: Vec<String>,
    /// The bytes of these files.
    pub bytes: u64,
    /// The hyperparameters.
    pub facts: ModelFacts,
    /// The tensors of parts that text generation does not need.
    pub left_out: Vec<LeftOut>,
    /// The weights of all tensors.
    pub parameters: u64,
    /// The tensors by kind.
    pub matrices: Vec<TensorKind>,
    /// The ternary weights of all tensors.
    pub codes: Option<CodeCounts>,
    /// The scales of the ternary weights, as the files store them.
    pub scales: Option<ScaleSummary>,
    /// The ids of the stop tokens, if they are known.
    pub stops: Vec<u32>,
    /// The chat template in the metadata of a GGUF file.
    pub metadata_template: Option<String>,
    /// Why parts of the files cannot be read.
    pub problems: Vec<String>,
}

/// Tensors of all layers that have the same name except for the number of the layer.
#[derive(Clone, Debug, Serialize)]
pub struct TensorKind {
    /// The name in the file, with `*` for the number of the layer.
    pub kind: String,
    /// The number of tensors.
    pub count: usize,
    /// How the values are stored.
    pub layout: String,
    /// How the layout was told: `header` (the file names the type), `stride` (by the distance to
    /// the next tensor), `probe` (by trial on a text), `writer` (only one program writes such
    /// files), `flag`, or `unknown`.
    pub told_by: &'static str,
    /// The type number in a GGUF file.
    pub type_number: Option<u32>,
    /// The sizes of the first tensor, the outermost first.
    pub shape: Vec<usize>,
    /// The values of all tensors.
    pub weights: u64,
    /// The bytes of all tensors in the file.
    pub bytes: u64,
    /// What one scale covers, if the weights are ternary: `tensor`, `row` or `group of N`.
    pub scale_per: Option<String>,
    /// Whether an architecture of this engine has such a tensor.
    pub is_known: bool,
}

impl Survey {
    /// Surveys the checkpoint at `path`, and returns the checkpoint too.
    ///
    /// # Errors
    /// If there is no checkpoint at `path`, or its files are malformed.
    pub fn open(path: &Path) -> Result<(Survey, Source), LoadError> {
        let (source, problems) = Source::open_leniently(path)?;
        let survey = Survey::of(&source, problems);
        Ok((survey, source))
    }

    fn of(source: &Source, problems: Vec<LoadError>) -> Survey {
        let (container, container_detail) = match (source.gguf(), source.bin()) {
            (Some(_), _) => ("gguf", None),
            (None, Some(bin)) => {
                let detail = format!("variant {}", bin.variant());
                ("sglbitnt", Some(detail))
            }
            (None, None) => ("huggingface", None),
        };
        let metadata = source.gguf().map(|gguf| gguf.metadata());
        let template = metadata.and_then(|metadata| metadata.text("tokenizer.chat_template").ok());
        let mut survey = Survey {
            container,
            container_detail,
            files: Vec::new(),
            bytes: 0,
            facts: ModelFacts::default(),
            left_out: Vec::new(),
            parameters: 0,
            matrices: Vec::new(),
            codes: None,
            scales: None,
            stops: Vec::new(),
            metadata_template: template.flatten().map(str::to_owned),
            problems: problems.iter().map(ToString::to_string).collect(),
        };
        let facts = ModelFacts::read(source);
        survey.facts = survey.kept(facts).unwrap_or_default();
        let read = survey.read_tensors(source);
        survey.kept(read);
        if let Some(vocabulary) = survey.facts.vocabulary {
            let stops = config::stop_tokens(source, vocabulary as usize);
            survey.stops = survey.kept(stops).unwrap_or_default();
        }
        survey
    }

    /// Returns a result, or keeps its error among the problems.
    fn kept<T>(&mut self, result: LoadResult<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.problem(error);
                None
            }
        }
    }

    fn problem(&mut self, error: impl ToString) {
        let error = error.to_string();
        if !self.problems.contains(&error) {
            self.problems.push(error);
        }
    }

    fn read_tensors(&mut self, source: &Source) -> LoadResult<()> {
        let files = TensorFiles::open(source)?;
        self.files = files.names().to_vec();
        self.bytes = files.bytes();
        let unused = config::ModelConfig::read(source).map(|config| config.unused_parts);
        let unused = unused.unwrap_or_default(); // Loading says what is wrong.
        self.left_out = files.tensors()?.leave_out(&unused);
        let is_unused = |name: &str| unused.iter().any(|part| name.starts_with(part));
        let tensors = files.tensors()?.into_list();
        let types = source.gguf().map(|gguf| gguf.type_numbers());
        let types = types.unwrap_or_default();
        let codes = codes_of_all(&tensors, &self.facts);
        let mut kinds: BTreeMap<String, TensorKind> = BTreeMap::new();
        let mut total = WeightCodes::default();
        for ((name, tensor), codes) in tensors.iter().zip(codes) {
            let codes = self.kept(codes).flatten();
            if name.ends_with(".weight_scale") {
                continue; // It belongs to the tensor of the weights.
            }
            let weights = shape(tensor).iter().product::<usize>() as u64;
            self.parameters += weights;
            let number = types.get(tensor.name.as_str()).copied();
            let kind = TensorKind {
                kind: kind_of(&tensor.name),
                count: 1,
                layout: layout(tensor, codes.is_some()),
                told_by: if number.is_some() { "stride" } else { "header" },
                type_number: number,
                shape: shape(tensor),
                weights,
                bytes: tensor.bytes.len() as u64,
                scale_per: codes.as_ref().map(WeightCodes::scale_per),
                is_known: is_known(name) || is_unused(&tensor.name),
            };
            kind.count_among(&mut kinds);
            if let Some(codes) = codes {
                total.add(codes);
            }
        }
        let unread = source.gguf().into_iter().flat_map(Gguf::unread_tensors);
        for entry in unread {
            let weights = entry.shape.iter().product::<usize>() as u64;
            self.parameters += weights;
            let kind = TensorKind {
                kind: kind_of(entry.name),
                count: 1,
                layout: format!("type {} (not read)", entry.type_number),
                told_by: "unknown",
                type_number: Some(entry.type_number),
                shape: entry.shape.to_vec(),
                weights,
                bytes: entry.bytes as u64,
                scale_per: None,
                is_known: is_known(&entry.hugging_face_name) || is_unused(entry.name),
            };
            kind.count_among(&mut kinds);
        }
        self.matrices = kinds.into_values().collect();
        (self.codes, self.scales) = total.summary();
        Ok(())
    }
}

impl TensorKind {
    /// Counts this tensor among the tensors of its kind.
    fn count_among(self, kinds: &mut BTreeMap<String, TensorKind>) {
        if let Some(kind) = kinds.get_mut(&self.kind) {
            kind.count += self.count;
            kind.weights += self.weights;
            kind.bytes += self.bytes;
        } else {
            kinds.insert(self.kind.clone(), self);
        }
    }
}

/// Returns the name with `*` for the number of the layer.
fn kind_of(name: &str) -> String {
    let parts = name.split('.').map(|part| match part.parse::<u32>() {
        Ok(_) => "*",
        Err(_) => part,
    });
    parts.collect::<Vec<_>>().join(".")
}

/// Returns the shape in weights.
fn shape(tensor: &Tensor<'_>) -> Vec<usize> {
    match tensor.shape[..] {
        [quarter, columns] if codes::is_packed(tensor) => vec![4 * quarter, columns],
        _ => tensor.shape.clone(),
    }
}

fn layout(tensor: &Tensor<'_>, is_ternary: bool) -> String {
    let name = tensor.storage.name();
    match tensor.storage {
        Storage::Plain(_) if codes::is_packed(tensor) => "U8, four rows a byte".to_owned(),
        Storage::Plain(_) if is_ternary => format!("{name}, ternary already"),
        Storage::Interleaved => "128 weights in 32 bytes".to_owned(),
        _ => name,
    }
}

/// Returns whether an architecture of this engine has a tensor that Hugging Face calls `name`.
fn is_known(name: &str) -> bool {
    const PARTS: [&str; 6] = [
        ".weight",
        ".weight_scale",
        ".rms_norm.weight",
        ".norm.weight",
        ".lrc_U",
        ".lrc_V",
    ];
    const WHOLE: [&str; 3] = [".A_log", ".dt_bias", "rotary_emb.inv_freq"];
    let mut modules = PARTS.iter().filter_map(|part| name.strip_suffix(part));
    let is_whole = WHOLE.iter().any(|whole| name.ends_with(whole));
    // Merged tensors of experts are named as modules.
    modules.any(is_known_module) || is_whole || is_known_module(name)
}

/// Returns whether an architecture of this engine has a module of this name.
fn is_known_module(module: &str) -> bool {
    let of_layer = || {
        let (layer, module) = module.strip_prefix("model.layers.")?.split_once('.')?;
        layer.parse::<u32>().ok()?;
        let mut layers = architecture::ALL.into_iter().map(|known| known.layer);
        layers.any(|layer| layer.has(module)).then_some(())
    };
    ["model.embed_tokens", "model.norm", "lm_head"].contains(&module) || of_layer().is_some()
}
