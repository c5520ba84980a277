#!/usr/bin/env python3
"""Makes the reference data that `tests/golden/` compares Sterna with.

    pip install torch transformers accelerate safetensors tokenizers jinja2
    python tests/make_fixtures.py tests/fixtures                          # the committed fixtures
    python tests/make_fixtures.py --demo src/demo tests/fixtures/demo     # the embedded demo model
    python tests/make_fixtures.py --random 6 --seed 7 DIR                 # further layouts, or
    python tests/make_fixtures.py --hybrids 6 --seed 7 DIR                # of Qwen 3.5, or
    python tests/make_fixtures.py --blocks src/demo tests/fixtures/demo   # how it fills blocks
    python tests/make_fixtures.py --grouped src/demo DIR                  # the demo in groups
    STERNA_FIXTURES=DIR cargo test --test golden -- --nocapture

For each layout this writes a small random checkpoint in Hugging Face form, loads it with
`transformers`, and stores beside it what the reference computes:

expected.json         prompts, greedy continuations and their margins, chats and texts with their
                      token ids, the reference's spread, versions, the weights' CRC-32
expected.safetensors  `prompt.P.logits` [rows, vocab]: row r is the prediction after the prompt
                      and r tokens of the continuation; `state.L` [tokens, hidden] before layer
                      L (and after the last), for the first tokens of the longest prompt

The reference computes in float32, whatever the checkpoint holds: bf16 and f16 tensors are widened,
which is exact, before anything is quantised or multiplied. Nothing in `transformers` is replaced.
The linears of checkpoints with a scale for each group of columns get inputs that are rounded to
int8 in the same groups, as in Sterna. `transformers` does not know low-rank corrections; a hook
adds U · (Vᵀ · x) to the output of each linear that has one. Only the `torch.compile` decorators of
the layers are switched off (TORCHDYNAMO_DISABLE=1).

Spread. int8 rounding of activations sometimes turns a last-bit difference into a whole step. So
logits are mildly chaotic, and no fixed tolerance fits. The reference therefore runs five ways:
whole and cached (prompt at once, then token by token), each with eager and sdpa attention, and once
with K and V rounded to f16, as Sterna stores them. `spread_worst` and `spread_mean` are the largest
and the mean absolute difference in log-probability between the last run and the other four.

Groups. A model with a scale for each group of columns was trained with float activations. So
`prompt.P.float` are the logits without any rounding of activations, and `float_distances` says how
far the reference is from them with activations in groups of 32, as in llama.cpp, and in the groups
of the weights: the mean absolute difference in log-probability. `--grouped` gives the trained demo
random scales within 10 % of its own for each group of 64, 128 and 256 columns.

Embeddings. A layout without an output head has no continuations. `prompt.P.embedding` and
`prompt.P.mean` are the embeddings of the prompt with last-token and mean pooling, of length 1, and
the spread is that of their values. `transformers` does not know BitNet-embedding; a hook does what
its linears do: they norm the input, round it to int8 with a scale for each token, and have weights
that are rounded by their mean magnitude.

Hybrids. Most layers of Qwen 3.5 are recurrent (Gated DeltaNet). All its matrices are ternary in
groups, except the small ones that compute decay and beta: `in_proj_a` and `in_proj_b` are floats,
and their inputs are not rounded. The state of a recurrent layer is float32 in every run. The whole
run computes it in chunks of 64 tokens, and the cached run token by token from the first one. The
script needs the code of `transformers` for both, so the packages `kernels`, `fla` and
`causal_conv1d` must be absent. The GGUF twins have the value heads in the order of llama.cpp;
`tests/gguf/write.py` describes it. A state keeps a difference for hundreds of tokens, but the five
runs share most of their sums, and so seldom differ before the state. The spread of hybrids
therefore has eight more runs, with disturbed last bits in the inputs of all linears. Its mean is
that of the run that differs most in each prompt: one flipped step of an early token can decide
the results of a whole prompt, and a mean of all runs would depend on how many of them flip it.

Layers. The stored states are those of the run with rounded K and V. The last bits of a value decide
to which of two int8 steps it is rounded. In models as small as these, that changes the whole output
of its token by more than any tight tolerance. So each layer runs 32 more times with disturbed last
bits in the inputs of its linears. If the reference does not reproduce the output of a token then,
the token is listed in `layer_unstable_tokens`. On all others the comparison can be strict.

Everything is seeded: the same versions of the packages on the same CPU write the same files.
"""

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import shutil
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import maple_reference
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CONTINUATION_TOKENS = 24
EMBEDDING_STD = 0.1
LOGITS_STD = 4.0
LAYER_TOKENS = 18  # Past one page of the cache.
LAYER_TOLERANCE = 1e-3  # Relative to the root mean square of a layer's output; as in tests/golden.
LAST_BITS = 2.0**-22  # The relative error of a float32 sum of hundreds in another order.
LOGITS_ROWS = 6  # Per prompt: after the prompt and after each of the first five tokens.
HYBRID = "qwen3_5_text"  # The architecture with recurrent layers, as `transformers` names it.
CONVOLUTION_TOKENS = 4  # of recurrent layers: a token and the three before it
DISTURBED_RUNS = 8  # of hybrids, for the spread
GATES = ("in_proj_a", "in_proj_b")  # The linears of recurrent layers that are never ternary.


# ---- What is made -------------------------------------------------------------------------------


@dataclass
class Recurrent:
    """The recurrent layers of a hybrid: their number, their heads and the type of their floats."""

    period: int  # Each layer whose number divides by it attends; the others are recurrent.
    key_heads: int
    # A multiple of the key heads. If GGUF has another order of heads, each head needs whole groups
    # of columns, because their scales move with them.
    value_heads: int
    head_dim: int
    gates: str  # dtype of the float gates, the convolution and the biases in the file
    rotary: float = 0.25  # the part of a query head that is rotated

    @property
    def keys(self):
        return self.key_heads * self.head_dim

    @property
    def values(self):
        return self.value_heads * self.head_dim


@dataclass
class Layout:
    """One checkpoint: its shape and the way it is written."""

    name: str
    seed: int
    architecture: str = "bitnet"  # or "llama", "qwen3", "gemma3_text", HYBRID
    # Columns that share a scale, in every matrix. The file has floats that are ternary already.
    group: int | None = None
    # A norm on the input of every linear of the layers, as in BitNet-embedding. The file has
    # masters.
    input_norms: bool = False
    head: bool = True  # False: no output head, and no prefix `model.` in the names
    recurrent: Recurrent | None = None  # the recurrent layers of a hybrid
    experts: tuple | None = None  # their number, those of a token, `norm_topk_prob`
    dense_layers: tuple = ()  # The layers whose feed-forward half is no mixture.
    window: int | None = None  # of the layers that attend to near tokens
    query_scalar: int | None = None  # of Gemma: attention multiplies by its inverse root
    rope_scaling: dict = field(default_factory=dict)
    lrc_rank: int | None = None  # of the low-rank correction of every linear of the layers
    gguf: str | None = None  # also write it as GGUF, in this layout of `tests/gguf/write.py`
    packed: bool = True  # packed U8 codes and a scale, or float masters quantised online
    linear_class: str | None = "autobitlinear"  # None: the key is absent, which means "bitlinear"
    dtype: str = "bfloat16"  # of every float tensor in the file
    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int | None = None  # written to config.json only when given
    vocab: int = 384
    tied: bool = True
    tie_key: bool = True  # False: leave `tie_word_embeddings` out; its default is False
    use_rms_norm: bool = False
    quantization_keys: dict = field(default_factory=dict)  # further keys of `quantization_config`
    config_style: str = "transformers5"  # `rope_parameters` and `dtype`, or "transformers4"
    rope_theta: float = 500000.0
    rms_norm_eps: float = 1e-5
    shards: int = 1
    tokenizer: str = "llama3"  # key of TOKENIZERS
    template: str = "bitnet"  # key of TEMPLATES
    template_inline: bool = True
    # False: config.json keeps the default of the class, which may be outside the vocabulary.
    own_stops: bool = True
    eos_list: bool = False  # generation_config's eos_token_id is a list
    prompt_lengths: tuple = (1, 7, 19, 33)

    def is_recurrent(self, layer):
        return self.recurrent is not None and (layer + 1) % self.recurrent.period != 0

    def is_float(self, module):
        """Returns whether a linear stays float. A given list replaces the default."""
        listed = self.quantization_keys.get("modules_to_not_convert")
        names = ["lm_head"] if listed is None else listed
        return any(module == name or module.startswith(name + ".") for name in names)


LAYOUTS = [
    Layout("bitnet-packed", 1, hidden=192, intermediate=340, heads=6, kv_heads=3, vocab=309),
    Layout(
        "bitnet-packed-long",
        2,
        hidden=128,
        intermediate=224,
        heads=4,
        kv_heads=1,
        layers=3,
        vocab=320,
        rms_norm_eps=1e-3,
        config_style="transformers4",
        template_inline=False,
        eos_list=True,
        prompt_lengths=(5, 16, 300),
    ),
    Layout(
        "bitnet-masters-bf16", 3, packed=False, intermediate=100, heads=2, kv_heads=2, vocab=319
    ),
    Layout(
        "bitnet-masters-f16",
        4,
        packed=False,
        dtype="float16",
        heads=1,
        kv_heads=1,
        tied=False,
        vocab=320,
        config_style="transformers4",
        template="llama3",
        rope_theta=10000.0,
    ),
    Layout(
        "bitnet-masters-f32",
        5,
        packed=False,
        dtype="float32",
        layers=1,
        intermediate=84,
        kv_heads=2,
        vocab=310,
        own_stops=False,
    ),
    Layout(
        "llama-packed",
        6,
        architecture="llama",
        linear_class=None,
        hidden=96,
        intermediate=276,
        heads=3,
        kv_heads=3,
        tied=False,
        vocab=337,
        config_style="transformers4",
        tokenizer="gpt2",
        template="falcon3",
        rope_theta=1000042.0,
        rms_norm_eps=1e-6,
        eos_list=True,
    ),
    Layout(
        "llama-packed-rms-norm",
        7,
        architecture="llama",
        linear_class="bitlinear",
        hidden=128,
        intermediate=200,
        heads=4,
        kv_heads=2,
        head_dim=64,
        tied=False,
        tie_key=False,
        use_rms_norm=True,
        dtype="float16",
        vocab=330,
        quantization_keys={"rms_norm_eps": 0.02, "modules_to_not_convert": ["lm_head"]},
        template="llama3",
        template_inline=False,
    ),
    Layout(
        "llama-sharded",
        8,
        architecture="llama",
        linear_class="autobitlinear",
        hidden=108,
        intermediate=332,
        heads=2,
        kv_heads=1,
        head_dim=32,
        shards=3,
        vocab=329,
        template="llama3",
        eos_list=True,
    ),
    Layout(
        "llama-masters-rms-norm",
        9,
        architecture="llama",
        packed=False,
        linear_class="autobitlinear",
        hidden=64,
        intermediate=84,
        heads=2,
        kv_heads=1,
        use_rms_norm=True,
        tied=False,
        vocab=460,
        tokenizer="sentencepiece",
        template="inst",
        config_style="transformers4",
        rope_theta=10000.0,
    ),
    Layout(
        "llama-float-modules",
        10,
        architecture="llama",
        intermediate=96,
        tied=False,
        vocab=300,
        tokenizer="gpt2",
        quantization_keys={
            "modules_to_not_convert": ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp"]
        },
        template="falcon3",
        template_inline=False,
    ),
    Layout(
        "qwen2-group64",
        23,
        architecture="qwen2",
        group=64,
        hidden=64,
        intermediate=64,
        layers=1,
        heads=4,
        kv_heads=2,
        vocab=324,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tokenizer="qwen",
        template="llama3",
        prompt_lengths=(1, 7, 19, 150),
    ),
    Layout(
        "qwen3-group64-yarn",
        11,
        architecture="qwen3",
        group=64,
        hidden=64,
        intermediate=128,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=322,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        template="llama3",
        prompt_lengths=(1, 7, 19, 150),
    ),
    Layout(
        "qwen3-group128-untied",
        12,
        architecture="qwen3",
        group=128,
        hidden=128,
        intermediate=128,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        vocab=310,
        tied=False,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        dtype="float16",
        template="llama3",
    ),
    Layout(
        "qwen3-moe-group64",
        24,
        architecture="qwen3_moe",
        experts=(6, 2, True),
        group=64,
        hidden=64,
        intermediate=64,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=323,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        template="llama3",
        prompt_lengths=(1, 7, 19, 150),
    ),
    # Weights that do not add up to 1, and a dense half after the mixture.
    Layout(
        "qwen3-moe-plain",
        26,
        architecture="qwen3_moe",
        experts=(5, 3, False),
        dense_layers=(1,),
        group=64,
        hidden=64,
        intermediate=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=318,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        template="llama3",
    ),
    Layout(
        "mixtral-group64",
        28,
        architecture="mixtral",
        experts=(4, 2, True),
        group=64,
        hidden=64,
        intermediate=64,
        layers=1,
        heads=2,
        kv_heads=1,
        vocab=316,
        tied=False,
        rope_theta=1000000.0,
        tokenizer="gpt2",
        template="falcon3",
    ),
    # The window ends inside a page, and the longest prompt is longer than window and span.
    Layout(
        "maple-row",
        25,
        architecture="maple",
        config_style="transformers4",
        experts=(6, 2, True),
        group=64,
        hidden=64,
        intermediate=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=317,
        tied=False,
        window=40,
        rms_norm_eps=1e-6,
        template="llama3",
        prompt_lengths=(1, 7, 39, 320),
    ),
    # Whole blocks of GGUF in every row. `tests/gguf/write.py` writes them as GGUF too.
    Layout(
        "llama-blocks",
        13,
        architecture="llama",
        linear_class=None,
        dtype="float16",
        intermediate=128,
        layers=1,
        head_dim=32,
        vocab=311,
        tied=False,
        template="llama3",
    ),
    Layout(
        "bitnet-low-rank",
        15,
        lrc_rank=6,
        hidden=128,
        intermediate=192,
        heads=4,
        kv_heads=1,
        vocab=313,
        prompt_lengths=(1, 7, 19, 40),
    ),
    Layout(
        "embedding-qwen3",
        16,
        architecture="qwen3",
        input_norms=True,
        head=False,
        hidden=128,
        intermediate=128,
        heads=2,
        kv_heads=1,
        head_dim=64,
        vocab=321,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tokenizer="qwen",
        template="llama3",
        own_stops=False,
        prompt_lengths=(1, 7, 19, 40, 300),
    ),
    Layout(
        "embedding-gemma3",
        17,
        architecture="gemma3_text",
        input_norms=True,
        head=False,
        hidden=64,
        intermediate=128,
        layers=6,  # The last one attends to all tokens.
        heads=2,
        kv_heads=1,
        head_dim=32,
        vocab=470,
        window=96,
        query_scalar=64,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        tokenizer="gemma",
        template="inst",
        own_stops=False,
        prompt_lengths=(1, 7, 19, 40, 96),
    ),
    Layout(
        "bitnet-blocks", 14, hidden=128, intermediate=128, layers=1, heads=4, kv_heads=2, vocab=312
    ),
    Layout(
        "qwen35-group64-tied",
        22,
        architecture=HYBRID,
        recurrent=Recurrent(period=2, key_heads=4, value_heads=4, head_dim=32, gates="bfloat16"),
        group=64,
        hidden=64,
        intermediate=128,
        layers=4,
        heads=2,
        kv_heads=1,
        head_dim=64,
        vocab=318,
        rope_theta=10000000.0,
        rms_norm_eps=1e-6,
        template="llama3",
        prompt_lengths=(1, 7, 19, 150),
    ),
    Layout(
        "qwen35-group128-untied",
        19,
        architecture=HYBRID,
        recurrent=Recurrent(period=3, key_heads=2, value_heads=4, head_dim=128, gates="float32"),
        group=128,
        hidden=128,
        intermediate=128,
        layers=3,
        heads=2,
        kv_heads=1,
        head_dim=64,
        vocab=308,
        tied=False,
        rope_theta=10000000.0,
        rms_norm_eps=1e-6,
        template="llama3",
        prompt_lengths=(1, 7, 19, 150),
    ),
]


def random_qwen3_layout(seed, rng):
    """Returns a random layout of Qwen 3: in groups, or with input norms."""
    input_norms = rng.random() < 0.25
    group = 128 if input_norms else rng.choice([64, 64, 128, 128, 256])
    # Wide layers have few tokens whose outputs the reference reproduces.
    head_dim, kv_heads, share = 1, 1, 1
    while head_dim * kv_heads * share not in (group, 256):  # A linear reads all heads.
        head_dim, kv_heads, share = rng.choice([32, 64, 128]), rng.choice([1, 2]), rng.randint(1, 8)
    heads = kv_heads * share
    yarn = {
        "rope_type": "yarn",
        "factor": rng.choice([2.0, 4.0]),
        "original_max_position_embeddings": rng.choice([128, 256]),
    }
    return Layout(
        f"random-{seed}",
        seed,
        architecture="qwen3",
        group=None if input_norms else group,
        input_norms=input_norms,
        head=not input_norms or rng.random() < 0.5,
        gguf=rng.choice(GGUF_LAYOUTS[None if input_norms else group]),
        dtype=rng.choice(["bfloat16", "float16", "float32"]),
        hidden=group * rng.choice([1, 2, 3] if group < 128 else [1]),
        intermediate=group * rng.choice([1, 2, 3] if group < 128 else [1]),
        layers=rng.choice([1, 2, 3]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=rng.randrange(300, 700),
        tied=input_norms or rng.random() < 0.5,
        rope_theta=rng.choice([10000.0, 1000000.0]),
        rope_scaling=rng.choice([{}, yarn]),
        rms_norm_eps=1e-6,
        tokenizer=rng.choice(["llama3", "qwen"]),
        template="llama3",
        template_inline=rng.random() < 0.5,
        own_stops=rng.random() < 0.7,
        prompt_lengths=(1, rng.randrange(2, 16), rng.randrange(17, 60), rng.randrange(250, 400)),
    )


def random_hybrid_layout(seed):
    """Returns a random layout of Qwen 3.5 that depends on `seed` alone."""
    rng = random.Random(seed)
    group = rng.choice([64, 128])
    key_heads, repeats, head_dim = 1, 1, 1
    # A linear reads whole groups. So does each value head whose place differs in GGUF.
    while (
        key_heads * repeats * head_dim % group
        or key_heads * repeats * head_dim > 512
        or (key_heads > 1 and repeats > 1 and head_dim % group)
    ):
        key_heads, repeats = rng.randint(1, 4), rng.randint(1, 3)
        head_dim = rng.choice([32, 64, 128])
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2])
    period = rng.choice([2, 3, 4])
    return Layout(
        f"random-{seed}",
        seed,
        architecture=HYBRID,
        recurrent=Recurrent(
            period,
            key_heads,
            key_heads * repeats,
            head_dim,
            gates=rng.choice(["bfloat16", "float32"]),
            rotary=rng.choice([0.25, 0.25, 0.5]),
        ),
        group=group,
        gguf=rng.choice(GGUF_LAYOUTS[group]),
        dtype=rng.choice(["bfloat16", "float16", "float32"]),
        hidden=group * rng.choice([1, 2] if group < 128 else [1]),
        intermediate=group * rng.choice([1, 2, 3] if group < 128 else [1, 2]),
        layers=rng.randint(period, 6),  # More layers leave few tokens whose margin is clear.
        heads=heads,
        kv_heads=kv_heads,
        head_dim=max(64, group // heads),
        vocab=rng.randrange(300, 700),
        tied=rng.random() < 0.5,
        rope_theta=rng.choice([10000.0, 10000000.0]),
        rms_norm_eps=1e-6,
        shards=rng.choice([1, 1, 2]),
        tokenizer=rng.choice(["llama3", "qwen"]),
        template="llama3",
        template_inline=rng.random() < 0.5,
        own_stops=rng.random() < 0.7,
        prompt_lengths=(1, rng.randrange(2, 16), rng.randrange(17, 60), rng.randrange(130, 300)),
    )


# The layouts of GGUF that hold groups of these columns, or one scale for a tensor.
GGUF_LAYOUTS = {
    64: ["q2_0"],
    128: ["q2_0_legacy", "pq2_0", "ptq1_0"],
    256: ["tq2_0", "tq1_0"],
    None: ["i2_s"],
}


def random_layout(seed):
    """Returns a random layout that depends on `seed` alone."""
    rng = random.Random(seed)
    architecture = rng.choice(["bitnet", "llama", "qwen3", "qwen3"])
    if architecture == "qwen3":
        return random_qwen3_layout(seed, rng)
    packed = rng.random() < 0.65
    head_dim = rng.choice([32, 32, 64, 64, 128])
    kv_heads = rng.choice([1, 1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3, 4])
    while heads * head_dim > 384:
        kv_heads, heads = 1, rng.choice([1, 2, 3])
    hidden = heads * head_dim
    own_head_dim = architecture == "llama" and rng.random() < 0.5
    if own_head_dim:  # heads * head_dim may differ from the hidden size.
        hidden = heads * rng.choice([20, 36, 44, 52, 100])
        hidden -= hidden % (4 * heads)
    linear_class = (
        "autobitlinear" if not packed else rng.choice([None, "bitlinear", "autobitlinear"])
    )
    tokenizer = rng.choice(["llama3", "gpt2", "sentencepiece"])
    return Layout(
        f"random-{seed}",
        seed,
        architecture=architecture,
        packed=packed,
        linear_class=linear_class,
        dtype=rng.choice(["bfloat16", "float16", "float32"]),
        hidden=hidden,
        intermediate=4 * rng.randrange(20, 180),
        layers=rng.choice([1, 2, 3, 4]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim if own_head_dim or rng.random() < 0.5 else None,
        vocab=rng.randrange(470, 900),
        tied=rng.random() < 0.5,
        use_rms_norm=rng.random() < 0.4,
        quantization_keys=rng.choice(
            [{}, {"modules_to_not_convert": None}, {"modules_to_not_convert": ["lm_head"]}]
        )
        | rng.choice([{}, {"rms_norm_eps": 1e-3}]),
        config_style=rng.choice(["transformers4", "transformers5"]),
        rope_theta=rng.choice([10000.0, 500000.0, 1000042.0]),
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        shards=rng.choice([1, 1, 2, 4]),
        tokenizer=tokenizer,
        template=(
            "inst"
            if tokenizer == "sentencepiece"
            else "falcon3" if tokenizer == "gpt2" else rng.choice(["bitnet", "llama3"])
        ),
        template_inline=rng.random() < 0.5,
        own_stops=rng.random() < 0.7,
        eos_list=rng.random() < 0.5,
        prompt_lengths=(1, rng.randrange(2, 16), rng.randrange(17, 60), rng.randrange(250, 400)),
    )


# ---- Tokenisers and chat templates --------------------------------------------------------------

CORPUS = [
    "Sterna serves ternary language models to many users at once on an ordinary processor.",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "What is the capital of Spain? The capital of Spain is Madrid.",
    "Hello! How are you today? I am well, thank you. And you?",
    "One two three four five six seven eight nine ten, 1 2 3 10 100 2024.",
    "def main():\n    return [x * 2 for x in range(10)]\n",
    "Weights are minus one, zero or plus one; activations are eight bits wide.",
    "Les élèves étaient très contents. Grüße aus Köln! 你好，世界。 Привет, мир!",
]

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def train(tokenizer, trainer):
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama3_tokenizer(vocab):
    """Byte-level BPE, as in Llama 3 and BitNet 2B-4T. The post-processor adds the first token."""
    special = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", begin)],
            ),
        ]
    )
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def gpt2_tokenizer(vocab):
    """Byte-level BPE, as in Falcon 3.

    Punctuation and digits are split off, there is no first token, and role markers are special.
    """
    special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}


def qwen_tokenizer(vocab):
    """Byte-level BPE, as in Qwen 3 embedding models. The post-processor adds the last token."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="$A <|endoftext|>",
                pair="$A <|endoftext|> $B:1 <|endoftext|>:1",
                special_tokens=[("<|endoftext|>", end)],
            ),
        ]
    )
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def sentencepiece_tokenizer(vocab):
    """BPE over characters, as in Llama 2: spaces become `▁`, unknown characters become bytes."""
    special = ["<unk>", "<s>", "</s>"]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=special + octets,
            show_progress=False,
        ),
    )
    # In a real checkpoint the byte tokens are ordinary tokens, not special ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in special
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A",
        pair="<s> $A <s>:1 $B:1",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>"))],
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def gemma_tokenizer(vocab):
    """BPE over characters, as in Gemma: spaces become `▁`. Texts have a first and a last token."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    train(
        tokenizer,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=special + octets, show_progress=False
        ),
    )
    # In a real checkpoint the byte tokens are ordinary tokens, not special ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in special
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <eos> <bos>:1 $B:1 <eos>:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<bos>", "<eos>")],
    )
    return tokenizer, {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }


TOKENIZERS = {
    "gemma": gemma_tokenizer,
    "llama3": llama3_tokenizer,
    "gpt2": gpt2_tokenizer,
    "qwen": qwen_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}

TEMPLATES = {
    "bitnet": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
        " message['role'] | capitalize + ': '+ message['content'] | trim + '<|eot_id|>' %}{% if"
        " loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{%"
        " endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{"
        " '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content.strip()"
        " + '<|eot_id|>' }}{% endfor %}\n{%- if add_generation_prompt %}\n    {{-"
        " '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}"
    ),
    "falcon3": (
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ '<|system|>\n' + message['content'] + '\n' }}"
        "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
        "{% elif message['role'] == 'assistant' %}{% if not loop.last %}"
        "{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
        "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "inst": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set"
        " system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{%"
        " set system_message = false %}{% endif %}{% for message in loop_messages %}{% if"
        " (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation"
        " roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if loop.index0"
        " == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message +"
        " '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content']"
        " %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip()"
        " + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' +"
        " eos_token }}{% endif %}{% endfor %}"
    ),
}

TEXTS = [
    "The capital of France is",
    "Hello, my name is",
    " leading and trailing spaces  ",
    "one\ntwo\n\n\nthree\r\n\tfour",
    "I'll say it's 12345678 o'clock, DON'T you?",
    "naïve café Grüße 你好，世界 Привет 👩‍👩‍👧 🇫🇷 e\u0301 \u00a0\u200b",
    "x = {'a': [1, 2.5e-3]}  # comment",
    "",
]


def chat(*turns):
    roles = ["user", "assistant"]
    start = 0
    messages = []
    if turns[0].startswith("system="):
        messages.append({"role": "system", "content": turns[0].removeprefix("system=")})
        start = 1
    for index, content in enumerate(turns[start:]):
        messages.append({"role": roles[index % 2], "content": content})
    return messages


CHATS = [
    chat("Hello!"),
    chat("system=You are a helpful assistant.", "What is the capital of France?"),
    chat("What is two plus two?", "Four.", "And three more?"),
    chat(
        "system=  Be brief. \n",
        "  leading and trailing  \n\n",
        "Yes.\nNo.",
        "\tone\n\n two  three\r\n",
    ),
    chat("Grüße aus Köln! 你好，世界。 Привет 👩‍👩‍👧 🇫🇷 e\u0301"),
    chat("x = {'a': \"b\"} {{ messages }} {% if true %} <b>&amp;</b> \\n 'quoted' | [INST]"),
    chat("12345678 + 9 = ?", " 12345687", "It's right, isn't it? "),
    chat("!"),
]


# ---- Writing a checkpoint -----------------------------------------------------------------------


def write_config(layout, tokenizer, directory):
    """Writes config.json as the layout's version of `transformers` does."""
    architectures = {"bitnet": "BitNet", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    architectures["gemma3_text"] = "Gemma3" if layout.head else "Gemma3Text"
    architectures |= {HYBRID: "Qwen3_5", "qwen3_moe": "Qwen3Moe", "maple": "Maple"}
    architectures["mixtral"] = "Mixtral"
    kind = "ForCausalLM" if layout.head else "Model"
    quantization = {"quant_method": "bitnet"}
    if layout.linear_class is not None:
        quantization["linear_class"] = layout.linear_class
        quantization["quantization_mode"] = "offline" if layout.packed else "online"
    if layout.use_rms_norm:
        quantization["use_rms_norm"] = True
    config = {
        "architectures": [architectures[layout.architecture] + kind],
        "hidden_act": "relu2" if layout.architecture == "bitnet" else "silu",
        "hidden_size": layout.hidden,
        "intermediate_size": layout.intermediate,
        "max_position_embeddings": 512,
        "num_attention_heads": layout.heads,
        "num_key_value_heads": layout.kv_heads,
        "num_hidden_layers": layout.layers,
        "rms_norm_eps": layout.rms_norm_eps,
        "vocab_size": layout.vocab,
        "quantization_config": quantization | layout.quantization_keys,
    }
    if layout.group is not None or layout.input_norms:
        del config["quantization_config"]
    if layout.architecture == "gemma3_text":
        config["hidden_activation"] = "gelu_pytorch_tanh"
        del config["hidden_act"]
        config["sliding_window"] = layout.window
        config["query_pre_attn_scalar"] = layout.query_scalar
    if layout.experts is not None:
        count, used, normalizes = layout.experts
        config["num_experts_per_tok"] = used
        if layout.architecture == "mixtral":
            config["num_local_experts"] = count
        else:
            config |= {
                "num_experts": count,
                "moe_intermediate_size": layout.intermediate,
                "norm_topk_prob": normalizes,
            }
        if layout.dense_layers:
            config["mlp_only_layers"] = list(layout.dense_layers)
    if layout.architecture == "maple":
        config |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": layout.window,
            "partial_rotary_factor": 0.5,
            "nope_on_global_attention": True,
        }
    if layout.recurrent is not None:
        config |= {
            "layer_types": [
                "linear_attention" if layout.is_recurrent(layer) else "full_attention"
                for layer in range(layout.layers)
            ],
            "linear_conv_kernel_dim": CONVOLUTION_TOKENS,
            "linear_num_key_heads": layout.recurrent.key_heads,
            "linear_num_value_heads": layout.recurrent.value_heads,
            "linear_key_head_dim": layout.recurrent.head_dim,
            "linear_value_head_dim": layout.recurrent.head_dim,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
        }
    if layout.head_dim is not None:
        config["head_dim"] = layout.head_dim
    if layout.own_stops:
        config |= {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": first_eos(layout, tokenizer),
        }
    if layout.tied or layout.tie_key:
        config["tie_word_embeddings"] = layout.tied
    if layout.config_style == "transformers5":
        rope = {"rope_theta": layout.rope_theta, "rope_type": "default"} | layout.rope_scaling
        if layout.architecture == "gemma3_text":
            local = {"rope_theta": 10000.0, "rope_type": "default"}
            rope = {"full_attention": rope, "sliding_attention": local}
        if layout.recurrent is not None:
            pairs = int(layout.head_dim * layout.recurrent.rotary) // 2
            rope["partial_rotary_factor"] = layout.recurrent.rotary
            # Text has one position on the three axes of a picture, so sections change nothing.
            rope["mrope_section"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
            rope["mrope_interleaved"] = True
        written = AutoConfig.for_model(
            layout.architecture, **config, dtype=layout.dtype, rope_parameters=rope
        )
        written.save_pretrained(directory)
        if not layout.tied and not layout.tie_key:
            written = json.loads((directory / "config.json").read_text())
            del written["tie_word_embeddings"]
            write_json(directory / "config.json", written)
    else:
        config |= {
            "model_type": layout.architecture,
            "rope_theta": layout.rope_theta,
            "torch_dtype": layout.dtype,
        }
        config |= {"attention_bias": False, "rope_scaling": None, "use_cache": True}
        write_json(directory / "config.json", config)


def first_eos(layout, tokenizer):
    """Returns a stop token for config.json. It differs from the tokenizer's, as in BitNet."""
    other = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    return (
        other
        if layout.architecture == "bitnet" and isinstance(other, int)
        else tokenizer.eos_token_id
    )


def random_tensors(layout):
    """Returns every tensor in float32, as after training: masters near normal, norms near one."""
    generator = torch.Generator().manual_seed(layout.seed)

    def normal(*shape, std):
        return torch.randn(*shape, generator=generator) * std

    def norm(size):
        return 1.0 + normal(size, std=0.2)

    def stored_norm(size):
        """Returns the weights of a norm as the file has them: Gemma and Qwen 3.5 subtract 1."""
        return norm(size) - (1.0 if layout.architecture in ("gemma3_text", HYBRID) else 0.0)

    head_dim = layout.head_dim or layout.hidden // layout.heads
    hidden, inner = layout.hidden, layout.intermediate
    queries, keys = layout.heads * head_dim, layout.kv_heads * head_dim
    # The output of a query head of Qwen 3.5 has a gate, whose rows follow those of the head.
    gated = 2 if layout.architecture == HYBRID else 1
    ternary = {
        "self_attn.q_proj": (gated * queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    # With large embeddings, a tied head would repeat its input whatever the layers compute.
    tensors = {"model.embed_tokens.weight": normal(layout.vocab, hidden, std=EMBEDDING_STD)}
    masters = {}
    for index in range(layout.layers):
        layer = f"model.layers.{index}"
        tensors[f"{layer}.input_layernorm.weight"] = stored_norm(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = stored_norm(hidden)
        if layout.architecture == "gemma3_text":
            tensors[f"{layer}.pre_feedforward_layernorm.weight"] = stored_norm(hidden)
            tensors[f"{layer}.post_feedforward_layernorm.weight"] = stored_norm(hidden)
        attends = not layout.is_recurrent(index)
        with_head_norms = ("qwen3", "qwen3_moe", "maple", "gemma3_text", HYBRID)
        if layout.architecture in with_head_norms and attends:
            tensors[f"{layer}.self_attn.q_norm.weight"] = stored_norm(head_dim)
            tensors[f"{layer}.self_attn.k_norm.weight"] = stored_norm(head_dim)
        if layout.architecture == "bitnet":
            tensors[f"{layer}.self_attn.attn_sub_norm.weight"] = norm(hidden)
            tensors[f"{layer}.mlp.ffn_sub_norm.weight"] = norm(inner)
        shapes = ternary
        if layout.experts is not None and index not in layout.dense_layers:
            shapes = {name: shape for name, shape in ternary.items() if "mlp" not in name}
            for expert in range(layout.experts[0]):
                mixture = {name: shape for name, shape in ternary.items() if "mlp" in name}
                shapes |= {
                    name.replace("mlp", f"mlp.experts.{expert}"): shape
                    for name, shape in mixture.items()
                }
            tensors[f"{layer}.mlp.gate.weight"] = normal(layout.experts[0], hidden, std=0.3)
        if layout.is_recurrent(index):
            mixer = f"{layer}.linear_attn"
            tensors |= {f"{mixer}.{name}": t for name, t in recurrent_floats(layout, generator)}
            shapes = {name: shape for name, shape in ternary.items() if "self_attn" not in name}
            shapes |= {
                "linear_attn.in_proj_qkv": (
                    2 * layout.recurrent.keys + layout.recurrent.values,
                    hidden,
                ),
                "linear_attn.in_proj_z": (layout.recurrent.values, hidden),
                "linear_attn.out_proj": (hidden, layout.recurrent.values),
            }
        for name, (rows, columns) in shapes.items():
            masters[f"{layer}.{name}"] = normal(rows, columns, std=1.5 * columns**-0.5)
            if layout.architecture == "qwen2" and name[-6] in "qkv" and "self_attn" in name:
                tensors[f"{layer}.{name}.bias"] = normal(rows, std=0.5)
            if layout.use_rms_norm:
                tensors[f"{layer}.{name}.rms_norm.weight"] = norm(columns)
            if layout.input_norms:
                tensors[f"{layer}.{name}.norm.weight"] = norm(columns)
            if layout.lrc_rank is not None:
                # About a third of the size of the product.
                std = (0.25 / (columns * layout.lrc_rank)) ** 0.25
                tensors[f"{layer}.{name}.lrc_U"] = normal(rows, layout.lrc_rank, std=std)
                tensors[f"{layer}.{name}.lrc_V"] = normal(columns, layout.lrc_rank, std=std)
    # The last norm gives the logits a spread that is neither flat nor certain.
    tensors["model.norm.weight"] = norm(hidden) * LOGITS_STD * hidden**-0.5 / EMBEDDING_STD
    if layout.architecture == HYBRID:
        tensors["model.norm.weight"] -= 1.0
    if not layout.tied and layout.head:
        masters["lm_head"] = normal(layout.vocab, hidden, std=EMBEDDING_STD)
    return tensors, masters


def recurrent_floats(layout, generator):
    """Returns the names and values of the tensors of a recurrent layer that stay float."""
    shape = layout.recurrent
    channels = 2 * shape.keys + shape.values

    def normal(*size, std):
        return torch.randn(*size, generator=generator) * std

    def uniform(low, high):
        return low + (high - low) * torch.rand(shape.value_heads, generator=generator)

    convolution = normal(channels, 1, CONVOLUTION_TOKENS, std=0.3)
    # The last key head has such small queries and keys that the 1e-6 beside their square counts.
    for end in (shape.keys, 2 * shape.keys):
        convolution[end - shape.head_dim : end] *= 5e-4
    # Some heads forget within a few tokens, others keep hundreds, as in trained models.
    step = 10 ** uniform(-3, -1)
    return [
        ("in_proj_a.weight", normal(shape.value_heads, layout.hidden, std=layout.hidden**-0.5)),
        ("in_proj_b.weight", normal(shape.value_heads, layout.hidden, std=layout.hidden**-0.5)),
        ("conv1d.weight", convolution),
        ("A_log", torch.log(uniform(1, 16))),
        ("dt_bias", torch.log(torch.expm1(step))),  # softplus makes `step` of it.
        ("norm.weight", 1.0 + normal(shape.head_dim, std=0.2)),
    ]


def dtype_of(layout, name):
    """Returns the type of a float tensor in the file."""
    if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
        return torch.float32
    gates = tuple(f"{gate}.weight" for gate in (*GATES, "conv1d")) + (".dt_bias",)
    return getattr(torch, layout.recurrent.gates if name.endswith(gates) else layout.dtype)


def checkpoint_tensors(layout):
    """Returns the tensors of the file: masters, or packed weights quantised by mean magnitude."""
    dtype = getattr(torch, layout.dtype)
    tensors, masters = random_tensors(layout)
    if layout.group is not None:
        masters["model.embed_tokens"] = tensors.pop("model.embed_tokens.weight")
        for name, master in masters.items():
            groups = master.reshape(-1, layout.group)
            # Scales are exact in half precision.
            precision = torch.float16 if dtype == torch.float32 else dtype
            mean = groups.abs().mean(-1, keepdim=True).to(precision).float()
            ternary = (groups / mean).round().clamp(-1, 1) * mean
            tensors[f"{name}.weight"] = ternary.reshape(master.shape)
        return {name: tensor.to(dtype_of(layout, name)) for name, tensor in tensors.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name, master in masters.items():
        if not layout.packed or layout.input_norms or layout.is_float(name):
            tensors[f"{name}.weight"] = master.to(dtype)
            continue
        mean = master.abs().mean().clamp(min=1e-5)
        tensors[f"{name}.weight"] = pack_weights((master / mean).round().clamp(-1, 1))
        scale = mean if layout.linear_class == "autobitlinear" else 1.0 / mean
        tensors[f"{name}.weight_scale"] = scale.reshape(1).to(dtype)
    return tensors


def save_tensors(tensors, directory, shards):
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata=metadata)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            name: tensor
            for index, (name, tensor) in enumerate(tensors.items())
            if index % shards == shard
        }
        save_file(part, directory / file, metadata=metadata)
        weight_map |= {name: file for name in part}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def write_checkpoint(layout, directory):
    """Writes a checkpoint directory that looks like a downloaded one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    core, special = TOKENIZERS[layout.tokenizer](layout.vocab)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = TEMPLATES[layout.template]
    tokenizer.save_pretrained(directory, save_jinja_files=not layout.template_inline)
    assert (directory / "chat_template.jinja").exists() != layout.template_inline
    write_config(layout, tokenizer, directory)
    eos = tokenizer.eos_token_id
    write_json(
        directory / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": sorted({eos, eos + 2}) if layout.eos_list else eos,
            "transformers_version": transformers.__version__,
        },
    )
    tensors = checkpoint_tensors(layout)
    if not layout.head:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if layout.architecture == "maple":
        embedding = tensors.pop("model.embed_tokens.weight")
        tensors["model.word_embeddings.weight"] = embedding
    if layout.architecture == "mixtral":
        tensors = {mixtral_name(name): tensor for name, tensor in tensors.items()}
    save_tensors(tensors, directory, layout.shards)


def mixtral_name(name):
    """Returns what Mixtral calls a tensor of Qwen 3 MoE."""
    names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return ".".join(names.get(part, part) for part in name.split("."))


# ---- Running the reference ----------------------------------------------------------------------


def attention_with_f16_cache(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
):
    """Eager attention over keys and values rounded to f16, as in Sterna's KV store."""
    key = repeat_kv(key.half().float(), module.num_key_value_groups)
    value = repeat_kv(value.half().float(), module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    output = scores.softmax(dim=-1) @ value
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("f16_cache", attention_with_f16_cache)
ALL_MASK_ATTENTION_FUNCTIONS.register("f16_cache", eager_mask)


def has_experts(module):
    """Returns whether a module has the merged matrices of a layer's experts."""
    return type(module).__name__.endswith(("MoeExperts", "MixtralExperts"))


def round_experts(module, group):
    """Rounds the inputs of each expert's matrices to int8 in groups. Hooks cannot reach them."""
    linear = torch.nn.functional.linear

    def forward(rows, chosen, weights):
        output, rows = torch.zeros_like(rows), by_groups(rows, group)
        for expert, (gate_up, down) in enumerate(
            zip(module.gate_up_proj, module.down_proj, strict=True)
        ):
            tokens, slots = torch.where(chosen == expert)
            gate, up = linear(rows[tokens], gate_up).chunk(2, dim=-1)
            gated = by_groups(module.act_fn(gate) * up, group)
            output.index_add_(0, tokens, linear(gated, down) * weights[tokens, slots, None])
        return output

    module.forward = forward


def by_groups(inputs, group):
    """Rounds each group of columns to int8 with a scale of its own."""
    groups = inputs.unflatten(-1, (-1, group))
    scale = 127 / groups.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return ((groups * scale).round().clamp(-128, 127) / scale).flatten(-2)


def as_bit_linear(module, norm, eps):
    """Makes a linear compute as those of BitNet-embedding do."""
    scale = module.weight.abs().mean().clamp(min=1e-5)
    module.weight.copy_((module.weight / scale).round().clamp(-1, 1) * scale)

    def hook(_, inputs):
        (x,) = inputs
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return ((x * scale).round().clamp(-128, 127) / scale,)

    module.register_forward_pre_hook(hook)


def in_groups(codes, scales):
    """Multiplies -1, 0 and 1 by a scale for each group of columns."""
    groups = codes.reshape(*scales.shape, -1)
    return (groups * scales[..., None]).reshape(codes.shape)


class Reference:
    """A checkpoint that `transformers` runs in float32 on the CPU."""

    def __init__(self, directory, group=None, scales=None):
        """With `group`, linears quantise their inputs to int8 in groups of so many columns.

        With `scales`, ternary linears compute as floats, with these scales of groups.
        """
        config = json.loads((directory / "config.json").read_text())
        self.has_head = config["architectures"][0].endswith("ForCausalLM")
        if config["model_type"] == "maple":
            self.model, self.is_hybrid = maple_reference.load(directory), False
            self.round_inputs(group, scales)
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            return
        self.model, report = (AutoModelForCausalLM if self.has_head else AutoModel).from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            local_files_only=True,
        )
        corrections = {key for key in report["unexpected_keys"] if ".lrc_" in key}
        norms = {key for key in report["unexpected_keys"] if key.endswith("_proj.norm.weight")}
        report["unexpected_keys"] = set(report["unexpected_keys"]) - corrections - norms
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not report[problem], f"{directory}: {problem}: {report[problem]}"
        # Loading a quantised checkpoint keeps norms and embeddings in the format of the file.
        torch.nn.Module.float(self.model).eval()
        for name, module in self.model.named_modules():
            if scales is not None and name in scales:
                weight = in_groups(module.weight, scales[name])
                module.forward = lambda x, weight=weight: torch.nn.functional.linear(x, weight)
        self.round_inputs(group, scales)
        self.is_hybrid = config["model_type"] == HYBRID
        for package in ("kernels", "fla", "causal_conv1d") if self.is_hybrid else ():
            assert importlib.util.find_spec(package) is None, f"{package} replaces the reference"
        if corrections:
            self.add_corrections(load_file(directory / "model.safetensors"))
        if norms:
            tensors = load_file(directory / "model.safetensors")
            modules = dict(self.model.named_modules())
            for name in norms:
                module = modules[name.removesuffix(".norm.weight")]
                as_bit_linear(module, tensors[name].float(), config["rms_norm_eps"])
        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def round_inputs(self, group, scales):
        """Rounds the inputs of ternary linears to int8 in groups of so many columns, if any."""
        if group is not None:
            for module in self.ternary_linears() if scales is None else self.bit_linears():
                module.register_forward_pre_hook(lambda _, inputs: (by_groups(inputs[0], group),))
            for module in filter(has_experts, self.model.modules()):
                round_experts(module, group)

    def add_corrections(self, tensors):
        """Adds the low-rank correction of its input to the output of each linear that has one."""

        def hook(up, down):
            return lambda _, inputs, output: output + (inputs[0] @ down) @ up.T

        for name, module in self.model.named_modules():
            if f"{name}.lrc_U" in tensors:
                up, down = (tensors[f"{name}.lrc_{part}"].float() for part in "UV")
                module.register_forward_hook(hook(up, down))

    def linears(self):
        kinds = (BitLinear, AutoBitLinear, torch.nn.Linear)
        return [module for module in self.model.modules() if isinstance(module, kinds)]

    def ternary_linears(self):
        gates = {
            module for name, module in self.model.named_modules() if name.split(".")[-1] in GATES
        }
        return [module for module in self.linears() if module not in gates]

    def bit_linears(self):
        return [module for module in self.linears() if type(module) is not torch.nn.Linear]

    def rows(self, output):
        """Returns the logits of a pass, or the last hidden states of a model without a head."""
        return (output.logits if self.has_head else output.last_hidden_state)[0]

    def whole(self, tokens, attention):
        """Returns the rows [tokens, vocab] of one pass over all tokens."""
        self.model.set_attn_implementation(attention)
        return self.rows(self.model(torch.tensor([tokens]), use_cache=False))

    def cached(self, tokens, prompt_tokens, attention):
        """Returns the same rows with `prompt_tokens` at once and the rest one by one, cached."""
        self.model.set_attn_implementation(attention)
        output = self.model(torch.tensor([tokens[:prompt_tokens]]), use_cache=True)
        rows = [self.rows(output)]
        for token in tokens[prompt_tokens:]:
            output = self.model(
                torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True
            )
            rows.append(self.rows(output))
        return torch.cat(rows)

    def disturbed(self, tokens):
        """Returns the rows of passes with disturbed last bits in the inputs of all linears."""
        with disturbed_last_bits(self.model):
            return [self.whole(tokens, "eager") for _ in range(DISTURBED_RUNS)]

    def decoder_layers(self):
        return (self.model.model if self.has_head else self.model).layers

    def continuation(self, prompt):
        """Returns greedy tokens after `prompt`, and each one's margin over the second best.

        Stop tokens do not end the continuation.
        """
        self.model.set_attn_implementation("eager")
        output = self.model(torch.tensor([prompt]), use_cache=True)
        tokens, margins = [], []
        for _ in range(CONTINUATION_TOKENS):
            best = output.logits[0, -1].topk(2)
            tokens.append(best.indices[0].item())
            margins.append((best.values[0] - best.values[1]).item())
            output = self.model(
                torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
            )
        return tokens, margins

    def layers(self, tokens):
        """Returns the hidden states before and after each layer, and each layer's unstable tokens.

        K and V are rounded to f16.
        """
        calls = []

        def record(layer, args, kwargs, output):
            calls.append((layer, args, kwargs, output))

        hooks = [
            layer.register_forward_hook(record, with_kwargs=True)
            for layer in self.decoder_layers()
        ]
        self.whole(tokens, "f16_cache")
        for hook in hooks:
            hook.remove()
        states = [args[0][0] for _, args, _, _ in calls] + [calls[-1][-1][0]]
        return states, [unstable_tokens(*call) for call in calls]


@contextmanager
def disturbed_last_bits(module):
    """Disturbs the last bits of the inputs of the linears in `module`."""
    generator = torch.Generator().manual_seed(0)

    def disturb(_, inputs):
        noise = torch.randn(inputs[0].shape, generator=generator)
        return (inputs[0] * (1 + LAST_BITS * noise), *inputs[1:])

    kinds = (BitLinear, AutoBitLinear, torch.nn.Linear)
    linears = [part for part in module.modules() if isinstance(part, kinds) or has_experts(part)]
    hooks = [linear.register_forward_pre_hook(disturb, prepend=True) for linear in linears]
    yield
    for hook in hooks:
        hook.remove()


def unstable_tokens(layer, args, kwargs, output):
    """Returns the tokens whose output changes with the last bits of the inputs of the linears."""
    with disturbed_last_bits(layer):
        worst = torch.stack(
            [(layer(*args, **kwargs) - output).abs()[0].amax(-1) for _ in range(32)]
        ).amax(0)
    limit = 0.5 * LAYER_TOLERANCE * output.square().mean().sqrt()
    return (worst > limit).nonzero().flatten().tolist()


def distances_to_float(directory, group, scales, prompts, tensors):
    """Adds the logits without rounded activations, and returns the distances of those with."""
    differences = {32: [], group: []}
    references = {size: Reference(directory, size, scales) for size in (None, 32, group)}
    for index, entry in enumerate(prompts):
        prompt = entry["prompt"]
        tokens = prompt + entry["continuation"][: LOGITS_ROWS - 1]
        runs = {
            size: reference.whole(tokens, "eager")[len(prompt) - 1 :]
            for size, reference in references.items()
        }
        exact = runs.pop(None)
        tensors[f"prompt.{index}.float"] = exact.contiguous()
        for size, run in runs.items():
            difference = (run.log_softmax(-1) - exact.log_softmax(-1)).abs()
            differences[size].append(difference.flatten())
    return {str(size): torch.cat(parts).mean().item() for size, parts in differences.items()}


def compare_runs(reference, prompt, continuation):
    """Returns the logits to store, and how the run with an f16 cache differs from the others.

    The differences are those of all runs, and those that count for the mean.
    """
    tokens = prompt + continuation[: LOGITS_ROWS - 1]
    rows = slice(len(prompt) - 1, None)
    runs = [reference.whole(tokens, attention)[rows] for attention in ("eager", "sdpa")]
    # Chunks of recurrent layers differ from single tokens, so these begin with the first one.
    at_once = 1 if reference.is_hybrid else len(prompt)
    runs += [reference.cached(tokens, at_once, attention)[rows] for attention in ("eager", "sdpa")]
    if reference.is_hybrid:
        runs += [run[rows] for run in reference.disturbed(tokens)]
    rounded = reference.whole(tokens, "f16_cache")[rows].log_softmax(-1)
    differences = torch.stack([(run.log_softmax(-1) - rounded).abs() for run in runs])
    furthest = differences.flatten(1).mean(1).argmax()
    return runs[0], differences, differences[furthest] if reference.is_hybrid else differences


def compare_embeddings(reference, prompt):
    """Returns both embeddings of a prompt, and how the run with an f16 cache differs."""
    half = max(1, len(prompt) // 2)
    runs = [reference.whole(prompt, attention) for attention in ("eager", "sdpa")]
    runs += [reference.cached(prompt, half, attention) for attention in ("eager", "sdpa")]
    rounded = pooled(reference.whole(prompt, "f16_cache"))
    return pooled(runs[0]), torch.stack([(pooled(run) - rounded).abs() for run in runs])


def pooled(states):
    """Returns the last state and the mean of all, with length 1."""
    return torch.nn.functional.normalize(torch.stack([states[-1], states.mean(0)]), dim=-1)


def random_prompts(tokenizer, vocab, lengths, seed):
    rng = random.Random(seed)
    lowest = 5 if vocab > 10 else 0  # Above the special tokens of every tokenizer.
    prompts = [[rng.randrange(lowest, vocab) for _ in range(length)] for length in lengths]
    text = tokenizer("The capital of France is")["input_ids"]
    return [token for token in [text] if max(token) < vocab] + prompts


def expected_of(reference, directory, prompts):
    """Returns everything that is stored, as (JSON value, tensors)."""
    entries, tensors, differences, for_mean = [], {}, [], []
    for index, prompt in enumerate(prompts):
        if not reference.has_head:
            embeddings, difference = compare_embeddings(reference, prompt)
            tensors[f"prompt.{index}.embedding"] = embeddings[0].contiguous()
            tensors[f"prompt.{index}.mean"] = embeddings[1].contiguous()
            differences.append(difference.flatten())
            for_mean.append(difference.flatten())
            entries.append({"prompt": prompt, "continuation": [], "margins": []})
            continue
        tokens, margins = reference.continuation(prompt)
        logits, difference, mean_difference = compare_runs(reference, prompt, tokens)
        tensors[f"prompt.{index}.logits"] = logits.contiguous()
        differences.append(difference.flatten())
        for_mean.append(mean_difference.flatten())
        entries.append(
            {"prompt": prompt, "continuation": tokens, "margins": [round(m, 6) for m in margins]}
        )
    states, unstable = reference.layers(max(prompts, key=len)[:LAYER_TOKENS])
    tensors |= {f"state.{index}": state.contiguous() for index, state in enumerate(states)}
    tokenizer = reference.tokenizer
    return {
        "made_with": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "weights_crc32": weights_crc32(directory),
        "spread_worst": torch.cat(differences).max().item(),
        "spread_mean": torch.cat(for_mean).mean().item(),
        "stop_tokens": stop_tokens(directory, tokenizer, reference.model.config.vocab_size),
        "layer_unstable_tokens": unstable,
        "prompts": entries,
        "texts": [text_entry(tokenizer, text) for text in TEXTS],
        "chats": [chat_entry(tokenizer, messages) for messages in CHATS],
    }, tensors


def text_entry(tokenizer, text):
    tokens = tokenizer(text)["input_ids"]
    return {
        "text": text,
        "tokens": tokens,
        "decoded": tokenizer.decode(tokens, skip_special_tokens=True),
    }


def chat_entry(tokenizer, messages):
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    return {"messages": messages, "rendered": rendered, "tokens": tokens["input_ids"]}


def stop_tokens(directory, tokenizer, vocab):
    """Returns the stop tokens of config, generation config and tokenizer that can occur."""
    stops = {tokenizer.eos_token_id}
    for file in ("config.json", "generation_config.json"):
        if (directory / file).exists():
            eos = json.loads((directory / file).read_text()).get("eos_token_id")
            stops |= set(eos if isinstance(eos, list) else [eos])
    return sorted(stop for stop in stops if stop is not None and stop < vocab)


def weights_crc32(directory):
    """Returns the CRC-32 of the weight files in the order of their names."""
    crc = 0
    for file in sorted([*directory.glob("model*.safetensors"), *directory.glob("model*.gguf")]):
        crc = zlib.crc32(file.read_bytes(), crc)
    return crc


def write_json(path, value):
    path.write_text(
        json.dumps(value, indent=1, ensure_ascii=False, separators=(",", ": ")) + "\n",
        encoding="utf-8",
    )


def write_expected(checkpoint, directory, prompts_of, group=None, scales=None):
    with torch.no_grad():
        reference = Reference(checkpoint, group, scales)
        value, tensors = expected_of(reference, checkpoint, prompts_of(reference))
        if scales is not None:
            value["weights_crc32"] = weights_crc32(directory)
        if group is not None:
            distances = distances_to_float(checkpoint, group, scales, value["prompts"], tensors)
            value["float_distances"] = distances
            print(f"{directory}: distances to plain float {distances}")
    directory.mkdir(parents=True, exist_ok=True)
    # One prompt, text or chat per line keeps diffs readable and the file small.
    lines = [f"{json.dumps(key)}: {compact(item)}" for key, item in value.items()]
    (directory / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    save_file(tensors, directory / "expected.safetensors")
    margins = sorted(margin for entry in value["prompts"] for margin in entry["margins"])
    unstable = sum(map(len, value["layer_unstable_tokens"]))
    exceeding = sum(margin > value["spread_worst"] for margin in margins)
    margins = margins or [0]
    print(
        f"{directory}: spread worst {value['spread_worst']:.2e} mean {value['spread_mean']:.2e},"
        f" margin median {margins[len(margins) // 2]:.2f}, {exceeding}/{len(margins)} margins"
        f" exceed the spread, {unstable} of {LAYER_TOKENS * len(value['layer_unstable_tokens'])}"
        " layer outputs unstable",
        flush=True,
    )


def compact(item):
    if isinstance(item, list) and item and isinstance(item[0], dict):
        return "[\n " + ",\n ".join(json.dumps(entry, ensure_ascii=False) for entry in item) + "\n]"
    return json.dumps(item, ensure_ascii=False)


def make_grouped_demo(demo, group, root):
    """Writes the demo as GGUF with scales of groups near its own, and its expected results."""
    writer = gguf_writer()
    directory = root / f"demo-group{group}"
    directory.mkdir(parents=True, exist_ok=True)
    for file in demo.glob("*.json"):
        shutil.copy(file, directory)
    generator = torch.Generator().manual_seed(group)
    kind, pack = writer.ALL_LAYOUTS[{64: "q2_0", 128: "pq2_0", 256: "tq2_0"}[group]]
    weights = load_file(demo / "model.safetensors")
    tensors, scales = [], {}
    for name, tensor in weights.items():
        gguf_name = writer.gguf_name(name, "bitnet-b1.58")
        if tensor.dtype == torch.uint8:
            codes = writer.unpack(tensor.numpy())
            jitter = torch.rand(len(codes), codes.shape[1] // group, generator=generator)
            scale = weights[name + "_scale"].float() * (0.9 + 0.2 * jitter)
            scales[name.removesuffix(".weight")] = scale.half().float()
            data = pack(codes, scale.half().float().numpy().reshape(-1))
            tensors.append((gguf_name, codes.shape, kind, data))
        elif not name.endswith("weight_scale"):
            number, tensor = (0, tensor.float()) if tensor.dim() == 1 else (30, tensor)
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            tensors.append((gguf_name, tuple(tensor.shape), number, data))
    _, metadata = writer.metadata_of(demo, "bitnet-b1.58")
    writer.write_file(directory / "model.gguf", metadata, tensors)
    write_expected(demo, directory, demo_prompts, group, scales)


# ---- Block diffusion ----------------------------------------------------------------------------

BLOCK_PROMPTS = (1, 31, 32, 33, 64, 150)  # Lengths: below, at and above whole blocks.
BLOCK_SIZES = ((4, 2), (8, 8), (16, 4), (32, 8))  # A block, and the parts that are filled in turn.
BLOCK_TOKENS = 40  # Output tokens.
CLOSE = {"logits": 0.3, "probabilities": 0.03}  # The last bits may decide between closer ones.


class BlockReference:
    """Block diffusion as Fast-dLLM v2 does it (arXiv:2509.26328).

    Every pass computes all tokens again. With `is_causal`, known tokens before the block attend to
    those before them; otherwise to all of their block. With `has_cache`, a pass over a part whose
    first token is known sees the rest of the block as the last pass over the whole block saw it.
    """

    def __init__(self, reference, block, part, threshold, is_causal, has_cache):
        self.reference, self.threshold, self.is_causal = reference, threshold, is_causal
        self.block, self.part, self.has_cache = block, part, has_cache
        self.mask = reference.model.config.mask_token_id
        self.passes, self.is_close = 0, False
        self.seen = None  # The block in the last pass over all of it.

    def seen_by(self, tokens, begin):
        """Returns which tokens each token attends to. Those from `begin` on see each other."""
        at = torch.arange(tokens)
        if self.is_causal:
            return (at[:, None] >= at) | (at[:, None] >= begin)
        return at[:, None] // self.block >= at // self.block

    def rows(self, tokens, begin):
        """Returns the logits of a pass in which the tokens from `begin` on see each other."""
        return self.forward(tokens, range(len(tokens)), self.seen_by(len(tokens), begin))

    def rows_of_part(self, tokens, begin, part):
        """Returns the logits of a pass over the positions of `part`.

        The block is there as it was seen, and then the part once more: it sees itself and not the
        part that was seen.
        """
        end = begin + self.block
        is_seen = torch.ones(end + len(part), end + len(part), dtype=torch.bool)
        is_seen[:end, :end] = self.seen_by(end, begin)
        is_seen[:end, end:] = False
        is_seen[end:, list(part)] = False
        known = tokens[:begin] + self.seen + [tokens[position] for position in part]
        return self.forward(known, [*range(end), *part], is_seen)[end:]

    def forward(self, tokens, positions, is_seen):
        bias = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
        self.reference.model.set_attn_implementation("f16_cache")
        output = self.reference.model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([list(positions)]),
            attention_mask=bias[None, None],
            use_cache=False,
        )
        self.passes += 1
        return output.logits[0]

    def draw(self, logits):
        """Returns the likeliest token except the mask token, and its plain probability."""
        drawn = logits.clone()
        drawn[self.mask] = -math.inf
        best = drawn.topk(2)
        token = best.indices[0].item()
        margin = (best.values[0] - best.values[1]).item()
        return token, logits.softmax(-1)[token].item(), margin

    def note(self, difference, kind):
        """Notes the difference of two values of which the larger one counts."""
        self.is_close |= abs(difference) < CLOSE[kind]

    def generate(self, prompt):
        """Returns the output tokens after `prompt`, and the number of passes.

        Stop tokens do not end them. The block of a decision that is close ends them.
        """
        tokens, end, sure = list(prompt), len(prompt) + BLOCK_TOKENS, (0, 0)
        while len(tokens) < end and not self.is_close:
            begin = len(tokens) // self.block * self.block
            if begin == len(tokens):
                sure = (len(tokens) - len(prompt), self.passes)
                token, _, margin = self.draw(self.rows(tokens, begin)[-1])
                self.note(margin, "logits")
                tokens.append(token)
                self.seen = None
                continue
            tokens += [self.mask] * (begin + self.block - len(tokens))
            while self.mask in tokens[:end] and not self.is_close:
                self.fill(tokens, begin)
        count, passes = sure if self.is_close else (BLOCK_TOKENS, self.passes)
        return tokens[len(prompt) :][:count], passes

    def fill(self, tokens, begin):
        """Replaces some mask tokens of the first part of the block that has any."""
        first = tokens.index(self.mask, begin)
        part_begin = first - (first - begin) % self.part
        part_end = part_begin + self.part
        if self.has_cache and self.seen is not None and first > part_begin:
            logits = self.rows_of_part(tokens, begin, range(part_begin, part_end))
        else:
            self.seen, part_begin = tokens[begin:], 0
            logits = self.rows(tokens, begin)
        drawn = {
            place: self.draw(logits[place - 1 - part_begin])
            for place in range(first, min(part_end, len(tokens)))
            if tokens[place] == self.mask
        }
        sure = sorted((probability for _, probability, _ in drawn.values()), reverse=True)
        best = max(drawn, key=lambda place: drawn[place][1])
        if len(sure) > 1 and sure[0] <= self.threshold:
            self.note(sure[0] - sure[1], "probabilities")
        for place, (token, probability, margin) in drawn.items():
            if self.threshold < 1:
                self.note(probability - self.threshold, "probabilities")
            if place == best or probability > self.threshold:
                self.note(margin, "logits")
                tokens[place] = token


def write_blocks(checkpoint, directory):
    """Writes how a checkpoint fills blocks, as far as the last bits cannot decide."""
    reference = Reference(checkpoint)
    text = max(demo_prompts(reference), key=len)
    cases = []
    kinds = itertools.product(
        BLOCK_SIZES, (0.5, 0.9, 1), (True, False), (False, True), BLOCK_PROMPTS
    )
    for (block, part), threshold, is_causal, has_cache, length in kinds:
        if has_cache and part == block:
            continue  # There is no part.
        blocks = BlockReference(reference, block, part, threshold, is_causal, has_cache)
        output, passes = blocks.generate(text[:length])
        if not output:
            continue
        case = {"block": block, "part": part, "threshold": threshold, "is_causal": is_causal}
        case |= {"has_cache": has_cache, "prompt": length, "passes": passes}
        cases.append(case | {"output": output})
    text = text[:150]
    parts = [part_of_a_block(reference, text, is_causal) for is_causal in (True, False)]
    write_json(directory / "blocks.json", {"text": text, "cases": cases, "parts": parts})


def part_of_a_block(reference, text, is_causal):
    """Returns the log-probabilities of a part of a block after an earlier pass over all of it.

    That pass saw other tokens, so the rest of the block differs much from what the part would see
    without a block cache.
    """
    block, part, begin = 32, range(72, 80), 64
    blocks = BlockReference(reference, block, len(part), 1, is_causal, True)
    blocks.seen = text[:block][::-1]
    tokens = [text[position] for position in part]
    logits = blocks.rows_of_part(text[: part.stop], begin, part)
    best = torch.log_softmax(logits, -1).topk(5)
    values = [[round(value, 4) for value in row] for row in best.values.tolist()]
    fields = {"is_causal": is_causal, "block": block, "begin": begin, "seen": blocks.seen}
    fields |= {"start": part.start, "tokens": tokens}
    return fields | {"best": best.indices.tolist(), "logprobs": values}


def make_layout(layout, root):
    directory = root / layout.name
    write_checkpoint(layout, directory)
    write_expected(
        directory,
        directory,
        lambda reference: random_prompts(
            reference.tokenizer, layout.vocab, layout.prompt_lengths, layout.seed
        ),
        layout.group,
    )
    if layout.gguf is not None:
        path = directory / f"{layout.name}-{layout.gguf}.gguf"
        writer = gguf_writer()
        architecture = writer.ARCHITECTURES.get(layout.architecture, layout.architecture)
        writer.write_checkpoint(directory, path, layout.gguf, architecture)


def gguf_writer():
    """Returns the module that writes GGUF files."""
    sys.path.insert(0, str(Path(__file__).parent / "gguf"))
    import write

    return write


DEMO_CHATS = [CHATS[1], CHATS[2], chat("Who are you?")]


def demo_prompts(reference):
    """Returns realistic chats, one of them longer than an attention span (256 keys), and a text."""
    tokenizer = reference.tokenizer

    def tokens(messages):
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]

    prompts = [tokens(messages) for messages in DEMO_CHATS] + [
        tokenizer("The capital of France is")["input_ids"]
    ]
    long = ["What is the capital of France?", "The capital of France is Paris."]
    while len(tokens(chat(*long, "Thank you!"))) <= 280:
        long += long[:2]
    return prompts + [tokens(chat(*long, "Thank you!"))]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the fixtures go")
    parser.add_argument(
        "--demo", type=Path, metavar="CHECKPOINT", help="store what this checkpoint computes"
    )
    parser.add_argument(
        "--blocks", type=Path, metavar="CHECKPOINT", help="store how this checkpoint fills blocks"
    )
    parser.add_argument(
        "--grouped", type=Path, metavar="CHECKPOINT", help="give this packed checkpoint groups"
    )
    parser.add_argument("--random", type=int, metavar="N", help="make N layouts drawn at random")
    parser.add_argument("--hybrids", type=int, metavar="N", help="make N random ones of Qwen 3.5")
    parser.add_argument("--seed", type=int, default=1, help="of the first random layout")
    parser.add_argument("--only", help="make only the committed fixture of this name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if arguments.demo:
        write_expected(arguments.demo, arguments.directory, demo_prompts)
        return
    if arguments.blocks:
        with torch.no_grad():
            write_blocks(arguments.blocks, arguments.directory)
        return
    if arguments.grouped:
        for group in (64, 128, 256):
            make_grouped_demo(arguments.grouped, group, arguments.directory)
        return
    count = arguments.random or arguments.hybrids
    if count:
        random_one = random_layout if arguments.random else random_hybrid_layout
        layouts = [random_one(1000 * arguments.seed + index) for index in range(count)]
    else:
        layouts = [layout for layout in LAYOUTS if arguments.only in (None, layout.name)]
    for layout in layouts:
        make_layout(layout, arguments.directory)


if __name__ == "__main__":
    main()
