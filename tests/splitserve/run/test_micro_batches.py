"""How a step's samples are shared out over ranks and forward passes."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.errors import UserError
from splitserve.messages import BatchItem, SlotRef
from splitserve.run.micro_batches import MicroBatches, share_out

SLOT = SlotRef(index=0, offset=0, num_bytes=64, generation=1, num_tokens=1)


def items_of(lengths: list[int]) -> list[BatchItem]:
    return [BatchItem(f"s{i}", 0, (1,) * n, ((0, n),), SLOT) for i, n in enumerate(lengths)]


def names(shares: list[MicroBatches]) -> list[str]:
    return [item.sample_id for share in shares for part in share for item in part]


@given(
    st.lists(st.integers(1, 20), max_size=30),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([0, 20, 33]),
)
def test_every_sample_once_and_as_many_passes_on_every_rank(
    lengths: list[int], ranks: int, size: int, row_tokens: int
) -> None:
    shares = share_out(
        items_of(lengths), num_ranks=ranks, micro_batch_size=size, row_tokens=row_tokens
    )
    assert sorted(names(shares)) == sorted(f"s{i}" for i in range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    assert len(shares) == ranks and len(shares[0]) >= 1
    for part in chain.from_iterable(shares):
        assert len(part) <= size
        assert not row_tokens or sum(len(item.token_ids) for item in part) <= row_tokens
    # No rank waits for a pass that nobody needs.
    assert not lengths or any(share[-1] for share in shares)


def test_rows_are_the_same_for_any_number_of_ranks() -> None:
    rng = random.Random(0)
    items = items_of([rng.randrange(1, 20) for _ in range(40)])
    found = [
        sorted(
            tuple(item.sample_id for item in part)
            for share in share_out(items, num_ranks=n, micro_batch_size=4, row_tokens=32)
            for part in share
            if part
        )
        for n in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2]


def test_padded_sequences_are_dealt_in_turn() -> None:
    shares = share_out(items_of([1] * 5), num_ranks=2, micro_batch_size=2, row_tokens=0)
    assert [[[item.sample_id for item in part] for part in share] for share in shares] == [
        [["s0", "s2"], ["s4"]],
        [["s1", "s3"], []],
    ]


def test_padded_sequences_share_a_pass_with_those_of_like_length() -> None:
    shares = share_out(items_of([9, 1, 8, 2]), num_ranks=1, micro_batch_size=2, row_tokens=0)
    assert [[len(item.token_ids) for item in part] for part in shares[0]] == [[1, 2], [8, 9]]


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.row_tokens=8"):
        share_out(items_of([9]), num_ranks=1, micro_batch_size=2, row_tokens=8)
