"""Before the first sample: is what the engine captures what the target really computes?

A probe longer than one prefill chunk is taught. Its captured states, multiplied by the frozen
lm_head, must give the log-probabilities that the target itself reports for the probe's tokens. That
fails for states before the final norm, for shifted or missing rows and for other weights: mistakes
that training would not notice except by a draft that is never accepted.
"""

from __future__ import annotations

from typing import Protocol

import torch

from splitserve.engine.base import EngineError, EngineSpec
from splitserve.messages import SlotRef
from splitserve.target.info import TargetInfo, context_window
from splitserve.transport.ring import RingOwner, RingReader

NUM_LOGPROBS = 48
# Mean absolute difference in nats. Observed: float32 2e-6, bfloat16 0.01 (SmolLM2-135M); states
# before the norm differ by more than 1.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
_LARGE_PRIME = 7919


class Probing(Protocol):
    """An engine that can be probed."""

    spec: EngineSpec
    target: TargetInfo
    probe_ring: RingOwner

    def probe(
        self, token_ids: tuple[int, ...], num_logprobs: int
    ) -> tuple[SlotRef, str | None, int, list[float]]:
        """Teach one sequence into the private ring."""


def check_capture(
    engine: Probing, lm_head: torch.Tensor, norm_weight: torch.Tensor | None = None
) -> dict[str, float]:
    """Probe the engine; lm_head [V, H] is the one that training will use.

    `norm_weight` [H], the final norm's, only serves to recognise states before the norm. Returns
    the observed difference. Raises EngineError with what is wrong.
    """
    spec = engine.spec
    token_ids = _probe_tokens(spec, engine.target)
    num_logprobs = min(NUM_LOGPROBS, len(token_ids) - 1)
    slot, reason, rows, reported = engine.probe(token_ids, num_logprobs)
    reader = RingReader.attach(engine.probe_ring.address)
    try:
        _check_rows(reason, rows, len(token_ids))
        if len(reported) != num_logprobs:
            raise EngineError(
                f"self-check: the target reported {len(reported)} of {num_logprobs} "
                "log-probabilities for the probe"
            )
        states = reader.read(slot).target_states[-num_logprobs - 1 : -1].float()
        difference = _difference(states, lm_head, token_ids[-num_logprobs:], reported)
        allowed = spec.selfcheck_tolerance or TOLERANCES[spec.dtype]
        if not difference <= allowed:
            raise EngineError(
                f"self-check: captured states times lm_head differ from the target's own "
                f"log-probabilities by {difference:.4g} on average, allowed {allowed:.4g}. "
                + _explain(states, lm_head, norm_weight, token_ids, reported, allowed)
            )
        del states
        return {"selfcheck_difference": difference, "selfcheck_tokens": float(len(token_ids))}
    finally:
        reader.close()
        engine.probe_ring.free(slot)


def _probe_tokens(spec: EngineSpec, target: TargetInfo) -> tuple[int, ...]:
    """A fixed sequence over the whole vocabulary, longer than a chunk where the context allows."""
    length = min(spec.context_length - 1, spec.chunked_prefill_size + NUM_LOGPROBS + 3)
    # Beyond its positions a target reads what is not there.
    length = min(length, context_window(target.config) or length)
    return tuple((i * _LARGE_PRIME + 11) % target.vocab_size for i in range(max(length, 2)))


def _check_rows(reason: str | None, rows: int, num_tokens: int) -> None:
    if reason is None:
        return
    if reason == "partial_capture" and rows == 0:
        raise EngineError(
            "self-check: hook dead: the target answered but no row was captured; the plugin's "
            "hook is not active in SGLang's scheduler (its log says whether it was loaded)"
        )
    raise EngineError(f"self-check: {rows} of {num_tokens} rows captured: {reason}")


def _difference(
    states: torch.Tensor, lm_head: torch.Tensor, token_ids: tuple[int, ...], reported: list[float]
) -> float:
    """Mean absolute difference between log-probabilities of states [n, H] and the reported ones."""
    logprobs = torch.log_softmax(states @ lm_head.float().T, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((chosen - torch.tensor(reported)).abs().mean())


def _explain(
    states: torch.Tensor,
    lm_head: torch.Tensor,
    norm_weight: torch.Tensor | None,
    token_ids: tuple[int, ...],
    reported: list[float],
    allowed: float,
) -> str:
    if norm_weight is not None:
        normed = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = normed * norm_weight.float()
        if _difference(normed, lm_head, token_ids[-len(reported) :], reported) <= allowed:
            return (
                "Pre-norm capture: they agree once the final norm is applied, so this release of "
                "SGLang hands out states from before the norm"
            )
    return "The states are of other tokens, other weights or another layer than the last"
