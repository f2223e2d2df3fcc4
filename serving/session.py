"""Servers for the length of a measurement, and short traces of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving import hooks_fold, hooks_kernels
from serving.audit import Observed, Row, audit, read_counters
from serving.bench import Workload, drafts_per_round, run_once
from serving.census import Census, census
from serving.facts import read_target
from serving.launch_spec import Launch, Setting
from serving.measure import end_all
from serving.server import EngineProcess, HttpServer, Server, ServerError
from serving.trace import StepFacts, Trace, read_trace, step_facts, within

TRACE_SECONDS = 0.6
TRACE_TOKENS = 2048
"""Enough to decode on while the trace is begun and ended."""
SETTLE_SECONDS = 0.5


@asynccontextmanager
async def running(launch: Launch, log: Path) -> AsyncIterator[EngineProcess]:
    """An engine of its own.

    Raises:
        ServerError: it does not start, or its log shows nothing of a fold that was asked for.
    """
    server = await EngineProcess.start(launch, log)
    try:
        for hooks in (hooks_fold, hooks_kernels):
            if hooks.ENVIRONMENT in launch.environment_dict():
                check_hooks(log, hooks.ENVIRONMENT, hooks.LOG_MARK)
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def at(url: str) -> AsyncIterator[HttpServer]:
    """A server that runs at an address."""
    server = HttpServer(url)
    try:
        yield server
    finally:
        await server.close()


def check_hooks(log: Path, variable: str, mark: str) -> None:
    """See that the hooks which a variable asks for were there, and show what they said.

    Raises:
        ServerError: they were not.
    """
    lines = [x for x in log.read_text(errors="replace").splitlines() if mark in x]
    if not lines:
        raise ServerError(
            f"{variable} is set and {log} shows no line of it: SGLang did not load "
            "this package's plugin; install the package with its entry points, and leave "
            "SGLANG_PLUGINS unset"
        )
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def audited(launch: Launch, stem: Path) -> Launch:
    """The same start with the counters of the audit."""
    setting = Setting("SPLITSERVE_AUDIT", str(stem), "counts what each step really did")
    return launch.plus((), [setting])


async def traced(server: Server, workload: Workload, folder: Path) -> list[Trace]:
    """A trace of each rank while the first prompt of a workload is decoded.

    The workload is run once before, so that nothing is compiled under the profiler.

    Raises:
        ValueError: the profiler wrote nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block_size = await drafts_per_round(server)
    single = replace(workload, prompts=list(workload.prompts)[:1], concurrency=1)
    before = set(folder.glob("*.trace.json*"))
    warm = await run_once(server, replace(single, max_new_tokens=64), block_size)
    context = (await server.info()).get("context_length") or 2**31
    room = int(context) - len(single.prompts[0].token_ids) - 1
    ask = replace(single, max_new_tokens=min(TRACE_TOKENS, room), ignore_eos=True).asks()[0]
    decoding = asyncio.ensure_future(server.ask(ask))
    try:
        await asyncio.sleep(warm.report.timings["mean_ttft_ms"] / 1e3 + SETTLE_SECONDS)
        await server.start_profile(str(folder.resolve()))
        await asyncio.sleep(TRACE_SECONDS)
        await server.stop_profile()
        await decoding
    finally:
        await end_all([decoding])
    paths = sorted(set(folder.glob("*.trace.json*")) - before)
    if not paths:
        raise ValueError(
            f"traces={str(folder)!r} got no trace; allowed: a folder that the server can write to; "
            "name one on the server's machine"
        )
    return [read_trace(path) for path in paths]


def summarize_traces(traces: Sequence[Trace]) -> tuple[Census, StepFacts]:
    """The census over all ranks and the counts of rank 0. Raises ValueError."""
    return census(traces), step_facts(min(traces, key=lambda t: t.rank))


async def observe(
    server: Server, *, target_path: str, counters: str, traces: Sequence[Trace]
) -> list[Row]:
    """Audit a server that has decoded.

    Args:
        counters: value of SPLITSERVE_AUDIT in its environment; empty without.
        traces: short ones of its decoding; empty without.
    """
    arguments = await server.info()
    counts: dict[str, int] = {}
    facts: dict[str, Any] = {}
    if counters:
        counts, facts = read_counters(counters)
    step = kernels = None
    if traces:
        first = min(traces, key=lambda t: t.rank)
        step = step_facts(first)
        kernels = frozenset(k.name for k in within(first.kernels, first.steps()))
    return audit(
        Observed(
            arguments, counts, facts, kernels or frozenset(), step, read_target(target_path).family
        )
    )
