"""Floating-point operations that a training step of a draft cannot do without.

Products alone are counted, each multiply-add as two: padding, masked pairs and what is computed
again for the backward pass are not, so a rate of these says how much of a GPU does useful work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dspark.batch import BatchLayout
from dspark.config import DraftConfig


@dataclass(frozen=True)
class StepSize:
    """What a forward and backward pass goes over."""

    num_tokens: int
    """Of the context."""
    num_rows: int
    """Drafted positions, the block size for each anchor."""
    num_pairs: int
    """Of a row and what it attends to: context before its anchor, and its own block."""
    num_targets: int
    """Positions at which the target's distribution is needed."""

    @classmethod
    def of(cls, layout: BatchLayout, num_tokens: int) -> StepSize:
        """Of one micro-batch on the CPU that holds so many tokens without padding."""
        is_there = layout.valid_BAG.any(2)
        block = layout.block_size
        num_anchors = int(is_there.sum())
        before = torch.where(is_there, layout.anchors_BA - layout.context_start_BA, 0)
        pairs = (int(before.sum()) + num_anchors * block) * block
        # Without a label there is one place all the same, which nothing points to.
        num_targets = int(layout.target_bounds_M2.max()) if num_anchors else 0
        return cls(num_tokens, num_anchors * block, pairs, num_targets)


def necessary_flops(draft: DraftConfig, size: StepSize) -> dict[str, float]:
    """By part of the step, forward and backward.

    A product whose both sides learn costs three times its forward pass; the context features get
    no gradient, the frozen lm_head gets none, and the target's logits have no backward pass.
    """
    width, rows = draft.hidden_size, size.num_rows
    heads = draft.num_attention_heads * draft.head_dim
    kv_width = draft.num_key_value_heads * draft.head_dim
    attention = width * (2 * heads + 2 * kv_width)
    mlp = 3 * width * draft.intermediate_size
    layers = draft.num_hidden_layers
    return {
        "fc": 2 * 2.0 * size.num_tokens * draft.num_context_features * width,
        "context_kv": layers * 3 * 2.0 * size.num_tokens * width * 2 * kv_width,
        "layers": layers * 3 * 2.0 * rows * (attention + mlp),
        # Forward two products, backward five.
        "attention": layers * 7 * 2.0 * size.num_pairs * heads,
        "vocabulary": 2.0 * draft.vocab_size * (2 * rows + size.num_targets) * width
        + 3 * 2.0 * rows * draft.markov_rank * draft.vocab_size,
    }
