"""Decode attention: our kernel by tiling, beside SGLang's FlashAttention-3, at small batch.

    python -m benchmarks.decode_attention
    python -m benchmarks.decode_attention --context 512 8192 --batch 1 4 --draft
    python -m benchmarks.decode_attention --page-size 64

A captured graph runs one attention per layer, as a step of the server does, so that gaps between
launches count. Behind each comes a small ordinary kernel, so that no attention overlaps the next
one, which it does not follow in a step either; what these kernels take alone is taken off. Each
layer has keys and values of its own, and as many layers as hold several times
the L2 cache, so that they come from memory. FlashAttention is called as SGLang's backend calls it,
with the copy of the queries out of q, k and v. Both are compared with float32 first; a tiling that
is wrong or fails is named and not timed. Median of the replays with the 20th and 80th percentile,
microseconds a layer. Tilings are timed in order until `--seconds` are over. Writes
`benchmarks/results/decode_attention.json`.

`TRITON_INTERPRET=1 ... --device cpu --context 40 --heads 4 --kv-heads 2` only shows that the
script works.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from serving.kernels.decode_attention import (
    Tiling,
    decode_attention,
    num_sms,
    pick_tiling,
)

TOLERANCE = 1e-2
"""Of the error, as a part of the attention, both as root mean squares."""
REPLAYS = 15
MAX_LAYERS = 256
"""Of a graph."""
CACHE_TIMES = 4
"""Bytes of all layers, in sizes of the L2 cache."""


@dataclasses.dataclass
class Case:
    """One attention per layer of the same requests; the queries lie beside keys and values."""

    q: torch.Tensor
    pools: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lengths: torch.Tensor
    q_len: int
    causal: bool
    between: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.pools[0][0].shape[1]

    @classmethod
    def make(cls, options: argparse.Namespace, context: int, batch: int) -> Case:
        device = torch.device(options.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        q_len = options.query_tokens - options.draft
        length = context + q_len
        heads, kv_heads, head_dim = options.heads, options.kv_heads, options.head_dim
        pages = -(-length // options.page_size)
        layer_bytes = (
            2 * (batch * pages + 1) * options.page_size * kv_heads * head_dim * dtype.itemsize
        )
        num_layers = min(MAX_LAYERS, options.layers)
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            num_layers = min(MAX_LAYERS, max(num_layers, CACHE_TIMES * cache // layer_bytes))
        g = torch.Generator(device).manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device=device, dtype=dtype)

        shape = (batch * pages + 1, options.page_size, kv_heads, head_dim)
        pools = [(random(*shape), random(*shape)) for _ in range(num_layers)]
        qkv = random(batch * q_len, (heads + 2 * kv_heads) * head_dim)
        q = qkv[:, : heads * head_dim].view(-1, heads, head_dim)
        # As the allocator gives them after prefill: side by side, page 0 for padding.
        table = torch.zeros(batch, pages + 64, dtype=torch.int32, device=device)
        table[:, :pages] = 1 + torch.arange(batch * pages, device=device).view(batch, pages)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        between = torch.zeros(1, device=device)
        return cls(q, pools, table, lengths, q_len, not options.draft, between)

    def pause(self, layer: int) -> None:
        """The small kernel behind a layer."""
        self.between.add_(1)

    @property
    def read_bytes(self) -> int:
        """Keys and values of a layer."""
        slot = self.pools[0][0][0, 0]
        return 2 * int(self.lengths.sum()) * slot.numel() * slot.element_size()

    def expected(self, layer: int) -> torch.Tensor:
        """float32."""
        heads, head_dim = self.q.shape[1:]
        found = []
        for row, length in enumerate(self.lengths.tolist()):
            position = torch.arange(length, device=self.q.device)
            place = self.table[row, position // self.page_size], position % self.page_size
            k, v = (
                pool[place].float().repeat_interleave(heads // pool.shape[2], 1)
                for pool in self.pools[layer]
            )
            q = self.q[row * self.q_len : (row + 1) * self.q_len].float()
            score = torch.einsum("qhd,nhd->hqn", q, k) * head_dim**-0.5
            if self.causal:
                last = length - self.q_len + torch.arange(self.q_len, device=q.device)
                score = score.masked_fill(position > last[:, None], -torch.inf)
            found.append(torch.einsum("hqn,nhd->qhd", score.softmax(-1), v))
        return torch.cat(found)


def ours(tiling: Tiling, case: Case) -> Callable[[int], torch.Tensor]:
    """Our attention of a layer."""

    def run(layer: int) -> torch.Tensor:
        k, v = case.pools[layer]
        return decode_attention(
            case.q, k, v, case.table, case.lengths, causal=case.causal, tiling=tiling
        )

    return run


def flash_attention(case: Case) -> Callable[[int], torch.Tensor]:
    """SGLang's attention of a layer (0.5.23, `FlashAttentionBackend.forward_extend`)."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    batch, device = len(case.lengths), case.q.device
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * case.q_len
    cu_k = torch.nn.functional.pad(torch.cumsum(case.lengths, 0, dtype=torch.int32), (1, 0))

    def run(layer: int) -> torch.Tensor:
        k, v = case.pools[layer]
        return flash_attn_with_kvcache(
            q=case.q.contiguous(),
            k_cache=k,
            v_cache=v,
            page_table=case.table,
            cache_seqlens=case.lengths,
            cu_seqlens_q=cu_q,
            cu_seqlens_k_new=cu_k,
            max_seqlen_q=case.q_len,
            softmax_scale=case.q.shape[-1] ** -0.5,
            causal=case.causal,
            window_size=(-1, -1),
            softcap=0.0,
            num_splits=0,
        )

    return run


def tilings(picked: Tiling) -> list[Tiling]:
    """What is tried, the most promising first."""
    splits, change = picked.num_splits, dataclasses.replace
    small = change(picked, block_n=64, num_warps=4, num_stages=6)
    tried = [
        picked,
        change(picked, ahead=256),
        small,
        change(picked, early=False),
        change(picked, half_parts=True),
        change(picked, ahead=512),
        # Two programs on each multiprocessor, which have to fit beside each other.
        change(small, num_splits=2 * splits, num_stages=3),
        change(small, ahead=256),
    ]
    return list(dict.fromkeys(tried))


def name_of(tiling: Tiling) -> str:
    """Short, and fit for the name of a figure."""
    blocks = f"n{tiling.block_n}_w{tiling.num_warps}_s{tiling.num_stages}"
    options = "_early" * tiling.early + f"_ahead{tiling.ahead}" * bool(tiling.ahead)
    return f"splits{tiling.num_splits}_{blocks}{options}" + "_half" * tiling.half_parts


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError if it is wrong."""
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise ValueError(f"differs from float32 by {error:.2g} of it")


def measure(
    case: Case,
    expected: torch.Tensor,
    alone: float,
    make: Callable[[Case], Callable[[int], torch.Tensor]],
) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile, microseconds a layer. Raises ValueError if it is wrong.

    `alone` is what the kernels between the layers take, which is not counted.
    """
    run, last = make(case), len(case.pools) - 1
    for _ in range(2):
        check(run(last), expected)
    if case.q.device.type == "cpu":
        started = time.perf_counter()
        run(last)
        return (1e6 * (time.perf_counter() - started),) * 3
    outs: dict[int, torch.Tensor] = {}

    def layer(number: int) -> None:
        outs[number] = run(number)
        case.pause(number)

    low, middle, high = replayed(layer, len(case.pools))
    check(outs[last], expected)
    return middle - alone, low - alone, high - alone


def replayed(layer: Callable[[int], object], num_layers: int) -> tuple[float, float, float]:
    """20th percentile, median and 80th of a layer in a captured graph, microseconds."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(num_layers):
            layer(number)
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in pairwise(marks)], dtype=torch.float64)
    times *= 1e3 / num_layers
    low, middle, high = torch.quantile(times, torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return low, middle, high


class Table:
    """Prints each row as soon as it is known, and keeps the figures."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.best: dict[str, float] = {}

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'':46}  us/layer    p20    p80    GB/s", flush=True)

    def add(self, where: str, name: str, run: Callable[[], tuple[float, ...]], size: int) -> None:
        """Time it; what it raises is printed in its place."""
        try:
            middle, low, high = run()
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            print(f"{name:46}  {type(error).__name__}: {text}"[:160], flush=True)
            return
        rate = size / middle / 1e3
        print(f"{name:46}  {middle:8.2f} {low:6.2f} {high:6.2f} {rate:7.0f}", flush=True)
        for key, value in ((name, middle), (f"{name}_p20", low), (f"{name}_p80", high)):
            self.figures[f"{where}_{key}_microseconds"] = round(value, 3)
        self.best[name] = middle


def main() -> None:
    options = parse_options()
    started = time.monotonic()
    table = Table()
    cases = [(context, batch) for batch in options.batch for context in options.context]
    for number, (context, batch) in enumerate(cases):
        until = started + options.seconds * (number + 1) / len(cases)
        table.best = {}
        where = f"context{context}_batch{batch}"
        case = Case.make(options, context, batch)
        size = case.read_bytes
        kind = "causal" if case.causal else "not causal"
        table.title(
            f"{context} tokens of context, batch {batch}, {case.q_len} query tokens, {kind}, "
            f"{len(case.pools)} layers of {size / 1e6:.1f} MB, pages of {case.page_size}"
        )
        alone = 0.0
        if options.device == "cuda":
            _, alone, _ = replayed(case.pause, len(case.pools))
        expected = case.expected(len(case.pools) - 1)
        timed = partial(measure, case, expected, alone)
        table.add(where, "flash_attention_3", partial(timed, flash_attention), size)
        rows = case.q_len * options.heads // options.kv_heads
        sms = num_sms(case.q.device)
        tried = tilings(pick_tiling(batch, options.kv_heads, rows, sms))
        for place, tiling in enumerate(tried):
            if time.monotonic() > until:
                print(f"{len(tried) - place} tilings left out: no time", flush=True)
                break
            table.add(where, name_of(tiling), partial(timed, partial(ours, tiling)), size)
        table.figures[f"{where}_layers"] = len(case.pools)
        table.figures[f"{where}_between_microseconds"] = round(alone, 3)
        table.figures[f"{where}_read_mb"] = round(size / 1e6, 2)
        table.figures[f"{where}_best"] = min(table.best, key=table.best.__getitem__, default="")
        print(f"best: {table.figures[f'{where}_best']}", flush=True)
        del case, expected, timed
        if options.device == "cuda":
            torch.cuda.empty_cache()
    table.figures |= {
        "heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "query_tokens": options.query_tokens - options.draft,
        "causal": not options.draft,
        "page_size": options.page_size,
        "replays": REPLAYS,
    }
    name = "decode_attention" + "_draft" * options.draft
    name += f"_pages{options.page_size}" * (options.page_size > 1)
    write_record(name, table.figures, folder=options.out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--query-tokens", type=int, default=8, help="of a verified request")
    parser.add_argument("--draft", action="store_true", help="a draft's block: one less, no mask")
    parser.add_argument("--page-size", type=int, default=1, help="tokens of a page, for both")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36, help="of a graph, at least")
    parser.add_argument("--seconds", type=float, default=50.0, help="for all of it")
    parser.add_argument("--out", type=Path, help="folder of the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()
