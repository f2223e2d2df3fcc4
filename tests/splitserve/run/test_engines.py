"""Who gets which request, and what is asked for again when an engine dies."""

from __future__ import annotations

from typing import Any

from splitserve.messages import (
    Generate,
    Generated,
    Rejected,
    Sampling,
    SlotRef,
    Stop,
    Taught,
    Teach,
)
from splitserve.run.engines import Engines


class FakeChild:
    def __init__(self, number: int) -> None:
        self.name, self.sent, self.finished = f"engine-{number}", [], False

    def send(self, message: Any) -> None:
        self.sent.append(message)


def slot(ring: int) -> SlotRef:
    return SlotRef(0, 0, 64, 1, 4, ring)


def generate(name: str) -> Generate:
    return Generate(name, (1, 2), Sampling())


def make(count: int = 2) -> tuple[Engines, list[Any]]:
    made: list[Any] = []

    def start(number: int) -> Any:
        made.append(FakeChild(number))
        return made[-1]

    engines = Engines(start, count)
    engines.start()
    return engines, made


def test_requests_wait_until_all_engines_are_up() -> None:
    engines, (first, second) = make()
    engines.is_up(second)
    assert not engines.ready and engines.first is None
    engines.is_up(first)
    assert engines.ready and engines.first is first and engines.others == [second]


def test_answers_are_asked_of_the_idler_and_samples_taught_where_their_slot_is() -> None:
    engines, (first, second) = make()
    for name in "abc":
        engines.send(generate(name))
    engines.send(Teach("d", (1, 2, 3, 4), slot(1)))
    assert [m.request_id for m in first.sent] == ["a", "c"]
    assert [type(m).__name__ for m in second.sent] == ["Generate", "Teach"]
    engines.answered(second, Taught("d", slot(1)))
    engines.answered(second, Generated("b", (5,), "stop"))
    assert engines.num_busy == 1
    engines.send(generate("e"))
    assert second.sent[-1].request_id == "e"


def test_only_what_the_dead_engine_held_is_given_back() -> None:
    engines, made = make()
    engines.is_up(made[0])
    engines.is_up(made[1])
    for name in "abc":
        engines.send(generate(name))
    engines.answered(made[0], Rejected("a", None, "engine_error"))
    assert engines.restart(made[0]) == {"c"}
    assert not engines.ready and engines.children == [made[2], made[1]]
    engines.is_up(made[2])
    assert engines.ready and engines.num_busy == 1


def test_released_engines_are_told_to_stop_and_go() -> None:
    engines, (first, second) = make()
    engines.release()
    assert isinstance(first.sent[-1], Stop) and isinstance(second.sent[-1], Stop)
    assert first.finished and not engines.ready
    engines.retire(first)
    assert engines.children == [second]
