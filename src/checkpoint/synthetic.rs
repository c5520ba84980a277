//! Checkpoints with random ternary weights in the shapes of real models: for measurements, and for
//! tests that need no trained weights.
//!
//! Invariant: one seed and one shape give the same bytes.
//!
//! Invariant: −1, 0 and 1 are equally frequent, and the scales keep the magnitude of hidden states
//! through the layers.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use sterna_random::Random;

use super::architecture::{
    Architecture, BITNET, ExpertModules, LLAMA, MAPLE, QWEN3, QWEN3_5, QWEN3_MOE, RecurrentModules,
    ScaleDirection,
};
use super::source::Source;

/// The number of values that are written at once.
const CHUNK: usize = 1 << 16;

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// The name on the command line.
    pub name: &'static str,
    /// The model family.
    pub architecture: &'static Architecture,
    /// The number of token ids.
    pub vocab: usize,
    /// The number of values in a hidden state.
    pub hidden: usize,
    /// The number of values between gate and down in the feed-forward half.
    pub intermediate: usize,
    /// The number of layers.
    pub layers: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key-value heads.
    pub kv_heads: usize,
    /// The number of values in a head.
    pub head_dim: usize,
    /// The number of positions.
    pub max_position: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output head is the embedding.
    pub tied: bool,
    /// The number of weights of a scale, if a matrix has several. Then the embedding and the output
    /// head are ternary too, all weights are stored as floats, and YaRN extends the context.
    pub group: Option<usize>,
    /// The recurrent layers, if there are any.
    pub recurrent: Option<RecurrentHeads>,
    /// The mixtures, if all feed-forward halves are such.
    pub experts: Option<ExpertSizes>,
}

/// The sizes of a model's mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSizes {
    /// The experts of a layer.
    pub count: usize,
    /// The experts that a token uses.
    pub used: usize,
    /// The number of values between gate and down of an expert.
    pub intermediate: usize,
}

/// The sizes of a model's recurrent layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentHeads {
    /// Each layer of this number attends; the others are recurrent.
    pub interval: usize,
    /// The number of heads of queries and keys.
    pub key_heads: usize,
    /// The number of heads of values.
    pub value_heads: usize,
    /// The number of values in each of these heads.
    pub head_dim: usize,
    /// The number of tokens that the convolution sees.
    pub taps: usize,
}

impl RecurrentHeads {
    fn is_recurrent(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.interval)
    }
}

/// The shapes that `sterna synthesize` knows by name.
pub const SHAPES: [Shape; 11] = [
    Shape {
        name: "2b-4t",
        architecture: &BITNET,
        vocab: 128_256,
        hidden: 2560,
        intermediate: 6912,
        layers: 30,
        heads: 20,
        kv_heads: 5,
        head_dim: 128,
        max_position: 4096,
        rope_theta: 500_000.0,
        tied: true,
        group: None,
        recurrent: None,
        experts: None,
    },
    Shape {
        name: "falcon3-1b",
        architecture: &LLAMA,
        vocab: 131_072,
        hidden: 2048,
        intermediate: 8192,
        layers: 18,
        heads: 8,
        kv_heads: 4,
        head_dim: 256,
        max_position: 4096,
        rope_theta: 1_000_042.0,
        tied: false,
        group: None,
        recurrent: None,
        experts: None,
    },
    BONSAI,
    Shape {
        name: "bonsai-8b",
        hidden: 4096,
        intermediate: 12_288,
        layers: 36,
        heads: 32,
        tied: false,
        ..BONSAI
    },
    BONSAI_2,
    Shape {
        name: "bonsai-2-4b",
        hidden: 2560,
        intermediate: 9216,
        layers: 32,
        heads: 16,
        kv_heads: 4,
        recurrent: LARGE_HEADS,
        ..BONSAI_2
    },
    Shape {
        name: "bonsai-2-9b",
        hidden: 4096,
        intermediate: 12_288,
        layers: 32,
        heads: 16,
        kv_heads: 4,
        tied: false,
        recurrent: LARGE_HEADS,
        ..BONSAI_2
    },
    Shape {
        name: "tiny",
        architecture: &BITNET,
        vocab: 4096,
        hidden: 256,
        intermediate: 640,
        layers: 4,
        heads: 8,
        kv_heads: 2,
        head_dim: 32,
        max_position: 2048,
        rope_theta: 10_000.0,
        tied: true,
        group: None,
        recurrent: None,
        experts: None,
    },
    Shape {
        name: "qwen3-moe-tiny",
        architecture: &QWEN3_MOE,
        vocab: 4096,
        hidden: 256,
        intermediate: 640,
        layers: 4,
        heads: 8,
        kv_heads: 2,
        head_dim: 32,
        max_position: 2048,
        rope_theta: 10_000.0,
        tied: true,
        group: Some(64),
        recurrent: None,
        experts: Some(ExpertSizes {
            count: 32,
            used: 4,
            intermediate: 128,
        }),
    },
    MAPLE_PREVIEW,
    Shape {
        name: "maple-tiny",
        vocab: 4096,
        hidden: 512,
        layers: 4,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        max_position: 4096,
        experts: Some(ExpertSizes {
            count: 32,
            used: 4,
            intermediate: 256,
        }),
        ..MAPLE_PREVIEW
    },
];

/// The shape of maple-preview. Its weights take 40 GB as floats.
const MAPLE_PREVIEW: Shape = Shape {
    name: "maple",
    architecture: &MAPLE,
    vocab: 151_936,
    hidden: 2048,
    intermediate: 4096,
    layers: 24,
    heads: 16,
    kv_heads: 4,
    head_dim: 128,
    max_position: 131_072,
    rope_theta: 10_000.0,
    tied: false,
    group: Some(256),
    recurrent: None,
    experts: Some(ExpertSizes {
        count: 256,
        used: 8,
        intermediate: 512,
    }),
};

/// How many tokens the local layers of Maple attend to, and which layers attend to all.
const MAPLE_WINDOW: usize = 512;
const MAPLE_INTERVAL: usize = 4;

/// The smallest shape of the Bonsai family.
const BONSAI: Shape = Shape {
    name: "bonsai-1.7b",
    architecture: &QWEN3,
    vocab: 151_936,
    hidden: 2048,
    intermediate: 6144,
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    max_position: 32_768,
    rope_theta: 1_000_000.0,
    tied: true,
    group: Some(64),
    recurrent: None,
    experts: None,
};

/// The smallest shape of the Bonsai 2 family.
const BONSAI_2: Shape = Shape {
    name: "bonsai-2-2b",
    architecture: &QWEN3_5,
    vocab: 248_320,
    hidden: 2048,
    intermediate: 6144,
    layers: 24,
    heads: 8,
    kv_heads: 2,
    head_dim: 256,
    max_position: 262_144,
    rope_theta: 10_000_000.0,
    tied: true,
    group: Some(128),
    recurrent: Some(RecurrentHeads {
        interval: 4,
        key_heads: 16,
        value_heads: 16,
        head_dim: 128,
        taps: 4,
    }),
    experts: None,
};

/// The recurrent layers of the larger shapes of that family.
const LARGE_HEADS: Option<RecurrentHeads> = Some(RecurrentHeads {
    interval: 4,
    key_heads: 16,
    value_heads: 32,
    head_dim: 128,
    taps: 4,
});

/// The part of a head that models with recurrent layers rotate.
const ROTATED_PART: f64 = 0.25;

/// The factor by which YaRN extends the context of a shape with groups.
const YARN_FACTOR: usize = 4;

impl Shape {
    /// Returns the shape of this name.
    pub fn named(name: &str) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// Returns a checkpoint of this shape in memory. It has no tokenizer; its stop token is 0.
    pub fn in_memory(&self, seed: u64) -> Source {
        let mut config = self.config();
        config["eos_token_id"] = 0.into();
        let mut tensors = Vec::new();
        self.write_tensors(seed, &mut tensors)
            .expect("writing to memory cannot fail");
        Source::in_memory([
            ("config.json".to_owned(), config.to_string().into_bytes()),
            ("model.safetensors".to_owned(), tensors),
        ])
    }

    /// Returns `config.json`, without the tokens that begin and end a text.
    pub fn config(&self) -> Value {
        let mut config = json!({
            "architectures": [self.architecture.class],
            "model_type": self.architecture.model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.architecture.activation,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
            "attention_bias": false,
            "mlp_bias": false,
            "torch_dtype": "bfloat16",
        });
        if let Some(recurrent) = &self.recurrent {
            let kind = |layer| {
                if recurrent.is_recurrent(layer) {
                    "linear_attention"
                } else {
                    "full_attention"
                }
            };
            config["layer_types"] = (0..self.layers).map(kind).collect();
            config["linear_num_key_heads"] = recurrent.key_heads.into();
            config["linear_num_value_heads"] = recurrent.value_heads.into();
            config["linear_key_head_dim"] = recurrent.head_dim.into();
            config["linear_value_head_dim"] = recurrent.head_dim.into();
            config["linear_conv_kernel_dim"] = recurrent.taps.into();
            config["rms_norm_eps"] = 1e-6.into();
            config["rope_parameters"] = json!({
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": ROTATED_PART,
            });
        } else if *self.architecture == MAPLE {
            self.add_windows(&mut config);
        } else if self.group.is_some() {
            config["rope_scaling"] = json!({
                "rope_type": "yarn",
                "factor": YARN_FACTOR,
                "original_max_position_embeddings": self.max_position / YARN_FACTOR,
            });
        }
        if let Some(experts) = self.experts {
            config["num_experts"] = experts.count.into();
            config["num_local_experts"] = experts.count.into();
            config["num_experts_per_tok"] = experts.used.into();
            config["moe_intermediate_size"] = experts.intermediate.into();
            config["norm_topk_prob"] = true.into();
        }
        if self.group.is_none() {
            config["quantization_config"] = json!({
                "quant_method": "bitnet",
                "linear_class": self.architecture.scale.linear_class(),
                "quantization_mode": "offline",
                "modules_to_not_convert": ["lm_head"],
            });
        }
        config
    }

    /// Adds which layers of Maple attend to near tokens.
    fn add_windows(&self, config: &mut Value) {
        let is_full = |layer: usize| (layer + 1).is_multiple_of(MAPLE_INTERVAL);
        let kind = |layer| match is_full(layer) {
            true => "full_attention",
            false => "sliding_attention",
        };
        config["layer_types"] = (0..self.layers).map(kind).collect();
        config["sliding_window"] = MAPLE_WINDOW.into();
        config["partial_rotary_factor"] = 0.5.into();
        config["nope_on_global_attention"] = true.into();
        config["rms_norm_eps"] = 1e-6.into();
    }

    /// Writes `model.safetensors`.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_tensors(&self, seed: u64, mut out: impl Write) -> io::Result<()> {
        let tensors = self.tensors();
        let mut header = Map::new();
        let mut offset = 0;
        for tensor in &tensors {
            let (dtype, bytes) = tensor.content.dtype();
            let end = offset + tensor.values() * bytes;
            let entry = json!({
                "dtype": dtype,
                "shape": tensor.shape,
                "data_offsets": [offset, end],
            });
            header.insert(tensor.name.clone(), entry);
            offset = end;
        }
        let mut header = Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut random = Random::new(seed);
        for tensor in &tensors {
            tensor.write(&mut random, &mut out)?;
        }
        out.flush()
    }

    /// Lists all tensors. Tensors of two bytes per value come last, so that all are aligned.
    fn tensors(&self) -> Vec<RandomTensor> {
        let mut tensors = Vec::new();
        let mut push = |name: &str, shape: &[usize], content| {
            tensors.push(RandomTensor {
                name: name.to_owned(),
                shape: shape.to_vec(),
                content,
            });
        };
        let norm = Content::Norm {
            offset: self.architecture.norm_offset,
        };
        push("model.norm.weight", &[self.hidden], norm);
        for layer in 0..self.layers {
            self.push_layer(layer, &mut push);
        }
        let shape = [self.vocab, self.hidden];
        let content = match self.group {
            Some(group) => Content::Groups {
                group,
                scale: EMBEDDING_RANGE / 2.0,
            },
            None => Content::Floats {
                range: EMBEDDING_RANGE,
            },
        };
        push("model.embed_tokens.weight", &shape, content);
        if !self.tied {
            push("lm_head.weight", &shape, content);
        }
        tensors
    }

    /// Lists the tensors of a layer.
    fn push_layer(&self, layer: usize, push: &mut impl FnMut(&str, &[usize], Content)) {
        let modules = &self.architecture.layer;
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let norm = Content::Norm {
            offset: self.architecture.norm_offset,
        };
        let recurrent = self.recurrent.filter(|heads| heads.is_recurrent(layer));
        let recurrent = recurrent.zip(modules.recurrent);
        let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
        let attends = |_: &&str| recurrent.is_none();
        let norms = [
            (Some(modules.attention_norm), self.hidden),
            (Some(modules.feed_forward_norm), self.hidden),
            (modules.attention_sub_norm.filter(attends), q),
            (modules.feed_forward_sub_norm, self.intermediate),
            (modules.query_norm.filter(attends), self.head_dim),
            (modules.key_norm.filter(attends), self.head_dim),
        ];
        for (module, width) in norms {
            if let Some(module) = module {
                push(&name(module), &[width], norm);
            }
        }
        let parts = 1 + usize::from(self.architecture.has_attention_gate);
        let linears = match recurrent {
            Some((heads, modules)) => self.push_recurrent(layer, heads, modules, push),
            None => vec![
                (modules.query, parts * q, self.hidden),
                (modules.key, kv, self.hidden),
                (modules.value, kv, self.hidden),
                (modules.attention_output, self.hidden, q),
            ],
        };
        let mut linears: Vec<_> = linears
            .into_iter()
            .map(|(module, rows, columns)| (module.to_owned(), rows, columns))
            .collect();
        match self.experts.zip(modules.experts) {
            Some((sizes, modules)) => linears.extend(self.push_router(layer, sizes, modules, push)),
            None => linears.extend([
                (modules.gate.to_owned(), self.intermediate, self.hidden),
                (modules.up.to_owned(), self.intermediate, self.hidden),
                (modules.down.to_owned(), self.hidden, self.intermediate),
            ]),
        }
        for (module, rows, columns) in linears {
            let module = module.as_str();
            if self.architecture.has_bias(module) {
                let bias = format!("model.layers.{layer}.{module}.bias");
                push(&bias, &[rows], Content::Norm { offset: 1.0 }); // About 0.
            }
            if let Some(group) = self.group {
                let scale = self.stored_scale(columns);
                let content = Content::Groups { group, scale };
                push(&name(module), &[rows, columns], content);
                continue;
            }
            let scale = Content::Scale(self.stored_scale(columns));
            push(&(name(module) + "_scale"), &[1], scale);
            push(&name(module), &[rows / 4, columns], Content::Codes);
        }
    }

    /// Lists the router of a mixture. Returns the ternary linears of its experts: the module, its
    /// rows, its columns.
    fn push_router(
        &self,
        layer: usize,
        sizes: ExpertSizes,
        modules: ExpertModules,
        push: &mut impl FnMut(&str, &[usize], Content),
    ) -> Vec<(String, usize, usize)> {
        let (hidden, width) = (self.hidden, sizes.intermediate);
        let router = format!("model.layers.{layer}.{}.weight", modules.router);
        // Near 0, as the differences of norms to 1.
        push(
            &router,
            &[sizes.count, hidden],
            Content::Norm { offset: 1.0 },
        );
        let of_expert = |expert: usize| {
            let name = move |module: &str| format!("{}.{expert}.{module}", modules.experts);
            [
                (name(modules.gate), width, hidden),
                (name(modules.up), width, hidden),
                (name(modules.down), hidden, width),
            ]
        };
        (0..sizes.count).flat_map(of_expert).collect()
    }

    /// Lists the tensors of a recurrent layer in place of those of attention. Returns its ternary
    /// linears: the module, its rows, its columns.
    fn push_recurrent(
        &self,
        layer: usize,
        heads: RecurrentHeads,
        modules: RecurrentModules,
        push: &mut impl FnMut(&str, &[usize], Content),
    ) -> Vec<(&'static str, usize, usize)> {
        let (dim, count) = (heads.head_dim, heads.value_heads);
        let channels = (2 * heads.key_heads + count) * dim;
        let plain = |module: &str| format!("model.layers.{layer}.{module}");
        let name = |module: &str| format!("model.layers.{layer}.{module}.weight");
        push(&plain(modules.decay), &[count], Content::Rates);
        push(&plain(modules.step_bias), &[count], Content::Steps);
        push(&name(modules.norm), &[dim], Content::Norm { offset: 0.0 });
        let range = EMBEDDING_RANGE;
        for module in [modules.strength, modules.step] {
            let shape = [count, self.hidden];
            push(&name(module), &shape, Content::Floats { range });
        }
        let taps = Content::Floats { range: 0.7 };
        push(&name(modules.convolution), &[channels, 1, heads.taps], taps);
        vec![
            (modules.qkv, channels, self.hidden),
            (modules.gate, count * dim, self.hidden),
            (modules.output, self.hidden, count * dim),
        ]
    }

    /// Returns the stored scale of a ternary linear.
    fn stored_scale(&self, columns: usize) -> f32 {
        // Two thirds of the weights are not zero, so with this scale products have the magnitude of
        // their inputs.
        let scale = 1.0 / (columns as f32 * 2.0 / 3.0).sqrt();
        match self.architecture.scale {
            ScaleDirection::Multiply => scale,
            ScaleDirection::Divide => 1.0 / scale,
        }
    }
}

/// The greatest magnitude of an embedding's values.
const EMBEDDING_RANGE: f32 = 0.04;

/// What a tensor is filled with.
#[derive(Clone, Copy)]
enum Content {
    /// F32 near 1, less the offset.
    Norm { offset: f32 },
    /// F32, this value.
    Scale(f32),
    /// U8, four codes of 0, 1 or 2 each.
    Codes,
    /// BF16, uniform around 0.
    Floats { range: f32 },
    /// F32, the logarithms of rates of decay.
    Rates,
    /// F32, steps before their softplus.
    Steps,
    /// BF16 of 0 and of one magnitude for each group of neighbours, about `scale`.
    Groups { group: usize, scale: f32 },
}

/// A tensor of random values.
struct RandomTensor {
    name: String,
    shape: Vec<usize>,
    content: Content,
}

impl Content {
    /// Returns the name of the type of the values, and its bytes.
    fn dtype(&self) -> (&'static str, usize) {
        match self {
            Content::Norm { .. } | Content::Scale(_) | Content::Rates | Content::Steps => {
                ("F32", 4)
            }
            Content::Codes => ("U8", 1),
            Content::Floats { .. } | Content::Groups { .. } => ("BF16", 2),
        }
    }
}

impl RandomTensor {
    fn values(&self) -> usize {
        self.shape.iter().product()
    }

    fn write(&self, random: &mut Random, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(2 * CHUNK);
        let mut left = self.values();
        while left > 0 {
            let count = left.min(CHUNK);
            bytes.clear();
            match self.content {
                Content::Scale(scale) => bytes.extend_from_slice(&scale.to_le_bytes()),
                Content::Norm { offset } => {
                    let mut value = || 0.9 + 0.2 * random.fraction_f32() - offset;
                    bytes.extend((0..count).flat_map(|_| value().to_le_bytes()));
                }
                Content::Rates => {
                    let mut value = || (1.0 + 15.0 * random.fraction_f32()).ln();
                    bytes.extend((0..count).flat_map(|_| value().to_le_bytes()));
                }
                Content::Steps => {
                    let mut value = || -6.0 + 4.0 * random.fraction_f32();
                    bytes.extend((0..count).flat_map(|_| value().to_le_bytes()));
                }
                Content::Codes => push_codes(random, count, &mut bytes),
                Content::Floats { range } => push_bf16(random, count, range, &mut bytes),
                Content::Groups { group, scale } => {
                    push_groups(random, count / group, group, scale, &mut bytes);
                }
            }
            out.write_all(&bytes)?;
            left -= count;
        }
        Ok(())
    }
}

/// Appends `count` bytes of four random codes of 0, 1 or 2.
fn push_codes(random: &mut Random, count: usize, bytes: &mut Vec<u8>) {
    // A random byte picks one of the 81 possible bytes. The frequencies of the codes differ by
    // about a percent.
    const PICKED: [u8; 256] = {
        let mut picked = [0; 256];
        let mut i = 0;
        while i < 256 {
            let n = i * 81 / 256;
            let trits = [n % 3, n / 3 % 3, n / 9 % 3, n / 27];
            picked[i] = (trits[0] + 4 * trits[1] + 16 * trits[2] + 64 * trits[3]) as u8;
            i += 1;
        }
        picked
    };
    let end = bytes.len() + count;
    while bytes.len() < end {
        let random = random.next_u64().to_le_bytes();
        bytes.extend(random.map(|byte| PICKED[usize::from(byte)]));
    }
    bytes.truncate(end);
}

/// Appends `count` groups of bf16 values that are ternary. Their magnitudes are within a tenth of
/// `scale`.
fn push_groups(random: &mut Random, count: usize, group: usize, scale: f32, bytes: &mut Vec<u8>) {
    let mut codes = Vec::with_capacity(group.div_ceil(4));
    for _ in 0..count {
        let magnitude = upper_half(scale * (0.9 + 0.2 * random.fraction_f32()));
        // The sign is the upper bit.
        let values = [magnitude | 0x8000, 0, magnitude].map(u16::to_le_bytes);
        codes.clear();
        push_codes(random, group.div_ceil(4), &mut codes);
        let code = |at: usize| usize::from(codes[at / 4] >> (2 * (at % 4)) & 3);
        bytes.extend((0..group).flat_map(|at| values[code(at)]));
    }
}

/// Returns the bf16 that truncating a value gives.
fn upper_half(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Appends `count` bf16 values, uniform in ± `range`.
fn push_bf16(random: &mut Random, count: usize, range: f32, bytes: &mut Vec<u8>) {
    let end = bytes.len() + 2 * count;
    while bytes.len() < end {
        for bits in random.next_u64().to_le_bytes().as_chunks::<2>().0 {
            let value = f32::from(i16::from_le_bytes(*bits)) * (range / 32_768.0);
            bytes.extend_from_slice(&upper_half(value).to_le_bytes());
        }
    }
    bytes.truncate(end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_files() {
        let write = |seed| {
            let mut bytes = Vec::new();
            let shape = Shape::named("tiny").unwrap();
            shape.write_tensors(seed, &mut bytes).unwrap();
            bytes
        };
        assert!(write(1) == write(1));
        assert!(write(1) != write(2));
    }

    #[test]
    fn each_group_has_one_magnitude_which_half_precision_holds() {
        let mut bytes = Vec::new();
        push_groups(&mut Random::new(4), 100, 64, 0.03, &mut bytes);
        let pairs = bytes.as_chunks::<2>().0.iter();
        let values: Vec<f32> = pairs
            .map(|bits| f32::from_bits(u32::from(u16::from_le_bytes(*bits)) << 16))
            .collect();
        assert_eq!(values.len(), 6400);
        for group in values.chunks(64) {
            let magnitude = group.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
            assert!((0.026..0.034).contains(&magnitude), "{magnitude}");
            assert_eq!(half::f16::from_f32(magnitude).to_f32(), magnitude);
            assert!(group.iter().all(|v| *v == 0.0 || v.abs() == magnitude));
            assert!(
                [-1.0, 0.0, 1.0]
                    .iter()
                    .all(|sign| group.contains(&(sign * magnitude)))
            );
        }
    }

    #[test]
    fn every_code_is_valid_and_the_codes_are_equally_frequent() {
        let mut bytes = Vec::new();
        push_codes(&mut Random::new(3), 30_001, &mut bytes);
        let mut counts = [0; 4];
        for byte in &bytes {
            (0..4).for_each(|i| counts[usize::from(byte >> (2 * i) & 3)] += 1);
        }
        assert_eq!((bytes.len(), counts[3]), (30_001, 0));
        let is_fair = |&count: &i32| (38_000..42_000).contains(&count);
        assert!(counts[..3].iter().all(is_fair), "{counts:?}");
    }
}
