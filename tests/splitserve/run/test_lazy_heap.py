"""A queue that finds out only at its front who has left or moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.run.lazy_heap import SLACK, LazyHeap

changes = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 5)), max_size=400
)


@given(changes)
def test_the_first_is_the_smallest_of_those_that_are_in(
    changes: list[tuple[str, int | None]],
) -> None:
    keys: dict[str, tuple[int] | None] = {}
    heap: LazyHeap[tuple[int]] = LazyHeap(keys.get)
    for name, key in changes:
        keys[name] = None if key is None else (key,)
        heap.push(name)
        members = [(k, n) for n, k in keys.items() if k is not None]
        assert heap.first() == min(members, default=None)


def test_what_has_moved_often_takes_no_room() -> None:
    keys = {"a": (0,), "b": (10**6,)}
    heap: LazyHeap[tuple[int]] = LazyHeap(keys.get)
    heap.push("b")
    for key in range(10_000):
        keys["a"] = (key,)
        heap.push("a")
        assert len(heap) <= 2 * len(keys) + SLACK
    assert heap.first() == ((9999,), "a")
