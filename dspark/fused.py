"""The objective's vocabulary terms, fused with the projections to the vocabulary.

Draft logits, target distributions and the gradient with respect to the logits exist for one chunk
of blocks at a time. The gradient is known in closed form, so it is formed in the forward pass and
consumed at once by the products that give the gradients of hidden states and Markov factors. The
lm_head is frozen and gets none.

For one row, with q = softmax(z) the draft's and p the target's distribution, y the data's token,
α = Σ min(p, q), t_v = q_v where q_v < p_v and 0 elsewhere, and c = Σ t:

    dα/dz = t - c q
    CE  = -log q_y              dCE/dz  = q - e_y
    L1  = ‖q-p‖₁ = 2 (1-α)      dL1/dz  = 2 (c q - t)
    NLA = -log α                dNLA/dz = (c q - t) / α
    KL  = Σ p log(p/q)          dKL/dz  = q - p
    LK  = λ KL + (1-λ) (1-α),   λ = exp(-η α), detached

so every mixture has the gradient A q - B t - C p - D e_y with four numbers per row. α and c are
sums of positive numbers: unlike 1 - ½‖q-p‖₁ they keep their relative precision where the draft
and the target hardly overlap, which is where NLA starts.

Shapes: N = blocks * G rows, block by block; R the rows of a chunk that have a label; U unique
target positions; D hidden, r Markov rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dspark.objective_config import ObjectiveConfig, position_weights

MIN_ALPHA = 1e-36
"""Keeps 1/α finite in float32."""
CPU_TILE_ROWS = 8
"""Rows whose float32 vocabulary rows stay in a core's cache between the passes over them."""


class RowStatistics(NamedTuple):
    """Detached statistics of rows, each float32 [rows]; 0 for rows without a label."""

    alpha: torch.Tensor
    ce: torch.Tensor
    kl: torch.Tensor
    """0 where the objective has no KL."""
    label_q: torch.Tensor
    hit: torch.Tensor
    """1 where the label is the draft's first choice."""
    weight: torch.Tensor

    @property
    def l1(self) -> torch.Tensor:
        return 2.0 * (1.0 - self.alpha)

    @property
    def nla(self) -> torch.Tensor:
        return -self.alpha.clamp(min=MIN_ALPHA).log()

    def loss(self, config: ObjectiveConfig) -> torch.Tensor:
        """The weighted mixture of every row's terms, [rows]; 0 for rows without a label."""
        hybrid = torch.exp(-config.eta * self.alpha)
        return self.weight * (
            config.ce * self.ce
            + config.l1 * self.l1
            + config.nla * self.nla
            + config.kl * self.kl
            + config.lk_hybrid * (hybrid * self.kl + (1.0 - hybrid) * (1.0 - self.alpha))
        )


class _Gradients:
    """Gradients of hidden states, Markov features and markov_w2, filled chunk by chunk."""

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        features_Nr: torch.Tensor | None,
        markov_w2_Vr: torch.Tensor | None,
    ) -> None:
        self._hidden = torch.zeros_like(hidden_ND)
        self._markov = None
        self._w2: torch.Tensor | None = None
        if features_Nr is not None and markov_w2_Vr is not None:
            self._markov = (features_Nr, torch.zeros_like(features_Nr), markov_w2_Vr)

    def add_chunk(self, grad_RV: torch.Tensor, rows: torch.Tensor, lm_head: torch.Tensor) -> None:
        """Take in the gradient with respect to the logits of these rows."""
        self._hidden[rows] = grad_RV @ lm_head
        if self._markov is not None:
            features, grad_features, w2 = self._markov
            grad_features[rows] = grad_RV @ w2
            part = grad_RV.t() @ features[rows]
            # Several chunks are summed in float32; a single one needs no copy in that type.
            self._w2 = part if self._w2 is None else self._w2.float().add_(part)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All three, each in its parameter's type; None without a Markov head."""
        if self._markov is None:
            return self._hidden, None, None
        _, grad_features, w2 = self._markov
        grad_w2 = torch.zeros_like(w2) if self._w2 is None else self._w2.to(w2.dtype)
        return self._hidden, grad_features, grad_w2


class FusedLinearObjective(torch.autograd.Function):
    """Scaled loss and stacked `RowStatistics` [6, N]; gradients for the first three arguments."""

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_grad = any(ctx.needs_input_grad[:3])
        num_rows = hidden_ND.shape[0]
        grads = _Gradients(hidden_ND, features_Nr, markov_w2_Vr) if needs_grad else None
        stats = torch.zeros(6, num_rows, dtype=torch.float32, device=hidden_ND.device)
        step = max(1, config.chunk_rows // block_size) * block_size
        for first in range(0, num_rows, step):
            valid_MG = valid_N[first : first + step].view(-1, block_size)
            # Rows without a label cost no vocabulary product.
            rows = first + torch.nonzero(valid_MG.reshape(-1)).squeeze(1)
            if not rows.numel():
                continue
            logits = hidden_ND[rows] @ lm_head_VD.t()
            if features_Nr is not None and markov_w2_Vr is not None:
                logits.addmm_(features_Nr[rows], markov_w2_Vr.t())
            unique, back = torch.unique(target_index_N[rows], return_inverse=True)
            target_logits = states_UD[unique] @ lm_head_VD.t()
            for tile, blocks in _tiles(valid_MG):
                stats[:, rows[tile]] = _tile(
                    logits[tile],
                    target_logits[back[tile]],
                    labels_N[rows[tile]],
                    valid_MG[blocks],
                    config,
                    scale if needs_grad else None,
                )
            if grads is not None:
                # `_tile` has put the gradient in the place of the logits.
                grads.add_chunk(logits, rows, lm_head_VD)
        ctx.save_for_backward(*(grads.tensors() if grads is not None else (None, None, None)))
        ctx.mark_non_differentiable(stats)
        return RowStatistics(*stats).loss(config).sum() * scale, stats

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [
            None if saved is None else (saved * upstream[0]).to(saved.dtype)
            for saved in ctx.saved_tensors
        ]
        return (*grads, None, None, None, None, None, None, None, None)


def _tiles(valid_MG: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of a chunk's labelled rows with the whole blocks that they belong to.

    With two rows to a tile, blocks holding 1, 0, 2 and 1 labelled rows give the tiles (rows 0:3,
    blocks 0:3) and (rows 3:4, blocks 3:4). Other devices than the CPU take the chunk at once.
    """
    num_blocks = valid_MG.shape[0]
    if valid_MG.device.type != "cpu":
        yield slice(None), slice(0, num_blocks)
        return
    first_row = row = first_block = 0
    for block, count in enumerate(valid_MG.sum(1).tolist()):
        row += count
        is_last = block == num_blocks - 1
        if row > first_row and (row - first_row >= CPU_TILE_ROWS or is_last):
            yield slice(first_row, row), slice(first_block, block + 1)
            first_row, first_block = row, block + 1


def _tile(
    logits_RV: torch.Tensor,
    target_logits_RV: torch.Tensor,
    labels_R: torch.Tensor,
    valid_MG: torch.Tensor,
    config: ObjectiveConfig,
    scale: float | torch.Tensor | None,
) -> torch.Tensor:
    """Stacked `RowStatistics` [6, R] of whole blocks.

    Unless `scale` is None, the gradient of the scaled loss overwrites `logits_RV`.
    """
    z, u = logits_RV, target_logits_RV
    if config.temperature != 1.0:
        z, u = z.float() / config.temperature, u.float() / config.temperature
    q = torch.softmax(z, dim=-1, dtype=torch.float32)
    p = torch.softmax(u, dim=-1, dtype=torch.float32)
    largest, choice = q.max(dim=-1)
    labels = labels_R.unsqueeze(1)
    # log-sum-exp of the logits from the largest probability: no further pass over them.
    lse = z.gather(1, choice.unsqueeze(1)).squeeze(1).float() - largest.log()
    ce = lse - z.gather(1, labels).squeeze(1).float()
    kl = _divergence(z, lse, u, p) if config.kl > 0.0 or config.lk_hybrid > 0.0 else None
    spare = torch.minimum(q, p)
    alpha = spare.sum(-1).clamp_(max=1.0)
    label_q = q.gather(1, labels).squeeze(1)
    weight = _row_weights(config, alpha, label_q, valid_MG)
    zero_or_kl = torch.zeros_like(ce) if kl is None else kl
    found = RowStatistics(alpha, ce, zero_or_kl, label_q, (choice == labels_R).float(), weight)
    if scale is not None:
        below = torch.lt(q, p, out=spare).mul_(q)
        factor = weight * (scale / config.temperature)
        _logit_gradient(logits_RV, q, below, p, labels, found, factor, config)
    return torch.stack(found)


def _divergence(
    z: torch.Tensor, lse_z: torch.Tensor, u: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """KL(p ‖ softmax(z)) for p = softmax(u), [R].

    log p - log q is taken from the logits, where no probability can have become 0.
    """
    lse_u = u.amax(-1).float() - p.amax(-1).log()
    return torch.linalg.vecdot(p, u.float().sub_(z)) - lse_u + lse_z


def _row_weights(
    config: ObjectiveConfig, alpha_R: torch.Tensor, label_q_R: torch.Tensor, valid_MG: torch.Tensor
) -> torch.Tensor:
    """Position weights of the labelled rows of whole blocks, [R]."""
    alpha_MG = torch.zeros(valid_MG.shape, dtype=torch.float32, device=valid_MG.device)
    label_q_MG = torch.zeros_like(alpha_MG)
    alpha_MG[valid_MG], label_q_MG[valid_MG] = alpha_R, label_q_R
    return position_weights(config, alpha_MG, label_q_MG, valid_MG)[valid_MG]


def _logit_gradient(
    out_RV: torch.Tensor,
    q: torch.Tensor,
    below: torch.Tensor,
    p: torch.Tensor,
    labels_R1: torch.Tensor,
    found: RowStatistics,
    factor_R: torch.Tensor,
    config: ObjectiveConfig,
) -> None:
    """Write A q - B t - C p - D e_y, times the row's factor; `below` is t, `q` is overwritten."""
    hybrid = torch.exp(-config.eta * found.alpha)
    b = (
        2.0 * config.l1
        + config.nla / found.alpha.clamp(min=MIN_ALPHA)
        + config.lk_hybrid * (1.0 - hybrid)
    )
    c = config.kl + config.lk_hybrid * hybrid
    a = config.ce + c + b * below.sum(-1)
    grad = q.mul_((a * factor_R).unsqueeze(1))
    grad.addcmul_(below, (b * factor_R).unsqueeze(1), value=-1.0)
    if config.kl > 0.0 or config.lk_hybrid > 0.0:
        grad.addcmul_(p, (c * factor_R).unsqueeze(1), value=-1.0)
    grad.scatter_add_(1, labels_R1, (-config.ce * factor_R).unsqueeze(1))
    out_RV.copy_(grad)
