"""Attention of a few query tokens per request over paged keys and values, two launches a layer.

For the steps of speculative decoding at small batch: every request has the same Q query tokens,
the last ones of its sequence (verification), or a block that sees all of it (a draft's). Such a
step reads each key and value once and computes next to nothing, so the sequence is split among as
many programs as the GPU has multiprocessors, whatever the batch, and all query rows that share a
KV head are the columns of one product: keys times queries, then values times weights, both
transposed. Keys and values, of which there are many, so fill the height of 64 that Hopper's tensor
cores have, and are taken from shared memory as they came, with no detour through registers.

A program leaves its part's normalized sum and log-sum-exp in scratch memory, and a second kernel
merges the parts. Where one part is enough the first kernel writes the result.

`early` overlaps what it can (programmatic dependent launch): the first kernel is set up while the
kernel before it runs, reads lengths and pages, and asks for keys and values of its first `ahead`
tokens to come to L2; the second one is set up while the first ends. Lengths and page table must
therefore be older than the kernel before. A layer's are: the product that gives its queries lies
between, which is over by then or has waited for all before itself.

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
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEAD_DIMS = (64, 128)
MAX_ROWS = 128
"""Query tokens times heads that share a KV head; more do not fit the registers."""
CHUNK_TOKENS = 16
"""A part's length is a multiple of it: coarser ones leave the last part short."""
LEAST_TOKENS = 64
"""Of a part, if a block has as many: shorter ones read no faster."""
AHEAD_TOKENS = 32
"""Of each part that come to L2 before the kernel begins: as many as fit behind a rotation."""
MERGE_PARTS = 32
"""Parts that are loaded at once to be merged, at most."""

_LOG2E = math.log2(math.e)
_LINE: tl.constexpr = tl.constexpr(64)
"""16-bit values in a line of 128 bytes."""
_LOWEST = tl.constexpr(-1e30)
"""Where running maxima start: finite, so that no row takes infinity from infinity."""


# tl.cdiv, tl.zeros, tl.max and the like are jitted themselves, for the device, if triton was
# imported before TRITON_INTERPRET was set; hence the spelled-out forms.
@triton.jit
def _parts(length, NUM_SPLITS: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """Tokens of a part, and how many parts there are; one that is empty for no tokens."""
    even = (length + NUM_SPLITS - 1) // NUM_SPLITS
    size = tl.maximum((even + CHUNK - 1) // CHUNK * CHUNK, LEAST)
    return size, tl.maximum((length + size - 1) // size, 1)


@triton.jit
def _bring(
    base, table, first, last, stride_page, stride_slot, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Ask for the lines of TOKENS tokens from `first` on to come to L2, for none behind `last`."""
    position = tl.minimum(first + tl.arange(0, TOKENS), last)
    page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    lines = tl.arange(0, HEAD_DIM // _LINE) * _LINE
    places = page * stride_page + position % PAGE_SIZE * stride_slot
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(base + places[:, None] + lines[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
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
    scale_log2,
    num_kv_heads,
    Q_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A part of one request's tokens for one KV head. Row i * GROUP + g: head g of query i."""
    split = tl.program_id(0)
    pair = tl.program_id(1)
    request = pair // num_kv_heads
    head = pair % num_kv_heads
    table = table_ptr + request.to(tl.int64) * table_stride
    k_base = k_ptr + head * k_stride_head
    v_base = v_ptr + head * v_stride_head
    length = tl.load(lengths_ptr + request)
    size, used = _parts(length, NUM_SPLITS, CHUNK, LEAST)
    # A program without a part looks at the last token, and ends.
    final = tl.maximum(tl.minimum(split * size + size, length) - 1, 0)
    start = tl.minimum(split * size, final)
    # Pages of the next block are asked for before this one's keys and values are used.
    page = tl.load(table + tl.minimum(start + tl.arange(0, BLOCK_N), final) // PAGE_SIZE)
    if EARLY:
        if AHEAD:
            _bring(
                *(k_base, table, start, final, k_stride_page, k_stride_slot),
                *(PAGE_SIZE, HEAD_DIM, AHEAD),
            )
            _bring(
                *(v_base, table, start, final, v_stride_page, v_stride_slot),
                *(PAGE_SIZE, HEAD_DIM, AHEAD),
            )
        gdc_wait()
    if split < used:
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
        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        # Weights are summed over tokens of a kind, and over kinds at the end: one sum across warps
        # instead of one for each block.
        total = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
        result = tl.full([HEAD_DIM, BLOCK_M], 0.0, tl.float32)
        for first in range(start, stop, BLOCK_N):
            position = first + tl.arange(0, BLOCK_N)
            held = position < stop
            # A pool has more elements than an int32 can count, but not more pieces of 16 bytes.
            within = position % PAGE_SIZE
            k_pieces = page * (k_stride_page // 8) + within * (k_stride_slot // 8)
            v_pieces = k_pieces
            if not SAME_STRIDES:
                v_pieces = page * (v_stride_page // 8) + within * (v_stride_slot // 8)
            k_places = k_pieces.to(tl.int64) * 8
            v_places = v_pieces.to(tl.int64) * 8
            later = tl.minimum(position + BLOCK_N, final)
            page = tl.load(table + later // PAGE_SIZE)
            # What a key past the end holds is not looked at. A value there may be NaN, of which no
            # weight makes 0.
            k = tl.load(k_base + k_places[:, None] + columns[None, :], mask=held[:, None])
            v = tl.load(
                v_base + v_places[:, None] + columns[None, :], mask=held[:, None], other=0.0
            )
            score = tl.dot(k, tl.trans(q))
            score = tl.where(position[:, None] < end[None, :], score, float("-inf"))
            new = tl.maximum(top, tl.reduce(score, 0, tl.standard._elementwise_max) * scale_log2)
            decay = tl.exp2(top - new)
            weight = tl.exp2(score * scale_log2 - new[None, :])
            total = total * decay[None, :] + weight
            result = tl.dot(tl.trans(v), weight.to(v.dtype), result * decay[None, :])
            top = new
        sums = tl.reduce(total, 0, tl.standard._sum_combine)
        if EARLY:
            # Once all programs have come here the second kernel is set up; it waits for their end.
            gdc_launch_dependents()
        result = tl.trans(result / tl.where(sums > 0.0, sums, 1.0)[None, :])
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
            tl.store(lse_base + split * BLOCK_M + rows, top + tl.log2(sums), mask=inside)
            tl.store(
                partial_base
                + split * BLOCK_M * HEAD_DIM
                + rows[:, None] * HEAD_DIM
                + columns[None, :],
                result.to(partial_ptr.dtype.element_ty),
                mask=inside[:, None],
            )


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
    LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A row of one request and KV head, by one warp."""
    pair = tl.program_id(0)
    row = tl.program_id(1)
    request = pair // num_kv_heads
    if EARLY:
        # The kernel after this one waits for the end of this one, and so of all before.
        gdc_launch_dependents()
    length = tl.load(lengths_ptr + request)
    _, used = _parts(length, NUM_SPLITS, CHUNK, LEAST)
    if EARLY:
        gdc_wait()
    if used > 1:
        columns = tl.arange(0, HEAD_DIM)
        first_row = pair.to(tl.int64) * (NUM_SPLITS * BLOCK_M) + row
        lse_base = lse_ptr + first_row
        partial_base = partial_ptr + first_row * HEAD_DIM + columns
        top = _LOWEST
        total = 0.0
        result = tl.full([HEAD_DIM], 0.0, tl.float32)
        for first in range(0, used, PARTS):
            split = first + tl.arange(0, PARTS)
            held = split < used
            lse = tl.load(
                lse_base + split * BLOCK_M, mask=held, other=float("-inf"), cache_modifier=".cg"
            )
            parts = tl.load(
                partial_base[None, :] + (split * (BLOCK_M * HEAD_DIM))[:, None],
                mask=held[:, None],
                other=0.0,
                cache_modifier=".cg",
            ).to(tl.float32)
            new = tl.maximum(top, tl.reduce(lse, 0, tl.standard._elementwise_max))
            decay = tl.exp2(top - new)
            weight = tl.exp2(lse - new)
            total = total * decay + tl.reduce(weight, 0, tl.standard._sum_combine)
            here = tl.reduce(parts * weight[:, None], 0, tl.standard._sum_combine)
            result = result * decay + here
            top = new
        result = result / tl.where(total > 0.0, total, 1.0)
        out = (request * Q_LEN + row // GROUP) * out_stride_token
        out += (pair % num_kv_heads * GROUP + row % GROUP) * out_stride_head
        tl.store(out_ptr + out + columns, result.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Tiling:
    """How the work is cut. Results differ between tilings by rounding only."""

    num_splits: int
    """Parts at most, of the longest sequence."""
    block_n: int = 64
    """Tokens that are loaded at once."""
    num_warps: int = 4
    num_stages: int = 4
    """Blocks of keys and values that are on their way or in use."""
    early: bool = True
    """Programmatic dependent launch of both kernels, from Hopper on; the interpreter has none."""
    ahead: int = 0
    """With `early`, tokens of each part that come to L2 before the first kernel may begin: a power
    of two, or 0."""
    half_parts: bool = False
    """Keep parts in the query's type: half the bytes to merge, and rounded once more."""


ROWS_TO_BLOCKS = {16: (128, 8, 3), 32: (128, 8, 3), 64: (128, 8, 3), 128: (64, 8, 4)}
"""By rows of the product, padded: block_n, num_warps and num_stages. Two warps for each scheduler
of a multiprocessor hide each other's latencies; the rest is as much as shared memory holds."""


def pick_tiling(num_requests: int, num_kv_heads: int, num_rows: int, num_sms: int) -> Tiling:
    """The tiling for a GPU with so many multiprocessors.

    One program for each: twice as many would double what is merged and fill the memory's
    bandwidth no better.
    """
    block_n, num_warps, num_stages = ROWS_TO_BLOCKS[padded_rows(num_rows)]
    num_splits = max(1, num_sms // (num_requests * num_kv_heads))
    return Tiling(num_splits, block_n, num_warps, num_stages, ahead=AHEAD_TOKENS)


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
    if any(step % 8 for pool in (k_pool, v_pool) for step in _strides(pool)):
        return "heads are not aligned"
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
    early = tiling.early and q_THD.is_cuda
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    shape = {
        "Q_LEN": q_len,
        "GROUP": group,
        "NUM_SPLITS": tiling.num_splits,
        "CHUNK": CHUNK_TOKENS,
        "LEAST": min(LEAST_TOKENS, tiling.block_n),
        "BLOCK_M": block_m,
        "HEAD_DIM": head_dim,
        "EARLY": early,
    }
    scale_log2 = (head_dim**-0.5 if scale is None else scale) * _LOG2E
    out = (out_THD, out_THD.stride(0), out_THD.stride(1))
    with torch.cuda.device_of(q_THD):
        decode_attention_kernel[(tiling.num_splits, pairs)](
            *(q_THD, q_THD.stride(0), q_THD.stride(1)),
            *(k_pool, *_strides(k_pool), v_pool, *_strides(v_pool)),
            *(page_table, page_table.stride(0), cache_seqlens),
            *(*out, scratch.partial, scratch.lse, scale_log2, kv_heads),
            CAUSAL=causal,
            PAGE_SIZE=k_pool.shape[1] if k_pool.dim() == 4 else 1,
            SAME_STRIDES=_strides(k_pool) == _strides(v_pool),
            BLOCK_N=tiling.block_n,
            AHEAD=tiling.ahead,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **shape,
            **options,
        )
        if tiling.num_splits > 1:
            merge_attention_kernel[(pairs, q_len * group)](
                *(cache_seqlens, *out, scratch.partial, scratch.lse, kv_heads),
                PARTS=min(MERGE_PARTS, 1 << (tiling.num_splits - 1).bit_length()),
                num_warps=1,
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

    @staticmethod
    @cache
    def of(
        device: torch.device, pairs: int, splits: int, rows: int, head_dim: int, parts: torch.dtype
    ) -> Scratch:
        """The one for this shape. Raises RuntimeError if it would be made during a capture."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Its memory would belong to the graph, and go with it.
            raise RuntimeError("the first call of a shape must be made outside of a CUDA graph")
        return Scratch(
            torch.empty(pairs, splits, rows, head_dim, dtype=parts, device=device),
            torch.empty(pairs, splits, rows, dtype=torch.float32, device=device),
        )
