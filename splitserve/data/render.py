"""Conversations to token ids and loss masks, through the tokenizer's own chat template.

The ids are those of the server's chat endpoint. What is supervised is decided on tokens, from
places in the rendered text that `splitserve.data.trace` has proved; never by looking for a
marker in the text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from splitserve.data.conversation import Message, plain_text
from splitserve.data.encode import Encoded, Encoder
from splitserve.data.refusal import Reason, RowRefused
from splitserve.data.trace import NotTraced, TemplateTracer, Trace, Turn

Messages = Sequence[Mapping[str, Any]]

_OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_TEMPLATE_ERRORS = (TemplateError, KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What the endpoint takes for a fault of the messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens.

    token_ids is int64 [S]; loss_mask is bool [S].
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    num_merged_starts: int = 0
    """Answers whose first characters share a token with the header, which is not supervised."""


class ChatRenderer:
    """Renders messages with one tokenizer and one set of template arguments.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        chat_template_kwargs: further arguments of the template, such as `enable_thinking`.
        system_prompt: put in front of conversations that have no system message of their own;
            None leaves it to the template.
        end_of_turn_ids: further tokens that end a turn, as the target's generation settings say.
        last_answer_only: supervise only the last message of the assistant.

    Raises:
        ValueError: the tokenizer has no usable template, an argument is not the template's to
            have, or the template does not show the system prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        end_of_turn_ids: Sequence[int] = (),
        last_answer_only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._system_prompt = system_prompt
        self._last_answer_only = last_answer_only
        refused = sorted(_OWN_ARGUMENTS & self._kwargs.keys())
        if refused:
            raise ValueError(
                f"data.chat_template_kwargs: {', '.join(refused)} cannot be set, since it would "
                "change what is rendered for the server; allowed are arguments that the chat "
                "template itself reads: remove the rest"
            )
        try:
            self._source = tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f"target: the tokenizer {tokenizer.name_or_path!r} has no single default chat "
                f"template ({error}); use an instruction-tuned target, or put its "
                "chat_template.jinja into the target's folder"
            ) from error
        try:
            self._list_content = _reads_content_parts(self._source)
        except TemplateError as error:
            raise ValueError(
                f"target: the chat template of the tokenizer {tokenizer.name_or_path!r} is no "
                f"template that jinja2 reads ({error}); allowed: the model's own chat template; "
                "restore its chat_template.jinja or tokenizer_config.json"
            ) from error
        self._encoder = Encoder(tokenizer)
        self._tracers: dict[str, TemplateTracer] = {}
        self._ends = {*end_of_turn_ids, tokenizer.eos_token_id} - {None}
        special = {t.content: i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        ends = {str(tokenizer.convert_ids_to_tokens(i)): i for i in self._ends}
        self._markers = special | ends
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._generation_prompts: dict[bool, str] = {}
        if system_prompt is not None:
            self._check_system_prompt(system_prompt)

    def prompt_ids(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """The ids that the target is to answer, generation prompt included.

        Raises:
            RowRefused: the last message is the assistant's, or the template fails.
        """
        if messages[-1]["role"] == "assistant":
            raise RowRefused(Reason.NOT_A_QUESTION, "the last message is the assistant's")
        rows = self._as_endpoint(messages)
        return tuple(self._encoder.ids(self._text(rows, tools, True)[0]))

    def render_text(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[tuple[int, int, int], ...]]:
        """The rendered text and, for each answer, the characters that are supervised.

        Returns:
            the text, and (begin, end, end token's id or -1) in characters for each answer that
            is not empty, ascending.

        Raises:
            RowRefused: the template fails, leaves a message out or changes an answer, or there
                is no answer.
        """
        rows = self._as_endpoint(messages)
        if not any(row["role"] == "assistant" for row in rows):
            raise RowRefused(Reason.NO_ANSWER, "no message is the assistant's")
        text, source, variables = self._text(rows, tools, False)
        try:
            trace = self._tracer(source).trace(text, rows, variables)
        except NotTraced as error:
            raise RowRefused(Reason.ANSWER_NOT_TRACED, str(error)) from error
        except _TEMPLATE_ERRORS as error:
            raise RowRefused(
                Reason.ANSWER_NOT_TRACED, f"the chat template fails on marked text: {error}"
            ) from error
        _refuse_missing(trace, rows, text)
        _refuse_unmarked_quotes(trace, rows, self._marker_pattern)
        prompt = self._generation_prompt(bool(tools))
        turns = trace.turns[-1:] if self._last_answer_only else trace.turns
        spans = tuple(self._span(text, turn, prompt) for turn in turns)
        if not spans:
            raise RowRefused(Reason.EMPTY_ANSWER, "every message of the assistant is empty")
        return text, spans

    def render_conversation(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rendered:
        """The ids of a conversation and which of them are supervised.

        Supervised is what the target itself has to write: from the end of the generation prompt,
        or of what the template puts after it, up to and including the token that ends the turn.

        Raises:
            RowRefused: see `render_text`; also where the end of a turn is not a token of its own.
        """
        return self.render_batch([(messages, tools)])[0].unwrap()

    def render_batch(
        self, rows: Sequence[tuple[Messages, Sequence[Mapping[str, Any]]]]
    ) -> list[Outcome]:
        """`render_conversation` for several rows, tokenized together."""
        outcomes: list[Outcome] = []
        texts: list[str] = []
        todo: list[tuple[int, tuple[tuple[int, int, int], ...]]] = []
        for messages, tools in rows:
            try:
                text, spans = self.render_text(messages, tools)
            except RowRefused as refused:
                outcomes.append(Outcome(refused=refused))
                continue
            todo.append((len(outcomes), spans))
            texts.append(text)
            outcomes.append(Outcome())
        for (place, spans), encoding in zip(todo, self._encoder.encode(texts), strict=True):
            try:
                outcomes[place] = Outcome(rendered=_masked(encoding, spans))
            except RowRefused as refused:
                outcomes[place] = Outcome(refused=refused)
        return outcomes

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, special ones included, for messages to the user."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    # --- messages and template --------------------------------------------------------------------

    def _as_endpoint(self, messages: Messages) -> list[Message]:
        """The messages as SGLang's chat endpoint hands them to the template.

        Source: sglang 0.5.23, srt/entrypoints/openai/serving_chat.py, _apply_jinja_template.
        """
        rows = []
        for message in messages:
            row = {key: value for key, value in message.items() if value is not None}
            content = row.get("content", "")
            flat = not self._list_content or row["role"] == "tool"
            if not isinstance(content, str) and flat:
                content = plain_text({"content": content})
            row["content"] = content
            if calls := row.get("tool_calls"):
                row["tool_calls"] = [_endpoint_call(call) for call in calls]
            rows.append(row)
        if self._system_prompt is not None and rows[0]["role"] != "system":
            rows.insert(0, {"role": "system", "content": self._system_prompt})
        return rows

    def _text(
        self, rows: list[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> tuple[str, str, dict[str, Any]]:
        """The rendered text, the template's source and the variables that it was given."""
        wrapped = [_endpoint_tool(tool) for tool in tools] or None
        try:
            return self._apply(rows, wrapped, add_generation_prompt)
        except _TEMPLATE_ERRORS as error:
            if wrapped:
                # Some templates want tools without OpenAI's wrapping; the endpoint tries that next.
                bare = [tool["function"] for tool in wrapped]
                try:
                    return self._apply(rows, bare, add_generation_prompt)
                except _TEMPLATE_ERRORS:
                    pass
            roles = ", ".join(row["role"] for row in rows)
            roles = roles if len(roles) <= 120 else f"{roles[:117]}..."
            raise RowRefused(
                Reason.TEMPLATE_ERROR, f"roles {roles}: {type(error).__name__}: {error}"
            ) from error

    def _apply(
        self, rows: list[Message], tools: list[Any] | None, add_generation_prompt: bool
    ) -> tuple[str, str, dict[str, Any]]:
        text = self._tokenizer.apply_chat_template(
            rows,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._kwargs,
        )
        variables = {
            **self._tokenizer.special_tokens_map,
            **self._kwargs,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return text, self._tokenizer.get_chat_template(None, tools), variables

    def _tracer(self, source: str) -> TemplateTracer:
        if source not in self._tracers:
            self._tracers[source] = TemplateTracer(_compile_jinja_template(source), source)
        return self._tracers[source]

    def _generation_prompt(self, with_tools: bool) -> str:
        """What the template writes for an answer to begin; empty where a question ends in it."""
        if with_tools not in self._generation_prompts:
            self._generation_prompts[with_tools] = self._probe_generation_prompt(with_tools)
        return self._generation_prompts[with_tools]

    def _probe_generation_prompt(self, with_tools: bool) -> str:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] * with_tools
        for roles in (("user",), ("system", "user")):
            rows = [{"role": role, "content": "a"} for role in roles]
            try:
                without = self._text(rows, tools, False)[0]
                whole = self._text(rows, tools, True)[0]
            except RowRefused:
                continue
            if whole.startswith(without):
                return whole[len(without) :]
        return ""

    def _span(self, text: str, turn: Turn, generation_prompt: str) -> tuple[int, int, int]:
        """Begin, end and end token of what is supervised of one turn."""
        header = text[turn.begin : turn.first]
        if text.startswith(generation_prompt, turn.begin):
            # Also where the answer's own text, such as a thought's tag, is what the prompt ends in.
            shared = len(generation_prompt)
        else:
            same = (a == b for a, b in zip(generation_prompt, header, strict=False))
            shared = sum(1 for _ in itertools.takewhile(bool, same))
        gap = header[shared:]
        # White space after the header belongs to the answer's first token; a thought's tag or a
        # tool call's is the target's to write. Anything else the template has put in by itself.
        begin = turn.begin + shared if not gap.strip() or not turn.first_is_answer else turn.first
        tail = text[turn.last : turn.end]
        found = list(self._marker_pattern.finditer(tail))
        ends = [m for m in found if self._markers[m[0]] in self._ends]
        closing = ends[0] if ends else None
        if closing is None and found and not tail[found[-1].end() :].strip():
            closing = found[-1]
        if closing is not None:
            return begin, turn.last + closing.end(), self._markers[closing[0]]
        after = self._marker_pattern.match(text, turn.end)
        if after is not None and self._markers[after[0]] in self._ends:
            # The next turn's header is what ends this one.
            return begin, after.end(), self._markers[after[0]]
        return begin, turn.last + len(tail.rstrip()), -1

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row: tokens, or a refusal."""

    rendered: Rendered | None = None
    refused: RowRefused | None = None

    def unwrap(self) -> Rendered:
        """The tokens; raises the refusal where there are none."""
        if self.refused is not None:
            raise self.refused
        assert self.rendered is not None, "a row was neither rendered nor refused"
        return self.rendered


def _endpoint_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with the fields that the endpoint gives every one.

    Source: sglang 0.5.23, srt/entrypoints/openai/protocol.py, ToolCall.
    """
    return {"id": call.get("id"), "index": None, "type": "function", "function": call["function"]}


def _endpoint_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that the endpoint gives every one; the function's own order stays.

    Source: sglang 0.5.23, srt/entrypoints/openai/protocol.py, Tool and Function.
    """
    given = tool.get("function", tool)
    known = ("description", "name", "parameters", "strict", "defer_loading")
    optional = known[3:]
    function = {
        k: v for k, v in given.items() if k in known and (k not in optional or v is not None)
    }
    for key in known[:3]:
        function.setdefault(key, None)
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": None}


def _masked(encoded: Encoded, spans: Sequence[tuple[int, int, int]]) -> Rendered:
    """Tokens and mask of a text whose answers are known in characters.

    What follows the last turn is cut off: the target never writes it.
    """
    ids, starts, stops = encoded.ids, encoded.starts, encoded.stops
    mask = np.zeros(len(ids), dtype=bool)
    merged = 0
    # Places ascend, so each span is a run of tokens.
    for begin, end, closing_id in spans:
        low, high = (int(place) for place in np.searchsorted(starts, (begin, end)))
        if low > 0 and stops[low - 1] > begin:
            merged += 1
        if closing_id < 0:
            while high > low and stops[high - 1] > end:
                high -= 1
        elif high <= low or ids[high - 1] != closing_id:
            raise RowRefused(
                Reason.ANSWER_END_MERGED,
                f"the turn ends in token {int(ids[high - 1])}, not in {closing_id}",
                token_ids=ids.tolist(),
            )
        mask[low:high] = True
    return Rendered(ids[:high], mask[:high], merged)


def _refuse_missing(trace: Trace, rows: Sequence[Message], text: str) -> None:
    """Refuse a row of which the template leaves a message out, but for an empty one."""
    for i in trace.missing:
        content = plain_text(rows[i]).strip()
        blank = not content and not rows[i].get("tool_calls")
        # Some templates write the system message before their loop.
        if not blank and (rows[i]["role"] == "assistant" or content not in text):
            raise RowRefused(
                Reason.MESSAGE_NOT_RENDERED,
                f"message {i} of the {rows[i]['role']} is not in what the chat template renders",
            )


def _refuse_unmarked_quotes(
    trace: Trace, rows: Sequence[Message], markers: re.Pattern[str]
) -> None:
    """Refuse markers quoted in a tool call's keys, the one text of an answer that has no marks."""
    for turn in trace.turns:
        for call in rows[turn.message].get("tool_calls", ()):
            if any(markers.search(key) for key in _keys(call["function"]["arguments"])):
                raise RowRefused(
                    Reason.ANSWER_NOT_TRACED, "a tool call's argument is named like a special token"
                )


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [str(key) for key in value] + [k for v in value.values() for k in _keys(v)]
    if isinstance(value, list | tuple):
        return [key for item in value for key in _keys(item)]
    return []


def _reads_content_parts(source: str) -> bool:
    """Whether the endpoint hands lists of content parts to this template as they are.

    Source: sglang 0.5.23, srt/parser/jinja_template_utils.py, detect_jinja_template_content_format.
    """
    if any(word in source for word in ("image", "audio", "video", "vision")):
        return True
    tree = _compile_jinja_template(source).environment.parse(source)
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    elif isinstance(node, nodes.Getattr):
        named = node.attr == "content"
    else:
        return False
    return named and isinstance(node.node, nodes.Name) and node.node.name in ("message", "msg", "m")
