"""What engines leave in /dev/shm is removed with them, and nothing of anybody else."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from multiprocessing.managers import SharedMemoryManager
from pathlib import Path
from uuid import uuid4

import pytest
from test_server import HOST, LAUNCH

from serving import leftovers
from serving.leftovers import SharedMemoryGuard, end_session
from serving.processes import descendants, members
from serving.server import EngineProcess

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")

# As SGLang's scheduler does: blocks that it maps, and that nobody removes.
SCHEDULER = """
import mmap, os, sys, time
blocks = []
for path in (sys.argv[1], *sys.argv[3:]):
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    blocks.append(mmap.mmap(fd, 4096))
open(sys.argv[1] + ".made", "w")
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def block() -> Iterator[Path]:
    path = Path("/dev/shm") / f"sglang_loads_test_{uuid4().hex}.shm"
    yield path
    for left in (path, Path(f"{path}.made")):
        left.unlink(missing_ok=True)


def scheduler(block: Path, *others: Path, seconds: float = 600.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SCHEDULER, str(block), str(seconds), *map(str, others)]
    process = subprocess.Popen(command, start_new_session=True)
    made = Path(f"{block}.made")
    deadline = time.monotonic() + 30
    while not made.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    made.unlink()
    return process


def test_the_block_of_a_killed_process_goes_with_it(block: Path) -> None:
    guard = SharedMemoryGuard(lambda: members(process.pid))
    process = scheduler(block)
    end_session(process, guard)
    assert not block.exists() and process.returncode == -9


def test_the_block_of_one_that_died_by_itself_goes_too(block: Path) -> None:
    guard = SharedMemoryGuard(descendants)
    process = scheduler(block, seconds=1.0)
    guard.note()
    process.wait()
    assert block.exists()
    assert guard.remove() == [str(block)]
    assert not block.exists()


def test_a_block_that_somebody_else_maps_stays(block: Path) -> None:
    guard = SharedMemoryGuard(lambda: members(process.pid))
    process = scheduler(block)
    with open(block, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        end_session(process, guard)
        assert block.exists()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604])
def test_a_block_that_another_user_may_map_stays(
    block: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = SharedMemoryGuard(descendants)
    process = scheduler(block, seconds=1.0)
    guard.note()
    process.wait()
    block.chmod(mode)
    read, me = leftovers._maps, os.getpid()

    def maps(pid: int) -> set[str]:
        if pid == me:
            raise PermissionError(pid)
        return read(pid)

    monkeypatch.setattr(leftovers, "_maps", maps)
    monkeypatch.setattr(leftovers, "_is_others", lambda pid: pid == me)
    assert guard.remove() == [str(block)] * (mode == 0o600)
    assert block.exists() == (mode != 0o600)


def test_what_was_there_before_is_not_touched(block: Path) -> None:
    other = block.with_name(f"{block.name}.other")
    other.write_bytes(b"of an engine that somebody has killed")
    try:
        guard = SharedMemoryGuard(lambda: members(process.pid))
        process = scheduler(block)
        end_session(process, guard)
        assert other.exists() and not block.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize("which", ["there before", "in a folder", "of another name"])
def test_a_file_of_the_users_that_a_worker_maps_stays(block: Path, which: str) -> None:
    folder = block.with_suffix(".model")
    folder.mkdir()
    theirs = {
        "there before": block.with_name(f"sglang_loads_before_{block.name}"),
        "in a folder": folder / block.name,
        "of another name": block.with_name(f"{block.stem}.safetensors"),
    }[which]
    try:
        if which == "there before":
            theirs.touch()
        guard = SharedMemoryGuard(lambda: members(process.pid))
        process = scheduler(block, theirs)
        end_session(process, guard)
        assert theirs.exists() and not block.exists()
    finally:
        theirs.unlink(missing_ok=True)
        folder.rmdir()


def test_what_libraries_name_is_known() -> None:
    """The names that this Python and this torch give, and some of SGLang's and NCCL's."""
    with SharedMemoryManager() as manager:
        blocks = [manager.SharedMemory(8).name]
    lock = multiprocessing.get_context("spawn").Lock()
    blocks.append(f"sem.{lock._semlock.name.removeprefix('/')}")
    code = "import torch; print(torch.zeros(8).untyped_storage()._share_filename_cpu_())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    blocks.append(literal_eval(shown.stdout.decode())[1].decode().removeprefix("/"))
    blocks += ["sgl_shm_mq_12_0a1b2c3d", "multi_tokenizer_args_12", "nccl-a1B2c3"]
    assert [name for name in blocks if not leftovers._MADE.fullmatch(name)] == []
    theirs = ["torch_weights.bin", "psm_", "nccl-model.bin", "sem.mp-abc", "model.safetensors"]
    assert [name for name in theirs if leftovers._MADE.fullmatch(name)] == []


def test_an_engine_that_was_started_before_it_is_asked_about_takes_its_blocks(block: Path) -> None:
    code = f"""
import pathlib, subprocess, sys, time
from types import SimpleNamespace
from serving.leftovers import EngineRemains
block = {str(block)!r}
subprocess.Popen([sys.executable, "-c", {SCHEDULER!r}, block, "600"])
while not pathlib.Path(block + ".made").exists():
    time.sleep(0.02)
EngineRemains(SimpleNamespace(shutdown=print, port_args=SimpleNamespace())).end()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not block.exists()


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
