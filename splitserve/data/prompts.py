"""Prompts, checked row by row before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from splitserve.data.conversation import Conversation, parse_row
from splitserve.data.refusal import RowRefused
from splitserve.data.sources import SUFFIXES, parse_json, read_rows
from splitserve.errors import UserError

T = TypeVar("T")

ROLES = ("system", "user", "assistant", "tool")
FORMAT = '{"id": "...", "domain": "...", "messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered, or one that ends in an answer."""

    id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    """Of a row that came as tokens: what is to be answered, without messages."""
    held_out: bool = False
    """A conversation that was cut off before its last answer."""


MOST_PROMPTS = 1_000_000
"""Prompts that a run may hold: with their answers, some gigabytes."""


def read_prompts(path: str | Path, field: str = "data.prompts") -> list[Prompt]:
    """Read prompts, all of which must be good.

    Args:
        path: JSON lines, UTF-8, each an object with `id`, `messages` and optionally `domain`; or
            any other source that `splitserve.data.sources` reads.
        field: the setting that errors name.

    Raises:
        ValueError: file missing, empty or not UTF-8, a malformed row (with its number), or more
            rows than a run may hold.
    """
    if Path(path).suffix == ".jsonl" or not _is_source(str(path)):
        return [
            Prompt(row["id"], row["domain"], tuple(row["messages"]))
            for row in _bounded(_checked_rows(Path(path), field), path, field)
        ]
    prompts: dict[str, Prompt] = {}
    for raw in _bounded(read_rows(str(path), field), path, field):
        try:
            row = parse_row(parse_json(raw), raw.place, "general")
        except RowRefused as refused:
            raise UserError(
                field, f"{path}, {raw.place}", "rows that are conversations", refused.detail
            ) from refused
        if not isinstance(row, Conversation) or row.tools:
            raise UserError(
                field, f"{path}, {raw.place}", "messages without tools", "leave this row out"
            )
        if row.id in prompts:
            raise UserError(field, f"{path}, {raw.place}", "ids of their own", f"{row.id!r} is not")
        prompts[row.id] = Prompt(row.id, row.domain, row.messages)
    if not prompts:
        raise UserError(field, str(path), "a source with prompts", "it has none")
    return list(prompts.values())


def _bounded(rows: Iterator[T], path: str | Path, field: str) -> Iterator[T]:
    for number, row in enumerate(rows):
        if number == MOST_PROMPTS:
            raise UserError(
                field,
                str(path),
                f"at most {MOST_PROMPTS} prompts, which a run holds in memory",
                "have them answered by `splitserve data generate` and give its folder as "
                "data.conversations, which may be of any size",
            )
        yield row


def _is_source(path: str) -> bool:
    return path.startswith("hf:") or Path(path).is_dir() or path.endswith(SUFFIXES)


def _checked_rows(path: Path, field: str) -> Iterator[dict[str, Any]]:
    def refuse(what: str, line: int | None = None) -> ValueError:
        place = f"{path}" if line is None else f"{path}, line {line}"
        return ValueError(f"{field}: {place}: {what}; each line must look like {FORMAT}")

    if not path.is_file():
        raise refuse("there is no such file")
    seen: dict[str, int] = {}
    number = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise refuse(f"not UTF-8 ({error.reason} at byte {error.start})", number) from error
            if not text:
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise refuse(
                    f"found {_shown(text)}, not JSON ({error.msg} at column {error.colno})", number
                ) from error
            if problem := _problem(row):
                raise refuse(problem, number)
            name = str(row["id"])
            if name in seen:
                raise refuse(f"id {name!r} was used on line {seen[name]}", number)
            seen[name] = number
            yield {
                "id": name,
                "domain": str(row.get("domain") or "general"),
                "messages": [{"role": m["role"], "content": m["content"]} for m in row["messages"]],
            }
    if not seen:
        raise refuse("the file has no prompts")


def _problem(row: Any) -> str:
    """What is wrong with a row and what is allowed, or nothing."""
    if not isinstance(row, dict):
        return f"found a JSON {type(row).__name__}, not an object"
    name = row.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name).strip():
        return f"id: found {_shown(name)}, allowed is a text or a whole number"
    domain = row.get("domain")
    if domain is not None and not isinstance(domain, str):
        return f"domain: found {_shown(domain)}, allowed is a text"
    if not _is_unicode(str(name)) or not _is_unicode(domain or ""):
        return "id or domain: found half of a surrogate pair, allowed is text that UTF-8 can hold"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return f"messages: found {_shown(messages)}, allowed is a list of one or more"
    for message in messages:
        if problem := _message_problem(message):
            return problem
    return ""


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f"messages: found {_shown(message)}, allowed is an object with role and content"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"role: found {_shown(role)}, allowed are {', '.join(ROLES)}"
    if not isinstance(content, str) or not content.strip():
        return f"the {role}'s content: found {_shown(content)}, allowed is a text with characters"
    if not _is_unicode(content):
        return (
            f"the {role}'s content: found half of a surrogate pair, allowed is text that UTF-8 "
            "can hold"
        )
    return ""


def _is_unicode(text: str) -> bool:
    """Whether a tokenizer can take the text: JSON may escape one half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: Any, limit: int = 60) -> str:
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
