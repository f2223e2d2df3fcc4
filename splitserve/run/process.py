"""Worker processes as the coordinator sees them: start, talk, watch, end."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.leftovers import SharedMemoryGuard, end_session
from serving.processes import members
from splitserve.messages import Heartbeat, Start, Stop


class ChildProcess:
    """One worker in a process group of its own, with a socket pair and a log file.

    Sends go through a thread, so that a worker that has stopped reading never blocks the
    coordinator; `last_seen` tells how long it has been silent.
    """

    def __init__(
        self, role: str, name: str, spec: Any, log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self.role, self.name, self.log_path = role, name, log_path
        ours, theirs = socket.socketpair()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "splitserve.worker", role, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        theirs.close()
        self._memory = SharedMemoryGuard(lambda: members(self._process.pid))
        self.connection = Connection(ours.detach())
        self.last_seen = time.monotonic()
        self.state = "starting"
        self.fatal: str | None = None
        self.closed = False
        """The worker has closed its end of the socket."""
        self.finished = False
        """Set by the coordinator when the worker has said that it is done."""
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._pump, name=f"send-{name}", daemon=True).start()
        self.send(Start(spec))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Queue one message for the worker; a worker that has died is noticed by its exit code."""
        self._outbox.put(message)

    def _pump(self) -> None:
        # A worker that has died shows in its exit code; what was queued for it is moot.
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)

    def receive(self) -> list[Any]:
        """Everything that has arrived, without heartbeats; sets `closed` at the stream's end.

        Notes as well what the worker would leave in /dev/shm if it were killed.
        """
        if self.exit_code() is None:
            self._memory.note_sometimes()
        messages: list[Any] = []
        try:
            while self.connection.poll():
                message = self.connection.recv()
                self.last_seen = time.monotonic()
                if isinstance(message, Heartbeat):
                    self.state = message.state
                else:
                    messages.append(message)
        except (EOFError, OSError):
            self.closed = True
        return messages

    def exit_code(self) -> int | None:
        """None while the worker runs."""
        return self._process.poll()

    def silent_seconds(self) -> float:
        return time.monotonic() - self.last_seen

    def log_tail(self, num_lines: int = 15) -> str:
        """The end of the worker's log, for an error message."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()
            return "\n".join(line[:300] for line in lines[-num_lines:])
        return ""

    def kill(self) -> None:
        """End the worker and all that it has started, now."""
        end_session(self._process, self._memory)
        self._outbox.put(None)

    def close(self) -> None:
        """Kill what still runs and let go of the socket."""
        self.kill()
        self.closed = True
        with contextlib.suppress(OSError):
            self.connection.close()


def stop_all(children: list[ChildProcess], grace_seconds: float) -> None:
    """Ask every worker to stop, wait for at most the grace period, then kill what is left."""
    for child in children:
        child.send(Stop())
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(c.exit_code() is None for c in children):
        for child in children:
            child.receive()  # a worker that blocks on a full socket could not stop
        time.sleep(0.05)
    for child in children:
        child.close()
