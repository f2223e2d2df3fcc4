"""Plain float64 forms of the objective and of the attention mask, for tests to compare with.

They follow the definitions row by row, let autograd find the gradients, and hold whole
vocabularies: for small shapes only.

Shapes: N = blocks * G rows, block by block; U target positions; D hidden, r Markov rank,
V vocabulary; B sequence, S context slot, A anchor, G block position.
"""

from __future__ import annotations

import math

import torch

from dspark.objective_config import ObjectiveConfig


def objective_reference(
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
    block_size: int,
    config: ObjectiveConfig,
    term_scale: float,
    confidence_scale: float,
) -> torch.Tensor:
    """The loss of `fused_objective`, a float64 scalar; arguments as there, differentiable."""
    logits_NV = hidden_ND.double() @ lm_head_VD.double().T
    if features_Nr is not None and markov_w2_Vr is not None:
        logits_NV = logits_NV + features_Nr.double() @ markov_w2_Vr.double().T
    target_NV = (target_states_UD.double() @ lm_head_VD.double().T)[target_index_N].detach()
    terms = torch.zeros((), dtype=torch.float64)
    confidence = torch.zeros((), dtype=torch.float64)
    for start in range(0, hidden_ND.shape[0], block_size):
        counting = [k for k in range(block_size) if valid_N[start + k]]
        rows = {
            k: row_terms(
                logits_NV[start + k], target_NV[start + k], int(labels_N[start + k]), config
            )
            for k in counting
        }
        weights = block_weights(rows, block_size, config)
        for k, (loss, alpha, _) in rows.items():
            terms = terms + weights[k] * loss
            if confidence_logits_N is not None:
                c = torch.sigmoid(confidence_logits_N[start + k].double())
                entropy = -(alpha * c.log() + (1 - alpha) * (1 - c).log())
                confidence = confidence + math.exp(-k / config.decay) * entropy
    return terms * term_scale + config.confidence * confidence * confidence_scale


def row_terms(
    logits_V: torch.Tensor, target_logits_V: torch.Tensor, label: int, config: ObjectiveConfig
) -> tuple[torch.Tensor, float, float]:
    """The mixture of one row's terms, and its acceptance and q(label) as plain numbers."""
    log_q = torch.log_softmax(logits_V / config.temperature, dim=-1)
    log_p = torch.log_softmax(target_logits_V / config.temperature, dim=-1)
    q, p = log_q.exp(), log_p.exp()
    l1 = (q - p).abs().sum()
    alpha = torch.minimum(q, p).sum()
    kl = (p * (log_p - log_q)).sum()
    mix = math.exp(-config.eta * float(alpha.detach()))
    loss = (
        -config.ce * log_q[label]
        + config.l1 * l1
        - config.nla * alpha.log()
        + config.kl * kl
        + config.lk_hybrid * (mix * kl + (1 - mix) * 0.5 * l1)
    )
    return loss, float(alpha.detach()), float(q[label].detach())


def block_weights(
    rows: dict[int, tuple[torch.Tensor, float, float]], block_size: int, config: ObjectiveConfig
) -> list[float]:
    """Weight of every position of one block; `rows` has the positions that count."""
    decayed = [math.exp(-k / config.decay) for k in range(block_size)]
    if config.position_weights == "decay":
        return decayed
    factors = []
    for k in range(block_size):
        _, alpha, label_q = rows.get(k, (None, 0.0, 0.0))
        smoothed = (1 - config.dpace_smoothing) * label_q + config.dpace_smoothing
        factor = alpha if config.position_weights == "credit" else smoothed
        factors.append(factor if k in rows else 0.0)
    survival = [math.prod(factors[: k + 1]) for k in range(block_size)]
    credit = [sum(survival[k:]) for k in range(block_size)]
    if config.position_weights == "dpace":
        return credit
    floor = config.credit_floor
    return [(1 - floor) * credit[k] + floor * decayed[k] for k in range(block_size)]


def attention_mask_reference(context_mask_BAS: torch.Tensor, block_size: int) -> torch.Tensor:
    """`dspark.attention.attention_mask` entry by entry: bool [B, 1, A*G, S + A*G]."""
    batch, anchors, slots = context_mask_BAS.shape
    rows = anchors * block_size
    mask = torch.zeros(batch, 1, rows, slots + rows, dtype=torch.bool)
    for b in range(batch):
        for row in range(rows):
            for slot in range(slots):
                mask[b, 0, row, slot] = context_mask_BAS[b, row // block_size, slot]
            for other in range(rows):
                mask[b, 0, row, slots + other] = row // block_size == other // block_size
    return mask
