"""Rows, sums and headers of the writer in two launches, where rows and ring lie on a GPU.

The same as `writer._copy`, `writer._sums` and the headers made from it in torch, which take some
fifty launches and read every row twice: beside the copies of a few hundred megabytes both count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from splitserve.transport.layout import (
    FIRST_WRITER_WORD,
    FLAG_POSITIONS,
    HEADER_WORDS,
    NUM_SUMS,
    SEAL_FACTORS,
)

META_WORDS = 12
"""Of a sample: first row in the batch, rows, first row in the sample, slot index, stamp, rows in
all, flags, whether it starts over; the first and the last but one of its rows here that this shard
holds, counted from the first; where in the payload the first of those has its features and its
states, counted in numbers of the ring's type."""

_F0, _F1, _F2, _F3, _F4 = (tl.constexpr(factor) for factor in SEAL_FACTORS)
_SUMS, _META = tl.constexpr(NUM_SUMS), tl.constexpr(META_WORDS)
_HEADER, _FIRST = tl.constexpr(HEADER_WORDS), tl.constexpr(FIRST_WRITER_WORD)
_MISPLACED = tl.constexpr(FLAG_POSITIONS)


# tl.zeros and tl.max are jitted themselves, for the device, if triton was imported before
# TRITON_INTERPRET was set.
@triton.jit
def _copy_row(row, into, width, wanted, BLOCK: tl.constexpr):
    """Copies a row if it is wanted; whether it has a number that is not finite."""
    worst = tl.full((BLOCK,), 0, tl.int32)
    columns = tl.arange(0, BLOCK)
    for begin in range(0, width, BLOCK):
        inside = begin + columns < width
        values = tl.load(row + begin + columns, mask=inside, other=0.0)
        tl.store(into + begin + columns, values.to(into.dtype.element_ty), mask=inside & wanted)
        # False for NaN as well.
        worst |= (tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1
    return tl.reduce(worst, 0, tl.standard._elementwise_max)


@triton.jit
def _rows(
    features,
    states,
    token_ids,
    positions,
    meta,
    sums,
    payload,
    features_width,
    states_width,
    features_stride,
    states_stride,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies one row, and adds its part to the sums [R, 3] of its sample.

    Tokens or positions may be None.
    """
    offset = tl.program_id(0)
    sample = tl.program_id(1)
    words = meta + sample * _META
    if offset < tl.load(words + 1):
        row = tl.load(words) + offset
        position = tl.load(words + 2) + offset
        first = tl.load(words + 8)
        wanted = (offset >= first) & (offset < tl.load(words + 9))
        # Of 64 bits, as a payload may have more than 2^31 numbers.
        features_place, states_place = tl.load(words + 10), tl.load(words + 11)
        if ALIGNED:
            # Or each number would be stored alone.
            features_place = tl.multiple_of(features_place, 16)
            states_place = tl.multiple_of(states_place, 16)
        into = payload + features_place + (offset - first) * features_width
        bad = _copy_row(features + row * features_stride, into, features_width, wanted, BLOCK)
        into = payload + states_place + (offset - first) * states_width
        bad |= _copy_row(states + row * states_stride, into, states_width, wanted, BLOCK)
        known = sums + sample * _SUMS
        if bad > 0:
            tl.atomic_add(known, bad.to(tl.int64))
        if positions is not None:
            misplaced = tl.load(positions + row).to(tl.int64) != position
            tl.atomic_add(known + 1, misplaced.to(tl.int64), mask=misplaced)
        if token_ids is not None:
            weight = position * _F0 + _F1
            weight = (weight ^ (weight >> 31)) * _F2
            weight = (weight ^ (weight >> 29)) | 1
            tl.atomic_add(known + 2, (tl.load(token_ids + row).to(tl.int64) + 1) * weight)


@triton.jit
def _headers(meta, sums, totals, table, shard, num_shards):
    """Adds a sample's sums to those of its slot, and writes the slot's header."""
    sample = tl.program_id(0)
    words = meta + sample * _META
    slot = tl.load(words + 3)
    kept = (tl.load(words + 7) == 0).to(tl.int64)
    known = totals + slot * _SUMS
    nonfinite = tl.load(known) * kept + tl.load(sums + sample * _SUMS)
    misplaced = tl.load(known + 1) * kept + tl.load(sums + sample * _SUMS + 1)
    checksum = tl.load(known + 2) * kept + tl.load(sums + sample * _SUMS + 2)
    tl.store(known, nonfinite)
    tl.store(known + 1, misplaced)
    tl.store(known + 2, checksum)
    stamp, num_rows = tl.load(words + 4), tl.load(words + 5)
    flags = tl.load(words + 6) + (misplaced > 0).to(tl.int64) * _MISPLACED
    seal = stamp * _F0 + num_rows * _F1 + nonfinite * _F2 + flags * _F3 + checksum * _F4
    header = table + (slot * num_shards + shard) * _HEADER + _FIRST
    tl.store(header, stamp)
    tl.store(header + 1, num_rows)
    tl.store(header + 2, nonfinite)
    tl.store(header + 3, flags)
    tl.store(header + 4, checksum)
    tl.store(header + 5, seal)


def publish(
    meta: torch.Tensor,
    most_rows: int,
    features: torch.Tensor,
    states: torch.Tensor,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
    payload: torch.Tensor,
    totals: torch.Tensor,
    table: torch.Tensor,
    shard: int,
) -> None:
    """Copy the rows of R samples, sum them up and write their headers, in stream order.

    Args:
        meta: int64 [R, META_WORDS] on the device.
        most_rows: rows of the longest part, at least 1.
        features, states: [n, K*H] and [n, H], rows contiguous, on the device.
        token_ids, positions: integers [n] on the device.
        payload: the shard's, as numbers of the ring's type, on the device.
        totals: int64 [slots, NUM_SUMS] on the device: what earlier chunks gave.
        table: int64 [slots, shards, HEADER_WORDS], readable by the device.
    """
    num_samples = meta.shape[0]
    sums = torch.zeros(num_samples, NUM_SUMS, dtype=torch.int64, device=meta.device)
    _rows[(most_rows, num_samples)](
        features,
        states,
        token_ids,
        positions,
        meta,
        sums,
        payload,
        features.shape[1],
        states.shape[1],
        features.stride(0),
        states.stride(0),
        # Both begin at multiples of 64 bytes.
        ALIGNED=features.shape[1] % 16 == 0 and states.shape[1] % 16 == 0,
        BLOCK=2048,
    )
    _headers[(num_samples,)](meta, sums, totals, table, shard, table.shape[1])
