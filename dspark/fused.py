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
    -W α (on-policy, `onpolicy_weights`): W (c q - t), and the weight of CE that it adds

so every mixture has the gradient A q - B t - C p - D e_y with four numbers per row. α and c are
sums of positive numbers: unlike 1 - ½‖q-p‖₁ they keep their relative precision where the draft
and the target hardly overlap, which is where NLA starts.

Shapes: N = blocks * G rows, block by block; S statistics; R the rows of a chunk that have a label;
U unique target positions; D hidden, r Markov rank, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch

from dspark.objective_config import ObjectiveConfig, onpolicy_weights, position_weights

MIN_ALPHA = 1e-36
"""Keeps 1/α finite in float32."""
CPU_CHUNK_ROWS = 256
"""Rows of a chunk on the CPU where `chunk_rows` is left open."""
GPU_CHUNK_BYTES = 576 * 1024 * 1024
"""Size of a chunk's draft logits on a GPU where `chunk_rows` is left open."""

Rows: TypeAlias = torch.Tensor | slice
_Draft = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""hidden_ND, features_Nr, markov_w2_Vr."""


class Float8Weight(NamedTuple):
    """A frozen [V, D] weight rounded row by row to float8 (e4m3)."""

    values_VD: torch.Tensor
    scale_1V: torch.Tensor
    """float32; a row is its values times its scale."""

    @classmethod
    def of(cls, weight_VD: torch.Tensor) -> Float8Weight:
        """Round a weight."""
        values, scale = _to_float8(weight_VD)
        return cls(values, scale.view(1, -1))


class Target(NamedTuple):
    """The frozen side of the objective."""

    lm_head_VD: torch.Tensor
    states_UD: torch.Tensor
    index_N: torch.Tensor
    """int64, each row's place in `states_UD`."""
    bounds_M2: torch.Tensor | None
    """int64 on the CPU, the first and last+1 place of each block's rows."""
    lm_head_float8: Float8Weight | None
    """Takes the place of `lm_head_VD` in the products that give logits, on a GPU."""

    def project(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in the type of `x_RD`."""
        if self.lm_head_float8 is None:
            return x_RD @ self.lm_head_VD.t()
        values, scale = _to_float8(x_RD)
        weight = self.lm_head_float8
        return torch._scaled_mm(
            values,
            weight.values_VD.t(),
            scale_a=scale,
            scale_b=weight.scale_1V,
            out_dtype=x_RD.dtype,
            use_fast_accum=True,
        )


def _to_float8(x_RD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values float8_e4m3fn [R, D] and scales float32 [R, 1]."""
    kind = torch.float8_e4m3fn
    largest = x_RD.abs().amax(1, keepdim=True).float().clamp_(min=1e-12)
    scale = largest / torch.finfo(kind).max
    return (x_RD / scale).to(kind), scale


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
    prefix: torch.Tensor
    """Probability that the data's tokens before this row would be accepted."""

    @property
    def l1(self) -> torch.Tensor:
        return 2.0 * (1.0 - self.alpha)

    @property
    def nla(self) -> torch.Tensor:
        return -self.alpha.clamp(min=MIN_ALPHA).log()

    def loss(self, config: ObjectiveConfig) -> torch.Tensor:
        """The weighted mixture of every row's terms, [rows]; 0 for rows without a label."""
        hybrid = torch.exp(-config.eta * self.alpha)
        return (
            self.weight
            * (
                config.ce * self.ce
                + config.l1 * self.l1
                + config.nla * self.nla
                + config.kl * self.kl
                + config.lk_hybrid * (hybrid * self.kl + (1.0 - hybrid) * (1.0 - self.alpha))
            )
            - config.accept_onpolicy * self.prefix * self.alpha
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

    def add_chunk(self, grad_RV: torch.Tensor, rows: Rows, lm_head: torch.Tensor) -> None:
        """Take in the gradient with respect to the logits of these rows."""
        self._hidden[rows] = grad_RV @ lm_head
        if self._markov is not None:
            features, grad_features, w2 = self._markov
            grad_features[rows] = grad_RV @ w2
            # Several chunks are summed in float32.
            self._w2 = _add_product(self._w2, grad_RV.t(), features[rows])

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All three, each in its parameter's type; None without a Markov head."""
        if self._markov is None:
            return self._hidden, None, None
        _, grad_features, w2 = self._markov
        grad_w2 = torch.zeros_like(w2) if self._w2 is None else self._w2.to(w2.dtype)
        return self._hidden, grad_features, grad_w2


def _add_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """float32 `total + left @ right`."""
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32)
    product = (left @ right).float()
    return product if total is None else total.add_(product)


class FusedLinearObjective(torch.autograd.Function):
    """Scaled loss and stacked `RowStatistics` [7, N]; gradients for the first three arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        features_Nr: torch.Tensor | None,
        markov_w2_Vr: torch.Tensor | None,
        target: Target,
        labels_N: torch.Tensor,
        valid_N: torch.Tensor,
        block_size: int,
        config: ObjectiveConfig,
        scale: float | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_grad = any(ctx.needs_input_grad[:3])
        num_rows = hidden_ND.shape[0]
        grads = _Gradients(hidden_ND, features_Nr, markov_w2_Vr) if needs_grad else None
        stats = torch.zeros(
            len(RowStatistics._fields), num_rows, dtype=torch.float32, device=hidden_ND.device
        )
        chunks = _device_chunks if hidden_ND.is_cuda else _cpu_chunks
        draft = (hidden_ND, features_Nr, markov_w2_Vr)
        grad_scale = scale if needs_grad else None
        for rows, logits in chunks(
            draft, target, labels_N, valid_N, block_size, config, grad_scale, stats
        ):
            if grads is not None:
                # The gradient has taken the place of the logits.
                grads.add_chunk(logits, rows, target.lm_head_VD)
        ctx.save_for_backward(*(grads.tensors() if grads is not None else (None, None, None)))
        ctx.mark_non_differentiable(stats)
        return RowStatistics(*stats).loss(config).sum() * scale, stats

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [
            None if saved is None else (saved * upstream[0]).to(saved.dtype)
            for saved in ctx.saved_tensors
        ]
        return (*grads, *(None,) * 6)


def _cpu_chunks(
    draft: _Draft,
    target: Target,
    labels_N: torch.Tensor,
    valid_N: torch.Tensor,
    block_size: int,
    config: ObjectiveConfig,
    grad_scale: float | torch.Tensor | None,
    stats_SN: torch.Tensor,
) -> Iterator[tuple[Rows, torch.Tensor]]:
    """Chunk by chunk, fill in the statistics; rows without a label cost no vocabulary product.

    Yields:
        rows and their logits, overwritten by the gradient unless `grad_scale` is None.
    """
    hidden_ND, features_Nr, markov_w2_Vr = draft
    vocab = target.lm_head_VD.shape[0]
    step = _chunk_rows(config, block_size, hidden_ND, target.lm_head_VD)
    scratch = [torch.empty(min(block_size, hidden_ND.shape[0]), vocab) for _ in range(2)]
    scale = None if grad_scale is None else float(grad_scale)
    for first in range(0, hidden_ND.shape[0], step):
        valid_MG = valid_N[first : first + step].view(-1, block_size)
        rows = first + torch.nonzero(valid_MG.reshape(-1)).squeeze(1)
        if not rows.numel():
            continue
        logits = _draft_logits(hidden_ND, features_Nr, markov_w2_Vr, target, rows)
        unique, back = torch.unique(target.index_N[rows], return_inverse=True)
        shared = _TargetRows(target.project(target.states_UD[unique]), config)
        labels, places = labels_N[rows].tolist(), back.tolist()
        stop = 0
        for block, count in enumerate(valid_MG.sum(1).tolist()):
            start, stop = stop, stop + count
            if count:
                stats_SN[:, rows[start:stop]] = _block(
                    logits[start:stop],
                    [shared.row(places[row], labels[row]) for row in range(start, stop)],
                    labels[start:stop],
                    valid_MG[block : block + 1],
                    config,
                    scale,
                    scratch,
                )
        yield rows, logits


class _TargetRows:
    """The target's distributions at a chunk's unique positions, each computed once."""

    def __init__(self, logits_UV: torch.Tensor, config: ObjectiveConfig) -> None:
        temperature = config.temperature
        self._logits_UV, self._temperature = logits_UV, temperature
        self._probs_UV = torch.empty(logits_UV.shape, dtype=torch.float32)
        self._lse_U, self._entropy_U = [], []
        for probs_V, logits_V in zip(self._probs_UV, logits_UV, strict=True):
            lse, _ = _softmax_into(probs_V, logits_V, temperature)
            self._lse_U.append(lse)
            self._entropy_U.append(0.0)
            if config.needs_kl:
                mean = float(torch.dot(probs_V, logits_V.float())) / temperature
                self._entropy_U[-1] = lse - mean

    def row(self, place: int, label: int) -> tuple[torch.Tensor, float, float]:
        """p, float32 [V], its entropy (0 where no term has KL), and log p(label)."""
        label_logit = float(self._logits_UV[place, label]) / self._temperature
        return self._probs_UV[place], self._entropy_U[place], label_logit - self._lse_U[place]


def _softmax_into(
    out_V: torch.Tensor, logits_V: torch.Tensor, temperature: float
) -> tuple[float, float]:
    """Write softmax(logits / temperature), float32; gives the log-sum-exp and the largest logit.

    One row at a time: it stays in a core's cache from the first pass to the last, and plain
    one-dimensional passes are several times as fast as the same work on rows of a matrix.
    """
    out_V.copy_(logits_V)
    if temperature != 1.0:
        out_V.mul_(1.0 / temperature)
    largest = float(out_V.amax())
    out_V.sub_(largest).exp_()
    total = float(out_V.sum())
    out_V.mul_(1.0 / total)
    return largest + math.log(total), largest


def _block(
    logits_RV: torch.Tensor,
    targets: list[tuple[torch.Tensor, float, float]],
    labels: list[int],
    valid_1G: torch.Tensor,
    config: ObjectiveConfig,
    scale: float | None,
    scratch: list[torch.Tensor],
) -> torch.Tensor:
    """Stacked `RowStatistics` [7, R] of one block's R labelled rows.

    Unless `scale` is None, the gradient of the scaled loss overwrites `logits_RV`.

    Args:
        targets: each row's p, its entropy and log p(label).
        scratch: two float32 buffers of at least [R, V].
    """
    q_RV, below_RV = scratch
    temperature = config.temperature
    found = []
    for z, q, below, (p, entropy, label_logp), label in zip(
        logits_RV, q_RV, below_RV, targets, labels, strict=False
    ):
        lse, largest = _softmax_into(q, z, temperature)
        kl = 0.0
        if config.needs_kl:
            # From the logits, where no probability can have become 0.
            kl = lse - float(torch.dot(p, below.copy_(z))) / temperature - entropy
        label_logit = float(z[label]) / temperature
        # The first of equal logits is the choice.
        is_choice = label_logit == largest and not (
            label and float(z[:label].amax()) / temperature >= largest
        )
        alpha = min(float(torch.minimum(q, p, out=below).sum()), 1.0)
        torch.lt(q, p, out=below).mul_(q)
        ratio = math.exp(min(0.0, label_logit - lse - label_logp))
        found.append(
            (alpha, lse - label_logit, kl, float(q[label]), is_choice, float(below.sum()), ratio)
        )
    values = torch.tensor(found, dtype=torch.float32).t()
    alpha_R, ce_R, kl_R, label_q_R, hit_R, below_sum_R, ratio_R = values
    places = valid_1G.view(-1).nonzero().view(-1)

    def of_block(values_R: torch.Tensor) -> torch.Tensor:
        return torch.zeros(valid_1G.shape).index_copy_(1, places, values_R.unsqueeze(0))

    alpha_1G = of_block(alpha_R)
    weight_R = position_weights(config, alpha_1G, of_block(label_q_R), valid_1G)[0, places]
    prefix_1G, credit_1G = onpolicy_weights(of_block(ratio_R), alpha_1G, valid_1G)
    prefix_R, credit_R = prefix_1G[0, places], credit_1G[0, places]
    if scale is not None:
        weights = (weight_R, prefix_R, credit_R)
        factors = coefficients(alpha_R, below_sum_R, weights, scale / temperature, config)
        for row, (a, b, c, d) in enumerate(factors.t().tolist()):
            grad = q_RV[row].mul_(a).add_(below_RV[row], alpha=-b)
            if c:
                grad.add_(targets[row][0], alpha=-c)
            grad[labels[row]] -= d
            logits_RV[row].copy_(grad)
    return torch.stack([alpha_R, ce_R, kl_R, label_q_R, hit_R, weight_R, prefix_R])


def coefficients(
    alpha_R: torch.Tensor,
    below_R: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | torch.Tensor,
    config: ObjectiveConfig,
) -> torch.Tensor:
    """A, B, C and D of every row's scaled gradient, float32 [4, R].

    Args:
        below_R: c, the sum of q where q < p.
        weights: of the position, and both of `onpolicy_weights`, each [R].
    """
    weight_R, prefix_R, credit_R = weights
    hybrid = torch.exp(-config.eta * alpha_R)
    b = weight_R * (
        2.0 * config.l1
        + config.nla / alpha_R.clamp(min=MIN_ALPHA)
        + config.lk_hybrid * (1.0 - hybrid)
    )
    b = b + config.accept_onpolicy * prefix_R
    c = weight_R * (config.kl + config.lk_hybrid * hybrid)
    d = weight_R * config.ce + config.accept_onpolicy * credit_R
    return torch.stack((d + c + b * below_R, b, c, d)) * scale


def _device_chunks(
    draft: _Draft,
    target: Target,
    labels_N: torch.Tensor,
    valid_N: torch.Tensor,
    block_size: int,
    config: ObjectiveConfig,
    grad_scale: float | torch.Tensor | None,
    stats_SN: torch.Tensor,
) -> Iterator[tuple[Rows, torch.Tensor]]:
    """As `_cpu_chunks`, but all rows of every block, and the host waits for nothing."""
    # Triton is not on every platform.
    from dspark.kernels import objective_chunk

    hidden_ND, features_Nr, markov_w2_Vr = draft
    step = _chunk_rows(config, block_size, hidden_ND, target.lm_head_VD)
    for first in range(0, hidden_ND.shape[0], step):
        rows = slice(first, min(first + step, hidden_ND.shape[0]))
        low, high = 0, target.states_UD.shape[0]
        if target.bounds_M2 is not None:
            bounds = target.bounds_M2[rows.start // block_size : rows.stop // block_size]
            low, high = int(bounds[:, 0].min()), int(bounds[:, 1].max())
        logits = _draft_logits(hidden_ND, features_Nr, markov_w2_Vr, target, rows)
        stats_SN[:, rows] = objective_chunk(
            logits,
            target.project(target.states_UD[low:high]),
            target.index_N[rows] - low,
            labels_N[rows],
            valid_N[rows].view(-1, block_size),
            config,
            grad_scale,
        )
        yield rows, logits


def _draft_logits(
    hidden_ND: torch.Tensor,
    features_Nr: torch.Tensor | None,
    markov_w2_Vr: torch.Tensor | None,
    target: Target,
    rows: Rows,
) -> torch.Tensor:
    logits = target.project(hidden_ND[rows])
    if features_Nr is not None and markov_w2_Vr is not None:
        logits.addmm_(features_Nr[rows], markov_w2_Vr.t())
    return logits


def _chunk_rows(
    config: ObjectiveConfig, block_size: int, hidden_ND: torch.Tensor, lm_head_VD: torch.Tensor
) -> int:
    """Rows of a chunk, whole blocks: at most `config.chunk_rows`, or what suits the device."""
    rows = config.chunk_rows or CPU_CHUNK_ROWS
    if not config.chunk_rows and hidden_ND.is_cuda:
        rows = GPU_CHUNK_BYTES // (lm_head_VD.shape[0] * hidden_ND.element_size())
    num_blocks = hidden_ND.shape[0] // block_size
    num_chunks = -(-num_blocks // max(1, rows // block_size))
    # Equal chunks: a short last one would leave most of a GPU idle.
    return max(1, -(-num_blocks // max(1, num_chunks))) * block_size
