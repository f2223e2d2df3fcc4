"""A torch (Kineto) trace of one rank: its kernels, what launched them, and its decode steps.

SGLang's profiler writes one `*.trace.json.gz` a rank. A kernel of a captured graph carries the
correlation of the call that launched the graph, so that the graph's launches can be told apart;
launches of one and the same graph run the same kernels in the same order.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
API_CATEGORIES = ("cuda_runtime", "cuda_driver")
GRAPH_LAUNCH = "GraphLaunch"
SYNCHRONIZE = re.compile(r"Synchronize|^cudaMemcpy$|^cuMemcpyDtoH(_v2)?$")
SMALL_GRAPH_KERNELS = 8
"""Fewer than a layer has: a graph of metadata, not of a model."""
EDGE_STEPS = 2
"""Steps left out at either end, where profiling begins and ends."""
_RANK = re.compile(r"TP-(\d+)")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A piece of work on the GPU; times in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    stream: int
    correlation: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call into the CUDA API."""

    name: str
    start: float
    end: float
    correlation: int


@dataclass(frozen=True, slots=True)
class GraphRun:
    """One launch of a captured graph."""

    kind: int
    """Equal for launches of the same graph; 0 is the target's, which takes the most time."""
    kernels: tuple[Kernel, ...] = field(repr=False)

    @property
    def start(self) -> float:
        """When its first kernel began."""
        return self.kernels[0].start


@dataclass(frozen=True, slots=True)
class Trace:
    """Everything of one rank that is used here, in the order of time."""

    rank: int
    kernels: tuple[Kernel, ...] = field(repr=False)
    calls: tuple[Call, ...] = field(repr=False)
    graphs: tuple[GraphRun, ...] = field(repr=False)

    def steps(self) -> list[tuple[float, float]]:
        """Begin and end of each steady decode step, from one launch of the target to the next.

        Raises:
            ValueError: too few launches of a graph for a single steady step.
        """
        begins = [g.start for g in self.graphs if g.kind == 0]
        spans = list(pairwise(begins))[EDGE_STEPS:-EDGE_STEPS]
        if not spans:
            raise ValueError(
                f"trace of rank {self.rank} has {len(begins)} launches of its largest graph; "
                f"allowed: more than {2 * EDGE_STEPS + 1}; trace more decode steps, with CUDA "
                "graphs on"
            )
        typical = statistics.median(end - begin for begin, end in spans)
        # Prefills and the pauses between requests are no decode steps.
        return [(b, e) for b, e in spans if e - b <= 2 * typical]


def read_trace(path: Path) -> Trace:
    """Read one rank's trace.

    Raises:
        ValueError: it is no trace, or holds no work of a GPU.
    """
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as stream:
            events = json.load(stream)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    found = _RANK.search(path.name)
    try:
        return make_trace(events, int(found.group(1)) if found else 0)
    except (AttributeError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"trace={str(path)!r} cannot be read ({type(error).__name__}: {error}); allowed: what "
        "SGLang's profiler writes, *.trace.json.gz; trace again"
    )


def make_trace(events: Sequence[dict[str, Any]], rank: int = 0) -> Trace:
    """A trace from Kineto's events.

    Raises:
        ValueError: no event is work of a GPU.
    """
    kernels, calls = [], []
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X":
            continue
        arguments = event.get("args") or {}
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        correlation = int(arguments.get("correlation", -1))
        if category in GPU_CATEGORIES:
            stream = int(arguments.get("stream", 0) or 0)
            kernels.append(Kernel(str(event["name"]), start, end, stream, correlation))
        elif category in API_CATEGORIES:
            calls.append(Call(str(event["name"]), start, end, correlation))
    if not kernels:
        raise ValueError(
            f"trace of rank {rank} holds no work of a GPU; allowed: a trace with GPU activities; "
            "trace again on the machine that serves"
        )
    kernels.sort(key=lambda k: (k.start, k.end))
    calls.sort(key=lambda c: c.start)
    return Trace(rank, tuple(kernels), tuple(calls), _graph_runs(kernels, calls))


def _graph_runs(kernels: Sequence[Kernel], calls: Sequence[Call]) -> tuple[GraphRun, ...]:
    launches = {c.correlation for c in calls if GRAPH_LAUNCH in c.name}
    members: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.correlation in launches:
            members[kernel.correlation].append(kernel)
    # Streams of one graph interleave by chance, so kinds are told by which kernels, not in what
    # order.
    signatures = {
        number: tuple(sorted(Counter(k.name for k in run).items()))
        for number, run in members.items()
    }
    seconds: defaultdict[tuple[tuple[str, int], ...], float] = defaultdict(float)
    for number, run in members.items():
        seconds[signatures[number]] += sum(k.end - k.start for k in run)
    # Beside a tiny target a draft may take longer, but only a draft has a Markov head.
    order = sorted(seconds, key=lambda s: (any("markov" in n for n, _ in s), -seconds[s]))
    kinds = {signature: kind for kind, signature in enumerate(order)}
    runs = [GraphRun(kinds[signatures[n]], tuple(run)) for n, run in members.items()]
    return tuple(sorted(runs, key=lambda run: run.start))


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a steady decode step is made of, per step."""

    step_ms: float
    """Median."""
    num_steps: int
    graphs: float
    small_graphs: float
    """Of metadata; not among `graphs`."""
    eager_kernels: float
    """Launched one by one."""
    synchronizations: float
    """Calls that wait for the GPU."""
    overlapped_kernels: float
    """That began before the one ahead of it in its stream had ended: programmatic launch."""


def step_facts(trace: Trace) -> StepFacts:
    """Counts per steady decode step. Raises ValueError without one."""
    steps = trace.steps()
    number = len(steps)
    in_graphs = {id(k) for run in trace.graphs for k in run.kernels}
    kernels = within(trace.kernels, steps)
    runs = [r for r in trace.graphs if _inside(r.start, steps)]
    waits = [c for c in trace.calls if SYNCHRONIZE.search(c.name) and _inside(c.start, steps)]
    ends: dict[int, float] = {}
    overlapped = 0
    for kernel in kernels:
        overlapped += kernel.start < ends.get(kernel.stream, float("-inf"))
        ends[kernel.stream] = max(kernel.end, ends.get(kernel.stream, kernel.end))
    small = sum(len(r.kernels) < SMALL_GRAPH_KERNELS for r in runs)
    return StepFacts(
        statistics.median(e - b for b, e in steps) / 1e3,
        number,
        (len(runs) - small) / number,
        small / number,
        sum(id(k) not in in_graphs for k in kernels) / number,
        len(waits) / number,
        overlapped / number,
    )


def within(kernels: Sequence[Kernel], steps: Sequence[tuple[float, float]]) -> list[Kernel]:
    """Kernels that begin inside a step; they must be in the order of their begin."""
    found: list[Kernel] = []
    for begin, end in steps:
        found += kernels[first_from(kernels, begin) : first_from(kernels, end)]
    return found


def first_from(kernels: Sequence[Kernel], when: float) -> int:
    """Place of the first kernel that begins then or later."""
    return bisect_left(kernels, when, key=lambda kernel: kernel.start)


def _inside(when: float, steps: Sequence[tuple[float, float]]) -> bool:
    place = bisect_left(steps, (when, float("inf"))) - 1
    return place >= 0 and steps[place][0] <= when < steps[place][1]
