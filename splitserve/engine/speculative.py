"""What the plugin adds to an engine that speculates with the draft being trained.

SGLang keeps the states before the lm_head only when it captures without speculating; the engine
here does both. And to compare the engine's draft with the trainer's, the first window that is
verified for a marked request is written down.
"""

from __future__ import annotations

from typing import Any

from splitserve.engine.control import ControlBlock

LOGITS_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor.__init__"
OBSERVE = (
    "sglang.srt.speculative.dspark_components.dspark_observability"
    ".DsparkStepObservers.observe_verify_step"
)
PROPOSAL_PREFIX = "splitserve-proposal"


def proposal_rid(number: int) -> str:
    """The id of a request whose first proposal is to be written down; numbers from 1, unique."""
    return f"{PROPOSAL_PREFIX}:{number}"


def keep_last_states(_result: Any, processor: Any, *_: Any, **__: Any) -> None:
    """After a LogitsProcessor is made: have it hand out the states before the lm_head too."""
    processor.keep_last_hidden_states = True


class ProposalRecorder:
    """Writes the first verified window of marked requests into the engine's control block."""

    def __init__(self, control_path: str) -> None:
        self._path = control_path
        self._control: ControlBlock | None = None

    def after_verify(self, _result: Any, _observers: Any, *_: Any, **step: Any) -> None:
        """Look for marked requests; the device is read only where there is one."""
        for row, request in enumerate(step["reqs"]):
            if isinstance(request.rid, str) and request.rid.startswith(PROPOSAL_PREFIX + ":"):
                if self._control is None:
                    self._control = ControlBlock.attach(self._path)
                number = int(request.rid.split(":")[1])
                self._control.note_proposal(number, step["verify_ids_2d"][row].tolist())
