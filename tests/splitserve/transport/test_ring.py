"""The ring: allocation, what a writer may do, what a reader may see, and that nothing is left."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.transport.ring import (
    HEADER_BYTES,
    RingLayout,
    RingOwner,
    RingReader,
    RingWriter,
    RowWidthError,
    StaleSlotError,
)

LAYOUT = RingLayout(num_context_features=12, hidden_size=4, dtype="float32")


@pytest.fixture
def owner():
    ring = RingOwner.create(LAYOUT.slot_bytes(8) * 4, LAYOUT)
    yield ring
    ring.close()


def _rows(num_rows: int, layout: RingLayout = LAYOUT, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, layout.num_context_features, generator=generator)
    states = torch.randn(num_rows, layout.hidden_size, generator=generator)
    return features.to(layout.torch_dtype), states.to(layout.torch_dtype)


def test_slot_bytes_hold_the_rows_and_keep_blocks_aligned() -> None:
    layout = RingLayout(num_context_features=3, hidden_size=1, dtype="bfloat16")
    # 5 rows: 30 bytes of features and 10 of states, each padded to 64.
    assert layout.slot_bytes(5) == HEADER_BYTES + 64 + 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_written_in_chunks_come_back_unchanged(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    owner = RingOwner.create(1 << 16, layout)
    owner.allocate(3)
    slot = owner.allocate(7)
    writer = RingWriter.attach(owner.path, layout)
    features, states = _rows(7, layout)
    writer.write_rows(slot, 0, features[:4], states[:4])
    assert writer.check(slot) == "partial_capture"
    writer.write_rows(slot, 4, features[4:], states[4:])
    assert writer.rows_written(slot) == 7
    assert writer.check(slot) is None
    read = RingReader.attach(owner.path, layout).read(slot)
    assert torch.equal(read.features, features)
    assert torch.equal(read.target_states, states)
    owner.close()


def test_reading_copies_nothing(owner: RingOwner) -> None:
    slot = owner.allocate(2)
    writer = RingWriter.attach(owner.path, LAYOUT)
    writer.write_rows(slot, 0, *_rows(2))
    read = RingReader.attach(owner.path, LAYOUT).read(slot)
    features, states = _rows(2, seed=1)
    writer.write_rows(slot, 0, features, states)
    assert torch.equal(read.features, features)
    assert torch.equal(read.target_states, states)


def test_another_process_reads_and_writes_the_same_memory(owner: RingOwner) -> None:
    slot = owner.allocate(3)
    script = (
        "import sys, torch\n"
        "from splitserve.messages import SlotRef\n"
        "from splitserve.transport.ring import RingLayout, RingWriter\n"
        "layout = RingLayout(12, 4, 'float32')\n"
        "writer = RingWriter.attach(sys.argv[1], layout)\n"
        "slot = SlotRef(*map(int, sys.argv[2:]))\n"
        "writer.write_rows(slot, 0, torch.full((3, 12), 2.5), torch.full((3, 4), -1.0))\n"
    )
    numbers = [slot.offset, slot.num_bytes, slot.generation, slot.num_tokens]
    subprocess.run(
        [sys.executable, "-c", script, owner.path, *map(str, numbers)], check=True, timeout=120
    )
    read = RingReader.attach(owner.path, LAYOUT).read(slot)
    assert torch.equal(read.features, torch.full((3, 12), 2.5))
    assert torch.equal(read.target_states, torch.full((3, 4), -1.0))


def test_the_ring_has_no_name_and_is_gone_with_its_owner(owner: RingOwner) -> None:
    script = (
        "import os, signal\n"
        "from splitserve.transport.ring import RingLayout, RingOwner\n"
        "owner = RingOwner.create(1 << 20, RingLayout(12, 4, 'float32'))\n"
        "owner.allocate(4)\n"
        "print(owner.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert result.returncode == -9
    assert not [name for name in os.listdir("/dev/shm") if "splitserve" in name]
    with pytest.raises(OSError):
        RingReader.attach(result.stdout.decode().strip(), LAYOUT)


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
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_slots_never_overlap_and_all_space_comes_back(actions: list[tuple[bool, int]]) -> None:
    owner = RingOwner.create(LAYOUT.slot_bytes(8) * 6, LAYOUT)
    held = []
    for is_free, number in actions:
        if is_free and held:
            owner.free(held.pop(number % len(held)))
        elif (slot := owner.allocate(number)) is not None:
            held.append(slot)
        places = sorted((slot.offset, slot.offset + slot.num_bytes) for slot in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
        assert owner.used_bytes == sum(slot.num_bytes for slot in held)
    for slot in held:
        owner.free(slot)
    assert owner.free_bytes == owner.capacity_bytes
    # One hole again: the largest sample that can fit does.
    assert owner.allocate(48) is not None
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


def test_a_reference_to_a_freed_slot_is_stale_for_everyone(owner: RingOwner) -> None:
    old = owner.allocate(4)
    writer = RingWriter.attach(owner.path, LAYOUT)
    writer.write_rows(old, 0, *_rows(4))
    owner.free(old)
    new = owner.allocate(4)
    assert new.offset == old.offset
    with pytest.raises(StaleSlotError):
        writer.write_rows(old, 0, *_rows(4))
    with pytest.raises(StaleSlotError):
        RingReader.attach(owner.path, LAYOUT).read(old)
    assert writer.check(old) == "stale_slot"
    assert writer.rows_written(new) == 0


def test_a_gap_makes_the_slot_partial_until_it_is_restarted(owner: RingOwner) -> None:
    slot = owner.allocate(6)
    writer = RingWriter.attach(owner.path, LAYOUT)
    features, states = _rows(6)
    writer.write_rows(slot, 0, features[:2], states[:2])
    writer.write_rows(slot, 3, features[3:], states[3:])
    assert writer.rows_written(slot) == 6
    assert writer.check(slot) == "partial_capture"
    with pytest.raises(ValueError, match="6 of 6 rows"):
        RingReader.attach(owner.path, LAYOUT).read(slot)
    writer.write_rows(slot, 0, features, states)
    assert writer.check(slot) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["features", "states"])
def test_nonfinite_rows_are_counted(owner: RingOwner, value: float, where: str) -> None:
    slot = owner.allocate(5)
    writer = RingWriter.attach(owner.path, LAYOUT)
    features, states = _rows(5)
    (features if where == "features" else states)[[1, 3], 2] = value
    writer.write_rows(slot, 0, features, states)
    assert writer._mapping.header(slot).nonfinite_rows == 2
    assert writer.check(slot) == "nonfinite"
    writer.write_rows(slot, 0, *_rows(5))
    assert writer.check(slot) is None


def test_rows_of_other_tokens_are_noticed(owner: RingOwner) -> None:
    slot = owner.allocate(4)
    writer = RingWriter.attach(owner.path, LAYOUT)
    features, states = _rows(4)
    ids = torch.tensor([5, 6, 7, 8])
    writer.write_rows(slot, 0, features[:3], states[:3], ids[:3].int())
    writer.write_rows(slot, 3, features[3:], states[3:], ids[3:])
    assert writer.check(slot, ids) is None
    assert "other tokens" in writer.check(slot, torch.tensor([5, 6, 8, 7]))


def test_a_failed_slot_tells_its_cause(owner: RingOwner) -> None:
    slot = owner.allocate(4)
    writer = RingWriter.attach(owner.path, LAYOUT)
    features, states = _rows(4)
    with pytest.raises(RowWidthError) as caught:
        writer.write_rows(slot, 0, features[:, :8], states)
    writer.fail(slot, caught.value)
    assert "width" in writer.check(slot)
    writer.write_rows(slot, 0, features, states)
    writer.fail(slot, RuntimeError())
    assert "hook failed" in writer.check(slot)
    with pytest.raises(ValueError, match="outside a slot"):
        writer.write_rows(slot, 2, features, states)


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="ring_bytes"):
        RingOwner.create(128, LAYOUT)
    owner = RingOwner.create(LAYOUT.slot_bytes(8), LAYOUT)
    with pytest.raises(ValueError, match="max_tokens"):
        owner.allocate(9)
    with pytest.raises(ValueError, match="1 token or more"):
        owner.allocate(0)
    owner.close()
    with pytest.raises(ValueError, match="float16"):
        RingLayout(4, 4, "float16")
    with pytest.raises(ValueError, match="hidden_size"):
        RingLayout(4, 0)
