"""What engines leave in /dev/shm is removed with them, and nothing of anybody else."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from test_server import HOST, LAUNCH

from serving.leftovers import SharedMemoryGuard, end_session
from serving.processes import descendants, members
from serving.server import EngineProcess

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")

# As SGLang's scheduler does: a block that it maps, and that nobody removes.
SCHEDULER = """
import mmap, os, sys, time
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 4096)
block = mmap.mmap(fd, 4096)
open(sys.argv[1] + ".made", "w")
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def block() -> Iterator[Path]:
    path = Path("/dev/shm") / f"sglang_loads_test_{uuid4().hex}.shm"
    yield path
    for left in (path, Path(f"{path}.made")):
        left.unlink(missing_ok=True)


def scheduler(block: Path, seconds: float = 600.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCHEDULER, str(block), str(seconds)]
    process = subprocess.Popen(command, start_new_session=True)
    made = Path(f"{block}.made")
    deadline = time.monotonic() + 30
    while not made.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    made.unlink()
    return process


def test_the_block_of_a_killed_process_goes_with_it(block: Path) -> None:
    process = scheduler(block)
    end_session(process, SharedMemoryGuard(lambda: members(process.pid)))
    assert not block.exists() and process.returncode == -9


def test_the_block_of_one_that_died_by_itself_goes_too(block: Path) -> None:
    process = scheduler(block, seconds=1.0)
    guard = SharedMemoryGuard(descendants)
    guard.note()
    process.wait()
    assert block.exists()
    assert guard.remove() == [str(block)]
    assert not block.exists()


def test_a_block_that_somebody_else_maps_stays(block: Path) -> None:
    process = scheduler(block)
    with open(block, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        end_session(process, SharedMemoryGuard(lambda: members(process.pid)))
        assert block.exists()


def test_what_was_there_before_is_not_touched(block: Path) -> None:
    other = block.with_name(f"{block.name}.other")
    other.write_bytes(b"of an engine that somebody has killed")
    try:
        process = scheduler(block)
        end_session(process, SharedMemoryGuard(lambda: members(process.pid)))
        assert other.exists() and not block.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize("dies", [False, True])
def test_a_measured_engine_takes_its_blocks_along(tmp_path: Path, block: Path, dies: bool) -> None:
    start = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SCHEDULER!r}, {str(block)!r}, "600"])
while not pathlib.Path({str(block)!r} + ".made").exists():
    time.sleep(0.02)
"""

    async def run() -> None:
        command = (sys.executable, "-c", start + HOST)
        server = await EngineProcess.start(LAUNCH, tmp_path / "log", command=command)
        assert block.exists()
        if dies:
            os.killpg(server._process.pid, 9)
            server._process.wait()
        await server.close()

    asyncio.run(run())
    assert not block.exists()
