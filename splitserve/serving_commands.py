"""`splitserve serve`, `bench`, `gate`, `audit`, `census` and `sweep`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from serving.audit import rows_to_dicts
from serving.bench import Workload, compare, run_once
from serving.bench_client import client_command, run_client
from serving.census_report import census_rows, census_to_dict, write_picture
from serving.facts import read_target
from serving.gates import gates_to_dict, gather, judge
from serving.server import ServerError, Turns
from serving.session import observe, summarize_traces, traced
from serving.trace import read_trace
from serving.workload import TargetTokenizer, eos_token_ids
from splitserve.errors import RunFailed, UserError, suggest
from splitserve.options import parse_options
from splitserve.serving_options import (
    MeasureOptions,
    ServerOptions,
    about_steps,
    check_address,
    launch_of,
    prompts_of,
    second_side,
    sides_of,
)
from splitserve.serving_run import open_server, reach, run_warm, show_table, warm_up, workload_of
from splitserve.serving_sweeps import SweepOptions, sweep_drafts, sweep_sps, sweep_sts

T = TypeVar("T")
CLIENT_SECONDS = 3600.0


@dataclass(frozen=True)
class ServeOptions(ServerOptions):
    """What `splitserve serve` takes."""

    dry_run: bool = False
    """Print the launch line and the reason of each setting, and start nothing."""


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """What `splitserve bench` takes."""

    client: str = "own"
    """own, or sglang: SGLang's benchmark client, on a server at an address."""


@dataclass(frozen=True)
class GateOptions(MeasureOptions):
    """What `splitserve gate` takes."""

    second_url: str = ""
    """Address of the second server; or the second word of the command."""
    declared_rounding: bool = False
    """The change is known to round otherwise: the score decides, not the bytes."""
    answer_tokens: int = 512
    """Longest solution of a problem."""


@dataclass(frozen=True)
class CensusOptions(MeasureOptions):
    """What `splitserve census` takes."""

    traces: list[str] = field(default_factory=list)
    """Trace files of all ranks; empty traces a server."""
    picture: str = ""
    """.svg, or .html with the table too; empty is census.html in the folder."""


def serve(arguments: Sequence[str]) -> int:
    """Start a server in this process's place, or print how. Raises ValueError."""
    options = parse_options(ServeOptions, arguments, nested=True)
    launch = launch_of(options)
    if read_target(options.target).config is None:
        print(
            f"splitserve: target={options.target!r} has no config.json on this machine: backends "
            f"are left to SGLang and nothing is checked against it; hf download {options.target} "
            "config.json",
            file=sys.stderr,
        )
    if more := about_steps(options, launch):
        print(f"splitserve: {more}", file=sys.stderr)
    if options.dry_run:
        for name, value, reason in launch.rows():
            print(f"# {name}={value}: {reason}")
        print(launch.line())
        return 0
    print(launch.line(), file=sys.stderr, flush=True)
    environment = {**os.environ, **launch.environment_dict()}
    os.execve(sys.executable, launch.command(sys.executable), environment)


def bench(arguments: Sequence[str]) -> int:
    """Measure a server, or two in turn. Raises ValueError, RunFailed."""
    options = parse_options(BenchOptions, arguments, nested=True)
    if options.client not in ("own", "sglang"):
        raise UserError(
            "client",
            options.client,
            "own, sglang",
            suggest(options.client, ("own", "sglang")),
        )
    if options.client == "sglang" and (not options.url or options.against or options.prompts):
        raise UserError("client", "sglang", "one server at url=, random prompts", "take client=own")
    return _finish(options, _run(_bench(options)))


def gate(arguments: Sequence[str]) -> int:
    """Judge a change by its gates; 1 if one that binds fails. Raises ValueError, RunFailed."""
    words = [a for a in arguments if "=" not in a]
    rest = [a for a in arguments if "=" in a]
    if words:
        if len(words) != 2:
            raise UserError("gate", " ".join(words), "two addresses", "gate URL URL target=FOLDER")
        rest += [f"url={words[0]}", f"second_url={words[1]}"]
    options = parse_options(GateOptions, rest, nested=True)
    check_address("second_url", options.second_url)
    found = _run(_gate(options))
    _finish(options, found)
    return 0 if found["passed"] else 1


def audit(arguments: Sequence[str]) -> int:
    """Say which optimizations are really at work. Raises ValueError, RunFailed."""
    options = parse_options(MeasureOptions, arguments, nested=True)
    return _finish(options, _run(_audit(options)))


def census(arguments: Sequence[str]) -> int:
    """Say where a decode step's time goes. Raises ValueError, RunFailed."""
    options = parse_options(CensusOptions, arguments, nested=True)
    return _finish(options, _run(_census(options)))


def sweep(arguments: Sequence[str]) -> int:
    """Find the draft length, or write what dspark_compact needs. Raises ValueError, RunFailed."""
    options = parse_options(SweepOptions, arguments, nested=True)
    works = {"drafts": sweep_drafts, "sps": sweep_sps, "sts": sweep_sts}
    if options.what not in works:
        raise UserError("what", options.what, ", ".join(works), suggest(options.what, works))
    return _finish(options, _run(works[options.what](options)))


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except (ServerError, RuntimeError) as error:
        raise RunFailed(str(error)) from error


def _finish(options: MeasureOptions, found: dict[str, Any]) -> int:
    text = json.dumps(found)
    # First: a file that cannot be written must not lose what took so long to measure.
    print(text, flush=True)
    if options.out:
        try:
            Path(options.out).parent.mkdir(parents=True, exist_ok=True)
            Path(options.out).write_text(text + "\n")
        except OSError as error:
            raise UserError(
                "out", options.out, "a file that can be written", str(error.strerror)
            ) from error
    return 0


async def _bench(options: BenchOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    works = {n: workload_of(options, n) for n in options.concurrency}
    first = works[options.concurrency[0]]
    other = sides_of(options)[1] if options.against else None
    async with AsyncExitStack() as stack:
        turns = Turns() if other else None
        server = await open_server(stack, options, first, "a" if turns else "server", turns=turns)
        if other:
            second = await open_server(stack, other, first, "b", turns=turns)
            for number, work in works.items():
                pair = await compare((server, second), ("A", "B"), work, rounds=options.rounds)
                found[str(number)] = pair.to_dict()
                print(f"concurrency {number}: {pair.verdict}", file=sys.stderr, flush=True)
            return {"comparison": found}
        block_size = await warm_up(server, first)
        for number, work in works.items():
            run = await run_once(server, work, block_size)
            found[str(number)] = run.figures()
            if options.client == "sglang":
                found[str(number)]["client"] = _sglang_client(options, number)
        _bench_table(found)
    return {"runs": found}


def _sglang_client(options: BenchOptions, concurrency: int) -> dict[str, Any]:
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"client_{concurrency}.jsonl"
    output.unlink(missing_ok=True)
    command = client_command(
        options.url,
        options.target,
        output,
        input_tokens=options.input_tokens,
        output_tokens=options.output_tokens,
        number=options.number,
        concurrency=concurrency,
        seed=1,
    )
    return run_client(command, output, CLIENT_SECONDS)


def _bench_table(found: dict[str, dict[str, Any]]) -> None:
    names = ("mean_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "accept_length", "step_ms")
    rows = [["concurrency", *names, "output_tokens_per_second", "peak (band)"]]
    for number, figures in found.items():
        peak = figures["peak"]
        band = "-"
        if peak:
            band = f"{peak['tokens_per_second']:.0f} ({peak['low']:.0f}-{peak['high']:.0f})"
        cells = [f"{figures[name]:.3f}" for name in names]
        rows.append([number, *cells, f"{figures['output_tokens_per_second']:.1f}", band])
    show_table(rows)


async def _gate(options: GateOptions) -> dict[str, Any]:
    if not options.second_url and not options.against:
        raise UserError(
            "against", "", "a second server", "name an address, or how it differs: against.tp=2"
        )
    tokenizer = TargetTokenizer(options.target) if options.prompts and options.target else None
    prompts = prompts_of(options, tokenizer)
    work = Workload(prompts, options.answer_tokens)
    sides: Sequence[MeasureOptions] = (
        (options, replace(second_side(options), url=options.second_url))
        if options.second_url
        else sides_of(options)
    )
    for side in sides:
        if side.url:
            # The second is asked only when the first has been measured.
            await reach(side.url)
    evidence = []
    for name, side in zip(("a", "b"), sides, strict=True):
        # One after the other: each has the GPU for itself.
        async with AsyncExitStack() as stack:
            most = max(8, *side.concurrency)
            server = await open_server(stack, replace(side, concurrency=[most]), work, name)
            evidence.append(
                await gather(
                    server,
                    prompts,
                    decode_text=tokenizer.decode if tokenizer else None,
                    stop_token_ids=eos_token_ids(options.target),
                    answer_tokens=options.answer_tokens,
                    concurrency=max(side.concurrency),
                    sampled_concurrency=most,
                )
            )
    gates = judge(*evidence, declared_rounding=options.declared_rounding)
    show_table(
        [
            [
                "passed" if g.passed else "FAILED",
                g.name,
                "binds" if g.binding else "",
                g.evidence,
            ]
            for g in gates
        ]
    )
    return gates_to_dict(gates)


async def _audit(options: MeasureOptions) -> dict[str, Any]:
    folder = Path(options.folder)
    work = workload_of(options)
    stem = None if options.url else folder / "audit"
    counters = options.counters or (str(stem.resolve()) if stem else "")
    for old in folder.glob("audit.*.json"):
        # Of an earlier audit into the same folder.
        old.unlink()
    async with AsyncExitStack() as stack:
        server = await open_server(
            stack, options, work, "audit", counters=stem.resolve() if stem else None
        )
        traces = await traced(server, work, folder / "traces")
        rows = await observe(server, target_path=options.target, counters=counters, traces=traces)
    show_table(
        [
            ["optimization", "wanted", "state", "source", "evidence", "cost when off"],
            *(
                [
                    r.name,
                    "yes" if r.wanted else "no",
                    r.state,
                    r.source,
                    r.evidence,
                    r.cost_when_off,
                ]
                for r in rows
            ),
        ]
    )
    return {"problems": sum(r.is_problem for r in rows), "rows": rows_to_dicts(rows)}


async def _census(options: CensusOptions) -> dict[str, Any]:
    step_ms = None
    if options.traces:
        traces = [read_trace(Path(name)) for name in options.traces]
    else:
        work = workload_of(options)
        async with AsyncExitStack() as stack:
            server = await open_server(stack, options, work, "census")
            run = await run_warm(server, work)
            step_ms = run.step_ms
            traces = await traced(server, work, Path(options.folder) / "traces")
    found, facts = summarize_traces(traces)
    picture = Path(options.picture or Path(options.folder) / "census.html")
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_picture(picture, found, options.profile)
    show_table(census_rows(found))
    return census_to_dict(found, facts, step_ms)
