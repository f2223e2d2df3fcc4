from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.length import (
    OPEN_ROWS,
    Document,
    batch_by_length,
    bucket_edges,
    limit,
    num_anchor_places,
    pack,
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


@given(st.lists(masks, max_size=30), st.integers(24, 40))
def test_packing_keeps_every_document_once_and_apart(rows: list[list[bool]], size: int) -> None:
    documents = [document(str(i), "".join("01"[on] for on in mask)) for i, mask in enumerate(rows)]
    packed = list(pack(documents, size))
    assert sorted(n for row in packed for n in row.names) == sorted(d.id for d in documents)
    by_name = {d.id: d for d in documents}
    for row in packed:
        assert len(row.token_ids) == size
        used = row.boundaries[-1]
        assert (row.document_ids[used:] == -1).all() and not row.loss_mask[used:].any()
        expected = []
        for k, name in enumerate(row.names):
            part = slice(row.boundaries[k], row.boundaries[k + 1])
            assert row.token_ids[part].tolist() == by_name[name].token_ids.tolist()
            assert row.loss_mask[part].tolist() == by_name[name].loss_mask.tolist()
            assert row.position_ids[part].tolist() == list(range(len(by_name[name].token_ids)))
            assert set(row.document_ids[part].tolist()) == {k}
            own = by_name[name].loss_mask
            expected += (np.flatnonzero(own[:-1] & own[1:]) + row.boundaries[k]).tolist()
        assert row.anchor_places().tolist() == expected


def test_no_anchor_stands_across_two_documents() -> None:
    (row,) = pack([document("a", "011"), document("b", "110")], 7)
    assert row.anchor_places().tolist() == [1, 3]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert row.document_ids.tolist() == [0, 0, 0, 1, 1, 1, -1]
    assert row.boundaries.tolist() == [0, 3, 6]


def test_packing_holds_a_bounded_number_of_rows_and_fills_them() -> None:
    taken = 0

    def source() -> itertools.chain[Document]:
        def counted(name: int) -> Document:
            nonlocal taken
            taken += 1
            return document(str(name), "0" + "1" * 5)

        return itertools.chain.from_iterable([counted(i)] for i in range(10 * OPEN_ROWS))

    stream = pack(source(), 11)
    next(stream)
    assert taken <= OPEN_ROWS + 1
    mixed = [document(str(i), "0" + "1" * (i % 7 + 1)) for i in range(400)]
    rows = list(pack(mixed, 16))
    filled = sum(int(row.boundaries[-1]) for row in rows) / (16 * len(rows))
    assert filled > 0.95


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.pack_tokens=2 .*3 or more, the length of 'a'"):
        list(pack([document("a", "011")], 2))


def test_bucket_edges() -> None:
    assert bucket_edges(1000) == (128, 256, 512, 1000)
    assert bucket_edges(100) == (100,)
    assert bucket_edges(256) == (128, 256)


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(40, 120))
def test_buckets_hold_every_document_once_within_the_budget(
    sizes: list[int], batch_tokens: int
) -> None:
    edges = bucket_edges(40, 10)
    documents = [document(str(i), "1" * size) for i, size in enumerate(sizes)]
    seen = []
    for edge, batch in batch_by_length(documents, edges, batch_tokens):
        assert len(batch) * edge <= batch_tokens
        for one in batch:
            below = [e for e in edges if e < edge]
            assert (below[-1] if below else 0) < len(one.token_ids) <= edge
            seen.append(one.id)
    assert sorted(seen) == sorted(d.id for d in documents)


def test_buckets_that_are_too_small_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.bucket_edges=\[2\] .*'a'"):
        list(batch_by_length([document("a", "011")], [2], 8))
    with pytest.raises(UserError, match=r"data\.batch_tokens=3 .*4 or more"):
        list(batch_by_length([], [2, 4], 3))
