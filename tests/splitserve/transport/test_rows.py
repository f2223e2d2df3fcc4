"""What a writer may do to a slot and what a reader may see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_testing import (
    DEVICE,
    LAYOUT,
    attach_reader,
    attach_writers,
    make_owner,
    random_rows,
    settle,
    token_ids,
)

from splitserve.transport.layout import HEADER_BYTES
from splitserve.transport.ring import (
    BatchRows,
    RingOwner,
    RingReader,
    RingWriter,
    RowWidthError,
    StaleSlotError,
)


@pytest.fixture
def owner():
    ring = make_owner(LAYOUT.slot_bytes(8) * 4)
    yield ring
    ring.close()


@pytest.fixture
def writer(owner: RingOwner):
    attached = RingWriter.attach(owner.address)
    yield attached
    attached.close()


@pytest.fixture
def reader(owner: RingOwner):
    attached = attach_reader(owner)
    yield attached
    attached.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 9])
def test_rows_written_in_chunks_come_back_unchanged(dtype, num_shards, num_tokens) -> None:
    layout = replace(LAYOUT, dtype=dtype, num_shards=num_shards)
    owner = make_owner(1 << 16, layout)
    owner.allocate(3)
    slot = owner.allocate(num_tokens)
    reader = attach_reader(owner)
    features, states = random_rows(num_tokens, layout)
    ids = token_ids(num_tokens)
    cut = num_tokens // 2
    for number, writer in enumerate(attach_writers(owner)):
        settle()
        assert reader.check(slot) == "partial_capture"
        with pytest.raises(ValueError, match=f"0 of {num_tokens} rows"):
            reader.read(slot)
        writer.write_rows(slot, 0, features[:cut], states[:cut], ids[:cut])
        writer.write_rows(slot, cut, features[cut:], states[cut:], ids[cut:])
        settle()
        assert reader.rows_written(slot) == (num_tokens if number == num_shards - 1 else 0)
    assert reader.check(slot, ids) is None
    for device in {"cpu", DEVICE}:
        read = RingReader.attach(owner.address, device).read(slot)
        assert read.features.device.type == torch.device(device).type
        assert torch.equal(read.features.to(DEVICE), features)
        assert torch.equal(read.target_states.to(DEVICE), states)
    owner.close()


def test_reading_memory_at_hand_copies_nothing(owner, writer, reader) -> None:
    slot = owner.allocate(2)
    writer.write_rows(slot, 0, *random_rows(2))
    settle()
    read = reader.read(slot)
    features, states = random_rows(2, seed=1)
    writer.write_rows(slot, 0, features, states)
    settle()
    assert torch.equal(read.features, features)
    assert torch.equal(read.target_states, states)


@settings(max_examples=40, deadline=None)
@given(
    num_shards=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    budget=st.integers(1, 17),
    seed=st.integers(0, 99),
)
def test_samples_chunked_into_shared_batches_come_back_whole(
    num_shards: int, lengths: list[int], budget: int, seed: int
) -> None:
    layout = replace(LAYOUT, num_shards=num_shards)
    owner = make_owner(1 << 16, layout)
    writers = attach_writers(owner)
    samples = [
        (
            owner.allocate(length),
            *random_rows(length, layout, seed + i),
            token_ids(length, seed + i),
        )
        for i, length in enumerate(lengths)
    ]
    done = [0] * len(lengths)
    turn = seed
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        # As a prefill scheduler does: what fits goes into one batch, foreign rows in between.
        batch, parts, num_rows = [], [], 0
        for i in sorted(range(len(lengths)), key=lambda i: (i + turn) % len(lengths)):
            take = min(lengths[i] - done[i], budget - num_rows)
            if take <= 0:
                continue
            foreign = turn % 2
            num_rows += foreign
            slot, features, states, ids = samples[i]
            rows = slice(done[i], done[i] + take)
            batch.append((slot, done[i], num_rows, take))
            parts += [(torch.full((foreign, 12), torch.nan), torch.zeros(foreign, 4))]
            parts[-1] = (*(p.to(DEVICE) for p in parts[-1]), torch.full((foreign,), 7))
            parts.append((features[rows], states[rows], ids[rows]))
            done[i] += take
            num_rows += take
        together = [torch.cat(column) for column in zip(*parts, strict=True)]
        for writer in writers:
            assert writer.write_batch([BatchRows(*b) for b in batch], *together) == []
        turn += 1
    settle()
    reader = attach_reader(owner)
    for slot, features, states, ids in samples:
        assert reader.check(slot, ids) is None
        read = reader.read(slot)
        assert torch.equal(read.features, features)
        assert torch.equal(read.target_states, states)
    owner.close()


def test_a_reference_to_a_freed_slot_is_stale_for_everyone(owner, writer, reader) -> None:
    old = owner.allocate(4)
    writer.write_rows(old, 0, *random_rows(4))
    settle()
    owner.free(old)
    new = owner.allocate(4)
    assert (new.index, new.offset) == (old.index, old.offset)
    with pytest.raises(StaleSlotError):
        writer.write_rows(old, 0, *random_rows(4))
    with pytest.raises(StaleSlotError):
        reader.read(old)
    with pytest.raises(StaleSlotError):
        writer.fail(old, RuntimeError())
    with pytest.raises(StaleSlotError):
        reader.read(replace(new, num_tokens=5))
    with pytest.raises(StaleSlotError):
        reader.read(replace(new, index=10**6))
    assert writer.check(old) == "stale_slot"
    assert writer.rows_written(new) == 0


def test_a_stale_slot_in_a_batch_is_told_and_harms_no_other(owner, writer, reader) -> None:
    old, good = owner.allocate(3), owner.allocate(3)
    owner.free(old)
    features, states = random_rows(6)
    batch = [BatchRows(old, 0, 0, 3), BatchRows(good, 0, 3, 3)]
    assert writer.write_batch(batch, features, states) == [old]
    settle()
    assert torch.equal(reader.read(good).features, features[3:])


def test_words_of_another_allocation_or_halves_of_them_count_as_nothing(owner, writer) -> None:
    old = owner.allocate(4)
    writer.write_rows(old, 0, *random_rows(4), token_ids(4))
    settle()
    place = slice(old.index * HEADER_BYTES + 16, (old.index + 1) * HEADER_BYTES)
    table = writer._memory.host.buffer
    late = table[place]
    owner.free(old)
    new = owner.allocate(4)
    # The old sample's last words arrive after the slot has been given away.
    table[place] = late
    assert writer.check(new) == "partial_capture"
    assert writer.rows_written(new) == 0
    writer.write_rows(new, 0, *random_rows(4, seed=1), token_ids(4))
    settle()
    assert writer.check(new, token_ids(4)) is None
    whole = table[place]
    for number in range(len(whole)):
        torn = bytearray(whole)
        torn[number] ^= 0xFF
        table[place] = torn
        assert writer.check(new, token_ids(4)) == "partial_capture"
    table[place] = whole
    assert writer.check(new, token_ids(4)) is None


def test_a_gap_makes_the_slot_partial_until_it_is_restarted(owner, writer, reader) -> None:
    slot = owner.allocate(6)
    features, states = random_rows(6)
    writer.write_rows(slot, 0, features[:2], states[:2])
    writer.write_rows(slot, 3, features[3:], states[3:])
    settle()
    assert writer.rows_written(slot) == 6
    assert writer.check(slot) == "partial_capture"
    with pytest.raises(ValueError, match="6 of 6 rows"):
        reader.read(slot)
    writer.write_rows(slot, 0, features, states)
    settle()
    assert writer.check(slot) is None


def test_a_shard_that_is_behind_makes_the_slot_partial() -> None:
    layout = replace(LAYOUT, num_shards=2)
    owner = make_owner(1 << 14, layout)
    slot = owner.allocate(5)
    first, second = attach_writers(owner)
    features, states = random_rows(5)
    first.write_rows(slot, 0, features, states)
    second.write_rows(slot, 0, features[:4], states[:4])
    settle()
    assert first.check(slot) == "partial_capture"
    assert first.rows_written(slot) == 4
    second.fail(slot, RuntimeError())
    settle()
    assert "hook failed" in first.check(slot)
    owner.close()


def test_a_writer_that_did_not_see_the_beginning_cannot_go_on(owner, writer) -> None:
    slot = owner.allocate(4)
    features, states = random_rows(4)
    writer.write_rows(slot, 0, features[:2], states[:2])
    settle()
    restarted = RingWriter.attach(owner.address)
    restarted.write_rows(slot, 2, features[2:], states[2:])
    settle()
    assert restarted.check(slot) == "partial_capture"
    restarted.write_rows(slot, 0, features, states)
    settle()
    assert restarted.check(slot) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["features", "states"])
def test_nonfinite_rows_are_counted(owner, writer, value: float, where: str) -> None:
    slot = owner.allocate(5)
    features, states = random_rows(5)
    (features if where == "features" else states)[[1, 3], 2] = value
    writer.write_rows(slot, 0, features[:2], states[:2])
    writer.write_rows(slot, 2, features[2:], states[2:])
    settle()
    assert writer._memory.header(slot, 0).nonfinite_rows == 2
    assert writer.check(slot) == "nonfinite"
    writer.write_rows(slot, 0, *random_rows(5))
    settle()
    assert writer.check(slot) is None


def test_rows_of_other_tokens_are_noticed(owner, writer) -> None:
    slot = owner.allocate(4)
    features, states = random_rows(4)
    ids = torch.tensor([5, 6, 7, 8])
    writer.write_rows(slot, 0, features[:3], states[:3], ids[:3].int().to(DEVICE))
    writer.write_rows(slot, 3, features[3:], states[3:], ids[3:])
    settle()
    assert writer.check(slot, ids) is None
    # Another order, and a difference that vanishes in sums weighted by place.
    for other in ([5, 6, 8, 7], [6, 4, 8, 8], [5, 6, 7, 9]):
        assert "other tokens" in writer.check(slot, torch.tensor(other))


def test_rows_and_numbers_with_gaps_are_those_without(owner, writer, reader) -> None:
    ids = token_ids(16)
    features, states = random_rows(8)
    spread = torch.full((12, 16), 9.0, device=DEVICE)
    spread[:, ::2] = features.t()
    slot = owner.allocate(8)
    wide = ids.clone()
    wide[1::2] = -1
    batch = [BatchRows(slot, 0, 0, 8)]
    positions = torch.arange(16)[::2] // 2
    assert not writer.write_batch(batch, spread[:, ::2].t(), states, wide[::2], positions)
    settle()
    assert reader.check(slot, ids[::2]) is None
    found = reader.read(slot)
    assert torch.equal(found.features, features) and torch.equal(found.target_states, states)


def test_rows_out_of_step_with_their_positions_are_noticed(owner, writer) -> None:
    slots = owner.allocate(4), owner.allocate(3)
    features, states = random_rows(7)
    batch = [BatchRows(slots[0], 0, 0, 4), BatchRows(slots[1], 0, 4, 3)]
    positions = torch.tensor([0, 1, 2, 3, 0, 2, 1])
    writer.write_batch(batch, features, states, None, positions.int().to(DEVICE))
    settle()
    assert writer.check(slots[0]) is None
    assert "other positions" in writer.check(slots[1])


def test_a_failed_slot_tells_its_cause(owner, writer) -> None:
    slot = owner.allocate(4)
    features, states = random_rows(4)
    with pytest.raises(RowWidthError) as caught:
        writer.write_rows(slot, 0, features[:, :8], states)
    writer.fail(slot, caught.value)
    settle()
    assert "width" in writer.check(slot)
    writer.write_rows(slot, 0, features, states)
    writer.fail(slot, RuntimeError())
    settle()
    assert "hook failed" in writer.check(slot)


def test_rows_that_lie_nowhere_are_refused(owner, writer) -> None:
    slot = owner.allocate(4)
    features, states = random_rows(4)
    with pytest.raises(ValueError, match="outside a slot"):
        writer.write_rows(slot, 2, features, states)
    with pytest.raises(ValueError, match="outside a batch"):
        writer.write_batch([BatchRows(slot, 0, 1, 4)], features, states)
    with pytest.raises(ValueError, match="only once"):
        writer.write_batch([BatchRows(slot, 0, 0, 2), BatchRows(slot, 2, 2, 2)], features, states)
    assert writer.rows_written(slot) == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no stream to wait for")
def test_neither_writing_nor_reading_on_a_gpu_waits_for_it() -> None:
    layout = replace(LAYOUT, num_shards=2)
    owner = make_owner(1 << 16, layout)
    writers, reader = attach_writers(owner), attach_reader(owner)
    warm_up, *slots = (owner.allocate(9) for _ in range(3))
    features, states = random_rows(18, layout)
    ids, positions = token_ids(18).to(DEVICE), torch.arange(9, device=DEVICE).repeat(2)
    # Opens the memory, pins the header table and loads kernels.
    for writer in writers:
        writer.write_rows(warm_up, 0, features[:9], states[:9], ids[:9])
    settle()
    reader.read(warm_up)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows in (range(5), range(5, 9)):
            first, count = rows[0], len(rows)
            batch = [
                BatchRows(slots[0], first, first, count),
                BatchRows(slots[1], first, 9 + first, count),
            ]
            for writer in writers:
                writer.write_batch(batch, features, states, ids, positions)
        torch.cuda.set_sync_debug_mode("default")
        settle()
        torch.cuda.set_sync_debug_mode("error")
        read = [reader.read(slot) for slot in slots]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(writer._pinned for writer in writers)
    for slot, states_read, rows in zip(slots, read, (slice(9), slice(9, 18)), strict=True):
        assert reader.check(slot, ids[rows].cpu()) is None
        assert torch.equal(states_read.features, features[rows])
    owner.close()
