from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.data.prompts import Prompt, read_prompts


def row(**changes: Any) -> dict[str, Any]:
    whole = {"id": "a", "domain": "d", "messages": [{"role": "user", "content": "hi"}]}
    return {**whole, **changes}


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in row(id="b").items() if k != key}


def write(path: Path, *rows: Any) -> Path:
    lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_reads_rows_in_order_and_ignores_other_keys(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "x"}]
    path = write(tmp_path / "p.jsonl", row(id="b", answer=1), row(id="a", messages=messages))
    assert tuple(read_prompts(path)) == (
        Prompt("b", "d", ({"role": "user", "content": "hi"},)),
        Prompt("a", "d", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})),
    )


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row()))
    assert len(read_prompts(path)) == 1


@pytest.mark.parametrize(
    "content",
    ["2024-01-31", "17", "true", "a\u2028b\u0085c\x0bd\re", "\n\n two \n", "\u00e4\U0001f600"],
)
def test_content_comes_back_unchanged(tmp_path: Path, content: str) -> None:
    text = json.dumps(
        row(id=content, messages=[{"role": "user", "content": content}]), ensure_ascii=False
    )
    path = write(tmp_path / "p.jsonl", text.encode())
    assert read_prompts(path) == [Prompt(content, "d", ({"role": "user", "content": content},))]


def test_what_a_row_may_leave_open(tmp_path: Path) -> None:
    tool = [{"role": "tool", "content": "3"}, {"role": "user", "content": "x"}]
    path = write(tmp_path / "p.jsonl", without("domain"), b"", row(id=3, messages=tool))
    read = read_prompts(path)
    assert [(p.id, p.domain) for p in read] == [("b", "general"), ("3", "d")]
    assert read[1].messages == tuple(tool)


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", row(id="x"))
    assert read_prompts(path)[0].id == "x"
    write(path, row(id="y"))
    assert read_prompts(path)[0].id == "y"


def turn(**message: Any) -> dict[str, Any]:
    return row(id="b", messages=[{"role": "user", "content": "x"}, message])


MALFORMED = {
    "bad json": (b'{"id": "b",', ["not JSON", "column", '{"id": "b",']),
    "not utf-8": (b'{"id": "\xff"}', ["not UTF-8", "byte 8"]),
    "not an object": ([1, 2], ["list", "object"]),
    "id missing": (without("id"), ["id: found null", "text"]),
    "id blank": (row(id=" "), ["id: found ' '"]),
    "id is a truth value": (row(id=True), ["id: found true"]),
    "id is a list": (row(id=["b"]), ["id: found", '["b"]']),
    "domain is a number": (row(id="b", domain=3), ["domain: found 3"]),
    "messages missing": (without("messages"), ["messages: found null"]),
    "messages empty": (row(id="b", messages=[]), ["messages: found []"]),
    "messages a text": (row(id="b", messages="hi"), ["messages: found 'hi'"]),
    "message a text": (row(id="b", messages=["hi"]), ["messages: found 'hi'"]),
    "content missing": (turn(role="user"), ["user's content", "null"]),
    "content blank": (turn(role="system", content=" \n"), ["system's content", "' \\n'"]),
    "content null": (turn(role="user", content=None), ["user's content", "null"]),
    "unknown role": (
        turn(role="human", content="x"),
        ["role: found 'human'", "system, user, assistant, tool"],
    ),
    "role missing": (turn(content="x"), ["role: found null"]),
    "half a surrogate": (turn(role="user", content="ab\ud800"), ["content", "surrogate"]),
    "half a surrogate in the id": (row(id="b\udc00"), ["id", "surrogate"]),
    "duplicate id": (row(id="a"), ["'a'", "used on line 1"]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_row_is_named_with_its_line(tmp_path: Path, kind: str) -> None:
    bad, needles = MALFORMED[kind]
    path = write(tmp_path / "p.jsonl", row(), bad, row(id="c"))
    with pytest.raises(ValueError) as caught:
        read_prompts(path)
    message = str(caught.value)
    for needle in ["data.prompts", str(path), "line 2", *needles]:
        assert needle in message
    assert "\n" not in message


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.prompts: .*none\.jsonl: there is no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"data\.prompts=.*a folder with files"):
        read_prompts(tmp_path)
    path = tmp_path / "empty.jsonl"
    for nothing in (b"", b"\n\n"):
        path.write_bytes(nothing)
        with pytest.raises(ValueError, match=r"data\.eval_prompts: .*empty\.jsonl: .*no prompts"):
            read_prompts(path, "data.eval_prompts")


def test_other_sources_are_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert [p.messages[0]["content"] for p in read_prompts(tmp_path / "p.txt")] == ["one", "two"]
    (tmp_path / "shards").mkdir()
    write(tmp_path / "shards" / "b.jsonl", row(id="b"))
    write(tmp_path / "shards" / "a.jsonl", {"id": "a", "conversations": [
        {"from": "human", "value": "hi"}]})  # fmt: skip
    hi = ({"role": "user", "content": "hi"},)
    assert read_prompts(tmp_path / "shards") == [Prompt("a", "general", hi), Prompt("b", "d", hi)]


@pytest.mark.parametrize(
    ("rows", "needle"),
    [
        ([], "it has none"),
        ([{"prompt": 3}], "prompt: found 3"),
        ([row(), row()], "ids of their own; 'a' is not"),
        ([{"input_ids": [1], "loss_mask": [1]}], "messages without tools"),
    ],
)
def test_bad_rows_of_other_sources_are_named(tmp_path: Path, rows: list[Any], needle: str) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(ValueError, match=r"data\.prompts=") as caught:
        read_prompts(tmp_path / "in")
    assert needle in str(caught.value) and "\n" not in str(caught.value)
