"""Accept length of a draft folder, through the embedded decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspark.checkpoint import load_draft, read_config
from dspark.decoder import EmbeddedDecoder
from dspark.report import AcceptReport
from dspark.target_model import TargetModel
from splitserve.eval.spec import EvalPrompt, EvaluatorSpec


class Evaluator:
    """Keeps the target in memory and measures one draft folder after another."""

    def __init__(self, spec: EvaluatorSpec) -> None:
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._target: TargetModel | None = None

    def load_target(self, layer_ids: tuple[int, ...]) -> TargetModel:
        """The target, loaded once per set of captured layers."""
        if self._target is None or self._target.layer_ids != layer_ids:
            dtype = getattr(torch, self._spec.dtype)
            self._target = TargetModel(self._spec.target_path, layer_ids, dtype, self._spec.device)
        return self._target

    def measure(self, draft_path: str, step: int, *, full: bool) -> dict[str, Any]:
        """One report per temperature, ready for JSON.

        Raises:
            ValueError: the folder holds no complete draft.
        """
        spec = self._spec
        temperatures = spec.final_temperatures if full else spec.temperatures
        reports = [self._report(draft_path, step, temperature) for temperature in temperatures]
        return {"full": full, "reports": [report.to_dict() for report in reports]}

    def _report(self, draft_path: str, step: int, temperature: float) -> AcceptReport:
        spec = self._spec
        target = self.load_target(read_config(draft_path).target_layer_ids)
        draft = load_draft(draft_path, target.dtype, spec.device)
        decoder = EmbeddedDecoder(target, draft)
        settings = {
            "temperature": temperature,
            "rule": "greedy" if temperature == 0.0 else "token-by-token rejection sampling",
            "max_new_tokens": spec.max_new_tokens,
            "draft_step": step,
            "decoder": "embedded",
            "dtype": spec.dtype,
        }
        report = AcceptReport(draft.config.block_size, settings)
        # Prompts of like length together: less padding in the prefill.
        ordered = sorted(spec.prompts, key=lambda p: (len(p.token_ids), p.prompt_id))
        for first in range(0, len(ordered), spec.batch_size):
            group = ordered[first : first + spec.batch_size]
            decoded = decoder.decode(
                [p.token_ids for p in group],
                max_new_tokens=spec.max_new_tokens,
                eos_token_ids=spec.eos_token_ids,
                temperature=temperature,
                seed=spec.seed,
                request_ids=[p.prompt_id for p in group],
            )
            for prompt, result in zip(group, decoded, strict=True):
                report.add(prompt.domain, result.rounds)
        report.timings = {
            "draft_seconds": decoder.draft_seconds,
            "verify_seconds": decoder.verify_seconds,
        }
        return report


@dataclass(frozen=True)
class Difference:
    """Where greedy decoding with the draft first leaves greedy decoding without it."""

    prompt_id: str
    place: int
    with_draft: int
    without_draft: int


def lossless_differences(
    spec: EvaluatorSpec, draft_path: str, prompts: tuple[EvalPrompt, ...]
) -> list[Difference]:
    """Compare greedy output with the draft and without it, token by token, in float32.

    The target without a draft is decoded one token at a time by the same wrapper.

    Returns:
        One entry per prompt whose outputs differ; empty when the draft is lossless.
    """
    torch.set_num_threads(spec.num_threads)
    target = TargetModel(
        spec.target_path, read_config(draft_path).target_layer_ids, torch.float32, spec.device
    )
    draft = load_draft(draft_path, torch.float32, spec.device)

    def greedy(decoder: EmbeddedDecoder) -> list[list[int]]:
        decoded = decoder.decode(
            [p.token_ids for p in prompts],
            max_new_tokens=spec.max_new_tokens,
            eos_token_ids=spec.eos_token_ids,
        )
        return [d.token_ids for d in decoded]

    with_draft = greedy(EmbeddedDecoder(target, draft))
    without = greedy(EmbeddedDecoder(target, None))
    found = []
    for prompt, ours, plain in zip(prompts, with_draft, without, strict=True):
        if ours != plain:
            pairs = zip([*ours, -1], [*plain, -1], strict=False)
            place, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            found.append(Difference(prompt.prompt_id, place, a, b))
    return found
