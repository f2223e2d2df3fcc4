"""Counters and clocks of a run: what the display shows and the report sums up."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from splitserve.messages import StepDone, TrainerReady

RECENT_STEPS = 20


@dataclass
class Progress:
    """Where the run is and who waits for whom. Times in seconds."""

    num_steps: int
    step: int = 0
    """Optimizer steps finished by every rank."""
    first_step: int = 0
    num_parameters: int = 0
    accept_length: float | None = None
    """The last one measured."""
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    started: float = field(default_factory=time.monotonic)
    engine_up_seconds: float = 0.0
    engine_idle_seconds: float = 0.0
    start_wait_seconds: float = 0.0
    """Until the first batch was there."""
    trainer_wait_seconds: float = 0.0
    """For all batches but the first."""
    trainer_step_seconds: float = 0.0
    _ready_at: float | None = None
    _last_tick: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def tick(self, *, busy_share: float, engine_up: bool) -> None:
        """Account for the time since the last call; `busy_share` of the engines had work."""
        now = time.monotonic()
        if engine_up:
            self.engine_up_seconds += now - self._last_tick
            self.engine_idle_seconds += (1.0 - busy_share) * (now - self._last_tick)
        self._last_tick = now

    def trainer_ready(self, message: TrainerReady) -> None:
        """A rank is about to ask for its first batch."""
        self.first_step = self.step = message.next_step
        self.num_parameters = message.num_parameters
        self._ready_at = time.monotonic()

    def step_done(self, message: StepDone) -> None:
        """Take rank 0's word for the pace; the ranks move together."""
        if message.rank == 0:
            self.step = message.step + 1
            if message.step == self.first_step:
                # The target starts and answers its first prompts meanwhile.
                self.start_wait_seconds = message.wait_seconds
            else:
                self.trainer_wait_seconds += message.wait_seconds
            self.trainer_step_seconds += message.step_seconds
            self._recent.append(message.wait_seconds + message.step_seconds)

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before the first."""
        if not self._recent:
            return None
        return (self.num_steps - self.step) * sum(self._recent) / len(self._recent)

    def training_seconds(self) -> float:
        """Since the trainers were ready."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def trainer_wait_fraction(self) -> float:
        """Share of the trainers' time since the first batch that was spent waiting for data."""
        total = self.trainer_wait_seconds + self.trainer_step_seconds
        return self.trainer_wait_seconds / total if total else 0.0

    def engine_idle_fraction(self) -> float:
        """Share of the engine's time, from ready to released, without any request."""
        return self.engine_idle_seconds / self.engine_up_seconds if self.engine_up_seconds else 0.0

    def rates(self) -> dict[str, float]:
        """For the metrics file."""
        return {
            "elapsed_seconds": self.elapsed_seconds,
            "trainer_wait_fraction": self.trainer_wait_fraction(),
            "engine_idle_fraction": self.engine_idle_fraction(),
        }

    def seconds(self) -> dict[str, float]:
        """For the report."""
        return {
            "total_seconds": self.elapsed_seconds,
            "trainer_step_seconds": self.trainer_step_seconds,
            "start_wait_seconds": self.start_wait_seconds,
            "trainer_wait_seconds": self.trainer_wait_seconds,
            "engine_up_seconds": self.engine_up_seconds,
            "engine_idle_seconds": self.engine_idle_seconds,
        }
