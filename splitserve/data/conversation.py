"""Rows of any supported format, as conversations the way a chat endpoint sees them.

A row is a JSON object in one of four formats, told apart by its fields:

    {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}     OpenAI
    {"conversations": [{"from": "human", "value": ...}, ...]}              ShareGPT
    {"prompt": "..." or [messages], "response": "..."}                     plain prompt
    {"input_ids": [...], "loss_mask": [...]}                               pre-tokenized

`id`, `domain`, `tools` and `system` may stand beside each of the first three.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from splitserve.data.refusal import Reason, RowRefused

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "developer", "function")
FORMATS = ("messages", "conversations", "prompt", "input_ids")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where datasets keep what was thought before the answer; the endpoint calls it the first."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with the tools that they may call."""

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that comes as token ids.

    token_ids is int64 [S]; loss_mask is bool [S].
    """

    id: str
    domain: str
    token_ids: np.ndarray
    loss_mask: np.ndarray


def parse_row(row: Any, default_id: str, default_domain: str) -> Conversation | TokenRow:
    """The conversation, or the tokens, of one row.

    Args:
        row: what the source gave.
        default_id, default_domain: used where the row has none of its own.

    Raises:
        RowRefused: malformed_row, unknown_role, unsupported_content, bad_tool_call, bad_tokens.
    """
    if not isinstance(row, Mapping):
        raise _malformed("row", row, "a JSON object")
    name = _text_or(row, "id", default_id)
    domain = _text_or(row, "domain", default_domain)
    if row.get("messages") is not None:
        messages = [_message(m) for m in _list(row, "messages")]
    elif row.get("conversations") is not None:
        messages = [_sharegpt_message(m) for m in _list(row, "conversations")]
    elif row.get("prompt") is not None:
        messages = _prompt_messages(row)
    elif (ids := row.get("input_ids", row.get("token_ids"))) is not None:
        return _token_row(row, ids, name, domain)
    else:
        raise _malformed("row", sorted(map(str, row)), f"one of the fields {', '.join(FORMATS)}")
    if (system := row.get("system")) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _content(system, "system")})
    return Conversation(name, domain, tuple(messages), _tools(row.get("tools")))


def plain_text(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content)


def folded(text: str) -> str:
    """A text with case and white space made equal, for comparing."""
    return " ".join(text.casefold().split())


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise _malformed("messages", message, "objects with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowRefused(
            Reason.UNKNOWN_ROLE, f"role: found {shown(role)}, allowed are {', '.join(ROLES)}"
        )
    made: Message = {"role": role, "content": _content(message.get("content"), role)}
    if role == "assistant":
        for key in REASONING_KEYS:
            if isinstance(thought := message.get(key), str):
                made["reasoning_content"] = _unicode(thought, key)
                break
        if message.get("tool_calls"):
            made["tool_calls"] = [_tool_call(call) for call in _list(message, "tool_calls")]
    for key in ("name", "tool_call_id"):
        if isinstance(value := message.get(key), str):
            made[key] = _unicode(value, key)
    return made


def _content(content: Any, role: str) -> str | list[dict[str, str]]:
    """Text, or a list of text parts; nothing at all is the empty text, as for the endpoint."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, f"the {role}'s content")
    if not isinstance(content, list | tuple | np.ndarray):
        raise _malformed(f"the {role}'s content", content, "a text or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": _unicode(part, f"the {role}'s content")})
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text") or not isinstance(text, str):
            raise RowRefused(
                Reason.UNSUPPORTED_CONTENT,
                f"the {role}'s content has a part of type {shown(kind)}, allowed is text",
            )
        parts.append({"type": "text", "text": _unicode(text, f"the {role}'s content")})
    return parts


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowRefused(Reason.BAD_TOOL_CALL, f"found {shown(call)}, allowed is a function's name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise RowRefused(
                Reason.BAD_TOOL_CALL, f"arguments {shown(arguments)} are not JSON ({error.msg})"
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowRefused(
            Reason.BAD_TOOL_CALL, f"arguments {shown(arguments)} are not a JSON object"
        )
    made: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        made["id"] = call["id"]
    made["function"] = {"name": function["name"], "arguments": dict(arguments)}
    _unicode(json.dumps(made, ensure_ascii=False), "a tool call")
    return made


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise _malformed("tools", tools, f"a JSON list ({error.msg})") from error
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise _malformed("tools", tools, "a list of objects")
    return tuple(
        dict(t) if "function" in t else {"type": "function", "function": dict(t)} for t in tools
    )


def _sharegpt_message(message: Any) -> Message:
    if isinstance(message, Mapping) and "from" not in message:
        return _message(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("value"), str):
        raise _malformed("conversations", message, 'objects with the texts "from" and "value"')
    value = message["value"]
    role = _SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise RowRefused(
            Reason.UNKNOWN_ROLE,
            f"from: found {shown(message['from'])}, allowed are {', '.join(_SHAREGPT_ROLES)}",
        )
    if role != "function_call":
        return _message({**message, "role": role, "content": value})
    try:
        calls = json.loads(value)
    except json.JSONDecodeError as error:
        raise RowRefused(
            Reason.BAD_TOOL_CALL, f"function_call: {shown(value)} is not JSON ({error.msg})"
        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    return _message({"role": "assistant", "content": "", "tool_calls": calls})


def _prompt_messages(row: Mapping[str, Any]) -> list[Message]:
    prompt, response = row["prompt"], row.get("response", row.get("completion"))
    if isinstance(prompt, str):
        messages = [_message({"role": "user", "content": prompt})]
    elif isinstance(prompt, list | tuple) and len(prompt):
        messages = [_message(m) for m in prompt]
    else:
        raise _malformed("prompt", prompt, "a text or a list of messages")
    if isinstance(response, str):
        messages.append(_message({"role": "assistant", "content": response}))
    elif isinstance(response, list | tuple):
        messages += [_message(m) for m in response]
    elif response is not None:
        raise _malformed("response", response, "a text or a list of messages")
    return messages


def _token_row(row: Mapping[str, Any], ids: Any, name: str, domain: str) -> TokenRow:
    try:
        tokens = np.asarray(ids)
        mask = np.asarray(row.get("loss_mask", row.get("assistant_masks", ())))
    except ValueError as error:
        raise _malformed("input_ids", ids, "a list of whole numbers") from error
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise _malformed("input_ids", ids, "a list of whole numbers")
    if mask.shape != tokens.shape:
        raise RowRefused(
            Reason.BAD_TOKENS,
            f"loss_mask has {mask.size} entries for {tokens.size} input_ids, allowed is one each",
        )
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise RowRefused(
            Reason.BAD_TOKENS, f"loss_mask: found {shown(mask.tolist())}, allowed is 0 or 1"
        )
    return TokenRow(name, domain, tokens.astype(np.int64), mask.astype(bool))


def _list(row: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = row[key]
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        raise _malformed(key, value, "a list of one or more")
    return list(value)


def _text_or(row: Mapping[str, Any], key: str, default: str) -> str:
    value = row.get(key)
    if value is None or value == "":
        return default
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise _malformed(key, value, "a text or a whole number")
    return _unicode(str(value), key)


def _unicode(text: str, place: str) -> str:
    """The text, if a tokenizer can take it: JSON may escape one half of a surrogate pair."""
    if _SURROGATE.search(text):
        raise RowRefused(
            Reason.UNSUPPORTED_CONTENT,
            f"{place}: found half of a surrogate pair, allowed is text that UTF-8 can hold",
        )
    return text


def _malformed(key: str, value: Any, allowed: str) -> RowRefused:
    return RowRefused(Reason.MALFORMED_ROW, f"{key}: found {shown(value)}, allowed is {allowed}")


def shown(value: Any, limit: int = 60) -> str:
    """A value for a message to the user, cut to a length."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
