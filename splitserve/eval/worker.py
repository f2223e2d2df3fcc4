"""The evaluator process: measures the drafts that it is sent."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from splitserve.eval.measure import Evaluator
from splitserve.eval.spec import EvaluatorSpec
from splitserve.messages import Evaluate, Evaluated, EvaluatorReady, Stop
from splitserve.worker import Channel

NICENESS = 5


def run(channel: Channel, spec: EvaluatorSpec) -> None:
    """Answer `Evaluate` with `Evaluated` until stopped.

    Raises:
        ValueError: the target cannot be decoded, or a folder holds no complete draft.
    """
    # Where all share the CPU, a measurement that comes later costs less than answers that do.
    be_nice()
    evaluator = Evaluator(spec)
    # A target that cannot be decoded ends the run now, not after the first steps of training.
    evaluator.load_target(())
    channel.send(EvaluatorReady())
    while True:
        channel.state = "waiting for a draft"
        message = channel.receive()
        if isinstance(message, Stop):
            return
        if isinstance(message, Evaluate):
            channel.state = f"measuring the draft of step {message.step}"
            report = evaluator.measure(message.draft_path, message.step, full=message.full)
            channel.send(Evaluated(message.step, report))


def be_nice() -> None:
    """Give way to the other processes of the run.

    Linux may weigh sessions instead of processes, and every worker is a session of its own.
    """
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
