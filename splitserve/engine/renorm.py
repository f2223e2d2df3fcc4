"""Top-k and top-p of verified distributions where FlashInfer, which SGLang calls, is missing.

A launch each, and nothing that the host waits for: a wait in every verify step would end the
overlap of SGLang's host work with the device's. Rows without a limit are not touched; greedy ones,
of which an evaluation puts some into a batch that samples, are read three times.
"""

from __future__ import annotations

import importlib.util

import torch
import triton
import triton.language as tl

TOP_K = "sglang.srt.speculative.dflash_utils._dflash_top_k_renorm_prob"
TOP_P = "sglang.srt.speculative.dflash_utils._dflash_top_p_renorm_prob"
BLOCK = 4096


def is_needed() -> bool:
    """Whether SGLang would look for FlashInfer in vain."""
    return importlib.util.find_spec("flashinfer") is None


def top_k_renorm(probs_NV: torch.Tensor, top_ks_N: torch.Tensor) -> torch.Tensor:
    """Each row's `top_ks_N` likeliest tokens, renormalised in place: float32 [N, V], any ints [N].

    All tokens as likely as the last one stay; of a row with 1, the first of the likeliest alone.
    """
    _launch(top_k_kernel, probs_NV, top_ks_N.view(-1))
    return probs_NV


def top_p_renorm(probs_NV: torch.Tensor, top_ps_N: torch.Tensor) -> torch.Tensor:
    """Each row's likeliest tokens whose sum first reaches `top_ps_N`, renormalised in place.

    float32 [N, V] and [N]. All tokens as likely as the last one stay.
    """
    _launch(top_p_kernel, probs_NV, top_ps_N.view(-1))
    return probs_NV


def _launch(kernel: triton.JITFunction, probs_NV: torch.Tensor, limits_N: torch.Tensor) -> None:
    rows, vocab = probs_NV.shape
    assert probs_NV.dtype == torch.float32 and probs_NV.stride(1) == 1 and len(limits_N) == rows
    if rows:
        kernel[(rows,)](probs_NV, limits_N, vocab, probs_NV.stride(0), BLOCK=BLOCK, num_warps=8)


@triton.jit
def top_k_kernel(probs, limits, vocab, stride, BLOCK: tl.constexpr):
    row = probs + tl.program_id(0).to(tl.int64) * stride
    limit = tl.load(limits + tl.program_id(0))
    if limit < vocab:
        best = _largest(row, vocab, BLOCK)
        if limit <= 1:
            _keep_one(row, vocab, best, BLOCK)
        else:
            _keep(row, vocab, _least(row, vocab, best, limit, False, BLOCK), BLOCK)


@triton.jit
def top_p_kernel(probs, limits, vocab, stride, BLOCK: tl.constexpr):
    row = probs + tl.program_id(0).to(tl.int64) * stride
    limit = tl.load(limits + tl.program_id(0))
    if limit < 1.0:
        best = _largest(row, vocab, BLOCK)
        _keep(row, vocab, _least(row, vocab, best, limit, True, BLOCK), BLOCK)


@triton.jit
def _least(row, vocab, best, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Bits of the least number that stays; of a mass of 0, those of the largest.

    Bits of numbers that are not negative are in the order of the numbers: what is at or above `low`
    reaches the limit, what is at or above `high` does not.
    """
    low = tl.full((), 0, tl.int32)
    high = best.to(tl.int32, bitcast=True) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass = _above(row, vocab, middle, BLOCK)
        enough = mass >= limit if BY_MASS else count >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


# tl.max and tl.sum are jitted themselves, for the device, if triton was imported before
# TRITON_INTERPRET was set.
@triton.jit
def _largest(row, vocab, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, vocab, BLOCK):
        values = tl.load(row + begin + columns, mask=begin + columns < vocab, other=0.0)
        best = tl.maximum(best, values)
    return tl.reduce(best, 0, tl.standard._elementwise_max)


@triton.jit
def _above(row, vocab, bits, BLOCK: tl.constexpr):
    """How many numbers have at least these bits (not 0), and their sum."""
    columns = tl.arange(0, BLOCK)
    count = tl.full((BLOCK,), 0, tl.int32)
    mass = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, vocab, BLOCK):
        values = tl.load(row + begin + columns, mask=begin + columns < vocab, other=0.0)
        kept = values.to(tl.int32, bitcast=True) >= bits
        count += kept.to(tl.int32)
        mass += tl.where(kept, values, 0.0)
    return (
        tl.reduce(count, 0, tl.standard._sum_combine),
        tl.reduce(mass, 0, tl.standard._sum_combine),
    )


@triton.jit
def _keep(row, vocab, bits, BLOCK: tl.constexpr):
    """Divide what has at least these bits by its sum, and let nothing else stay."""
    _, mass = _above(row, vocab, bits, BLOCK)
    columns = tl.arange(0, BLOCK)
    for begin in range(0, vocab, BLOCK):
        inside = begin + columns < vocab
        values = tl.load(row + begin + columns, mask=inside, other=0.0)
        kept = values.to(tl.int32, bitcast=True) >= bits
        tl.store(row + begin + columns, tl.where(kept, values / mass, 0.0), mask=inside)


@triton.jit
def _keep_one(row, vocab, best, BLOCK: tl.constexpr):
    """Let the first of the largest numbers be 1, all others 0."""
    columns = tl.arange(0, BLOCK)
    place = tl.full((BLOCK,), 2147483647, tl.int32)
    for begin in range(0, vocab, BLOCK):
        here = begin + columns
        values = tl.load(row + here, mask=here < vocab, other=-1.0)
        place = tl.minimum(place, tl.where(values == best, here, 2147483647))
    first = tl.reduce(place, 0, tl.standard._elementwise_min)
    for begin in range(0, vocab, BLOCK):
        here = begin + columns
        tl.store(row + here, tl.where(here == first, 1.0, 0.0), mask=here < vocab)
