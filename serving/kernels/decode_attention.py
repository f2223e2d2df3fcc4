"""Attention of a few query tokens per request over paged keys and values, one launch a layer.

For the steps of speculative decoding at small batch: every request has the same Q query tokens,
the last ones of its sequence (verification), or a block that sees all of it (a draft's). Such a
step reads each key and value once and computes next to nothing, so the sequence is split among as
many programs as the GPU has multiprocessors, whatever the batch, and all query rows that share a
KV head are the rows of one product.

A program leaves its part's normalized sum and log-sum-exp in scratch memory. `merge="last"`: the
program that finds by a counter that it came last for its request and KV head merges the parts.
`merge="second"`: a second kernel does. With one part there is nothing to merge.

Why `last` is sound: all threads of a program store their part, a barrier of the program makes
these stores happen before what its first thread does next, and that thread's increment releases and
acquires at the GPU's scope. Increments of a counter are read-modify-writes, so each sees those
before it, and the last one has acquired all parts; a second barrier passes this on to the other
threads. In machine code (sm_90): MEMBAR.GPU before the atomic, CCTL.IVALL, which empties the L1
cache, behind it. The last program puts the counter back to zero, which the end of the kernel orders
before the next launch on the stream.

Scratch is kept for each shape and used by all layers: launches of one shape must follow each other
on one stream. It has to be there before a CUDA graph is captured, so the first call of a shape
must be made outside of one; every graph runner warms up that way.

Import this module only where it is used: triton decides at import whether TRITON_INTERPRET=1 makes
it run on the CPU.

Shapes: B requests, Q query tokens of each, H heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEAD_DIMS = (64, 128)
MAX_ROWS = 128
"""Query tokens times heads that share a KV head; more do not fit the registers."""
CHUNK_TOKENS = 16
"""A part's length is a multiple of it: coarser ones leave the last part short."""
MERGE_ROWS = {"last": 32, "second": 4}
"""Rows that are merged at once: by the one program that came last, or by one of many."""
MERGE_STAGES = 6
"""Parts that are loaded at once while others are summed."""

_LOG2E = math.log2(math.e)
_LOWEST = tl.constexpr(-1e30)
"""Where running maxima start: finite, so that no row takes infinity from infinity."""


# tl.cdiv, tl.zeros, tl.max and the like are jitted themselves, for the device, if triton was
# imported before TRITON_INTERPRET was set; hence the spelled-out forms.
@triton.jit
def _parts(length, NUM_SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of a part, and how many parts there are; one that is empty for no tokens.

    A part is as short as the splits allow, but fills a block: shorter ones read no faster.
    """
    even = (length + NUM_SPLITS - 1) // NUM_SPLITS
    size = tl.maximum((even + CHUNK - 1) // CHUNK * CHUNK, BLOCK_N)
    return size, tl.maximum((length + size - 1) // size, 1)


@triton.jit
def _merge_rows(
    out_ptr,
    out_stride_token,
    out_stride_head,
    partial_ptr,
    lse_ptr,
    request,
    head,
    first,
    used,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum up all parts of ROWS rows from `first` on and write them."""
    rows = first + tl.arange(0, ROWS)
    inside = rows < Q_LEN * GROUP
    columns = tl.arange(0, HEAD_DIM)
    places = rows[:, None] * HEAD_DIM + columns[None, :]
    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    result = tl.full([ROWS, HEAD_DIM], 0.0, tl.float32)
    for split in tl.range(0, used, num_stages=STAGES):
        lse = tl.load(
            lse_ptr + split * BLOCK_M + rows,
            mask=inside,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part = tl.load(
            partial_ptr + split * BLOCK_M * HEAD_DIM + places,
            mask=inside[:, None],
            other=0.0,
            cache_modifier=".cg",
        ).to(tl.float32)
        new = tl.maximum(top, lse)
        decay = tl.exp2(top - new)
        weight = tl.exp2(lse - new)
        total = total * decay + weight
        result = result * decay[:, None] + part * weight[:, None]
        top = new
    result = result / tl.where(total > 0.0, total, 1.0)[:, None]
    out = (request * Q_LEN + rows // GROUP) * out_stride_token
    out += (head * GROUP + rows % GROUP) * out_stride_head
    tl.store(
        out_ptr + out[:, None] + columns[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=inside[:, None],
    )


@triton.jit
def decode_attention_kernel(
    q_ptr,
    q_stride_token,
    q_stride_head,
    k_ptr,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_ptr,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    table_ptr,
    table_stride,
    lengths_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    scale_log2,
    num_kv_heads,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE_LAST: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A part of one request's tokens for one KV head. Row i * GROUP + g: head g of query i."""
    if EARLY:
        # The second kernel may come as soon as all programs run: it waits for their end itself.
        gdc_launch_dependents()
    split = tl.program_id(0)
    pair = tl.program_id(1)
    request = pair // num_kv_heads
    head = pair % num_kv_heads
    length = tl.load(lengths_ptr + request)
    size, used = _parts(length, NUM_SPLITS, CHUNK, BLOCK_N)
    if split < used:
        start = split * size
        stop = tl.minimum(start + size, length)
        rows = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, HEAD_DIM)
        inside = rows < Q_LEN * GROUP
        token = rows // GROUP
        q_heads = head * GROUP + rows % GROUP
        tokens = request * Q_LEN + token
        q = tl.load(
            q_ptr + (tokens * q_stride_token + q_heads * q_stride_head)[:, None] + columns[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        # The first position that a row may not see.
        end = tl.full([BLOCK_M], 0, tl.int32) + stop
        if CAUSAL:
            end = tl.minimum(end, length - Q_LEN + 1 + token)
        table = table_ptr + request.to(tl.int64) * table_stride
        k_base = k_ptr + head * k_stride_head
        v_base = v_ptr + head * v_stride_head
        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        result = tl.full([BLOCK_M, HEAD_DIM], 0.0, tl.float32)
        # Pages of the next block are asked for before this one's keys and values are used.
        position = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + position // PAGE_SIZE, mask=position < stop, other=0)
        for first in range(start, stop, BLOCK_N):
            position = first + tl.arange(0, BLOCK_N)
            held = position < stop
            # A pool has more elements than an int32 can count.
            pages = page.to(tl.int64)
            within = position % PAGE_SIZE
            later = position + BLOCK_N
            page = tl.load(table + later // PAGE_SIZE, mask=later < stop, other=0)
            # Slots past the end may hold NaN, of which no weight makes 0.
            k = tl.load(
                k_base
                + (pages * k_stride_page + within * k_stride_slot)[:, None]
                + columns[None, :],
                mask=held[:, None],
                other=0.0,
            )
            score = tl.dot(q, tl.trans(k)) * scale_log2
            score = tl.where(position[None, :] < end[:, None], score, float("-inf"))
            new = tl.maximum(top, tl.reduce(score, 1, tl.standard._elementwise_max))
            decay = tl.exp2(top - new)
            weight = tl.exp2(score - new[:, None])
            total = total * decay + tl.reduce(weight, 1, tl.standard._sum_combine)
            v = tl.load(
                v_base
                + (pages * v_stride_page + within * v_stride_slot)[:, None]
                + columns[None, :],
                mask=held[:, None],
                other=0.0,
            )
            result = tl.dot(weight.to(v.dtype), v, result * decay[:, None])
            top = new
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        out = (
            out_ptr
            + (tokens * out_stride_token + q_heads * out_stride_head)[:, None]
            + columns[None, :]
        )
        if used == 1:
            tl.store(out, result.to(out_ptr.dtype.element_ty), mask=inside[:, None])
        else:
            parts = pair.to(tl.int64) * NUM_SPLITS * BLOCK_M
            lse_base = lse_ptr + parts
            partial_base = partial_ptr + parts * HEAD_DIM
            tl.store(lse_base + split * BLOCK_M + rows, top + tl.log2(total), mask=inside)
            tl.store(
                partial_base
                + split * BLOCK_M * HEAD_DIM
                + rows[:, None] * HEAD_DIM
                + columns[None, :],
                result.to(partial_ptr.dtype.element_ty),
                mask=inside[:, None],
            )
            if MERGE_LAST:
                # One thread counts; the others' stores have to come before.
                tl.debug_barrier()
                before = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                if before == used - 1:
                    for first in range(0, Q_LEN * GROUP, MERGE_ROWS):
                        _merge_rows(
                            out_ptr,
                            out_stride_token,
                            out_stride_head,
                            partial_base,
                            lse_base,
                            request,
                            head,
                            first,
                            used,
                            Q_LEN,
                            GROUP,
                            BLOCK_M,
                            HEAD_DIM,
                            MERGE_ROWS,
                            MERGE_STAGES,
                        )
                    tl.store(counter_ptr + pair, 0)


@triton.jit
def merge_attention_kernel(
    lengths_ptr,
    out_ptr,
    out_stride_token,
    out_stride_head,
    partial_ptr,
    lse_ptr,
    num_kv_heads,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A few rows of one request and KV head. EARLY: launched before the parts are there."""
    pair = tl.program_id(0)
    request = pair // num_kv_heads
    if EARLY:
        gdc_wait()
    _, used = _parts(tl.load(lengths_ptr + request), NUM_SPLITS, CHUNK, BLOCK_N)
    if used > 1:
        parts = pair.to(tl.int64) * NUM_SPLITS * BLOCK_M
        _merge_rows(
            out_ptr,
            out_stride_token,
            out_stride_head,
            partial_ptr + parts * HEAD_DIM,
            lse_ptr + parts,
            request,
            pair % num_kv_heads,
            tl.program_id(1) * MERGE_ROWS,
            used,
            Q_LEN,
            GROUP,
            BLOCK_M,
            HEAD_DIM,
            MERGE_ROWS,
            MERGE_STAGES,
        )


@dataclass(frozen=True)
class Tiling:
    """How the work is cut. Results differ between tilings by rounding only."""

    num_splits: int
    """Parts at most, of the longest sequence."""
    block_n: int = 64
    """Tokens that are loaded at once."""
    num_warps: int = 4
    num_stages: int = 4
    """One more than the blocks of keys and values that are on their way or in use."""
    merge: Literal["last", "second"] = "last"
    early: bool = False
    """Launch the second kernel while the first one runs (programmatic dependent launch)."""
    half_parts: bool = False
    """Keep parts in the query's type: half the bytes to merge, and rounded once more."""


ROWS_TO_BLOCKS = {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 4), 128: (64, 8, 3)}
"""By rows of the product, padded: block_n, num_warps and num_stages."""


def pick_tiling(num_requests: int, num_kv_heads: int, num_rows: int, num_sms: int) -> Tiling:
    """The tiling for a GPU with so many multiprocessors.

    One program for each: twice as many would double what is merged and fill the memory's
    bandwidth no better.
    """
    block_n, num_warps, num_stages = ROWS_TO_BLOCKS[padded_rows(num_rows)]
    num_splits = max(1, num_sms // (num_requests * num_kv_heads))
    return Tiling(num_splits, block_n, num_warps, num_stages)


def padded_rows(num_rows: int) -> int:
    """Rows of the product: a power of two that tensor cores take."""
    return max(16, 1 << (num_rows - 1).bit_length())


def refusal(
    q_THD: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, num_requests: int
) -> str:
    """Why these queries and pools are not served; empty if they are."""
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_pool.shape[-2]
    if head_dim not in HEAD_DIMS or v_pool.shape[-1] != head_dim:
        return f"head size {head_dim}"
    if q_THD.dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q_THD.dtype}"
    if k_pool.dtype != q_THD.dtype or v_pool.dtype != q_THD.dtype:
        return f"keys are {k_pool.dtype} and values {v_pool.dtype}, queries {q_THD.dtype}"
    if heads % kv_heads:
        return f"{heads} heads over {kv_heads} KV heads"
    if not num_requests or tokens % num_requests:
        return f"{tokens} query tokens of {num_requests} requests"
    if tokens // num_requests * (heads // kv_heads) > MAX_ROWS:
        return f"more than {MAX_ROWS} query rows on a KV head"
    if not q_THD.stride(2) == k_pool.stride(-1) == v_pool.stride(-1) == 1:
        return "heads are not contiguous"
    return ""


def decode_attention(
    q_THD: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    out_THD: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Attention of each request's Q query tokens over its cached keys and values.

    Nothing is read on the host, so the call can be captured. A request of length 0 gives zeros, as
    does a query that sees no token.

    Args:
        q_THD: bfloat16 or float16 [B * Q, H, D], request by request; may be a part of a wider row.
        k_pool, v_pool: [slots, K, D], or [pages, page size, K, D], same type, heads contiguous.
        page_table: int32 [B, max pages], each row contiguous; used up to the sequence's length.
        cache_seqlens: int32 [B], tokens with the Q last ones, which are in the pools.
        causal: query i sees all but the last Q - 1 - i tokens; otherwise it sees all.
        scale: of the scores, 1 / sqrt(D) by default.
        out_THD: where to write; new by default.

    Returns:
        [B * Q, H, D] in the query's type.

    Raises:
        ValueError: shapes or types that the kernel does not serve.
        RuntimeError: the first call of a shape is being captured.
    """
    num_requests = cache_seqlens.shape[0]
    if why := refusal(q_THD, k_pool, v_pool, num_requests):
        raise ValueError(f"decode_attention does not serve this: {why}")
    tokens, heads, head_dim = q_THD.shape
    kv_heads = k_pool.shape[-2]
    group, q_len = heads // kv_heads, tokens // num_requests
    if out_THD is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if tiling is None:
        tiling = pick_tiling(num_requests, kv_heads, q_len * group, num_sms(q_THD.device))
    pairs = num_requests * kv_heads
    block_m = padded_rows(q_len * group)
    parts = q_THD.dtype if tiling.half_parts else torch.float32
    scratch = Scratch.of(q_THD.device, pairs, tiling.num_splits, block_m, head_dim, parts)
    second = tiling.merge == "second" and tiling.num_splits > 1
    shape = {
        "Q_LEN": q_len,
        "GROUP": group,
        "NUM_SPLITS": tiling.num_splits,
        "CHUNK": CHUNK_TOKENS,
        "BLOCK_M": block_m,
        "BLOCK_N": tiling.block_n,
        "HEAD_DIM": head_dim,
        "MERGE_STAGES": MERGE_STAGES,
        "EARLY": second and tiling.early,
    }
    scale_log2 = (head_dim**-0.5 if scale is None else scale) * _LOG2E
    out = (out_THD, out_THD.stride(0), out_THD.stride(1))
    with torch.cuda.device_of(q_THD):
        decode_attention_kernel[(tiling.num_splits, pairs)](
            *(q_THD, q_THD.stride(0), q_THD.stride(1)),
            *(k_pool, *_strides(k_pool), v_pool, *_strides(v_pool)),
            *(page_table, page_table.stride(0), cache_seqlens),
            *(*out, *scratch.tensors, scale_log2, kv_heads),
            CAUSAL=causal,
            PAGE_SIZE=k_pool.shape[1] if k_pool.dim() == 4 else 1,
            MERGE_LAST=tiling.merge == "last",
            MERGE_ROWS=min(block_m, MERGE_ROWS["last"]),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **shape,
        )
        if second:
            rows = MERGE_ROWS["second"]
            options: dict[str, Any] = {"launch_pdl": True} if tiling.early else {}
            merge_attention_kernel[(pairs, -(-q_len * group // rows))](
                *(cache_seqlens, *out, scratch.partial, scratch.lse, kv_heads),
                MERGE_ROWS=rows,
                num_warps=4,
                **shape,
                **options,
            )
    return out_THD


def _strides(pool: torch.Tensor) -> tuple[int, int, int]:
    """Elements from page to page, from slot to slot of a page, and from head to head."""
    if pool.dim() == 3:
        return pool.stride(0), 0, pool.stride(1)
    return pool.stride(0), pool.stride(1), pool.stride(2)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; on the CPU, where an interpreter runs, those of an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Scratch:
    """Memory between the programs of a launch. It holds nothing from one launch to the next."""

    partial: torch.Tensor
    """[pairs, splits, rows, D], normalized."""
    lse: torch.Tensor
    """float32 [pairs, splits, rows], to the base 2."""
    counter: torch.Tensor
    """int32 [pairs], 0 between launches."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.partial, self.lse, self.counter

    @staticmethod
    @cache
    def of(
        device: torch.device, pairs: int, splits: int, rows: int, head_dim: int, parts: torch.dtype
    ) -> Scratch:
        """The one for this shape. Raises RuntimeError if it would be made during a capture."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A graph would clear the counters on each replay, and only in its own turn.
            raise RuntimeError("the first call of a shape must be made outside of a CUDA graph")
        return Scratch(
            torch.empty(pairs, splits, rows, head_dim, dtype=parts, device=device),
            torch.empty(pairs, splits, rows, dtype=torch.float32, device=device),
            torch.zeros(pairs, dtype=torch.int32, device=device),
        )
