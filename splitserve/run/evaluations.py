"""Which draft is measured next, which one is the best, and which may be deleted."""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.messages import Evaluate, SnapshotReady


@dataclass(frozen=True, slots=True)
class Best:
    """The draft with the highest accept length so far."""

    step: int
    accept_length: float
    path: str


def accept_length_of(report: dict[str, Any], domain: str = "all") -> float:
    """Accept length of the first (usual) temperature of an evaluator's report."""
    return float(report["reports"][0]["domains"][domain]["accept_length"])


class Evaluations:
    """Snapshots in the order of their steps, one with the evaluator at a time.

    Training does not wait for an evaluation. If the evaluator falls behind, the oldest waiting
    snapshot but the first is passed over and counted: a late curve is worth less than a true one.
    """

    def __init__(self, best: Best | None = None, max_waiting: int = 4) -> None:
        self.best = best
        self.skipped = 0
        self.num_since_best = 0
        """Measurements in a row that gave no better draft."""
        self._waiting: deque[SnapshotReady] = deque()
        self._running: SnapshotReady | None = None
        self._max_waiting = max_waiting

    def add(self, snapshot: SnapshotReady) -> None:
        """Queue a snapshot."""
        self._waiting.append(snapshot)
        if len(self._waiting) > self._max_waiting:
            late = self._waiting[1]
            del self._waiting[1]
            self._delete(late.path)
            self.skipped += 1

    def next_request(self) -> Evaluate | None:
        """The next snapshot to measure; None while one is being measured."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        return Evaluate(self._running.step, self._running.path, full=False)

    def final_request(self) -> Evaluate:
        """The best draft once more, at every temperature of the final report."""
        assert self.idle and self.best is not None, "the final report comes after all others"
        return Evaluate(self.best.step, self.best.path, full=True)

    def finished(self, step: int, report: dict[str, Any]) -> bool:
        """Take a report; True when this draft is the best so far."""
        running = self._running
        assert running is not None and running.step == step, f"no evaluation of step {step} runs"
        self._running = None
        accept_length = accept_length_of(report)
        if self.best is not None and accept_length <= self.best.accept_length:
            self._delete(running.path)
            self.num_since_best += 1
            return False
        self.num_since_best = 0
        if self.best is not None:
            self._delete(self.best.path)
        self.best = Best(step, accept_length, running.path)
        return True

    def evaluator_lost(self) -> None:
        """The evaluator has died: what it measured is asked for again."""
        if self._running is not None:
            self._waiting.appendleft(self._running)
            self._running = None

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self._running is None and not self._waiting

    @staticmethod
    def _delete(path: str) -> None:
        shutil.rmtree(Path(path), ignore_errors=True)
