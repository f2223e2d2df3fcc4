"""Attention of block rows: our kernels by tiling, beside FlexAttention with the same mask.

    python -m benchmarks.block_attention
    python -m benchmarks.block_attention --shape 8b --seconds 120

Random bfloat16 data and anchors of one document, drawn as in training. Everything is compared with
float32 on some rows first: a tiling that is wrong or fails is named and not timed. The kernels are
timed one by one and tiling by tiling; then the forward pass and both passes together with the best
of them, and FlexAttention's. Median of the runs with the 20th and 80th percentile, microseconds;
the rate counts products over what is seen, five of both passes' seven backward, however often a
kernel computes one. Tilings are timed in order until `--seconds` are over. Writes
`benchmarks/results/block_attention.json`.

`TRITON_INTERPRET=1 ... --device cpu --shape tiny` only shows that the script works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from dspark import block_attention as kernels
from dspark.attention import attend, attention_mask, block_attention, context_mask
from dspark.block_attention import Tiling

TOLERANCE = 1e-2
"""Of an error, as a part of what it is an error of, both as root mean squares."""
RUNS = 20
CHECKED_ROWS = 512
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4, "own": 0}
"""Of each kernel, over the context that is seen."""
SHIPPED = kernels.TILINGS
TILINGS = {
    64: {
        "forward": [
            Tiling(128, 64, 32, 4, 3),
            Tiling(128, 128, 64, 8, 3),
            Tiling(64, 128, 32, 4, 2),
            Tiling(128, 64, 32, 4, 2),
            Tiling(64, 64, 32, 4, 3),
            Tiling(128, 128, 32, 8, 2),
        ],
        "queries": [
            Tiling(64, 64, 32, 4, 3),
            Tiling(128, 64, 32, 4, 2),
            Tiling(128, 64, 64, 8, 3),
            Tiling(64, 128, 32, 4, 2),
            Tiling(64, 64, 32, 4, 2),
            Tiling(128, 64, 32, 4, 3),
        ],
        "keys": [
            Tiling(64, 64, 0, 4, 3),
            Tiling(64, 128, 0, 8, 3),
            Tiling(64, 64, 0, 4, 2),
            Tiling(64, 128, 0, 8, 2),
            Tiling(32, 128, 0, 4, 3),
        ],
        "own": [
            Tiling(32, 64, 0, 4, 3),
            Tiling(32, 64, 0, 4, 2),
            Tiling(16, 64, 0, 4, 3),
        ],
    },
    128: {
        "forward": [
            Tiling(128, 64, 32, 4, 2),
            Tiling(128, 128, 64, 8, 3),
            Tiling(128, 64, 16, 4, 2),
            Tiling(128, 64, 64, 8, 3),
        ],
        "queries": [
            Tiling(64, 64, 32, 4, 2),
            Tiling(128, 64, 32, 8, 4),
            Tiling(128, 64, 64, 8, 3),
            Tiling(64, 32, 32, 4, 3),
        ],
        "keys": [
            Tiling(64, 64, 0, 4, 2),
            Tiling(64, 128, 0, 8, 3),
            Tiling(64, 128, 0, 8, 4),
            Tiling(32, 64, 0, 4, 3),
        ],
        "own": [
            Tiling(32, 64, 0, 4, 3),
            Tiling(32, 64, 0, 4, 2),
        ],
    },
}
"""What is tried by head size, rounded up, the most promising first."""
SHAPES = {
    # context tokens, anchors, block size, heads, heads of keys, head size
    "8b": (4096, 512, 7, 32, 8, 128),
    "8b_block16": (4096, 512, 16, 32, 8, 128),
    "8b_long": (32_768, 2048, 7, 32, 8, 128),
    "heads64": (4096, 512, 7, 32, 8, 64),
    "tiny": (100, 8, 7, 4, 2, 16),
}
"""The 4B target's draft has the attention of the 8B one."""


@dataclass
class Case:
    """The attention of one layer."""

    queries: torch.Tensor
    context: tuple[torch.Tensor, torch.Tensor]
    own: tuple[torch.Tensor, torch.Tensor]
    bounds: tuple[torch.Tensor, torch.Tensor]
    upstream: torch.Tensor
    block: int

    @classmethod
    def make(cls, shape: str, device: str) -> Case:
        slots, anchors, block, heads, kv_heads, width = SHAPES[shape]
        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        g = torch.Generator(device).manual_seed(1)

        def random(num_heads: int, length: int) -> torch.Tensor:
            made = torch.randn(1, length, num_heads, width, generator=g, device=device)
            return made.to(dtype).transpose(1, 2)

        rows = anchors * block
        ends = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[:anchors]
        ends = ends.sort().values.unsqueeze(0).to(device)
        return cls(
            random(heads, rows),
            (random(kv_heads, slots), random(kv_heads, slots)),
            (random(kv_heads, rows), random(kv_heads, rows)),
            (torch.zeros_like(ends), ends),
            random(heads, rows),
            block,
        )

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.queries, *self.context, *self.own

    @property
    def product_flops(self) -> float:
        """Of one of the products, over what is seen: two forward, five backward."""
        _, heads, _, width = self.queries.shape
        seen = float((self.bounds[1] - self.bounds[0] + self.block).sum()) * self.block
        return 2.0 * heads * width * seen

    def expected(self) -> tuple[torch.Tensor, ...]:
        """float32: the output of the last rows, and the gradients that these give."""
        anchors = max(1, CHECKED_ROWS // self.block)
        rows = min(anchors * self.block, self.queries.shape[2])
        leaves = [x.float().requires_grad_() for x in self.inputs]
        queries, context_keys, context_values, own_keys, own_values = leaves
        starts, ends = (x[:, -anchors:] for x in self.bounds)
        mask = attention_mask(context_mask(starts, ends, context_keys.shape[2]), self.block)
        last = slice(queries.shape[2] - rows, None)
        out = attend(
            queries[:, :, last],
            (context_keys, context_values),
            (own_keys[:, :, last], own_values[:, :, last]),
            mask,
        )
        grads = torch.autograd.grad(out, leaves, self.last_rows(self.upstream).float())
        return out.detach(), *grads

    def last_rows(self, of_rows: torch.Tensor) -> torch.Tensor:
        return of_rows[:, :, -min(of_rows.shape[2], self.checked_rows) :]

    @property
    def checked_rows(self) -> int:
        return max(1, CHECKED_ROWS // self.block) * self.block

    def masked_upstream(self) -> torch.Tensor:
        """Such that only the rows that are checked have gradients."""
        upstream = torch.zeros_like(self.upstream)
        self.last_rows(upstream).copy_(self.last_rows(self.upstream))
        return upstream


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises ValueError if it is wrong."""
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise ValueError(f"{what} differs from float32 by {error:.2g} of it")


def measure(run: Callable[[], object], device: str) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile, microseconds."""
    run()
    if device == "cpu":
        started = time.perf_counter()
        run()
        return (1e6 * (time.perf_counter() - started),) * 3
    run()
    # The host gets ahead of the device, so that no launch is waited for.
    torch.cuda._sleep(20_000_000)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in pairwise(marks)], dtype=torch.float64)
    low, middle, high = (
        1e3 * torch.quantile(times, torch.tensor([0.2, 0.5, 0.8]).double())
    ).tolist()
    return middle, low, high


def use(tilings: dict[str, Tiling], width: int) -> None:
    """Have these kernels cut this way for heads of this size, the others as shipped."""
    kernels.TILINGS = SHIPPED
    used = kernels.pick_tilings(width, torch.bfloat16)._replace(**tilings)
    kernels.TILINGS = {**SHIPPED, max(16, 1 << (width - 1).bit_length()): used}


class Parts:
    """The kernels, each checked and ready to be timed alone."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.expected = case.expected()
        self.arguments = case.queries, case.context, case.own, case.bounds
        self.out, self.lse = kernels.forward(*self.arguments)

    def backward(self, upstream: torch.Tensor) -> kernels.BackwardPass:
        return kernels.BackwardPass(upstream, self.out, self.lse, *self.arguments)

    def runner(self, part: str) -> Callable[[], object]:
        """One kernel. Raises ValueError if what it gives is wrong."""
        case = self.case
        if part == "forward":
            out, _ = kernels.forward(*self.arguments)
            check(case.last_rows(out), self.expected[0], "the output")
            return partial(kernels.forward, *self.arguments)
        of_queries, *of_keys_values = self.expected[1:]
        checked, timed = self.backward(case.masked_upstream()), self.backward(case.upstream)
        found, delta = checked.of_queries()
        if part == "queries":
            check(found, of_queries, "the queries' gradient")
            return timed.of_queries
        _, timed_delta = timed.of_queries()
        if part == "own":
            keys_values = checked.of_own(delta)
            check(keys_values[0], of_keys_values[2], "the gradient of the own keys")
            check(keys_values[1], of_keys_values[3], "the gradient of the own values")
            return partial(timed.of_own, timed_delta)
        keys_values = checked.of_context(delta)
        check(keys_values[0], of_keys_values[0], "the gradient of the context's keys")
        check(keys_values[1], of_keys_values[1], "the gradient of the context's values")
        return partial(timed.of_context, timed_delta)


def passes(case: Case, attention: Callable[..., torch.Tensor]) -> Callable[[], object]:
    """Forward and backward of an attention of (queries, context, own)."""
    leaves = [x.detach().requires_grad_() for x in case.inputs]

    def run() -> object:
        out = attention(*leaves)
        return torch.autograd.grad(out, leaves, case.upstream)

    return run


def ours(case: Case) -> Callable[..., torch.Tensor]:
    return lambda *inputs: block_attention(*inputs, *case.bounds)[0]


class JoinedCase(Case):
    """Keys and values of context and block in one tensor each, for FlexAttention."""

    @classmethod
    def of(cls, case: Case) -> JoinedCase:
        keys, values = (torch.cat(pair, 2) for pair in zip(case.context, case.own, strict=True))
        return cls(case.queries, (keys, values), case.own, case.bounds, case.upstream, case.block)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.queries, *self.context


def flex(case: Case) -> Callable[..., torch.Tensor]:
    """FlexAttention of a joined case, compiled; on the CPU it has no backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (start_BA, end_BA), block = case.bounds, case.block
    rows, keys = case.queries.shape[2], case.context[0].shape[2]
    slots = keys - rows

    def visible(b: Any, h: Any, row: Any, key: Any) -> Any:
        anchor = row // block
        context = (key >= start_BA[b, anchor]) & (key < end_BA[b, anchor])
        return context | ((key >= slots) & ((key - slots) // block == anchor))

    mask = create_block_mask(visible, 1, None, rows, keys, device=case.queries.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)


class Table:
    """Prints each row as soon as it is known, and keeps the figures."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}

    def title(self, text: str) -> None:
        print(f"\n{text}\n{'':44}        us      p20      p80  TFLOP/s", flush=True)

    def add(
        self, where: str, name: str, run: Callable[[], tuple[float, ...]], flops: float
    ) -> float:
        """Time it; what it raises is printed in its place. Infinite if it raised."""
        try:
            middle, low, high = run()
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            print(f"{name:44}  {type(error).__name__}: {text}"[:160], flush=True)
            return float("inf")
        rate = flops / middle / 1e6
        print(f"{name:44}  {middle:8.1f} {low:8.1f} {high:8.1f} {rate:8.0f}", flush=True)
        for key, value in ((name, middle), (f"{name}_p20", low), (f"{name}_p80", high)):
            self.figures[f"{where}_{key}_microseconds"] = round(value, 2)
        return middle


def name_of(part: str, tiling: Tiling) -> str:
    """Short, and fit for the name of a figure."""
    rows, keys, edge, warps, stages = tiling
    return f"{part}_m{rows}_n{keys}_e{edge}_w{warps}_s{stages}"


def main() -> None:
    options = parse_options()
    if options.plain_loads:
        kernels.has_copy_engine = lambda device: False
    started = time.monotonic()
    table = Table()
    for number, shape in enumerate(options.shape):
        until = started + options.seconds * (number + 1) / len(options.shape)
        one_shape(shape, options.device, until, table)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    table.figures["runs"] = RUNS
    name = "block_attention_plain" if options.plain_loads else "block_attention"
    write_record(name, table.figures, folder=options.out)


def one_shape(shape: str, device: str, until: float, table: Table) -> None:
    case = Case.make(shape, device)
    slots, anchors, block, heads, kv_heads, width = SHAPES[shape]
    table.title(
        f"{shape}: {slots} tokens, {anchors} anchors of {block} rows, "
        f"{heads} over {kv_heads} heads of {width}"
    )
    product = case.product_flops
    parts = Parts(case)
    # Turn and turn about, so that little time still gives a figure of each.
    tried = next(TILINGS[size] for size in sorted(TILINGS) if size >= width)
    if device == "cpu":
        tried = {part: tilings[:1] for part, tilings in tried.items()}
    best = {part: (float("inf"), tilings[0]) for part, tilings in tried.items()}
    left = 0

    def one_kernel(part: str) -> tuple[float, ...]:
        return measure(parts.runner(part), device)

    for turn in range(max(map(len, tried.values()))):
        for part, tilings in tried.items():
            if turn >= len(tilings):
                continue
            if turn and time.monotonic() > until:
                left += 1
                continue
            use({part: tilings[turn]}, width)
            found = table.add(
                shape,
                name_of(part, tilings[turn]),
                partial(one_kernel, part),
                PRODUCTS[part] * product,
            )
            best[part] = min(best[part], (found, tilings[turn]))
    if left:
        print(f"{left} tilings left out: no time", flush=True)
    for part, (_, tiling) in best.items():
        table.figures[f"{shape}_best_{part}"] = name_of(part, tiling)
    print("best:", ", ".join(name_of(part, tiling) for part, (_, tiling) in best.items()))

    def both(name: str, case: Case, make: Callable[[Case], Callable[..., torch.Tensor]]) -> None:
        def forward_time() -> tuple[float, ...]:
            attention = make(case)
            with torch.no_grad():
                check(case.last_rows(attention(*case.inputs)), parts.expected[0], "the output")
                return measure(lambda: attention(*case.inputs), device)

        table.add(shape, f"{name}_forward", forward_time, 2 * product)
        table.add(
            shape, f"{name}_passes", lambda: measure(passes(case, make(case)), device), 7 * product
        )

    use({part: tiling for part, (_, tiling) in best.items()}, width)
    both("ours", case, ours)
    both("flex", JoinedCase.of(case), flex)
    table.figures[f"{shape}_necessary_tflop"] = round(7 * product / 1e12, 4)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["8b", "8b_long"])
    parser.add_argument("--plain-loads", action="store_true", help="without the copy engine")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the tilings")
    parser.add_argument("--out", type=Path, help="folder of the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()
