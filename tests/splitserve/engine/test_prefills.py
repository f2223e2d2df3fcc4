"""When prompts that wait for others are prefilled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.engine import plugin
from splitserve.engine.prefills import PATIENCE_STEPS, PREFILL, PrefillGate

pytest.importorskip("sglang", reason="the gate gives SGLang's own plan")


def requests(number: int, *, new_tokens: int = 64, tokens: int = 10) -> list[Any]:
    sampling = SimpleNamespace(max_new_tokens=new_tokens)
    return [SimpleNamespace(sampling_params=sampling, origin_input_ids=[0] * tokens)] * number


class Running:
    """A batch of some requests."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs

    def batch_size(self) -> int:
        return len(self.reqs)


def prefills(
    gate: PrefillGate,
    waiting: int,
    running: int,
    *,
    chunked: bool = False,
    tokens: int = 10,
    new_tokens: int = 64,
    most: int = 16,
) -> bool:
    scheduler = SimpleNamespace(
        waiting_queue=requests(waiting, tokens=tokens),
        chunked_req=object() if chunked else None,
        max_running_requests=most,
        chunked_prefill_size=512,
    )
    batch: Any = Running(requests(running, new_tokens=new_tokens))
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


def test_prompts_that_only_are_taught_are_nothing_to_decode() -> None:
    assert prefills(PrefillGate(4), waiting=1, running=9, new_tokens=1)


def test_few_long_prompts_fill_a_pass() -> None:
    assert prefills(PrefillGate(4), waiting=2, running=9, tokens=256)
    assert not prefills(PrefillGate(4), waiting=2, running=9, tokens=255)


def test_a_small_batch_does_not_stand_empty_for_many_prompts() -> None:
    assert prefills(PrefillGate(64), waiting=2, running=4, most=8)
    assert not prefills(PrefillGate(64), waiting=1, running=4, most=8)
    assert prefills(PrefillGate(64), waiting=1, running=1, most=4)


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


@pytest.mark.parametrize("together", [1, 8])
def test_the_plugin_hooks_what_exists(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooked: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda name, *_: hooked.append(name))
    config = plugin.CaptureConfig({}, "cuda", prefill_together=together)
    monkeypatch.setenv(plugin.ENVIRONMENT, config.to_json())
    plugin.register()
    assert (PREFILL in hooked) == (together > 1)
    assert PREFILL.endswith(Scheduler.get_new_batch_prefill.__qualname__)
