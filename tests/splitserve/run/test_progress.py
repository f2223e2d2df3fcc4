"""Who waited for whom, and for how long."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from splitserve.messages import StepDone, TrainerReady
from splitserve.run.progress import Progress


def done(step: int, wait: float, rank: int = 0) -> StepDone:
    return StepDone(rank, step, wait, 1.0)


def test_the_wait_for_the_first_batch_is_the_start_s() -> None:
    progress = Progress(num_steps=10)
    progress.trainer_ready(TrainerReady(0, 4, 100))
    for message in (done(4, 60.0), done(5, 0.5), done(5, 9.0, rank=1), done(6, 0.5)):
        progress.step_done(message)
    assert progress.step == 7
    assert progress.start_wait_seconds == 60.0
    assert progress.trainer_wait_seconds == 1.0
    # A pace begins where the first step has ended: that one compiles.
    assert progress.trainer_wait_fraction() == pytest.approx(1 / 3, abs=1e-3)


def test_the_pace_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch's minutes, an earlier run's steps and old answers are not in it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    run = Progress(num_steps=1000)
    run.trainer_ready(TrainerReady(0, 500, 100))
    step = 500
    for second in range(1, 301):
        clock.now += 1.0
        # A step every second, half of it a wait; before that two minutes without any.
        if second > 120:
            run.step_done(StepDone(0, step, 0.5, 0.5))
            step += 1
        run.tick(busy_share=0.0 if second > 200 else 1.0, engine_up=True)
        run.count(answers=3 * second, tokens=100 * second)
    rates = run.rates(global_batch_size=8)
    assert rates["samples_per_second"] == pytest.approx(8.0, rel=0.05)
    assert rates["answers_per_second"] == pytest.approx(3.0, rel=0.05)
    assert rates["target_tokens_per_second"] == pytest.approx(100.0, rel=0.05)
    assert rates["engine_idle_fraction"] == pytest.approx(1.0)
    assert rates["trainer_wait_fraction"] == pytest.approx(0.5)
    assert run.engine_idle_seconds == pytest.approx(100.0)
    assert len(run._target) < 100 and len(run._trainers) < 100


@pytest.mark.parametrize("seconds", [7.0, 31.0, 45.0, 59.0, 100.0])
def test_the_pace_is_that_of_whole_steps(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    run = Progress(num_steps=1000)
    run.trainer_ready(TrainerReady(0, 0, 100))
    for step in range(40):
        for _ in range(100):
            clock.now += seconds / 100
            run.tick(busy_share=1.0, engine_up=True)
            run.count(answers=0, tokens=0)
        run.step_done(StepDone(0, step, 0.0, seconds))
    assert run.rates(global_batch_size=8)["samples_per_second"] == pytest.approx(8 / seconds)


def test_a_wait_counts_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty seconds of waiting and ten of work: never said to be balanced."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    run = Progress(num_steps=1000)
    run.trainer_ready(TrainerReady(0, 0, 100))
    for step in range(6):
        for _ in range(90):
            clock.now += 1.0
            run.tick(busy_share=1.0, engine_up=True)
            run.count(answers=0, tokens=0)
            if step > 2:
                assert run.trainer_wait_fraction() > 0.6
        run.step_done(StepDone(0, step, 80.0, 10.0))


def test_idling_counts_by_the_share_of_engines() -> None:
    progress = Progress(num_steps=10)
    began = progress._last_tick
    for busy, up in ((1.0, True), (0.5, True), (0.0, True), (0.0, False)):
        progress._last_tick -= 2.0
        progress.tick(busy_share=busy, engine_up=up)
    assert progress._last_tick >= began
    assert 5.9 < progress.engine_up_seconds < 6.5
    assert 2.9 < progress.engine_idle_seconds < 3.5
