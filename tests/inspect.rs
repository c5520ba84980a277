//! `sterna inspect` on each kind of checkpoint: its JSON, its text and its exit code.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize};
use serde_json::{Value, json};

const SERVED: i32 = 0;
const REFUSED: i32 = 1;
const UNREADABLE: i32 = 2;

fn inspect(path: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.arg("inspect").arg(path).args(flags);
    command.output().unwrap()
}

/// Returns the report of a path. The exit code must be `code`.
fn report(path: &Path, code: i32) -> Value {
    let output = inspect(path, &["--json"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}: {errors}{text}",
        path.display()
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["served"], code == SERVED);
    assert_eq!(
        report["refusals"].as_array().unwrap().is_empty(),
        code == SERVED,
        "{report}"
    );
    report
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(path)
}

/// Returns the entry of a kind of tensors.
fn kind<'a>(report: &'a Value, name: &str) -> &'a Value {
    let mut kinds = report["tensors"].as_array().unwrap().iter();
    let kind = kinds.find(|kind| kind["kind"] == name);
    kind.unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

fn refusals(report: &Value) -> String {
    report["refusals"].to_string()
}

/// A copy of some fixtures, which a test changes.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, fixture_name: &str) -> Folder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("inspect-{name}"));
        drop(fs::remove_dir_all(&folder)); // An earlier run that failed left it.
        fs::create_dir_all(&folder).unwrap();
        for entry in fs::read_dir(fixture(fixture_name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
        Folder(folder)
    }

    fn change(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.0.join(file);
        let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        fs::write(path, config.to_string()).unwrap();
    }
}

#[test]
fn a_packed_checkpoint_of_hugging_face_is_described() {
    let report = report(&fixture("bitnet-packed"), SERVED);
    assert_eq!(report["container"], "huggingface");
    let model = json!({
        "architecture": "BitNetForCausalLM", "layers": 2, "hidden": 192, "intermediate": 340,
        "heads": 6, "kv_heads": report["model"]["kv_heads"], "head_dim": 32, "vocabulary": 309,
        "context": report["model"]["context"], "tied": true,
    });
    assert_eq!(report["model"], model);
    let gate = kind(&report, "model.layers.*.mlp.gate_proj.weight");
    assert_eq!(gate["count"], 2);
    assert_eq!(gate["shape"], json!([340, 192]));
    assert_eq!(gate["weights"], 2 * 340 * 192);
    assert_eq!(gate["layout"], "U8, four rows a byte");
    assert_eq!(
        (&gate["told_by"], &gate["scale_per"]),
        (&json!("header"), &json!("tensor"))
    );
    let codes = &report["codes"];
    let count = |name: &str| codes[name].as_u64().unwrap();
    let ternary = report["tensors"].as_array().unwrap().iter();
    let ternary = ternary.filter(|kind| kind["scale_per"] == "tensor");
    let weights: u64 = ternary.map(|kind| kind["weights"].as_u64().unwrap()).sum();
    assert_eq!(count("minus") + count("zero") + count("plus"), weights);
    assert_eq!(
        report["scales"]["count"], 14,
        "seven matrices in two layers"
    );
    let scale = |name: &str| report["scales"][name].as_f64().unwrap();
    assert!(0.0 < scale("min") && scale("min") <= scale("median"));
    assert!(scale("median") <= scale("max"));
    assert!(report["stops"][0]["text"].is_string());
    assert_eq!(report["template"]["source"], "tokenizer_config.json");
    assert_eq!(report["unknown_tensors"], json!([]));
}

#[test]
fn a_model_without_a_head_is_said_to_compute_embeddings() {
    assert_eq!(
        report(&fixture("bitnet-packed"), SERVED)["computes"],
        "text"
    );
    for path in [
        "embedding-qwen3",
        "embedding-qwen3/embedding-qwen3-i2_s.gguf",
        "embedding-gemma3",
        "embedding-gemma3/embedding-gemma3-iq2_bn.gguf",
    ] {
        let report = report(&fixture(path), SERVED);
        assert_eq!(report["computes"], "embeddings", "{path}");
        assert_eq!(report["pooling"], "last token", "{path}");
        assert_eq!(report["unknown_tensors"], json!([]), "{path}");
        assert_eq!(report["refusals"], json!([]), "{path}");
    }
    let gguf = report(
        &fixture("embedding-qwen3/embedding-qwen3-i2_s.gguf"),
        SERVED,
    );
    let query = kind(&gguf, "blk.*.attn_q.weight");
    assert_eq!(query["layout"], "I2_S (x86)");
    assert_eq!(query["told_by"], "writer");
    let text = inspect(&fixture("embedding-qwen3"), &[]).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("embeddings, pooling: last token"), "{text}");
}

#[test]
fn recurrent_layers_are_described() {
    for (path, recurrent, attention, heads) in [
        ("qwen35-group64-tied", 2, 2, [4, 4]),
        (
            "qwen35-group64-tied/qwen35-group64-tied-q2_0.gguf",
            2,
            2,
            [4, 4],
        ),
        ("qwen35-group128-untied", 2, 1, [2, 4]),
        (
            "qwen35-group128-untied/qwen35-group128-untied-ptq1_0.gguf",
            2,
            1,
            [2, 4],
        ),
    ] {
        let report = report(&fixture(path), SERVED);
        let dim = if path.contains("group64") { 32 } else { 128 };
        let facts = json!({
            "recurrent_layers": recurrent, "attention_layers": attention, "key_heads": heads[0],
            "value_heads": heads[1], "key_dim": dim, "value_dim": dim, "convolution_tokens": 4,
            "state_bytes": recurrent * heads[1] * dim * dim * 4,
        });
        assert_eq!(report["recurrent"], facts, "{path}");
        assert_eq!(report["rotation"], Value::Null, "{path}");
        assert_eq!(report["left_out"], json!([]), "{path}");
        assert_eq!(report["unknown_tensors"], json!([]), "{path}");
    }
    let other = report(&fixture("bitnet-packed"), SERVED);
    assert_eq!(other["recurrent"], Value::Null);
    let text = inspect(&fixture("qwen35-group128-untied"), &[]).stdout;
    let text = String::from_utf8(text).unwrap();
    for part in [
        "  recurrent     2 layers, and 1 of attention\n",
        "  states        524,288 bytes for each sequence",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
}

#[test]
fn experts_and_windows_are_described() {
    for path in ["maple-row", "maple-row/maple-row-q2_0.gguf"] {
        let report = report(&fixture(path), SERVED);
        let facts = json!({
            "mixture_layers": 2, "dense_layers": 0, "count": 6, "used": 2, "intermediate": 64,
            "normalizes": true, "gate_limit": 7.0,
        });
        assert_eq!(report["experts"], facts, "{path}");
        let windows = json!({"local_layers": 1, "tokens": 40});
        assert_eq!(report["windows"], windows, "{path}");
    }
    let text = inspect(&fixture("maple-row"), &[]).stdout;
    let text = String::from_utf8(text).unwrap();
    for part in [
        "  experts       6 in each of 2 layers, 2 for a token, 64 wide\n",
        "  windows       of 40 tokens, in 1 of the layers\n",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    let other = report(&fixture("qwen3-moe-plain"), SERVED);
    assert_eq!(other["windows"], Value::Null);
    assert_eq!(other["experts"]["normalizes"], false);
    let dense = report(&fixture("bitnet-packed"), SERVED);
    assert_eq!(dense["experts"], Value::Null);
}

/// Returns a key of a GGUF file with a value of this type.
fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let length = (key.len() as u64).to_le_bytes();
    [&length, key.as_bytes(), &kind.to_le_bytes(), value].concat()
}

#[test]
fn a_rotation_is_described() {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let texts = |texts: &[&str]| {
        let texts: Vec<Vec<u8>> = texts.iter().map(|one| text(one)).collect();
        let count = (texts.len() as u64).to_le_bytes();
        [&8_u32.to_le_bytes()[..], &count, &texts.concat()].concat()
    };
    let size = |size: u32| size.to_le_bytes().to_vec();
    let keys = [
        ("version", 4, size(1)),
        ("block_size", 4, size(64)),
        ("transform", 8, text("normalized-sylvester-walsh-hadamard")),
        ("axis", 8, text("input-last-dimension")),
        ("sign_mode", 8, text("identity")),
        (
            "weight_names",
            9,
            texts(&["output.weight", "blk.0.ssm_out.weight"]),
        ),
        ("inverse_weight_names", 9, texts(&[])),
        ("gdn_v_grouped", 7, vec![1]),
    ];
    let count = keys.len() as u64;
    let keys = keys.map(|(name, kind, value)| {
        let key = format!("prism.hadamard.{name}");
        entry(&key, kind, &value)
    });
    let mut keys = keys.concat();
    // What follows must stay aligned.
    let unused = "x".repeat(64 - (keys.len() + 16) % 32);
    keys.extend(entry(&unused, 4, &[0; 4]));
    let file = "qwen35-group128-untied/qwen35-group128-untied-ptq1_0.gguf";
    let mut bytes = fs::read(fixture(file)).unwrap();
    let all = u64::from_le_bytes(*bytes[16..].first_chunk().unwrap()) + count + 1;
    bytes[16..24].copy_from_slice(&all.to_le_bytes());
    bytes.splice(24..24, keys);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inspect-rotated.gguf");
    fs::write(&path, bytes).unwrap();
    let report = report(&path, SERVED);
    let rotation = json!({
        "version": 1, "block_size": 64, "sign_mode": "identity", "matrices": 2,
        "embedding": false, "groups_values": true,
    });
    assert_eq!(report["rotation"], rotation);
    let text = String::from_utf8(inspect(&path, &[]).stdout).unwrap();
    let line = "  rotation      version 1, blocks of 64, identity signs, 2 matrices\n";
    assert!(text.contains(line), "{text}");
    fs::remove_file(&path).unwrap();
}

#[test]
fn tensors_that_are_left_out_are_named() {
    let folder = Folder::new("images", "qwen35-group64-tied");
    fs::remove_file(folder.0.join("qwen35-group64-tied-q2_0.gguf")).unwrap();
    let weights = folder.0.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let added = [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "model.visual.merger.norm.weight",
    ];
    let added = added.map(|name| {
        let view = TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap();
        (name.to_owned(), view)
    });
    let tensors = tensors.tensors().into_iter().map(|(name, view)| {
        let name = match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name,
        };
        (name, view)
    });
    let changed = serialize(tensors.chain(added), None).unwrap();
    fs::write(&weights, changed).unwrap();
    let class = "Qwen3_5ForConditionalGeneration";
    folder.change("config.json", |config| {
        *config = json!({"architectures": [class], "text_config": config.take()});
    });
    let report = report(&folder.0, SERVED);
    let parts = json!([
        {"prefix": "mtp.", "tensors": 2},
        {"prefix": "model.visual.", "tensors": 1},
    ]);
    assert_eq!(report["left_out"], parts);
    assert_eq!(report["unknown_tensors"], json!([]));
    assert_eq!(report["model"]["architecture"], class);
    assert_eq!(report["model"]["layers"], 4);
    let text = String::from_utf8(inspect(&folder.0, &[]).stdout).unwrap();
    assert!(text.contains("  left out      2 tensors mtp.*\n"), "{text}");
}

#[test]
fn each_container_of_one_model_has_the_same_sizes_and_codes() {
    let expected = report(&fixture("bitnet-blocks"), SERVED);
    let gguf = report(&fixture("bitnet-blocks/bitnet-blocks-q2_0.gguf"), SERVED);
    let bin = report(&fixture("bitnet-blocks/bitnet-blocks-a.bin"), SERVED);
    for (name, other) in [("gguf", &gguf), ("sglbitnt", &bin)] {
        assert_eq!(other["container"], name);
        assert_eq!(other["codes"], expected["codes"], "{name}");
        assert_eq!(other["parameters"], expected["parameters"], "{name}");
        for size in [
            "layers",
            "hidden",
            "intermediate",
            "heads",
            "vocabulary",
            "context",
            "tied",
        ] {
            assert_eq!(
                other["model"][size], expected["model"][size],
                "{name}: {size}"
            );
        }
    }
    let query = kind(&gguf, "blk.*.attn_q.weight");
    assert_eq!(query["layout"], "Q2_0 (groups of 64)");
    assert_eq!(
        (&query["told_by"], &query["type_number"]),
        (&json!("stride"), &json!(42))
    );
    assert_eq!(gguf["scales"]["per"], "group of 64");
    let detail = bin["container_detail"].as_str().unwrap();
    assert!(detail.starts_with("variant A"), "{detail}");
    let query = kind(&bin, "model.layers.*.self_attn.q_proj.weight");
    assert_eq!(query["layout"], "128 weights in 32 bytes");
    let padded = report(&fixture("llama-blocks/llama-blocks-b.bin"), SERVED);
    let expected = report(&fixture("llama-blocks"), SERVED);
    assert_eq!(padded["codes"], expected["codes"], "padding does not count");
}

#[test]
fn groups_of_qwen3_are_found_in_floats_and_blocks() {
    for path in [
        "qwen3-group64-yarn",
        "qwen3-group64-yarn/qwen3-group64-yarn-q2_0.gguf",
    ] {
        let report = report(&fixture(path), SERVED);
        assert_eq!(report["scales"]["per"], "group of 64", "{path}");
        assert_eq!(report["model"]["tied"], true, "{path}");
    }
    let report = report(&fixture("qwen3-group64-yarn"), SERVED);
    let embedding = kind(&report, "model.embed_tokens.weight");
    assert!(
        embedding["layout"]
            .as_str()
            .unwrap()
            .ends_with("ternary already"),
        "{embedding}"
    );
}

/// The weights are random, so no order predicts text.
#[test]
fn the_order_of_i2_s_is_told_by_the_flag_or_refused() {
    let path = fixture("bitnet-blocks/bitnet-blocks-i2_s.gguf");
    let refused = report(&path, REFUSED);
    assert!(refusals(&refused).contains("--i2s-order"), "{refused}");
    let query = kind(&refused, "blk.*.attn_q.weight");
    assert_eq!(query["layout"], "I2_S (order unknown)");
    let output = inspect(&path, &["--json", "--i2s-order", "x86"]);
    assert_eq!(output.status.code(), Some(SERVED));
    let served: Value = serde_json::from_slice(&output.stdout).unwrap();
    let query = kind(&served, "blk.*.attn_q.weight");
    assert_eq!(
        (&query["layout"], &query["told_by"]),
        (&json!("I2_S (x86)"), &json!("flag"))
    );
}

#[test]
fn an_unsupported_architecture_is_described_and_refused_by_name() {
    let folder = Folder::new("architecture", "llama-packed");
    folder.change("config.json", |config| {
        config["architectures"] = json!(["MambaForCausalLM"]);
        config["model_type"] = json!("mamba");
    });
    let report = report(&folder.0, REFUSED);
    assert_eq!(report["model"]["architecture"], "MambaForCausalLM");
    assert_eq!(report["model"]["layers"], 2);
    assert!(refusals(&report).contains("MambaForCausalLM"), "{report}");
    assert!(
        report["codes"]["plus"].as_u64().unwrap() > 0,
        "the weights are read"
    );
    assert!(
        report["stops"][0]["text"].is_string(),
        "the tokenizer is read"
    );
}

#[test]
fn an_unsupported_gguf_file_is_described_and_its_tensors_are_named() {
    let bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
    let text: Vec<u8> = bytes.clone();
    let replaced = |from: &[u8], to: &[u8], bytes: &mut Vec<u8>| {
        let places: Vec<usize> = (0..text.len())
            .filter(|at| text[*at..].starts_with(from))
            .collect();
        assert!(!places.is_empty());
        places
            .iter()
            .for_each(|at| bytes[*at..at + to.len()].copy_from_slice(to));
    };
    let mut bytes = bytes;
    replaced(
        b"\x05\0\0\0\0\0\0\0llama",
        b"\x05\0\0\0\0\0\0\0mamba",
        &mut bytes,
    );
    replaced(b"llama.block_count", b"mamba.block_count", &mut bytes);
    replaced(b"blk.0.attn_q.weight", b"blk.0.ssm_in.weight", &mut bytes);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inspect-mamba.gguf");
    fs::write(&path, &bytes).unwrap();
    let report = report(&path, REFUSED);
    fs::remove_file(&path).unwrap();
    assert_eq!(report["model"]["architecture"], "mamba");
    assert_eq!(report["model"]["layers"], 1);
    assert_eq!(report["model"]["vocabulary"], 311);
    assert_eq!(report["unknown_tensors"], json!(["blk.*.ssm_in.weight"]));
    assert!(
        refusals(&report).contains("must be one of bitnet-b1.58"),
        "{report}"
    );
    assert_eq!(kind(&report, "blk.*.ssm_in.weight")["layout"], "IQ2_BN");
}

#[test]
fn what_a_tensor_type_hides_does_not_hide_the_rest() {
    let mut bytes = fs::read(fixture("llama-blocks/llama-blocks-iq2_bn.gguf")).unwrap();
    let name = b"blk.0.attn_q.weight";
    let at = (0..bytes.len())
        .find(|at| bytes[*at..].starts_with(name))
        .unwrap();
    let number = at + name.len() + 4 + 2 * 8; // After the count of dimensions and two of them.
    assert_eq!(bytes[number], 135);
    bytes[number] = 39;
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inspect-mxfp4.gguf");
    fs::write(&path, &bytes).unwrap();
    let report = report(&path, REFUSED);
    fs::remove_file(&path).unwrap();
    assert!(
        refusals(&report).contains("tensor blk.0.attn_q.weight: type number 39"),
        "{report}"
    );
    let query = kind(&report, "blk.*.attn_q.weight");
    assert_eq!(query["layout"], "type 39 (not read)");
    assert_eq!(kind(&report, "blk.*.attn_k.weight")["layout"], "IQ2_BN");
    assert_eq!(report["model"]["architecture"], "llama");
}

/// A layout of one bit a weight has no zeros, as no wrong conversion makes them.
#[test]
fn weights_without_zeros_are_usual_in_q1_0_only() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf/fixtures/model_q1_0.gguf");
    let q1 = report(&path, SERVED);
    assert_eq!(
        (&q1["codes"]["zero"], &q1["codes"]["unusual"]),
        (&json!(0), &json!(false))
    );
    assert_eq!(q1["warnings"], json!([]));
    let expected = report(&fixture("qwen3-group128-untied"), SERVED);
    assert!(
        expected["codes"]["zero"].as_u64().unwrap() > 0,
        "{expected}"
    );
}

#[test]
fn a_missing_stop_token_and_a_head_of_its_own_are_warnings() {
    let folder = Folder::new("stops", "bitnet-packed");
    folder.change("config.json", |config| config["eos_token_id"] = Value::Null);
    folder.change("generation_config.json", |config| {
        config["eos_token_id"] = Value::Null
    });
    folder.change("tokenizer_config.json", |config| {
        config["eos_token"] = Value::Null
    });
    let report = report(&folder.0, SERVED);
    assert_eq!(report["stops"], json!([]));
    assert!(
        report["warnings"].to_string().contains("no stop tokens"),
        "{report}"
    );
    let report = crate::report(&fixture("bitnet-blocks/bitnet-blocks-b-head.bin"), SERVED);
    assert!(
        report["warnings"]
            .to_string()
            .contains("lm_head.weight of its own"),
        "{report}"
    );
}

#[test]
fn truncated_files_are_refused_with_the_reason() {
    for (path, cut, container, named) in [
        (
            "bitnet-blocks/bitnet-blocks-q2_0.gguf",
            1000,
            "gguf",
            "metadata",
        ),
        (
            "bitnet-blocks/bitnet-blocks-a.bin",
            5000,
            "sglbitnt",
            "of tensor",
        ),
    ] {
        let bytes = fs::read(fixture(path)).unwrap();
        let name = Path::new(path).file_name().unwrap().to_str().unwrap();
        let cut_file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("inspect-cut-{name}"));
        fs::write(&cut_file, &bytes[..cut]).unwrap();
        let report = report(&cut_file, REFUSED);
        fs::remove_file(&cut_file).unwrap();
        assert_eq!(report["container"], container);
        assert_eq!(report["bytes"], cut);
        assert!(refusals(&report).contains(named), "{report}");
    }
    let folder = Folder::new("cut", "bitnet-packed");
    let path = folder.0.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let report = report(&folder.0, REFUSED);
    assert!(refusals(&report).contains("model.safetensors"), "{report}");
    assert_eq!(report["model"]["hidden"], 192, "config.json is read");
}

/// A download that was interrupted ends anywhere.
#[test]
fn a_cut_gguf_file_says_how_long_it_should_be() {
    for path in [
        "bitnet-blocks/bitnet-blocks-q2_0.gguf",
        "llama-blocks/llama-blocks-iq2_bn.gguf",
        "embedding-qwen3/embedding-qwen3-i2_s.gguf",
    ] {
        let bytes = fs::read(fixture(path)).unwrap();
        let whole = bytes.len();
        for lost in [64, 1000, whole / 2] {
            let cut_file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("inspect-cut-short.gguf");
            fs::write(&cut_file, &bytes[..whole - lost]).unwrap();
            let report = report(&cut_file, REFUSED);
            fs::remove_file(&cut_file).unwrap();
            let refusals = refusals(&report);
            let has = format!("and it has {}", whole - lost);
            assert!(
                refusals.contains("the file is cut: its tensors need "),
                "{report}"
            );
            assert!(refusals.contains(&has), "{report}");
            let needed = refusals.split("need ").nth(1).unwrap().split(' ').next();
            let needed: usize = needed.unwrap().parse().unwrap();
            // The padding at the end is no part of a tensor. Q2_0 has two sizes; the smaller one
            // counts.
            assert!(needed <= whole && whole - needed < 160, "{path}: {needed}");
        }
    }
}

#[test]
fn an_unknown_architecture_is_named_whatever_its_fields_are() {
    let folder = Folder::new("unknown-family", "bitnet-packed");
    let mamba = json!({
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "d_model": 768,
        "n_layer": 24, "vocab_size": 309, "hidden_act": 5,
    });
    folder.change("config.json", |config| *config = mamba);
    let report = report(&folder.0, REFUSED);
    let refusals = refusals(&report);
    for named in ["MambaForCausalLM", "BitNetForCausalLM", "Qwen3ForCausalLM"] {
        assert!(refusals.contains(named), "{named}: {report}");
    }
    assert!(!refusals.contains("missing field"), "{report}");
}

#[test]
fn the_text_names_the_same_and_a_missing_path_is_an_error() {
    let output = inspect(&fixture("bitnet-blocks/bitnet-blocks-q2_0.gguf"), &[]);
    assert_eq!(output.status.code(), Some(SERVED));
    let text = String::from_utf8(output.stdout).unwrap();
    for part in [
        "  verdict       this server would serve it\n",
        "  container     GGUF\n",
        "  architecture  bitnet-b1.58\n",
        "  vocabulary    312\n",
        "  tied head     yes\n",
        "one per group of 64)",
        "Q2_0 (groups of 64)",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    let output = inspect(&fixture("no-such-model"), &[]);
    assert_eq!(output.status.code(), Some(UNREADABLE));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("no-such-model"), "{message}");
}
