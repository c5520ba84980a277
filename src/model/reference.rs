//! Tests of the whole model against a forward pass that is as plain as it can be, over every kind of checkpoint; and of what must not
//! change a result: chunks, neighbours, threads, shards.

use std::collections::BTreeMap;

use half::{bf16, f16};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use sterna_kernels::{Isa, Kernels};
use sterna_scheduler::{Batch, Page, SequenceId};

use super::{Architecture, KvStore, LoadError, LoadOptions, Model, Source, toy};

/// How a checkpoint holds its ternary weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Packed,
    Unpacked,
    Masters(Dtype),
}

/// A kind of checkpoint.
#[derive(Clone, Copy, Debug)]
struct Kind {
    architecture: Architecture,
    tied: bool,
    form: Form,
    multiply: bool,
    rms_norm: bool,
    embedding: Dtype,
    /// Besides the head.
    float_module: Option<&'static str>,
    ternary_head: bool,
    head_dim: usize,
}

const PLAIN: Kind = Kind {
    architecture: Architecture::BitNet,
    tied: true,
    form: Form::Packed,
    multiply: true,
    rms_norm: false,
    embedding: Dtype::BF16,
    float_module: None,
    ternary_head: false,
    head_dim: 16,
};

const LLAMA: Kind = Kind {
    architecture: Architecture::Llama,
    tied: false,
    multiply: false,
    ..PLAIN
};

const VOCAB: usize = 76;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 100;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const THETA: f64 = 10_000.0;
const EPS: f64 = 1e-5;

struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / f64::from(1 << 24)
    }

    /// Roughly normal.
    fn normal(&mut self) -> f64 {
        (0..6).map(|_| self.unit() - 0.5).sum::<f64>() * 2.0_f64.sqrt()
    }
}

/// One linear, as plain numbers.
struct PlainLinear {
    weights: Vec<Vec<f64>>, // [row][column], scaled.
    quantized: bool,
    norm: Option<Vec<f64>>,
}

impl PlainLinear {
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let mut x = x.to_vec();
        if let Some(norm) = &self.norm {
            x = rms_norm(&x, norm);
        }
        if self.quantized {
            let s = 127.0 / x.iter().fold(1e-5, |a: f64, b| a.max(b.abs()));
            x.iter_mut()
                .for_each(|x| *x = (*x * s).round_ties_even().clamp(-128.0, 127.0) / s);
        }
        self.weights
            .iter()
            .map(|row| row.iter().zip(&x).map(|(w, x)| w * x).sum())
            .collect()
    }
}

fn rms_norm(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

/// A checkpoint under construction: its files' tensors, and the same as plain numbers.
struct Made {
    kind: Kind,
    random: Random,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    linears: BTreeMap<String, PlainLinear>,
    norms: BTreeMap<String, Vec<f64>>,
    embedding: Vec<Vec<f64>>,
}

impl Made {
    fn new(kind: Kind, seed: u64) -> Made {
        let random = Random(seed);
        let (tensors, linears, norms, embedding) = (
            BTreeMap::new(),
            BTreeMap::new(),
            BTreeMap::new(),
            Vec::new(),
        );
        let mut made = Made {
            kind,
            random,
            tensors,
            linears,
            norms,
            embedding,
        };
        let (q, kv) = (HEADS * kind.head_dim, KV_HEADS * kind.head_dim);
        made.embedding = made.floats("model.embed_tokens.weight", VOCAB, HIDDEN, kind.embedding);
        if kind.tied {
            made.linears.insert(
                "lm_head".into(),
                PlainLinear {
                    weights: made.embedding.clone(),
                    quantized: false,
                    norm: None,
                },
            );
        } else {
            made.linear("lm_head", VOCAB, HIDDEN, kind.ternary_head);
        }
        made.norm("model.norm", HIDDEN);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            made.norm(&name("input_layernorm"), HIDDEN);
            made.norm(&name("post_attention_layernorm"), HIDDEN);
            if kind.architecture == Architecture::BitNet {
                made.norm(&name("self_attn.attn_sub_norm"), HIDDEN);
                made.norm(&name("mlp.ffn_sub_norm"), INTERMEDIATE);
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
                made.linear(&name(part), rows, columns, ternary);
            }
        }
        made
    }

    fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize], values: &[f64]) -> Vec<f64> {
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
            .map(|_| 1.0 + 0.2 * self.random.normal())
            .collect();
        let kept = self.put(&format!("{module}.weight"), Dtype::F32, &[width], &values);
        self.norms.insert(module.to_owned(), kept);
    }

    fn floats(&mut self, name: &str, rows: usize, columns: usize, dtype: Dtype) -> Vec<Vec<f64>> {
        let values: Vec<f64> = (0..rows * columns)
            .map(|_| self.random.normal() * 0.5)
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
            Form::Masters(dtype) => {
                let masters = self.floats(&name, rows, columns, dtype);
                let mean = masters.iter().flatten().map(|w| w.abs()).sum::<f64>()
                    / (rows * columns) as f64;
                let round = |w: f64| (w / mean).round_ties_even().clamp(-1.0, 1.0);
                (
                    masters
                        .into_iter()
                        .map(|row| row.into_iter().map(round).collect::<Vec<_>>())
                        .collect::<Vec<_>>(),
                    mean,
                )
            }
            Form::Packed | Form::Unpacked => {
                let weights: Vec<Vec<f64>> = (0..rows)
                    .map(|_| {
                        (0..columns)
                            .map(|_| (self.random.unit() * 3.0).floor() - 1.0)
                            .collect()
                    })
                    .collect();
                let scale = 0.1 + 0.1 * self.random.unit();
                let stored = if self.kind.multiply {
                    scale
                } else {
                    1.0 / scale
                };
                let stored = self.put(
                    &format!("{module}.weight_scale"),
                    Dtype::BF16,
                    &[1],
                    &[stored],
                )[0];
                self.put_ternary(&name, &weights);
                (
                    weights,
                    if self.kind.multiply {
                        stored
                    } else {
                        1.0 / stored
                    },
                )
            }
        };
        let weights = weights
            .into_iter()
            .map(|row| row.into_iter().map(|w| w * scale).collect())
            .collect();
        self.linears.insert(
            module.to_owned(),
            PlainLinear {
                weights,
                quantized: true,
                norm,
            },
        );
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
        let Kind {
            architecture,
            tied,
            form,
            multiply,
            rms_norm,
            head_dim,
            ..
        } = self.kind;
        let bitnet = architecture == Architecture::BitNet;
        let mut float_modules: Vec<&str> = self.kind.float_module.into_iter().collect();
        if !self.kind.ternary_head {
            float_modules.push("lm_head");
        }
        json!({
            "architectures": [if bitnet { "BitNetForCausalLM" } else { "LlamaForCausalLM" }],
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "rms_norm_eps": EPS,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "tie_word_embeddings": tied,
            "quantization_config": {
                "quant_method": "bitnet", "linear_class": if multiply { "autobitlinear" } else { "bitlinear" },
                "quantization_mode": if matches!(form, Form::Masters(_)) { "online" } else { "offline" },
                "use_rms_norm": rms_norm, "rms_norm_eps": EPS, "modules_to_not_convert": float_modules,
            },
        })
    }

    /// The checkpoint in `shards` files.
    fn source(&self, shards: usize) -> Source {
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

    fn load(&self, threads: usize) -> Model {
        Model::load(&self.source(1), options(threads)).unwrap()
    }

    fn apply(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        self.linears[&format!("model.layers.{layer}.{part}")].apply(x)
    }

    fn normed(&self, layer: usize, part: &str, x: &[f64]) -> Vec<f64> {
        self.norms
            .get(&format!("model.layers.{layer}.{part}"))
            .map_or_else(|| x.to_vec(), |weight| rms_norm(x, weight))
    }

    /// One layer over a whole sequence.
    fn layer(&self, layer: usize, hidden: &mut [Vec<f64>]) {
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
                let weights: Vec<f64> = keys[..=position]
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
            let y = self.normed(layer, "post_attention_layernorm", x);
            let (gate, up) = (
                self.apply(layer, "mlp.gate_proj", &y),
                self.apply(layer, "mlp.up_proj", &y),
            );
            let act = |gate: f64| match self.kind.architecture {
                Architecture::BitNet => gate.max(0.0).powi(2),
                Architecture::Llama => gate / (1.0 + (-gate).exp()),
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
    }

    fn logits(&self, x: &[f64]) -> Vec<f64> {
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

fn options(threads: usize) -> LoadOptions {
    let kernels = Kernels::new(Isa::best()).unwrap();
    LoadOptions {
        max_step_tokens: 700,
        ..LoadOptions::new(kernels, threads)
    }
}

/// A row: which sequence, from where to where, and the pages of that sequence.
type Part<'a> = (&'a [u32], std::ops::Range<usize>, u32);

/// A batch of parts of sequences. The pages of a sequence are `first`, `first + 3`, …
fn batch(parts: &[Part<'_>]) -> Batch {
    let mut batch = Batch::new();
    for (sequence, range, first) in parts {
        let pages: Vec<Page> = (0..range.end.div_ceil(16) as u32)
            .map(|i| Page::new(first + 3 * i))
            .collect();
        batch.push_row(
            SequenceId::new(*first, 0),
            range.start,
            &sequence[range.clone()],
            &pages,
            true,
        );
    }
    batch
}

fn rows(model: &mut Model, batch: &Batch, kv: &mut KvStore) -> Vec<Vec<f32>> {
    let vocab = model.config().vocab;
    let logits = model.forward(batch, kv);
    let row = |row| {
        let mut out = vec![0.0; vocab];
        logits.copy_row(row, &mut out);
        out
    };
    (0..logits.rows()).map(row).collect()
}

fn prompt(len: usize, seed: u64, vocab: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..len)
        .map(|_| (random.unit() * vocab as f64) as u32)
        .collect()
}

fn check(kind: Kind) {
    let seed = 11;
    let made = Made::new(kind, seed);
    let mut model = made.load(2);
    let mut kv = model.new_kv_store(10);
    let tokens = prompt(37, seed, VOCAB);
    let batch = batch(&[(&tokens, 0..tokens.len(), 1)]);

    let mut plain: Vec<Vec<f64>> = tokens
        .iter()
        .map(|&token| made.embedding[token as usize].clone())
        .collect();
    let mut hidden = vec![0.0; tokens.len() * HIDDEN];
    model.embed(&batch, &mut hidden);
    assert_eq!(
        hidden,
        plain.concat().iter().map(|&x| x as f32).collect::<Vec<_>>(),
        "{kind:?}: embedding"
    );
    for layer in 0..LAYERS {
        let mut hidden: Vec<f32> = plain.concat().iter().map(|&x| x as f32).collect();
        model.run_layer(layer, &mut hidden, &batch, &mut kv);
        made.layer(layer, &mut plain);
        // A sum that falls on the other side of a half rounds an activation the other way, which is one token of 37: at most two may.
        check_close(
            &hidden,
            &plain.concat(),
            0.94,
            &format!("{kind:?}, seed {seed}: layer {layer}"),
        );
    }
    // Through both layers, a rounding that falls the other way spreads: fewer values agree closely, none is far off.
    let logits = rows(&mut model, &batch, &mut kv).remove(0);
    let expected = made.logits(plain.last().unwrap());
    let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let worst = logits
        .iter()
        .zip(&expected)
        .map(|(a, b)| (f64::from(*a) - b).abs() / rms)
        .fold(0.0, f64::max);
    assert!(
        worst < 0.05,
        "{kind:?}, seed {seed}: a logit differs by {worst} of their RMS"
    );
}

/// At least `share` of the values are within 1e-3 of the RMS.
fn check_close(values: &[f32], expected: &[f64], share: f64, what: &str) {
    let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let close = values
        .iter()
        .zip(expected)
        .filter(|(a, b)| (f64::from(**a) - **b).abs() < 1e-3 * rms)
        .count();
    let found = close as f64 / values.len() as f64;
    assert!(
        found >= share,
        "{what}: only {found:.4} of the values agree"
    );
}

#[test]
fn packed_weights_of_both_families_match_a_plain_forward() {
    check(PLAIN);
    check(LLAMA);
    check(Kind {
        multiply: false,
        tied: false,
        embedding: Dtype::F16,
        ..PLAIN
    });
    check(Kind {
        multiply: true,
        tied: true,
        embedding: Dtype::F32,
        head_dim: 32,
        ..LLAMA
    });
}

#[test]
fn masters_are_made_ternary_as_they_should_be() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        check(Kind {
            form: Form::Masters(dtype),
            ..PLAIN
        });
    }
    check(Kind {
        form: Form::Masters(Dtype::BF16),
        ..LLAMA
    });
    check(Kind {
        form: Form::Unpacked,
        ..PLAIN
    });
}

#[test]
fn norms_before_linears_and_float_linears_are_computed() {
    check(Kind {
        rms_norm: true,
        ..LLAMA
    });
    check(Kind {
        rms_norm: true,
        form: Form::Masters(Dtype::F32),
        ..PLAIN
    });
    for module in ["k_proj", "mlp.down_proj", "up_proj"] {
        check(Kind {
            float_module: Some(module),
            ..PLAIN
        });
        check(Kind {
            float_module: Some(module),
            rms_norm: true,
            ..LLAMA
        });
    }
    check(Kind {
        ternary_head: true,
        ..LLAMA
    });
}

#[test]
fn shards_hold_the_same_model() {
    let made = Made::new(PLAIN, 5);
    let tokens = prompt(20, 5, VOCAB);
    let run = |source: &Source| {
        let mut model = Model::load(source, options(1)).unwrap();
        let mut kv = model.new_kv_store(8);
        rows(&mut model, &batch(&[(&tokens, 0..20, 0)]), &mut kv)
    };
    assert_eq!(run(&made.source(1)), run(&made.source(3)));
}

#[test]
fn neither_chunks_nor_neighbours_nor_threads_change_a_bit() {
    let (a, b, c) = (prompt(600, 1, 512), prompt(33, 2, 512), prompt(300, 3, 512));
    let source = toy::source();
    let alone: Vec<Vec<f32>> = [(&a, 0), (&b, 1), (&c, 2)]
        .map(|(tokens, first)| {
            let mut model = Model::load(&source, options(1)).unwrap();
            let mut kv = model.new_kv_store(120);
            rows(
                &mut model,
                &batch(&[(tokens, 0..tokens.len(), first)]),
                &mut kv,
            )
            .remove(0)
        })
        .into();
    for threads in [1, 2, 3] {
        let mut model = Model::load(&source, options(threads)).unwrap();
        let mut kv = model.new_kv_store(120);
        // Whatever a recycled page holds, also NaN, is never looked at.
        kv.poison();
        let steps: [&[Part<'_>]; 5] = [
            &[(&a, 0..7, 0), (&b, 0..1, 1)],
            &[(&b, 1..32, 1), (&a, 7..300, 0), (&c, 0..255, 2)],
            &[(&a, 300..301, 0)],
            &[(&c, 255..299, 2), (&a, 301..599, 0)],
            &[(&c, 299..300, 2), (&a, 599..600, 0), (&b, 32..33, 1)],
        ];
        let last = steps
            .map(|step| rows(&mut model, &batch(step), &mut kv))
            .into_iter()
            .last();
        assert_eq!(
            last.unwrap(),
            [alone[2].clone(), alone[0].clone(), alone[1].clone()],
            "{threads} threads"
        );
    }
}

fn refusal(change: impl FnOnce(&mut Made)) -> String {
    let mut made = Made::new(PLAIN, 7);
    change(&mut made);
    let result: Result<Model, LoadError> = Model::load(&made.source(1), options(2));
    result.err().expect("the checkpoint is refused").to_string()
}

#[test]
fn tensors_that_are_missing_unknown_or_misshapen_are_named() {
    let (up, norm) = (
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
    );
    for missing in [
        up,
        norm,
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ] {
        let error = refusal(|made| drop(made.tensors.remove(missing)));
        assert!(
            error.contains(missing) && error.contains("missing"),
            "{error}"
        );
    }
    let unknown = "model.layers.0.mlp.up_proj.lrc_U";
    let error = refusal(|made| drop(made.put(unknown, Dtype::F32, &[1], &[0.0])));
    assert!(error.contains(unknown), "{error}");
    let error = refusal(|made| drop(made.put(up, Dtype::U8, &[2, HIDDEN], &[0.0; 2 * HIDDEN])));
    assert!(error.contains(up) && error.contains("shape"), "{error}");
    let error = refusal(|made| drop(made.put(norm, Dtype::U8, &[HIDDEN], &[0.0; HIDDEN])));
    assert!(error.contains(norm), "{error}");
    let error = refusal(|made| drop(made.put(norm, Dtype::F32, &[HIDDEN], &[f64::NAN; HIDDEN])));
    assert!(error.contains(norm), "{error}");
}

#[test]
fn weights_that_are_not_ternary_are_refused() {
    let up = "model.layers.1.mlp.up_proj.weight";
    let error = refusal(|made| made.tensors.get_mut(up).unwrap().2[77] |= 0b11);
    assert!(error.contains(up) && error.contains("is 3"), "{error}");
    let error = refusal(|made| {
        drop(made.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        ))
    });
    assert!(error.contains(up), "{error}");
    let error = refusal(|made| {
        made.tensors.remove(&format!("{up}_scale"));
        made.put(
            up,
            Dtype::F32,
            &[INTERMEDIATE, HIDDEN],
            &[0.5; INTERMEDIATE * HIDDEN],
        );
    });
    assert!(error.contains(up) && error.contains("online"), "{error}");
    let error = refusal(|made| drop(made.put(&format!("{up}_scale"), Dtype::F32, &[1], &[0.0])));
    assert!(error.contains("weight_scale"), "{error}");
}

#[test]
fn a_head_beside_a_tied_embedding_counts_when_it_differs() {
    let tokens = prompt(5, 9, VOCAB);
    let run = |made: &Made| {
        let mut model = made.load(1);
        let mut kv = model.new_kv_store(1);
        (
            rows(&mut model, &batch(&[(&tokens, 0..5, 0)]), &mut kv),
            model.weight_bytes(),
        )
    };
    let mut made = Made::new(PLAIN, 9);
    let (plain, bytes) = run(&made);
    let embedding = made.tensors["model.embed_tokens.weight"].clone();
    made.tensors.insert("lm_head.weight".into(), embedding);
    assert_eq!(
        run(&made),
        (plain.clone(), bytes),
        "an equal copy changes nothing"
    );
    made.floats("lm_head.weight", VOCAB, HIDDEN, Dtype::BF16);
    let (own, more_bytes) = run(&made);
    assert!(own != plain && more_bytes > bytes);
    made.tensors.remove("lm_head.weight");
    let embedding = made.tensors.remove("model.embed_tokens.weight").unwrap();
    made.tensors.insert("lm_head.weight".into(), embedding);
    assert_eq!(run(&made).0, plain, "either name may hold what both share");
}
