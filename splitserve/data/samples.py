"""Training samples and the account of the rows that did not become one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.anchors import counter_rng
from splitserve.data.length import Document, limit, supervised_spans
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
    document = limit(sample_id, domain, np.array(token_ids), np.array(loss_mask), max_tokens)
    return sample_of(document, sample_id, prompt_id)


def sample_of(document: Document, sample_id: str, prompt_id: str) -> Sample:
    """A document, which has its length already, as a sample."""
    return Sample(
        sample_id,
        prompt_id,
        document.domain,
        tuple(document.token_ids.tolist()),
        tuple(document.loss_mask.tolist()),
        document.truncated,
    )


def _until_end_of_turn(response_ids: Sequence[int], end_ids: Collection[int]) -> tuple[int, ...]:
    for index, token in enumerate(response_ids):
        if token in end_ids:
            return tuple(response_ids[: index + 1])
    return tuple(response_ids)
