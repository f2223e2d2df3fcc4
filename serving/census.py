"""Where a decode step's time goes, by kind of kernel, from a trace of each rank.

Every instant of a step is billed once: to the kernel that runs, the one that began first where
several do, or to idleness. Idle time between two kernels of one graph is the graph's; elsewhere it
is the host's up to the moment when the next launch has been called, and the GPU's own latency after
that. A rank that waits in an all-reduce for another rank does no work: an all-reduce costs on every
rank what it took on the rank that came last.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from serving.trace import SMALL_GRAPH_KERNELS, Kernel, Trace, first_from, within

Micros = defaultdict[str, float]

IDLE_IN_GRAPH, IDLE_BETWEEN, HOST = "idle in graph", "idle between graphs", "host"
RANK_WAIT, DRAFT, ALL_REDUCE, OTHER = "waiting for ranks", "draft", "all-reduce", "other"
IDLE = (IDLE_IN_GRAPH, IDLE_BETWEEN, HOST)
RULES: tuple[tuple[str, str], ...] = (
    (ALL_REDUCE, r"all_?reduce|nccl|cross_device_reduce|all_?gather|reduce_?scatter|mnnvl"),
    ("sampling", r"argmax|arg_max|softmax(?!.*attn)|sampl|gumbel|accept|reject|top_?p|multinomial"),
    ("KDA", r"kda|delta_rule|causal_conv1d|fused_recurrent|mamba|sigmoid_gating|ssm_"),
    (
        "MLA/attention",
        r"flash|fmha|mla|attention|attn|paged_decode|_fwd_grouped_kernel_stage|merge_state",
    ),
    ("router and glue", r"moe_align|router|top_?k|moe_sum|moe_fused_gate|count_and_sort|gate_topk"),
    ("MoE GEMM", r"fused_moe|moe.*gemm|grouped_?gemm|group_gemm|moe_gemm|bmm_.*moe|mxfp4"),
    ("dense GEMM", r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitk|matvec|tgv|skinny"),
    (
        "router and glue",
        r"norm|silu|swiglu|act_and_mul|rope|rotary|elementwise|copy|cat|index|scatter|gather|quant"
        r"|embedding|memcpy|memset|fill|kv_?cache|set_mla|reduce|metadata|page_table|gate|poi_|per_"
        r"|window|scan|concat|kv_norm|store",
    ),
)
"""First match wins."""
_RULES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in RULES)
CLASSES = (
    "MoE GEMM",
    "dense GEMM",
    "KDA",
    "MLA/attention",
    ALL_REDUCE,
    "router and glue",
    "sampling",
    DRAFT,
    OTHER,
    RANK_WAIT,
    *IDLE,
)


def kernel_class(name: str) -> str:
    """The class of a kernel by its name alone."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), OTHER)


@dataclass(frozen=True, slots=True)
class Census:
    """One rank's step, or the mean of several ranks' steps."""

    step_ms: float
    """Mean over the steps."""
    num_steps: int
    milliseconds: dict[str, float]
    """Per step, by class; they sum up to `step_ms`."""
    kernels: dict[str, float]
    """Number per step, by class."""
    others: tuple[tuple[str, float], ...]
    """The unclassified kernels that take longest, with their milliseconds per step."""

    @property
    def idle_fraction(self) -> float:
        """Share of the step in which no kernel ran."""
        return sum(self.milliseconds.get(name, 0.0) for name in IDLE) / self.step_ms

    def calibrated_idle_fraction(self, unprofiled_step_ms: float) -> float:
        """The same for a step that was not profiled.

        Profiling slows the host and not the kernels, so what a step takes less without it is taken
        off the idle time.
        """
        idle = self.idle_fraction * self.step_ms - (self.step_ms - unprofiled_step_ms)
        return max(0.0, idle) / unprofiled_step_ms


def census(traces: Sequence[Trace]) -> Census:
    """The mean over the ranks of one server.

    Raises:
        ValueError: a trace has no steady decode step.
    """
    waits = _rank_waits(traces)
    found = [_rank_census(trace, waits.get(trace.rank, {})) for trace in traces]
    names = {name for one in found for name in one.milliseconds}
    return Census(
        statistics.fmean(one.step_ms for one in found),
        min(one.num_steps for one in found),
        {n: statistics.fmean(one.milliseconds.get(n, 0.0) for one in found) for n in names},
        {n: statistics.fmean(one.kernels.get(n, 0.0) for one in found) for n in names},
        found[0].others,
    )


def _rank_census(trace: Trace, waits: dict[int, float]) -> Census:
    steps = trace.steps()
    graph_of, drafts = _graph_members(trace)
    launched = {c.correlation: c.end for c in trace.calls}
    micros: Micros = defaultdict(float)
    numbers: Counter[str] = Counter()
    others: Micros = defaultdict(float)
    for begin, end in steps:
        cursor, before = begin, None
        for kernel in within(trace.kernels, [(begin, end)]):
            if kernel.start > cursor:
                _bill_idle(micros, cursor, before, kernel, graph_of, launched)
            kind = DRAFT if id(kernel) in drafts else kernel_class(kernel.name)
            numbers[kind] += 1
            # What runs on into the next step was begun, and is billed, here up to its end.
            worked = max(0.0, min(kernel.end, end) - max(kernel.start, cursor))
            waited = min(worked, waits.get(id(kernel), 0.0))
            micros[RANK_WAIT] += waited
            micros[kind] += worked - waited
            if kind == OTHER:
                others[kernel.name] += worked
            if kernel.end > cursor:
                cursor, before = min(kernel.end, end), kernel
        if cursor < end:
            # The step ends where the next launch of the target begins.
            following = trace.kernels[first_from(trace.kernels, end)]
            _bill_idle(micros, cursor, before, following, graph_of, launched, until=end)
    per_step = 1e3 * len(steps)
    return Census(
        sum(e - b for b, e in steps) / per_step,
        len(steps),
        {name: value / per_step for name, value in micros.items()},
        {name: value / len(steps) for name, value in numbers.items()},
        tuple((n, others[n] / per_step) for n in sorted(others, key=lambda n: -others[n])[:8]),
    )


def _bill_idle(
    micros: Micros,
    cursor: float,
    before: Kernel | None,
    kernel: Kernel,
    graph_of: dict[int, int],
    launched: dict[int, float],
    until: float | None = None,
) -> None:
    end = kernel.start if until is None else until
    graph = graph_of.get(id(kernel))
    if before is not None and graph is not None and graph == graph_of.get(id(before)):
        micros[IDLE_IN_GRAPH] += end - cursor
        return
    called = launched.get(kernel.correlation, cursor)
    host = min(max(called, cursor), end) - cursor
    micros[HOST] += host
    micros[IDLE_BETWEEN] += end - cursor - host


def _graph_members(trace: Trace) -> tuple[dict[int, int], set[int]]:
    """By kernel: its graph's launch; and the kernels of graphs of a model other than the target."""
    graph_of, drafts = {}, set()
    for number, run in enumerate(trace.graphs):
        is_draft = run.kind != 0 and len(run.kernels) >= SMALL_GRAPH_KERNELS
        for kernel in run.kernels:
            graph_of[id(kernel)] = number
            if is_draft:
                drafts.add(id(kernel))
    return graph_of, drafts


def _rank_waits(traces: Sequence[Trace]) -> dict[int, dict[int, float]]:
    """By rank and kernel: microseconds of an all-reduce spent waiting for a later rank.

    The n-th all-reduce of the n-th step is one and the same on all ranks. Clocks of ranks need not
    agree: the rank that came last waited for nobody, and its duration is what the work takes.
    """
    if len(traces) < 2:
        return {}
    collectives = {
        trace.rank: [
            k for k in within(trace.kernels, trace.steps()) if kernel_class(k.name) == ALL_REDUCE
        ]
        for trace in traces
    }
    if len({tuple(k.name for k in found) for found in collectives.values()}) != 1:
        # Ranks were traced from different steps on: better no correction than a wrong one.
        return {}
    waits: dict[int, dict[int, float]] = {rank: {} for rank in collectives}
    for group in zip(*collectives.values(), strict=True):
        work = min(k.end - k.start for k in group)
        for rank, kernel in zip(collectives, group, strict=True):
            waits[rank][id(kernel)] = kernel.end - kernel.start - work
    return waits
