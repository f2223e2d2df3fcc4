"""Named shared memory that a worker's libraries leave behind when they are killed.

Our own ring has no name and needs no care, and Python's semaphores are unlinked by its resource
tracker. SGLang's blocks do need it: what a worker's processes map from /dev/shm is noted while they
live and removed once they are gone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from splitserve.engine.processes import living, members

SHM = "/dev/shm/"


class SharedMemoryGuard:
    """Remembers the shared memory of one process group."""

    def __init__(self, process_group: int) -> None:
        self._group = process_group
        self._names: set[str] = set()

    def note(self) -> None:
        """Look at what the group's processes have mapped right now."""
        for pid in members(self._group):
            self._names |= _mapped(pid)

    def remove(self) -> list[str]:
        """Unlink what is left of it and mapped by no living process; the names removed.

        Call this once the group is dead.
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


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    found = {line.split(maxsplit=5)[5] for line in lines if SHM in line}
    return {name for name in found if name.startswith(SHM) and not name.endswith("(deleted)")}
