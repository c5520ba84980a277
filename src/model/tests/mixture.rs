//! Mixtures of experts: equal experts are a dense half, their order changes nothing, and a token
//! has the same bits beside any others.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sterna_kernels::{Isa, Kernels};
use sterna_random::Random;

use super::{batch, options, prompt, rows};
use crate::checkpoint::synthetic::Shape;
use crate::checkpoint::{LLAMA, LoadError, MIXTRAL, QWEN3, Source};
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
    let mut mixture = dense().into_mixture(1, 7);
    mixture.config["architectures"] = json!([MIXTRAL.class]);
    mixture.config["num_local_experts"] = json!(EXPERTS);
    for (name, ..) in &mut mixture.tensors {
        for (from, to) in [
            (".mlp.", ".block_sparse_moe."),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
        ] {
            *name = name.replace(from, to);
        }
    }
    assert!(mixture.logits(options(1)) == expected);
}
