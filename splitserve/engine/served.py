"""The accept length as it is served: measured by the very engine that teaches and generates.

The engine gets the draft of a snapshot, is compared with the embedded implementation on one
proposal, and answers the held-out prompts beside its other work, a bounded number at a time. What
counts is what SGLang says of each request, not its running average.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dspark.checkpoint import load_draft
from dspark.proposal import proposal_margins
from dspark.target import FrozenTarget
from serving.measure import Answer, measure
from splitserve.engine.base import EngineError
from splitserve.eval.spec import EvaluatorSpec
from splitserve.messages import EVALUATION, Evaluate, Evaluated, Rejected, Sampling

if TYPE_CHECKING:
    from splitserve.engine.sglang_engine import SGLangEngine

MARGIN_TOLERANCE = 0.5
"""Mean distance in logits below the embedded draft's choice that rounding may explain."""


class ServedEvaluator:
    """Answers `Evaluate` on a running engine; one evaluation at a time."""

    def __init__(self, engine: SGLangEngine, spec: EvaluatorSpec) -> None:
        self._engine, self._spec = engine, spec
        self._frozen: FrozenTarget | None = None
        self._count = itertools.count()

    async def answer(self, request: Evaluate, sink: Callable[[Any], None]) -> None:
        """Measure and send the report; a failure goes out as a rejection."""
        try:
            sink(Evaluated(request.step, await self._measure(request)))
        except Exception as error:
            sink(Rejected(EVALUATION, None, f"engine_error: {type(error).__name__}: {error}"))

    async def _measure(self, request: Evaluate) -> dict[str, Any]:
        spec = self._spec
        update = await self._engine.update_draft(request.step, request.draft_path)
        margins = await self._check_proposal(request)
        facts = {"draft_source": update.source, "proposal_margin": sum(margins) / len(margins)}
        temperatures = spec.final_temperatures if request.full else spec.temperatures
        reports = []
        for temperature in temperatures:
            report = await measure(
                self._decode,
                spec.prompts,
                block_size=len(margins),
                temperature=temperature,
                max_new_tokens=spec.max_new_tokens,
                concurrency=spec.batch_size,
                settings={"draft_step": request.step, "dtype": spec.dtype, **facts},
            )
            report.timings["hot_update_seconds"] = update.seconds
            reports.append(report.to_dict())
        return {"full": request.full, "reports": reports}

    async def _check_proposal(self, request: Evaluate) -> list[float]:
        """Compare the engine's first proposal for one prompt with the embedded draft's.

        Raises EngineError where they differ by more than rounding: the accept length would be that
        of another draft.
        """
        prompt = self._spec.prompts[0]
        tokens, slot = await self._engine.propose(prompt.token_ids, self._spec.max_new_tokens)
        try:
            margins = await asyncio.to_thread(self._margins, request.draft_path, slot, tokens)
        finally:
            self._engine.probe_ring.free(slot)
        mean = sum(margins) / len(margins)
        if not mean <= MARGIN_TOLERANCE:
            raise EngineError(
                f"the engine's draft is not that of step {request.step}: its proposal lies "
                f"{mean:.3g} logits below the embedded decoder's on average, allowed "
                f"{MARGIN_TOLERANCE}; its weights, or what SGLang derives from them, are stale"
            )
        return margins

    def _margins(self, draft_path: str, slot: Any, tokens: list[int]) -> list[float]:
        if self._frozen is None:
            self._frozen = FrozenTarget.load(self._spec.target_path, torch.float32, "cpu")
        draft = load_draft(draft_path, torch.float32, "cpu")
        features = self._engine.read_probe(slot).features.float()
        return proposal_margins(
            draft, self._frozen.embedding, self._frozen.lm_head, features, tokens
        )

    async def _decode(
        self, token_ids: Sequence[int], temperature: float, max_new_tokens: int
    ) -> Answer:
        sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens)
        rid = f"splitserve-eval:{next(self._count)}"
        return await self._engine.decode(token_ids, sampling, rid)
