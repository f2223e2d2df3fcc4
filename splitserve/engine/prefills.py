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
        if self._waits(scheduler, running_batch):
            self._held += 1
            if self._held <= PATIENCE_STEPS:
                from sglang.srt.managers.schedule_batch import NextBatchPlan

                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        self._held = 0
        return original(scheduler, running_batch)

    def _waits(self, scheduler: Any, running_batch: Any) -> bool:
        """Whether more prompts would make the prefill worth more than the wait costs."""
        queue = scheduler.waiting_queue
        most = scheduler.max_running_requests
        # Of a batch that is not much larger, too much would stand empty.
        together = min(self._together, most // 4)
        few = 0 < min(most - running_batch.batch_size(), len(queue)) < together
        # The rest of a prompt that is under way holds memory and blocks all others.
        if not few or scheduler.chunked_req is not None:
            return False
        tokens = sum(len(request.origin_input_ids) for request in queue[:together])
        if tokens >= (scheduler.chunked_prefill_size or tokens + 1):
            return False
        # A prompt that is only taught ends with its prefill, whose result may be on its way.
        return any(request.sampling_params.max_new_tokens > 1 for request in running_batch.reqs)
