"""Several rings used as one: slots say where they lie and come back to where they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from splitserve.transport.layout import RingLayout
from splitserve.transport.ring import RingWriter
from splitserve.transport.rings import RingReaders, Rings

LAYOUT = RingLayout(6, 3, "float32")
NUM_TOKENS = 4


@pytest.fixture
def rings() -> Iterator[Rings]:
    made = Rings.create(3 * LAYOUT.slot_bytes(NUM_TOKENS), LAYOUT, [(), ()])
    yield made
    made.close()


def test_the_emptier_ring_gives_the_next_slot(rings: Rings) -> None:
    slots = [rings.allocate(NUM_TOKENS) for _ in range(6)]
    assert [slot.ring for slot in slots if slot] == [0, 1, 0, 1, 0, 1]
    assert rings.allocate(NUM_TOKENS) is None
    assert rings.used_bytes == rings.capacity_bytes
    assert slots[3] is not None
    rings.free(slots[3])
    again = rings.allocate(NUM_TOKENS)
    assert again is not None and again.ring == 1


def test_a_slot_goes_back_to_its_own_ring_once(rings: Rings) -> None:
    slots = [rings.allocate(NUM_TOKENS) for _ in range(2)]
    for slot in slots:
        assert slot is not None
        rings.free(slot)
    assert rings.used_bytes == 0
    assert slots[1] is not None
    with pytest.raises(ValueError, match="freed twice"):
        rings.free(slots[1])


def test_what_each_engine_writes_is_read_by_its_slot(rings: Rings) -> None:
    writers = [RingWriter.attach(address) for address in rings.addresses]
    readers = RingReaders.attach(rings.addresses, "cpu")
    for value in (1.0, 2.0):
        slot = rings.allocate(NUM_TOKENS)
        assert slot is not None
        features = torch.full((NUM_TOKENS, 6), value)
        writers[slot.ring].write_rows(slot, 0, features, features[:, :3])
        assert readers.read(slot).features.unique().tolist() == [value]
    readers.close()
    for writer in writers:
        writer.close()
