"""Who waited for whom, and for how long."""

from __future__ import annotations

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
    assert progress.trainer_wait_fraction() == 0.25


def test_idling_counts_by_the_share_of_engines() -> None:
    progress = Progress(num_steps=10)
    began = progress._last_tick
    for busy, up in ((1.0, True), (0.5, True), (0.0, True), (0.0, False)):
        progress._last_tick -= 2.0
        progress.tick(busy_share=busy, engine_up=up)
    assert progress._last_tick >= began
    assert 5.9 < progress.engine_up_seconds < 6.5
    assert 2.9 < progress.engine_idle_seconds < 3.5
