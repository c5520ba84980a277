//! Models with recurrent layers: value heads in another order, norms and rates in another form.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};
use sterna::checkpoint::convert::{self, ChatTemplates, Container, TernaryLayout, Watch};
use sterna::checkpoint::{LeftOut, ModelConfig, Source};

use super::pairs::assert_same;
use super::{CONTAINERS, Scratch, converted, fixture, out_name};

const GROUP_64: &str = "qwen35-group64-tied";
/// It has two value heads for each key head.
const GROUP_128: &str = "qwen35-group128-untied";

/// The tensors that are never ternary.
const FLOATS: [&str; 5] = [
    "in_proj_a",
    "in_proj_b",
    "conv1d",
    "embed_tokens",
    "lm_head",
];

/// A checkpoint that is made from a fixture: names, types, shapes and bytes of its tensors.
struct Made {
    config: Value,
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
}

impl Made {
    fn of(name: &str) -> Made {
        let folder = fixture(name);
        let config = fs::read(folder.join("config.json")).unwrap();
        let weights = fs::read(folder.join("model.safetensors")).unwrap();
        let weights = SafeTensors::deserialize(&weights).unwrap();
        let tensors = weights.tensors().into_iter();
        let tensors = tensors.map(|(name, view)| {
            let (shape, bytes) = (view.shape().to_vec(), view.data().to_vec());
            (name, view.dtype(), shape, bytes)
        });
        Made {
            config: serde_json::from_slice(&config).unwrap(),
            tensors: tensors.collect(),
        }
    }

    /// Gives the matrices of the layers one scale each.
    fn with_one_scale(mut self) -> Made {
        for (name, dtype, shape, bytes) in &mut self.tensors {
            if shape.len() != 2 || FLOATS.iter().any(|float| name.contains(float)) {
                continue;
            }
            assert_eq!(*dtype, Dtype::BF16, "{name}");
            for bytes in bytes.as_chunks_mut::<2>().0 {
                let value = bf16::from_le_bytes(*bytes).to_f32();
                let sign = if value == 0.0 { 0.0 } else { value.signum() };
                *bytes = bf16::from_f32(0.375 * sign).to_le_bytes();
            }
        }
        self
    }

    fn write(&self, folder: &Path) -> PathBuf {
        fs::create_dir(folder).unwrap();
        let like = fixture(GROUP_128);
        for name in [
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            fs::copy(like.join(name), folder.join(name)).unwrap();
        }
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, dtype, shape, bytes)| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        fs::write(
            folder.join("model.safetensors"),
            serialize(views, None).unwrap(),
        )
        .unwrap();
        folder.to_owned()
    }
}

/// A model of one scale for each matrix, and two value heads for each key head.
fn one_scale(scratch: &Scratch) -> PathBuf {
    Made::of(GROUP_128)
        .with_one_scale()
        .write(&scratch.path("one-scale"))
}

/// Converts to every container, and checks that exactly these succeed.
fn check(input: &Path, possible: &[&str]) {
    for container in CONTAINERS {
        let scratch = Scratch::new();
        let out = scratch.path(out_name(container));
        let shown = format!("{} to {container}", input.display());
        match converted(input, &out, container) {
            Ok(()) => {
                assert!(possible.contains(&container), "{shown} is not possible");
                assert_same(input, &out);
            }
            Err(error) => {
                assert!(!possible.contains(&container), "{shown}: {error}");
                let named = if container == "bin" {
                    "Qwen3_5ForCausalLM"
                } else {
                    "tensor "
                };
                assert!(error.to_string().contains(named), "{shown}: {error}");
                assert!(scratch.names().is_empty(), "{shown}: {:?}", scratch.names());
            }
        }
    }
}

#[test]
fn a_recurrent_model_is_the_same_model_or_is_refused_by_name() {
    let scratch = Scratch::new();
    for (input, possible) in [
        (fixture(GROUP_64), &["q2_0"][..]),
        (
            fixture(GROUP_64).join("qwen35-group64-tied-q2_0.gguf"),
            &["q2_0"],
        ),
        (fixture(GROUP_128), &["pq2_0"]),
        (
            fixture(GROUP_128).join("qwen35-group128-untied-ptq1_0.gguf"),
            &["pq2_0"],
        ),
        (one_scale(&scratch), &["hf", "i2_s", "q2_0", "pq2_0"]),
    ] {
        check(&input, possible);
    }
}

#[test]
fn a_recurrent_model_is_the_same_after_the_way_through_every_container() {
    let scratch = Scratch::new();
    let first = one_scale(&scratch);
    let mut last = first.clone();
    for (index, container) in ["i2_s", "hf", "q2_0", "pq2_0", "hf", "hf", "i2_s", "hf"]
        .into_iter()
        .enumerate()
    {
        let folder = scratch.path(&index.to_string());
        fs::create_dir(&folder).unwrap();
        let next = folder.join(out_name(container));
        converted(&last, &next, container).unwrap();
        assert_same(&first, &next);
        last = next;
    }
    let config = fs::read(last.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let sections = &config["rope_parameters"]["mrope_section"];
    assert_eq!(*sections, json!([3, 3, 2]), "other programs need them");
}

/// No interval says which layers attend if the first one does.
#[test]
fn the_kinds_of_layers_may_have_any_order() {
    let scratch = Scratch::new();
    let mut made = Made::of(GROUP_128).with_one_scale();
    for (name, ..) in &mut made.tensors {
        for (from, to) in [
            ("s.2.", "s.x."),
            ("s.1.", "s.2."),
            ("s.0.", "s.1."),
            ("s.x.", "s.0."),
        ] {
            *name = name.replace(&format!("layer{from}"), &format!("layer{to}"));
        }
    }
    let (recurrent, attention) = ("linear_attention", "full_attention");
    made.config["layer_types"] = json!([attention, recurrent, recurrent]);
    let input = made.write(&scratch.path("attends-first"));
    let (gguf, back) = (scratch.path("out.gguf"), scratch.path("back"));
    converted(&input, &gguf, "i2_s").unwrap();
    converted(&gguf, &back, "hf").unwrap();
    assert_same(&input, &gguf);
    assert_same(&input, &back);
}

/// Returns where the values of a tensor are in a GGUF file.
fn place(file: &[u8], values: &[f32]) -> usize {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let mut places = file.windows(bytes.len()).enumerate();
    let place = places.find(|(_, window)| *window == bytes).unwrap().0;
    assert!(places.all(|(_, window)| window != bytes), "it occurs once");
    place
}

/// GGUF files hold numbers for which Hugging Face has no form, and other programs may write them.
#[test]
fn a_value_without_an_exact_form_is_refused_by_name() {
    let scratch = Scratch::new();
    let made = Made::of(GROUP_128).with_one_scale();
    let input = made.write(&scratch.path("one-scale"));
    let gguf = scratch.path("out.gguf");
    converted(&input, &gguf, "i2_s").unwrap();
    let bytes = fs::read(&gguf).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let tensor = made.tensors.iter().find(|(other, ..)| other == name);
        let (_, dtype, _, bytes) = tensor.unwrap();
        match dtype {
            Dtype::F32 => {
                let values = bytes.as_chunks::<4>().0.iter();
                values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            _ => {
                let values = bytes.as_chunks::<2>().0.iter();
                values
                    .map(|bytes| bf16::from_le_bytes(*bytes).to_f32())
                    .collect()
            }
        }
    };
    let a_log = floats("model.layers.0.linear_attn.A_log");
    // The file has the value heads of the two key heads in turn.
    let rates = [0, 2, 1, 3].map(|head: usize| -f64::from(a_log[head]).exp() as f32);
    let norm = floats("model.norm.weight");
    let norm: Vec<f32> = norm.iter().map(|weight| weight + 1.0).collect();
    let rate = (-(8.0_f64.exp() as f32)).next_up();
    for (values, wrong, named) in [
        (&rates[..], rate, "blk.0.ssm_a: its value"),
        (&rates, 0.5, "blk.0.ssm_a: its value 0.5 has no exact A_log"),
        (&norm, 1e-9, "output_norm.weight: its value"),
    ] {
        let at = place(&bytes, values);
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&wrong.to_le_bytes());
        let changed = scratch.path("changed.gguf");
        fs::write(&changed, &bytes).unwrap();
        let error = converted(&changed, &scratch.path("out"), "hf")
            .unwrap_err()
            .to_string();
        assert!(error.contains(named), "{error}");
        assert!(!scratch.path("out").exists());
        // Another GGUF file can hold it.
        let again = scratch.path("again.gguf");
        converted(&changed, &again, "q2_0").unwrap();
        assert_same(&changed, &again);
        fs::remove_file(&again).unwrap();
    }
}

/// Groups of 256 columns hold two value heads, and GGUF has these heads at other places.
#[test]
fn groups_of_several_value_heads_are_refused_by_name() {
    let scratch = Scratch::new();
    let mut made = Made::of(GROUP_128);
    made.config["hidden_size"] = json!(256);
    made.config["intermediate_size"] = json!(256);
    made.config["num_attention_heads"] = json!(4);
    for (name, dtype, shape, bytes) in &mut made.tensors {
        let is_hidden_norm = name.ends_with("layernorm.weight") || name == "model.norm.weight";
        if is_hidden_norm {
            shape[0] = 256;
            bytes.extend(bytes.clone());
        }
        if shape.len() != 2 || name.contains("conv1d") {
            continue;
        }
        *dtype = Dtype::BF16;
        let rows = match shape[0] {
            128 => 256,
            _ if name.contains("q_proj") => 512,
            rows => rows,
        };
        let columns = shape[1].next_multiple_of(256);
        let code = |i: usize| i * i % 7 % 3;
        let scale = |i: usize| [0.25, 0.5, 0.375][i / 256 % 3];
        let value = |i: usize| bf16::from_f32((code(i) as f32 - 1.0) * scale(i));
        *bytes = (0..rows * columns)
            .flat_map(|i| value(i).to_le_bytes())
            .collect();
        *shape = vec![rows, columns];
    }
    let input = made.write(&scratch.path("group256"));
    let error = converted(&input, &scratch.path("out.gguf"), "tq2_0")
        .unwrap_err()
        .to_string();
    let named = "layers.0.linear_attn.out_proj.weight: its groups of 256 columns";
    assert!(error.contains(named), "{error}");
}

/// Writes the checkpoint as the text part of a model with images.
fn with_images(scratch: &Scratch) -> PathBuf {
    let mut made = Made::of(GROUP_128).with_one_scale();
    for (name, ..) in &mut made.tensors {
        if let Some(rest) = name.strip_prefix("model.") {
            *name = format!("model.language_model.{rest}");
        }
    }
    for name in [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "model.visual.blocks.0.norm1.weight",
    ] {
        made.tensors
            .push((name.to_owned(), Dtype::BF16, vec![2], vec![0; 4]));
    }
    made.config["mtp_num_hidden_layers"] = json!(1);
    let mut part = made.config.clone();
    part.as_object_mut().unwrap().remove("architectures");
    made.config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "tie_word_embeddings": false, "text_config": part, "vision_config": {},
    });
    made.write(&scratch.path("images"))
}

#[test]
fn what_is_left_out_is_said_by_name() {
    let scratch = Scratch::new();
    let input = with_images(&scratch);
    let source = Source::open(&input).unwrap();
    let layout = TernaryLayout::named("i2_s").unwrap();
    for (container, name) in [
        (Container::HuggingFace, "out"),
        (Container::Gguf(layout), "out.gguf"),
    ] {
        let out = scratch.path(name);
        let templates = ChatTemplates::default();
        let left_out =
            convert::write(&source, container, &out, templates, &Watch::hidden()).unwrap();
        let part = |prefix: &str, tensors| LeftOut {
            prefix: prefix.to_owned(),
            tensors,
        };
        assert_eq!(left_out, [part("mtp.", 2), part("model.visual.", 1)]);
        fs::remove_file(&out)
            .or_else(|_| fs::remove_dir_all(&out))
            .unwrap();
        converted(&input, &out, if name == "out" { "hf" } else { "i2_s" }).unwrap();
        assert_same(&input, &out);
        assert!(ModelConfig::read(&Source::open(&out).unwrap()).is_ok());
    }
    let config = fs::read(scratch.path("out").join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["architectures"], json!(["Qwen3_5ForCausalLM"]));
    assert_eq!(config["mtp_num_hidden_layers"], Value::Null);
}
