"""Training samples and the account of the rows that did not become one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.anchors import counter_rng
from splitserve.data.length import supervised_spans
from splitserve.data.refusal import Reason, RowRefused


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with its answer, and which tokens the draft is taught."""

    sample_id: str
    prompt_id: str
    domain: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """One entry a token."""
    truncated: bool = False
    """The answer did not fit and was cut."""

    @property
    def supervised(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of every run of tokens that the draft is taught, ascending."""
        spans = supervised_spans(np.array(self.loss_mask, dtype=bool))
        return tuple((begin, end) for begin, end in spans.tolist())


def sample_id_of(prompt_id: str, setting: int) -> str:
    """The name of a prompt under the sampling setting with that index."""
    return f"{prompt_id}/{setting}"


def in_share(prompt_id: str, setting: int, share: float, seed: int) -> bool:
    """Whether a prompt is answered under a sampling setting that takes a share of them."""
    return bool(counter_rng("share", seed, prompt_id, setting).random() < share)


def has_anchor(loss_mask: Sequence[bool]) -> bool:
    """Whether two neighbouring tokens are supervised: one to draft from and one to draft."""
    return any(a and b for a, b in itertools.pairwise(loss_mask))


def make_sample(
    sample_id: str,
    prompt_id: str,
    domain: str,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    max_tokens: int,
    end_of_turn_ids: Collection[int] = (),
) -> Sample:
    """The sample of a prompt and the response that the target gave.

    Every token of the response is supervised, its end-of-turn token included, and none of the
    prompt. Tokens after the first end-of-turn token are left out.

    Args:
        max_tokens: prompt and response together; what is over is cut off the response's end.
        end_of_turn_ids: the tokens that end a response.

    Raises:
        RowRefused: empty_answer, prompt_too_long or no_anchor.
    """
    response = _until_end_of_turn(response_ids, end_of_turn_ids)
    token_ids = (*prompt_ids, *response)
    loss_mask = (False,) * len(prompt_ids) + (True,) * len(response)
    if not response:
        raise RowRefused(
            Reason.EMPTY_ANSWER,
            "the response has no tokens",
            token_ids=token_ids,
            loss_mask=loss_mask,
        )
    return limit_sample(
        Sample(sample_id, prompt_id, domain, token_ids, loss_mask), max_tokens=max_tokens
    )


def limit_sample(sample: Sample, *, max_tokens: int) -> Sample:
    """The sample cut to a number of tokens, once it is sure that something can be learned from it.

    Raises:
        RowRefused: prompt_too_long or no_anchor.
    """
    assert len(sample.token_ids) == len(sample.loss_mask), (
        f"{sample.sample_id}: {len(sample.token_ids)} tokens, {len(sample.loss_mask)} mask entries"
    )
    if not has_anchor(sample.loss_mask):
        raise RowRefused(
            Reason.NO_ANCHOR,
            f"{sum(sample.loss_mask)} of {len(sample.token_ids)} tokens are supervised, no two "
            "of them neighbours",
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
        )
    token_ids, loss_mask = sample.token_ids[:max_tokens], sample.loss_mask[:max_tokens]
    if not has_anchor(loss_mask):
        raise RowRefused(
            Reason.PROMPT_TOO_LONG,
            f"no two supervised tokens lie within the first {max_tokens} of "
            f"{len(sample.token_ids)} (data.max_tokens)",
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
        )
    return Sample(
        sample.sample_id,
        sample.prompt_id,
        sample.domain,
        token_ids,
        loss_mask,
        sample.truncated or len(token_ids) < len(sample.token_ids),
    )


def _until_end_of_turn(response_ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, ...]:
    for index, token in enumerate(response_ids):
        if token in end_ids:
            return tuple(response_ids[: index + 1])
    return tuple(response_ids)
