"""Drawing tokens on a CPU: one uniform number and one running sum per row.

`torch.multinomial` draws a random number per vocabulary entry on one core, which takes longer than
the model's forward pass of a whole batch. The running sum is the same distribution, and lets a
request carry a seed: its numbers depend on (seed, position) only, not on its neighbours.
Source: inverse transform sampling; SGLang 0.5.23, srt/layers/sampler.py for the call's form.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

SAMPLE = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
SIMPLE = "sglang.srt.layers.sampler.sampling_from_probs_torch"
FILTERED = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
RID_PREFIX = "splitserve-generate"

_MASK = (1 << 64) - 1
_BLOCK = 256
_seeds: list[int | None] = []


def generate_rid(seed: int | None, name: str) -> str:
    """The id of a request that carries its seed to the scheduler."""
    return f"{RID_PREFIX}:{'' if seed is None else seed}:{name}"


def note_seeds(_runner: Any, _logits_output: Any, forward_batch: Any) -> None:
    """Remember the seeds of the rows that are about to be drawn (before `ModelRunner.sample`)."""
    _seeds.clear()
    for rid in forward_batch.rids or ():
        parts = rid.split(":", 2) if isinstance(rid, str) else []
        known = len(parts) == 3 and parts[0] == RID_PREFIX and parts[1]
        _seeds.append(int(parts[1]) if known else None)


def draw_simple(
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row of float32 [B, V] probabilities; int32 [B]."""
    return draw(probs, uniforms(probs.shape[0], positions)).to(torch.int32)


def draw_filtered(
    original: Any,
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """As `draw_simple`, where some rows are greedy, or cut by top-k and top-p; int32 [B].

    Only the rows that are cut pay for a sort.
    """
    if need_min_p_sampling or options.get("return_filtered_probs"):
        return original(
            probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options
        )
    chosen = torch.empty(probs.shape[0], dtype=torch.int64)
    numbers = uniforms(probs.shape[0], positions)
    greedy = top_ks == 1
    cut = ~greedy & ((top_ks < probs.shape[1]) | (top_ps < 1.0))
    free = ~greedy & ~cut
    # On a CPU several times as fast as argmax; it takes the first of equals too.
    chosen[greedy] = probs[greedy].max(-1).indices
    if free.any():
        chosen[free] = draw(probs[free], numbers[free])
    if cut.any():
        ordered, order = probs[cut].sort(-1, descending=True)
        ordered[torch.arange(probs.shape[1])[None, :] >= top_ks[cut][:, None]] = 0.0
        ordered[ordered.cumsum(-1) - ordered > top_ps[cut][:, None]] = 0.0
        places = draw(ordered, numbers[cut])
        chosen[cut] = order.gather(1, places[:, None])[:, 0]
    return chosen.to(torch.int32)


def draw(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [B]: where the running sum of probs [B, V] passes numbers (float64 [B], 0 to 1).

    The rows need not sum to 1. An entry of probability 0 is never chosen.
    """
    num_rows, vocab_size = probs.shape
    # Whole blocks are summed first, so that only one block per row needs a running sum.
    num_blocks = -(-vocab_size // _BLOCK)
    if missing := num_blocks * _BLOCK - vocab_size:
        probs = torch.nn.functional.pad(probs, (0, missing))
    blocks = probs.view(num_rows, num_blocks, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = numbers[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, wanted, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    # The two sums of a block may differ in their last bits; the last entry with mass is then meant.
    last = inner.argmax(-1, keepdim=True)
    place = torch.minimum(torch.searchsorted(inner, wanted - before, right=True), last)
    return (block * _BLOCK + place)[:, 0]


def uniforms(num_rows: int, positions: torch.Tensor | None) -> torch.Tensor:
    """float64 [B] in [0, 1): from (seed, position) for rows with a seed, else from torch."""
    numbers = torch.rand(num_rows, dtype=torch.float64)
    if positions is None or len(_seeds) != num_rows:
        return numbers
    for row, (seed, position) in enumerate(zip(_seeds, positions.tolist(), strict=True)):
        if seed is not None:
            numbers[row] = hashed_uniform(seed, position)
    return numbers


def hashed_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from two integers.

    Source: the SplitMix64 finalizer (Steele, Lea, Flood 2014).
    """
    mixed = _mix(_mix(seed & _MASK) ^ (position * 0x9E3779B97F4A7C15 & _MASK))
    return (mixed >> 12) / (1 << 52)


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
