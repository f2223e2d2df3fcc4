"""`splitserve sweep`: draft lengths, the steps-per-second table, and temperatures."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving.bench import drafts_per_round, run_once
from serving.sweep import COLLECT, Point, fit_sts, sps_table, sweep_to_dict, write_sps
from splitserve.errors import UserError
from splitserve.serving_options import MeasureOptions
from splitserve.serving_run import open_server, run_warm, show_table, warm_up, workload_of


@dataclass(frozen=True)
class SweepOptions(MeasureOptions):
    """What `splitserve sweep` takes."""

    what: str = "drafts"
    """drafts (break-even of the draft length), sps or sts (files for dspark_compact)."""
    lengths: list[int] = field(default_factory=lambda: [0, 1, 3, 5, 7])
    """Drafts per round; 0 is the target alone."""
    file: str = ""
    """Where sps or sts is written; empty is sps.json or sts.json in the folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url:
            allowed = "none: a sweep starts servers of its own"
            raise UserError("url", self.url, allowed, "leave url out")
        if not self.lengths or min(self.lengths) < 0:
            raise UserError("lengths", self.lengths, "numbers from 0", "write for example [0,3,7]")


async def sweep_drafts(options: SweepOptions) -> dict[str, Any]:
    """Measure each draft length. Raises ValueError, ServerError."""
    points = []
    work = workload_of(options)
    for number in sorted(set(options.lengths)):
        side = replace(options, block_size=number)
        if number == 0:
            side = replace(side, profile="plain", draft="", block_size=0, fold="none")
        elif options.profile == "nextn":
            steps = {"speculative_num_steps": number, "speculative_num_draft_tokens": number + 1}
            side = replace(side, block_size=0, args={**options.args, **steps})
        async with AsyncExitStack() as stack:
            server = await open_server(stack, side, work, f"drafts_{number}")
            run = await run_warm(server, work)
        points.append(Point(number, run.report.accept_length, run.step_ms))
    found = sweep_to_dict(points)
    show_table(
        [
            ["drafts", "accept length", "step ms", "TPOT ms"],
            *(
                [
                    str(p["num_drafts"]),
                    f"{p['accept_length']:.3f}",
                    f"{p['step_ms']:.3f}",
                    f"{p['tpot_ms']:.3f}",
                ]
                for p in found["points"]
            ),
        ]
    )
    for rule in found["break_even"]:
        print(rule)
    return found


async def sweep_sps(options: SweepOptions) -> dict[str, Any]:
    """Measure, write and check the table. Raises ValueError, ServerError."""
    file = Path(options.file or Path(options.folder) / "sps.json")
    step_ms = {}
    # The table is for a server in compact mode, whose steps `auto` leaves to SGLang.
    fold, kernels = ("none" if n == "auto" else n for n in (options.fold, options.kernels))
    static = replace(options, profile="dspark_static", sps="", sts="", fold=fold, kernels=kernels)
    async with AsyncExitStack() as stack:
        server = await open_server(stack, static, workload_of(options), "sps")
        block_size = 0
        for number in sorted(set(options.concurrency)):
            work = workload_of(replace(options, number=max(options.number, number)), number)
            block_size = await warm_up(server, work)
            step_ms[number] = (await run_once(server, work, block_size)).step_ms
    table = sps_table(step_ms, block_size + 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_sps(file, table)
    checked = await _check(replace(options, sps=str(file)), "sps_check")
    return {"file": str(file), "table": table, "checked": checked}


async def sweep_sts(options: SweepOptions) -> dict[str, Any]:
    """Collect, fit and check temperatures. Raises ValueError, ServerError, RuntimeError."""
    folder = Path(options.folder)
    file = Path(options.file or folder / "sts.json")
    stem = (folder / "sts" / "shard").resolve()
    stem.parent.mkdir(parents=True, exist_ok=True)
    for old in stem.parent.glob("shard.*.pt"):
        # Of an earlier draft.
        old.unlink()
    collecting = replace(
        options,
        profile="dspark_compact",
        sts="",
        env={**options.env, COLLECT: str(stem)},
    )
    work = workload_of(options)
    async with AsyncExitStack() as stack:
        server = await open_server(stack, collecting, work, "sts")
        block_size = await drafts_per_round(server)
        await run_once(server, work, block_size)
    temperatures = fit_sts(stem, file, block_size)
    checked = await _check(replace(options, sts=str(file)), "sts_check")
    return {"file": str(file), "temperatures": temperatures, "checked": checked}


async def _check(options: SweepOptions, name: str) -> dict[str, Any]:
    """A server that is started with the file reads it, and is measured with it."""
    side = replace(options, profile="dspark_compact")
    work = workload_of(side)
    async with AsyncExitStack() as stack:
        server = await open_server(stack, side, work, name)
        run = await run_warm(server, work)
    return run.figures()
