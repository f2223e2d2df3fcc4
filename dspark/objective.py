"""The DSpark objective of a micro-batch: fused vocabulary terms, confidence loss and metrics.

Shapes: N = blocks * G rows, block by block; M blocks; U unique target positions; D hidden,
r Markov rank, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dspark.fused import Float8Weight, FusedLinearObjective, RowStatistics, Target
from dspark.objective_config import (
    ObjectiveConfig,
    decay_weights,
    objective_denominators,
    position_weights,
)

__all__ = [
    "ObjectiveConfig",
    "ObjectiveResult",
    "decay_weights",
    "fused_objective",
    "objective_denominators",
    "position_weights",
]


class ObjectiveResult(NamedTuple):
    """What one micro-batch gave.

    `loss` is differentiable and already multiplied by the scales; `metrics` are detached sums over
    the micro-batch: scalars, or one number per block position.

    A tuple, because DeepSpeed looks for the loss in tuples, lists and dicts alone, to hook its
    backward pass. Where it finds none and gradients stay until the next pass, its BF16_Optimizer
    (0.19.8) adds those of a window's earlier micro-batches again with every later one.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def fused_objective(
    hidden_ND: torch.Tensor,
    features_Nr: torch.Tensor | None,
    lm_head_VD: torch.Tensor,
    markov_w2_Vr: torch.Tensor | None,
    target_states_UD: torch.Tensor,
    target_index_N: torch.Tensor,
    labels_N: torch.Tensor,
    valid_N: torch.Tensor,
    confidence_logits_N: torch.Tensor | None,
    *,
    target_bounds_M2: torch.Tensor | None = None,
    lm_head_float8: Float8Weight | None = None,
    block_size: int,
    config: ObjectiveConfig,
    term_scale: float | torch.Tensor,
    confidence_scale: float | torch.Tensor,
) -> ObjectiveResult:
    """The objective of a micro-batch and its detached statistics.

    Args:
        hidden_ND: draft's final hidden states, blocks of `block_size` rows one after another.
        features_Nr: Markov features, or None without a Markov head; then `markov_w2_Vr` is None.
        lm_head_VD: the target's, frozen; needs no gradient.
        target_states_UD: the target's states after its final norm; no gradient.
        target_index_N: int64, the row of `target_states_UD` that gives p for each row.
        labels_N: int64; valid_N: bool.
        target_bounds_M2: int64 on the CPU, the first and last+1 row of `target_states_UD` that a
            block's rows need, so that a chunk of blocks takes those alone; None: all.
        lm_head_float8: takes the place of `lm_head_VD` in the logits; a GPU that has float8.
        confidence_logits_N: float32, or None to leave the confidence loss out.
        term_scale, confidence_scale: factors on the two sums, usually 1 over the window's weight.

    Raises:
        ValueError: rows that are no whole number of blocks, or a target that asks for gradients.
    """
    if hidden_ND.shape[0] % block_size:
        raise ValueError(
            f"fused_objective: {hidden_ND.shape[0]} rows are no whole number of blocks of "
            f"{block_size}; pass every row of a block and mark the missing ones as not valid"
        )
    for name, frozen in (("lm_head_VD", lm_head_VD), ("target_states_UD", target_states_UD)):
        if frozen.requires_grad:
            raise ValueError(
                f"fused_objective: {name} asks for a gradient, but the target is frozen; detach it"
            )
    loss, stats = FusedLinearObjective.apply(
        hidden_ND,
        features_Nr,
        markov_w2_Vr,
        Target(lm_head_VD, target_states_UD, target_index_N, target_bounds_M2, lm_head_float8),
        labels_N,
        valid_N,
        block_size,
        config,
        term_scale,
    )
    found = RowStatistics(*stats)
    alpha_N = found.alpha
    metrics = _metrics(found, valid_N, block_size)
    if confidence_logits_N is not None:
        weights = decay_weights(block_size, config.decay, hidden_ND.device)
        weights_N = weights.repeat(hidden_ND.shape[0] // block_size) * valid_N
        per_row = F.binary_cross_entropy_with_logits(confidence_logits_N, alpha_N, reduction="none")
        confidence = (per_row * weights_N).sum()
        loss = loss + config.confidence * confidence * confidence_scale
        with torch.no_grad():
            error = (torch.sigmoid(confidence_logits_N) - alpha_N).abs() * valid_N
            metrics["confidence_sum"] = confidence.detach()
            metrics["confidence_error_sum"] = error.sum()
            metrics["decay_weight_sum"] = weights_N.sum()
    return ObjectiveResult(loss, metrics)


@torch.no_grad()
def _metrics(
    found: RowStatistics, valid_N: torch.Tensor, block_size: int
) -> dict[str, torch.Tensor]:
    valid_MG = valid_N.view(-1, block_size)
    # alpha is 0 where there is no label, which ends the survival.
    survival = found.alpha.view_as(valid_MG).cumprod(dim=1)
    has_rows = valid_MG.any(dim=1)
    return {
        "ce_sum": (found.ce * found.weight).sum(),
        "l1_sum": (found.l1 * found.weight).sum(),
        "nla_sum": (found.nla * found.weight).sum(),
        "weight_sum": found.weight.sum(),
        "alpha_sum": found.alpha.view(-1, block_size).sum(0),
        "hit_sum": found.hit.view(-1, block_size).sum(0),
        "valid_count": valid_MG.sum(0).float(),
        "expected_accept_sum": (survival.sum(1) + has_rows).sum(),
        "block_count": has_rows.sum().float(),
    }
