"""Which configuration of `serving.kernels.skinny_linear` a shape runs with, or the library.

The number of programs is chosen close to a multiple of what the device holds at once, and
`choose` times candidates and the library's product on the weight itself.

Import this module only where it is used, as that one.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from serving.kernels.skinny_linear import LIBRARY, MAX_ROWS, Config, make_counters, skinny_linear

NUM_CANDIDATES = 8
ROUNDS = 15
"""Timings of each candidate; the median counts."""
LEAST_GAIN = 0.03
"""Share of the library's time that a kernel must save, and a candidate against one before it."""
MOST_ERROR = 0.02
"""RMS of the difference to the library's product, relative to that product."""

_FLUSHES = 3
"""Readings of the buffer that empties L2 between timed calls."""
_MULTIPROCESSORS = 132
"""Of an H200; stands in where there is no device to ask."""
_SHARED_BYTES = 227 * 1024
_BYTES_PER_NS = 4200.0
"""What an H200 reads, to weigh idle programs against the cost of splitting."""
_SPLIT_NS, _PART_NS, _WAVE_NS = 900.0, 40.0, 400.0
"""Guesses of what merging costs, of each part's share, and of filling each wave's rings."""
_SLACK = 1.25
"""What a multiprocessor can read in relation to its share of the device's bandwidth."""
_TILES = (
    # block_n, block_k, num_stages, num_warps, tma, least block_m. Three programs fit on a
    # multiprocessor with 72 KB each, two with 108 KB; 32 KB on their way are enough for one.
    (64, 128, 5, 4, False, 8),
    (64, 128, 5, 4, True, 8),
    (32, 256, 5, 4, False, 8),
    (32, 256, 5, 4, True, 8),
    (64, 256, 4, 4, True, 16),
    (128, 128, 4, 4, True, 8),
    (64, 128, 3, 4, False, 16),
    (16, 256, 6, 4, False, 8),
    (32, 128, 6, 4, False, 8),
    (16, 128, 5, 2, False, 8),
)
_FULL = 0.9
"""Share of the programs that the device holds from which it counts as full."""
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


def row_bucket(rows: int) -> int:
    """Rows that share a choice: the least of 8, 16 and 32 that takes them."""
    assert 0 < rows <= MAX_ROWS, f"{rows} rows"
    return 8 if rows <= 8 else 16 if rows <= 16 else 32


@functools.lru_cache(maxsize=1024)
def candidates(
    rows: int, num_out: int, num_in: int, num_multiprocessors: int = 0, tma: bool = False
) -> tuple[Config, ...]:
    """At most NUM_CANDIDATES configurations, the likely ones first.

    Args:
        num_multiprocessors: of the device; by default those of an H200.
        tma: whether the device copies by tensor maps.
    """
    bucket, found = row_bucket(rows), []
    num = num_multiprocessors or _MULTIPROCESSORS
    for block_n, block_k, num_stages, num_warps, with_tma, least_m in _TILES:
        if with_tma and not tma:
            continue
        whole = Config(max(bucket, least_m), block_n, block_k, num_stages, num_warps, tma=with_tma)
        # A newer Triton may take one buffer more.
        while whole.shared_bytes * (1 + 1 / whole.num_stages) > _SHARED_BYTES:
            whole = replace(whole, num_stages=whole.num_stages - 1)
        steps = -(-num_in // block_k)
        # A ring longer than a program's way takes the place of another program.
        whole = replace(whole, num_stages=max(2, min(whole.num_stages, steps + 1)))
        splits = [split for split in _SPLITS if split == 1 or split * 2 <= steps]
        found += [
            min(
                (
                    (estimate(config, rows, num_out, num_in, num), config)
                    for config in (replace(whole, split_k=split) for split in splits)
                ),
                key=lambda pair: pair[0],
            )
        ]
    ordered = dict.fromkeys(config for _, config in sorted(found, key=lambda pair: pair[0]))
    return tuple(ordered)[:NUM_CANDIDATES]


def estimate(config: Config, rows: int, num_out: int, num_in: int, num: int) -> float:
    """Nanoseconds on `num` multiprocessors of an H200: rough, to order candidates.

    The device is full while programs wait; those of the last wave lie on the fewest that each
    multiprocessor can have. Every program reads x again, from L2.
    """
    programs = config.num_tiles(num_out) * config.split_k
    held = _held(config)
    waves, rest = divmod(programs, num * held)
    balance = min(1.0, _SLACK * programs / num / (waves * held + math.ceil(rest / num)))
    again = 0.25 * rows / config.block_n
    fill = _WAVE_NS * (waves + (rest > 0))
    merge = _SPLIT_NS + _PART_NS * config.split_k if config.split_k > 1 else 0.0
    return num_out * num_in * 2 / _BYTES_PER_NS / balance * (1 + again) + merge + fill


def _held(config: Config) -> int:
    """Programs on a multiprocessor."""
    return max(1, _SHARED_BYTES // (config.shared_bytes + 1024))


def alone(config: Config, num_out: int, num_in: int, num: int) -> Config | None:
    """The same with the least ring that lets no second program onto a multiprocessor.

    Split less where there would be more programs than `num` multiprocessors; None where there are
    more tiles, or no such ring.
    """
    most = num // config.num_tiles(num_out)
    if not most:
        return None
    config = replace(config, split_k=min(config.split_k, most))
    while config.shared_bytes <= _SHARED_BYTES // 2:
        config = replace(config, num_stages=config.num_stages + 1)
    steps = -(-num_in // config.block_k) // config.split_k
    # A newer Triton may take one buffer more.
    fits = config.shared_bytes * (1 + 1 / config.num_stages) <= _SHARED_BYTES
    return config if fits and config.num_stages <= steps + 1 else None


def early(config: Config, num_out: int, num_in: int, num: int = 0) -> Config:
    """The same, launched early where that does not crowd programs together.

    Early programs take the multiprocessors that are free first. So each has to have one of its
    own, or there have to be about as many as the device holds; or their way is too short to tell.

    Args:
        num: multiprocessors; by default those of an H200.
    """
    num = num or _MULTIPROCESSORS
    programs = config.num_tiles(num_out) * config.split_k
    if programs <= num:
        return replace(alone(config, num_out, num_in, num) or config, pdl=True)
    return replace(config, pdl=_FULL * num * _held(config) <= programs <= num * _held(config))


class Choice(NamedTuple):
    """What a product runs with."""

    config: Config | None
    """None is the library."""
    microseconds: dict[str, float]
    """By name, the library's included, with what a kernel saves besides."""
    failed: dict[str, str]
    """Candidates that raised or gave other values, with what they did."""
    fastest: str
    """The name of what was timed and became the choice."""

    @property
    def name(self) -> str:
        return LIBRARY if self.config is None else str(self.config)


def choose(
    weight: torch.Tensor,
    rows: int,
    *,
    library: Callable[[torch.Tensor], torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    configs: Sequence[Config] | None = None,
    timer: Callable[[Sequence[Callable[[], Any]]], list[float]] | None = None,
    saves: float = 0.0,
    in_layer: bool = False,
) -> Choice:
    """The fastest product with this weight, from memory, outside of graph capture.

    A candidate that fails or differs from the library's product is left out. The library stays
    unless a candidate saves LEAST_GAIN, and an earlier candidate unless a later one does: two
    starts then rarely differ, but they can, so the caller logs the choice and may fix it.

    Args:
        weight: as for `skinny_linear`.
        rows: their bucket is timed.
        library: the product that would run otherwise, of x alone; by default
            torch.nn.functional.linear, and silu and product behind it if `gated`.
        configs: by default `candidates` for the weight's device.
        timer: gives microseconds for each of some calls; by default `time_cold`.
        saves: microseconds of other kernels that the library's product needs besides.
        in_layer: the kernel before and the one behind are of ours; what is chosen is launched
            early then, which no time of a single product shows.
    """
    bucket = row_bucket(rows)
    if configs is None:
        configs = device_candidates(weight, bucket, gated)
    if library is None:
        library = functools.partial(reference, weight=weight, bias=bias, gated=gated)
    # Of its own, so that what is sampled later stays what it was.
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(bucket, weight.shape[1], device=weight.device, generator=generator)
    x = x.to(weight.dtype)
    expected = library(x).float()
    calls: dict[str, Callable[[], Any]] = {LIBRARY: functools.partial(library, x)}
    failed = {}
    for config in configs:
        call = functools.partial(
            skinny_linear,
            x,
            weight,
            bias,
            config=config,
            counters=make_counters(weight, config),
            gated=gated,
        )
        try:
            error = float((call().float() - expected).norm() / expected.norm().clamp(min=1e-30))
        except Exception as problem:
            failed[str(config)] = f"{type(problem).__name__}: {problem}"[:200]
            continue
        if error <= MOST_ERROR:
            calls[str(config)] = call
        else:
            failed[str(config)] = f"differs by {error:.1e}"
    del expected
    timed = dict(zip(calls, (timer or time_cold)(list(calls.values())), strict=True))
    timed[LIBRARY] += saves
    best = LIBRARY
    for name, microseconds in timed.items():
        if microseconds < timed[best] * (1 - LEAST_GAIN):
            best = name
    if best == LIBRARY:
        return Choice(None, timed, failed, best)
    config = Config.parse(best)
    if in_layer:
        num_out, num_in = weight.shape
        config = early(config, num_out, num_in, num_multiprocessors(weight))
    return Choice(config, timed, failed, best)


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """The same by PyTorch."""
    y = F.linear(x, weight, bias)
    if not gated:
        return y
    gate, up = y.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def num_multiprocessors(weight: torch.Tensor) -> int:
    """Of the device on which a weight is; 0, for those of an H200, where it is on none."""
    if not weight.is_cuda:
        return 0
    return int(torch.cuda.get_device_properties(weight.device).multi_processor_count)


def device_candidates(weight: torch.Tensor, rows: int, gated: bool = False) -> tuple[Config, ...]:
    """`candidates` for the device on which a weight is."""
    if not weight.is_cuda:
        return candidates(rows, *weight.shape)
    tma = torch.cuda.get_device_properties(weight.device).major >= 9 and not gated
    return candidates(rows, *weight.shape, num_multiprocessors(weight), tma)


def time_cold(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Median microseconds of each call on the GPU, with nothing of its inputs in L2.

    Between calls a buffer of four times L2 is read: written, its lines would have to leave L2
    while the next call runs. It is read often enough to take longer than a launch from the host,
    for which the GPU must never wait. The calls take turns, which spreads what the clocks do.
    """
    size = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.zeros(max(size, 64 << 20) // 4, dtype=torch.float32, device="cuda")
    events = [
        [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in calls]
        for _ in range(ROUNDS)
    ]
    for row in events:
        for call, (start, end) in zip(calls, row, strict=True):
            for _ in range(_FLUSHES):
                buffer.sum()
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return [
        statistics.median(row[place][0].elapsed_time(row[place][1]) for row in events) * 1e3
        for place in range(len(calls))
    ]
