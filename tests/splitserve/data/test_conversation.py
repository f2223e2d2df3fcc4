from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from splitserve.data.conversation import (
    Conversation,
    TokenRow,
    folded,
    parse_row,
    plain_text,
)
from splitserve.data.refusal import Reason, RowRefused

HI = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    parsed = parse_row(row, "s:0", "general")
    assert isinstance(parsed, Conversation)
    return list(parsed.messages)


def test_names_come_from_the_row_or_from_its_place() -> None:
    given = parse_row({"id": 7, "domain": "math", "messages": [HI]}, "s:0", "general")
    assert (given.id, given.domain) == ("7", "math")
    bare = parse_row({"messages": [HI], "domain": None}, "s:0", "general")
    assert (bare.id, bare.domain) == ("s:0", "general")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_openai_rows(key: str) -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            HI,
            {"role": "assistant", "content": None, key: "hm", "tool_calls": [call], "weight": 1},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        ]
    }
    assert messages(row) == [
        HI,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{**ADD, "id": "c1"}],
        },
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
    ]


def test_sharegpt_rows() -> None:
    row = {
        "system": "s",
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
            {"role": "user", "content": "mixed"},
        ],
        "tools": '[{"name": "add"}]',
    }
    parsed = parse_row(row, "s:0", "d")
    assert isinstance(parsed, Conversation)
    assert list(parsed.messages) == [
        {"role": "system", "content": "s"},
        HI,
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "mixed"},
    ]
    assert parsed.tools == ({"type": "function", "function": {"name": "add"}},)


def test_prompt_rows() -> None:
    answer = {"role": "assistant", "content": "a"}
    assert messages({"prompt": "hi"}) == [HI]
    assert messages({"prompt": [HI], "completion": "a"}) == [HI, answer]
    assert messages({"prompt": "hi", "response": [answer]}) == [HI, answer]


def test_token_rows() -> None:
    row = parse_row({"token_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}, "s:0", "d")
    assert isinstance(row, TokenRow)
    assert row.token_ids.tolist() == [3, 4, 5]
    assert row.loss_mask.tolist() == [False, True, True]
    assert (row.token_ids.dtype, row.loss_mask.dtype) == (np.int64, np.bool_)


@pytest.mark.parametrize(
    ("row", "reason", "text"),
    [
        (["x"], Reason.MALFORMED_ROW, "JSON object"),
        ({"text": "x"}, Reason.MALFORMED_ROW, "messages, conversations, prompt, input_ids"),
        ({"messages": []}, Reason.MALFORMED_ROW, "messages: found []"),
        ({"messages": "x"}, Reason.MALFORMED_ROW, "messages: found 'x'"),
        ({"messages": ["x"]}, Reason.MALFORMED_ROW, "objects with role and content"),
        ({"messages": [HI], "id": [1]}, Reason.MALFORMED_ROW, "id: found [1]"),
        ({"messages": [HI], "domain": True}, Reason.MALFORMED_ROW, "domain: found true"),
        ({"messages": [HI], "tools": 3}, Reason.MALFORMED_ROW, "tools: found 3"),
        ({"messages": [HI], "tools": "[{"}, Reason.MALFORMED_ROW, "JSON list"),
        ({"messages": [{"role": "critic", "content": ""}]}, Reason.UNKNOWN_ROLE, "'critic'"),
        ({"messages": [{"content": ""}]}, Reason.UNKNOWN_ROLE, "null"),
        ({"messages": [{"role": "user", "content": 3}]}, Reason.MALFORMED_ROW, "content: found 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            Reason.UNSUPPORTED_CONTENT,
            "'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": "a\ud800"}]},
            Reason.UNSUPPORTED_CONTENT,
            "surrogate",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            Reason.BAD_TOOL_CALL,
            "name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            Reason.BAD_TOOL_CALL,
            "not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
            Reason.BAD_TOOL_CALL,
            "not a JSON object",
        ),
        ({"conversations": [{"from": "cat", "value": ""}]}, Reason.UNKNOWN_ROLE, "'cat'"),
        ({"conversations": [{"from": "gpt"}]}, Reason.MALFORMED_ROW, "from"),
        (
            {"conversations": [{"from": "function_call", "value": "f"}]},
            Reason.BAD_TOOL_CALL,
            "JSON",
        ),
        ({"prompt": 3}, Reason.MALFORMED_ROW, "prompt: found 3"),
        ({"prompt": "a", "response": 3}, Reason.MALFORMED_ROW, "response: found 3"),
        ({"input_ids": ["a"], "loss_mask": [1]}, Reason.MALFORMED_ROW, "whole numbers"),
        ({"input_ids": [[1], [1, 2]], "loss_mask": [1]}, Reason.MALFORMED_ROW, "whole numbers"),
        ({"input_ids": [1, 2]}, Reason.BAD_TOKENS, "0 entries for 2"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, Reason.BAD_TOKENS, "1 entries for 2"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, Reason.BAD_TOKENS, "0 or 1"),
    ],
)
def test_refused_with_a_reason(row: Any, reason: Reason, text: str) -> None:
    with pytest.raises(RowRefused) as caught:
        parse_row(row, "s:0", "d")
    assert caught.value.reason is reason
    assert text in caught.value.detail
    assert len(caught.value.detail) < 300


def test_texts_to_compare_by() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": " Hi\n"}]}
    answer = {"role": "assistant", "content": "A  b"}
    assert plain_text(parts) == " Hi\n"
    assert folded(plain_text(answer)) == "a b"
