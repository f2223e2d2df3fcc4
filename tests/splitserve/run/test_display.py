"""What the display says about who waits, and what would help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.run.display import advice, bottleneck
from splitserve.run.progress import Progress


def progress(*, wait: float, idle: float, step: int = 100) -> Progress:
    return Progress(
        num_steps=200,
        step=step,
        trainer_wait_seconds=wait,
        trainer_step_seconds=1.0 - wait,
        engine_up_seconds=1.0,
        engine_idle_seconds=idle,
    )


@pytest.mark.parametrize(
    ("wait", "idle", "needed", "unanswered", "word"),
    [
        (0.5, 0.0, True, 9, "layout.target"),
        (0.0, 0.5, True, 9, "layout.train"),
        (0.0, 0.5, False, 9, "a lower train.replay"),
        (0.0, 0.5, False, 0, "data.sampling"),
        (0.1, 0.1, True, 9, ""),
    ],
)
def test_advice_names_the_half_that_is_short(
    wait: float, idle: float, needed: bool, unanswered: int, word: str
) -> None:
    feeder: Any = SimpleNamespace(engine_is_needed=lambda: needed, count=lambda _: unanswered)
    text = advice(progress(wait=wait, idle=idle), feeder)
    assert (word in text) if word else text == ""


@pytest.mark.parametrize(
    ("step", "needed", "words"),
    [
        (100, True, "balanced"),
        (100, False, "the target has taught everything"),
        (200, False, "measured once more"),
    ],
)
def test_what_a_run_does_when_a_half_is_done_is_said(step: int, needed: bool, words: str) -> None:
    feeder: Any = SimpleNamespace(engine_is_needed=lambda: needed, count=lambda _: 1)
    assert words in bottleneck(progress(wait=0.1, idle=0.0, step=step), feeder)


def test_no_advice_before_the_run_has_found_its_pace() -> None:
    feeder: Any = SimpleNamespace(engine_is_needed=lambda: True)
    assert advice(progress(wait=0.9, idle=0.0, step=3), feeder) == ""
