"""Trains the demo model: a small BitNet b1.58 transformer with quantisation-aware training.

    python train.py train --minutes 110 --work DIR --compile [--resume CHECKPOINT]
    python train.py eval DIR/checkpoint.pt --work DIR
    python train.py export DIR/checkpoint.pt --work DIR --out ../../src/demo
    python train.py heldout
    python train.py sample

The model learns two things at once: to predict the next token, and to fill the masked tokens of a
block that it sees as a whole. So its weights answer token by token, draft blocks for themselves,
and diffuse blocks (Fast-dLLM v2, arXiv:2509.26328; the joint loss is that of tri-mode models).

`eval` answers the held-out questions token by token and in blocks, and prints the perplexity of the
answers and how many tokens a draft of several lengths brings. `export` writes packed weights, the
tokenizer and the template in Hugging Face layout, and heldout.json beside this script. `heldout`
writes only heldout.json. `sample` prints some training chats.

It needs torch, numpy, tokenizers and safetensors. On Linux, set MALLOC_MMAP_THRESHOLD_=33554432 and
MALLOC_TRIM_THRESHOLD_=8589934592: if memory is kept between steps, a step is several times faster.

The data depend only on the seeds below. The learning rate follows the clock, so a run of any length
ends with an annealed model. `--device cuda` trains in one process on a GPU.
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import corpus

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2048, 256, 6, 8, 2, 32, 768
MAX_POSITION, THETA, EPS = 1024, 10000.0, 1e-5
ROW = 256  # Tokens in a training row; whole chats are packed into rows.
BLOCKS = (4, 8, 16, 32)  # The sizes of masked blocks, and the largest is the one of answers.
BLOCK, SUB_BLOCK, THRESHOLD = 32, 8, 0.9
MASKED_WEIGHT = 0.5  # Of the loss of masked tokens, beside 1 for the next token.
PEAK_LR, WARM_UP_STEPS, WEIGHT_DECAY = 2e-3, 150, 0.05
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "|<MASK>|"] + [
    f"<|reserved_special_token_{i}|>" for i in range(1, 5)
]
BOS, END, EOT, MASK = (VOCAB - len(SPECIAL) + i for i in range(4))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize + ':\\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)

# ---------------------------------------------------------------- tokenizer


def train_tokenizer():
    """Trains a byte-level BPE with the Llama 3 pattern, except that each digit is a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = []
    for system, chat in corpus.training_chats(60_000, seed=7):
        texts += (
            ["User:\n", "Assistant:\n", "System:\n"]
            + ([system] if system else [])
            + [text for pair in chat for text in pair]
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = VOCAB - len(SPECIAL) - tokenizer.get_vocab_size()
    assert missing == 0, f"{missing} merges short"
    tokenizer.add_special_tokens(SPECIAL)
    assert [tokenizer.token_to_id(t) for t in SPECIAL[:3]] == [BOS, END, EOT]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A",
        pair=f"{SPECIAL[0]} $A {SPECIAL[0]} $B",
        special_tokens=[(SPECIAL[0], BOS)],
    )
    return tokenizer


def load_tokenizer(work):
    from tokenizers import Tokenizer

    path = Path(work) / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def encode_chats(tokenizer, chats):
    """Yields the token ids of each chat, and a mask of the tokens that the model must write."""
    texts = {}
    for system, chat in chats:
        for text in ([system] if system else []) + [text for pair in chat for text in pair]:
            texts.setdefault(text.strip(), len(texts))
    ids = [e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    role = {
        r: tokenizer.encode(r + ":\n", add_special_tokens=False).ids
        for r in ("System", "User", "Assistant")
    }
    for system, chat in chats:
        tokens, mask = [BOS], [0]

        def put(who, text, write):
            body = ids[texts[text.strip()]] + [EOT]
            tokens.extend(role[who] + body)
            mask.extend([0] * len(role[who]) + [write] * len(body))

        if system:
            put("System", system, 0)
        for user, assistant in chat:
            put("User", user, 0)
            put("Assistant", assistant, 1)
        yield tokens, mask


def pack(encoded):
    """Packs whole chats into rows.

    Returns the tokens, the mask and the number of the chat in its row (0 is padding).
    """
    pool, rows = [], []
    source = iter(encoded)
    while True:
        while len(pool) < 256 and (chat := next(source, None)):
            if len(chat[0]) <= ROW:
                pool.append(chat)
        if not pool:
            break
        tokens, mask, doc, n = (
            np.full(ROW, END, np.uint16),
            np.zeros(ROW, np.uint8),
            np.zeros(ROW, np.uint8),
            0,
        )
        number = 1
        first = True
        while True:
            room = ROW - n
            at = (
                0
                if first
                else max(
                    (i for i in range(len(pool)) if len(pool[i][0]) <= room),
                    key=lambda i: len(pool[i][0]) if room < 100 else -i,
                    default=None,
                )
            )
            if at is None or not pool:
                break
            first = False
            t, m = pool.pop(at)
            tokens[n : n + len(t)], mask[n : n + len(t)], doc[n : n + len(t)] = t, m, number
            n, number = n + len(t), number + 1
            if not pool:
                break
        rows.append((tokens, mask, doc))
    return [np.stack(column) for column in zip(*rows)]


def build_rows(tokenizer, n, seed, banned, work):
    """Returns the packed rows of n chats. A file in `work` caches them."""
    path = Path(work) / f"rows-{n}-{seed}.npz"
    if path.exists():
        data = np.load(path)
        return [data["tokens"], data["mask"], data["doc"]]
    parts = [
        pack(
            encode_chats(
                tokenizer,
                corpus.training_chats(min(50_000, n - i), seed * 1000 + i // 50_000, banned),
            )
        )
        for i in range(0, n, 50_000)
    ]
    columns = [np.concatenate(c) for c in zip(*parts)]
    np.savez(path, tokens=columns[0], mask=columns[1], doc=columns[2])
    return columns


# ---------------------------------------------------------------- model


class Ternary(torch.autograd.Function):
    """Computes BitLinear for several stacked matrices that share their input.

    Gradients pass straight through both roundings.
    """

    @staticmethod
    def forward(ctx, x, dtype, *weights):
        scales = [w.abs().mean().clamp(min=1e-5) for w in weights]
        codes = torch.cat([(w / s).round().clamp(-1, 1).to(dtype) for w, s in zip(weights, scales)])
        rows = torch.cat([s.expand(w.shape[0]) for w, s in zip(weights, scales)])
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-5).float() / 127
        # Whole numbers up to 128 are exact in bf16.
        q = (x / step).round().clamp(-128, 127).to(dtype)
        y = F.linear(q, codes)
        ctx.save_for_backward(q, step, codes, rows)
        ctx.sizes = [w.shape[0] for w in weights]
        return (y.float() * step * rows).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        q, step, codes, rows = ctx.saved_tensors
        grad = grad.float()
        dx = F.linear((grad * rows).to(q.dtype), codes.t())
        dw = (grad * step).to(q.dtype).flatten(0, -2).t() @ q.flatten(0, -2)
        return (dx.float(), None) + tuple(dw.float().split(ctx.sizes))


def norm(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()

        def matrix(out, inp):
            return nn.Parameter(torch.randn(out, inp) * 0.02)

        self.q, self.k, self.v = (
            matrix(HEADS * HEAD_DIM, HIDDEN),
            matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        )
        self.o = matrix(HIDDEN, HEADS * HEAD_DIM)
        self.gate, self.up, self.down = (
            matrix(INTERMEDIATE, HIDDEN),
            matrix(INTERMEDIATE, HIDDEN),
            matrix(HIDDEN, INTERMEDIATE),
        )
        self.input_norm = nn.Parameter(torch.ones(HIDDEN))
        self.post_norm = nn.Parameter(torch.ones(HIDDEN))
        self.attn_norm = nn.Parameter(torch.ones(HEADS * HEAD_DIM))
        self.ffn_norm = nn.Parameter(torch.ones(INTERMEDIATE))

    def forward(self, x, cos, sin, allowed, dtype: torch.dtype):
        b, t, _ = x.shape
        qkv = Ternary.apply(norm(x, self.input_norm), dtype, self.q, self.k, self.v)
        q, k, v = qkv.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
        q = rotate(q.view(b, t, HEADS, HEAD_DIM).transpose(1, 2), cos, sin)
        k = rotate(k.view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2), cos, sin).repeat_interleave(
            HEADS // KV_HEADS, 1
        )
        v = v.view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2).repeat_interleave(HEADS // KV_HEADS, 1)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        a = a.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM)
        x = x + Ternary.apply(norm(a, self.attn_norm), dtype, self.o).float()
        gate, up = Ternary.apply(norm(x, self.post_norm), dtype, self.gate, self.up).chunk(2, -1)
        return (
            x
            + Ternary.apply(
                norm(F.relu(gate.float()).square() * up.float(), self.ffn_norm), dtype, self.down
            ).float()
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, tokens, allowed=None, positions=None, dtype=torch.float32):
        """Returns the hidden states. `allowed` says which tokens each token sees: all up to its
        own by default."""
        t, device = tokens.shape[1], tokens.device
        if positions is None:
            positions = torch.arange(t, device=device)
        if allowed is None:
            allowed = torch.ones(t, t, dtype=torch.bool, device=device).tril()[None, None]
        rates = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        angle = positions[:, None] * rates
        cos, sin = (torch.cat([part] * 2, -1).to(dtype) for part in (angle.cos(), angle.sin()))
        allowed = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill(
            ~allowed, -1e9
        )
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x, cos, sin, allowed, dtype)
        return norm(x, self.final_norm)

    def logits(self, hidden):
        return hidden @ self.embed.t()


def causal(doc):
    """Returns which tokens each token of a packed row sees: those of its chat up to its own."""
    t = doc.shape[1]
    same = doc[:, None, :, None] == doc[:, None, None, :]
    return same & torch.ones(t, t, dtype=torch.bool, device=doc.device).tril()


def step_loss(model, tokens, mask, doc, dtype):
    """Returns the mean loss over the tokens that the assistant writes."""
    hidden = model(tokens[:, :-1], causal(doc[:, :-1]), dtype=dtype)
    return next_token_loss(model, hidden, tokens[:, 1:], mask[:, 1:].float(), dtype)


def next_token_loss(model, hidden, wanted, weight, dtype):
    """Returns the mean loss of the tokens `wanted`, each with its weight."""
    logits = F.linear(hidden.to(dtype), model.embed.to(dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (loss * weight.flatten()).sum() / weight.sum().clamp(min=1)


def joint_loss(model, tokens, mask, doc, dtype):
    """Returns the loss of the next token, and the loss of the masked tokens of blocks.

    The sequence is two noisy copies of a row and then the row itself, all at the same positions.
    The copies mask complementary parts of the answers. A noisy token sees its block and the row
    before its block; the row itself is causal. The token at i predicts the one at i + 1 everywhere,
    so a draft can begin with the last known token.

    In half of the blocks, one copy masks all tokens except the first: these are drafts. In the
    others, it masks a random share. The end of an answer is masked in both copies.
    """
    b, t = tokens.shape
    device, at = tokens.device, torch.arange(t, device=tokens.device)
    size = BLOCKS[torch.randint(len(BLOCKS), ()).item()]
    # Blocks begin anywhere, because drafts do.
    block = (at + torch.randint(size, (b, 1), device=device)) // size
    is_first = F.pad(block[:, 1:] != block[:, :-1], (1, 0), value=True)
    count = t // size + 2
    share = torch.rand(b, count, device=device).clamp(min=1e-3).gather(1, block)
    is_draft = (torch.rand(b, count, device=device) < 0.5).gather(1, block)
    noisy = torch.where(is_draft, ~is_first, torch.rand(b, t, device=device) < share)
    answer = mask.bool()
    masked = [(part | (tokens == EOT)) & answer for part in (noisy, ~noisy)]
    copies = [torch.where(part, MASK, tokens) for part in masked]
    same_chat = doc[:, :, None] == doc[:, None, :]
    same_block = same_chat & (block[:, :, None] == block[:, None, :])
    earlier = same_chat & (block[:, :, None] > block[:, None, :])
    none = torch.zeros_like(same_chat)
    clean = same_chat & (at[:, None] >= at[None, :])
    allowed = torch.cat(
        [
            torch.cat([same_block, none, earlier], -1),
            torch.cat([none, same_block, earlier], -1),
            torch.cat([none, none, clean], -1),
        ],
        1,
    )
    hidden = model(torch.cat([*copies, tokens], 1), allowed[:, None], at.repeat(3), dtype)
    wanted = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    has_next = answer[:, 1:]
    leaves = is_first[:, 1:]  # The next token is in another block, which a noisy token cannot see.
    next_of = lambda part: F.pad(part, (0, 1)).float()  # noqa: E731
    weights = [next_of((part[:, 1:] | leaves) & has_next) for part in masked]
    ahead = next_token_loss(model, hidden[:, 2 * t :], wanted, next_of(has_next), dtype)
    in_blocks = next_token_loss(
        model, hidden[:, : 2 * t], wanted.repeat(1, 2), torch.cat(weights, 1), dtype
    )
    return ahead, in_blocks


# ---------------------------------------------------------------- training


def train(args):
    """Trains with several processes, which average their gradients in shared memory once a step."""
    work = Path(args.work or args.out)
    work.mkdir(parents=True, exist_ok=True)
    build_rows(
        load_tokenizer(work),
        args.chats,
        args.seed,
        corpus.banned_questions(corpus.held_out()),
        work,
    )
    torch.manual_seed(1)
    size = sum(p.numel() for p in Model().parameters())
    if args.device != "cpu":
        args.processes = 1
    shared = torch.zeros(args.processes, size).share_memory_()
    clock = torch.zeros(2, dtype=torch.float64).share_memory_()
    torch.multiprocessing.spawn(
        train_process,
        (
            args,
            work,
            shared,
            clock,
            torch.multiprocessing.get_context("spawn").Barrier(args.processes),
        ),
        args.processes,
    )


def train_process(rank, args, work, shared, clock, barrier):
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    columns = build_rows(None, args.chats, args.seed, None, work)
    model = Model().to(args.device)
    if args.resume:
        model.load_state_dict(torch.load(args.resume)["model"])
    parameters = list(model.parameters())
    columns = [torch.from_numpy(c.astype(np.int16)).to(args.device) for c in columns]
    if rank == 0:
        print(
            f"{shared.shape[1]} parameters, {len(columns[0])} rows, "
            f"{(columns[2] > 0).float().mean():.3f} full, {columns[1].float().mean():.3f} to write",
            flush=True,
        )
    groups = [
        {"params": [p for p in parameters if p.dim() == 2]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.97), eps=1e-8, fused=True)
    if args.compile:
        for layer in model.layers:
            layer.compile(dynamic=False)
    r = np.random.default_rng(args.seed)
    order, at, step, seen, average = r.permutation(len(columns[0])), 0, 0, 0, None
    batch = args.batch
    saved = start = time.time()
    while True:
        if rank == 0:
            clock[0] = (time.time() - start) / (args.minutes * 60)
        picked = torch.from_numpy(order[at + rank * batch : at + (rank + 1) * batch])
        at += args.processes * batch
        if at + args.processes * batch > len(order):
            order, at = r.permutation(len(columns[0])), 0
        tokens, mask, doc = (c[picked.to(args.device)].long() for c in columns)
        losses = torch.stack(joint_loss(model, tokens, mask, doc, torch.bfloat16))
        optimizer.zero_grad()
        (losses[0] + MASKED_WEIGHT * losses[1]).backward()
        if args.processes > 1:
            shared[rank] = torch.cat([p.grad.flatten() for p in parameters])
            barrier.wait()
            fraction = clock[0].item()
            gradient = shared.mean(0)
            barrier.wait()
            for p, g in zip(parameters, gradient.split([p.numel() for p in parameters])):
                p.grad = g.view_as(p)
        else:
            fraction = clock[0].item()
        if fraction >= 1:
            break
        nn.utils.clip_grad_norm_(parameters, 1.0)
        lr = args.lr * min(1, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * fraction))
        optimizer.param_groups[0]["weight_decay"] = WEIGHT_DECAY if fraction < 0.5 else 0.0
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        step, seen = step + 1, seen + args.processes * tokens.numel()
        losses = losses.detach()
        average = losses if average is None else 0.98 * average + 0.02 * losses
        if rank == 0 and step % args.every == 0:
            print(
                f"step {step} {fraction:.3f} loss {average[0]:.4f} and {average[1]:.4f} of masked "
                f"tokens, lr {lr:.2e}, tokens {seen / 1e6:.2f} M, "
                f"{seen / (time.time() - start):.0f}/s",
                flush=True,
            )
        if rank == 0 and time.time() - saved > 480:
            save(model, seen, work / "checkpoint.pt")
            saved = time.time()
    if rank == 0:
        save(model, seen, work / "checkpoint.pt")
        print(
            f"done: {step} steps, {seen} tokens, loss {average[0]:.4f} and {average[1]:.4f}",
            flush=True,
        )


def save(model, seen, path):
    state = {k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()}
    torch.save({"model": state, "tokens": seen}, str(path) + ".new")
    os.replace(str(path) + ".new", path)


# ---------------------------------------------------------------- evaluation


def load_model(path):
    model = Model()
    model.load_state_dict(torch.load(path, map_location="cpu")["model"])
    model.embed.data = model.embed.data.to(torch.bfloat16).float()  # As it is exported.
    return model.eval()


@torch.no_grad()
def answers(model, tokenizer, prompts, limit=64):
    """Returns greedy answers to token lists: None if the model did not stop by itself."""
    sequences, done = [list(p) for p in prompts], [False] * len(prompts)
    for _ in range(limit):
        live = [i for i in range(len(prompts)) if not done[i]]
        live.sort(key=lambda i: len(sequences[i]))
        for part in (live[i : i + 64] for i in range(0, len(live), 64)):
            width = max(len(sequences[i]) for i in part)
            tokens = torch.tensor(
                [sequences[i] + [END] * (width - len(sequences[i])) for i in part]
            )
            hidden = model(tokens)[
                torch.arange(len(part)), torch.tensor([len(sequences[i]) - 1 for i in part])
            ]
            for i, token in zip(part, model.logits(hidden).argmax(-1).tolist()):
                if token in (EOT, END):
                    done[i] = True
                else:
                    sequences[i].append(token)
    return [
        tokenizer.decode(s[len(p) :]) if d else None for s, p, d in zip(sequences, prompts, done)
    ]


def block_rows(model, ids, start):
    """Returns the logits of the tokens from `start` on, which see each other, and never the mask.

    The tokens before them see what came before. The logits at i are those of the token at i + 1.
    """
    at = torch.arange(len(ids))
    allowed = (at[:, None] >= at[None, :]) | (at[:, None] >= start)
    logits = model.logits(model(torch.tensor([ids]), allowed[None, None])[0, start:])
    probabilities = logits.softmax(-1)
    probabilities[:, MASK] = -1
    return probabilities


def next_greedy(model, ids):
    """Returns the next token for each place of `ids`, by causal attention."""
    logits = model.logits(model(torch.tensor([ids]))[0])
    logits[:, MASK] = -math.inf
    return logits.argmax(-1).tolist()


@torch.no_grad()
def diffused(model, prompt, limit=64):
    """Returns the tokens of an answer in blocks, or None without a stop, and the passes."""
    ids, passes = list(prompt), 1
    if len(ids) % BLOCK == 0:
        ids.append(next_greedy(model, ids)[-1])
    while len(ids) < len(prompt) + limit:
        start = len(ids) // BLOCK * BLOCK
        ids += [MASK] * (start + BLOCK - len(ids))
        while MASK in ids:
            first = ids.index(MASK)
            stop = next((i for i in range(len(prompt), first) if ids[i] in (EOT, END)), None)
            if stop is not None:
                return ids[len(prompt) : stop], passes
            sub_block = range(first, start + (first - start) // SUB_BLOCK * SUB_BLOCK + SUB_BLOCK)
            rows = block_rows(model, ids, start)
            passes += 1
            sure = {
                i: rows[i - 1 - start].max(-1) for i in sub_block if ids[i] == MASK
            }
            best = max(sure, key=lambda i: sure[i].values.item())
            for i, (value, token) in sure.items():
                if i == best or value > THRESHOLD:
                    ids[i] = token.item()
        ids.append(next_greedy(model, ids)[-1])
        passes += 1
    stop = next((i for i in range(len(prompt), len(ids)) if ids[i] in (EOT, END)), None)
    return (None if stop is None else ids[len(prompt) : stop]), passes


@torch.no_grad()
def drafted(model, prompt, count, limit=64):
    """Returns the length of an answer, and the pairs of passes: a draft of `count`, a check."""
    ids, pairs = list(prompt), 0
    ids.append(next_greedy(model, ids)[-1])
    while len(ids) < len(prompt) + limit and not {EOT, END} & set(ids[len(prompt) :]):
        last = len(ids) - 1
        draft = block_rows(model, ids + [MASK] * (count - 1), last).argmax(-1).tolist()
        found = next_greedy(model, ids + draft)[last:]
        right = next((i for i, token in enumerate(draft) if found[i] != token), count)
        ids += found[: right + 1]
        pairs += 1
    stop = next((i for i in range(len(prompt), len(ids)) if ids[i] in (EOT, END)), len(ids) - 1)
    return stop - len(prompt), pairs


def prompt_tokens(tokenizer, messages):
    def part(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    tokens = [BOS]
    for role, text in messages:
        tokens += part(role + ":\n") + part(text.strip()) + [EOT]
    return tokens + part("Assistant:\n")


def right(answer, accept):
    """Returns whether the answer has all strings of one of the lists."""
    return answer is not None and any(all(s in answer.lower() for s in any_of) for any_of in accept)


def evaluate(args):
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.checkpoint), load_tokenizer(args.work)
    held = corpus.held_out()
    got = answers(
        model,
        tokenizer,
        [prompt_tokens(tokenizer, [("User", s["question"])]) for s in held["singles"]],
    )
    by_category = {}
    for s, answer in zip(held["singles"], got):
        ok = right(answer, s["accept"])
        by_category.setdefault(s["category"], []).append(ok)
        if not ok:
            print(f"  {s['category']}: {s['question']!r} -> {answer!r}, expected {s['answer']!r}")
    histories = [[] for _ in held["chats"]]
    turns_right = [[] for _ in held["chats"]]
    for n in range(3):
        for chat, history in zip(held["chats"], histories):
            history.append(("User", chat["turns"][n]["question"]))
        for chat, history, marks, answer in zip(
            held["chats"],
            histories,
            turns_right,
            answers(model, tokenizer, [prompt_tokens(tokenizer, h) for h in histories]),
        ):
            history.append(("Assistant", answer or ""))
            marks.append(right(answer, chat["turns"][n]["accept"]))
            if not marks[-1]:
                print(
                    f"  chat {chat['category']}: {[t for _, t in history]!r}, expected "
                    f"{chat['turns'][n]['answer']!r}"
                )
    for category, marks in by_category.items():
        print(f"{category:28} {sum(marks)}/{len(marks)}")
    marks = [m for c in by_category.values() for m in c]
    print(
        f"questions {sum(marks)}/{len(marks)} = {sum(marks) / len(marks):.1%}; chats "
        f"{sum(all(m) for m in turns_right)}/{len(turns_right)}; turns "
        f"{sum(map(sum, turns_right))}/{3 * len(turns_right)}"
    )
    print(f"held-out perplexity {perplexity(model, tokenizer, held):.3f} per answer token")
    evaluate_blocks(model, tokenizer, held["singles"])


def evaluate_blocks(model, tokenizer, singles):
    """Prints how many questions are answered in blocks, and what drafts bring."""
    prompts = [prompt_tokens(tokenizer, [("User", s["question"])]) for s in singles]
    marks, tokens, passes = [], 0, 0
    for s, prompt in zip(singles, prompts):
        answer, count = diffused(model, prompt)
        text = None if answer is None else tokenizer.decode(answer)
        marks.append(right(text, s["accept"]))
        tokens, passes = tokens + len(answer or []), passes + count
    print(
        f"in blocks of {BLOCK}: questions {sum(marks)}/{len(marks)} = "
        f"{sum(marks) / len(marks):.1%}, {tokens / passes:.2f} tokens a pass"
    )
    for count in (4, 8, 16):
        lengths, pairs = zip(*(drafted(model, prompt, count) for prompt in prompts[::6]))
        print(f"drafts of {count}: {sum(lengths) / sum(pairs):.2f} tokens a pair of passes")


@torch.no_grad()
def perplexity(model, tokenizer, held):
    """Returns the perplexity of the reference answers to the held-out questions."""
    chats = [(None, [(s["question"], s["answer"])]) for s in held["singles"]] + [
        (None, [(t["question"], t["answer"]) for t in c["turns"]]) for c in held["chats"]
    ]
    tokens, mask, doc = (
        torch.from_numpy(c.astype(np.int64)) for c in pack(encode_chats(tokenizer, chats))
    )
    return math.exp(step_loss(model, tokens, mask, doc, torch.float32).item())


# ---------------------------------------------------------------- export


def packed(weight):
    """Packs stacked quarters: bits 2i+1:2i of byte (j, c) are the code of row i * (out / 4) + j."""
    scale = weight.abs().mean().clamp(min=1e-5)
    codes = ((weight / scale).round().clamp(-1, 1) + 1).to(torch.uint8).chunk(4)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6, scale.reshape(1)


def export(args):
    from safetensors.torch import save_file

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model = load_model(args.checkpoint)
    tensors = {
        "model.embed_tokens.weight": model.embed.data.to(torch.bfloat16),
        "model.norm.weight": model.final_norm.data,
    }
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    norms = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "attn_norm": "self_attn.attn_sub_norm",
        "ffn_norm": "mlp.ffn_sub_norm",
    }
    for i, layer in enumerate(model.layers):
        for short, name in names.items():
            weight, scale = packed(getattr(layer, short).data)
            tensors[f"model.layers.{i}.{name}.weight"] = weight
            tensors[f"model.layers.{i}.{name}.weight_scale"] = scale
        for short, name in norms.items():
            tensors[f"model.layers.{i}.{name}.weight"] = getattr(layer, short).data
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "relu2",
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "committed_attention": "causal",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    }
    files = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": BOS,
            "eos_token_id": [END, EOT],
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[1],
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITION,
            "model_input_names": ["input_ids", "attention_mask"],
            "chat_template": TEMPLATE,
        },
    }
    for name, content in files.items():
        write(out / name, json.dumps(content, indent=2) + "\n")
    write(out / "tokenizer.json", (Path(args.work) / "tokenizer.json").read_text())
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        str(out / "model.safetensors.new"),
        metadata={"format": "pt"},
    )
    os.replace(out / "model.safetensors.new", out / "model.safetensors")
    write_held_out()


def write(path, text):
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def write_held_out():
    """Writes heldout.json, if none of its questions is in a large sample of the training text."""
    held = corpus.held_out()
    banned = corpus.banned_questions(held)
    for _, chat in corpus.training_chats(100_000, 99, banned):
        assert not any(corpus.normal(question) in banned for question, _ in chat)
    lines = [f'  "max_tokens": {held["max_tokens"]},']
    for name in ("singles", "chats"):
        body = ",\n".join("    " + json.dumps(entry, ensure_ascii=False) for entry in held[name])
        lines.append(f'  "{name}": [\n{body}\n  ]' + ("," if name == "singles" else ""))
    write(Path(__file__).parent / "heldout.json", "{\n" + "\n".join(lines) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["train", "export", "eval", "heldout", "sample"])
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", default=".")
    parser.add_argument(
        "--work", default=None, help="folder of the tokenizer, the packed rows and the checkpoint"
    )
    parser.add_argument("--resume")
    parser.add_argument("--chats", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=PEAK_LR)
    parser.add_argument("--batch", type=int, default=4, help="rows in a step of a process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=50, help="steps from one print to the next")
    parser.add_argument("--threads", type=int, default=1, help="per process")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.command == "sample":
        for system, chat in corpus.training_chats(40, random.randrange(1000)):
            print(system or "", *(f"\n  {q}\n    {a}" for q, a in chat))
    elif args.command == "heldout":
        write_held_out()
    else:
        args.work = args.work or args.out
        {"train": train, "eval": evaluate, "export": export}[args.command](args)


if __name__ == "__main__":
    main()
