"""What the display says about who waits, and what would help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.run.display import advice
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
    ("wait", "idle", "needed", "word"),
    [
        (0.5, 0.0, True, "layout.target"),
        (0.0, 0.5, True, "layout.train"),
        (0.0, 0.5, False, "data.sampling"),
        (0.1, 0.1, True, ""),
    ],
)
def test_advice_names_the_half_that_is_short(
    wait: float, idle: float, needed: bool, word: str
) -> None:
    feeder: Any = SimpleNamespace(engine_is_needed=lambda: needed)
    text = advice(progress(wait=wait, idle=idle), feeder)
    assert (word in text) if word else text == ""


def test_no_advice_before_the_run_has_found_its_pace() -> None:
    feeder: Any = SimpleNamespace(engine_is_needed=lambda: True)
    assert advice(progress(wait=0.9, idle=0.0, step=3), feeder) == ""
