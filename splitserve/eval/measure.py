"""Accept length of a draft folder, through the embedded decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        """The target, loaded once, with these layers captured.

        Raises:
            ValueError: the embedded decoder cannot decode the target, or it has no such layer.
        """
        if self._target is None:
            dtype = getattr(torch, self._spec.dtype)
            self._target = TargetModel(self._spec.target_path, (), dtype, self._spec.device)
        if self._target.layer_ids != layer_ids:
            self._target.capture(layer_ids)
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


def evaluate_draft(spec: EvaluatorSpec, draft_path: str, full: bool) -> dict[str, Any]:
    """Measure one draft folder in this process; what the evaluator answers, without a step.

    Raises:
        ValueError: the folder holds no complete draft, or the target cannot be decoded.
    """
    return Evaluator(spec).measure(draft_path, -1, full=full)


@dataclass(frozen=True)
class Difference:
    """Where greedy decoding with the draft first leaves greedy decoding without it."""

    prompt_id: str
    place: int
    with_draft: int
    """Token id there, -1 where the output has ended."""
    without_draft: int
    margin: float
    """The target's logit of its token there minus that of the draft's, by a pass without a cache;
    about 0 is a tie that rounding decides. Infinite where one output has ended."""


@dataclass(frozen=True)
class LosslessResult:
    """Greedy outputs with the draft against those without it."""

    num_prompts: int
    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def lossless(self) -> bool:
        """Whether every output is the same, token by token."""
        return not self.differences


def check_lossless(spec: EvaluatorSpec, draft_path: str, num_prompts: int = 0) -> LosslessResult:
    """Compare greedy output with the draft and without it, token by token, in float32.

    The target without a draft is decoded one token at a time by the same wrapper.

    Args:
        num_prompts: how many of the prompts, from the first on; 0 takes all.

    Raises:
        ValueError: the folder holds no complete draft, or the target cannot be decoded.
    """
    torch.set_num_threads(spec.num_threads)
    target = TargetModel(
        spec.target_path, read_config(draft_path).target_layer_ids, torch.float32, spec.device
    )
    draft = load_draft(draft_path, torch.float32, spec.device)
    prompts = spec.prompts[: num_prompts or None]
    found: list[Difference] = []
    num_tokens = 0
    for first in range(0, len(prompts), spec.batch_size):
        group = prompts[first : first + spec.batch_size]
        ours = _greedy(EmbeddedDecoder(target, draft), spec, group)
        plain = _greedy(EmbeddedDecoder(target, None), spec, group)
        num_tokens += sum(len(tokens) for tokens in plain)
        for prompt, mine, theirs in zip(group, ours, plain, strict=True):
            if mine != theirs:
                found.append(_difference(target, prompt, mine, theirs))
    return LosslessResult(len(prompts), num_tokens, tuple(found))


def lossless_differences(
    spec: EvaluatorSpec, draft_path: str, prompts: tuple[EvalPrompt, ...]
) -> list[Difference]:
    """The differences that `check_lossless` finds on these prompts; empty for a lossless draft."""
    return list(check_lossless(replace(spec, prompts=prompts), draft_path).differences)


def _greedy(
    decoder: EmbeddedDecoder, spec: EvaluatorSpec, prompts: tuple[EvalPrompt, ...]
) -> list[list[int]]:
    decoded = decoder.decode(
        [p.token_ids for p in prompts],
        max_new_tokens=spec.max_new_tokens,
        eos_token_ids=spec.eos_token_ids,
    )
    return [d.token_ids for d in decoded]


@torch.no_grad()
def _difference(
    target: TargetModel, prompt: EvalPrompt, ours: list[int], plain: list[int]
) -> Difference:
    length = min(len(ours), len(plain))
    place = next((i for i in range(length) if ours[i] != plain[i]), length)
    if place == length:
        mine = ours[place] if place < len(ours) else -1
        theirs = plain[place] if place < len(plain) else -1
        return Difference(prompt.prompt_id, place, mine, theirs, float("inf"))
    ids = torch.tensor([[*prompt.token_ids, *plain[:place]]], device=target.device)
    logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
    margin = float(logits[plain[place]] - logits[ours[place]])
    return Difference(prompt.prompt_id, place, ours[place], plain[place], margin)
