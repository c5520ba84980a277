#!/usr/bin/env python3
"""Writes a ternary checkpoint of Hugging Face as an SGLBITNT `.bin` file, in both variants.

    pip install ml_dtypes numpy safetensors
    python tests/bin/write.py fixtures tests/bin/fixtures     # small tensors in both variants
    cp tests/bin/fixtures/a.bin fuzz/corpus/bin/variant_a     # and b.bin as variant_b
    python tests/bin/write.py model fuzz/corpus/bin/model     # the smallest model
    python tests/bin/write.py tests/fixtures/bitnet-blocks FILE.bin a
    python tests/bin/write.py tests/fixtures/bitnet-blocks FILE.bin b --pack-lm-head
    for name in bitnet-blocks/a llama-blocks/b llama-float-modules/a bitnet-masters-bf16/b
    do
        folder=tests/fixtures/${name%/*}
        python tests/bin/write.py $folder $folder/${name%/*}-${name#*/}.bin ${name#*/}
    done
    folder=tests/fixtures/bitnet-blocks
    python tests/bin/write.py $folder $folder/bitnet-blocks-b-head.bin b --pack-lm-head

Variant a writes a scale only where has_scale is 1; variant b writes four bytes always. The format
is written here from its description alone: nothing is shared with Sterna's reader.
"""

import json
import struct
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (numpy reads bf16 with it)
import numpy as np
from safetensors.numpy import load_file

BLOCK = 128
NUMBERS = {"float32": 1, "float16": 2, "bfloat16": 3}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def interleave(codes):
    """Packs codes [rows, columns] in 0..2: byte j of a block has weights j, j + 32, ..."""
    rows, columns = codes.shape
    padding = -columns % BLOCK
    codes = np.pad(codes, ((0, 0), (0, padding)), constant_values=1)
    blocks = codes.reshape(rows, -1, 4, 32).astype(np.uint8)
    packed = np.zeros((rows, blocks.shape[1], 32), np.uint8)
    for run in range(4):
        packed |= blocks[:, :, run, :] << (6 - 2 * run)
    return packed.reshape(rows, -1)


def unpack(packed):
    """Codes of the packed U8 layout: bits 2i of byte (j, c) are row i * rows / 4 + j."""
    return np.concatenate([packed >> (2 * i) & 3 for i in range(4)])


def quantize(values):
    """Makes float weights ternary. Returns codes and the scale, in single precision."""
    values = values.astype(np.float32)
    mean = np.float32(np.abs(values).astype(np.float64).mean())
    factor = np.float32(1) / max(mean, np.float32(1e-5))
    codes = np.clip(np.rint(values * factor), -1, 1).astype(np.int8) + 1
    return codes.astype(np.uint8), np.float32(1) / factor


def entry(name, number, array, scale, variant):
    result = struct.pack("<I", len(name)) + name.encode()
    result += struct.pack(f"<II{array.ndim}I", number, array.ndim, *array.shape)
    result += struct.pack("<I", scale is not None)
    if scale is not None or variant == "b":
        result += struct.pack("<f", scale or 0)
    data = array.tobytes()
    return result + struct.pack("<Q", len(data)) + data


def write_file(path, config, tensors, variant):
    """Writes a file. `tensors` are (name, dtype number, array, scale or None)."""
    config = config.encode()
    head = b"SGLBITNT" + struct.pack("<II", 1, len(config)) + config
    head += struct.pack("<I", len(tensors))
    path.write_bytes(head + b"".join(entry(*tensor, variant) for tensor in tensors))


def write_checkpoint(source, path, variant, pack_head):
    config = (source / "config.json").read_text()
    weights = load_file(source / "model.safetensors")
    is_online = json.loads(config)["quantization_config"].get("quantization_mode") == "online"
    tensors = []
    for name, array in weights.items():
        module = name.split(".")[-2]
        if array.dtype == np.uint8:
            scale = weights[name + "_scale"].astype(np.float32).reshape(-1)[0]
            tensors.append((name, 0, interleave(unpack(array)), scale))
        elif is_online and module in PROJECTIONS and array.ndim == 2:
            codes, scale = quantize(array)
            tensors.append((name, 0, interleave(codes), scale))
        else:  # Scales stay as tensors of their own too, as the original converter leaves them.
            tensors.append((name, NUMBERS[array.dtype.name], array, None))
    if pack_head:
        codes, scale = quantize(weights["model.embed_tokens.weight"])
        tensors.append(("lm_head.weight", 0, interleave(codes), scale))
    write_file(path, config, tensors, variant)


def write_fixtures(target):
    row, column = np.indices((8, 256))
    codes = ((row * 7 + column * column + column // 5) % 3).astype(np.uint8)
    tensors = [
        ("a.weight", 0, interleave(codes), 0.375),
        ("b.weight", 1, np.array([1, 2, 3], np.float32), None),
        ("c.weight", 2, np.array([[1, 2], [3, 4]], np.float16), None),
        ("d.weight", 0, interleave(codes[:, :100]), 0.75),
        ("e.weight", 3, np.array([5], ml_dtypes.bfloat16), None),
    ]
    for variant in "ab":
        write_file(target / f"{variant}.bin", '{"model_type": "bitnet"}', tensors, variant)


def write_model(path):
    """Writes the smallest model, with a ternary head of its own."""
    size, vocab = 16, 8
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "rope_theta": 10000.0,
    }
    row, column = np.indices((size, size))
    packed = interleave((row * 5 + column * column) % 3)
    ones = np.ones(size, np.float16)
    layer = "model.layers.0."
    norms = ("model.norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors = [(f"{name}.weight", 2, ones, None) for name in norms]
    for module in PROJECTIONS:
        part = "self_attn" if module in PROJECTIONS[:4] else "mlp"
        tensors.append((f"{layer}{part}.{module}.weight", 0, packed, 0.5))
    embedding = (row[:vocab] * 3 % 7 + column[:vocab] % 5 - 5).astype(np.float16)
    tensors.append(("model.embed_tokens.weight", 2, embedding, None))
    tensors.append(("lm_head.weight", 0, packed[:vocab], 0.25))
    write_file(path, json.dumps(config), tensors, "a")


def main():
    source, target, *options = sys.argv[1:]
    source, target = Path(source), Path(target)
    if source == Path("fixtures"):
        return write_fixtures(target)
    if source == Path("model"):
        return write_model(target)
    write_checkpoint(source, target, options[0], "--pack-lm-head" in options)


if __name__ == "__main__":
    main()
