"""How many drafts a round should have, and what SGLang needs to decide that by itself.

Break-even: more drafts pay only if the accept length grows by a larger share than the step. The
steps-per-second (SPS) table tells SGLang's compact mode what a step of so many tokens costs, the
temperatures (STS) make its confidences true.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

STS_MODULE = "sglang.benchmark.dspark_sts_fit"
COLLECT = "SGLANG_DSPARK_STS_COLLECT_PATH"
STS_FLUSH_STEPS = 256
"""Steps that SGLang holds back before it writes; source: dspark_observability.py:725."""


@dataclass(frozen=True, slots=True)
class Point:
    """One draft length, measured."""

    num_drafts: int
    """0 is the target alone."""
    accept_length: float
    step_ms: float

    @property
    def tpot_ms(self) -> float:
        """Milliseconds a token."""
        return self.step_ms / self.accept_length


@dataclass(frozen=True, slots=True)
class Growth:
    """From one draft length to the next longer one."""

    start: Point
    end: Point

    @property
    def accept_growth(self) -> float:
        """Share by which the accept length grows."""
        return self.end.accept_length / self.start.accept_length - 1

    @property
    def step_growth(self) -> float:
        """Share by which the step grows."""
        return self.end.step_ms / self.start.step_ms - 1

    @property
    def pays(self) -> bool:
        """Whether a token gets cheaper."""
        return self.accept_growth > self.step_growth

    def rule(self) -> str:
        """The rule with its figures."""
        sign = ">" if self.pays else "<="
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"{self.start.num_drafts} -> {self.end.num_drafts} drafts: accept "
            f"{100 * self.accept_growth:+.1f} % {sign} step {100 * self.step_growth:+.1f} %: "
            f"{verdict}"
        )


def growths(points: Sequence[Point]) -> list[Growth]:
    """Each draft length against the next longer one."""
    ordered = sorted(points, key=lambda p: p.num_drafts)
    return [Growth(a, b) for a, b in pairwise(ordered)]


def best_point(points: Sequence[Point]) -> Point:
    """The draft length with the cheapest token."""
    return min(points, key=lambda p: p.tpot_ms)


def sweep_to_dict(points: Sequence[Point]) -> dict[str, Any]:
    """Ready for JSON."""
    ordered = sorted(points, key=lambda p: p.num_drafts)
    return {
        "points": [
            {
                "num_drafts": p.num_drafts,
                "accept_length": p.accept_length,
                "step_ms": p.step_ms,
                "tpot_ms": p.tpot_ms,
            }
            for p in ordered
        ],
        "break_even": [g.rule() for g in growths(points)],
        "best_num_drafts": best_point(points).num_drafts,
    }


def sps_table(step_ms: dict[int, float], verify_window: int) -> dict[str, Any]:
    """SGLang's flat table from step times by number of requests.

    Args:
        step_ms: milliseconds of a static step by running requests.
        verify_window: tokens that a static step verifies per request, the anchor among them.

    Raises:
        ValueError: fewer than two sizes: SGLang takes such a table for none at all.
    """
    if len(step_ms) < 2 or min(step_ms.values()) <= 0.0:
        raise ValueError(
            f"concurrency={sorted(step_ms)} is not usable for a steps-per-second table; allowed: "
            "two or more sizes with steps that took time; name more"
        )
    sizes = sorted(step_ms)
    return {
        "sample_batch_tokens": [n * verify_window for n in sizes],
        "sample_steps_per_sec": [1e3 / step_ms[n] for n in sizes],
        "max_batch_tokens": sizes[-1] * verify_window,
    }


def write_sps(path: Path, table: dict[str, Any]) -> None:
    """Write it as `--speculative-dspark-sps-table-path` takes it."""
    path.write_text(json.dumps(table) + "\n")


def fit_sts(stem: Path, out: Path, num_drafts: int) -> list[float]:
    """Temperatures from what a server has collected, by SGLang's own fit.

    Args:
        stem: value of SGLANG_DSPARK_STS_COLLECT_PATH.
        out: file for `--speculative-dspark-confidence-sts-path`.
        num_drafts: drafts per round that it will be used with.

    Raises:
        ValueError: nothing was collected.
        RuntimeError: the fit failed.
    """
    shards = sorted(stem.parent.glob(f"{stem.name}.*.pt"))
    if not shards:
        raise ValueError(
            f"{COLLECT}={str(stem)!r} has no shards; allowed: at least {STS_FLUSH_STEPS} decode "
            "steps of dspark_compact; send more requests"
        )
    command = [sys.executable, "-m", STS_MODULE, "--data-glob", f"{stem}.*.pt", "--out", str(out)]
    result = subprocess.run(
        [*command, "--gamma", str(num_drafts)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"SGLang's fit of temperatures failed: {result.stderr.strip()[-600:]}")
    found: list[float] = json.loads(out.read_text())["temperatures"]
    return found
