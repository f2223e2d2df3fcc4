"""Trackers keep numbers, and none of them can stop a run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

from splitserve.errors import UserError
from splitserve.settings import TrackerSettings
from splitserve.trackers import NoTracker, SafeTracker, make_tracker


class Broken:
    """Fails on the second value."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.finished = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step > 0:
            raise ConnectionError("no route")

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def without_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb as on a machine where nobody has logged in."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_none_takes_everything_and_keeps_nothing(tmp_path: Path) -> None:
    tracker = make_tracker(TrackerSettings(), tmp_path, "run")
    assert isinstance(tracker, NoTracker)
    tracker.log(0, {"loss": 1.0})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_wandb_works_offline_without_an_account(tmp_path: Path, without_account: None) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tracker=")
        tracker = make_tracker(TrackerSettings(kind="wandb"), folder, "run")
        tracker.log(0, {"loss": 2.0})
        # Evaluations report a step that training has left behind.
        tracker.log(10, {"loss": 1.0})
        tracker.log(0, {"accept_length": 1.0})
        tracker.finish()
    files = list(folder.rglob("*.wandb"))
    assert len(files) == 1
    assert "offline" in str(files[0])
    # wandb's own process closes the file shortly after `finish` has returned.
    deadline = time.monotonic() + 20.0
    while b"accept_length" not in files[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"accept_length" in files[0].read_bytes()


def test_wandb_never_asks_for_an_account(
    tmp_path: Path, without_account: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", lambda **kwargs: pytest.fail("wandb would ask for a key"))
    with pytest.warns(UserWarning, match=r"tracker=wandb is off.*tracker\.mode=offline"):
        tracker = make_tracker(TrackerSettings(kind="wandb", mode="online"), tmp_path, "run")
    tracker.log(0, {"loss": 1.0})
    tracker.finish()


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tracker=")
        tracker = make_tracker(TrackerSettings(kind="tensorboard"), tmp_path, "run")
        tracker.log(10, {"loss": 1.5})
        tracker.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(10, 1.5)]


def test_a_tracker_that_fails_warns_once_and_is_off() -> None:
    broken = Broken()
    tracker = SafeTracker("wandb", lambda: broken)
    tracker.log(0, {"loss": 1.0})
    with pytest.warns(UserWarning, match=r"tracker=wandb is off.*no route") as caught:
        tracker.log(1, {"loss": 1.0})
        tracker.log(2, {"loss": 1.0})
        tracker.finish()
    assert len(caught) == 1
    assert broken.steps == [0, 1]
    assert not broken.finished


def test_a_tracker_that_cannot_start_warns_once_and_is_off() -> None:
    def start() -> Broken:
        raise TimeoutError("no server")

    with pytest.warns(UserWarning, match="no server") as caught:
        tracker = SafeTracker("wandb", start)
        tracker.log(0, {"loss": 1.0})
        tracker.finish()
    assert len(caught) == 1


def test_a_tracker_that_fails_at_the_end_does_not_raise() -> None:
    class BadEnd(Broken):
        def finish(self) -> None:
            raise OSError("disk full")

    tracker = SafeTracker("tensorboard", BadEnd)
    with pytest.warns(UserWarning, match="disk full"):
        tracker.finish()


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"splitserve-trainer\[{kind}\]") as caught:
        make_tracker(TrackerSettings(kind=kind), tmp_path, "run")
    assert caught.value.field == "tracker"


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UserError, match="none, wandb, tensorboard"):
        TrackerSettings(kind="mlflow")
