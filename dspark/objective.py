"""The DSpark objective fused with the vocabulary projections.

Draft logits, target distributions and the gradient with respect to the logits exist for one chunk
of blocks at a time. The gradient is known in closed form, so it is formed in the forward pass and
consumed at once by the products that give the gradients of hidden states and Markov factors. The
lm_head is frozen and gets none.

For one row, with q = softmax(z) the draft's and p the target's distribution, y the data's token,
s = sign(q - p) and TV = ½‖q-p‖₁ = 1-α:

    CE   = -log q_y            dCE/dz   = q - e_y
    L1   = ‖q-p‖₁              dL1/dz   = q (s - Σ q s)
    NLA  = -log α              dNLA/dz  = dL1/dz / (2α)
    KL   = Σ p log(p/q)        dKL/dz   = q - p
    LK   = λ KL + (1-λ) TV,    λ = exp(-η α), detached

so every mixture has the gradient q (A + B s) - C p - D e_y with four numbers per row.

Shapes: N = blocks * G rows, block by block; U unique target positions; D hidden, r Markov rank,
V vocabulary.

Sources: DSpark (arXiv 2607.05147) eq. 9-12 for CE, L1 and confidence; LK losses (arXiv 2602.23881)
for NLA and the hybrid; D-PACE (arXiv 2605.18810) for the smoothed credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

WEIGHTINGS = ("decay", "credit", "dpace")
MIN_ALPHA = 1e-6


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the terms and of the positions; the default is the public DSpark loss."""

    ce: float = 0.1
    """Cross entropy with the data's token."""
    l1: float = 0.9
    """The raw norm ‖q-p‖₁, twice the total variation."""
    nla: float = 0.0
    """-log α."""
    kl: float = 0.0
    """KL(p‖q)."""
    lk_hybrid: float = 0.0
    """λ KL + (1-λ) TV."""
    eta: float = 3.0
    """Of λ = exp(-η α)."""
    confidence: float = 1.0
    """Binary cross entropy of the confidence head with α."""
    detach_confidence_input: bool = False
    """Keep the confidence loss from moving the backbone."""
    position_weights: str = "decay"
    """decay: exp(-k/decay); credit: R_j = Σ_{k>=j} S_k; dpace: the same of smoothed q(y)."""
    decay: float = 4.0
    credit_floor: float = 0.2
    """Share of the decayed weights mixed into credit, so that late positions do not starve."""
    dpace_smoothing: float = 0.5
    """a in (1-a) q(y) + a."""
    temperature: float = 1.0
    """Of both distributions: the one that the draft is served at."""
    chunk_rows: int = 256
    """Rows whose logits exist at the same time."""

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "nla", "kl", "lk_hybrid", "confidence", "eta"):
            self._require(name, getattr(self, name) >= 0.0, "0 or more")
        self._require(
            "position_weights", self.position_weights in WEIGHTINGS, ", ".join(WEIGHTINGS)
        )
        self._require("decay", self.decay > 0.0, "above 0")
        self._require("temperature", self.temperature > 0.0, "above 0")
        self._require("chunk_rows", self.chunk_rows >= 1, "1 or more")
        for name in ("credit_floor", "dpace_smoothing"):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1")
        if self.ce + self.l1 + self.nla + self.kl + self.lk_hybrid == 0.0:
            raise ValueError(
                "objective: ce, l1, nla, kl and lk_hybrid are all 0; allowed: at least one above "
                "0; give one of them a weight, or choose objective=dspark"
            )

    def _require(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(
                f"objective.{name}={getattr(self, name)!r} is not usable; allowed: {allowed}; "
                f"correct objective.{name}"
            )


@dataclass
class ObjectiveResult:
    """What one micro-batch gave.

    `loss` is differentiable and already multiplied by the scales; `metrics` are detached sums over
    the micro-batch: scalars, or one number per block position.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def decay_weights(
    block_size: int, decay: float, device: torch.device | None = None
) -> torch.Tensor:
    """exp(-k/decay) for k = 0 ... G-1, float32 [G]."""
    return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / decay)


def objective_denominators(
    config: ObjectiveConfig, valid_MG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the sums of the terms and of the confidence loss are to be divided by, float64 scalars.

    Known before the forward pass, so that one division by the total over the whole optimizer
    window and all ranks is enough. Decayed weights are divided by their own sum; credit by the
    number of blocks, since its sum is the credit itself.

    Args:
        valid_MG: bool [blocks, G].
    """
    weights = decay_weights(valid_MG.shape[1], config.decay, valid_MG.device)
    decayed = (weights * valid_MG).sum().double()
    if config.position_weights == "decay":
        return decayed, decayed
    return valid_MG.any(dim=1).sum().double(), decayed


def position_weights(
    config: ObjectiveConfig,
    alpha_MG: torch.Tensor,
    label_q_MG: torch.Tensor,
    valid_MG: torch.Tensor,
) -> torch.Tensor:
    """Weight of every row, float32 [blocks, G], 0 where not valid; detached from the draft."""
    decayed = decay_weights(valid_MG.shape[1], config.decay, valid_MG.device) * valid_MG
    if config.position_weights == "decay":
        return decayed
    if config.position_weights == "credit":
        factors = alpha_MG
    else:
        a = config.dpace_smoothing
        factors = (1.0 - a) * label_q_MG + a
    survival = torch.where(valid_MG, factors, 0.0).cumprod(dim=1)
    credit = survival.flip(1).cumsum(dim=1).flip(1)
    if config.position_weights == "dpace":
        return credit * valid_MG
    return ((1.0 - config.credit_floor) * credit + config.credit_floor * decayed) * valid_MG


@dataclass
class _Rows:
    """Per-row statistics of a chunk, each float32 [rows]."""

    alpha: torch.Tensor
    l1: torch.Tensor
    ce: torch.Tensor
    label_q: torch.Tensor
    hit: torch.Tensor
    kl: torch.Tensor


class _FusedLinearObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        features_Nr: torch.Tensor | None,
        markov_w2_Vr: torch.Tensor | None,
        lm_head_VD: torch.Tensor,
        states_UD: torch.Tensor,
        target_index_N: torch.Tensor,
        labels_N: torch.Tensor,
        valid_N: torch.Tensor,
        block_size: int,
        config: ObjectiveConfig,
        scale: float | torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        needs_grad = any(ctx.needs_input_grad[:3])
        num_rows = hidden_ND.shape[0]
        grad_hidden = torch.zeros_like(hidden_ND) if needs_grad else None
        grad_features = grad_w2 = None
        if needs_grad and features_Nr is not None:
            assert markov_w2_Vr is not None, "Markov features come with markov_w2"
            grad_features = torch.zeros_like(features_Nr)
            grad_w2 = torch.zeros(
                markov_w2_Vr.shape, dtype=torch.float32, device=markov_w2_Vr.device
            )
        stats = torch.zeros(7, num_rows, dtype=torch.float32, device=hidden_ND.device)
        step = max(1, config.chunk_rows // block_size) * block_size
        for first in range(0, num_rows, step):
            chunk = slice(first, min(num_rows, first + step))
            # Rows without a label cost no vocabulary product.
            rows = first + torch.nonzero(valid_N[chunk]).squeeze(1)
            if not rows.numel():
                continue
            logits = _draft_logits(hidden_ND, features_Nr, lm_head_VD, markov_w2_Vr, rows, config)
            q = torch.softmax(logits, dim=-1, dtype=torch.float32)
            p = _target_probs(states_UD, target_index_N[rows], lm_head_VD, config)
            found, q_signs, p_kept = _row_statistics(logits, q, p, labels_N[rows], config)
            del logits
            weights = _row_weights(config, found, rows - first, valid_N[chunk], block_size)
            stats[:, rows] = torch.stack(
                [found.alpha, found.l1, found.ce, found.label_q, found.hit, found.kl, weights]
            )
            if not needs_grad:
                continue
            grad = _logit_gradient(config, found, q, q_signs, p_kept, labels_N[rows], weights)
            grad = grad.mul_(scale / config.temperature).to(hidden_ND.dtype)
            assert grad_hidden is not None, "needs_grad"
            grad_hidden[rows] = grad @ lm_head_VD
            if grad_features is not None and grad_w2 is not None:
                assert features_Nr is not None and markov_w2_Vr is not None, "both or neither"
                grad_features[rows] = grad @ markov_w2_Vr
                grad_w2 += grad.t() @ features_Nr[rows]
        alpha, l1, ce, label_q, hit, kl, weights = stats
        loss = (_row_losses(config, alpha, l1, ce, kl) * weights).sum() * scale
        if grad_w2 is not None and markov_w2_Vr is not None:
            grad_w2 = grad_w2.to(markov_w2_Vr.dtype)
        ctx.save_for_backward(grad_hidden, grad_features, grad_w2)
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = upstream[0]
        grads = [
            None if saved is None else (saved * scale).to(saved.dtype)
            for saved in ctx.saved_tensors
        ]
        return (*grads, None, None, None, None, None, None, None, None)


def _draft_logits(
    hidden: torch.Tensor,
    features: torch.Tensor | None,
    lm_head: torch.Tensor,
    markov_w2: torch.Tensor | None,
    rows: torch.Tensor,
    config: ObjectiveConfig,
) -> torch.Tensor:
    logits = hidden[rows] @ lm_head.t()
    if features is not None and markov_w2 is not None:
        logits = torch.addmm(logits, features[rows], markov_w2.t())
    return logits if config.temperature == 1.0 else logits.float().div_(config.temperature)


def _target_probs(
    states: torch.Tensor, index: torch.Tensor, lm_head: torch.Tensor, config: ObjectiveConfig
) -> torch.Tensor:
    """p for every row, computed once per position that occurs in the chunk."""
    unique, back = torch.unique(index, return_inverse=True)
    logits = states[unique] @ lm_head.t()
    if config.temperature != 1.0:
        logits = logits.float().div_(config.temperature)
    return torch.softmax(logits, dim=-1, dtype=torch.float32)[back]


def _row_statistics(
    logits: torch.Tensor,
    q: torch.Tensor,
    p: torch.Tensor,
    labels: torch.Tensor,
    config: ObjectiveConfig,
) -> tuple[_Rows, torch.Tensor, torch.Tensor | None]:
    """Row statistics, q * sign(q - p), and p where the gradient needs it; p is overwritten else."""
    needs_p = config.kl > 0.0 or config.lk_hybrid > 0.0
    largest, arg = q.max(dim=-1)
    # log-sum-exp of the logits from the largest probability: no further pass over them.
    lse = logits.gather(1, arg.unsqueeze(1)).squeeze(1).float() - largest.log()
    ce = lse - logits.gather(1, labels.unsqueeze(1)).squeeze(1).float()
    label_q = q.gather(1, labels.unsqueeze(1)).squeeze(1)
    kl = torch.zeros_like(ce)
    if needs_p:
        # Σ p log p - Σ p log q, the second through the logits: log q = z - lse.
        negative_entropy = torch.special.entr(p).sum(-1).neg()
        kl = negative_entropy - torch.linalg.vecdot(p, logits.float()) + lse
    difference = torch.sub(q, p, out=None if needs_p else p)
    l1 = torch.linalg.vector_norm(difference, ord=1, dim=-1)
    q_signs = difference.sign_().mul_(q)
    rows = _Rows(1.0 - 0.5 * l1, l1, ce, label_q, (arg == labels).float(), kl)
    return rows, q_signs, p if needs_p else None


def _row_weights(
    config: ObjectiveConfig, found: _Rows, places: torch.Tensor, valid: torch.Tensor, block: int
) -> torch.Tensor:
    """Position weights of the chunk's valid rows; `places` are their rows within the chunk."""
    valid_MG = valid.view(-1, block)
    alpha = torch.zeros(valid.shape[0], dtype=torch.float32, device=valid.device)
    label_q = torch.zeros_like(alpha)
    alpha[places], label_q[places] = found.alpha, found.label_q
    shaped = position_weights(config, alpha.view_as(valid_MG), label_q.view_as(valid_MG), valid_MG)
    return shaped.reshape(-1)[places]


def _row_losses(
    config: ObjectiveConfig,
    alpha: torch.Tensor,
    l1: torch.Tensor,
    ce: torch.Tensor,
    kl: torch.Tensor,
) -> torch.Tensor:
    hybrid = torch.exp(-config.eta * alpha)
    return (
        config.ce * ce
        + config.l1 * l1
        - config.nla * alpha.clamp(min=MIN_ALPHA).log()
        + config.kl * kl
        + config.lk_hybrid * (hybrid * kl + (1.0 - hybrid) * 0.5 * l1)
    )


def _logit_gradient(
    config: ObjectiveConfig,
    found: _Rows,
    q: torch.Tensor,
    q_signs: torch.Tensor,
    p: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """q (A + B s) - C p - D e_y, times the row's weight; overwrites `q_signs`."""
    sum_q_signs = q_signs.sum(-1)
    hybrid = torch.exp(-config.eta * found.alpha)
    slope = (
        config.l1
        + config.nla / (2.0 * found.alpha.clamp(min=MIN_ALPHA))
        + config.lk_hybrid * 0.5 * (1.0 - hybrid)
    )
    pull = config.kl + config.lk_hybrid * hybrid
    a = (config.ce + pull - slope * sum_q_signs) * weights
    grad = q_signs.mul_((slope * weights).unsqueeze(1)).addcmul_(q, a.unsqueeze(1))
    if p is not None:
        grad.addcmul_(p, (pull * weights).unsqueeze(1), value=-1.0)
    grad.scatter_add_(1, labels.unsqueeze(1), (-config.ce * weights).unsqueeze(1))
    return grad


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
    loss, stats = _FusedLinearObjective.apply(
        hidden_ND,
        features_Nr,
        markov_w2_Vr,
        lm_head_VD,
        target_states_UD,
        target_index_N,
        labels_N,
        valid_N,
        block_size,
        config,
        term_scale,
    )
    alpha_N = stats[0]
    metrics = _metrics(stats, valid_N, block_size)
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
    stats: torch.Tensor, valid_N: torch.Tensor, block_size: int
) -> dict[str, torch.Tensor]:
    alpha, l1, ce, _, hit, _, weights = stats
    valid_MG = valid_N.view(-1, block_size)
    survival = torch.where(valid_MG, alpha.view_as(valid_MG), 0.0).cumprod(dim=1)
    has_rows = valid_MG.any(dim=1)
    return {
        "ce_sum": (ce * weights).sum(),
        "l1_sum": (l1 * weights).sum(),
        "weight_sum": weights.sum(),
        "alpha_sum": (alpha * valid_N).view(-1, block_size).sum(0),
        "hit_sum": (hit * valid_N).view(-1, block_size).sum(0),
        "valid_count": valid_MG.sum(0).float(),
        "expected_accept_sum": (survival.sum(1) + has_rows).sum(),
        "block_count": has_rows.sum().float(),
    }
