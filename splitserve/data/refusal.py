"""Why a row cannot become a training sample."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The named reasons under which a row is dropped before its states are asked for."""

    TEMPLATE_ERROR = "template_error"
    """The chat template refuses these messages."""
    NOT_A_QUESTION = "not_a_question"
    """A prompt whose last message is the assistant's."""
    NOT_AN_ANSWER = "not_an_answer"
    """A conversation whose last message is not the assistant's."""
    EMPTY_ANSWER = "empty_answer"
    """Nothing was answered."""
    PROMPT_NOT_A_PREFIX = "prompt_not_a_prefix"
    """Text and prompt together do not begin with the prompt's tokens, as when the tokenizer
    merges the answer's first characters with the header before it."""
    ANSWER_END_MERGED = "answer_end_merged"
    """The conversation does not end in the tokens with which the template closes a turn."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt leaves no room for two tokens of the answer."""
    NO_ANCHOR = "no_anchor"
    """No two neighbouring tokens are supervised."""


class RowRefused(ValueError):  # noqa: N818 - an expected outcome, as its name says
    """One row cannot be used; the run goes on without it.

    Attributes:
        reason: the name under which the row is counted.
        token_ids, loss_mask: what was there when it was refused; may be empty.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str,
        *,
        token_ids: tuple[int, ...] = (),
        loss_mask: tuple[bool, ...] = (),
    ) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
        self.token_ids = token_ids
        self.loss_mask = loss_mask
