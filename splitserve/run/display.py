"""What one sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from splitserve.run.entry import State
from splitserve.run.evaluations import Best, accept_length_of
from splitserve.run.feeder import Feeder
from splitserve.run.progress import Progress

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 15.0
ADVICE_STEPS = 20
TERMS = ("ce", "l1", "confidence")
"""Loss terms shown, where the objective has them."""


def duration(seconds: float | None) -> str:
    """A duration as `m:ss`, or a dash where it is not known."""
    return "-" if seconds is None else f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def bottleneck(progress: Progress, feeder: Feeder) -> str:
    """Who waits for whom, in words."""
    if progress.step == progress.first_step and feeder.count(State.READY) == 0:
        return "starting: the trainers wait for the target's first answers"
    if progress.step >= progress.num_steps:
        return "trained: the best draft is measured once more and exported"
    wait, idle = progress.trainer_wait_fraction(), progress.engine_idle_fraction()
    if not feeder.engine_is_needed() and wait <= 0.2:
        return f"the target has taught everything (trainers wait {wait:.0%})"
    if wait > 0.2:
        return f"the trainers wait for the target ({wait:.0%} of their time)"
    if idle > 0.2:
        return f"the target waits for the trainers ({idle:.0%} of its time)"
    return f"balanced (trainers wait {wait:.0%}, target idle {idle:.0%})"


def advice(progress: Progress, feeder: Feeder) -> str:
    """Which split would serve the run better; empty while neither half waits for long."""
    if progress.step - progress.first_step < ADVICE_STEPS:
        return ""
    wait, idle = progress.trainer_wait_fraction(), progress.engine_idle_fraction()
    if wait > 0.2 and wait > idle:
        return (
            "more GPUs in layout.target, a higher train.replay or engine.max_running_requests "
            "would keep the trainers busy"
        )
    if idle > 0.2:
        if feeder.engine_is_needed():
            return "more ranks in layout.train would keep up with the target"
        if feeder.count(State.UNANSWERED):
            return "the target has taught what is trained on: a lower train.replay would use more"
        return "the target has taught everything: more samples (data.sampling) would use it"
    return ""


class Display:
    """Shows a run's progress on `console`; use as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._live: Live | None = None
        self._last = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """One line about something that happened."""
        self._console.print(Text(text), soft_wrap=True)

    def metrics(self, step: int, values: dict[str, Any], progress: Progress) -> None:
        """The log interval's means, as a line where there is no live panel."""
        if self._live is None:
            self.note(
                f"step {step}/{progress.num_steps}  {self._terms(values)}  "
                f"left {duration(progress.seconds_left())}"
            )

    def evaluated(self, step: int, report: dict[str, Any], is_best: bool) -> None:
        """An accept length has been measured."""
        domains = report["reports"][0]["domains"]
        parts = [
            f"{name} {domains[name]['accept_length']:.2f}" for name in domains if name != "all"
        ]
        best = "  (best)" if is_best else ""
        self.note(
            f"accept length at step {step}: {accept_length_of(report):.3f}{best}  "
            + "  ".join(parts)
        )

    def show(self, progress: Progress, feeder: Feeder, best: Best | None) -> None:
        """Refresh the panel, or print a plain line, when it is time to."""
        interval = REFRESH_SECONDS if self._live is not None else PLAIN_SECONDS
        if time.monotonic() - self._last < interval:
            return
        self._last = time.monotonic()
        if self._live is not None:
            self._live.update(self._panel(progress, feeder, best), refresh=True)
        else:
            self.note(
                f"[{duration(progress.elapsed_seconds)}] step {progress.step}/"
                f"{progress.num_steps}  {self._flow(feeder, progress)}  "
                f"{bottleneck(progress, feeder)}"
            )

    def _panel(self, progress: Progress, feeder: Feeder, best: Best | None) -> Panel:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold")
        rows.add_column()
        rows.add_row(
            "step",
            f"{progress.step}/{progress.num_steps}   "
            f"elapsed {duration(progress.elapsed_seconds)}   "
            f"left {duration(progress.seconds_left())}",
        )
        rows.add_row("loss", self._terms(progress.metrics))
        accept = "-" if progress.accept_length is None else f"{progress.accept_length:.3f}"
        rows.add_row(
            "accept length",
            accept + ("" if best is None else f"   best {best.accept_length:.3f} ({best.step})"),
        )
        rows.add_row("target", self._flow(feeder, progress))
        rows.add_row(
            "ring",
            f"{feeder.ring.used_bytes / 2**20:.0f} of {feeder.ring.capacity_bytes / 2**20:.0f} MiB"
            f"   evicted {feeder.counters.evicted}   retried {feeder.counters.retried}",
        )
        rows.add_row("who waits", bottleneck(progress, feeder))
        if text := advice(progress, feeder):
            rows.add_row("advice", text)
        bar = ProgressBar(total=max(1, progress.num_steps), completed=progress.step)
        return Panel(Group(rows, bar), title=self._title)

    @staticmethod
    def _terms(values: dict[str, Any]) -> str:
        if not values:
            return "-"
        parts = [f"loss {values['loss']:.4f}"]
        parts += [f"{name} {values[name]:.4f}" for name in TERMS if name in values]
        if "expected_accept_length" in values:
            parts.append(f"expected accept {values['expected_accept_length']:.2f}")
        return "  ".join(parts)

    @staticmethod
    def _flow(feeder: Feeder, progress: Progress) -> str:
        counters = feeder.counters
        dropped = sum(counters.dropped.values())
        return (
            f"answers {counters.generated}  taught {counters.taught}/{feeder.num_samples}  "
            f"dropped {dropped}  {progress.tokens_per_second():.0f} tokens/s"
        )
