"""Opening the servers that a command measures, and showing what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from serving.bench import Run, Workload, drafts_per_round, run_once
from serving.server import Server, ServerError, Turns
from serving.session import at, audited, running
from serving.workload import eos_token_ids
from splitserve.errors import UserError
from splitserve.serving_options import MeasureOptions, measuring_launch, prompts_of


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def workload_of(options: MeasureOptions, concurrency: int = 1) -> Workload:
    """What a server is asked. Raises ValueError."""
    prompts = prompts_of(options, None)
    return Workload(
        prompts,
        options.output_tokens,
        options.temperature,
        # Random tokens end by chance.
        ignore_eos=not options.prompts,
        stop_token_ids=eos_token_ids(options.target) if options.prompts else (),
        concurrency=concurrency,
    )


async def open_server(
    stack: AsyncExitStack,
    options: MeasureOptions,
    work: Workload,
    name: str,
    *,
    turns: Turns | None = None,
    counters: Path | None = None,
) -> Server:
    """The server at the address, or one started for the measurement.

    Args:
        turns: of the engines that share the GPU.

    Raises:
        ValueError, ServerError: it cannot be had.
    """
    if options.url:
        await reach(options.url)
        return await stack.enter_async_context(at(options.url))
    longest = max(len(p.token_ids) for p in work.prompts) + work.max_new_tokens
    launch = measuring_launch(options, longest=longest, beside=turns is not None)
    if counters is not None:
        launch = audited(launch, counters)
    print(f"{name}: {launch.line()}", file=sys.stderr, flush=True)
    log = Path(options.folder) / f"{name}.log"
    engine = await stack.enter_async_context(running(launch, log))
    return engine if turns is None else turns.add(engine)


async def reach(url: str) -> None:
    """See that an SGLang server answers at an address.

    Raises:
        UserError: none does.
    """
    async with at(url) as server:
        try:
            await server.info()
        except ServerError as error:
            raise UserError(
                "url",
                url,
                f"the address of an SGLang server that runs; {error}",
                "start it with splitserve serve, or leave url out to have one started",
            ) from error


async def warm_up(server: Server, work: Workload) -> int:
    """Have everything compiled; returns drafts per round."""
    block_size = await drafts_per_round(server)
    short = replace(work, max_new_tokens=min(64, work.max_new_tokens))
    await run_once(server, short, block_size)
    return block_size


async def run_warm(server: Server, work: Workload) -> Run:
    """A run of a server that is warm and not being traced."""
    return await run_once(server, work, await warm_up(server, work))
