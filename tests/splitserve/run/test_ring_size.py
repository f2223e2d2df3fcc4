"""The ring's size against the batches that go through it and the machine that holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitserve.errors import UserError
from splitserve.run.gpus import Gpu
from splitserve.run.main import make_rings
from splitserve.run.memory import GIB, RING_FILL, GpuNeeds, check_memory, size_ring
from splitserve.run.plan import check_ring
from splitserve.settings import DataSettings, LayoutSettings, RunSettings, TargetSettings
from splitserve.transport.layout import RingLayout
from splitserve.transport.memory import DeviceMemoryError
from splitserve.transport.rings import Rings

LAYOUT = RingLayout(64, 32, "bfloat16")


def with_ring(num_bytes: int, engines: int = 1) -> RunSettings:
    return RunSettings(
        target=TargetSettings(path="target"),
        data=DataSettings(prompts="prompts.jsonl"),
        layout=LayoutSettings(ring_bytes=num_bytes, engines=engines),
    )


@pytest.mark.parametrize(
    ("num_bytes", "engines", "allowed"),
    [(10, 1, "or more, two batches"), (2**60, 1, "this machine's memory"), (2**59, 2, "engines=2")],
)
def test_a_ring_that_cannot_be_is_refused(num_bytes: int, engines: int, allowed: str) -> None:
    with pytest.raises(UserError, match=allowed) as caught:
        check_ring(with_ring(num_bytes, engines), LAYOUT)
    assert caught.value.field == "layout.ring_bytes"


def test_a_ring_that_fits_is_taken() -> None:
    check_ring(with_ring(2**26), LAYOUT)


def test_a_ring_without_a_size_takes_what_is_left_of_the_fullest_target_gpu() -> None:
    gpus = [Gpu(str(number), "a GPU", 100 * GIB) for number in range(3)]
    found = [
        GpuNeeds(gpus[0], target={"target weights": 20 * GIB}),
        GpuNeeds(gpus[1], target={"target weights": 20 * GIB}, train={"optimizer": 30 * GIB}),
        GpuNeeds(gpus[2], train={"optimizer": 70 * GIB}),
    ]
    left = int(RING_FILL * 100 * GIB) - 50 * GIB
    assert size_ring(found, GIB, 2**60) == left
    assert [entry.target.get("ring") for entry in found] == [left, left, None]
    assert size_ring(found[:1], GIB, 3 * GIB) == 3 * GIB


def test_where_too_little_is_left_the_plan_says_what_does_not_fit() -> None:
    full = [GpuNeeds(Gpu("0", "a GPU", 10 * GIB), target={"target weights": 9 * GIB})]
    assert size_ring(full, GIB, 2**60) == full[0].target["ring"] == GIB
    with pytest.raises(UserError, match="the largest part is target weights"):
        check_memory(full)


def test_on_the_cpu_a_ring_has_a_size() -> None:
    with pytest.raises(UserError, match=r"layout\.ring_bytes"):
        LayoutSettings(ring_bytes=0)


def test_memory_that_others_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Rings:
        raise DeviceMemoryError("cannot allocate 7 bytes on GPU 0: out of memory")

    monkeypatch.setattr(Rings, "create", full)
    plan: Any = SimpleNamespace(
        ring_bytes=7, ring_layout=LAYOUT, placement=SimpleNamespace(groups=[("0",)])
    )
    with pytest.raises(UserError, match="7 bytes on GPU 0") as caught:
        make_rings(with_ring(5), plan)
    assert caught.value.field == "layout.ring_bytes" and "below 7" in str(caught.value)
