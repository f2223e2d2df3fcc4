"""Entry of every worker process: `python -m splitserve.worker ROLE --fd N`.

The coordinator starts a worker with one end of a socket pair as an inherited descriptor and sends
a `Start` first. The end of the stream means that the coordinator is gone; the worker then exits at
once, and the kernel takes the rest (memory of the ring included) with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from splitserve.errors import WorkerError
from splitserve.messages import Fatal, Heartbeat, Start

PR_SET_PDEATHSIG = 1
HEARTBEAT_SECONDS = 2.0
EVALUATOR_NICENESS = 5


class Channel:
    """The worker's end of the socket: locked sends, heartbeats, and the state that they carry."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.state = "starting"

    def send(self, message: Any) -> None:
        """Send one message; a coordinator that is gone ends the process."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def receive(self, timeout_seconds: float | None = None) -> Any | None:
        """Wait for the next message; None after the timeout. Exits when the coordinator is gone."""
        try:
            if not self._connection.poll(timeout_seconds):
                return None
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)

    def start_heartbeats(self) -> None:
        """Report `state` every few seconds, whatever the main thread is busy with."""

        def beat() -> None:
            while True:
                self.send(Heartbeat(self.state))
                time.sleep(HEARTBEAT_SECONDS)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def give_way() -> None:
    """Let the other processes of the run have the CPU first.

    Linux may weigh sessions instead of processes, and every worker is a session of its own.
    """
    os.nice(EVALUATOR_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(EVALUATOR_NICENESS))


def _role(name: str) -> Callable[[Channel, Any], None]:
    # Imported here: an engine must not pay for DeepSpeed, nor a trainer for SGLang.
    if name == "engine":
        from splitserve.engine.worker import run as run_engine

        return run_engine
    if name == "trainer":
        from splitserve.train.rank import run as run_trainer

        return run_trainer
    if name == "evaluator":
        from splitserve.eval.worker import run as run_evaluator

        return run_evaluator
    raise ValueError(f"worker role {name!r} is unknown; allowed: engine, trainer, evaluator")


def main(argv: list[str]) -> int:
    """Run one role until it is stopped; the exit code tells whether it ended as it should."""
    role_name, flag, descriptor = argv
    assert flag == "--fd", f"worker started with {argv}"
    die_with_parent()
    # The coordinator alone decides what a Ctrl-C on the terminal means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(Connection(int(descriptor)))
    start = channel.receive()
    assert isinstance(start, Start), f"first message was {start!r}"
    channel.start_heartbeats()
    if role_name == "evaluator":
        # Where all share the CPU, a measurement that comes later costs less than answers that do.
        give_way()
    try:
        _role(role_name)(channel, start.spec)
    except (ValueError, WorkerError) as error:
        traceback.print_exc()
        channel.send(Fatal(str(error)))
        return 1
    except Exception as error:
        traceback.print_exc()
        channel.send(Fatal(f"{role_name} failed: {type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries (asyncio, gloo) must not hold up the end of a worker that has finished.
    os._exit(code)
