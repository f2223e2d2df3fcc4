"""The accept length as it is served: measured by the very engine that teaches and generates.

The engine gets the draft of a snapshot, is compared with the embedded implementation on one
proposal, and answers the held-out prompts beside its other work, a bounded number at a time. What
counts is what SGLang says of each request, not its running average.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dspark.checkpoint import load_draft
from dspark.proposal import proposal_margins
from dspark.report import AcceptReport
from dspark.target import FrozenTarget
from splitserve.engine.base import EngineError
from splitserve.eval.spec import EvalPrompt, EvaluatorSpec
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
            report = await self._report(request.step, temperature, facts, len(margins))
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

    async def _report(
        self, step: int, temperature: float, facts: dict[str, Any], block_size: int
    ) -> AcceptReport:
        spec = self._spec
        settings = {
            "temperature": temperature,
            "rule": "greedy" if temperature == 0.0 else "token-by-token rejection sampling",
            "max_new_tokens": spec.max_new_tokens,
            "draft_step": step,
            "decoder": "served",
            "dtype": spec.dtype,
            "max_running_prompts": spec.batch_size,
            **facts,
        }
        report = AcceptReport(block_size, settings)
        places = asyncio.Semaphore(spec.batch_size)
        started = time.monotonic()
        answers = await asyncio.gather(
            *(self._decode(prompt, temperature, places) for prompt in spec.prompts)
        )
        token_seconds = []
        for prompt, (meta, seconds) in zip(spec.prompts, answers, strict=True):
            report.add_served(prompt.domain, *served_counts(meta))
            if (following := meta["completion_tokens"] - 1) > 0:
                token_seconds.append(seconds / following)
        report.timings["wall_seconds"] = time.monotonic() - started
        if token_seconds:
            report.timings["mean_tpot_ms"] = 1e3 * sum(token_seconds) / len(token_seconds)
        return report

    async def _decode(
        self, prompt: EvalPrompt, temperature: float, places: asyncio.Semaphore
    ) -> tuple[dict[str, Any], float]:
        sampling = Sampling(temperature=temperature, max_new_tokens=self._spec.max_new_tokens)
        async with places:
            rid = f"splitserve-eval:{next(self._count)}"
            answer, first, last = await self._engine.decode(prompt.token_ids, sampling, rid)
        return answer["meta_info"], last - first


def served_counts(meta: dict[str, Any]) -> tuple[Sequence[int], int]:
    """From a request's `meta_info`: rounds by accepted drafts, and tokens that rounds committed.

    Source: SGLang 0.5.23, srt/managers/tokenizer_manager.py. The first token is the prefill's.
    """
    histogram = meta.get("spec_correct_drafts_histogram") or ()
    if sum(histogram) != (meta.get("spec_verify_ct") or 0):
        raise EngineError(
            f"SGLang reports {meta.get('spec_verify_ct')} rounds and a histogram of {histogram}"
        )
    return histogram, max(0, int(meta["completion_tokens"]) - 1) if histogram else 0
