"""The processes below this one, and their end."""

from __future__ import annotations

import os
import signal
import time
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


def descendants() -> list[int]:
    """Ids of all living processes that this one or a child of it has started (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_descendants() -> None:
    """Kill all but the resource tracker and wait until they are gone, at most a few seconds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while (living := _mortals()) and time.monotonic() < deadline:
        for pid in living:
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
