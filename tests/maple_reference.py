"""Maple (deepgrove/maple-preview) in plain PyTorch, for `make_fixtures.py`.

`transformers` has no such model. Written from the configuration and the description of the model:

- Layers of type `sliding_attention` attend to `sliding_window` tokens, the own one included, and
  rotate the first part of each head. The others attend to all tokens and rotate nothing.
- Queries and keys have a norm of each head.
- The router's logits are float32. A token uses the experts with the largest probabilities among
  all, and their probabilities are divided by their sum.
- The gate of an expert is at most 7, and up is between -7 and 7.
"""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn

LIMIT = 7.0


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, hidden = config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.q_norm = Norm(self.dim, config.rms_norm_eps)
        self.k_norm = Norm(self.dim, config.rms_norm_eps)
        self.layer, self.config = layer, config
        self.is_local = config.layer_types[layer] == "sliding_attention"

    def rotated(self, x, positions):
        if not self.is_local and self.config.nope_on_global_attention:
            return x
        size = int(self.dim * self.config.partial_rotary_factor)
        exponents = torch.arange(0, size, 2).float() / size
        angles = positions[:, None] * self.config.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        first, second, rest = x.split([size // 2, size // 2, self.dim - size], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def forward(self, x, past, implementation):
        tokens = x.shape[1]

        def heads(projected, count):
            return projected.view(1, tokens, count, self.dim).transpose(1, 2)

        start = 0 if past is None or self.layer not in past else past[self.layer][0].shape[2]
        positions = torch.arange(start, start + tokens).float()
        query = self.rotated(self.q_norm(heads(self.q_proj(x), self.heads)), positions)
        key = self.rotated(self.k_norm(heads(self.k_proj(x), self.kv_heads)), positions)
        value = heads(self.v_proj(x), self.kv_heads)
        if start > 0:
            key, value = (
                torch.cat([old, new], 2)
                for old, new in zip(past[self.layer], (key, value), strict=True)
            )
        if past is not None:
            past[self.layer] = (key, value)
        if implementation == "f16_cache":
            key, value = key.half().float(), value.half().float()
        groups = self.heads // self.kv_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        distance = positions[:, None] - torch.arange(start + tokens)
        is_seen = distance >= 0
        if self.is_local:
            is_seen &= distance < self.config.sliding_window
        if implementation == "sdpa":
            output = nn.functional.scaled_dot_product_attention(query, key, value, is_seen)
        else:
            scores = query @ key.transpose(2, 3) * self.dim**-0.5
            scores = scores.masked_fill(~is_seen, torch.finfo(torch.float32).min)
            output = scores.softmax(-1) @ value
        return self.o_proj(output.transpose(1, 2).reshape(1, tokens, -1))


class Expert(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=LIMIT)
        return self.down_proj(nn.functional.silu(gate) * self.up_proj(x).clamp(-LIMIT, LIMIT))


class Router(nn.Module):
    def __init__(self, count, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, hidden))


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Router(config.num_experts, config.hidden_size)
        expert = (config.hidden_size, config.moe_intermediate_size)
        self.experts = nn.ModuleList(Expert(*expert) for _ in range(config.num_experts))
        self.used = config.num_experts_per_tok

    def forward(self, x):
        rows, output = x[0], torch.zeros_like(x[0])
        best = (rows @ self.gate.weight.T).softmax(-1).topk(self.used)
        weights = best.values / (best.values.sum(-1, keepdim=True) + 1e-20)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(best.indices == number)
            if len(tokens) > 0:
                output[tokens] += expert(rows[tokens]) * weights[tokens, slots, None]
        return output[None]


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mixture(config)

    def forward(self, x, past, implementation):
        x = x + self.self_attn(self.input_layernorm(x), past, implementation)
        return x + self.mlp(self.post_attention_layernorm(x))


class Maple(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.implementation = config, "eager"
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def set_attn_implementation(self, name):
        self.implementation = name

    def forward(self, tokens, past_key_values=None, use_cache=False):
        past = dict(past_key_values or {}) if use_cache else None
        x = self.model.word_embeddings(tokens)
        for layer in self.model.layers:
            x = layer(x, past, self.implementation)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)), past_key_values=past)


def load(directory):
    """Returns the model of a checkpoint, in float32."""
    config = SimpleNamespace(**json.loads((directory / "config.json").read_text()))
    model = Maple(config)
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.float().eval()
