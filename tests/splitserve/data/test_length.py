from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.length import (
    Document,
    assign_rows,
    bucket_edges,
    limit,
    num_anchor_places,
    supervised_spans,
)
from splitserve.data.refusal import Reason, RowRefused
from splitserve.errors import UserError

masks = st.lists(st.booleans(), min_size=1, max_size=24)


def array(mask: str) -> np.ndarray:
    return np.array([c == "1" for c in mask])


def cut(mask: str, max_tokens: int) -> Document:
    return limit("a", "d", np.arange(len(mask)), array(mask), max_tokens)


def document(name: str, mask: str) -> Document:
    ids = np.arange(1, len(mask) + 1)
    return Document(name, "d", ids, array(mask), len(mask), mask.count("1"))


@given(masks)
def test_spans_are_the_runs(mask: list[bool]) -> None:
    runs, place = [], 0
    for on, group in itertools.groupby(mask):
        size = len(list(group))
        if on:
            runs.append([place, place + size])
        place += size
    assert supervised_spans(np.array(mask)).tolist() == runs
    assert num_anchor_places(np.array(mask)) == sum(b - a - 1 for a, b in runs)


@pytest.mark.parametrize(
    ("mask", "max_tokens", "length"),
    [
        ("00111", 5, 5),
        ("00111", 4, 4),
        ("0110111", 7, 7),
        ("0110111", 6, 3),
        ("0110111", 3, 3),
        ("01100000", 5, 3),
        ("0100111", 6, 6),
    ],
)
def test_a_cut_keeps_whole_spans_where_it_can(mask: str, max_tokens: int, length: int) -> None:
    made = cut(mask, max_tokens)
    assert made.token_ids.tolist() == list(range(length))
    assert made.loss_mask.tolist() == array(mask)[:length].tolist()
    assert made.truncated == (length < len(mask))
    assert (made.num_whole, made.num_whole_supervised) == (len(mask), mask.count("1"))


@given(masks, st.integers(1, 26))
def test_a_document_fits_and_has_an_anchor_or_is_refused(mask: list[bool], size: int) -> None:
    text = "".join("01"[on] for on in mask)
    try:
        made = cut(text, size)
    except RowRefused as refused:
        if "11" not in text:
            assert refused.reason is Reason.NO_ANCHOR
        else:
            assert refused.reason is Reason.PROMPT_TOO_LONG
            assert "11" not in text[:size]
        return
    assert len(made.token_ids) <= size
    assert num_anchor_places(made.loss_mask) > 0
    spans = [tuple(s) for s in supervised_spans(np.array(mask))]
    kept = [tuple(s) for s in supervised_spans(made.loss_mask)]
    if any(b <= size and b - a > 1 for a, b in spans):
        assert kept == [(a, b) for a, b in spans if b <= size]


lengths = st.lists(st.integers(1, 24), max_size=40)


@given(lengths, st.integers(24, 60), st.integers(1, 9))
def test_rows_hold_every_document_once_within_their_limits(
    sizes: list[int], row_tokens: int, most: int
) -> None:
    rows = assign_rows(sizes, row_tokens, most)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(sizes)))
    assert all(1 <= len(row) <= most for row in rows)
    assert all(sum(sizes[i] for i in row) <= row_tokens for row in rows)
    # Two rows that would fit into one are never both begun.
    open_rows = [r for r in rows if len(r) < most]
    for one, other in itertools.combinations(open_rows, 2):
        if len(one) + len(other) <= most:
            assert sum(sizes[i] for i in (*one, *other)) > row_tokens


@given(lengths, st.randoms())
def test_rows_of_lengths_do_not_depend_on_the_order(sizes: list[int], order: Random) -> None:
    shuffled = list(sizes)
    order.shuffle(shuffled)
    first, second = (
        sorted(sorted(given[i] for i in row) for row in assign_rows(given, 32, 4))
        for given in (sizes, shuffled)
    )
    assert first == second


def test_a_document_goes_where_it_fits_best() -> None:
    assert assign_rows([2, 5, 3, 4, 4], 8, 9) == [(1, 2), (3, 4), (0,)]
    assert assign_rows([2, 2, 2], 8, 2) == [(0, 1), (2,)]
    assert assign_rows([], 8, 2) == []


def test_mixed_lengths_fill_their_rows() -> None:
    sizes = [i % 7 + 2 for i in range(400)]
    assert sum(sizes) / (16 * len(assign_rows(sizes, 16, 99))) > 0.95


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.row_tokens=2 .*3 or more, the length"):
        assign_rows([3], 2, 4)


def test_bucket_edges() -> None:
    assert bucket_edges(1000) == (128, 256, 512, 1000)
    assert bucket_edges(100) == (100,)
    assert bucket_edges(256) == (128, 256)
