"""Tiny drafts with nothing at its neutral value, and a draft written position by position."""

from __future__ import annotations

import math

import torch

from dspark.config import DraftConfig
from dspark.model import DSparkDraft


def tiny_config(**changes) -> DraftConfig:
    values = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 67,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "max_position_embeddings": 256,
        "block_size": 3,
        "target_layer_ids": (1, 4),
        "num_target_layers": 6,
        "mask_token_id": 5,
        "markov_rank": 6,
    }
    values.update(changes)
    if values["markov_rank"] == 0:
        values["confidence_head_with_markov"] = False
    return DraftConfig(**values)


def random_draft(config: DraftConfig, seed: int = 0) -> DSparkDraft:
    """Every weight differs from zero and every norm from one."""
    draft = DSparkDraft(config)
    g = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=g)
        parameter.data = noise * 0.3 if parameter.dim() > 1 else 1.0 + 0.2 * noise
    return draft


def block_by_hand(
    draft: DSparkDraft, states_SF: torch.Tensor, embeds_GD: torch.Tensor, anchor: int
) -> torch.Tensor:
    """Final hidden states [G, D] in float64 of one block that sees the positions below `anchor`.

    Everything is looped over heads and positions; rotations are products of complex numbers.
    """
    config = draft.config
    w = {name: p.detach().double() for name, p in draft.named_parameters()}
    context = norm(states_SF.double() @ w["fc.weight"].T, w["hidden_norm.weight"], config)
    x = embeds_GD.double()
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        rows = norm(x, w[p + "input_layernorm.weight"], config)
        attended = attend(w, p + "self_attn.", config, context[:anchor], rows, anchor)
        x = x + attended @ w[p + "self_attn.o_proj.weight"].T
        rows = norm(x, w[p + "post_attention_layernorm.weight"], config)
        gate = rows @ w[p + "mlp.gate_proj.weight"].T
        up = rows @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"], config)


def norm(x: torch.Tensor, weight: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def attend(w, p, config, context, rows, anchor) -> torch.Tensor:
    width, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    inputs = torch.cat([context, rows])
    positions = [*range(len(context)), *range(anchor, anchor + len(rows))]
    heads = []
    for head in range(config.num_attention_heads):
        mine = slice(head * width, (head + 1) * width)
        shared = slice(head // groups * width, (head // groups + 1) * width)
        queries = norm(rows @ w[p + "q_proj.weight"][mine].T, w[p + "q_norm.weight"], config)
        keys = norm(inputs @ w[p + "k_proj.weight"][shared].T, w[p + "k_norm.weight"], config)
        values = inputs @ w[p + "v_proj.weight"][shared].T
        queries = [rotate(q, anchor + g, config) for g, q in enumerate(queries)]
        keys = torch.stack([rotate(k, at, config) for k, at in zip(keys, positions, strict=True)])
        heads.append(
            torch.stack([torch.softmax(keys @ q / math.sqrt(width), 0) @ values for q in queries])
        )
    return torch.cat(heads, dim=-1)


def rotate(x: torch.Tensor, position: int, config: DraftConfig) -> torch.Tensor:
    half = len(x) // 2
    theta = config.rope_parameters["rope_theta"]
    out = x.clone()
    for k in range(half):
        angle = position * theta ** (-k / half)
        turned = complex(x[k], x[k + half]) * complex(math.cos(angle), math.sin(angle))
        out[k], out[k + half] = turned.real, turned.imag
    return out
