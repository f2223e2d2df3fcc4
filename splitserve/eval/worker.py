"""The evaluator process: measures the drafts that it is sent."""

from __future__ import annotations

from splitserve.eval.measure import Evaluator
from splitserve.eval.spec import EvaluatorSpec
from splitserve.messages import Evaluate, Evaluated, EvaluatorReady, Stop
from splitserve.worker import Channel


def run(channel: Channel, spec: EvaluatorSpec) -> None:
    """Answer `Evaluate` with `Evaluated` until stopped.

    Raises:
        ValueError: the target cannot be decoded, or a folder holds no complete draft.
    """
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
