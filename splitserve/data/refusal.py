"""Why a row cannot become a training sample."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Reason(StrEnum):
    """The named reasons under which a row is dropped before its states are asked for."""

    MALFORMED_ROW = "malformed_row"
    """The row does not have the fields of its format, or they have other types."""
    UNKNOWN_ROLE = "unknown_role"
    """A message's role is none that a chat endpoint knows."""
    UNSUPPORTED_CONTENT = "unsupported_content"
    """Content that is not text, such as an image, or text that UTF-8 cannot hold."""
    BAD_TOOL_CALL = "bad_tool_call"
    """A tool call without a name, or whose arguments are not a JSON object."""
    TEMPLATE_ERROR = "template_error"
    """The chat template refuses these messages."""
    MESSAGE_NOT_RENDERED = "message_not_rendered"
    """The chat template leaves a message out."""
    ANSWER_NOT_TRACED = "answer_not_traced"
    """The chat template changes an answer so that its tokens cannot be told for certain."""
    NOT_A_QUESTION = "not_a_question"
    """A prompt whose last message is the assistant's."""
    NO_ANSWER = "no_answer"
    """A conversation without a message of the assistant."""
    EMPTY_ANSWER = "empty_answer"
    """Nothing was answered."""
    ANSWER_END_MERGED = "answer_end_merged"
    """The end of a turn is not a token of its own."""
    EVAL_LEAK = "eval_leak"
    """The row holds a prompt that drafts are measured with."""
    BAD_TOKENS = "bad_tokens"
    """Token ids outside of the vocabulary, or a mask of another length."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt leaves no room for two tokens of the answer."""
    NO_ANCHOR = "no_anchor"
    """No two neighbouring tokens are supervised."""


ZERO_MASK = (Reason.NO_ANSWER, Reason.EMPTY_ANSWER, Reason.NO_ANCHOR)
"""Reasons of rows that leave nothing to supervise; many of them tell of a wrong template."""


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
        token_ids: Sequence[int] = (),
        loss_mask: Sequence[bool] = (),
    ) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail
        self.token_ids = tuple(token_ids)
        self.loss_mask = tuple(loss_mask)

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is otherwise made anew from its text alone when it comes from a process.
        return _again, (self.reason, self.detail, self.token_ids, self.loss_mask)


def _again(
    reason: Reason, detail: str, token_ids: Sequence[int], loss_mask: Sequence[bool]
) -> RowRefused:
    return RowRefused(reason, detail, token_ids=token_ids, loss_mask=loss_mask)
