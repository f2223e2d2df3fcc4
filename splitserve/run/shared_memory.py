"""Named shared memory that a worker's libraries leave behind when they are killed.

Our own ring has no name and needs no care, and Python's semaphores are unlinked by its resource
tracker. SGLang's blocks do need it: what a worker's processes map from /dev/shm is noted while they
live and removed once they are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SHM = "/dev/shm/"


class SharedMemoryGuard:
    """Remembers the shared memory of one process group."""

    def __init__(self, process_group: int) -> None:
        self._group = process_group
        self._names: set[str] = set()

    def note(self) -> None:
        """Look at what the group's processes have mapped right now."""
        for process in processes():
            if group_of(process) == self._group:
                self._names |= _mapped(process)

    def remove(self) -> list[str]:
        """Unlink what is left of it and mapped by no living process; the names removed.

        Call this once the group is dead.
        """
        left = {name for name in self._names if Path(name).exists()}
        if left:
            for process in processes():
                left -= _mapped(process)
        for name in left:
            with contextlib.suppress(OSError):
                Path(name).unlink()
        self._names.clear()
        return sorted(left)


def processes() -> Iterator[Path]:
    """The folder in /proc of every process."""
    return (p for p in Path("/proc").iterdir() if p.name.isdigit())


def group_of(process: Path) -> int:
    """Its process group; -1 for one that is dead, a zombie too."""
    try:
        # The command in parentheses may itself hold spaces and parentheses.
        state, _, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        return -1 if state in "ZX" else int(group)
    except (OSError, ValueError, IndexError):
        return -1


def _mapped(process: Path) -> set[str]:
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return set()
    found = {line.split(maxsplit=5)[5] for line in lines if SHM in line}
    return {name for name in found if name.startswith(SHM) and not name.endswith("(deleted)")}
