"""Prompts from a JSON-lines file, checked line by line before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
FORMAT = '{"id": "...", "domain": "...", "messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered, or one that ends in an answer."""

    id: str
    domain: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: str | Path, field: str = "data.prompts") -> list[Prompt]:
    """Read a prompts file through Hugging Face `datasets`.

    Args:
        path: JSON lines, UTF-8, each an object with `id`, `messages` and optionally `domain`.
        field: the setting that errors name.

    Raises:
        ValueError: file missing, empty or not UTF-8, or a malformed line (with its number).
    """
    rows = list(_checked_rows(Path(path), field))
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(rows)
    return [
        Prompt(row["id"], row["domain"], tuple(dict(m) for m in row["messages"])) for row in table
    ]


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
                raise refuse(f"not JSON ({error.msg} at column {error.colno})", number) from error
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
    """What is wrong with a row, or nothing."""
    if not isinstance(row, dict):
        return f"a JSON {type(row).__name__}, not an object"
    if not isinstance(row.get("id"), str | int) or row["id"] == "":
        return "no id"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages is missing or empty"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"a message without a role of {', '.join(ROLES)}"
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return f"the {message['role']}'s message has no text"
    return ""
