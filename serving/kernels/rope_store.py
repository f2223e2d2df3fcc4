"""Norms of queries and keys, their rotation, and the store of keys and values, in one launch.

A step of a few tokens spends more on each of these launches than on their data. Every program takes
some heads of one token out of q, k and v as they lie side by side behind their product, and writes
them where attention reads them: queries into memory of their own, keys and values into the pool.

What is rounded is what SGLang's kernels round: the normed value, and the rotated one.

Import this module only where it is used: triton decides at import whether TRITON_INTERPRET=1 makes
it run on the CPU.

Shapes: T tokens, H heads, K KV heads, D head size, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADS = 4
"""Of a program, one for each warp."""


@triton.jit
def rope_store_kernel(
    qkv_ptr,
    qkv_stride,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    k_stride_slot,
    k_stride_head,
    v_ptr,
    v_stride_slot,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A few heads of one token."""
    if EARLY:
        # The next kernel waits for the end of this one, and so of all before. It begins when the
        # product before this one has waited itself: what is older than that one, it may read.
        gdc_launch_dependents()
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, half)[None, :]
    is_q = (head < NUM_HEADS)[:, None]
    is_k = ((head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS))[:, None]
    is_v = ((head >= NUM_HEADS + KV_HEADS) & (head < NUM_HEADS + 2 * KV_HEADS))[:, None]
    # What is older than the product before is read while that one ends.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + column)
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + half + column)
    if q_weight_ptr is not None:
        q_weight, k_weight = tl.load(q_weight_ptr + column), tl.load(k_weight_ptr + column)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + half + column)
        k_weight = tl.load(k_weight_ptr + half + column)
        other_weight = tl.where(is_q, q_weight, k_weight).to(tl.float32)
    if EARLY:
        gdc_wait()
    at = qkv_ptr + token.to(tl.int64) * qkv_stride + (head * HEAD_DIM)[:, None] + column
    held = is_q | is_k | is_v
    first = tl.load(at, mask=held, other=0.0)
    second = tl.load(at + half, mask=held, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.reduce(x * x + y * y, 1, tl.standard._sum_combine)
        factor = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        x = x * factor * weight
        y = y * factor * other_weight
        x = x.to(first.dtype).to(tl.float32)
        y = y.to(first.dtype).to(tl.float32)
    low = (x * cos - y * sin).to(first.dtype)
    high = (y * cos + x * sin).to(first.dtype)
    q_at = q_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column
    tl.store(q_at, low, mask=is_q)
    tl.store(q_at + half, high, mask=is_q)
    k_at = k_ptr + slot * k_stride_slot + ((head - NUM_HEADS) * k_stride_head)[:, None] + column
    tl.store(k_at, low, mask=is_k)
    tl.store(k_at + half, high, mask=is_k)
    v_head = head - NUM_HEADS - KV_HEADS
    v_at = v_ptr + slot * v_stride_slot + (v_head * v_stride_head)[:, None] + column
    tl.store(v_at, first, mask=is_v)
    tl.store(v_at + half, second, mask=is_v)


def refusal(
    qkv: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    cos_sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
) -> str:
    """Why this is not served; empty if it is."""
    head_dim = k_pool.shape[-1]
    given = (qkv, k_pool, v_pool, *(norms or ()))
    for bad, why in (
        (qkv.dtype not in (torch.bfloat16, torch.float16), f"values are {qkv.dtype}"),
        (any(tensor.dtype != qkv.dtype for tensor in given), "types differ"),
        (k_pool.dim() != 3 or v_pool.shape != k_pool.shape, "a pool of another shape"),
        (head_dim not in (32, 64, 128, 256), f"head size {head_dim}"),
        (cos_sin.dtype != torch.float32, f"rotations are {cos_sin.dtype}"),
        (cos_sin.shape[-1] != head_dim or not cos_sin.is_contiguous(), "part of a head is rotated"),
        (any(tensor.stride(-1) != 1 for tensor in given), "heads are not contiguous"),
        (
            norms is not None and any(norm.shape != (head_dim,) for norm in norms),
            "norms of another size",
        ),
    ):
        if bad:
            return why
    return ""


def rope_store(
    qkv: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    early: bool = True,
) -> torch.Tensor:
    """Queries ready for attention; keys and values are in the pools.

    Nothing is read on the host, so the call can be captured.

    Args:
        qkv: bfloat16 or float16 [T, (H + 2 * K) * D].
        k_pool, v_pool: [S, K, D], same type; written at `slots`.
        slots, positions: int32 or int64 [T].
        cos_sin: float32 [positions, D], cosines and then sines of D / 2 frequencies.
        norms: weights [D] of the RMS norms of queries and keys; none by default.
        early: programmatic dependent launch, from Hopper on.

    Returns:
        [T, H * D].

    Raises:
        ValueError: what `refusal` refuses.
    """
    if why := refusal(qkv, k_pool, v_pool, cos_sin, norms):
        raise ValueError(f"rope_store does not serve this: {why}")
    _, kv_heads, head_dim = k_pool.shape
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(len(qkv), num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    early = early and qkv.is_cuda
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    q_norm, k_norm = norms or (None, None)
    with torch.cuda.device_of(qkv):
        rope_store_kernel[(len(qkv), -(-(num_heads + 2 * kv_heads) // HEADS))](
            *(qkv, qkv.stride(0), q_norm, k_norm, eps, cos_sin, positions, slots, q),
            *(k_pool, k_pool.stride(0), k_pool.stride(1)),
            *(v_pool, v_pool.stride(0), v_pool.stride(1)),
            NUM_HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HEADS=HEADS,
            EARLY=early,
            num_warps=HEADS,
            **options,
        )
    return q
