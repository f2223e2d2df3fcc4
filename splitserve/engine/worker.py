"""The engine role: a process around one target engine, spoken to over one channel."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from serving.processes import kill_descendants
from splitserve.engine.base import EngineError, EngineSpec, Result, ResultSink, TargetEngine
from splitserve.engine.selfcheck import check_capture
from splitserve.messages import EngineReady, Evaluate, Generate, Stop, Teach, UpdateDraft

if TYPE_CHECKING:
    from splitserve.engine.sglang_engine import SGLangEngine
    from splitserve.engine.transformers_engine import TransformersEngine

POLL_SECONDS = 0.5


class Channel(Protocol):
    """What the role needs of its connection; heartbeats are the channel's own."""

    state: str

    def send(self, message: object) -> None:
        """Send one message; ends the process if nobody listens anymore."""

    def receive(self, timeout_seconds: float | None = None) -> object | None:
        """The next message, or None after the timeout; ends the process at the stream's end."""


def run(channel: Channel, spec: EngineSpec) -> None:
    """Start the engine, check it, and serve requests until `Stop`.

    SGLang's processes die with this one, however it ends: they ask the kernel for that. Raises
    ValueError and EngineError with the message for the user.
    """
    if spec.log_file:
        _redirect_output(spec.log_file)
    channel.state = "starting the target engine"
    pending = _Pending(channel)
    engine = _make_engine(spec, pending.result)
    try:
        info = engine.info()
        if spec.selfcheck:
            channel.state = "checking what the engine captures"
            info |= _selfcheck(engine, spec)
        channel.send(EngineReady(info))
        _serve(channel, engine, pending)
        channel.state = "stopping the target engine"
    finally:
        try:
            engine.close()
        finally:
            kill_descendants()


class _Pending:
    """Counts what is in flight, for the heartbeat's text."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.num_submitted = 0
        self.num_answered = 0

    def result(self, result: Result) -> None:
        self._channel.send(result)
        self.num_answered += 1


def _make_engine(spec: EngineSpec, sink: ResultSink) -> SGLangEngine | TransformersEngine:
    # Imported here: each costs seconds, and one may not be installed.
    if spec.kind == "transformers":
        from splitserve.engine.transformers_engine import TransformersEngine

        return TransformersEngine(spec, sink)
    from splitserve.engine.sglang_engine import SGLangEngine

    return SGLangEngine(spec, sink)


def _selfcheck(engine: SGLangEngine | TransformersEngine, spec: EngineSpec) -> dict[str, float]:
    import torch

    from dspark.target import FrozenTarget

    frozen = FrozenTarget.load(spec.target_path, torch.float32, "cpu")
    return check_capture(engine, frozen.lm_head, frozen.final_norm)


def _serve(channel: Channel, engine: TargetEngine, pending: _Pending) -> None:
    while True:
        if (failure := getattr(engine, "failure", None)) is not None:
            raise EngineError(failure)
        in_flight = pending.num_submitted - pending.num_answered
        channel.state = f"{in_flight} requests in the target" if in_flight else "waits for requests"
        message = channel.receive(POLL_SECONDS)
        if isinstance(message, Stop):
            return
        if isinstance(message, Generate | Teach | Evaluate | UpdateDraft):
            pending.num_submitted += 1
            engine.submit(message)
        elif message is not None:
            raise EngineError(f"the engine got a message that is not for it: {message!r}")


def _redirect_output(path: str) -> None:
    """Send this process's output, and so its children's, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
