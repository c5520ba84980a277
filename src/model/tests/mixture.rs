//! Mixtures of experts: equal experts are a dense half, their order changes nothing, and a token
//! has the same bits beside any others.

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sterna_kernels::{Isa, Kernels};
use sterna_random::Random;

use super::{batch, options, prompt, rows};
use crate::checkpoint::synthetic::Shape;
use crate::checkpoint::{LLAMA, LoadError, MIXTRAL, QWEN3, Source};
use crate::model::ExpertUse;
use crate::model::forward::Model;
use crate::model::options::LoadOptions;

const EXPERTS: usize = 5;
const TOKENS: usize = 29;

/// A dense model. Each family's copies of it are mixtures.
const DENSE: Shape = Shape {
    name: "dense",
    architecture: &QWEN3,
    vocab: 96,
    hidden: 128,
    intermediate: 192,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    max_position: 256,
    rope_theta: 10_000.0,
    tied: true,
    group: Some(64),
    recurrent: None,
    experts: None,
};

/// A checkpoint whose tensors can be changed.
struct Checkpoint {
    config: Value,
    tensors: Vec<(String, Vec<usize>, Dtype, Vec<u8>)>,
}

impl Checkpoint {
    fn of(source: &Source) -> Checkpoint {
        let config = source.read("config.json").unwrap().unwrap();
        let bytes = source.read("model.safetensors").unwrap().unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = tensors.iter().map(|(name, view)| {
            let (shape, bytes) = (view.shape().to_vec(), view.data().to_vec());
            (name.to_owned(), shape, view.dtype(), bytes)
        });
        Checkpoint {
            config: serde_json::from_slice(&config).unwrap(),
            tensors: tensors.collect(),
        }
    }

    fn source(&self) -> Source {
        let views = self.tensors.iter().map(|(name, shape, dtype, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
            (name.clone(), view)
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        Source::in_memory([
            (
                "config.json".to_owned(),
                self.config.to_string().into_bytes(),
            ),
            ("model.safetensors".to_owned(), bytes),
        ])
    }

    /// Puts copies of each feed-forward half in its place, behind a random router. A token uses
    /// `used` of them.
    fn into_mixture(mut self, used: usize, seed: u64) -> Checkpoint {
        self.config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        self.config["model_type"] = json!("qwen3_moe");
        self.config["num_experts"] = json!(EXPERTS);
        self.config["num_experts_per_tok"] = json!(used);
        self.config["moe_intermediate_size"] = json!(DENSE.intermediate);
        self.config["norm_topk_prob"] = json!(true);
        let (mut tensors, mut random) = (Vec::new(), Random::new(seed));
        for (name, shape, dtype, bytes) in std::mem::take(&mut self.tensors) {
            match name.split_once(".mlp.") {
                None => tensors.push((name, shape, dtype, bytes)),
                Some((layer, module)) => {
                    for expert in 0..EXPERTS {
                        let name = format!("{layer}.mlp.experts.{expert}.{module}");
                        tensors.push((name, shape.clone(), dtype, bytes.clone()));
                    }
                }
            }
        }
        for layer in 0..DENSE.layers {
            let values = (0..EXPERTS * DENSE.hidden).map(|_| random.below(2001) as f32 / 1e3 - 1.0);
            let bytes = values.flat_map(f32::to_le_bytes).collect();
            let name = format!("model.layers.{layer}.mlp.gate.weight");
            tensors.push((name, vec![EXPERTS, DENSE.hidden], Dtype::F32, bytes));
        }
        self.tensors = tensors;
        self
    }

    /// Gives each expert other signs: each row of its matrices is turned by its number.
    fn with_different_experts(mut self) -> Checkpoint {
        for (name, shape, dtype, bytes) in &mut self.tensors {
            let Some((_, rest)) = name.split_once(".mlp.experts.") else {
                continue;
            };
            let expert: usize = rest.split_once('.').unwrap().0.parse().unwrap();
            let row = shape[1] * dtype.bitsize() / 8;
            let rows = bytes.len() / row;
            bytes.rotate_left(expert % rows * row);
        }
        self
    }

    /// Numbers the experts the other way round, with the rows of their routers.
    fn reversed(mut self) -> Checkpoint {
        for (name, shape, _, bytes) in &mut self.tensors {
            if name.ends_with(".mlp.gate.weight") {
                let row = bytes.len() / shape[0];
                *bytes = bytes.rchunks(row).flatten().copied().collect();
            } else if let Some((layer, rest)) = name.clone().split_once(".mlp.experts.") {
                let (expert, module) = rest.split_once('.').unwrap();
                let other = EXPERTS - 1 - expert.parse::<usize>().unwrap();
                *name = format!("{layer}.mlp.experts.{other}.{module}");
            }
        }
        self
    }

    /// Puts the matrices of all experts of a layer into one tensor, gate and up together, as newer
    /// exports of every family do.
    fn merged(mut self) -> Checkpoint {
        let (mut tensors, experts): (Vec<_>, Vec<_>) = std::mem::take(&mut self.tensors)
            .into_iter()
            .partition(|(name, ..)| !name.contains(".experts."));
        let bytes_of = |name: String| {
            let tensor = experts.iter().find(|(other, ..)| *other == name);
            tensor.map(|(.., bytes)| bytes.clone()).unwrap()
        };
        for layer in 0..DENSE.layers {
            let of = |linears: &[&str]| {
                let name = |expert, linear| {
                    format!("model.layers.{layer}.mlp.experts.{expert}.{linear}_proj.weight")
                };
                let parts = (0..EXPERTS).flat_map(|expert| {
                    let parts = linears.iter().map(move |linear| name(expert, linear));
                    parts.collect::<Vec<_>>()
                });
                parts.flat_map(bytes_of).collect::<Vec<u8>>()
            };
            let (hidden, width) = (DENSE.hidden, DENSE.intermediate);
            for (module, shape, linears) in [
                (
                    "gate_up_proj",
                    [EXPERTS, 2 * width, hidden],
                    &["gate", "up"][..],
                ),
                ("down_proj", [EXPERTS, hidden, width], &["down"][..]),
            ] {
                let name = format!("model.layers.{layer}.mlp.experts.{module}");
                tensors.push((name, shape.to_vec(), Dtype::BF16, of(linears)));
            }
        }
        self.tensors = tensors;
        self
    }

    /// Calls this a model of Mixtral, and the tensors too if `renames`.
    fn into_mixtral(mut self, renames: bool) -> Checkpoint {
        self.config["architectures"] = json!([MIXTRAL.class]);
        self.config["num_local_experts"] = json!(EXPERTS);
        for (name, ..) in self.tensors.iter_mut().filter(|_| renames) {
            for (from, to) in [
                (".mlp.", ".block_sparse_moe."),
                ("gate_proj", "w1"),
                ("up_proj", "w3"),
                ("down_proj", "w2"),
            ] {
                *name = name.replace(from, to);
            }
        }
        self
    }

    /// Returns the bits of the logits after each token of a prompt.
    fn logits(&self, options: LoadOptions) -> Vec<Vec<u32>> {
        let mut model = Model::load(&self.source(), options).unwrap();
        let tokens = prompt(TOKENS, 3, DENSE.vocab);
        let mut kv = model.new_kv_store(32).unwrap();
        let mut batch = batch(&[]);
        super::push(&mut batch, &(&tokens, 0..TOKENS, 0), TOKENS);
        let rows = rows(&mut model, &batch, &mut kv);
        rows.iter()
            .map(|row| row.iter().map(|logit| logit.to_bits()).collect())
            .collect()
    }
}

fn dense() -> Checkpoint {
    Checkpoint::of(&DENSE.in_memory(5))
}

#[test]
fn equal_experts_are_a_dense_feed_forward_half() {
    let expected = dense().logits(options(2));
    let one = dense().into_mixture(1, 7).logits(options(2));
    assert!(one == expected, "one expert of weight 1");
    for used in 2..=EXPERTS {
        let several = dense().into_mixture(used, 7).logits(options(2));
        for (row, expected) in several.iter().zip(&expected) {
            for (logit, expected) in row.iter().zip(expected) {
                let (logit, expected) = (f32::from_bits(*logit), f32::from_bits(*expected));
                assert!((logit - expected).abs() < 0.2, "{used}: {logit} {expected}");
            }
        }
    }
}

#[test]
fn the_order_of_the_experts_changes_no_bit() {
    let mixture = || dense().into_mixture(2, 9).with_different_experts();
    let expected = mixture().logits(options(1));
    assert!(mixture().reversed().logits(options(1)) == expected);
    let other_routers = dense().into_mixture(2, 10).with_different_experts();
    assert!(
        other_routers.logits(options(1)) != expected,
        "the experts differ"
    );
}

#[test]
fn a_token_of_a_mixture_has_the_same_bits_alone_and_on_every_isa() {
    let mixture = dense().into_mixture(3, 11).with_different_experts();
    let expected = mixture.logits(options(1));
    for (isa, threads) in Isa::available().zip([2, 3, 1, 2, 3]) {
        let options = LoadOptions {
            kernels: Kernels::new(isa).unwrap(),
            ..options(threads)
        };
        assert!(mixture.logits(options) == expected, "{isa}");
    }
    let mut model = Model::load(&mixture.source(), options(2)).unwrap();
    let tokens = prompt(TOKENS, 3, DENSE.vocab);
    let mut kv = model.new_kv_store(32).unwrap();
    for (at, expected) in expected.iter().enumerate() {
        let row = rows(&mut model, &batch(&[(&tokens, at..at + 1, 0)]), &mut kv);
        let bits: Vec<u32> = row[0].iter().map(|logit| logit.to_bits()).collect();
        assert!(bits == *expected, "token {at} alone");
    }
}

/// A format with fewer digits than another one may have smaller numbers.
#[test]
fn a_router_in_a_wider_type_of_the_same_values_is_the_same() {
    let of_type = |dtype: Dtype, factor: f32| {
        let mut mixture = dense().into_mixture(2, 9).with_different_experts();
        for (name, _, stored, bytes) in &mut mixture.tensors {
            if !name.ends_with(".mlp.gate.weight") {
                continue;
            }
            let values = bytes.as_chunks::<4>().0.iter();
            let values = values.map(|value| bf16::from_f32(f32::from_le_bytes(*value) * factor));
            *stored = dtype;
            *bytes = match dtype {
                Dtype::BF16 => values.flat_map(bf16::to_le_bytes).collect(),
                _ => values
                    .flat_map(|value| value.to_f32().to_le_bytes())
                    .collect(),
            };
        }
        mixture.logits(options(1))
    };
    for factor in [1.0, 1e-7] {
        let narrow = of_type(Dtype::BF16, factor);
        assert!(narrow == of_type(Dtype::F32, factor), "times {factor}");
    }
    assert!(of_type(Dtype::BF16, 1.0) != of_type(Dtype::BF16, 1e-7));
}

#[test]
fn the_use_of_experts_is_counted() {
    let mixture = dense().into_mixture(2, 9);
    let mut model = Model::load(&mixture.source(), options(2)).unwrap();
    assert_eq!(model.expert_use(), ExpertUse::default());
    let tokens = prompt(TOKENS, 3, DENSE.vocab);
    let mut kv = model.new_kv_store(32).unwrap();
    rows(&mut model, &batch(&[(&tokens, 0..1, 0)]), &mut kv);
    let layers = DENSE.layers as u64;
    let of_one = ExpertUse {
        rows: 2 * layers,
        hits: 2 * layers,
        candidates: EXPERTS as u64 * layers,
        rows_at_largest_load: EXPERTS as u64 * layers,
    };
    assert_eq!(model.expert_use(), of_one);
    rows(&mut model, &batch(&[(&tokens, 1..TOKENS, 0)]), &mut kv);
    let all = model.expert_use();
    assert_eq!(all.rows, 2 * layers * TOKENS as u64);
    assert_eq!(all.candidates, 2 * of_one.candidates);
    assert!(all.hits > of_one.hits && all.hits <= of_one.hits + of_one.candidates);
    assert!(all.rows_at_largest_load > all.rows);
}

#[test]
fn what_a_mixture_lacks_or_cannot_do_is_named() {
    let refusal = |change: &dyn Fn(&mut Checkpoint)| {
        let mut mixture = dense().into_mixture(2, 13);
        change(&mut mixture);
        let loaded = Model::load(&mixture.source(), options(1));
        loaded.err().as_ref().map(LoadError::to_string).unwrap()
    };
    let missing = refusal(&|mixture| {
        mixture
            .tensors
            .retain(|(name, ..)| !name.contains("layers.1.mlp.experts.3.up_proj"));
    });
    assert!(
        missing.contains("model.layers.1.mlp.experts.3.up_proj.weight"),
        "{missing}"
    );
    for (field, value) in [
        ("num_experts_per_tok", json!(EXPERTS + 1)),
        ("num_experts", json!(0)),
        ("shared_expert_intermediate_size", json!(64)),
        ("decoder_sparse_step", json!(0)),
    ] {
        let error = refusal(&|mixture| mixture.config[field] = value.clone());
        assert!(error.contains(field), "{error}");
    }
}

#[test]
fn experts_in_one_tensor_are_those_in_tensors_of_their_own() {
    let mixture = || dense().into_mixture(2, 9).with_different_experts();
    let expected = mixture().logits(options(1));
    assert!(mixture().merged().logits(options(1)) == expected);
    let mixtral = || {
        let mut mixture = mixture();
        let of_head =
            |name: &str| name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight");
        mixture.tensors.retain(|(name, ..)| !of_head(name));
        mixture
    };
    let expected = mixtral().into_mixtral(true).logits(options(1));
    let merged = mixtral().merged().into_mixtral(false);
    assert!(merged.logits(options(1)) == expected);
}

#[test]
fn experts_in_one_tensor_that_cannot_be_cut_are_named() {
    let (rows, columns) = (2 * DENSE.intermediate, DENSE.hidden);
    let refusal = |dtype: Dtype, new_shape: &[usize]| {
        let mut mixture = dense().into_mixture(2, 13).merged();
        let mut tensors = mixture.tensors.iter_mut();
        let merged = tensors.find(|(name, ..)| name.ends_with("gate_up_proj"));
        let (name, shape, stored, bytes) = merged.unwrap();
        let name = name.clone();
        (*shape, *stored) = (new_shape.to_vec(), dtype);
        bytes.truncate(shape.iter().product::<usize>() * dtype.bitsize() / 8);
        let loaded = Model::load(&mixture.source(), options(1));
        let error = loaded.err().as_ref().map(LoadError::to_string).unwrap();
        assert!(error.contains(&name), "{error}");
        error
    };
    for shape in [
        &[EXPERTS * rows, columns][..],
        &[EXPERTS * rows, 1, columns],
        &[EXPERTS - 1, rows, columns],
        &[EXPERTS, 0, columns],
        &[1 << 62, 0, columns],
    ] {
        let error = refusal(Dtype::BF16, shape);
        assert!(error.contains("[experts, rows, columns]"), "{error}");
    }
    let packed = refusal(Dtype::U8, &[EXPERTS, rows, columns]);
    assert!(packed.contains("in one tensor of"), "{packed}");
}

#[test]
fn two_tensors_of_the_same_matrices_are_both_named() {
    let mixture = || dense().into_mixture(2, 13);
    let apart = "model.layers.0.mlp.experts.3.up_proj.weight";
    let mut both = mixture().merged();
    let own = mixture()
        .tensors
        .into_iter()
        .find(|(name, ..)| name == apart);
    both.tensors.push(own.unwrap());
    let loaded = Model::load(&both.source(), options(1));
    let error = loaded.err().as_ref().map(LoadError::to_string).unwrap();
    assert!(
        error.contains(apart) && error.contains("experts.gate_up_proj"),
        "{error}"
    );
}

/// In a model of Mixtral the tensors have other names.
#[test]
fn a_model_of_mixtral_equals_the_dense_one_too() {
    let shape = Shape {
        architecture: &LLAMA,
        group: None,
        ..DENSE
    };
    let dense = || Checkpoint::of(&shape.in_memory(5));
    let expected = dense().logits(options(1));
    let mixture = dense().into_mixture(1, 7).into_mixtral(true);
    assert!(mixture.logits(options(1)) == expected);
}
