"""Triton kernels of the fused objective: what `dspark.fused` does on the CPU, on a CUDA device.

A row's logits are read once for the log-sum-exp, once with the target's for the sums over the
vocabulary, and once more for the gradient, which takes their place. Nothing of the vocabulary's
size is allocated, and the host waits for nothing. Terms and symbols are those of `dspark.fused`.

One program works on one row. Sums are kept per lane until the row's end; arithmetic is float32
whatever the logits are. Rows that are not valid are not read: scratch memory may hold NaN there.

Import this module only where it is used: triton is absent on some platforms, and decides at import
whether TRITON_INTERPRET=1 makes it run on the CPU.

Shapes: M blocks of G positions; R = M * G rows, block by block; U unique target positions;
V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from dspark.fused import RowStatistics, coefficients
from dspark.objective_config import ObjectiveConfig, onpolicy_weights, position_weights

TILE = 8192
"""Logits of a row in flight at a time; a power of two, 16 or more."""
NUM_WARPS = 16
VECTOR_BYTES = 16
"""The widest load of a thread; its logits share one rescaling of the running sum."""

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_LOWEST = tl.constexpr(-1e30)
"""Where running maxima start: finite, so that no lane takes infinity from infinity."""


# The reductions are named by their combining functions: tl.sum and tl.max are jitted themselves,
# for the device, if triton was imported before TRITON_INTERPRET was set.
@triton.jit
def _lse_kernel(
    logits_ptr,
    stride,
    valid_ptr,
    lse_ptr,
    argmax_ptr,
    vocab,
    log2_scale,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """`log2_scale` is log2(e) / temperature; without `argmax_ptr` or `valid_ptr`, None."""
    row = tl.program_id(0).to(tl.int64)
    valid = True if valid_ptr is None else tl.load(valid_ptr + row)
    if valid:
        base = logits_ptr + row * stride
        lanes = tl.arange(0, LANES)
        within = tl.arange(0, VECTOR)
        offsets = lanes[:, None] * VECTOR + within[None, :]
        best = tl.full([LANES], _LOWEST, tl.float32)
        total = tl.full([LANES], 0.0, tl.float32)
        # The tile in which each lane met its largest logit first.
        home = tl.full([LANES], 0, tl.int32)
        for start in range(0, vocab, LANES * VECTOR):
            columns = start + offsets
            x = tl.load(base + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            top = tl.reduce(x, 1, tl.standard._elementwise_max)
            home = tl.where(top > best, start, home)
            new = tl.maximum(best, top)
            terms = tl.exp2(tl.fma(x, log2_scale, -(new * log2_scale)[:, None]))
            # Difference first: where nothing was met yet, a fused multiply-add would not cancel.
            total = total * tl.exp2((best - new) * log2_scale)
            total += tl.reduce(terms, 1, tl.standard._sum_combine)
            best = new
        largest = tl.reduce(best, 0, tl.standard._elementwise_max)
        total *= tl.exp2((best - largest) * log2_scale)
        lse2 = largest * log2_scale + tl.log2(tl.reduce(total, 0, tl.standard._sum_combine))
        tl.store(lse_ptr + row, lse2 * _LN2)
        if argmax_ptr is not None:
            first = tl.where(best == largest, home + lanes * VECTOR, vocab)
            columns = tl.reduce(first, 0, tl.standard._elementwise_min) + within
            x = tl.load(base + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
            found = tl.reduce(
                tl.where(x == largest, columns, vocab), 0, tl.standard._elementwise_min
            )
            # A row of NaN has no largest logit.
            tl.store(argmax_ptr + row, tl.where(found < vocab, found, 0).to(tl.int64))
    else:
        tl.store(lse_ptr + row, 0.0)
        if argmax_ptr is not None:
            tl.store(argmax_ptr + row, tl.full([], 0, tl.int64))


@triton.jit
def _overlap_kernel(
    z_ptr,
    z_stride,
    lse_z_ptr,
    u_ptr,
    u_stride,
    lse_u_ptr,
    target_ptr,
    label_ptr,
    valid_ptr,
    out_ptr,
    rows,
    vocab,
    scale,
    NEED_KL: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """`out_ptr` has rows of alpha, c, KL, log q(label) and log p(label); `scale` is 1/T."""
    row = tl.program_id(0).to(tl.int64)
    out = out_ptr + row
    if tl.load(valid_ptr + row):
        target = tl.load(target_ptr + row)
        z_base = z_ptr + row * z_stride
        u_base = u_ptr + target * u_stride
        lse_z = tl.load(lse_z_ptr + row)
        lse_u = tl.load(lse_u_ptr + target)
        log2_scale = scale * _LOG2E
        lse2_z = lse_z * _LOG2E
        lse2_u = lse_u * _LOG2E
        offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        spare = tl.full([LANES], 0.0, tl.float32)
        below = tl.full([LANES], 0.0, tl.float32)
        kl = tl.full([LANES], 0.0, tl.float32)
        for start in range(0, vocab, LANES * VECTOR):
            columns = start + offsets
            inside = columns < vocab
            z = tl.load(z_base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            u = tl.load(u_base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            q = tl.exp2(tl.fma(z, log2_scale, -lse2_z))
            p = tl.exp2(tl.fma(u, log2_scale, -lse2_u))
            least = tl.minimum(q, p, propagate_nan=tl.PropagateNan.ALL)
            spare += tl.reduce(least, 1, tl.standard._sum_combine)
            below += tl.reduce(tl.where(q < p, q, 0.0), 1, tl.standard._sum_combine)
            if NEED_KL:
                terms = tl.where(p == 0.0, 0.0, p * (u - z))
                kl += tl.reduce(terms, 1, tl.standard._sum_combine)
        alpha = tl.reduce(spare, 0, tl.standard._sum_combine)
        # Not a minimum, which would make 1 of NaN.
        tl.store(out, tl.where(alpha > 1.0, 1.0, alpha))
        tl.store(out + rows, tl.reduce(below, 0, tl.standard._sum_combine))
        divergence = 0.0
        if NEED_KL:
            # From the logits, where no probability can have become 0.
            divergence = tl.reduce(kl, 0, tl.standard._sum_combine) * scale - lse_u + lse_z
        tl.store(out + 2 * rows, divergence)
        label = tl.load(label_ptr + row)
        tl.store(out + 3 * rows, tl.load(z_base + label).to(tl.float32) * scale - lse_z)
        tl.store(out + 4 * rows, tl.load(u_base + label).to(tl.float32) * scale - lse_u)
    else:
        tl.store(out, 0.0)
        tl.store(out + rows, 0.0)
        tl.store(out + 2 * rows, 0.0)
        tl.store(out + 3 * rows, 0.0)
        tl.store(out + 4 * rows, 0.0)


@triton.jit
def _gradient_kernel(
    z_ptr,
    z_stride,
    lse_z_ptr,
    u_ptr,
    u_stride,
    lse_u_ptr,
    target_ptr,
    label_ptr,
    valid_ptr,
    coefficients_ptr,
    rows,
    vocab,
    scale,
    TILE: tl.constexpr,
):
    """Overwrite z by A q - B t - C p - D e_y; `coefficients_ptr` has rows of A, B, C and D."""
    row = tl.program_id(0).to(tl.int64)
    z_base = z_ptr + row * z_stride
    offsets = tl.arange(0, TILE)
    if tl.load(valid_ptr + row):
        target = tl.load(target_ptr + row)
        label = tl.load(label_ptr + row).to(tl.int32)
        u_base = u_ptr + target * u_stride
        log2_scale = scale * _LOG2E
        lse2_z = tl.load(lse_z_ptr + row) * _LOG2E
        lse2_u = tl.load(lse_u_ptr + target) * _LOG2E
        a = tl.load(coefficients_ptr + row)
        b = tl.load(coefficients_ptr + rows + row)
        c = tl.load(coefficients_ptr + 2 * rows + row)
        d = tl.load(coefficients_ptr + 3 * rows + row)
        for start in range(0, vocab, TILE):
            columns = start + offsets
            inside = columns < vocab
            z = tl.load(z_base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            u = tl.load(u_base + columns, mask=inside, other=float("-inf")).to(tl.float32)
            q = tl.exp2(tl.fma(z, log2_scale, -lse2_z))
            p = tl.exp2(tl.fma(u, log2_scale, -lse2_u))
            gradient = q * tl.where(q < p, a - b, a) - c * p
            gradient -= tl.where(columns == label, d, 0.0)
            tl.store(z_base + columns, gradient.to(z_ptr.dtype.element_ty), mask=inside)
    else:
        zeros = tl.full([TILE], 0.0, z_ptr.dtype.element_ty)
        for start in range(0, vocab, TILE):
            columns = start + offsets
            tl.store(z_base + columns, zeros, mask=columns < vocab)


def row_lse(
    logits_RV: torch.Tensor,
    temperature: float,
    *,
    valid_R: torch.Tensor | None = None,
    with_argmax: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-sum-exp of each row's logits / temperature, and the first of its largest logits.

    Args:
        logits_RV: bfloat16 or float32, each row contiguous.
        valid_R: bool; rows that are not valid are not read and give 0. None: all are.
        with_argmax: False gives None in its place.

    Returns:
        lse float32 [R], natural; argmax int64 [R], 0 for a row of NaN.
    """
    rows, vocab = logits_RV.shape
    lse = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    argmax = torch.empty(rows, dtype=torch.int64, device=lse.device) if with_argmax else None
    _launch(
        _lse_kernel,
        logits_RV,
        logits_RV,
        _row_stride(logits_RV),
        None if valid_R is None else valid_R.contiguous(),
        lse,
        argmax,
        vocab,
        math.log2(math.e) / temperature,
        **_lanes(logits_RV),
    )
    return lse, argmax


def row_overlap(
    z_RV: torch.Tensor,
    lse_z_R: torch.Tensor,
    u_UV: torch.Tensor,
    lse_u_U: torch.Tensor,
    target_of_row_R: torch.Tensor,
    labels_R: torch.Tensor,
    valid_R: torch.Tensor,
    temperature: float,
    *,
    need_kl: bool,
) -> tuple[torch.Tensor, ...]:
    """What a row's draft and target share, by one pass over both rows of logits.

    Args:
        z_RV, u_UV: the draft's and the target's logits, bfloat16 or float32, rows contiguous.
        lse_z_R, lse_u_U: float32, their `row_lse` at the same temperature.
        target_of_row_R: int64, the row of u that gives p. labels_R: int64. valid_R: bool.
        need_kl: False gives 0 for KL.

    Returns:
        alpha, c (the sum of q where q < p), KL(p‖q), log q(label) and log p(label), each float32
        [R]; 0 for rows that are not valid, which are not read.
    """
    rows, vocab = z_RV.shape
    found = torch.empty(5, rows, dtype=torch.float32, device=z_RV.device)
    _launch(
        _overlap_kernel,
        z_RV,
        *(z_RV, _row_stride(z_RV), lse_z_R, u_UV, _row_stride(u_UV), lse_u_U),
        *(target_of_row_R.contiguous(), labels_R.contiguous(), valid_R.contiguous()),
        *(found, rows, vocab, 1.0 / temperature),
        NEED_KL=need_kl,
        **_lanes(z_RV),
    )
    return found.unbind()


def logit_gradient_(
    z_RV: torch.Tensor,
    lse_z_R: torch.Tensor,
    u_UV: torch.Tensor,
    lse_u_U: torch.Tensor,
    target_of_row_R: torch.Tensor,
    labels_R: torch.Tensor,
    valid_R: torch.Tensor,
    temperature: float,
    coefficients_4R: torch.Tensor,
) -> None:
    """Overwrite the draft's logits by A q - B t - C p - D e_y, in their type.

    Rows that are not valid become 0, whatever they held.

    Args:
        coefficients_4R: float32, rows of A, B, C and D, times the row's factor.
        Others: as for `row_overlap`.
    """
    rows, vocab = z_RV.shape
    _launch(
        _gradient_kernel,
        z_RV,
        *(z_RV, _row_stride(z_RV), lse_z_R, u_UV, _row_stride(u_UV), lse_u_U),
        *(target_of_row_R.contiguous(), labels_R.contiguous(), valid_R.contiguous()),
        *(coefficients_4R.contiguous(), rows, vocab, 1.0 / temperature),
        TILE=_tile_size(vocab),
    )


def objective_chunk(
    z_RV: torch.Tensor,
    u_UV: torch.Tensor,
    target_of_row_R: torch.Tensor,
    labels_R: torch.Tensor,
    valid_MG: torch.Tensor,
    config: ObjectiveConfig,
    scale: float | torch.Tensor | None,
) -> torch.Tensor:
    """Stacked `RowStatistics` [7, R] of all rows of whole blocks, without waiting for the device.

    Args:
        z_RV, u_UV: the draft's logits of every row and the target's of every unique position,
            bfloat16 or float32, rows contiguous.
        target_of_row_R, labels_R: int64; valid_MG: bool. Where it is False, nothing else is read.
        scale: on the loss, a number or a scalar tensor; the gradient of the scaled loss then
            overwrites `z_RV`, 0 where not valid. None leaves the logits as they are.
    """
    valid_R = valid_MG.reshape(-1)
    lse_z, choice = row_lse(z_RV, config.temperature, valid_R=valid_R)
    lse_u, _ = row_lse(u_UV, config.temperature, with_argmax=False)
    pair = (z_RV, lse_z, u_UV, lse_u, target_of_row_R, labels_R, valid_R, config.temperature)
    alpha, below, kl, label_logprob, label_logp = row_overlap(*pair, need_kl=config.needs_kl)
    label_q = label_logprob.exp() * valid_R
    weight = position_weights(
        config, alpha.view(valid_MG.shape), label_q.view(valid_MG.shape), valid_MG
    ).reshape(-1)
    ratio = (label_logprob - label_logp).clamp(max=0.0).exp()
    prefix, credit = (
        w.reshape(-1)
        for w in onpolicy_weights(ratio.view(valid_MG.shape), alpha.view(valid_MG.shape), valid_MG)
    )
    hit = (choice == labels_R) & valid_R
    found = RowStatistics(alpha, -label_logprob, kl, label_q, hit.float(), weight, prefix)
    if scale is not None:
        weights = (weight, prefix, credit)
        factors = coefficients(alpha, below, weights, scale / config.temperature, config)
        logit_gradient_(*pair, factors)
    return torch.stack(found)


def _tile_size(vocab: int) -> int:
    """The power of two that a row is cut by: `TILE`, or less for a small vocabulary."""
    return min(TILE, max(16, triton.next_power_of_2(vocab)))


def _lanes(logits: torch.Tensor) -> dict[str, int]:
    """How a tile is laid out where a thread first sums what it loads at once."""
    vector = VECTOR_BYTES // logits.element_size()
    return {"LANES": _tile_size(logits.shape[1]) // vector, "VECTOR": vector}


def _row_stride(logits: torch.Tensor) -> int:
    assert logits.shape[1] == 1 or logits.stride(1) == 1, (
        f"rows of logits must be contiguous, strides are {logits.stride()}"
    )
    return logits.stride(0)


def _launch(kernel: Any, rows_of: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Run one program for each row of `rows_of`, on its device."""
    num_rows = rows_of.shape[0]
    if num_rows:
        with torch.cuda.device_of(rows_of):
            kernel[(num_rows,)](*arguments, **constants, num_warps=NUM_WARPS)
