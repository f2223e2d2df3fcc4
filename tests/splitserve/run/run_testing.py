"""Whole runs in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest


class Run:
    """`splitserve train` as its own process, with everything it starts in view."""

    def __init__(self, recipe: Path, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "splitserve.cli", "train", f"recipe={recipe}"]
        self.process = subprocess.Popen(
            [*command, f"run_dir={folder}", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            cwd=folder.parent,
        )

    def children(self) -> dict[str, int]:
        """Living workers of this run by role: the processes that it is the parent of.

        Trainers are numbered in the order in which they were started.
        """
        found: dict[str, int] = {}
        for process in sorted(Path("/proc").iterdir(), key=lambda p: (len(p.name), p.name)):
            if not process.name.isdigit() or _parent_of(process) != self.process.pid:
                continue
            command = _command_of(process)
            if "splitserve.worker" in command:
                role = command[command.index("splitserve.worker") + 1]
                ranks = sum(name.startswith("trainer") for name in found)
                found[f"trainer-{ranks}" if role == "trainer" else role] = int(process.name)
        return found

    def wait_for(self, text: str, file: str = "metrics.jsonl", seconds: float = 120.0) -> None:
        """Until `text` stands in a file of the run folder."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            path = self.folder / file
            if path.exists() and text in path.read_text():
                return
            if self.process.poll() is not None:
                pytest.fail(f"the run ended early:\n{self.process.stdout.read()}")
            time.sleep(0.05)
        pytest.fail(f"{text!r} did not appear in {file} within {seconds} s")

    def end(self, seconds: float = 180.0) -> tuple[int, str]:
        """Exit code and everything printed; fails when the run hangs."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"the run did not end within {seconds} s")
        return self.process.returncode, output

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def _parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def _command_of(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []
