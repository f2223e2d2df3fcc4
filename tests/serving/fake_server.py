"""A server that answers by a rule, at once, with times of its own making."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from serving.measure import Answer, Ask


class FakeServer:
    """Answers with `num_tokens` tokens that follow from the prompt and the temperature.

    Each round commits `accept` tokens and takes `step_ms`; `calls` notes what was asked.
    """

    def __init__(
        self,
        *,
        accept: int = 2,
        gamma: int = 3,
        step_ms: Callable[[], float] = lambda: 4.0,
        change: Callable[[Ask, list[int]], list[int]] = lambda ask, ids: ids,
        num_rounds: int = 10,
    ) -> None:
        self.accept, self.gamma, self.num_rounds = accept, gamma, num_rounds
        self._step_ms, self._change = step_ms, change
        self.calls: list[Ask] = []
        self.running = self.most = 0

    async def ask(self, ask: Ask) -> Answer:
        self.calls.append(ask)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        seconds = self._step_ms() / 1e3
        counts = [1 + self.accept * k for k in range(self.num_rounds + 1)]
        ids = self._change(ask, [sum(ask.token_ids) % 97 + k for k in range(counts[-1])])
        meta: dict[str, Any] = {"completion_tokens": counts[-1]}
        if self.gamma:
            meta["spec_verify_ct"] = self.num_rounds
            meta["spec_correct_drafts_histogram"] = [0] * (self.accept - 1) + [self.num_rounds]
        arrivals = tuple((1.0 + seconds * k, n) for k, n in enumerate(counts))
        return Answer(meta, 0.5, 1.0, arrivals[-1][0], tuple(ids), arrivals)

    def pause(self) -> None:
        """As an engine in a process of its own."""

    def resume(self) -> None:
        """As an engine in a process of its own."""

    async def info(self) -> dict[str, Any]:
        if not self.gamma:
            return {"speculative_algorithm": None, "speculative_num_draft_tokens": None}
        return {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": self.gamma + 1}

    async def start_profile(self, folder: str) -> None:
        raise RuntimeError("no profiler here")

    async def stop_profile(self) -> None:
        raise RuntimeError("no profiler here")
