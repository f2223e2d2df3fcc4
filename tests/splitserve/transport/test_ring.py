"""The ring: where things lie in it, and who gets which place."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_testing import (
    LAYOUT,
    make_owner,
)

from splitserve.transport.layout import MAX_SLOTS
from splitserve.transport.memory import DeviceSegment
from splitserve.transport.ring import (
    RingAddress,
    RingLayout,
    RingOwner,
    RingWriter,
)


@pytest.fixture
def owner():
    ring = make_owner(LAYOUT.slot_bytes(8) * 4)
    yield ring
    ring.close()


# --- where things lie -----------------------------------------------------------------------------


def test_slot_bytes_are_those_of_one_shard_and_blocks_are_aligned() -> None:
    layout = RingLayout(num_context_features=3, hidden_size=1, dtype="bfloat16")
    # 41 rows: 246 bytes of features and 82 of states, each padded to a multiple of 64.
    assert layout.slot_bytes(41) == 256 + 128
    # 14 rows in the largest of three shards: 84 and 28 bytes.
    assert replace(layout, num_shards=3).slot_bytes(41) == 128 + 64


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9))
def test_shards_hold_every_row_once_and_none_more_than_its_room(num_tokens, num_shards) -> None:
    layout = replace(LAYOUT, num_shards=num_shards)
    shares = [layout.shard_rows(num_tokens, shard) for shard in range(num_shards)]
    assert [row for first, last in shares for row in range(first, last)] == list(range(num_tokens))
    row_bytes = (LAYOUT.num_context_features + LAYOUT.hidden_size) * 4
    assert max(last - first for first, last in shares) * row_bytes <= layout.slot_bytes(num_tokens)


def test_an_address_survives_both_ways_of_travelling() -> None:
    layout = replace(LAYOUT, num_shards=2)
    on_host = RingAddress("/proc/1/fd/3", layout, 4096)
    segments = DeviceSegment("GPU-1f", "00ff" * 32, 4096), DeviceSegment("3", "a0" * 64, 4096)
    for address in (on_host, replace(on_host, segments=segments)):
        assert RingAddress.from_json(address.to_json()) == address
        assert pickle.loads(pickle.dumps(address)) == address
    with pytest.raises(ValueError, match="one for each of 2"):
        replace(on_host, segments=segments[:1])
    for text in ("{}", json.dumps({"path": "x"}), on_host.to_json().replace("path", "pfad")):
        with pytest.raises(ValueError, match="not the address"):
            RingAddress.from_json(text)


# --- allocation -----------------------------------------------------------------------------------


def test_freed_neighbours_become_one_hole(owner: RingOwner) -> None:
    slots = [owner.allocate(8) for _ in range(4)]
    assert owner.allocate(8) is None
    owner.free(slots[0])
    owner.free(slots[2])
    # Two holes of one slot each hold no sample of two slots' size.
    assert owner.allocate(16) is None
    owner.free(slots[1])
    assert owner.allocate(16) is not None
    owner.free(slots[3])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_slots_never_overlap_and_all_space_comes_back(
    num_shards: int, actions: list[tuple[bool, int]]
) -> None:
    layout = replace(LAYOUT, num_shards=num_shards)
    owner = make_owner(layout.slot_bytes(8) * 6, layout)
    held = []
    for is_free, number in actions:
        if is_free and held:
            owner.free(held.pop(number % len(held)))
        elif owner.layout.slot_bytes(number) > owner.capacity_bytes:
            continue
        elif (slot := owner.allocate(number)) is not None:
            held.append(slot)
        places = sorted((slot.offset, slot.offset + slot.num_bytes) for slot in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert len({slot.index for slot in held}) == len(held)
        assert owner.used_bytes == sum(slot.num_bytes for slot in held)
    for slot in held:
        owner.free(slot)
    assert owner.free_bytes == owner.capacity_bytes
    # One hole again: a sample that fills the whole ring fits.
    largest = max(n for n in range(1, 200) if layout.slot_bytes(n) <= owner.capacity_bytes)
    assert owner.allocate(largest) is not None
    owner.close()


def test_a_full_header_table_makes_allocation_wait() -> None:
    layout = RingLayout(1, 1, "bfloat16")
    owner = make_owner((MAX_SLOTS + 1) * layout.slot_bytes(1), layout)
    slots = [owner.allocate(1) for _ in range(MAX_SLOTS)]
    assert None not in slots
    assert owner.free_bytes == layout.slot_bytes(1)
    assert owner.allocate(1) is None
    owner.free(slots[5])
    assert owner.allocate(1).index == 5
    owner.close()


def test_freeing_twice_or_a_foreign_slot_is_refused(owner: RingOwner) -> None:
    slot = owner.allocate(4)
    owner.free(slot)
    with pytest.raises(ValueError, match="not handed out"):
        owner.free(slot)
    again = owner.allocate(4)
    with pytest.raises(ValueError, match="not handed out"):
        owner.free(slot)
    owner.free(again)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="ring_bytes"):
        RingOwner.create(127, LAYOUT)
    owner = make_owner(LAYOUT.slot_bytes(8))
    with pytest.raises(ValueError, match="max_tokens"):
        owner.allocate(9)
    with pytest.raises(ValueError, match="1 token or more"):
        owner.allocate(0)
    with pytest.raises(ValueError, match="allowed: 0 to 0"):
        RingWriter.attach(owner.address, 1)
    owner.close()
    with pytest.raises(ValueError, match="one GPU for each"):
        RingOwner.create(1 << 16, LAYOUT, ("0", "1"))
    with pytest.raises(ValueError, match="float16"):
        RingLayout(4, 4, "float16")
    for name in ("hidden_size", "num_context_features", "num_shards"):
        with pytest.raises(ValueError, match=name):
            RingLayout(**({"num_context_features": 4, "hidden_size": 4} | {name: 0}))
