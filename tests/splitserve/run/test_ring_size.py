"""The ring's size against the batches that go through it and the machine that holds it."""

from __future__ import annotations

import pytest

from splitserve.errors import UserError
from splitserve.run.plan import check_ring
from splitserve.settings import DataSettings, LayoutSettings, RunSettings, TargetSettings
from splitserve.transport.layout import RingLayout

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
