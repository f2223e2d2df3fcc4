"""What a killed worker leaves behind: nothing, the semaphores of its children included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splitserve.engine.processes import members
from splitserve.run.process import ChildProcess

WORKER = """
import multiprocessing, pathlib, sys, time
context = multiprocessing.get_context("spawn")
lock = context.Lock()
pathlib.Path(sys.argv[1]).write_text(lock._semlock.name.removeprefix("/"))
time.sleep(600)
"""


class Killable(ChildProcess):
    """A `ChildProcess` around a command of the test's own."""

    def __init__(self, command: list[str], log: Path) -> None:
        super().__init__("engine", "engine", None, log, {})
        os.killpg(self._process.pid, 9)
        self._process.wait()
        self._process = subprocess.Popen(command, start_new_session=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_semaphores_of_a_killed_worker_are_unlinked(tmp_path: Path) -> None:
    told = tmp_path / "name"
    child = Killable([sys.executable, "-c", WORKER, str(told)], tmp_path / "log")
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    semaphore = Path("/dev/shm") / f"sem.{told.read_text()}"
    assert semaphore.exists()
    child.close()
    assert not semaphore.exists()
    assert not members(child.pid)
