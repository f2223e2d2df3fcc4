"""What SGLang's processes leave behind when they are killed, which is how they end.

Each scheduler publishes its load in a block of its own, /dev/shm/sglang_loads_*, and nothing of
SGLang 0.5.23 removes it (srt/managers/load_snapshot.py). Other libraries have named memory as well.
So what the processes of an engine map from /dev/shm is noted while they live and removed once they
are gone, unless a living process maps it too. Python's semaphores are unlinked by its resource
tracker, which is left alone for that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from serving.processes import descendants, is_tracker, kill_descendants, living, members

SHM = "/dev/shm/"
NOTE_SECONDS = 2.0
TRACKER_SECONDS = 2.0
END_SECONDS = 60.0
"""A process with a large GPU context is not gone at once."""


class SharedMemoryGuard:
    """Remembers the shared memory of some processes.

    Args:
        processes: gives the ids of those that live now.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._names: set[str] = set()
        self._noted = 0.0

    def note(self) -> None:
        """Look at what the processes have mapped right now."""
        self._noted = time.monotonic()
        for pid in self._processes():
            self._names |= _mapped(pid)

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
            for pid, _, _ in living():
                left -= _mapped(pid)
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
        self._memory = SharedMemoryGuard(descendants)
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


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = {line.split(maxsplit=5)[5] for line in lines if SHM in line}
    return {name for name in found if name.startswith(SHM) and not name.endswith("(deleted)")}
