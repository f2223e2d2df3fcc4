from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.held_out import MOST_DOMAINS, choose_held_out
from splitserve.data.sources import RawRow
from splitserve.errors import UserError

NUM_IDS = 100


def chat(*roles: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": r, "content": f"{r} {i}"} for i, r in enumerate(roles)], **more}


def rows(values: list[Any]) -> list[tuple[RawRow, str]]:
    return [(RawRow(f"s:{i}", json.dumps(v).encode()), "general") for i, v in enumerate(values)]


@given(st.lists(st.sampled_from("abc"), max_size=60), st.sampled_from([0.1, 0.5]))
def test_every_domain_gives_its_share(domains: list[str], fraction: float) -> None:
    values = [chat("user", "assistant", domain=d) for d in domains]
    chosen = choose_held_out(rows(values), fraction, 3, NUM_IDS)
    found = Counter(prompt.domain for prompt in chosen.values())
    for domain, size in Counter(domains).items():
        wanted = 0 if size < 2 else min(max(round(size * fraction), 1), size - 1)
        assert found[domain] == wanted
    assert chosen == choose_held_out(rows(values), fraction, 3, NUM_IDS)


def test_no_more_than_the_most_are_held_out_and_none_without_need() -> None:
    values = [chat("user", "assistant", domain="ab"[i % 5 == 0]) for i in range(1000)]
    chosen = choose_held_out(rows(values), 0.5, 3, NUM_IDS, most=50)
    assert Counter(p.domain for p in chosen.values()) == {"a": 40, "b": 10}
    # The same rows come first whatever their number: those of the lowest ranks.
    fewer = choose_held_out(rows(values), 0.5, 3, NUM_IDS, most=10)
    assert set(fewer) < set(chosen)
    assert choose_held_out(rows(values), 0.5, 4, NUM_IDS, most=50).keys() != chosen.keys()
    assert choose_held_out(rows(values), 0.0, 3, NUM_IDS) == {}


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        (chat("user", "assistant"), ["user"]),
        (chat("system", "user", "assistant"), ["system", "user"]),
        (chat("user", "assistant", "user", "assistant"), ["user", "assistant", "user"]),
        (chat("user", "assistant", "user"), ["user"]),
        (chat("user", "assistant", "tool", "assistant"), ["user", "assistant", "tool"]),
        (chat("user", "assistant", "assistant"), None),
        (chat("assistant", "user"), None),
        (chat("user"), None),
        ("nothing", None),
        ({"messages": [{"role": "critic", "content": "x"}]}, None),
    ],
)
def test_the_last_answer_is_left_off(row: Any, roles: list[str] | None) -> None:
    chosen = choose_held_out(rows([row, row]), 0.5, 0, NUM_IDS)
    assert [[m["role"] for m in p.messages] for p in chosen.values()] == ([roles] if roles else [])
    assert all(p.id in ("s:0/q0", "s:1/q1") and p.held_out for p in chosen.values())


@pytest.mark.parametrize(
    ("mask", "ids"),
    [([0, 1, 1, 0, 1, 1], (1, 2, 3, 4)), ([0, 0, 1, 1, 1, 1], (1, 2)), ([1] * 6, None),
     ([0] * 6, None)],
)  # fmt: skip
def test_rows_of_tokens_end_before_their_last_span(
    mask: list[int], ids: tuple[int, ...] | None
) -> None:
    row = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": mask}
    chosen = choose_held_out(rows([row, row]), 0.5, 0, NUM_IDS)
    assert [p.token_ids for p in chosen.values()] == ([ids] if ids else [])
    assert choose_held_out(rows([row, row]), 0.5, 0, num_ids=6) == {}


def test_tools_stay_with_the_question() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = chat("user", "assistant", tools=tools)
    assert [p.tools for p in choose_held_out(rows([row, row]), 0.5, 0, 9).values()] == [
        tuple(tools)
    ]


def test_domains_are_few() -> None:
    values = [chat("user", "assistant", domain=str(i)) for i in range(MOST_DOMAINS + 1)]
    with pytest.raises(UserError, match=rf"data\.conversations.*{MOST_DOMAINS} domains"):
        choose_held_out(rows(values), 0.5, 0, NUM_IDS)
