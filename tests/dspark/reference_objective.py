"""The objective written row by row from its definition, in float64 and differentiated by autograd.

It shares no code with dspark.objective: what it reads of the config are plain numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dspark.objective import ObjectiveConfig


@dataclass
class Inputs:
    """Everything `fused_objective` takes as tensors, in one type."""

    hidden: torch.Tensor
    features: torch.Tensor | None
    lm_head: torch.Tensor
    w2: torch.Tensor | None
    states: torch.Tensor
    index: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    confidence: torch.Tensor | None

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that get gradients."""
        named = {
            "hidden": self.hidden,
            "features": self.features,
            "w2": self.w2,
            "confidence": self.confidence,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, dtype: torch.dtype) -> Inputs:
        """A copy with fresh leaves of this type."""

        def leaf(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.detach().to(dtype).clone().requires_grad_()

        hidden = leaf(self.hidden)
        assert hidden is not None, "hidden states are always there"
        return Inputs(
            hidden,
            leaf(self.features),
            self.lm_head.to(dtype),
            leaf(self.w2),
            self.states.to(dtype),
            self.index,
            self.labels,
            self.valid,
            leaf(self.confidence),
        )


def reference_objective(
    x: Inputs,
    config: ObjectiveConfig,
    block_size: int,
    term_scale: float = 1.0,
    confidence_scale: float = 1.0,
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """Loss, and per row alpha, weight, ce, l1 and kl (0 where a row does not count)."""
    rows = x.hidden.shape[0]
    zero = x.hidden.sum() * 0.0
    found: dict[str, list[float]] = {k: [0.0] * rows for k in ("alpha", "weight", "ce", "l1", "kl")}
    losses: list[torch.Tensor] = []
    factors: list[float] = []
    accepted: list[tuple[torch.Tensor, torch.Tensor]] = []
    confidence_loss = zero
    for row in range(rows):
        if not bool(x.valid[row]):
            losses.append(zero)
            factors.append(0.0)
            accepted.append((zero, zero))
            continue
        logits = x.lm_head @ x.hidden[row]
        if x.features is not None and x.w2 is not None:
            logits = logits + x.w2 @ x.features[row]
        log_q = torch.log_softmax(logits / config.temperature, 0)
        log_p = torch.log_softmax(x.lm_head @ x.states[x.index[row]] / config.temperature, 0)
        q, p = log_q.exp(), log_p.exp()
        l1 = (q - p).abs().sum()
        alpha = torch.minimum(q, p).sum()
        ce = -log_q[x.labels[row]]
        kl = (p * (log_p - log_q)).sum()
        blend = torch.exp(-config.eta * alpha.detach())
        losses.append(
            config.ce * ce
            + config.l1 * l1
            + config.nla * -alpha.log()
            + config.kl * kl
            + config.lk_hybrid * (blend * kl + (1.0 - blend) * (1.0 - alpha))
        )
        label = x.labels[row]
        accepted.append((alpha, torch.clamp(q[label] / p[label], max=1.0)))
        label_q = float(q[x.labels[row]].detach())
        smoothed = (1.0 - config.dpace_smoothing) * label_q + config.dpace_smoothing
        factors.append(smoothed if config.position_weights == "dpace" else float(alpha.detach()))
        for name, value in (("alpha", alpha), ("ce", ce), ("l1", l1), ("kl", kl)):
            found[name][row] = float(value.detach())
        if x.confidence is not None:
            c = torch.sigmoid(x.confidence[row])
            target = alpha.detach()
            entropy = -(target * c.log() + (1.0 - target) * (1.0 - c).log())
            confidence_loss = (
                confidence_loss + math.exp(-(row % block_size) / config.decay) * entropy
            )
    loss = zero
    for row in range(rows):
        found["weight"][row] = _weight(config, factors, x.valid, row, block_size)
        loss = loss + found["weight"][row] * losses[row]
        # The probability of getting as far as this row, which the draft moves too.
        first = row - row % block_size
        reached = zero + 1.0
        for _, ratio in accepted[first:row]:
            reached = reached * ratio
        loss = loss - config.accept_onpolicy * reached * accepted[row][0]
    loss = loss * term_scale
    if x.confidence is not None:
        loss = loss + config.confidence * confidence_scale * confidence_loss
    return loss, found


def _weight(
    config: ObjectiveConfig, factors: list[float], valid: torch.Tensor, row: int, block_size: int
) -> float:
    if not bool(valid[row]):
        return 0.0
    first = row - row % block_size
    decayed = math.exp(-(row - first) / config.decay)
    if config.position_weights == "decay":
        return decayed
    credit = sum(math.prod(factors[first : last + 1]) for last in range(row, first + block_size))
    if config.position_weights == "dpace":
        return credit
    return (1.0 - config.credit_floor) * credit + config.credit_floor * decayed
