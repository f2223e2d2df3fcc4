"""The target engines of a run: who is up, who holds what, and who gets the next request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from splitserve.messages import Generate, Generated, Rejected, Stop, Taught, Teach
from splitserve.run.process import ChildProcess


class Engines:
    """Several engines behind one queue; a sample is taught by the engine whose ring has its slot.

    Args:
        start: makes the engine of that number; called again where one is restarted.
        count: how many there are.
    """

    def __init__(self, start: Callable[[int], ChildProcess], count: int) -> None:
        self._start = start
        self._count = count
        self._children: dict[int, ChildProcess] = {}
        self._ready: set[int] = set()
        self._held: list[set[str]] = [set() for _ in range(count)]
        self.released = False
        """Nothing more is wanted of them."""

    def start(self) -> None:
        """Start every engine."""
        for number in range(self._count):
            self._children[number] = self._start(number)

    @property
    def children(self) -> list[ChildProcess]:
        """The processes that there are."""
        return list(self._children.values())

    @property
    def first(self) -> ChildProcess | None:
        """The engine that measures, once all are up."""
        return self._children.get(0) if self.ready else None

    @property
    def others(self) -> list[ChildProcess]:
        """Those that do not measure."""
        return [child for number, child in sorted(self._children.items()) if number > 0]

    @property
    def ready(self) -> bool:
        """Whether all are up; requests wait for it."""
        return len(self._ready) == self._count and not self.released

    @property
    def num_busy(self) -> int:
        """Engines that hold a request."""
        return sum(bool(held) for held in self._held)

    @property
    def count(self) -> int:
        """How many engines the run has."""
        return self._count

    def number_of(self, child: ChildProcess) -> int | None:
        """Which engine a process is; None for another process."""
        return next((n for n, c in self._children.items() if c is child), None)

    def is_up(self, child: ChildProcess) -> None:
        """An engine has said that it is ready."""
        number = self.number_of(child)
        assert number is not None, f"{child.name} is no engine"
        self._ready.add(number)

    def send(self, request: Generate | Teach) -> None:
        """Hand a request over; generating goes to whoever holds least."""
        if isinstance(request, Teach):
            number, name = request.slot.ring, request.sample_id
        else:
            number = min(range(self._count), key=lambda n: len(self._held[n]))
            name = request.request_id
        self._held[number].add(name)
        self._children[number].send(request)

    def answered(self, child: ChildProcess, message: Generated | Taught | Rejected) -> None:
        """A request is with its engine no longer."""
        number = self.number_of(child)
        assert number is not None, f"{child.name} is no engine"
        name = message.sample_id if isinstance(message, Taught) else message.request_id
        self._held[number].discard(name)

    def restart(self, child: ChildProcess) -> Iterable[str]:
        """Start a dead engine again; the sample ids that it held."""
        number = self.number_of(child)
        assert number is not None, f"{child.name} is no engine"
        held, self._held[number] = self._held[number], set()
        self._ready.discard(number)
        self._children[number] = self._start(number)
        return held

    def release(self) -> None:
        """Let all of them go."""
        for child in self._children.values():
            child.send(Stop())
            child.finished = True
        self.released = True

    def retire(self, child: ChildProcess) -> None:
        """A released engine has gone."""
        if (number := self.number_of(child)) is not None:
            del self._children[number]
