"""The order of measurements, the choice of the best draft, and which snapshots go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitserve.messages import SnapshotReady
from splitserve.run.evaluations import Best, Evaluations, accept_length_of


def report(accept_length: float) -> dict[str, Any]:
    domains = {"all": {"accept_length": accept_length}, "math": {"accept_length": 9.0}}
    return {"full": False, "reports": [{"domains": domains}]}


@pytest.fixture
def snapshots(tmp_path: Path) -> dict[int, Path]:
    paths = {step: tmp_path / f"step_{step:06d}" for step in range(6)}
    for path in paths.values():
        path.mkdir()
        (path / "config.json").write_text("{}")
    return paths


def add(evaluations: Evaluations, snapshots: dict[int, Path], *steps: int) -> None:
    for step in steps:
        evaluations.add(SnapshotReady(step, str(snapshots[step])))


def kept(snapshots: dict[int, Path]) -> list[int]:
    return [step for step, path in snapshots.items() if path.exists()]


def measure(evaluations: Evaluations, accept_length: float) -> tuple[int, bool]:
    request = evaluations.next_request()
    assert request is not None
    return request.step, evaluations.finished(request.step, report(accept_length))


def test_one_snapshot_at_a_time_in_order(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations()
    assert evaluations.idle and evaluations.next_request() is None
    add(evaluations, snapshots, 0, 1)
    request = evaluations.next_request()
    assert request is not None
    assert (request.step, request.draft_path, request.full) == (0, str(snapshots[0]), False)
    assert evaluations.next_request() is None
    assert not evaluations.idle
    assert evaluations.finished(0, report(1.0))
    assert measure(evaluations, 1.5) == (1, True)
    assert evaluations.idle


def test_the_best_is_kept_and_the_others_are_deleted(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations()
    for step, accept_length, is_best in [(0, 1.0, True), (1, 1.5, True), (2, 1.4, False)]:
        add(evaluations, snapshots, step)
        assert measure(evaluations, accept_length) == (step, is_best)
    assert evaluations.best == Best(1, 1.5, str(snapshots[1]))
    assert kept(snapshots) == [1, 3, 4, 5]


def test_of_equals_the_first_stays_the_best(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations()
    add(evaluations, snapshots, 0, 1)
    measure(evaluations, 1.0)
    assert measure(evaluations, 1.0) == (1, False)
    assert evaluations.best is not None and evaluations.best.step == 0


def test_a_resumed_run_has_to_beat_its_earlier_best(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations(Best(1, 1.5, str(snapshots[1])))
    add(evaluations, snapshots, 2, 3)
    assert measure(evaluations, 1.4) == (2, False)
    assert measure(evaluations, 1.6) == (3, True)
    assert kept(snapshots) == [0, 3, 4, 5]


def test_a_slow_evaluator_skips_but_neither_the_first_nor_the_last(
    snapshots: dict[int, Path],
) -> None:
    evaluations = Evaluations(max_waiting=2)
    add(evaluations, snapshots, 0, 1, 2, 3, 4)
    assert evaluations.skipped == 3
    assert kept(snapshots) == [0, 4, 5]
    assert measure(evaluations, 1.0)[0] == 0
    assert measure(evaluations, 2.0)[0] == 4
    assert evaluations.idle


def test_what_a_lost_evaluator_had_in_hand_is_asked_for_again(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations()
    add(evaluations, snapshots, 0, 1)
    evaluations.next_request()
    evaluations.evaluator_lost()
    evaluations.evaluator_lost()
    assert not evaluations.idle
    assert [measure(evaluations, 1.0 + k)[0] for k in range(2)] == [0, 1]


def test_the_final_report_is_on_the_best(snapshots: dict[int, Path]) -> None:
    evaluations = Evaluations()
    add(evaluations, snapshots, 0, 1)
    measure(evaluations, 2.0)
    measure(evaluations, 1.0)
    request = evaluations.final_request()
    assert (request.step, request.draft_path, request.full) == (0, str(snapshots[0]), True)


def test_the_usual_temperature_is_the_one_that_counts() -> None:
    both = report(1.5)
    both["reports"].append(report(9.0)["reports"][0])
    assert accept_length_of(both) == 1.5
    assert accept_length_of(both, "math") == 9.0
