"""What SGLang's processes leave behind when they are killed, which is how they end.

Each scheduler publishes its load in a block of its own, /dev/shm/sglang_loads_*, and nothing of
SGLang 0.5.23 removes it (srt/managers/load_snapshot.py). Other libraries have named memory as well.
So what the processes of an engine map from /dev/shm is noted while they live and removed once they
are gone, unless a living process maps it too. People keep files of their own there, models and
whole environments, and engines map these as well: so nothing is removed that was there before, and
nothing under a name that no library gives. Python's semaphores are unlinked by its resource
tracker, which is left alone for that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from serving.processes import descendants, is_tracker, kill_descendants, living, members

SHM = "/dev/shm/"
NOTE_SECONDS = 2.0
TRACKER_SECONDS = 2.0
END_SECONDS = 60.0
"""A process with a large GPU context is not gone at once."""

# What libraries of an engine or a trainer name in /dev/shm and leave there when they are killed.
# Whatever has no name any more once it is mapped is not here, such as SGLang's sglang_host_pool_*.
_MADE = re.compile(
    "|".join(
        (
            # SGLang 0.5.23: srt/managers/load_snapshot.py, srt/utils/stale_shm_cleanup.py and
            # srt/managers/multi_tokenizer_mixin.py.
            r"sglang_loads_[^/]+\.shm",
            r"sgl_shm_[a-z_]+_\d+_[0-9a-f]{8}",
            r"multi_tokenizer_args_\d+",
            # Python 3.11: multiprocessing/shared_memory.py and synchronize.py.
            r"psm_[0-9a-f]{8}",
            r"sem\.mp-[a-z0-9_]{8}",
            # torch 2.14: NewProcessWideShmHandle in aten/src/ATen/MapAllocator.cpp.
            r"torch_\d+_\d+_\d+",
            # NCCL: ncclShmOpen in src/misc/shmutils.cc.
            r"nccl-[A-Za-z0-9]{6}",
            # The driver's, of CUDA IPC; SGLang's stale_shm_cleanup.py knows them too.
            r"cuda\.shm\.[0-9a-f.]+",
            # Reductions on CPUs, DeepSpeed 0.19.8 (csrc/cpu/comm/shm.cpp) and SGLang after it.
            r"deepspeed_allreduce_buffer_\d+_[^/]+_\d+",
        )
    )
)


class SharedMemoryGuard:
    """Remembers the shared memory of some processes.

    Args:
        processes: gives the ids of those that live now.
        before: names in /dev/shm that are not theirs; by default all that are there now.
    """

    def __init__(
        self, processes: Callable[[], Iterable[int]], before: Collection[str] | None = None
    ) -> None:
        self._processes = processes
        self._before = frozenset(_there() if before is None else before)
        self._names: set[str] = set()
        self._noted = 0.0

    def note(self) -> None:
        """Look at what the processes have mapped right now."""
        self._noted = time.monotonic()
        for pid in self._processes():
            self._names |= {
                path
                for path in _mapped(pid)
                if _MADE.fullmatch(name := path.removeprefix(SHM)) and name not in self._before
            }

    def note_sometimes(self) -> None:
        """The same, if the last look was a while ago."""
        if time.monotonic() - self._noted > NOTE_SECONDS:
            self.note()

    def remove(self) -> list[str]:
        """Unlink what is left of it and mapped by no living process; the names removed.

        Call this once the processes are dead.
        """
        left = {name for name in self._names if Path(name).exists()}
        if left:
            left = _unmapped(left)
        for name in left:
            with contextlib.suppress(OSError):
                Path(name).unlink()
        self._names.clear()
        return sorted(left)


def end_session(process: subprocess.Popen[bytes], memory: SharedMemoryGuard) -> None:
    """End a process that leads its session, and all that it has started, now.

    Args:
        memory: of the session's processes.
    """
    memory.note()
    for pid in members(process.pid):
        if not is_tracker(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    # The tracker ends by itself once it has unlinked what the others have left.
    deadline = time.monotonic() + TRACKER_SECONDS
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    memory.remove()


class EngineRemains:
    """What an SGLang engine in this process will leave; made once it runs.

    Args:
        engine: sglang.Engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # A scheduler that dies by itself is gone before anybody asks again.
        self._memory = SharedMemoryGuard(descendants, _AT_FIRST)
        self._memory.note()

    def end(self) -> None:
        """End the engine's processes, all of them, and remove what they have left.

        Instead of SGLang's own end, which kills the resource tracker too.
        """
        atexit.unregister(self._engine.shutdown)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        self._memory.note()
        kill_descendants(END_SECONDS)
        self._memory.remove()
        for name, address in vars(self._engine.port_args).items():
            # A socket's file in the folder for temporary files.
            if name.endswith("_ipc_name") and str(address).startswith("ipc:///"):
                with contextlib.suppress(OSError):
                    Path(str(address).removeprefix("ipc://")).unlink()


def _there() -> list[str]:
    try:
        return os.listdir(SHM)
    except OSError:
        return []


_AT_FIRST = _there()
"""`EngineRemains` comes after its engine, and this module before."""


def _unmapped(names: set[str]) -> set[str]:
    """Those of the names that no living process maps.

    Where another user's process does not show what it maps, it may be any file that other users
    may open. It cannot be a private one, but for root's, and root wants no engine's memory.
    """
    left, hidden = set(names), False
    for pid, _, _ in living():
        try:
            left -= _maps(pid)
        except PermissionError:
            hidden = hidden or _is_others(pid)
        except OSError:
            continue
    return {name for name in left if _is_private(name)} if hidden else left


def _is_others(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return False


def _is_private(name: str) -> bool:
    try:
        return not os.stat(name).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return False


def _mapped(pid: int) -> set[str]:
    try:
        return _maps(pid)
    except OSError:
        return set()


def _maps(pid: int) -> set[str]:
    """The paths in /dev/shm that a process maps. Raises OSError: it is gone, or does not show."""
    lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    found = {line.split(maxsplit=5)[5] for line in lines if SHM in line}
    return {name for name in found if name.startswith(SHM) and not name.endswith("(deleted)")}
