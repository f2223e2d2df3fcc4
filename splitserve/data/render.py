"""Conversations to token ids, through the tokenizer's own chat template.

The ids are those of the server's chat endpoint. Where supervision begins and ends is decided on
tokens, never by looking for a marker in the text: a user may quote the assistant's header, and an
answer may quote the end of a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from splitserve.data.refusal import Reason, RowRefused

Messages = Sequence[Mapping[str, str]]

_OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


class ChatRenderer:
    """Renders messages with one tokenizer and one set of template arguments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        chat_template_kwargs: further arguments of the template, such as `enable_thinking`.
        system_prompt: put in front of conversations that have no system message of their own;
            None leaves it to the template.

    Raises:
        ValueError: the tokenizer has no usable template, an argument is not the template's to
            have, or the template does not show the system prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._system_prompt = system_prompt
        refused = sorted(_OWN_ARGUMENTS & self._kwargs.keys())
        if refused:
            raise ValueError(
                f"data.chat_template_kwargs: {', '.join(refused)} cannot be set, since it would "
                "change what is rendered for the server; allowed are arguments that the chat "
                "template itself reads: remove the rest"
            )
        try:
            tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f"target: the tokenizer {tokenizer.name_or_path!r} has no single default chat "
                f"template ({error}); use an instruction-tuned target, or put its "
                "chat_template.jinja into the target's folder"
            ) from error
        if system_prompt is not None:
            self._check_system_prompt(system_prompt)

    def prompt_ids(self, messages: Messages) -> tuple[int, ...]:
        """The ids that the target is to answer, generation prompt included.

        Raises:
            RowRefused: the last message is the assistant's, or the template fails.
        """
        if messages[-1]["role"] == "assistant":
            raise RowRefused(Reason.NOT_A_QUESTION, "the last message is the assistant's")
        return self._render(messages, add_generation_prompt=True)

    def render_conversation(self, messages: Messages) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The ids of a conversation that ends in an answer, and which of them are supervised.

        Supervised are the last answer and the token that ends its turn. What the template puts
        after that token is cut off: the target never generates it.

        Returns:
            ids and loss mask, of the same length.

        Raises:
            RowRefused: there is no answer, or its tokens cannot be told from those around it.
            ValueError: the template does not close a turn with a token of its own.
        """
        if messages[-1]["role"] != "assistant":
            raise RowRefused(Reason.NOT_AN_ANSWER, "the last message is not the assistant's")
        if not messages[-1]["content"].strip():
            raise RowRefused(Reason.EMPTY_ANSWER, "the assistant's last message is empty")
        if len(messages) == 1:
            raise RowRefused(Reason.NOT_AN_ANSWER, "nothing comes before the answer")
        prompt = self._render(messages[:-1], add_generation_prompt=True)
        whole = self._render(messages, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            first = next(
                (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b),
                len(whole),
            )
            raise RowRefused(
                Reason.PROMPT_NOT_A_PREFIX,
                f"the tokens of prompt and answer leave the prompt's at position {first} of "
                f"{len(prompt)}",
                token_ids=whole,
            )
        closing = self.closing_ids
        start_of_closing = len(whole) - len(closing)
        if start_of_closing <= len(prompt) or whole[start_of_closing:] != closing:
            raise RowRefused(
                Reason.ANSWER_END_MERGED,
                f"the last tokens are {list(whole[-len(closing) :])}, a turn is closed with "
                f"{list(closing)}",
                token_ids=whole,
            )
        ids = whole[: start_of_closing + 1]
        return ids, tuple(i >= len(prompt) for i in range(len(ids)))

    @cached_property
    def closing_ids(self) -> tuple[int, ...]:
        """The tokens with which the template closes the assistant's turn; the first ends it.

        Read off two short conversations that differ in their answer alone.

        Raises:
            ValueError: the first of these tokens is not a special one, so it may merge with the
                answer.
        """
        one, other = (
            self._render(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            )
            for answer in ("0", "z")
        )
        length = 0
        while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
            length += 1
        closing = one[len(one) - length :]
        added = self._tokenizer.added_tokens_decoder
        if not closing or closing[0] not in added:
            raise ValueError(
                "target: the chat template closes an assistant turn with "
                f"{self._tokenizer.decode(list(closing))!r}, which does not start with an added "
                "token such as an end-of-turn marker; rows that bring their own answer cannot be "
                "used with it: remove the answers and let the target write them"
            )
        return closing

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included, for messages to the user."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _with_system_prompt(self, messages: Messages) -> list[dict[str, str]]:
        rows = [dict(message) for message in messages]
        if self._system_prompt is not None and rows[0]["role"] != "system":
            rows.insert(0, {"role": "system", "content": self._system_prompt})
        return rows

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> tuple[int, ...]:
        try:
            ids = self._tokenizer.apply_chat_template(
                self._with_system_prompt(messages),
                tokenize=True,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
                **self._kwargs,
            )
        except (TemplateError, KeyError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RowRefused(
                Reason.TEMPLATE_ERROR, f"roles {roles}: {type(error).__name__}: {error}"
            ) from error
        return tuple(ids)

    def _check_system_prompt(self, system_prompt: str) -> None:
        probe = [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": "a"},
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                probe, tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except TemplateError as error:
            raise ValueError(
                f"data.system_prompt: {system_prompt!r} is refused by the target's chat template "
                f"({error}); set it to null"
            ) from error
        if system_prompt.strip() not in text:
            raise ValueError(
                f"data.system_prompt: {system_prompt!r} does not appear in what the target's chat "
                "template renders; set it to null, or put the text into the user's messages"
            )
