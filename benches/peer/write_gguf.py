"""Writes a GGUF file with random ternary weights in the shape of a checkpoint, for llama.cpp.

The file has the shape, the tokenizer and the chat template of the checkpoint in --model, which
`sterna synthesize` writes. So both engines count the same tokens. The architecture is llama.cpp's
`bitnet`. It has the same matrices and sub-norms as BitNet b1.58 2B-4T, except that it uses SiLU
where the model squares a ReLU. The embedding is also the lm_head. It is Q6_K, as llama-quantize
stores it for both types.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

TYPES = {"tq2_0": Type.TQ2_0, "q4_0": Type.Q4_0}

# llama.cpp's name for the demo's pre-tokenizer expression.
PRE_TOKENIZER = "qwen2"


def main():
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    flags.add_argument("--type", choices=TYPES, required=True, help="type of the ternary matrices")
    flags.add_argument("--seed", type=int, default=1, help="seed of the weights")
    flags.add_argument("out", type=Path, help="GGUF file to write")
    args = flags.parse_args()

    config = read(args.model / "config.json")
    writer = gguf.GGUFWriter(args.out, "bitnet", use_temp_file=False)
    write_shape(writer, config)
    write_tokenizer(writer, args.model, config)
    write_tensors(writer, config, TYPES[args.type], np.random.default_rng(args.seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- metadata


def write_shape(writer, config):
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("random ternary weights")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


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


# ---------------------------------------------------------------- weights


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
