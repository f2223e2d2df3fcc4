"""A layer of a verify step, all its kernels of our own in their order, and how best to cut them.

    python -m benchmarks.decode_layer                   a layer of Qwen3-8B behind 8,192 tokens
    python -m benchmarks.decode_layer --model smollm2 --context 512
    python -m benchmarks.decode_layer --choices FILE    begin with a server's choices, add to them

Alone, a kernel does not show what it costs in a step: the one before it may leave room on the
multiprocessors and on the bus, which an early launch uses, or none. So a CUDA graph runs several
layers, each with weights, keys and values of its own that L2 cannot hold together, and the search
changes one thing at a time: dependent launch and configuration of each product, how many tokens of
keys and values come to L2 ahead, in how many parts and in which type attention is merged. What
makes a layer at least `LEAST_GAIN` faster stays, and so on until nothing does or `--seconds` are
over. An early launch must not change a bit of the result; other configurations may round otherwise.

`--timeline` prints gaps and durations of a middle layer's kernels, for the first cut and the last.
Prints every gain, writes `decode_layer_MODEL.json` into `--out` and with `--choices` adds the
products' names to a file that SPLITSERVE_LINEAR_CHOICES can name; a line that it has stays.
The first cut's time with SGLang's kernel for the norms stands beside. Attention's tiling is
`serving.kernels.decode_attention.pick_tiling`'s to choose. `--depth 1 --device cpu --model tiny`
under TRITON_INTERPRET=1 only shows that the script works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_linear import Product as Sizes
from benchmarks.decode_linear import capture, describe, make_inputs
from benchmarks.options import positive
from benchmarks.record import write_record
from serving.hooks_linear import KeptChoices, Shape
from serving.kernels import decode_attention, linear_choice, rope_store
from serving.kernels import skinny_linear as skinny

LEAST_GAIN = 0.004
"""Share of a layer's time that a change must save to stay."""
MOST_ERROR = 0.05
"""RMS of the difference to the first cut's result, relative to it, behind all layers."""
EPS = 1e-6
AHEAD = (0, 32, 64, 128, 256, 512)
SHARED_BYTES = 227 * 1024
COMPILERS = 14
"""Processes that compile what the search will try, at most."""
PRODUCTS = ("qkv", "o", "mlp", "down")


@dataclass(frozen=True)
class Geometry:
    """Of a target's layers."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool
    """Whether queries and keys are normed."""

    def sizes(self) -> dict[str, Sizes]:
        """Of the products, in their order; `mlp` is gate and up with their activation."""
        width = self.heads * self.head_dim
        return {
            "qkv": Sizes(width + 2 * self.kv_heads * self.head_dim, self.hidden, 1),
            "o": Sizes(self.hidden, width, 1),
            "mlp": Sizes(2 * self.intermediate, self.hidden, 1, gated=True),
            "down": Sizes(self.hidden, self.intermediate, 1),
        }


GEOMETRIES = {
    "8b": Geometry(4096, 12288, 32, 8, 128, head_norms=True),
    "smollm2": Geometry(576, 1536, 9, 3, 64, head_norms=False),
    "tiny": Geometry(64, 48, 2, 1, 64, head_norms=True),
}


@dataclass(frozen=True)
class Cut:
    """How everything in a layer is cut."""

    products: tuple[skinny.Config, ...]
    """As PRODUCTS are ordered."""
    tiling: decode_attention.Tiling

    def __str__(self) -> str:
        names = [f"{name} {config}" for name, config in zip(PRODUCTS, self.products, strict=True)]
        tiling = self.tiling
        parts = "half" if tiling.half_parts else "full"
        return ", ".join(
            [*names, f"attention {tiling.num_splits} {parts} parts, {tiling.ahead} tokens ahead"]
        )

    def with_product(self, place: int, config: skinny.Config) -> Cut:
        return replace(self, products=(*self.products[:place], config, *self.products[place + 1 :]))

    def with_tiling(self, **changes: Any) -> Cut:
        return replace(self, tiling=replace(self.tiling, **changes))

    def late(self) -> Cut:
        """The same without early launches of products and without tokens ahead."""
        products = tuple(replace(config, pdl=False) for config in self.products)
        return Cut(products, replace(self.tiling, ahead=0))


class Layers:
    """Weights, keys and values of some layers, and a step through them."""

    def __init__(
        self, geometry: Geometry, rows: int, context: int, depth: int, device: str
    ) -> None:
        self.geometry, self.rows, self.depth, self.device = geometry, rows, depth, device
        self.sizes = geometry.sizes()
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.weights = {
            name: make_inputs(size, rows, device, copies=depth)[0]
            for name, size in self.sizes.items()
        }
        pool = (context + rows, geometry.kv_heads, geometry.head_dim)
        self.pools = [(random(*pool), random(*pool)) for _ in range(depth)]
        # Slots as a pool that has been in use gives them: in runs, not in order.
        runs = torch.randperm(-(-pool[0] // 64), generator=torch.Generator().manual_seed(0))
        slots = (runs[:, None] * 64 + torch.arange(64)).flatten()
        self.table = slots[slots < pool[0]].int().to(device)[None, :]
        self.lengths = torch.tensor([pool[0]], dtype=torch.int32, device=device)
        self.positions = torch.arange(context, pool[0], device=device)
        self.new_slots = self.table[0, context:].long()
        angles = torch.arange(pool[0], device=device)[:, None] / 10000 ** (
            torch.arange(0, geometry.head_dim, 2, device=device) / geometry.head_dim
        )
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().contiguous()
        ones = torch.ones(geometry.head_dim, dtype=torch.bfloat16, device=device)
        self.head_norms = (ones, ones) if geometry.head_norms else None
        self.gain = torch.ones(geometry.hidden, dtype=torch.bfloat16, device=device)
        self.x, self.residual = random(rows, geometry.intermediate), random(rows, geometry.hidden)
        self._counters: dict[tuple[str, int, skinny.Config], torch.Tensor | None] = {}

    def counters(self, name: str, layer: int, config: skinny.Config) -> torch.Tensor | None:
        key = (name, layer, config)
        if key not in self._counters:
            self._counters[key] = skinny.make_counters(self.weights[name][layer], config)
        return self._counters[key]

    def run(self, cut: Cut, *, apart: bool = False) -> torch.Tensor:
        """The residual behind the last layer, bfloat16 [rows, hidden].

        Args:
            apart: with SGLang's kernel for the norms between the products.
        """
        configs = dict(zip(PRODUCTS, cut.products, strict=True))

        def multiply(name: str, layer: int, x: torch.Tensor, **more: Any) -> Any:
            config, weight = configs[name], self.weights[name][layer]
            call = skinny.add_linear if "add" in more else skinny.skinny_linear
            counters = self.counters(name, layer, config)
            return call(x, weight, config=config, counters=counters, **more)

        def add(
            name: str, layer: int, x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            if apart:
                return add_norm(multiply(name, layer, x), residual, self.gain), residual, {}
            y, normed = multiply(name, layer, x, add=skinny.Add(residual, self.gain, EPS))
            return y, normed.h, {"normed": normed}

        # What the first layer finds is made as the one before it would have made it.
        y, h, norm = add("down", -1, self.x, self.residual.clone())
        for layer in range(self.depth):
            k_pool, v_pool = self.pools[layer]
            q = rope_store.rope_store(
                multiply("qkv", layer, y, **norm),
                *(k_pool, v_pool, self.new_slots, self.positions, self.cos_sin),
                norms=self.head_norms,
                eps=EPS,
            )
            attended = decode_attention.decode_attention(
                q.view(self.rows, self.geometry.heads, self.geometry.head_dim),
                *(k_pool, v_pool, self.table, self.lengths),
                causal=True,
                tiling=cut.tiling,
            )
            y, h, norm = add("o", layer, attended.view(self.rows, -1), h)
            y = multiply("mlp", layer, y, gated=True, **norm)
            y, h, norm = add("down", layer, y, h)
        return h


def add_norm(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """SGLang's kernel, in place, or torch's operations where there is no GPU."""
    if x.is_cuda:
        from sgl_kernel import fused_add_rmsnorm

        fused_add_rmsnorm(x, residual, gain, EPS)
        return x
    h = x.float() + residual.float()
    residual.copy_(h)
    return (h * (h.square().mean(1, keepdim=True) + EPS).rsqrt() * gain.float()).to(x.dtype)


class Search:
    """Finds a faster cut, one change after another."""

    def __init__(self, layers: Layers, seconds: float, replays: int) -> None:
        self.layers, self.replays = layers, replays
        self._end = time.perf_counter() + seconds
        self.failed: dict[str, str] = {}
        self._late: dict[Cut, torch.Tensor] = {}
        self._first: torch.Tensor | None = None

    def time_apart(self, cut: Cut) -> float:
        """Microseconds a layer whose norms are kernels of their own."""
        layers = self.layers
        expected, found = self._run_late(cut).float(), layers.run(cut, apart=True).float()
        error = float((found - expected).norm() / expected.norm())
        if not error <= MOST_ERROR:
            raise ValueError(f"with norms apart, the difference's RMS is {error:.1e}")
        return self._replay(cut, apart=True)[0]

    def time(self, cut: Cut) -> float:
        """Microseconds a layer.

        Raises:
            ValueError: the result is wrong, or an early launch changes it.
        """
        expected = self._run_late(cut)
        if self._first is None:
            self._first = expected
        first = self._first.float()
        error = float((expected.float() - first).norm() / first.norm())
        if not error <= MOST_ERROR:
            raise ValueError(f"the error's RMS is {error:.1e} of the result's")
        microseconds, result = self._replay(cut)
        if not torch.equal(result, expected):
            raise ValueError("an early launch changes the result")
        return microseconds

    def _run_late(self, cut: Cut) -> torch.Tensor:
        late = cut.late()
        if late not in self._late:
            self._late[late] = self.layers.run(late)
        return self._late[late]

    def _replay(self, cut: Cut, *, apart: bool = False) -> tuple[float, torch.Tensor]:
        """The median of the replays, and what the last one gave."""
        layers = self.layers
        # Compiled, and with memory that belongs to no graph, before the capture.
        layers.run(cut, apart=apart)
        replay, results = capture(lambda _: layers.run(cut, apart=apart), [0], layers.device)
        times = [replay() / layers.depth for _ in range(self.replays + 1)][1:]
        return statistics.median(times), results[0]

    def timeline(self, cut: Cut) -> list[tuple[str, float, float]]:
        """Of a middle layer's kernels: name, microseconds since the one before ended, and its own.

        The former are negative where a kernel was launched early.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        layers = self.layers
        replay, _ = capture(lambda _: layers.run(cut), [0], layers.device)
        replay()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            replay()
        events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
        events.sort(key=lambda event: event.time_range.start)
        count = len(events) // layers.depth
        first = max(1, layers.depth // 2 * count)
        return [
            (
                after.name,
                after.time_range.start - before.time_range.end,
                after.time_range.elapsed_us(),
            )
            for before, after in zip(
                events[first - 1 :], events[first : first + count], strict=False
            )
        ]

    def best(self, cut: Cut) -> tuple[Cut, float, float]:
        """The fastest cut that is found, its microseconds a layer and those of the first."""
        began = microseconds = self.time(cut)
        print(f"{microseconds:8.2f} us  {cut}", flush=True)
        changed = True
        while changed:
            changed = False
            for label, change in self.kinds():
                for other in change(cut):
                    if other == cut or time.perf_counter() > self._end:
                        continue
                    try:
                        found = self.time(other)
                    except Exception as error:
                        self.failed[str(other)] = describe(error)
                        if self.layers.device == "cuda":
                            # Where the device itself is lost, this raises and ends the search.
                            torch.cuda.synchronize()
                        continue
                    if found < microseconds * (1 - LEAST_GAIN):
                        cut, microseconds, changed = other, found, True
                        print(f"{microseconds:8.2f} us  {label}: {cut}", flush=True)
        return cut, microseconds, began

    def kinds(self) -> Iterator[tuple[str, Callable[[Cut], list[Cut]]]]:
        """Kinds of changes, small ones first; each changes the cut that it is given."""
        on_gpu = self.layers.device == "cuda"
        if on_gpu:
            yield "launches", self._launched_early
        for place in (1, 3, 2, 0) if on_gpu else ():
            yield f"{PRODUCTS[place]}'s launch", partial(self._launched_otherwise, place)
        if on_gpu:
            yield "ahead", lambda cut: [cut.with_tiling(ahead=number) for number in AHEAD]
        yield (
            "parts",
            lambda cut: [
                cut.with_tiling(half_parts=not cut.tiling.half_parts),
                cut.with_tiling(num_splits=max(1, cut.tiling.num_splits // 2)),
            ],
        )
        for place, name in enumerate(PRODUCTS):
            yield f"{name}'s configuration", partial(self._configured_otherwise, place, name)

    def _launched_early(self, cut: Cut) -> list[Cut]:
        """All products, as they are and with rings that leave each a multiprocessor of its own."""
        early = Cut(tuple(replace(config, pdl=True) for config in cut.products), cut.tiling)
        alone = [
            linear_choice.alone(config, size.num_out, size.num_in, num_sms()) or config
            for size, config in zip(self.layers.sizes.values(), early.products, strict=True)
        ]
        return [early, Cut(tuple(alone), cut.tiling)]

    @staticmethod
    def _launched_otherwise(place: int, cut: Cut) -> list[Cut]:
        config = cut.products[place]
        return [cut.with_product(place, replace(config, pdl=not config.pdl))]

    def _configured_otherwise(self, place: int, name: str, cut: Cut) -> list[Cut]:
        return [cut.with_product(place, config) for config in self.configs(name)]

    def configs(self, name: str) -> list[skinny.Config]:
        """A server's candidates, also alone on a multiprocessor, also launched early."""
        size = self.layers.sizes[name]
        weight = self.layers.weights[name][0]
        found = linear_choice.device_candidates(weight, self.layers.rows, size.gated)
        alone = [
            linear_choice.alone(config, size.num_out, size.num_in, num_sms()) for config in found
        ]
        configs = list(dict.fromkeys([*found, *(config for config in alone if config)]))
        early = (False, True) if self.layers.device == "cuda" else (False,)
        return [replace(config, pdl=pdl) for pdl in early for config in configs]

    def compile_share(self, cut: Cut, share: int, shares: int) -> None:
        """Leave part of what the search of this cut tries first in Triton's cache."""
        tried = list(dict.fromkeys(other for _, change in self.kinds() for other in change(cut)))
        for other in tried[share::shares]:
            for launched in (other, other.late()):
                # The search meets it again, and says so.
                with suppress(Exception):
                    self.layers.run(launched)


def num_sms() -> int:
    """Of the GPU; of an H200 where there is none."""
    return decode_attention.num_sms(
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )


def compile_first(arguments: Sequence[str]) -> None:
    """Compile in as many processes as there are processors, which the search would do in one."""
    number = min(COMPILERS, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "benchmarks.decode_layer", *arguments, "--share"]
    processes = [subprocess.Popen([*command, str(n), str(number)]) for n in range(number)]
    for process in processes:
        # What one leaves uncompiled the search compiles.
        process.wait()


def first_cut(layers: Layers, kept: KeptChoices) -> Cut:
    """What a server would run with: its choices, else the likeliest candidates, early."""
    products = []
    for name, size in layers.sizes.items():
        shape = shape_of(name, size, layers.rows)
        chosen = kept.names.get(shape, kept.names.get(shape._replace(norm=""), skinny.LIBRARY))
        weight = layers.weights[name][0]
        config = linear_choice.device_candidates(weight, layers.rows, size.gated)[0]
        if chosen != skinny.LIBRARY:
            config = skinny.Config.parse(chosen)
        if layers.device == "cuda" and kept.names.get(shape, skinny.LIBRARY) == skinny.LIBRARY:
            config = linear_choice.early(config, size.num_out, size.num_in, num_sms())
        products.append(config)
    geometry = layers.geometry
    num_rows = layers.rows * geometry.heads // geometry.kv_heads
    tiling = decode_attention.pick_tiling(1, geometry.kv_heads, num_rows, num_sms())
    return Cut(tuple(products), tiling)


def shape_of(name: str, size: Sizes, rows: int) -> Shape:
    """What a server keeps a product's choice under."""
    norm = "before" if name in ("qkv", "mlp") else "behind"
    bucket = linear_choice.row_bucket(rows)
    return Shape(size.num_out, size.num_in, bucket, "bfloat16", False, size.gated, norm)


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print and record; 1 if nothing could be timed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=GEOMETRIES, default="8b")
    parser.add_argument("--rows", type=positive, default=8, help="tokens that are verified")
    parser.add_argument("--context", type=positive, default=8192, help="tokens before them")
    parser.add_argument("--depth", type=positive, default=12, help="layers of the graph")
    parser.add_argument("--replays", type=positive, default=9)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin nothing new after")
    parser.add_argument("--timeline", action="store_true", help="also a layer's kernels in time")
    parser.add_argument("--choices", type=Path, help="file of choices to begin with and add to")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rows > decode_attention.MAX_ROWS // 4 or options.rows > skinny.MAX_ROWS // 2:
        parser.error(f"--rows {options.rows}: allowed: up to {skinny.MAX_ROWS // 2}")
    if options.timeline and options.device == "cpu":
        parser.error("--timeline: allowed with --device cuda; leave it out")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here; allowed: --device cpu, for a test")
    if options.share and not 0 <= options.share[0] < options.share[1]:
        parser.error(f"--share {options.share}: allowed: a number below the second one")
    if options.choices and not options.choices.absolute().parent.is_dir():
        parser.error(f"--choices {options.choices}: allowed: a file in a folder that exists")
    try:
        kept = KeptChoices(options.choices)
        for name in kept.names.values():
            if name != skinny.LIBRARY:
                skinny.Config.parse(name)
    except ValueError as error:
        parser.error(f"--choices: {error}")
    if options.device == "cuda" and not options.share:
        compile_first(sys.argv[1:] if argv is None else argv)
    layers = Layers(
        GEOMETRIES[options.model],
        *(options.rows, options.context, 1 if options.share else options.depth, options.device),
    )
    search = Search(layers, options.seconds, options.replays)
    first = first_cut(layers, kept)
    if options.share:
        search.compile_share(first, *options.share)
        return 0
    apart = search.time_apart(first)
    print(f"{apart:8.2f} us  with norms apart", flush=True)
    cut, microseconds, began = search.best(first)
    for name, why in search.failed.items():
        print(f"failed: {name}: {why}")
    figures = {
        "layer_us": round(microseconds, 2),
        "first_layer_us": round(began, 2),
        "norms_apart_layer_us": round(apart, 2),
        "ratio": round(began / microseconds, 4),
        "attention": str(cut.tiling),
        "failed": len(search.failed),
        "layers": options.depth,
        "context_tokens": options.context,
        "rows": options.rows,
    }
    for name, config in zip(PRODUCTS, cut.products, strict=True):
        figures[f"{name}_config"] = str(config)
    write_record(f"decode_layer_{options.model}", figures, folder=options.out)
    for name, config in zip(PRODUCTS, cut.products, strict=True) if options.choices else ():
        kept.keep(shape_of(name, layers.sizes[name], options.rows), str(config))
    for label, shown in (("first", first), ("last", cut)) if options.timeline else ():
        print(f"{label}: microseconds since the kernel before ended, and of the kernel")
        for name, gap, own in search.timeline(shown):
            print(f"{gap:8.2f}{own:8.2f}  {name[:100]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
