"""A decode step's linear products: kernels of our own against torch's, weights from memory.

    python -m benchmarks.decode_linear                       the products of Qwen3-8B's sizes
    python -m benchmarks.decode_linear --model smollm2       those of SmolLM2-135M
    python -m benchmarks.decode_linear --rows 16 --shapes o,down --splits 1,2,4,8
    python -m benchmarks.decode_linear --configs m8n64k128s5w4p4,m8n64k128s5w4p4d

Each product is checked against float64 and must repeat bit by bit, then runs in a CUDA graph of 20
or more launches, each with another weight, so that the gaps between launches count. The weights
together are several times the size of L2, also for small shapes. All candidates are timed, the
fastest of them also with programmatic dependent launch (a name with d at its end), which here
follows a product of its own kind: in a step its neighbours are other kernels, and it gains less.
What a configuration does wrong is printed, and the others go on; after `--seconds` no new one is
begun. Writes `decode_linear_MODEL.json` into `--out`: medians of the replays, microseconds a
launch, with the 20th and 80th percentile of torch's and of the fastest. `--choices FILE` adds the
fastest ones without dependent launch to a file that SPLITSERVE_LINEAR_CHOICES can name.

`--device cpu --model tiny` under TRITON_INTERPRET=1 only shows that the script works.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.record import write_record
from serving.hooks_linear import KeptChoices, Shape
from serving.kernels import linear_choice
from serving.kernels import skinny_linear as skinny

LIBRARY = skinny.LIBRARY
COLD_BYTES = 256 << 20
"""Of weights between two uses of one: four times an H200's L2."""
MOST_BYTES = 4 << 30
LAUNCHES = 20
MOST_ERROR = 4e-3
"""RMS of the error relative to the result. Rounding to bfloat16 alone gives 1.7e-3."""
NUM_DEPENDENT = 2
"""So many of the fastest are tried with programmatic dependent launch."""


class Product(NamedTuple):
    """One weight's sizes."""

    num_out: int
    num_in: int
    per_step: int
    """Launches in a DSPARK step of target and draft; 0 for what takes another's place."""
    gated: bool = False
    """With silu(gate) * up behind it."""

    @property
    def num_bytes(self) -> int:
        return self.num_out * self.num_in * 2


MODELS = {
    # 36 layers and 5 of the draft; fc takes the target's features to the draft.
    "8b": {
        "qkv": Product(6144, 4096, 41),
        "o": Product(4096, 4096, 41),
        "gate_up": Product(24576, 4096, 41),
        "down": Product(4096, 12288, 41),
        "fc": Product(4096, 5 * 4096, 1),
        "lm_head": Product(151936, 4096, 2),
        "mlp": Product(24576, 4096, 0, gated=True),
        "markov": Product(151936, 256, 7),
    },
    # 30 layers and 2 of the draft.
    "smollm2": {
        "qkv": Product(960, 576, 32),
        "o": Product(576, 576, 32),
        "gate_up": Product(3072, 576, 32),
        "down": Product(576, 1536, 32),
        "lm_head": Product(49152, 576, 2),
    },
    "tiny": {
        "qkv": Product(96, 64, 2),
        "o": Product(64, 64, 2),
        "down": Product(64, 48, 2),
        "lm_head": Product(200, 72, 1),
        "mlp": Product(96, 64, 0, gated=True),
    },
}


@dataclass
class Timings:
    """Of one product: microseconds a launch, each replay's, by name."""

    product: Product
    replays: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.replays[name])

    def fastest(self, *, dependent: bool) -> str:
        """The fastest configuration's name; the library's where none ran."""
        names = [n for n in self.replays if n != LIBRARY and (dependent or not n.endswith("d"))]
        return min(names, key=self.median, default=LIBRARY)


def main() -> None:
    options = parse_options()
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    found: dict[str, Timings] = {}
    products = MODELS[options.model]
    for name in options.shapes or products:
        if time.perf_counter() - started > options.seconds:
            print(f"{name}: not begun, {options.seconds} s are over")
            continue
        found[name] = timings = Timings(products[name])
        try:
            measure(timings, options, started)
        except Exception as error:
            timings.failed["all that was left"] = describe(error)
        print_table(name, timings)
        if options.choices and LIBRARY in timings.replays:
            keep(timings, options)
    figures = {"rows": options.rows, "dtype": "bfloat16", "device_type": options.device}
    for name, timings in found.items():
        figures |= to_figures(name, timings)
    figures |= step_totals(found)
    figures["whole_run_seconds"] = round(time.perf_counter() - started, 1)
    write_record(f"decode_linear_{options.model}", figures, folder=options.out)


def parse_options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--shapes", type=names, help="some of the model's products")
    parser.add_argument("--configs", type=names, default=[], help="these, not the candidates")
    parser.add_argument("--splits", type=names, default=[], help="each candidate also so split")
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=75.0, help="begin nothing new after")
    parser.add_argument("--choices", type=Path, help="file that takes the fastest")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the record")
    options = parser.parse_args()
    if not 1 <= options.rows <= skinny.MAX_ROWS:
        parser.error(f"--rows {options.rows}: 1 to {skinny.MAX_ROWS} are allowed")
    if unknown := set(options.shapes or ()) - set(MODELS[options.model]):
        parser.error(f"--shapes {','.join(unknown)}: allowed: {','.join(MODELS[options.model])}")
    return options


# --- one product ----------------------------------------------------------------------------------


def measure(timings: Timings, options: argparse.Namespace, started: float) -> None:
    """Fill in the library's times and those of all configurations."""
    product = timings.product
    weights, x = make_inputs(product, options.rows, options.device)
    expected = (x.double() @ weights[0].double().T).float()
    if product.gated:
        # Rounded where SGLang's kernels round.
        gate, up = expected.bfloat16().double().chunk(2, -1)
        expected = (F.silu(gate) * up).float()

    def try_one(config: skinny.Config | None) -> None:
        name = LIBRARY if config is None else str(config)
        if name in timings.replays or time.perf_counter() - started > options.seconds:
            return
        try:
            timings.replays[name] = time_product(
                config, x, weights, expected, options, gated=product.gated
            )
        except Exception as error:
            timings.failed[name] = describe(error)
            # Where the device itself is lost, this raises and ends the product.
            synchronize(options.device)

    try_one(None)
    for config in configurations(product, options):
        try_one(config)
    if not options.configs:
        ranked = sorted((n for n in timings.replays if n != LIBRARY), key=timings.median)
        for name in ranked[:NUM_DEPENDENT]:
            if options.device == "cuda":
                try_one(replace(skinny.Config.parse(name), pdl=True))


def configurations(product: Product, options: argparse.Namespace) -> list[skinny.Config]:
    """What is tried, in its order, nothing twice."""
    if options.configs:
        return [skinny.Config.parse(name) for name in options.configs]
    # Sizes and a device, no memory.
    weight = torch.empty(1, device=options.device).expand(product.num_out, product.num_in)
    found = list(linear_choice.device_candidates(weight, options.rows, product.gated))
    found += [replace(c, split_k=int(split)) for split in options.splits for c in found]
    return list(dict.fromkeys(found))


def make_inputs(
    product: Product, rows: int, device: str, copies: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """So many weights, or as many as L2 cannot hold, and x; results have a variance of 1."""
    if not copies and device == "cpu":
        copies = 2
    elif not copies:
        cold = math.ceil(COLD_BYTES / product.num_bytes)
        copies = max(1, cold, min(LAUNCHES, MOST_BYTES // product.num_bytes))
    generator = torch.Generator(device).manual_seed(1)
    weights = [
        torch.randn(
            product.num_out,
            product.num_in,
            dtype=torch.bfloat16,
            device=device,
            generator=generator,
        ).mul_(product.num_in**-0.5)
        for _ in range(copies)
    ]
    x = torch.randn(rows, product.num_in, device=device, generator=generator).bfloat16()
    return weights, x


def time_product(
    config: skinny.Config | None,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    expected: torch.Tensor,
    options: argparse.Namespace,
    *,
    gated: bool,
) -> list[float]:
    """Check, then microseconds a launch of each replay.

    Raises:
        ValueError: the results are wrong or do not repeat.
    """
    # As in serving: counters are each weight's own, made before the capture.
    counters = [config and skinny.make_counters(weight, config) for weight in weights]

    def call(place: int) -> torch.Tensor:
        if config is None:
            y = F.linear(x, weights[place])
            return silu_and_mul(y) if gated else y
        return skinny.skinny_linear(
            x, weights[place], config=config, counters=counters[place], gated=gated
        )

    first = call(0)
    error = float((first.float() - expected).norm() / expected.norm())
    # The interpreter cuts digits off where a device rounds.
    if not error <= MOST_ERROR * (1 if x.is_cuda else 4):
        raise ValueError(f"the error's RMS is {error:.1e} of the result's")
    places = [place % len(weights) for place in range(max(LAUNCHES, len(weights)))]
    replay, results = capture(call, places, options.device)
    times = [replay() / len(places) for _ in range(options.replays + 1)][1:]
    if not torch.equal(results[0], first):
        raise ValueError("the same product gave other bits in a graph")
    if any(bool(count.any()) for count in counters if count is not None):
        raise ValueError("counters are not at 0")
    return times


def silu_and_mul(y: torch.Tensor) -> torch.Tensor:
    """SGLang's, or torch's where there is no GPU."""
    if y.is_cuda:
        from sgl_kernel import silu_and_mul as kernel

        found: torch.Tensor = kernel(y)
        return found
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def capture(
    call: Callable[[int], torch.Tensor], places: list[int], device: str
) -> tuple[Callable[[], float], list[torch.Tensor]]:
    """A function that runs all calls and gives their microseconds, and where results are put."""
    results: list[torch.Tensor] = []
    if device == "cpu":

        def run() -> float:
            begun = time.perf_counter()
            results[:] = [call(place) for place in places]
            return (time.perf_counter() - begun) * 1e6

        return run, results
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        # Results that are dropped give their memory to later ones; the first is looked at again.
        for place in places:
            y = call(place)
            if not results:
                results.append(y)

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    return replay, results


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


# --- what is shown and kept -----------------------------------------------------------------------


def rate(timings: Timings, name: str) -> float:
    """TB/s of the weight alone."""
    return timings.product.num_bytes / timings.median(name) / 1e6


def print_table(name: str, timings: Timings) -> None:
    """Fastest first; the ratio is the library's time over this one's."""
    product = timings.product
    print(f"{name} [{product.num_out} x {product.num_in}], {product.num_bytes / 1e6:.1f} MB")
    for key in sorted(timings.replays, key=timings.median):
        ratio = ""
        if LIBRARY in timings.replays:
            ratio = f"{timings.median(LIBRARY) / timings.median(key):8.3f}x"
        print(f"  {key:26}{timings.median(key):9.2f} us{rate(timings, key):7.2f} TB/s{ratio}")
    for key, why in timings.failed.items():
        print(f"  {key:26}  failed: {why}")


def to_figures(name: str, timings: Timings) -> dict[str, Any]:
    """Flat, by product and configuration."""
    figures: dict[str, Any] = {}
    for key in timings.replays:
        figures[f"{name}_{key}_us"] = round(timings.median(key), 2)
    best = timings.fastest(dependent=True)
    for label, key in (("library", LIBRARY), ("best", best)):
        if key in timings.replays:
            low, high = percentiles(timings.replays[key])
            figures[f"{name}_{label}_p20_us"] = low
            figures[f"{name}_{label}_p80_us"] = high
            figures[f"{name}_{label}_tb_per_s"] = round(rate(timings, key), 3)
    figures[f"{name}_best"] = best
    figures[f"{name}_failed"] = ", ".join(timings.failed)
    return figures


def percentiles(values: list[float]) -> tuple[float, float]:
    """The 20th and the 80th."""
    numbers = torch.tensor(values, dtype=torch.float64)
    low, high = torch.quantile(numbers, torch.tensor([0.2, 0.8]).double()).tolist()
    return round(low, 2), round(high, 2)


def step_totals(found: dict[str, Timings]) -> dict[str, float]:
    """What the products of a whole step take, the library's wherever it is faster."""
    totals = {"library": 0.0, "best": 0.0, "best_independent": 0.0}
    for timings in found.values():
        if LIBRARY not in timings.replays:
            continue
        library, count = timings.median(LIBRARY), timings.product.per_step
        totals["library"] += count * library
        for label, dependent in (("best", True), ("best_independent", False)):
            fastest = timings.fastest(dependent=dependent)
            totals[label] += count * min(library, timings.median(fastest))
    print(", ".join(f"a step's products, {key}: {us:.1f} us" for key, us in totals.items()))
    return {f"step_{key}_us": round(us, 1) for key, us in totals.items()}


def keep(timings: Timings, options: argparse.Namespace) -> None:
    """Add a choice to the file; one that it has stays."""
    product, name = timings.product, timings.fastest(dependent=False)
    if timings.median(name) > timings.median(LIBRARY) * (1 - linear_choice.LEAST_GAIN):
        name = LIBRARY
    rows = linear_choice.row_bucket(options.rows)
    shape = Shape(product.num_out, product.num_in, rows, "bfloat16", False, product.gated)
    KeptChoices(options.choices).keep(shape, name)


if __name__ == "__main__":
    main()
