"""How fast a server decodes, and whether one setting is faster than another.

The figure that decides is the step time: mean TPOT x mean accept length. TPOT alone mixes how long
a step takes with how much it accepts, which random weights, other prompts or another rounding of
the same model change by chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.report import AcceptReport
from serving.measure import Answer, Ask, answer_all, summarize
from serving.server import Server
from serving.workload import Prompt, asks

WINDOW_SECONDS = 1.0
PHASES = 8


@dataclass(frozen=True, slots=True)
class Peak:
    """Most output tokens of any window of fixed length, by the windows' phase."""

    tokens_per_second: float
    """Median over the phases."""
    low: float
    high: float
    """The band: least and most over the phases; chance alone moves a peak within it."""
    window_seconds: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked in a run."""

    prompts: Sequence[Prompt]
    max_new_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    concurrency: int = 1

    def asks(self) -> list[Ask]:
        """One request a prompt."""
        return asks(
            self.prompts,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload."""

    report: AcceptReport
    peak: Peak | None
    """None where the run was shorter than two windows."""

    @property
    def step_ms(self) -> float:
        """Mean TPOT x mean accept length."""
        return self.report.timings["mean_tpot_ms"] * self.report.accept_length

    def figures(self) -> dict[str, Any]:
        """Flat, for a table or a record."""
        counts = self.report.total
        return {
            **self.report.timings,
            "accept_length": self.report.accept_length,
            "step_ms": self.step_ms,
            "num_requests": counts.num_requests,
            "num_rounds": counts.num_rounds,
            "peak": asdict(self.peak) if self.peak else None,
        }


async def drafts_per_round(server: Server) -> int:
    """From the running server's own arguments; 0 where it decodes alone."""
    info = await server.info()
    if not info.get("speculative_algorithm"):
        return 0
    return int(info.get("speculative_num_draft_tokens") or 1) - 1


async def run_once(server: Server, workload: Workload, block_size: int) -> Run:
    """One pass, counted from each request's own counters.

    Raises:
        ValueError: a request was given up, or its counts contradict each other.
    """
    answers, wall = await answer_all(server.ask, workload.asks(), workload.concurrency)
    settings = {
        "temperature": workload.temperature,
        "max_new_tokens": workload.max_new_tokens,
        "concurrency": workload.concurrency,
        "ignore_eos": workload.ignore_eos,
        "decoder": "served",
    }
    domains = [p.domain for p in workload.prompts]
    report = summarize(domains, answers, wall, block_size, settings)
    return Run(report, peak_of(answers))


def peak_of(
    answers: Sequence[Answer], window_seconds: float = WINDOW_SECONDS, phases: int = PHASES
) -> Peak | None:
    """The busiest window of decoding, for several phases of the windows.

    First tokens belong to prefills and are left out. None where the arrivals span less than two
    windows.
    """
    events = sorted(
        (when, count - before)
        for answer in answers
        for (_, before), (when, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    )
    if not events or events[-1][0] - events[0][0] < 2 * window_seconds:
        return None
    begin, end = events[0][0], events[-1][0]
    found = []
    for phase in range(phases):
        origin = begin + phase * window_seconds / phases
        bins: dict[int, int] = {}
        for when, tokens in events:
            index = int((when - origin) // window_seconds)
            # Only windows that lie whole within the run.
            if index >= 0 and origin + (index + 1) * window_seconds <= end:
                bins[index] = bins.get(index, 0) + tokens
        if bins:
            found.append(max(bins.values()) / window_seconds)
    return Peak(statistics.median(found), min(found), max(found), window_seconds)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two settings, measured in turn."""

    names: tuple[str, str]
    runs: tuple[list[Run], list[Run]]

    @property
    def step_ms(self) -> tuple[float, float]:
        """Mean step time of each."""
        first, second = ([run.step_ms for run in runs] for runs in self.runs)
        return statistics.fmean(first), statistics.fmean(second)

    @property
    def spread_ms(self) -> float:
        """What runs of one and the same setting differ by: the larger of the two ranges."""
        ranges = [max(r.step_ms for r in runs) - min(r.step_ms for r in runs) for runs in self.runs]
        return max(ranges)

    @property
    def verdict(self) -> str:
        """Which is faster, or that the difference is within the spread."""
        first, second = self.step_ms
        if abs(first - second) <= self.spread_ms:
            return "no difference beyond the spread"
        faster, slower = (0, 1) if first < second else (1, 0)
        ratio = self.step_ms[slower] / self.step_ms[faster]
        return f"{self.names[faster]} is {ratio:.3f} x faster than {self.names[slower]}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        sides = {
            name: [run.figures() for run in runs]
            for name, runs in zip(self.names, self.runs, strict=True)
        }
        return {
            "step_ms": dict(zip(self.names, self.step_ms, strict=True)),
            "spread_ms": self.spread_ms,
            "verdict": self.verdict,
            "runs": sides,
        }


async def compare(
    servers: tuple[Server, Server],
    names: tuple[str, str],
    workload: Workload,
    *,
    rounds: int = 3,
    warm_up: int = 1,
) -> Comparison:
    """Measure two servers in turn, first one and then the other first.

    Both run all the time, so both should have a GPU's memory to themselves but not its time: never
    more than one of them is asked at once.

    Raises:
        ValueError: fewer than two rounds, which give no spread.
    """
    if rounds < 2:
        raise ValueError(
            f"rounds={rounds} is not usable; allowed: 2 or more, a spread needs them; raise it"
        )
    blocks = [await drafts_per_round(server) for server in servers]
    for _ in range(warm_up):
        for server, block in zip(servers, blocks, strict=True):
            await run_once(server, workload, block)
    runs: tuple[list[Run], list[Run]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            runs[side].append(await run_once(servers[side], workload, blocks[side]))
    return Comparison(names, runs)
