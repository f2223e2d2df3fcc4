from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.permutation import Permutation


@given(st.integers(1, 300), st.text(max_size=3))
def test_every_number_has_one_place(size: int, key: str) -> None:
    shuffle = Permutation(size, key)
    numbers = [shuffle[place] for place in range(len(shuffle))]
    assert sorted(numbers) == list(range(size))
    assert [shuffle.place_of(number) for number in numbers] == list(range(size))


@given(st.integers(1, 2**40), st.data())
def test_both_directions_agree_at_any_size(size: int, data: st.DataObject) -> None:
    shuffle = Permutation(size, "k")
    place = data.draw(st.integers(0, size - 1))
    assert shuffle.place_of(shuffle[place]) == place


@pytest.mark.parametrize("size", [2, 3, 5, 16, 33])
def test_a_number_is_anywhere_equally_often(size: int) -> None:
    rounds = 400 * size
    found = Counter(Permutation(size, str(key)).place_of(size - 1) for key in range(rounds))
    chi_square = sum((found[place] - 400) ** 2 / 400 for place in range(size))
    # Four standard deviations above the mean of that distribution.
    assert chi_square < (size - 1) + 4 * (2 * (size - 1)) ** 0.5


def test_neighbours_are_parted_and_orders_differ() -> None:
    first, second = Permutation(10_000, "a"), Permutation(10_000, "b")
    numbers = [first[place] for place in range(10_000)]
    steps = sum(abs(a - b) == 1 for a, b in itertools.pairwise(numbers))
    assert steps < 20
    assert sum(first[place] == second[place] for place in range(10_000)) < 20


@pytest.mark.parametrize("place", [-1, 4])
def test_there_is_nothing_outside(place: int) -> None:
    with pytest.raises(IndexError, match=r"0 \.\.\. 3"):
        Permutation(4, "")[place]
    with pytest.raises(IndexError):
        Permutation(4, "").place_of(place)
