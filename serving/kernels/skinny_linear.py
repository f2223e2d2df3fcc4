"""y = x W^T for few rows: a decode step's products, bound by how fast W is read.

A program owns a tile of W's rows and a part of its columns, streams them through a ring of shared
memory and multiplies them with the same columns of x on the tensor cores, W as the left operand:
its rows fill the instruction's height of 16 or 64, the few rows of x its width. Where W has too
few rows to keep every multiprocessor busy, its columns are split, and the last program of a tile
adds the parts in their order, in the same launch. A row of y depends on its row of x and on the
configuration alone: not on the other rows, not on their number, not on who came last.

`gated`: W holds a gate and as many rows of what it lets through behind it, and y is
silu(gate) * up. A tile then takes half of its rows from either, so that a program has both of what
it multiplies.

A residual and a norm can be part of the products around them (`Add`, `Normed`). RMSNorm times W is
rstd * ((h * gain) W^T), where h is the residual with what was added and rstd belongs to its row. So
the product before adds, stores h and h * gain, and the sum of squares of each row in each of its
tiles; the product behind multiplies h * gain and scales its sums by rstd as it stores them. What is
rounded is h, as SGLang's norm does, and h * gain, where that one rounds h * rstd * gain.

Which configuration a shape runs with, `serving.kernels.linear_choice` decides.

Import this module only where it is used: triton is absent on some platforms, and decides at import
whether TRITON_INTERPRET=1 makes it run on the CPU.

Shapes: M rows of x, N rows of W, K columns of both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 32
MAX_SUMS = 512
"""Tiles that a product before a norm may have."""
DTYPES = (torch.bfloat16, torch.float16)
LIBRARY = "library"

_LINE: tl.constexpr = tl.constexpr(64)
"""16-bit values in a line of 128 bytes."""


class Normed(NamedTuple):
    """What stands for the RMSNorm of h besides h * gain; made by `skinny_linear` with an `Add`."""

    h: torch.Tensor
    """bfloat16 [M, N]: the residual with what was added."""
    sums: torch.Tensor
    """float32 [tiles, M]: of h squared before it was rounded, over the columns of each tile."""
    gain: torch.Tensor
    """bfloat16 [N]: the norm's weight."""
    eps: float

    def rstd(self) -> torch.Tensor:
        """float32 [M, 1]."""
        return torch.rsqrt(self.sums.sum(0) / self.h.shape[1] + self.eps)[:, None]


class Add(NamedTuple):
    """What follows a product: h = residual + y, and an RMSNorm of h."""

    residual: torch.Tensor
    """bfloat16 [M, N], contiguous."""
    gain: torch.Tensor
    """bfloat16 [N]: the norm's weight."""
    eps: float


@dataclass(frozen=True)
class Config:
    """How a product is cut. `str` and `parse` give and take its name in logs and files."""

    block_m: int
    """Rows of x with padding: a power of two, 8 or more."""
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    split_k: int = 1
    tma: bool = False
    """Copies by the tensor memory accelerator, from Hopper on."""
    pdl: bool = False
    """Programmatic dependent launch: the start overlaps the end of the kernel before."""

    def __str__(self) -> str:
        numbers = (
            f"m{self.block_m}n{self.block_n}k{self.block_k}"
            f"s{self.num_stages}w{self.num_warps}p{self.split_k}"
        )
        return numbers + "t" * self.tma + "d" * self.pdl

    @classmethod
    def parse(cls, name: str) -> Config:
        """Raises ValueError for what is no name of a configuration."""
        found = re.fullmatch(r"m{0}n{0}k{0}s{0}w{0}p{0}(t?)(d?)".format(r"([1-9]\d*)"), name)
        if not found:
            raise ValueError(
                f"{name!r} names no product; allowed: {LIBRARY} and names such as "
                f"{cls(8, 64, 128, 5, 4)}; correct it"
            )
        m, n, k, stages, warps, split = (int(text) for text in found.groups()[:6])
        return cls(m, n, k, stages, warps, split, tma=bool(found[7]), pdl=bool(found[8]))

    def num_tiles(self, num_out: int) -> int:
        return -(-num_out // self.block_n)

    @property
    def shared_bytes(self) -> int:
        """As Triton 3.6 lays it out: operands that pass through registers free a buffer early."""
        from_shared = self.block_m >= 16 and self.block_n >= 64
        num_buffers = self.num_stages if from_shared else self.num_stages - 1
        return num_buffers * (self.block_n + self.block_m) * self.block_k * 2

    @property
    def pdl_lines(self) -> int:
        """Lines of each row that come to L2 early: about a ring full, a power of two."""
        if not self.pdl:
            return 0
        return 1 << max(0, ((self.num_stages - 1) * self.block_k // _LINE.value).bit_length() - 1)


def _kernel_name(given: Any) -> str:
    """What a trace shows: whether a norm before or behind is part of the product."""
    without = given.constants
    more = "" if "sums_ptr" in without else "_normed"
    more += "" if "residual_ptr" in without else "_add"
    return f"skinny_linear{more}_kernel"


# tl.zeros, tl.cdiv and the like are jitted themselves, for the device, if triton was imported
# before TRITON_INTERPRET was set; hence the spelled-out forms.
@triton.jit(do_not_specialize=["rows", "num_sums"], repr=_kernel_name)
def skinny_linear_kernel(
    x_ptr,
    w_ptr,
    x_desc,
    w_desc,
    bias_ptr,
    y_ptr,
    partial_ptr,
    counter_ptr,
    residual_ptr,
    gain_ptr,
    h_ptr,
    squares_ptr,
    sums_ptr,
    num_sums,
    eps,
    rows,
    N,
    K,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL_LINES: tl.constexpr,
    UPCAST: tl.constexpr,
    GATED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """`rows` and `num_sums` are not specialized: a capture must find the kernel compiled."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_row = tl.minimum(n, N - 1)
    if GATED:
        half = tl.arange(0, BLOCK_N) // (BLOCK_N // 2)
        w_row = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N) % (BLOCK_N // 2)
        w_row = tl.minimum(w_row, N // 2 - 1) + half * (N // 2)
    k = tl.arange(0, BLOCK_K)
    is_row = (m < rows)[None, :]
    steps = (K + BLOCK_K - 1) // BLOCK_K
    first = part * steps // SPLIT
    last = (part + 1) * steps // SPLIT
    # N * K passes 2^31 for large vocabularies. Rows past the end repeat the last one: a copy
    # without a mask, whose products are not stored.
    w_rows = w_ptr + w_row.to(tl.int64)[:, None] * w_stride
    if PDL_LINES:
        # W never changes, so its first columns come to L2 while the kernel before still runs.
        # All else, x and the memory that is written, may be in use until then.
        ahead = first * BLOCK_K + tl.arange(0, PDL_LINES) * _LINE
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(w_rows + tl.minimum(ahead, K - 1)[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_wait()
    # Loaded before the loop and used behind it, where their way would be waited for.
    residual = None
    gain = None
    sums = None
    if residual_ptr is not None:
        # A name of its own: in a loop a name has one shape.
        is_out = is_row & (n < N)[:, None]
        residual = tl.load(residual_ptr + m[None, :] * N + n[:, None], mask=is_out, other=0.0)
        gain = tl.load(gain_ptr + n, mask=n < N, other=0.0)
    if sums_ptr is not None:
        of = tl.arange(0, SUMS)[:, None]
        sums = tl.load(sums_ptr + of * rows + m[None, :], mask=is_row & (of < num_sums), other=0.0)
    w_at = w_rows + k[None, :]
    x_at = x_ptr + m[None, :] * K + k[:, None]
    acc = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * BLOCK_K
        if w_desc is not None:
            w = w_desc.load([tile * BLOCK_N, start])
            x = x_desc.load([0, start]).T
        elif EVEN_K:
            # W is read once, x by every program, so W may leave L2 first. Triton drops the hint
            # where the load becomes an asynchronous copy.
            w = tl.load(w_at + start, eviction_policy="evict_first")
            x = tl.load(x_at + start, mask=is_row, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(
                w_at + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_at + start, mask=is_row & inside[:, None], other=0.0)
        acc = _add_product(acc, w, x, UPCAST)
        if PDL_LINES:
            # All of this program's columns are on their way. The next kernel may start now where
            # there is room: earlier, what it prefetches would take this one's place in L2 and on
            # the bus. It waits for this one's end by itself.
            _launch_dependents_if(step == tl.maximum(first, last - STAGES))
    if SPLIT > 1:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        parts = partial_ptr + tile * (SPLIT * BLOCK_N * BLOCK_M) + within
        tl.store(parts + part * (BLOCK_N * BLOCK_M), acc, mask=is_row)
        # Every thread's part is written before the one thread that counts goes on (the barrier),
        # and is visible to the whole device before its count is (release). Whoever counts last
        # has, by the same operation, acquired all counts before its own, so it sees all parts;
        # the count comes to its other threads behind a barrier.
        tl.debug_barrier()
        count = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if count == SPLIT - 1:
            # All have counted: the next launch, which starts behind this one, finds 0 again.
            tl.store(counter_ptr + tile, 0)
            # In the parts' order, own part included: sums do not hang on who came last. Read from
            # L2, where the parts are.
            total = tl.full([BLOCK_N, BLOCK_M], 0.0, tl.float32)
            for other in range(SPLIT):
                total += tl.load(
                    parts + other * (BLOCK_N * BLOCK_M),
                    mask=is_row,
                    other=0.0,
                    cache_modifier=".cg",
                )
            _finish(
                total, sums, eps, K, bias_ptr, y_ptr, residual, gain, h_ptr, squares_ptr, m, n,
                tile, is_row, rows, N, GATED,
            )  # fmt: skip
    else:
        _finish(
            acc, sums, eps, K, bias_ptr, y_ptr, residual, gain, h_ptr, squares_ptr, m, n, tile,
            is_row, rows, N, GATED,
        )  # fmt: skip


@triton.jit
def _launch_dependents_if(is_now):
    """Without a branch, which would end the loop's pipeline."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred now;
            setp.ne.b32 now, $1, 0;
            @now griddepcontrol.launch_dependents;
            mov.u32 $0, 0;
        }""",
        "=r,r",
        [is_now.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finish(
    acc, sums, eps, K, bias_ptr, y_ptr, residual, gain, h_ptr, squares_ptr, m, n, tile, is_row,
    rows, N, GATED: tl.constexpr,
):  # fmt: skip
    """Scale by a norm before, then store as what follows wants it."""
    if sums is not None:
        acc = _scale(acc, sums, eps, K)
    if GATED:
        _store_gated(acc, y_ptr, m, tile, is_row, N // 2)
    elif residual is not None:
        squares_at = squares_ptr + tile * rows + m
        _store_added(acc, bias_ptr, y_ptr, residual, gain, h_ptr, squares_at, m, n, is_row, N)
    else:
        _store(acc, bias_ptr, y_ptr, m, n, is_row, N)


@triton.jit
def _scale(acc, sums, eps, K):
    """By the norm of each row of x, of which `sums` holds each tile's squares."""
    mean = tl.reduce(sums, 0, tl.standard._sum_combine) / K
    return acc * (1.0 / tl.sqrt(mean + eps))[None, :]


@triton.jit
def _add_product(acc, w, x, UPCAST: tl.constexpr):
    """The interpreter multiplies the bits of bfloat16 as integers; `UPCAST` spares it that."""
    if UPCAST:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def _store(acc, bias_ptr, y_ptr, m, n, is_row, N):
    """Add the bias in float32, round once."""
    is_out = n < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=is_out, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + m[None, :] * N + n[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=is_row & is_out[:, None])


@triton.jit
def _store_added(acc, bias_ptr, y_ptr, residual, gain, h_ptr, squares_at, m, n, is_row, N):
    """Round the product as the library does, then add as an RMSNorm with a residual does."""
    is_out = n < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=is_out, other=0.0).to(tl.float32)[:, None]
    inside = is_row & is_out[:, None]
    h = acc.to(y_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    h = tl.where(inside, h, 0.0)
    at = m[None, :] * N + n[:, None]
    tl.store(h_ptr + at, h.to(y_ptr.dtype.element_ty), mask=inside)
    scaled = h * gain.to(tl.float32)[:, None]
    tl.store(y_ptr + at, scaled.to(y_ptr.dtype.element_ty), mask=inside)
    # One value a row of x; the rows of padding have no place.
    squares = tl.reduce(h * h, 0, tl.standard._sum_combine)[None, :]
    tl.store(squares_at[None, :], squares, mask=is_row)


@triton.jit
def _store_gated(acc, y_ptr, m, tile, is_row, N):
    """Round both products as the library does, then silu(gate) * up in float32, rounded again."""
    HALF: tl.constexpr = acc.shape[0] // 2
    pair = tl.permute(tl.reshape(acc, [2, HALF, acc.shape[1]]), (1, 2, 0))
    gate, up = tl.split(pair.to(y_ptr.dtype.element_ty).to(tl.float32))
    n = tile * HALF + tl.arange(0, HALF)
    at = y_ptr + m[None, :] * N + n[:, None]
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=is_row & (n < N)[:, None])


def why_not(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    *,
    normed: Normed | None = None,
    add: Add | None = None,
) -> str:
    """Why the kernels cannot compute this product; empty if they can."""
    if normed is not None or add is not None:
        # float16 holds no large h * gain.
        vectors = [] if add is None else [add.residual, add.gain]
        if x.dtype != torch.bfloat16 or any(given.dtype != x.dtype for given in vectors):
            return "a norm in another type"
        if any(given.data_ptr() % 16 or not given.is_contiguous() for given in vectors):
            return "unaligned vectors"
    if add is not None and (gated or add.residual.shape != (x.shape[0], weight.shape[0])):
        return "a residual that does not fit"
    if normed is not None and (
        normed.h.shape != x.shape or not 0 < normed.sums.shape[0] <= MAX_SUMS
    ):
        return "a norm that does not fit"
    for bad, why in (
        (x.dim() != 2 or weight.dim() != 2, "not two dimensions"),
        (not 0 < x.shape[0] <= MAX_ROWS, f"not 1 to {MAX_ROWS} rows"),
        (x.shape[-1] != weight.shape[-1], "sizes that do not fit"),
        (x.dtype not in DTYPES or weight.dtype != x.dtype, "another type"),
        (not x.is_contiguous() or weight.stride(-1) != 1, "rows with gaps"),
        # A pointer's alignment is part of what is compiled, and nothing compiles in a capture.
        (x.data_ptr() % 16 or weight.data_ptr() % 16, "unaligned memory"),
        (weight.shape[-1] % 8 or weight.stride(0) % 8, "unaligned rows"),
        (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()), "another bias"),
        (bias is not None and bias.data_ptr() % 16, "an unaligned bias"),
        (gated and (bias is not None or weight.shape[0] % 2), "a gate with bias, or an odd one"),
    ):
        if bad:
            return why
    return ""


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    config: Config,
    counters: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
    normed: Normed | None = None,
) -> torch.Tensor:
    """x W^T + bias with sums in float32, rounded once; no gradients.

    Args:
        x: bfloat16 or float16 [M, K], contiguous, M at most MAX_ROWS.
        weight: [N, K] in the same type, each row contiguous.
        bias: [N] in the same type.
        config: for M rows or more, and without `tma` if `gated`.
        counters: what `make_counters` gives, for products that never run at the same time; each
            leaves it at 0. By default new ones.
        out: [M, N], contiguous; [M, N / 2] if `gated`.
        gated: silu of the first half of the columns times the second, both rounded first.
        normed: what `add_linear` gave with x: the product is that of the norm's result.

    Raises:
        ValueError: a product that `why_not` refuses.
    """
    return _launch(x, weight, bias, config, counters, out, gated, normed, None)[0]


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    add: Add,
    config: Config,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Normed]:
    """x W^T + bias, added to a residual, as a product behind a norm of it takes it.

    Gives h * gain, bfloat16 [M, N], and what makes the norm's result of it. Arguments and errors
    are those of `skinny_linear`.
    """
    y, normed = _launch(x, weight, bias, config, counters, None, False, None, add)
    assert normed is not None, "made with an Add"
    return y, normed


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config,
    counters: torch.Tensor | None,
    out: torch.Tensor | None,
    gated: bool,
    normed: Normed | None,
    add: Add | None,
) -> tuple[torch.Tensor, Normed | None]:
    if why := why_not(x, weight, bias, gated, normed=normed, add=add):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype}: {why}; "
            "use torch.nn.functional.linear"
        )
    (rows, num_in), num_out = x.shape, weight.shape[0]
    assert rows <= config.block_m, f"{config} takes fewer than {rows} rows"
    assert not (gated and config.tma), f"{config} copies no two pieces"
    y = out
    if y is None:
        width = num_out // 2 if gated else num_out
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    partial = None
    if config.split_k > 1:
        num_values = config.num_tiles(num_out) * config.split_k * config.block_n * config.block_m
        partial = torch.empty(num_values, dtype=torch.float32, device=x.device)
        if counters is None:
            counters = make_counters(weight, config)
    made = added = None
    if add is not None:
        sums = torch.empty(config.num_tiles(num_out), rows, dtype=torch.float32, device=x.device)
        made = Normed(torch.empty_like(y), sums, add.gain, add.eps)
        added = (add.residual, add.gain, made.h, sums)
    num_sums = 0 if normed is None else normed.sums.shape[0]
    x_desc = w_desc = None
    if config.tma:
        x_desc = TensorDescriptor(x, [rows, num_in], [num_in, 1], [config.block_m, config.block_k])
        w_desc = TensorDescriptor(
            weight, list(weight.shape), list(weight.stride()), [config.block_n, config.block_k]
        )
    with torch.cuda.device_of(x):
        skinny_linear_kernel[(config.num_tiles(num_out) * config.split_k,)](
            *(x, weight, x_desc, w_desc, bias, y, partial, counters),
            *(added or (None, None, None, None)),
            *((None, 0, 0.0) if normed is None else (normed.sums, num_sums, normed.eps)),
            *(rows, num_out, num_in, weight.stride(0)),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            SPLIT=config.split_k,
            STAGES=config.num_stages,
            EVEN_K=num_in % config.block_k == 0,
            PDL_LINES=config.pdl_lines,
            UPCAST=not x.is_cuda,
            GATED=gated,
            SUMS=1 << max(0, num_sums - 1).bit_length(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **({"launch_pdl": True} if config.pdl else {}),
        )
    return y, made


def make_counters(weight: torch.Tensor, config: Config) -> torch.Tensor | None:
    """int32 zeros, one for each tile; None where nothing is split."""
    if config.split_k == 1:
        return None
    return torch.zeros(config.num_tiles(weight.shape[0]), dtype=torch.int32, device=weight.device)
