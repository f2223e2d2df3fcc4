"""Where metrics go besides the run folder. No tracker can stop a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from splitserve.errors import UserError
from splitserve.settings import TrackerSettings

WANDB_INIT_SECONDS = 20
WANDB_FINISH_SECONDS = 60


class Tracker(Protocol):
    """Takes numbers by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""

    def finish(self) -> None:
        """Flush and let go."""


class NoTracker:
    """Keeps nothing: the run folder has it all."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Drop the values."""

    def finish(self) -> None:
        """Nothing to do."""


class SafeTracker:
    """Passes values on until the first error, warns once, and is silent from then on.

    Args:
        start: makes the tracker proper; its errors are caught as well.
    """

    def __init__(self, kind: str, start: Callable[[], Tracker]) -> None:
        self._kind = kind
        self._tracker: Tracker | None = None
        self._guard(lambda: setattr(self, "_tracker", start()))

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._tracker = None
            warnings.warn(
                f"tracker={self._kind} is off from here on ({type(error).__name__}: {error}); "
                "the run goes on and its folder has every metric",
                stacklevel=3,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step."""
        if (tracker := self._tracker) is not None:
            self._guard(lambda: tracker.log(step, values))

    def finish(self) -> None:
        """Flush and let go."""
        if (tracker := self._tracker) is not None:
            self._guard(tracker.finish)


class _Wandb:
    def __init__(self, settings: TrackerSettings, folder: Path, name: str) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_entry()
        mode: Any = settings.mode
        if mode == "auto":
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        if mode == "online" and not has_key:
            # wandb would ask for a key here, and a run must not wait for an answer.
            raise ValueError(
                "no wandb account is set up: run wandb login, or use tracker.mode=offline"
            )
        self._run = wandb.init(
            project=settings.project,
            name=name,
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(
                init_timeout=WANDB_INIT_SECONDS,
                finish_timeout=WANDB_FINISH_SECONDS,
                silent=True,
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # wandb drops values whose step lies behind the last one; evaluations come late.
        self._run.log({**values, "step": step})

    def finish(self) -> None:
        self._run.finish()


def _has_netrc_entry() -> bool:
    netrc = Path.home() / ".netrc"
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="replace")


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


def make_tracker(settings: TrackerSettings, folder: Path, name: str) -> Tracker:
    """The tracker that the settings name; its package is imported only now.

    Raises:
        UserError: the package is not installed.
    """
    if settings.kind == "none":
        return NoTracker()
    from importlib.util import find_spec

    if find_spec(settings.kind) is None:
        raise UserError(
            "tracker",
            settings.kind,
            "an installed tracker",
            f'pip install "splitserve-trainer[{settings.kind}]", or choose tracker=none',
        )
    if settings.kind == "wandb":
        return SafeTracker("wandb", lambda: _Wandb(settings, folder, name))
    return SafeTracker("tensorboard", lambda: _TensorBoard(folder))
