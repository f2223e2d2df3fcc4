"""Counters and clocks of a run: what the display shows and the report sums up."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from splitserve.messages import StepDone, TrainerReady

RECENT_STEPS = 20
WINDOW_SECONDS = 60.0
"""What is said of a run's pace holds for about that long: its start is not its pace."""
MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Target:
    """What the target had done at a moment. Times in seconds."""

    at: float
    up: float = 0.0
    idle: float = 0.0
    answers: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Trainers:
    """What the trainers had done when a step ended. Times in seconds."""

    at: float
    step: int = 0
    wait: float = 0.0
    work: float = 0.0


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
    answers: int = 0
    tokens: int = 0
    """Generated and taught by the target."""
    _last_tick: float = field(default_factory=time.monotonic)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _target: deque[_Target] = field(default_factory=deque)
    """The last `WINDOW_SECONDS` and one more, the oldest first."""
    _trainers: deque[_Trainers] = field(default_factory=deque)
    """The same, after each step: a pace is that of whole steps, however long they are."""

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
        # Steps of an earlier run are not this one's pace.
        self._target.clear()
        self._trainers.clear()

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
            now = _Trainers(
                time.monotonic(), self.step, self.trainer_wait_seconds, self.trainer_step_seconds
            )
            self._trainers.append(now)
            while len(self._trainers) > 2 and now.at - self._trainers[1].at >= WINDOW_SECONDS:
                self._trainers.popleft()

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before the first."""
        if not self._recent:
            return None
        return (self.num_steps - self.step) * sum(self._recent) / len(self._recent)

    def count(self, *, answers: int, tokens: int) -> None:
        """Take the target's counters, and remember them for the pace."""
        self.answers, self.tokens = answers, tokens
        now = self._target_now()
        if self._target and now.at - self._target[-1].at < MARK_SECONDS:
            return
        self._target.append(now)
        while len(self._target) > 1 and now.at - self._target[1].at >= WINDOW_SECONDS:
            self._target.popleft()

    def trainer_wait_fraction(self) -> float:
        """Share of the trainers' time that was spent waiting for data, but for the first batch.

        What the present step takes beyond the work of the last one counts as a wait, too.
        """
        old = self._trainers[0] if self._trainers else _Trainers(self.started)
        wait, work = self.trainer_wait_seconds - old.wait, self.trainer_step_seconds - old.work
        if len(self._trainers) > 1:
            before, last = self._trainers[-2], self._trainers[-1]
            wait += max(0.0, time.monotonic() - last.at - (last.work - before.work))
        return wait / (wait + work) if wait + work else 0.0

    def engine_idle_fraction(self) -> float:
        """Share of the engine's time, from ready to released, without any request."""
        old, new = self._target_window()
        return (new.idle - old.idle) / (new.up - old.up) if new.up > old.up else 0.0

    def rates(self, global_batch_size: int) -> dict[str, float]:
        """The pace, for the metrics file."""
        old, new = self._target_window()
        seconds = max(1e-9, new.at - old.at)
        return {
            "elapsed_seconds": self.elapsed_seconds,
            "trainer_wait_fraction": self.trainer_wait_fraction(),
            "engine_idle_fraction": self.engine_idle_fraction(),
            "samples_per_second": global_batch_size * self._steps_per_second(),
            "target_tokens_per_second": (new.tokens - old.tokens) / seconds,
            "answers_per_second": (new.answers - old.answers) / seconds,
        }

    def tokens_per_second(self) -> float:
        """The target's."""
        old, new = self._target_window()
        return (new.tokens - old.tokens) / max(1e-9, new.at - old.at)

    def _steps_per_second(self) -> float:
        if len(self._trainers) < 2:
            return 0.0
        first, last = self._trainers[0], self._trainers[-1]
        return (last.step - first.step) / max(1e-9, last.at - first.at)

    def _target_window(self) -> tuple[_Target, _Target]:
        old = self._target[0] if self._target else _Target(self.started)
        return old, self._target_now()

    def _target_now(self) -> _Target:
        return _Target(
            time.monotonic(),
            self.engine_up_seconds,
            self.engine_idle_seconds,
            self.answers,
            self.tokens,
        )

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
