//! Checkpoints with random ternary weights, of the shapes of real models: for measuring, and for tests
//! that need no trained weights.
//!
//! Always true: one seed and shape give the same bytes; weights are −1, 0 and 1 in equal shares, and
//! scales such that hidden states keep their size through the layers.

use std::io::{self, Write};

use serde_json::{Map, Value, json};

use super::config::Architecture;

/// Embedding values written at once.
const CHUNK: usize = 1 << 16;

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// As the command line calls it.
    pub name: &'static str,
    /// The family; decides activation, sub-norms, scale direction.
    pub architecture: Architecture,
    /// Token ids.
    pub vocab: usize,
    /// Values of a hidden state.
    pub hidden: usize,
    /// Values between the halves of a feed-forward part.
    pub intermediate: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Positions.
    pub max_position: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// The output head is the embedding.
    pub tied: bool,
}

/// The shapes that can be asked for by name.
pub const SHAPES: [Shape; 3] = [
    Shape {
        name: "2b-4t",
        architecture: Architecture::BitNet,
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
    },
    Shape {
        name: "falcon3-1b",
        architecture: Architecture::Llama,
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
    },
    Shape {
        name: "tiny",
        architecture: Architecture::BitNet,
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
    },
];

impl Shape {
    /// The shape of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Shape> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// `config.json`, without the tokens that begin and end a text.
    #[must_use]
    pub fn config(&self) -> Value {
        let (architecture, model_type, activation, linear_class) = match self.architecture {
            Architecture::BitNet => ("BitNetForCausalLM", "bitnet", "relu2", "autobitlinear"),
            Architecture::Llama => ("LlamaForCausalLM", "llama", "silu", "bitlinear"),
        };
        json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": activation,
            "max_position_embeddings": self.max_position,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": self.tied,
            "attention_bias": false,
            "mlp_bias": false,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "bitnet",
                "linear_class": linear_class,
                "quantization_mode": "offline",
                "modules_to_not_convert": ["lm_head"],
            },
        })
    }

    /// Writes `model.safetensors`.
    ///
    /// # Errors
    /// If `out` fails.
    pub fn write_tensors(&self, seed: u64, mut out: impl Write) -> io::Result<()> {
        let tensors = self.tensors();
        let mut header = Map::new();
        let mut at = 0;
        for tensor in &tensors {
            let end = at + tensor.bytes();
            let entry =
                json!({"dtype": tensor.dtype(), "shape": tensor.shape, "data_offsets": [at, end]});
            header.insert(tensor.name.clone(), entry);
            at = end;
        }
        let mut header = Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        let mut random = Random(seed);
        tensors
            .iter()
            .try_for_each(|tensor| tensor.write(&mut random, &mut out))?;
        out.flush()
    }

    /// All tensors; those of two bytes a value come last, so that all are aligned.
    fn tensors(&self) -> Vec<Tensor> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors = vec![norm("model.norm".to_owned(), self.hidden)];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            tensors.push(norm(name("input_layernorm"), self.hidden));
            tensors.push(norm(name("post_attention_layernorm"), self.hidden));
            if self.architecture == Architecture::BitNet {
                tensors.push(norm(name("self_attn.attn_sub_norm"), q));
                tensors.push(norm(name("mlp.ffn_sub_norm"), self.intermediate));
            }
            let linears = [
                ("self_attn.q_proj", q, self.hidden),
                ("self_attn.k_proj", kv, self.hidden),
                ("self_attn.v_proj", kv, self.hidden),
                ("self_attn.o_proj", self.hidden, q),
                ("mlp.gate_proj", self.intermediate, self.hidden),
                ("mlp.up_proj", self.intermediate, self.hidden),
                ("mlp.down_proj", self.hidden, self.intermediate),
            ];
            for (part, rows, columns) in linears {
                // Two thirds of the weights are not zero, so this gives products the size of their inputs.
                let scale = 1.0 / (columns as f32 * 2.0 / 3.0).sqrt();
                let stored = if self.architecture == Architecture::BitNet {
                    scale
                } else {
                    1.0 / scale
                };
                let weight = name(part) + ".weight";
                tensors.push(Tensor {
                    name: format!("{weight}_scale"),
                    shape: vec![1],
                    content: Content::Scale(stored),
                });
                tensors.push(Tensor {
                    name: weight,
                    shape: vec![rows / 4, columns],
                    content: Content::Codes,
                });
            }
        }
        let embeddings: &[&str] = if self.tied {
            &["model.embed_tokens"]
        } else {
            &["model.embed_tokens", "lm_head"]
        };
        tensors.extend(embeddings.iter().map(|module| Tensor {
            name: format!("{module}.weight"),
            shape: vec![self.vocab, self.hidden],
            content: Content::Embedding,
        }));
        tensors
    }
}

/// What a tensor is filled with.
enum Content {
    /// F32 near 1.
    Norm,
    /// F32, this value.
    Scale(f32),
    /// U8, four codes of 0, 1 or 2 each.
    Codes,
    /// BF16 around 0.
    Embedding,
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
    content: Content,
}

fn norm(module: String, width: usize) -> Tensor {
    Tensor {
        name: module + ".weight",
        shape: vec![width],
        content: Content::Norm,
    }
}

impl Tensor {
    fn dtype(&self) -> &'static str {
        match self.content {
            Content::Norm | Content::Scale(_) => "F32",
            Content::Codes => "U8",
            Content::Embedding => "BF16",
        }
    }

    fn values(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> usize {
        self.values()
            * match self.content {
                Content::Norm | Content::Scale(_) => 4,
                Content::Codes => 1,
                Content::Embedding => 2,
            }
    }

    fn write(&self, random: &mut Random, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(2 * CHUNK);
        let mut left = self.values();
        while left > 0 {
            let now = left.min(CHUNK);
            bytes.clear();
            match self.content {
                Content::Scale(scale) => bytes.extend_from_slice(&scale.to_le_bytes()),
                Content::Norm => {
                    bytes.extend((0..now).flat_map(|_| (0.9 + 0.2 * random.unit()).to_le_bytes()))
                }
                Content::Codes => random.push_codes(now, &mut bytes),
                Content::Embedding => random.push_bf16(now, &mut bytes),
            }
            out.write_all(&bytes)?;
            left -= now;
        }
        Ok(())
    }
}

/// SplitMix64: a counter, scrambled.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    /// `count` bytes of four codes of 0, 1 or 2.
    fn push_codes(&mut self, count: usize, bytes: &mut Vec<u8>) {
        // All 81 bytes there are; a random byte picks one, so close to evenly that the shares differ by
        // a percent.
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
            bytes.extend(
                self.next()
                    .to_le_bytes()
                    .map(|byte| PICKED[usize::from(byte)]),
            );
        }
        bytes.truncate(end);
    }

    /// `count` bf16 numbers, uniform in ±0.04.
    fn push_bf16(&mut self, count: usize, bytes: &mut Vec<u8>) {
        let end = bytes.len() + 2 * count;
        while bytes.len() < end {
            for bits in self.next().to_le_bytes().as_chunks::<2>().0 {
                let value = f32::from(i16::from_le_bytes(*bits)) * (0.04 / 32_768.0);
                // The upper half of a float is the same number in bf16, cut off.
                bytes.extend_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
            }
        }
        bytes.truncate(end);
    }
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
    fn every_code_is_valid_and_about_as_frequent_as_the_others() {
        let mut bytes = Vec::new();
        Random(3).push_codes(30_001, &mut bytes);
        let mut counts = [0; 4];
        for byte in &bytes {
            (0..4).for_each(|i| counts[usize::from(byte >> (2 * i) & 3)] += 1);
        }
        assert_eq!((bytes.len(), counts[3]), (30_001, 0));
        assert!(
            counts[..3]
                .iter()
                .all(|&count| (38_000..42_000).contains(&count)),
            "{counts:?}"
        );
    }
}
