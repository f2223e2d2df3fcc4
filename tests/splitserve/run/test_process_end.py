"""What a killed worker leaves behind: nothing, the semaphores of its children included."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving.processes import members
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


BLOCK = """
import mmap, os, pathlib, sys, time
fd = os.open(sys.argv[2], os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 4096)
block = mmap.mmap(fd, 4096)
pathlib.Path(sys.argv[1]).write_text("made")
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
@pytest.mark.parametrize("seconds", [600.0, 3.0])
def test_blocks_of_a_worker_are_removed_however_it_ends(tmp_path: Path, seconds: float) -> None:
    told = tmp_path / "made"
    block = Path("/dev/shm") / f"sglang_loads_test_{tmp_path.parent.name}_{seconds:g}.shm"
    command = [sys.executable, "-c", BLOCK, str(told), str(block), str(seconds)]
    child = Killable(command, tmp_path / "log")
    try:
        # As everybody does who has a worker: ask it again and again.
        deadline = time.monotonic() + 30
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        child._memory._noted = 0.0
        child.receive()
        if seconds < 60:
            child._process.wait()
        assert block.exists()
        child.close()
        assert not block.exists()
    finally:
        block.unlink(missing_ok=True)
