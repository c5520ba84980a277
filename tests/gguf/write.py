#!/usr/bin/env python3
"""Writes a ternary checkpoint of Hugging Face as GGUF, in any layout of the ternary weights.

    pip install gguf numpy safetensors
    python tests/gguf/write.py src/demo DIR               # every layout
    python tests/gguf/write.py src/demo DIR i2_s tq2_0    # these
    python tests/gguf/write.py fixtures tests/gguf/fixtures   # one small tensor in every layout
    for name in llama-blocks/iq2_bn bitnet-blocks/i2_s bitnet-blocks/q2_0 \
        bitnet-low-rank/iq2_bn qwen2-group64/q2_0 qwen3-group64-yarn/q2_0 \
        qwen3-group128-untied/ptq1_0 \
        embedding-qwen3/i2_s embedding-gemma3/iq2_bn \
        qwen35-group64-tied/q2_0 qwen35-group128-untied/ptq1_0 \
        qwen3-moe-group64/q2_0 mixtral-group64/q2_0 maple-row/q2_0
    do python tests/gguf/write.py tests/fixtures/${name%/*} tests/fixtures/${name%/*} ${name#*/}
    done
    python tests/gguf/write.py tests/fixtures/qwen3-group128-untied DIR q1_0   # model_q1_0.gguf

The public `gguf` package packs the types that it knows. The other layouts and the container are
written here, from their description alone: nothing is shared with Sterna's reader.

Qwen 3.5. llama.cpp's converter (`conversion/qwen.py`) changes the recurrent layers so:

- Hugging Face has the value heads of a key head side by side: value head h belongs to key head
  h // r, where r is the number of value heads for each key head. GGUF has them tiled: place
  j * key_heads + i has value head i * r + j, so the place p belongs to key head p % key_heads.
  These are reordered: the rows of v in `attn_qkv` and `ssm_conv1d` (not those of q and k), the
  rows of `attn_gate`, `ssm_alpha` and `ssm_beta`, `ssm_a`, `ssm_dt.bias`, and the columns of
  `ssm_out`. `ssm_norm` is the same for all heads. With r = 1 or one key head nothing moves.
- `ssm_a` is -exp(A_log). Here it is computed in float64 and rounded once.
- `ssm_conv1d` has the shape [channels, 4], without the dimension of 1.
- Every norm is stored as 1 + w, except `ssm_norm`, which is w in both formats.

Query and key rows of the attention keep their order, with the gate of each head after its query.

Mixtures. The matrices of all experts of a layer are one tensor, the first expert first. Routers are
float32. Mixtral is called `llama`, and its query and key rows are reordered as those of Llama. So
that each form is tested, Qwen 3 MoE gets gate and up in one tensor, as newer converters write them,
and Mixtral a tensor for each expert, as converters wrote them until 2024.
"""

import json
import re
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from safetensors.numpy import load_file

PRE = {"llama": "llama-bpe", "qwen": "qwen2"}

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
# The norms before the linears of BitNet-embedding.
for _linear in [name for name in NAMES if name.endswith("_proj") and "experts" not in name]:
    NAMES[f"{_linear}.norm"] = f"{NAMES[_linear]}_norm_in"
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QWEN35_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
QWEN35_PARAMETERS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
# The architectures that have another name in Hugging Face's config.json.
ARCHITECTURES = {
    "bitnet": "bitnet-b1.58",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.word_embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


# ---- Layouts: codes [rows, columns] in 0..2 and a scale -> bytes --------------------------------
#
# Layouts with groups also take an array with a scale for each group.


def two_bits(codes, order):
    """Packs the last axis (of four codes) into a byte. `order` gives the shift of each code."""
    return np.bitwise_or.reduce(codes.astype(np.uint8) << np.array(order, np.uint8), axis=-1)


def half(values):
    return np.asarray(values, np.float16).view(np.uint8)


def half_each(scale, groups):
    """Returns the bytes of the scale of each group."""
    scales = np.broadcast_to(np.asarray(scale, np.float32).reshape(-1), len(groups))
    return half(np.ascontiguousarray(scales)).reshape(-1, 2)


def i2_s(codes, scale, run=32):
    blocks = codes.reshape(-1, 4, run).swapaxes(1, 2)
    packed = two_bits(blocks, [6, 4, 2, 0]).tobytes()
    return packed + struct.pack("<f", scale) + bytes(28)


def i2_s_arm(codes, scale):
    return i2_s(codes, scale, run=16)


def i2_s_four_rows(codes, scale):
    rows, columns = codes.shape
    packed = two_bits(codes.reshape(rows // 4, 4, columns).swapaxes(1, 2), [6, 4, 2, 0])
    return packed.tobytes() + struct.pack("<f", scale) + bytes(28)


def known(kind):
    def write(codes, scale):
        scales = np.asarray(scale, np.float32).reshape(-1, 1)
        values = (codes.astype(np.float32) - 1).reshape(len(scales), -1) * scales
        return gguf.quants.quantize(values, kind).tobytes()

    write.group = 256
    return write


def grouped(group):
    def write(codes, scale):
        groups = codes.reshape(-1, group)
        packed = two_bits(groups.reshape(len(groups), -1, 4), [0, 2, 4, 6])
        return np.concatenate([half_each(scale, groups), packed], axis=1).tobytes()

    write.group = group
    return write


def trit_bytes(digits, count):
    """Packs `count` digits (axis 1, most significant first) into a byte: a fraction of 256."""
    total = np.zeros(digits.shape[:1] + digits.shape[2:], np.uint32)
    for n in range(5):
        total = total * 3 + (digits[:, n] if n < count else 0)
    return ((total * 256 + 242) // 243).astype(np.uint8)


def ptq1_0(codes, scale):
    groups = codes.reshape(-1, 128)
    first = trit_bytes(groups[:, :80].reshape(-1, 5, 16), 5)
    second = trit_bytes(groups[:, 80:120].reshape(-1, 5, 8), 5)
    third = trit_bytes(groups[:, 120:].reshape(-1, 4, 2), 4)
    return np.concatenate([first, second, third, half_each(scale, groups)], axis=1).tobytes()


ptq1_0.group = 128


def iq2_bn(codes, scale):
    rows = codes.reshape(len(codes), -1, 4, 16).swapaxes(2, 3)
    packed = two_bits(rows, [0, 2, 4, 6]).reshape(len(codes), -1)
    scales = np.tile(np.array([scale], "<f4").view(np.uint8), (len(codes), 1))
    return np.concatenate([scales, packed], axis=1).tobytes()


def q1_0(codes, scale):
    groups = codes.reshape(-1, 128)
    packed = np.packbits(groups == 2, axis=1, bitorder="little")
    return np.concatenate([half_each(scale, groups), packed], axis=1).tobytes()


q1_0.group = 128

LAYOUTS = {
    "i2_s": (36, i2_s),
    "i2_s_arm": (36, i2_s_arm),
    "i2_s_four_rows": (36, i2_s_four_rows),
    "tq1_0": (34, known(Type.TQ1_0)),
    "tq2_0": (35, known(Type.TQ2_0)),
    "q2_0": (42, grouped(64)),
    "q2_0_legacy": (42, grouped(128)),
    "pq2_0": (142, grouped(128)),
    "ptq1_0": (143, ptq1_0),
    "iq2_bn": (135, iq2_bn),
}
# Q1_0 has no zeros, so a checkpoint that has some becomes another one.
ALL_LAYOUTS = LAYOUTS | {"q1_0": (41, q1_0)}


# ---- The file -----------------------------------------------------------------------------------


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item):
    """Encodes a metadata value with its type."""
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item[0], bool):
        return struct.pack("<IIQ", 9, 7, len(item)) + bytes(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
    if isinstance(item[0], float):
        return struct.pack("<IIQ", 9, 6, len(item)) + np.array(item, "<f4").tobytes()
    return struct.pack("<IIQ", 9, 5, len(item)) + np.array(item, "<i4").tobytes()


def write_file(path, metadata, tensors):
    """Writes a file. `tensors` are (name, shape with the outermost first, type number, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, item in metadata.items():
        head += text(key) + value(item)
    data = b""
    for name, shape, kind, content in tensors:
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)


# ---- The checkpoint -----------------------------------------------------------------------------


def gguf_name(name, architecture):
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in QWEN35_PARAMETERS:
        return f"blk.{layer}.{QWEN35_PARAMETERS[rest]}"
    module, part = rest.rsplit(".", 1)
    module = re.sub(r"experts\.\d+", "experts", module)
    names = {"gemma3": GEMMA_NAMES, "qwen35": QWEN35_NAMES}.get(architecture, NAMES)
    return f"blk.{layer}.{names[module]}.{part.lower()}"


def unpack(packed):
    """Codes of the packed U8 layout: bits 2i of byte (j, c) are row i * rows / 4 + j."""
    return np.concatenate([packed >> (2 * i) & 3 for i in range(4)])


def interleave(rows, head_dim):
    """Reorders the rows of query or key for rotations of neighbouring values."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def as_tiles(heads, config, axis=0):
    """Reorders value heads along an axis: those of a key head side by side become tiles."""
    keys = config["linear_num_key_heads"]
    repeats = config["linear_num_value_heads"] // keys
    shape = heads.shape
    parts = heads.reshape(*shape[:axis], keys, repeats, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(shape)


def converted_qwen35(name, array, config):
    """Returns a tensor of Qwen 3.5 as llama.cpp's converter changes it."""
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        array = array.reshape(len(array), -1)
        first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        array = np.concatenate([array[:first], as_tiles(array[first:], config)])
        # The converter never leaves a convolution in half precision.
        return array.astype("<f4") if part == "conv1d" else array
    if part in ("in_proj_z", "in_proj_a", "in_proj_b", "dt_bias"):
        return as_tiles(array, config)
    if part == "A_log":
        return -np.exp(as_tiles(array, config).astype(np.float64))
    if part == "out_proj":
        return as_tiles(array, config, axis=1)
    if name.endswith("norm.weight") and part != "norm":
        return array.astype("<f4") + np.float32(1)
    return array


def rounded(masters):
    """Returns the codes and the scale of masters, rounded by their mean magnitude."""
    factor = np.float32(1) / np.float32(np.abs(masters, dtype=np.float64).mean())
    codes = np.clip(np.rint(masters * factor), -1, 1) + 1
    return codes.astype(np.uint8), np.float32(1) / factor


def bf16_bits(array):
    return array.view(np.uint16)


def adds_eos(tokenizer):
    """Returns whether the post-processor puts a token after a text."""
    post = tokenizer["post_processor"] or {}
    templates = [step["single"] for step in post.get("processors", [post]) if "single" in step]
    return any("SpecialToken" in template[-1] for template in templates)


def metadata_of(source, architecture):
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer_config = json.loads((source / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    tokens = {id: token for token, id in vocab.items()}
    tokens.update({id: token["content"] for id, token in added.items()})
    size = config["vocab_size"]
    kinds = [3 if id in added else 1 if id in tokens else 5 for id in range(size)]
    pairs = [m.split(" ") if isinstance(m, str) else m for m in tokenizer["model"]["merges"]]
    merges = [" ".join(pair) for pair in pairs]
    ids = {token: id for id, token in tokens.items()}
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    rope = rope.get("full_attention", rope)
    result = {
        "general.architecture": architecture,
        "general.name": source.name,
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": config.get("num_key_value_heads", heads),
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE["qwen" if tokenizer["normalizer"] else "llama"],
        "tokenizer.ggml.tokens": [tokens.get(id, f"[PAD{id}]") for id in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids[tokenizer_config["eos_token"]],
    }
    if config.get("head_dim"):
        result[f"{architecture}.attention.key_length"] = config["head_dim"]
        result[f"{architecture}.attention.value_length"] = config["head_dim"]
    if architecture == "qwen35":
        rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
        values = config["linear_num_value_heads"]
        result |= {
            "qwen35.rope.dimension_count": rotated,
            "qwen35.rope.dimension_sections": [*rope["mrope_section"], 0],
            "qwen35.full_attention_interval": 1 + config["layer_types"].index("full_attention"),
            "qwen35.ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "qwen35.ssm.state_size": config["linear_key_head_dim"],
            "qwen35.ssm.group_count": config["linear_num_key_heads"],
            "qwen35.ssm.time_step_rank": values,
            "qwen35.ssm.inner_size": values * config["linear_value_head_dim"],
        }
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        result[f"{architecture}.expert_count"] = experts
        result[f"{architecture}.expert_used_count"] = config["num_experts_per_tok"]
    if "moe_intermediate_size" in config:
        width = config["moe_intermediate_size"]
        result[f"{architecture}.expert_feed_forward_length"] = width
    if architecture == "maple":
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        result |= {
            "maple.attention.sliding_window": config["sliding_window"],
            "maple.attention.sliding_window_pattern": kinds,
            "maple.rope.dimension_count": int(config["head_dim"] * config["partial_rotary_factor"]),
            "maple.swiglu_clamp_exp": [7.0] * len(kinds),
        }
    if not config["architectures"][0].endswith("ForCausalLM"):
        result[f"{architecture}.pooling_type"] = 3  # the last token
    if architecture == "gemma3":
        ranks = {"".join(m): -float(rank) for rank, m in reversed([*enumerate(pairs)])}
        names = result["tokenizer.ggml.tokens"]
        octet = re.compile("<0x[0-9A-F]{2}>")
        kinds = [6 if octet.fullmatch(name) else kind for name, kind in zip(names, kinds)]
        kinds[names.index("<unk>")] = 2
        result |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": [ranks.get(name, 0.0) for name in names],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": False,
            "gemma3.attention.sliding_window": config["sliding_window"],
            "gemma3.attention.query_pre_attn_scalar": config["query_pre_attn_scalar"],
        }
        del result["tokenizer.ggml.merges"]
    if adds_eos(tokenizer):
        result["tokenizer.ggml.add_eos_token"] = True
    bos = tokenizer_config.get("bos_token")
    if bos:
        result["tokenizer.ggml.bos_token_id"] = ids[bos]
    result["tokenizer.ggml.add_bos_token"] = bool(bos)
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type") == "yarn":
        original = scaling["original_max_position_embeddings"]
        result[f"{architecture}.rope.scaling.type"] = "yarn"
        result[f"{architecture}.rope.scaling.factor"] = float(scaling["factor"])
        result[f"{architecture}.rope.scaling.original_context_length"] = original
    template = tokenizer_config.get("chat_template")
    if (source / "chat_template.jinja").exists():
        template = (source / "chat_template.jinja").read_text()
    if template:
        result["tokenizer.chat_template"] = template
    return config, result


def is_in_groups(name, array, architecture):
    """Returns whether a matrix of floats is ternary, with a scale for each group of columns."""
    floats = ("in_proj_a.weight", "in_proj_b.weight", "conv1d.weight")
    has_groups = architecture in ("qwen2", "qwen3", "qwen35", "qwen3moe", "maple", "llama")
    floats += ("mlp.gate.weight", "block_sparse_moe.gate.weight")
    return has_groups and array.ndim == 2 and not name.endswith(floats)


def write_checkpoint(source, path, layout, architecture):
    kind, pack = ALL_LAYOUTS[layout]
    config, metadata = metadata_of(source, architecture)
    direction = (config.get("quantization_config") or {}).get("linear_class", "bitlinear")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    import ml_dtypes  # noqa: F401  (numpy reads bf16 with it)

    weights = {}
    for file in sorted(source.glob("model*.safetensors")):
        weights |= load_file(file)
    weights = dict(sorted(weights.items(), key=lambda item: expert_of(item[0])))
    if "embed_tokens.weight" in weights:
        weights = {f"model.{name}": array for name, array in weights.items()}
    tensors = []
    for name, array in weights.items():
        if name.endswith("weight_scale"):
            continue
        if architecture == "qwen35":
            array = converted_qwen35(name, array, config)
        if name.removesuffix("weight") + "norm.weight" in weights:
            codes, scale = rounded(array.astype(np.float32))
            tensors.append((gguf_name(name, architecture), codes.shape, kind, pack(codes, scale)))
            continue
        if array.dtype == np.uint8:
            scale = weights[name + "_scale"].astype(np.float32).reshape(-1)[0]
            scale = scale if direction == "autobitlinear" else np.float32(1) / scale
            codes = unpack(array)
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                codes = interleave(codes, head_dim)
            tensors.append((gguf_name(name, architecture), codes.shape, kind, pack(codes, scale)))
        elif is_in_groups(name, array, architecture) and hasattr(pack, "group"):
            groups = array.astype(np.float32).reshape(-1, pack.group)
            codes = (np.sign(groups) + 1).astype(np.uint8).reshape(array.shape)
            scales = abs(groups).max(1)
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                codes = interleave(codes, head_dim)
                scales = interleave(scales.reshape(len(codes), -1), head_dim).reshape(-1)
            packed = pack(codes, scales)
            tensors.append((gguf_name(name, architecture), array.shape, kind, packed))
        elif array.ndim == 1:
            if architecture == "gemma3" and not name.endswith("_proj.norm.weight"):
                array = array.astype("<f4") + np.float32(1)
            data = array.astype("<f4").tobytes()
            tensors.append((gguf_name(name, architecture), array.shape, 0, data))
        else:
            if "ffn_gate_inp" in gguf_name(name, architecture):
                array = array.astype("<f4")
            kinds = {"bfloat16": 30, "float16": 1, "float32": 0}
            number = kinds[array.dtype.name]
            tensors.append((gguf_name(name, architecture), array.shape, number, array.tobytes()))
    write_file(path, metadata, list(merged(tensors, architecture)))


def expert_of(name):
    """Returns the number of the expert that a tensor belongs to, or 0 if it belongs to none."""
    number = re.search(r"experts\.(\d+)", name)
    return int(number[1]) if number else 0


def merged(tensors, architecture):
    """Brings the matrices of the experts of each layer into the form of the architecture."""
    experts = {}
    for name, *tensor in tensors:
        experts.setdefault(name, []).append(tensor)
    for name, parts in experts.items():
        if architecture == "llama" and "_exps" in name:
            for expert, part in enumerate(parts):
                yield name.replace("_exps", f".{expert}"), *part
        elif architecture == "qwen3moe" and "ffn_gate_exps" in name:
            ups = experts[name.replace("gate", "up")]
            pairs = [one_below((gate, up)) for gate, up in zip(parts, ups, strict=True)]
            yield name.replace("gate", "gate_up"), *in_one(pairs)
        elif architecture != "qwen3moe" or "ffn_up_exps" not in name:
            yield name, *(in_one(parts) if "_exps" in name else parts[0])


def one_below(parts):
    """Puts matrices one below the other."""
    rows = sum(shape[0] for shape, _, _ in parts)
    return (rows, parts[0][0][1]), parts[0][1], b"".join(data for _, _, data in parts)


def in_one(parts):
    """Puts matrices of one shape into a tensor."""
    shape, kind, _ = parts[0]
    return (len(parts), *shape), kind, b"".join(data for _, _, data in parts)


def write_fixtures(target):
    """Writes a tensor `t` of 32 x 256 weights in every layout, and floats with their values."""
    row, column = np.indices((32, 256))
    codes = ((row * 7 + column * column + column // 5) % 3).astype(np.uint8)
    for layout, (kind, pack) in ALL_LAYOUTS.items():
        own = np.where(codes == 1, 2, codes) if layout == "q1_0" else codes
        tensor = ("t", own.shape, kind, pack(own, 0.375))
        write_file(target / f"{layout}.gguf", {}, [tensor])
    random = np.random.default_rng(1)
    tensors = []
    for kind in (Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K):
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (512 // weights, size), dtype=np.uint8)
        # A scale in half precision that is neither infinite nor NaN.
        places = {Type.Q4_K: (0, 2), Type.Q6_K: (208,)}.get(kind, (0,))
        for place in places:
            scale = random.normal(size=len(blocks)).astype(np.float16)
            blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
        values = gguf.quants.dequantize(blocks, kind).astype("<f4").reshape(2, 256)
        name = kind.name.lower()
        tensors.append((name, (2, 256), kind.value, blocks.tobytes()))
        tensors.append((f"{name}.values", (2, 256), 0, values.tobytes()))
    write_file(target / "floats.gguf", {}, tensors)


def main():
    source, target, *layouts = sys.argv[1:]
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    if source == Path("fixtures"):
        return write_fixtures(target)
    model_type = json.loads((source / "config.json").read_text())["model_type"]
    architecture = ARCHITECTURES.get(model_type, model_type)
    for layout in layouts or LAYOUTS:
        path = target / f"{source.name}-{layout}.gguf"
        write_checkpoint(source, path, layout, architecture)
        print(path)


if __name__ == "__main__":
    main()
