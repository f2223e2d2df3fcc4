"""A queue whose members change their place or leave without being looked for in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K", bound=tuple[int, ...])

SLACK = 64


class LazyHeap(Generic[K]):
    """Names by ascending key; one that has left, or has another key by now, is passed over.

    Args:
        key_of: the key that a name has now, None while it is not a member. Whoever changes the
            answer from None, or to another key, pushes the name.
    """

    def __init__(self, key_of: Callable[[str], K | None]) -> None:
        self._key_of = key_of
        self._heap: list[tuple[K, str]] = []
        self._limit = SLACK

    def __len__(self) -> int:
        """Pairs that are held, those that count no more among them."""
        return len(self._heap)

    def push(self, name: str) -> None:
        """Take a name in, or take note of its new key."""
        key = self._key_of(name)
        if key is None:
            return
        heapq.heappush(self._heap, (key, name))
        if len(self._heap) > self._limit:
            # Pairs that count no more must not outgrow those that do.
            self._heap = [pair for pair in set(self._heap) if self._counts(pair)]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SLACK

    def first(self) -> tuple[K, str] | None:
        """The member with the smallest key, which stays; None where there is none."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _counts(self, pair: tuple[K, str]) -> bool:
        return self._key_of(pair[1]) == pair[0]
