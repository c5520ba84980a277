//! Rotated weights: the keys `prism.hadamard` of a GGUF file, in versions 1 and 2.
//!
//! A rotated matrix is stored as `W·H·D`, where H is the Walsh–Hadamard matrix of each block of
//! columns and D is a diagonal of signs. Its product needs the input `H·D·x`. A rotated embedding
//! is stored as `E·D·H`, and each of its rows is turned back after the look-up. Version 2 is for a
//! head that is the rotated embedding.
//!
//! The format is that of Prism ML's Bonsai 2 files.
//!
//! Invariant: each key is honoured, or the file is refused by the name of the key. A model that
//! ignored one of them would answer with fluent noise.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::checkpoint::{
    Architecture, FileNames, Gguf, LoadError, LoadResult, Metadata, MetadataEntries, MetadataValue,
};

/// How the keys begin.
const PREFIX: &str = "prism.hadamard.";
/// The only transform, and the only axis.
const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
const AXIS: &str = "input-last-dimension";
/// The sign modes: all signs are 1, or the file lists them.
const IDENTITY: &str = "identity";
const EXPLICIT: &str = "explicit";

/// The keys, after the prefix.
const KEYS: [&str; 11] = [
    "version",
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
    "tied_output",
];

/// The matrices of a layer that may be rotated, as GGUF calls them.
const OF_LAYERS: [&str; 10] = [
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_qkv",
    "attn_gate",
    "ssm_out",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

const EMBEDDING: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// Which weights of a model are rotated, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    /// The columns that are rotated together: a power of two.
    pub block: usize,
    /// The signs of the columns, 1 or −1, by the number of columns. `None` if all are 1.
    signs: Option<BTreeMap<usize, Arc<[f32]>>>,
    /// The rotated matrices, as Hugging Face calls their tensors.
    matrices: BTreeSet<String>,
    /// Whether the rows of the embedding are rotated.
    pub has_rotated_embedding: bool,
    /// Whether the head is the rotated embedding.
    is_head_tied: bool,
    /// Whether the output projections of recurrent layers take their input with the value heads of
    /// a key head side by side. Otherwise they take it in the order of the other tensors.
    pub has_grouped_values: bool,
}

impl Rotation {
    /// Returns whether the tensor that Hugging Face calls `name` takes rotated input.
    pub(crate) fn is_of(&self, name: &str) -> bool {
        self.matrices.contains(name)
    }

    /// Returns the signs of rows of this many values. `None` if all are 1.
    pub(crate) fn signs(&self, columns: usize) -> Option<&Arc<[f32]>> {
        let signs = self.signs.as_ref()?;
        Some(signs.get(&columns).expect("a rotated matrix has signs"))
    }

    /// Returns the version of the format.
    pub fn version(&self) -> u32 {
        if self.is_head_tied { 2 } else { 1 }
    }

    /// Returns the number of matrices whose input is rotated.
    pub fn matrices(&self) -> usize {
        self.matrices.len()
    }

    /// Returns the sign mode, as the format names it.
    pub fn sign_mode(&self) -> &'static str {
        match self.signs {
            None => IDENTITY,
            Some(_) => EXPLICIT,
        }
    }

    /// Reads the keys of a file, if there are any.
    ///
    /// # Errors
    /// If a key is missing, unknown or malformed, or is at odds with another key or with a tensor.
    pub(super) fn read(
        gguf: &Gguf,
        architecture: &Architecture,
        has_recurrent_layers: bool,
    ) -> LoadResult<Option<Rotation>> {
        let metadata = gguf.metadata();
        let mut keys = metadata.keys_with_prefix(PREFIX).peekable();
        if keys.peek().is_none() {
            return Ok(None);
        }
        let is_unknown = |key: &&str| !KEYS.contains(&&key[PREFIX.len()..]);
        if let Some(unknown) = keys.find(is_unknown) {
            let known = KEYS.join(", ");
            let problem = format!("the rotation of weights has no such key; the keys are {known}");
            return Err(metadata.error(unknown, problem));
        }
        let keys = RotationKeys { gguf, metadata };
        keys.rotation(architecture, has_recurrent_layers).map(Some)
    }

    /// Returns the keys of a file with this rotation.
    pub(super) fn metadata(&self, names: FileNames) -> MetadataEntries {
        let text = |text: &str| MetadataValue::Text(text.to_owned());
        let is_tied = |name: &&String| self.is_head_tied && names.of(name) == HEAD;
        let named = self.matrices.iter().filter(|name| !is_tied(name));
        let named = named.map(|name| names.of(name)).collect();
        let inverse = self.has_rotated_embedding.then(|| EMBEDDING.to_owned());
        let mut entries = vec![
            ("version", MetadataValue::Size(self.version())),
            ("block_size", MetadataValue::Size(self.block as u32)),
            ("transform", text(TRANSFORM)),
            ("axis", text(AXIS)),
            ("weight_names", MetadataValue::Texts(named)),
            (
                "inverse_weight_names",
                MetadataValue::Texts(inverse.into_iter().collect()),
            ),
            (
                "gdn_v_grouped",
                MetadataValue::Bool(self.has_grouped_values),
            ),
            ("tied_output", MetadataValue::Bool(self.is_head_tied)),
            ("sign_mode", text(self.sign_mode())),
        ];
        if let Some(signs) = &self.signs {
            let widths = signs.keys().map(|width| *width as i32).collect();
            let values = signs.values().flat_map(|signs| signs.iter());
            let values = values.map(|sign| *sign as i32).collect();
            entries.push(("sign_widths", MetadataValue::Integers(widths)));
            entries.push(("sign_values", MetadataValue::Integers(values)));
        }
        let prefixed = |(key, value)| (format!("{PREFIX}{key}"), value);
        entries.into_iter().map(prefixed).collect()
    }
}

/// The keys of a file.
struct RotationKeys<'a> {
    gguf: &'a Gguf,
    metadata: &'a Metadata,
}

impl<'a> RotationKeys<'a> {
    fn rotation(
        &self,
        architecture: &Architecture,
        has_recurrent_layers: bool,
    ) -> LoadResult<Rotation> {
        if architecture.layer.input_norm.is_some() {
            let problem = "rotated weights with a norm on the input of each linear are not \
                           supported";
            return Err(self.error("version", problem));
        }
        let is_head_tied = self.is_head_tied()?;
        self.require_text("transform", TRANSFORM)?;
        self.require_text("axis", AXIS)?;
        let has_grouped_values = match self.metadata.bool(&key("gdn_v_grouped"))? {
            None if has_recurrent_layers => return Err(self.error("gdn_v_grouped", "missing")),
            stated => stated.unwrap_or(false),
        };
        if has_grouped_values && !has_recurrent_layers {
            let problem = "must be false, because this architecture has no recurrent layers";
            return Err(self.error("gdn_v_grouped", problem));
        }
        let block = self.metadata.require_size(&key("block_size"))?;
        if !block.is_power_of_two() {
            let problem = format!("must be a power of two; got {block}");
            return Err(self.error("block_size", problem));
        }
        let signs = self.signs()?;
        let has_rotated_embedding = self.has_rotated_embedding(is_head_tied)?;
        let mut matrices = BTreeSet::new();
        for name in self.names("weight_names")? {
            if !is_rotatable(name) {
                let problem = format!("{name} cannot be rotated");
                return Err(self.error("weight_names", problem));
            }
            if is_head_tied && &**name == HEAD {
                let problem = format!("must not name {HEAD}, because the head is the embedding");
                return Err(self.error("weight_names", problem));
            }
            self.check_width("weight_names", name, block, signs.as_ref())?;
            if !matrices.insert(self.gguf.file_names().hugging_face_name(name)) {
                let problem = format!("{name} occurs twice");
                return Err(self.error("weight_names", problem));
            }
        }
        if has_rotated_embedding {
            self.check_width("inverse_weight_names", EMBEDDING, block, signs.as_ref())?;
        }
        if is_head_tied {
            matrices.insert(self.gguf.file_names().hugging_face_name(HEAD));
        }
        Ok(Rotation {
            block,
            signs,
            matrices,
            has_rotated_embedding,
            is_head_tied,
            has_grouped_values,
        })
    }

    /// Reads the version, and returns whether the head is the rotated embedding.
    fn is_head_tied(&self) -> LoadResult<bool> {
        let version = self.metadata.require_size(&key("version"))?;
        let is_tied = self.metadata.bool(&key("tied_output"))?.unwrap_or(false);
        let has_head = self.has_tensor(HEAD);
        match (version, is_tied) {
            (1, false) => Ok(false),
            (1, true) => Err(self.error("tied_output", "must be false in version 1")),
            (2, false) => Err(self.error("tied_output", "must be true in version 2")),
            (2, true) if has_head => {
                let problem = format!("must be false, because the file has {HEAD}");
                Err(self.error("tied_output", problem))
            }
            (2, true) => Ok(true),
            _ => {
                let problem = format!("must be 1 or 2; got {version}");
                Err(self.error("version", problem))
            }
        }
    }

    /// Reads the signs, by the number of columns.
    fn signs(&self) -> LoadResult<Option<BTreeMap<usize, Arc<[f32]>>>> {
        let lists = ["sign_widths", "sign_values"];
        let [widths, values] = lists.map(|list| self.metadata.numbers(&key(list)));
        let (widths, values) = (widths?, values?);
        match self.metadata.require_text(&key("sign_mode"))? {
            IDENTITY => {
                for (name, list) in lists.into_iter().zip([widths, values]) {
                    if list.is_some_and(|list| !list.is_empty()) {
                        let problem = "must be empty or missing if sign_mode is identity";
                        return Err(self.error(name, problem));
                    }
                }
                return Ok(None);
            }
            EXPLICIT => {}
            other => {
                let problem = format!("must be identity or explicit; got {other:?}");
                return Err(self.error("sign_mode", problem));
            }
        }
        let missing = |name| self.error(name, "missing, although sign_mode is explicit");
        let widths = widths.ok_or_else(|| missing("sign_widths"))?;
        let mut values = values.ok_or_else(|| missing("sign_values"))?;
        if let Some(value) = values.iter().find(|value| value.abs() != 1.0) {
            let problem = format!("must be 1 or -1; got {value}");
            return Err(self.error("sign_values", problem));
        }
        let mut signs = BTreeMap::new();
        for &width in widths {
            let count = width as usize; // Not more than there are values, or it is refused.
            if width < 1.0 || count as f64 != width || count > values.len() {
                let left = values.len();
                let problem = format!("{width} signs of a row, but sign_values has {left} more");
                return Err(self.error("sign_widths", problem));
            }
            let (own, rest) = values.split_at(count);
            let own = own.iter().map(|sign| *sign as f32).collect();
            if signs.insert(count, own).is_some() {
                return Err(self.error("sign_widths", format!("{width} occurs twice")));
            }
            values = rest;
        }
        if !values.is_empty() {
            let problem = format!("{} more than sign_widths counts", values.len());
            return Err(self.error("sign_values", problem));
        }
        Ok(Some(signs))
    }

    fn has_rotated_embedding(&self, is_head_tied: bool) -> LoadResult<bool> {
        let inverse = self.names("inverse_weight_names")?;
        if let Some(other) = inverse.iter().find(|name| &***name != EMBEDDING) {
            let problem = format!("must name nothing but {EMBEDDING}; got {other}");
            return Err(self.error("inverse_weight_names", problem));
        }
        let is_rotated = !inverse.is_empty();
        if is_head_tied && !is_rotated {
            let problem = format!("must name {EMBEDDING}, because tied_output is true");
            return Err(self.error("inverse_weight_names", problem));
        }
        if is_rotated && !is_head_tied && !self.has_tensor(HEAD) {
            let problem =
                format!("the embedding is rotated and there is no {HEAD}: version 2 is for that");
            return Err(self.error("version", problem));
        }
        Ok(is_rotated)
    }

    /// # Errors
    /// If there is no such tensor, or its rows are not whole blocks, or have no signs.
    fn check_width(
        &self,
        list: &str,
        name: &str,
        block: usize,
        signs: Option<&BTreeMap<usize, Arc<[f32]>>>,
    ) -> LoadResult<()> {
        let hugging_face_name = self.gguf.file_names().hugging_face_name(name);
        let shape = self.gguf.shape(&hugging_face_name);
        let Some(&width) = shape.and_then(<[usize]>::last) else {
            return Err(self.error(list, format!("the file has no tensor {name}")));
        };
        if !width.is_multiple_of(block) {
            let problem = format!("{name} has rows of {width} values, no whole blocks of {block}");
            return Err(self.error("block_size", problem));
        }
        if signs.is_some_and(|signs| !signs.contains_key(&width)) {
            let problem =
                format!("{name} has rows of {width} values, for which there are no signs");
            return Err(self.error("sign_widths", problem));
        }
        Ok(())
    }

    fn names(&self, list: &str) -> LoadResult<&'a [Box<str>]> {
        self.metadata.require_texts(&key(list))
    }

    fn require_text(&self, name: &str, known: &str) -> LoadResult<()> {
        let found = self.metadata.require_text(&key(name))?;
        let problem = || self.error(name, format!("must be {known}; got {found:?}"));
        (found == known).then_some(()).ok_or_else(problem)
    }

    fn has_tensor(&self, name: &str) -> bool {
        let name = self.gguf.file_names().hugging_face_name(name);
        self.gguf.shape(&name).is_some()
    }

    fn error(&self, name: &str, problem: impl std::fmt::Display) -> LoadError {
        self.metadata.error(&key(name), problem)
    }
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Returns whether a tensor is one of those that may be rotated.
fn is_rotatable(name: &str) -> bool {
    let of_layer = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        layer.parse::<u32>().ok()?;
        rest.strip_suffix(".weight")
    };
    name == HEAD || of_layer().is_some_and(|module| OF_LAYERS.contains(&module))
}
