//! A plain forward pass in double precision, and checkpoints of every kind to compare the model
//! with it.

use std::collections::BTreeMap;

use half::{bf16, f16};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use sterna_random::Random;

use crate::checkpoint::Source;
use crate::checkpoint::{Activation, Architecture, BITNET, LLAMA};

/// How a checkpoint holds its ternary weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    Packed,
    Unpacked,
    Masters(Dtype),
}

/// A kind of checkpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckpointKind {
    pub(super) architecture: &'static Architecture,
    pub(super) tied: bool,
    pub(super) form: Form,
    /// Whether stored scales multiply, rather than divide.
    pub(super) multiply: bool,
    /// Whether every ternary linear has an input norm.
    pub(super) rms_norm: bool,
    /// The rank and the type of the correction of every ternary linear, if they have one.
    pub(super) low_rank: Option<(usize, Dtype)>,
    /// The type of the embedding.
    pub(super) embedding: Dtype,
    /// A module that stays float besides the head.
    pub(super) float_module: Option<&'static str>,
    pub(super) ternary_head: bool,
    pub(super) head_dim: usize,
}

/// A packed BitNet checkpoint.
pub(super) const BITNET_KIND: CheckpointKind = CheckpointKind {
    architecture: &BITNET,
    tied: true,
    form: Form::Packed,
    multiply: true,
    rms_norm: false,
    low_rank: None,
    embedding: Dtype::BF16,
    float_module: None,
    ternary_head: false,
    head_dim: 16,
};

/// A packed Llama checkpoint.
pub(super) const LLAMA_KIND: CheckpointKind = CheckpointKind {
    architecture: &LLAMA,
    tied: false,
    multiply: false,
    ..BITNET_KIND
};

pub(super) const VOCAB: usize = 76;
pub(super) const HIDDEN: usize = 64;
pub(super) const INTERMEDIATE: usize = 100;
pub(super) const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const THETA: f64 = 10_000.0;
const EPS: f64 = 1e-5;

/// Returns an approximately normal value.
fn normal(random: &mut Random) -> f64 {
    (0..6).map(|_| random.fraction() - 0.5).sum::<f64>() * 2.0_f64.sqrt()
}

/// One linear in double precision.
pub(super) struct PlainLinear {
    weights: Vec<Vec<f64>>, // [row][column], scaled.
    quantized: bool,
    norm: Option<Vec<f64>>,
    correction: Option<[Vec<Vec<f64>>; 2]>, // U and V.
}

impl PlainLinear {
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let mut x = x.to_vec();
        let correction = self.correction.as_ref().map(|[up, down]| {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let column = |r: usize| down.iter().map(|row| row[r]).collect::<Vec<f64>>();
            let lowered = (0..down[0].len()).map(|r| dot(&column(r), &x));
            let lowered: Vec<f64> = lowered.collect();
            up.iter()
                .map(|row| dot(row, &lowered))
                .collect::<Vec<f64>>()
        });
        if let Some(norm) = &self.norm {
            x = rms_norm(&x, norm);
        }
        if self.quantized {
            let s = 127.0 / x.iter().fold(1e-5, |a: f64, b| a.max(b.abs()));
            x.iter_mut()
                .for_each(|x| *x = (*x * s).round_ties_even().clamp(-128.0, 127.0) / s);
        }
        let products = self.weights.iter();
        let products = products.map(|row| row.iter().zip(&x).map(|(w, x)| w * x).sum());
        let mut products: Vec<f64> = products.collect();
        let more = correction.iter().flatten();
        products
            .iter_mut()
            .zip(more)
            .for_each(|(out, more)| *out += more);
        products
    }
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

/// A checkpoint under construction: its tensors as stored, and as doubles.
pub(super) struct TestCheckpoint {
    pub(super) kind: CheckpointKind,
    pub(super) random: Random,
    pub(super) tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    pub(super) linears: BTreeMap<String, PlainLinear>,
    pub(super) norms: BTreeMap<String, Vec<f64>>,
    pub(super) embedding: Vec<Vec<f64>>,
}

impl TestCheckpoint {
    pub(super) fn new(kind: CheckpointKind, seed: u64) -> TestCheckpoint {
        let random = Random::new(seed);
        let (tensors, linears, norms, embedding) = (
            BTreeMap::new(),
            BTreeMap::new(),
            BTreeMap::new(),
            Vec::new(),
        );
        let mut checkpoint = TestCheckpoint {
            kind,
            random,
            tensors,
            linears,
            norms,
            embedding,
        };
        let (q, kv) = (HEADS * kind.head_dim, KV_HEADS * kind.head_dim);
        checkpoint.embedding =
            checkpoint.floats("model.embed_tokens.weight", VOCAB, HIDDEN, kind.embedding);
        if kind.tied {
            checkpoint.linears.insert(
                "lm_head".into(),
                PlainLinear {
                    weights: checkpoint.embedding.clone(),
                    quantized: false,
                    norm: None,
                    correction: None,
                },
            );
        } else {
            checkpoint.linear("lm_head", VOCAB, HIDDEN, kind.ternary_head);
        }
        checkpoint.norm("model.norm", HIDDEN);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            checkpoint.norm(&name("input_layernorm"), HIDDEN);
            checkpoint.norm(&name("post_attention_layernorm"), HIDDEN);
            if kind.architecture.layer.attention_sub_norm.is_some() {
                checkpoint.norm(&name("self_attn.attn_sub_norm"), HIDDEN);
                checkpoint.norm(&name("mlp.ffn_sub_norm"), INTERMEDIATE);
            }
            for (part, rows, columns) in [
                ("self_attn.q_proj", q, HIDDEN),
                ("self_attn.k_proj", kv, HIDDEN),
                ("self_attn.v_proj", kv, HIDDEN),
                ("self_attn.o_proj", HIDDEN, q),
                ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
                ("mlp.up_proj", INTERMEDIATE, HIDDEN),
                ("mlp.down_proj", HIDDEN, INTERMEDIATE),
            ] {
                let ternary = kind
                    .float_module
                    .is_none_or(|module| !part.ends_with(module));
                checkpoint.linear(&name(part), rows, columns, ternary);
            }
        }
        checkpoint
    }

    pub(super) fn put(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        values: &[f64],
    ) -> Vec<f64> {
        let (mut bytes, mut kept) = (Vec::new(), Vec::new());
        for &value in values {
            match dtype {
                Dtype::BF16 => {
                    bytes.extend(bf16::from_f64(value).to_le_bytes());
                    kept.push(bf16::from_f64(value).to_f64());
                }
                Dtype::F16 => {
                    bytes.extend(f16::from_f64(value).to_le_bytes());
                    kept.push(f16::from_f64(value).to_f64());
                }
                Dtype::U8 => bytes.push(value as u8),
                _ => {
                    bytes.extend((value as f32).to_le_bytes());
                    kept.push(f64::from(value as f32));
                }
            }
        }
        self.tensors
            .insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
        kept
    }

    fn norm(&mut self, module: &str, width: usize) {
        let values: Vec<f64> = (0..width)
            .map(|_| 1.0 + 0.2 * normal(&mut self.random))
            .collect();
        let kept = self.put(&format!("{module}.weight"), Dtype::F32, &[width], &values);
        self.norms.insert(module.to_owned(), kept);
    }

    pub(super) fn floats(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
        dtype: Dtype,
    ) -> Vec<Vec<f64>> {
        let values: Vec<f64> = (0..rows * columns)
            .map(|_| normal(&mut self.random) * 0.5)
            .collect();
        self.put(name, dtype, &[rows, columns], &values)
            .chunks(columns)
            .map(<[f64]>::to_vec)
            .collect()
    }

    fn linear(&mut self, module: &str, rows: usize, columns: usize, ternary: bool) {
        let name = format!("{module}.weight");
        if !ternary {
            let weights = self.floats(&name, rows, columns, Dtype::F16);
            self.linears.insert(
                module.to_owned(),
                PlainLinear {
                    weights,
                    quantized: false,
                    norm: None,
                    correction: None,
                },
            );
            return;
        }
        let norm = self.kind.rms_norm.then(|| {
            let norm = format!("{module}.rms_norm");
            self.norm(&norm, columns);
            self.norms[&norm].clone()
        });
        let (weights, scale) = match self.kind.form {
            Form::Masters(dtype) => self.masters(&name, rows, columns, dtype),
            Form::Packed | Form::Unpacked => self.ternary(&name, rows, columns),
        };
        let scaled = |row: Vec<f64>| row.into_iter().map(|w| w * scale).collect();
        let weights = weights.into_iter().map(scaled).collect();
        let correction = self.kind.low_rank.map(|(rank, dtype)| {
            let u = self.floats(&format!("{module}.lrc_U"), rows, rank, dtype);
            [
                u,
                self.floats(&format!("{module}.lrc_V"), columns, rank, dtype),
            ]
        });
        let linear = PlainLinear {
            weights,
            quantized: true,
            norm,
            correction,
        };
        self.linears.insert(module.to_owned(), linear);
    }

    /// Stores floats, and returns the ternary weights and the scale that they mean.
    fn masters(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
        dtype: Dtype,
    ) -> (Vec<Vec<f64>>, f64) {
        let masters = self.floats(name, rows, columns, dtype);
        let sum: f64 = masters.iter().flatten().map(|w| w.abs()).sum();
        let mean = sum / (rows * columns) as f64;
        let round = |w: f64| (w / mean).round_ties_even().clamp(-1.0, 1.0);
        let rounded = masters
            .into_iter()
            .map(|row| row.into_iter().map(round).collect());
        (rounded.collect(), mean)
    }

    /// Stores ternary weights, and a scale in the direction of the kind. Returns both, the scale as
    /// a factor.
    fn ternary(&mut self, name: &str, rows: usize, columns: usize) -> (Vec<Vec<f64>>, f64) {
        let mut row = || {
            (0..columns)
                .map(|_| (self.random.fraction() * 3.0).floor() - 1.0)
                .collect()
        };
        let weights: Vec<Vec<f64>> = (0..rows).map(|_| row()).collect();
        let scale = 0.1 + 0.1 * self.random.fraction();
        let stored = if self.kind.multiply {
            scale
        } else {
            1.0 / scale
        };
        let stored = self.put(&format!("{name}_scale"), Dtype::BF16, &[1], &[stored])[0];
        self.put_ternary(name, &weights);
        (
            weights,
            if self.kind.multiply {
                stored
            } else {
                1.0 / stored
            },
        )
    }

    fn put_ternary(&mut self, name: &str, weights: &[Vec<f64>]) {
        let (rows, columns) = (weights.len(), weights[0].len());
        if self.kind.form == Form::Unpacked {
            self.put(name, Dtype::F16, &[rows, columns], &weights.concat());
            return;
        }
        let quarter = rows / 4;
        let code = |row: usize, column: usize| (weights[row][column] + 1.0) as u8;
        let byte = |j, c| {
            (0..4)
                .map(|i| code(i * quarter + j, c) << (2 * i))
                .sum::<u8>()
        };
        let bytes: Vec<f64> = (0..quarter)
            .flat_map(|j| (0..columns).map(move |c| f64::from(byte(j, c))))
            .collect();
        self.put(name, Dtype::U8, &[quarter, columns], &bytes);
    }

    fn config(&self) -> Value {
        let CheckpointKind {
            architecture,
            tied,
            multiply,
            rms_norm,
            head_dim,
            ..
        } = self.kind;
        let online = matches!(self.kind.form, Form::Masters(_));
        let mut float_modules: Vec<&str> = self.kind.float_module.into_iter().collect();
        if !self.kind.ternary_head {
            float_modules.push("lm_head");
        }
        json!({
            "architectures": [architecture.class],
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "rms_norm_eps": EPS,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
            "tie_word_embeddings": tied,
            "quantization_config": {
                "quant_method": "bitnet",
                "linear_class": if multiply { "autobitlinear" } else { "bitlinear" },
                "quantization_mode": if online { "online" } else { "offline" },
                "use_rms_norm": rms_norm, "rms_norm_eps": EPS,
                "modules_to_not_convert": float_modules,
            },
        })
    }

    /// Returns the checkpoint in `shards` files.
    pub(super) fn source(&self, shards: usize) -> Source {
        let mut files = vec![(
            "config.json".to_owned(),
            self.config().to_string().into_bytes(),
        )];
        let mut map = BTreeMap::new();
        for shard in 0..shards {
            let mine = self
                .tensors
                .iter()
                .enumerate()
                .filter(|(i, _)| i % shards == shard);
            let views = mine.map(|(_, (name, (dtype, shape, bytes)))| {
                (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
            });
            let views: Vec<_> = views.collect();
            let file = if shards == 1 {
                "model.safetensors".to_owned()
            } else {
                format!("model-{shard}.safetensors")
            };
            map.extend(
                views
                    .iter()
                    .map(|(name, _)| ((*name).clone(), file.clone())),
            );
            files.push((file, safetensors::serialize(views, None).unwrap()));
        }
        if shards > 1 {
            files.push((
                "model.safetensors.index.json".to_owned(),
                json!({"weight_map": map}).to_string().into_bytes(),
            ));
        }
        Source::in_memory(files)
    }

    fn apply(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        self.linears[&format!("model.layers.{layer}.{part}")].apply(x)
    }

    fn normed(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        self.norms
            .get(&format!("model.layers.{layer}.{part}"))
            .map_or_else(|| x.to_vec(), |weight| rms_norm(x, weight))
    }

    /// Computes one layer for a whole sequence.
    pub(super) fn layer(&self, layer: usize, hidden: &mut [Vec<f64>]) {
        self.layer_with_block(layer, hidden, hidden.len());
    }

    /// Computes one layer for a whole sequence, whose tokens from `block` on attend to each other.
    pub(super) fn layer_with_block(&self, layer: usize, hidden: &mut [Vec<f64>], block: usize) {
        let d = self.kind.head_dim;
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, x) in hidden.iter().enumerate() {
            let x = self.normed(layer, "input_layernorm", x);
            queries.push(rotate(
                &self.apply(layer, "self_attn.q_proj", &x),
                position,
                d,
            ));
            keys.push(to_half(&rotate(
                &self.apply(layer, "self_attn.k_proj", &x),
                position,
                d,
            )));
            values.push(to_half(&self.apply(layer, "self_attn.v_proj", &x)));
        }
        for (position, x) in hidden.iter_mut().enumerate() {
            let mut attended = Vec::new();
            for (head, query) in queries[position].chunks(d).enumerate() {
                let kv = head / (HEADS / KV_HEADS) * d;
                let score = |key: &[f64]| {
                    key[kv..kv + d]
                        .iter()
                        .zip(query)
                        .map(|(k, q)| k * q)
                        .sum::<f64>()
                        / (d as f64).sqrt()
                };
                let visible = if position < block {
                    position
                } else {
                    keys.len() - 1
                };
                let weights: Vec<f64> = keys[..=visible]
                    .iter()
                    .map(|key| score(key).exp())
                    .collect();
                let sum: f64 = weights.iter().sum();
                attended.extend((0..d).map(|i| {
                    weights
                        .iter()
                        .zip(&values)
                        .map(|(w, v)| w * v[kv + i])
                        .sum::<f64>()
                        / sum
                }));
            }
            let attended = self.normed(layer, "self_attn.attn_sub_norm", &attended);
            add(x, &self.apply(layer, "self_attn.o_proj", &attended));
            self.feed_forward(layer, x);
        }
    }

    /// Adds the feed-forward half of a layer to a token's hidden state.
    fn feed_forward(&self, layer: usize, x: &mut [f64]) {
        let y = self.normed(layer, "post_attention_layernorm", x);
        let (gate, up) = (
            self.apply(layer, "mlp.gate_proj", &y),
            self.apply(layer, "mlp.up_proj", &y),
        );
        let act = |gate: f64| match self.kind.architecture.activation {
            Activation::Relu2 => gate.max(0.0).powi(2),
            Activation::Silu => gate / (1.0 + (-gate).exp()),
            Activation::GeluTanh => panic!("no checkpoint of these tests has it"),
        };
        let gated: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| act(*gate) * up)
            .collect();
        add(
            x,
            &self.apply(
                layer,
                "mlp.down_proj",
                &self.normed(layer, "mlp.ffn_sub_norm", &gated),
            ),
        );
    }

    pub(super) fn logits(&self, x: &[f64]) -> Vec<f64> {
        self.linears["lm_head"].apply(&rms_norm(x, &self.norms["model.norm"]))
    }
}

fn rotate(x: &[f64], position: usize, d: usize) -> Vec<f64> {
    let mut out = x.to_vec();
    for (head, out) in x.chunks(d).zip(out.chunks_mut(d)) {
        for i in 0..d / 2 {
            let (sin, cos) = (position as f64 / THETA.powf(2.0 * i as f64 / d as f64)).sin_cos();
            out[i] = head[i] * cos - head[i + d / 2] * sin;
            out[i + d / 2] = head[i + d / 2] * cos + head[i] * sin;
        }
    }
    out
}

fn to_half(x: &[f64]) -> Vec<f64> {
    x.iter()
        .map(|&x| f16::from_f32(x as f32).to_f64())
        .collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
