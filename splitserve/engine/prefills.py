"""Prompts are prefilled together: what the plugin adds to SGLang's scheduler.

SGLang prefills whatever waits before each decode step. While answers end one by one, that is one
prompt at a time, and for a small target a prefill of one takes as long as one of thirty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PREFILL = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
PATIENCE_STEPS = 8
"""Decode steps that a prompt waits for others at most. Steps, not seconds: the ranks of a target
have to decide alike."""


class PrefillGate:
    """Holds prefills back until enough prompts wait for which there is room, while there is
    something to decode."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._held = 0
        """Decode steps since prompts began to wait."""

    def new_prefill(self, original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
        """Around the scheduler's choice of a prefill: none for now, or SGLang's own."""
        room = scheduler.max_running_requests - running_batch.batch_size()
        few = 0 < min(room, len(scheduler.waiting_queue)) < self._together
        # The rest of a prompt that is under way holds memory and blocks all others.
        if few and scheduler.chunked_req is None and not running_batch.is_empty():
            self._held += 1
            if self._held <= PATIENCE_STEPS:
                from sglang.srt.managers.schedule_batch import NextBatchPlan

                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        self._held = 0
        return original(scheduler, running_batch)
