"""Writes a GGUF file with random ternary weights in the shape of a checkpoint, for llama.cpp.

The file has the shape, the tokenizer and the chat template of the checkpoint in --model, which
`sterna synthesize` writes. So both engines count the same tokens. The class of the checkpoint
decides the architecture:

- BitNet b1.58 2B-4T: llama.cpp's `bitnet`, with random weights of its own. It has the same matrices
  and sub-norms, except that it uses SiLU where the model squares a ReLU. The embedding is also the
  lm_head. It is Q6_K, as llama-quantize stores it for both types.
- Bonsai 2 2B (Qwen 3.5): llama.cpp's `qwen35`, with the weights of the checkpoint. All ternary
  matrices have the type --type, also the embedding, which is the lm_head too. Nothing is rounded.
  The weights are not rotated, because this llama.cpp does not know rotations.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

TYPES = {"tq2_0": Type.TQ2_0, "q2_0": Type.Q2_0, "q4_0": Type.Q4_0}

BITNET, QWEN3_5 = "BitNetForCausalLM", "Qwen3_5ForCausalLM"

# llama.cpp's name for the demo's pre-tokenizer expression.
PRE_TOKENIZER = "qwen2"

# How Qwen 3.5 shares the rotated values of a head among time, height and width. llama.cpp requires
# the key. The three positions of a text are equal, so that it changes nothing.
TEXT_SECTIONS = [11, 11, 10, 0]


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    flags.add_argument("--type", choices=TYPES, required=True, help="type of the ternary matrices")
    flags.add_argument("--seed", type=int, default=1, help="seed of the weights")
    flags.add_argument("out", type=Path, help="GGUF file to write")
    args = flags.parse_args()

    config = read(args.model / "config.json")
    (architecture,) = config["architectures"]
    names = {BITNET: "bitnet", QWEN3_5: "qwen35"}
    writer = gguf.GGUFWriter(args.out, names[architecture], use_temp_file=False)
    write_shape(writer, config)
    write_tokenizer(writer, args.model, config)
    if architecture == BITNET:
        write_tensors(writer, config, TYPES[args.type], np.random.default_rng(args.seed))
    else:
        write_recurrent_shape(writer, config)
        write_checkpoint(writer, args.model, config, TYPES[args.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- metadata


def write_shape(writer, config):
    head_dim = config["head_dim"]
    rotary = config.get("rope_parameters", {}).get("partial_rotary_factor", 1)
    writer.add_name("random ternary weights")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rotary))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def write_recurrent_shape(writer, config):
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    key_heads = config["linear_num_key_heads"]
    assert value_heads == key_heads, "GGUF orders value heads otherwise if there are more of them"
    writer.add_recurrent_layers([kind == "linear_attention" for kind in config["layer_types"]])
    writer.add_rope_dimension_sections(TEXT_SECTIONS)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * value_dim)


def write_tokenizer(writer, model, config):
    tokenizer = read(model / "tokenizer.json")
    settings = read(model / "tokenizer_config.json")
    tokens = [None] * config["vocab_size"]
    types = [gguf.TokenType.NORMAL] * config["vocab_size"]
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token] = text
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        is_special = added["special"]
        kind = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
        types[added["id"]] = kind
    assert None not in tokens, "the checkpoint's tokenizer has a token for each id"
    merges = tokenizer["model"]["merges"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_add_bos_token(False)  # The chat template contains it.
    writer.add_chat_template(settings["chat_template"])


# ---------------------------------------------------------------- weights of a checkpoint


def write_checkpoint(writer, model, config, ternary):
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, layers)
    for name, tensor in read_tensors(model / "model.safetensors"):
        known = name.replace(".dt_bias", ".dt_proj.bias")
        gguf_name = names.get_name(known, (".weight", ".bias"))
        assert gguf_name, f"llama.cpp has no name for the tensor {name}"
        is_gate = name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))
        if tensor.ndim == 2 and not is_gate:
            parts = np.array_split(tensor, 32)  # The floats of a whole embedding take 2 GB.
            data = np.vstack([ternary_rows(floats(part), ternary) for part in parts])
            writer.add_tensor(gguf_name, data, raw_dtype=ternary)
            continue
        values = floats(tensor)
        if name.endswith(".A_log"):
            values = -np.exp(values)
        elif name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            values = values + np.float32(1)
        writer.add_tensor(gguf_name, values.squeeze())


def read_tensors(path):
    """Yields the names and values of a file's tensors. BF16 values are u16."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8:start])).items():
        begin, end = entry["data_offsets"]
        dtype = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
        yield name, data[start + begin : start + end].view(dtype).reshape(entry["shape"])


def floats(tensor):
    """Returns the values of a tensor whose BF16 values are u16."""
    if tensor.dtype == np.float32:
        return tensor
    return (tensor.astype(np.uint32) << 16).view(np.float32)


def ternary_rows(values, kind):
    """Returns rows of ternary values as bytes of blocks, without rounding."""
    blocks = values.reshape(-1, gguf.GGML_QUANT_SIZES[kind][0])
    scale = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float16)
    codes = np.sign(blocks).astype(np.int8)
    assert (codes * scale.astype(np.float32) == blocks).all(), "the weights are not ternary"
    pack = {Type.Q2_0: packed_q2_0, Type.Q4_0: packed_q4_0}[kind]
    return np.hstack([scale.view(np.uint8), pack(codes)]).reshape(len(values), -1)


def packed_q2_0(codes):
    """Returns codes in bytes of four neighbours, each 2 bits (weight + 1)."""
    fours = (codes + 1).astype(np.uint8).reshape(len(codes), -1, 4)
    return fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6


def packed_q4_0(codes):
    """Returns codes in bytes of two, each 4 bits (weight + 8). The upper bits belong to the second
    half of the block."""
    low, high = np.split((codes + 8).astype(np.uint8), 2, axis=1)
    return low | high << 4


# ---------------------------------------------------------------- random weights


def write_tensors(writer, config, ternary, rng):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    matrices = {
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {
        "attn_norm": hidden,
        "attn_sub_norm": hidden,
        "ffn_norm": hidden,
        "ffn_sub_norm": inner,
    }
    blocks = {Type.TQ2_0: tq2_0, Type.Q4_0: q4_0}[ternary]
    embedding = matrix(q6_k, 256, (config["vocab_size"], hidden), rng)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=Type.Q6_K)
    for layer in range(config["num_hidden_layers"]):
        for name, length in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(length, np.float32))
        for name, shape in matrices.items():
            data = matrix(blocks, gguf.GGML_QUANT_SIZES[ternary][0], shape, rng)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=ternary)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))


def matrix(blocks, block, shape, rng):
    """Returns the rows of a matrix of random blocks, as bytes."""
    rows, columns = shape
    assert columns % block == 0, f"{columns} columns are not a multiple of the block size {block}"
    return blocks(rows * columns // block, rng).reshape(rows, -1)


def scales(count, value):
    return np.full((count, 1), value, np.float16).view(np.uint8)


def tq2_0(count, rng):
    """Returns blocks of 256 weights: 64 bytes of four 2-bit codes (weight + 1), an f16 scale."""
    digits = np.indices((3, 3, 3, 3)).reshape(4, -1)
    bytes_of_four = (digits * [[1], [4], [16], [64]]).sum(axis=0).astype(np.uint8)
    codes = bytes_of_four[rng.integers(0, 81, (count, 64), np.uint8)]
    return np.hstack([codes, scales(count, 1 / 32)])


def q4_0(count, rng):
    """Returns blocks of 32 weights: an f16 scale, 16 bytes of two 4-bit codes (weight + 8)."""
    digits = np.indices((3, 3)).reshape(2, -1) + 7
    bytes_of_two = (digits * [[1], [16]]).sum(axis=0).astype(np.uint8)
    codes = bytes_of_two[rng.integers(0, 9, (count, 16), np.uint8)]
    return np.hstack([scales(count, 1 / 32), codes])


def q6_k(count, rng):
    """Returns blocks of 256 values: 128 bytes of low bits and 64 bytes of high bits, 16 i8 scales,
    and an f16 scale of these scales."""
    bits = rng.integers(0, 256, (count, 192), np.uint8)
    return np.hstack([bits, np.ones((count, 16), np.uint8), scales(count, 1 / 1024)])


if __name__ == "__main__":
    main()
