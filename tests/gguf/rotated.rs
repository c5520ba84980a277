//! Rotated weights: a file with the keys `prism.hadamard` computes what the same matrices compute
//! once they are turned back and kept as floats.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sterna::checkpoint::convert::{self, ChatTemplates, Container, TernaryLayout, Watch};
use sterna::checkpoint::{ModelConfig, Source};
use sterna_kernels::{Isa, Kernels};

use crate::checkpoints::{computed_bits, computed_bits_with, fixture, load};
use crate::{bytes_with_entries, entry, with_entries};

/// The matrices of a layer, as GGUF and as Hugging Face call them.
const OF_LAYERS: [(&str, &str); 7] = [
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// A fixture without a head of its own: its rows have 64 and 128 values.
const TIED: &str = "qwen3-group64-yarn/qwen3-group64-yarn-q2_0.gguf";
/// A fixture with a head of its own: its rows have 128 and 256 values.
const UNTIED: &str = "qwen3-group128-untied/qwen3-group128-untied-ptq1_0.gguf";

/// The keys of a rotation, and what they mean.
#[derive(Clone)]
struct Keys {
    version: u32,
    block: u32,
    sign_mode: String,
    sign_widths: Vec<u32>,
    sign_values: Vec<i32>,
    weight_names: Vec<String>,
    inverse_weight_names: Vec<String>,
    tied_output: bool,
    gdn_v_grouped: bool,
}

impl Keys {
    /// Returns the keys that rotate all matrices of a fixture.
    fn of(file: &str, block: u32, has_signs: bool) -> Keys {
        let is_tied = file == TIED;
        let widths = if is_tied { [64, 128] } else { [128, 256] };
        let count = widths.iter().sum::<u32>();
        let sign = |i: u32| if i * i % 7 < 3 { -1 } else { 1 };
        let of_layer = |layer| OF_LAYERS.map(|(module, _)| format!("blk.{layer}.{module}.weight"));
        let layers = if is_tied { 0..2 } else { 0..1 };
        let head = (!is_tied).then(|| "output.weight".to_owned());
        Keys {
            version: if is_tied { 2 } else { 1 },
            block,
            sign_mode: if has_signs { "explicit" } else { "identity" }.to_owned(),
            sign_widths: widths.into_iter().filter(|_| has_signs).collect(),
            sign_values: (0..count).map(sign).filter(|_| has_signs).collect(),
            weight_names: layers.flat_map(of_layer).chain(head).collect(),
            inverse_weight_names: vec!["token_embd.weight".to_owned()],
            tied_output: is_tied,
            gdn_v_grouped: false,
        }
    }

    /// Returns the entries of a file, by their keys after the prefix.
    fn entries(&self) -> Vec<(&'static str, Vec<u8>)> {
        let made = |name: &'static str, kind, value: Vec<u8>| {
            (name, entry(&format!("prism.hadamard.{name}"), kind, &value))
        };
        let transform = "normalized-sylvester-walsh-hadamard";
        let widths: Vec<_> = self.sign_widths.iter().map(|width| *width as i32).collect();
        vec![
            made("version", 4, self.version.to_le_bytes().to_vec()),
            made("block_size", 4, self.block.to_le_bytes().to_vec()),
            made("transform", 8, text(transform)),
            made("axis", 8, text("input-last-dimension")),
            made("sign_mode", 8, text(&self.sign_mode)),
            made("sign_widths", 9, integers(&widths)),
            made("sign_values", 9, integers(&self.sign_values)),
            made("weight_names", 9, texts(&self.weight_names)),
            made("inverse_weight_names", 9, texts(&self.inverse_weight_names)),
            made("gdn_v_grouped", 7, vec![u8::from(self.gdn_v_grouped)]),
            made("tied_output", 7, vec![u8::from(self.tied_output)]),
        ]
    }

    fn source(&self, file: &str) -> Source {
        let entries = self.entries().into_iter().map(|(_, entry)| entry);
        with_entries(&fixture(file), &entries.collect::<Vec<_>>())
    }

    fn signs(&self, width: usize) -> Vec<f32> {
        let mut values = &self.sign_values[..];
        for &other in &self.sign_widths {
            let (own, rest) = values.split_at(other as usize);
            if other as usize == width {
                return own.iter().map(|sign| *sign as f32).collect();
            }
            values = rest;
        }
        vec![1.0; width]
    }

    /// Turns a row of a rotated matrix back: `W = W'·H·D`.
    fn turn_back(&self, row: &mut [f32]) {
        let block = self.block as usize;
        for part in row.chunks_exact_mut(block) {
            let old = part.to_vec();
            for (i, value) in part.iter_mut().enumerate() {
                let sign = |j: usize| {
                    if (i & j).count_ones().is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                let terms = old.iter().enumerate();
                let sum: f64 = terms.map(|(j, old)| sign(j) * f64::from(*old)).sum();
                *value = (sum / f64::from(self.block).sqrt()) as f32;
            }
        }
        let signs = self.signs(row.len());
        row.iter_mut()
            .zip(signs)
            .for_each(|(value, sign)| *value *= sign);
    }
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns an array in the form of a value: the type of the elements, their number, the elements.
fn array(kind: u32, count: usize, elements: Vec<u8>) -> Vec<u8> {
    let mut value = kind.to_le_bytes().to_vec();
    value.extend((count as u64).to_le_bytes());
    value.extend(elements);
    value
}

pub(crate) fn texts(values: &[String]) -> Vec<u8> {
    array(
        8,
        values.len(),
        values.iter().flat_map(|value| text(value)).collect(),
    )
}

pub(crate) fn integers(values: &[i32]) -> Vec<u8> {
    array(
        5,
        values.len(),
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    )
}

/// Returns the checkpoint beside a fixture's file, with all matrices as floats. `turn_back` is
/// applied to the rows of all matrices.
fn floats(file: &str, turn_back: impl Fn(&str, &mut [f32])) -> Source {
    let folder = fixture(file);
    let folder = folder.parent().unwrap();
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut made: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, tensor) in tensors.tensors() {
        let mut values: Vec<f32> = match tensor.dtype() {
            Dtype::BF16 => halves(tensor.data(), |bits| f32::from_bits(u32::from(bits) << 16)),
            Dtype::F16 => halves(tensor.data(), sterna_kernels::f32_from_f16),
            Dtype::F32 => {
                let values = tensor.data().as_chunks::<4>().0.iter();
                values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            other => panic!("{name} is {other:?}"),
        };
        if let [_, columns] = *tensor.shape() {
            let rows = values.chunks_exact_mut(columns);
            rows.for_each(|row| turn_back(&name, row));
        }
        let data = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        made.push((name, tensor.shape().to_vec(), data));
    }
    let views = made.iter().map(|(name, shape, data)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), data).unwrap();
        (name.clone(), view)
    });
    let weights = safetensors::serialize(views, None).unwrap();
    let config = fs::read(folder.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = json!({
        "quant_method": "bitnet",
        "modules_to_not_convert": ["model.layers.", "lm_head"],
    });
    Source::in_memory([
        ("config.json".to_owned(), config.to_string().into_bytes()),
        ("model.safetensors".to_owned(), weights),
    ])
}

fn halves(data: &[u8], value: impl Fn(u16) -> f32) -> Vec<f32> {
    let halves = data.as_chunks::<2>().0;
    halves
        .iter()
        .map(|half| value(u16::from_le_bytes(*half)))
        .collect()
}

/// Returns the mean distance of the log-probabilities of two models.
fn distance(one: &Source, other: &Source) -> f64 {
    let [one, other] = [one, other].map(computed_bits);
    let log_probabilities = |row: &[u32]| {
        let row: Vec<f64> = row
            .iter()
            .map(|bits| f64::from(f32::from_bits(*bits)))
            .collect();
        let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
        row.into_iter()
            .map(|logit| logit - sum.ln())
            .collect::<Vec<_>>()
    };
    let rows = one.iter().zip(&other).flat_map(|(one, other)| {
        let [one, other] = [one, other].map(|row| log_probabilities(row));
        one.into_iter()
            .zip(other)
            .map(|(one, other)| (one - other).abs())
    });
    let distances: Vec<f64> = rows.collect();
    distances.iter().sum::<f64>() / distances.len() as f64
}

#[test]
fn a_rotated_file_computes_what_its_matrices_compute_when_they_are_turned_back() {
    for file in [TIED, UNTIED] {
        let plain = Source::directory(fixture(file).parent().unwrap());
        let rounding = distance(&plain, &floats(file, |_, _| ()));
        let blocks = if file == TIED { [16, 64] } else { [32, 128] };
        for (block, has_signs) in blocks
            .into_iter()
            .flat_map(|block| [(block, false), (block, true)])
        {
            let keys = Keys::of(file, block, has_signs);
            let expected = floats(file, |_, row| keys.turn_back(row));
            let found = distance(&keys.source(file), &expected);
            let ignored = distance(&plain, &expected);
            println!(
                "{file}, blocks of {block}, signs {has_signs}: {found:.4} from the floats; \
                 {rounding:.4} by rounding alone, {ignored:.4} without the rotation"
            );
            assert!(found < 1.25 * rounding, "{file} in blocks of {block}");
            assert!(ignored > 5.0 * rounding, "the rotation matters");
        }
    }
}

#[test]
fn a_rotated_model_computes_equal_bits_on_every_isa() {
    for file in [TIED, UNTIED] {
        let source = Keys::of(file, 64, true).source(file);
        let expected = computed_bits_with(&source, Kernels::new(Isa::Scalar).unwrap());
        for isa in Isa::available() {
            let found = computed_bits_with(&source, Kernels::new(isa).unwrap());
            assert!(found == expected, "{isa}");
        }
    }
}

#[test]
fn a_rotation_may_leave_matrices_and_the_embedding_as_they_are() {
    let mut keys = Keys::of(UNTIED, 128, true);
    keys.inverse_weight_names.clear();
    keys.weight_names
        .retain(|name| !name.contains("attn_output") && name != "output.weight");
    let is_rotated = |name: &str| {
        let mut modules = OF_LAYERS.iter().filter(|(_, module)| name.contains(module));
        modules.any(|(module, _)| keys.weight_names.iter().any(|name| name.contains(module)))
    };
    let plain = Source::directory(fixture(UNTIED).parent().unwrap());
    let rounding = distance(&plain, &floats(UNTIED, |_, _| ()));
    let expected = floats(UNTIED, |name, row| {
        if is_rotated(name) {
            keys.turn_back(row);
        }
    });
    let found = distance(&keys.source(UNTIED), &expected);
    assert!(
        found < 1.25 * rounding,
        "{found}, and {rounding} by rounding alone"
    );
}

#[test]
fn what_is_wrong_with_the_keys_is_refused_by_name() {
    let refused = |file: &str, keys: &Keys, key: &str| {
        let error = match ModelConfig::read(&keys.source(file)) {
            Err(error) => error.to_string(),
            Ok(_) => load(&keys.source(file)).map(drop).expect_err(key),
        };
        assert!(error.contains(key), "{key}: {error}");
    };
    type Change = fn(&mut Keys);
    let of_both: [(&str, Change); 14] = [
        ("version", |keys| keys.version = 3),
        ("version", |keys| keys.version = 0),
        ("block_size", |keys| keys.block = 0),
        ("block_size", |keys| keys.block = 48),
        ("block_size", |keys| keys.block = 1 << 20),
        ("sign_mode", |keys| keys.sign_mode = "random".to_owned()),
        ("sign_widths", |keys| keys.sign_mode = "identity".to_owned()),
        ("sign_widths", |keys| keys.sign_widths[0] += 1),
        ("sign_widths", |keys| {
            keys.sign_widths.pop();
            let rest = keys.sign_widths[0] as usize;
            keys.sign_values.truncate(rest);
        }),
        ("sign_values", |keys| keys.sign_values.push(1)),
        ("sign_values", |keys| keys.sign_values[5] = 2),
        ("weight_names", |keys| {
            keys.weight_names.push("blk.0.attn_norm.weight".to_owned());
        }),
        ("weight_names", |keys| {
            keys.weight_names.push("blk.7.attn_q.weight".to_owned());
        }),
        ("inverse_weight_names", |keys| {
            keys.inverse_weight_names.push("output.weight".to_owned());
        }),
    ];
    for file in [TIED, UNTIED] {
        for (key, change) in of_both {
            let mut keys = Keys::of(file, 64, true);
            change(&mut keys);
            refused(file, &keys, &format!("prism.hadamard.{key}"));
        }
        let mut keys = Keys::of(file, 64, true);
        keys.tied_output = !keys.tied_output;
        refused(file, &keys, "prism.hadamard.tied_output");
        keys.version = 3 - keys.version;
        let key = if file == TIED {
            "version"
        } else {
            "tied_output"
        };
        refused(file, &keys, &format!("prism.hadamard.{key}"));
        let mut keys = Keys::of(file, 64, true);
        keys.weight_names
            .retain(|name| name != "blk.0.attn_k.weight");
        refused(file, &keys, "blk.0.attn_k.weight");
        let mut keys = Keys::of(file, 64, true);
        keys.weight_names.push(keys.weight_names[3].clone());
        refused(file, &keys, "occurs twice");
    }
    let mut keys = Keys::of(TIED, 64, true);
    keys.inverse_weight_names.clear();
    refused(TIED, &keys, "prism.hadamard.inverse_weight_names");
    keys = Keys::of(TIED, 64, true);
    keys.weight_names.push("output.weight".to_owned());
    refused(TIED, &keys, "prism.hadamard.weight_names");
}

#[test]
fn a_missing_or_an_unknown_key_is_refused_by_name() {
    let keys = Keys::of(UNTIED, 64, true);
    let read = |entries: &[Vec<u8>]| ModelConfig::read(&with_entries(&fixture(UNTIED), entries));
    let optional = ["gdn_v_grouped", "tied_output"];
    for (missing, _) in keys.entries() {
        let left = keys
            .entries()
            .into_iter()
            .filter(|(name, _)| *name != missing);
        let left: Vec<_> = left.map(|(_, entry)| entry).collect();
        if optional.contains(&missing) {
            assert!(read(&left).is_ok(), "{missing}");
        } else if missing != "inverse_weight_names" {
            let error = read(&left).unwrap_err().to_string();
            assert!(error.contains(missing), "{missing}: {error}");
        }
    }
    let mut entries: Vec<_> = keys.entries().into_iter().map(|(_, entry)| entry).collect();
    entries.push(entry("prism.hadamard.seed", 4, &[1, 0, 0, 0]));
    let error = read(&entries).unwrap_err().to_string();
    assert!(error.contains("prism.hadamard.seed"), "{error}");
    entries.pop();
    let grouped = keys
        .entries()
        .iter()
        .position(|(name, _)| *name == "gdn_v_grouped");
    entries[grouped.unwrap()] = entry("prism.hadamard.gdn_v_grouped", 7, &[1]);
    let error = read(&entries).unwrap_err().to_string();
    assert!(error.contains("prism.hadamard.gdn_v_grouped"), "{error}");
    // A single key is not a rotation.
    let block = entry("prism.hadamard.block_size", 4, &64_u32.to_le_bytes());
    let error = read(&[block]).unwrap_err().to_string();
    assert!(error.contains("prism.hadamard.version"), "{error}");
    let other = entry("prism.version", 4, &1_u32.to_le_bytes());
    assert!(read(&[other]).is_ok());
}

#[test]
fn a_conversion_keeps_the_rotation_or_refuses_it() {
    let folder = std::env::temp_dir().join(format!("sterna-rotated-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let out = |name: &str| -> PathBuf { folder.join(name) };
    let convert = |source: &Source, container, out: &Path| {
        convert::write(
            source,
            container,
            out,
            ChatTemplates::default(),
            &Watch::hidden(),
        )
    };
    let plain = [TIED, UNTIED].map(|file| (file, Keys::of(file, 64, true)));
    let hybrids = HYBRIDS.iter().flat_map(|hybrid| {
        let keys = |grouped| hybrid.keys(hybrid.blocks[1], true, grouped);
        [(hybrid.file, keys(false)), (hybrid.file, keys(true))]
    });
    for (number, (file, keys)) in plain.into_iter().chain(hybrids).enumerate() {
        let source = keys.source(file);
        let layout = if file.contains("group64") {
            "q2_0"
        } else {
            "pq2_0"
        };
        let layout = TernaryLayout::named(layout).unwrap();
        let path = out(&format!("{number}.gguf"));
        convert(&source, Container::Gguf(layout), &path).unwrap();
        let written = Source::in_memory([("model.gguf".to_owned(), fs::read(&path).unwrap())]);
        let written = written.with_gguf("model.gguf").unwrap();
        assert_eq!(
            ModelConfig::read(&written).unwrap().rotation,
            ModelConfig::read(&source).unwrap().rotation
        );
        assert!(computed_bits(&written) == computed_bits(&source), "{file}");
        for (container, name) in [(Container::HuggingFace, "hf"), (Container::Bin, "m.bin")] {
            let error = convert(&source, container, &out(name))
                .unwrap_err()
                .to_string();
            let is_hybrid_bin = file.contains("qwen35") && name == "m.bin";
            let named = if is_hybrid_bin { ".bin" } else { "rotated" };
            assert!(error.contains(named), "{error}");
            assert!(!out(name).exists());
        }
    }
    fs::remove_dir_all(&folder).unwrap();
}

/// A hybrid of recurrent layers and attention, and which of its layers are recurrent.
struct Hybrid {
    file: &'static str,
    recurrent: &'static [bool],
    widths: [u32; 2],
    blocks: [u32; 2],
    key_heads: usize,
    value_heads: usize,
    value_dim: usize,
    is_tied: bool,
}

const HYBRIDS: [Hybrid; 2] = [
    Hybrid {
        file: "qwen35-group64-tied/qwen35-group64-tied-q2_0.gguf",
        recurrent: &[true, false, true, false],
        widths: [64, 128],
        blocks: [16, 64],
        key_heads: 4,
        value_heads: 4,
        value_dim: 32,
        is_tied: true,
    },
    Hybrid {
        file: "qwen35-group128-untied/qwen35-group128-untied-ptq1_0.gguf",
        recurrent: &[true, true, false],
        widths: [128, 512],
        blocks: [32, 128],
        key_heads: 2,
        value_heads: 4,
        value_dim: 128,
        is_tied: false,
    },
];

impl Hybrid {
    /// Returns the keys that rotate all matrices except those that are never rotated.
    fn keys(&self, block: u32, has_signs: bool, gdn_v_grouped: bool) -> Keys {
        let like = if self.is_tied { TIED } else { UNTIED };
        let count = self.widths.iter().sum::<u32>();
        let sign = |i: u32| if i * i % 7 < 3 { -1 } else { 1 };
        let of_layer = |(layer, recurrent): (usize, &bool)| {
            let mixer: &[&str] = match recurrent {
                true => &["attn_qkv", "attn_gate", "ssm_out"],
                false => &["attn_q", "attn_k", "attn_v", "attn_output"],
            };
            let modules = mixer.iter().chain(&["ffn_gate", "ffn_up", "ffn_down"]);
            modules
                .map(move |module| format!("blk.{layer}.{module}.weight"))
                .collect::<Vec<_>>()
        };
        let head = (!self.is_tied).then(|| "output.weight".to_owned());
        let of_layers = self.recurrent.iter().enumerate().flat_map(of_layer);
        Keys {
            weight_names: of_layers.chain(head).collect(),
            sign_widths: self.widths.into_iter().filter(|_| has_signs).collect(),
            sign_values: (0..count).map(sign).filter(|_| has_signs).collect(),
            gdn_v_grouped,
            ..Keys::of(like, block, has_signs)
        }
    }

    /// Turns a row of the checkpoint beside the file back, as the file's matrices are meant. The
    /// file has the value heads of all key heads in turn, the checkpoint side by side.
    fn turn_back(&self, keys: &Keys, name: &str, row: &mut [f32]) {
        let is_never_rotated = ["in_proj_a", "in_proj_b"];
        if is_never_rotated.iter().any(|module| name.contains(module)) {
            return;
        }
        if !name.contains("out_proj") {
            return keys.turn_back(row);
        }
        let group = self.value_heads / self.key_heads;
        let place = |head: usize| head % group * self.key_heads + head / group;
        let dim = self.value_dim;
        let mut stored = row.to_vec();
        for (head, values) in row.chunks_exact(dim).enumerate() {
            stored[place(head) * dim..][..dim].copy_from_slice(values);
        }
        keys.turn_back(&mut stored);
        if keys.gdn_v_grouped {
            row.copy_from_slice(&stored); // Its columns are those of the checkpoint's order.
            return;
        }
        for (head, values) in row.chunks_exact_mut(dim).enumerate() {
            values.copy_from_slice(&stored[place(head) * dim..][..dim]);
        }
    }
}

#[test]
fn rotated_hybrids_compute_what_their_matrices_compute_when_they_are_turned_back() {
    for hybrid in &HYBRIDS {
        let file = hybrid.file;
        let plain = Source::directory(fixture(file).parent().unwrap());
        let rounding = distance(&plain, &floats(file, |_, _| ()));
        for (block, has_signs, grouped) in hybrid.blocks.into_iter().flat_map(|block| {
            [(false, false), (true, false), (true, true)]
                .map(|(signs, grouped)| (block, signs, grouped))
        }) {
            let keys = hybrid.keys(block, has_signs, grouped);
            let expected = floats(file, |name, row| hybrid.turn_back(&keys, name, row));
            let found = distance(&keys.source(file), &expected);
            let ignored = distance(&plain, &expected);
            println!(
                "{file}, blocks of {block}, signs {has_signs}, grouped {grouped}: {found:.4} from \
                 the floats; {rounding:.4} by rounding alone, {ignored:.4} without the rotation"
            );
            assert!(found < 1.5 * rounding, "{file} in blocks of {block}");
            assert!(ignored > 5.0 * rounding, "the rotation matters");
        }
    }
}

#[test]
fn a_rotated_hybrid_computes_equal_bits_on_every_isa() {
    for hybrid in &HYBRIDS {
        let source = hybrid
            .keys(hybrid.blocks[1], true, true)
            .source(hybrid.file);
        let expected = computed_bits_with(&source, Kernels::new(Isa::Scalar).unwrap());
        for isa in Isa::available() {
            let found = computed_bits_with(&source, Kernels::new(isa).unwrap());
            assert!(found == expected, "{isa}");
        }
    }
}

/// Returns a file of recurrent layers with rotated weights and signs.
pub(crate) fn rotated_hybrid() -> Vec<u8> {
    let hybrid = &HYBRIDS[1];
    let keys = hybrid.keys(hybrid.blocks[1], true, true);
    let entries = keys.entries().into_iter().map(|(_, entry)| entry);
    bytes_with_entries(&fixture(hybrid.file), &entries.collect::<Vec<_>>())
}
