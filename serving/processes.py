"""The processes below this one, and their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

WAIT_SECONDS = 10.0


def is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which unlinks what the dead leave in /dev/shm.

    It knows names that nobody else does, ignores signals meant for its parent's terminal, and ends
    once all whom it serves are gone.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def living() -> Iterator[tuple[int, int, int]]:
    """Process id, parent and process group of every process but the zombies (Linux)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command in parentheses may itself hold spaces and parentheses.
            state, parent, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            yield int(entry.name), int(parent), int(group)


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group."""
    return [pid for pid, _, other in living() if other == group]


def descendants(root: int | None = None) -> list[int]:
    """Ids of all living processes below `root`, which is this one by default."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in living():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [os.getpid() if root is None else root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants(wait_seconds: float = WAIT_SECONDS) -> None:
    """Kill all but the resource tracker and wait until they are gone, but no longer than that."""
    deadline = time.monotonic() + wait_seconds
    while (left := _mortals()) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.05)


def _mortals() -> list[int]:
    return [pid for pid in descendants() if not is_tracker(pid)]
