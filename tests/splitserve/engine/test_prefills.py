"""When prompts that wait for others are prefilled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.engine.prefills import PATIENCE_STEPS, PREFILL, PrefillGate

pytest.importorskip("sglang", reason="the gate gives SGLang's own plan")


class Running:
    """A batch of so many requests."""

    def __init__(self, size: int) -> None:
        self.size = size

    def is_empty(self) -> bool:
        return self.size == 0

    def batch_size(self) -> int:
        return self.size


def prefills(gate: PrefillGate, waiting: int, running: int, *, chunked: bool = False) -> bool:
    scheduler = SimpleNamespace(
        waiting_queue=[object()] * waiting,
        chunked_req=object() if chunked else None,
        max_running_requests=16,
    )
    batch: Any = Running(running)
    plan = gate.new_prefill(lambda *_: SimpleNamespace(batch_to_run="prefill"), scheduler, batch)
    if plan.batch_to_run is None:
        assert plan.running_batch is batch
    return plan.batch_to_run is not None


def test_enough_prompts_are_prefilled_at_once() -> None:
    gate = PrefillGate(4)
    assert prefills(gate, waiting=4, running=9)
    assert not prefills(gate, waiting=3, running=9)
    assert prefills(gate, waiting=5, running=9)


def test_few_wait_for_a_few_steps_only() -> None:
    gate = PrefillGate(4)
    for _ in range(3):
        assert [prefills(gate, 1, 9) for _ in range(PATIENCE_STEPS + 1)] == [
            *[False] * PATIENCE_STEPS,
            True,
        ]


def test_a_long_queue_does_not_make_up_for_the_room_that_is_missing() -> None:
    gate = PrefillGate(4)
    assert prefills(gate, waiting=50, running=12)
    assert not prefills(gate, waiting=50, running=13)
    # SGLang itself has no room for any.
    assert prefills(gate, waiting=50, running=16)


def test_nothing_is_held_back_where_nothing_is_decoded_or_a_prompt_is_under_way() -> None:
    gate = PrefillGate(4)
    assert prefills(gate, waiting=1, running=0)
    assert prefills(gate, waiting=1, running=9, chunked=True)
    assert not prefills(gate, waiting=1, running=9)


def test_the_hooked_place_exists() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    assert PREFILL.endswith(Scheduler.get_new_batch_prefill.__qualname__)
