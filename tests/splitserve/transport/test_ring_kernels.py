"""The kernels of the ring's writer give the headers that torch gives."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from transport_testing import LAYOUT, random_rows, token_ids
from triton_testing import DEVICE, triton_module

from splitserve.messages import SlotRef
from splitserve.transport.ring import BatchRows, RingLayout, RingOwner, RingWriter

pytest.importorskip("triton", reason="triton has no build for this platform")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with triton_module("splitserve.transport.kernels") as module:
        yield module


class Pair:
    """A ring whose headers torch writes, and a table that the kernels fill beside it."""

    def __init__(self, kernels: ModuleType, layout: RingLayout = LAYOUT, shard: int = 0) -> None:
        self.kernels = kernels
        self.owner = RingOwner.create(1 << 14, layout)
        self.writer = RingWriter.attach(self.owner.address, shard)
        table = self.writer._memory.table()
        self.table = torch.zeros_like(table).to(DEVICE)
        self.payload = torch.full_like(self.writer._numbers(), 7.0).to(DEVICE)
        self.totals = torch.full((table.shape[0], 3), 77, dtype=torch.int64, device=DEVICE)

    def write(
        self,
        batch: list[BatchRows],
        features: torch.Tensor,
        states: torch.Tensor,
        ids: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        assert not self.writer.write_batch(batch, features, states, ids, positions)
        self.kernels.publish(
            torch.tensor(self.writer._meta(batch), device=DEVICE),
            max(rows.num_rows for rows in batch),
            features.to(DEVICE),
            states.to(DEVICE),
            None if ids is None else ids.to(DEVICE),
            None if positions is None else positions.to(DEVICE),
            self.payload,
            self.totals,
            self.table,
            self.writer.shard,
        )

    def assert_equal(self, *slots: SlotRef) -> None:
        numbers = [slot.index for slot in slots]
        expected = self.writer._memory.table()[numbers, self.writer.shard, 2:]
        assert expected.any()
        torch.testing.assert_close(self.table[numbers, self.writer.shard, 2:].cpu(), expected)
        written = self.payload.cpu().clone()
        for slot in slots:
            held = self.writer._memory.views(slot, self.writer.shard)
            places = self.writer._memory.places(slot)
            for place, view in zip(places, (held.features, held.target_states), strict=True):
                rows = min(len(view), self.writer._progress[slot.index].num_rows)
                end = place + rows * view.shape[1]
                found = written[place:end].view(-1, view.shape[1])
                assert torch.equal(found.nan_to_num(), view[:rows].nan_to_num())
                written[place:end] = 7.0
        assert bool((written == 7.0).all()), "rows of another place were written"


@pytest.fixture
def pair(kernels: ModuleType) -> Iterator[Pair]:
    made = Pair(kernels)
    yield made
    made.writer.close()
    made.owner.close()


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("with_positions", [True, False])
def test_headers_of_a_mixed_batch(pair: Pair, with_tokens: bool, with_positions: bool) -> None:
    slots = [pair.owner.allocate(n) for n in (5, 3, 6)]
    features, states = random_rows(13)
    features[4, 3] = float("nan")
    states[8, 0] = float("inf")
    features[12, 0] = float("-inf")
    batch = [
        BatchRows(slots[2], 0, 7, 4),
        BatchRows(slots[0], 0, 1, 5),
        BatchRows(slots[1], 0, 11, 2),
    ]
    positions = torch.tensor([9, 0, 1, 2, 3, 4, 9, 0, 1, 5, 3, 0, 1])
    pair.write(
        batch,
        features,
        states,
        token_ids(13) if with_tokens else None,
        positions if with_positions else None,
    )
    pair.assert_equal(*slots)


def test_chunks_add_up_and_a_new_start_forgets(pair: Pair) -> None:
    slot = pair.owner.allocate(7)
    ids = token_ids(7)
    features, states = random_rows(7)
    features[1, 1] = float("nan")
    for begin, end in ((0, 2), (2, 6), (6, 7)):
        rows = slice(begin, end)
        batch = [BatchRows(slot, begin, 0, end - begin)]
        positions = torch.arange(begin, end)
        pair.write(batch, features[rows], states[rows], ids[rows], positions)
        pair.assert_equal(slot)
    clean = features.nan_to_num()
    pair.write([BatchRows(slot, 0, 0, 7)], clean, states, ids, torch.arange(7))
    pair.assert_equal(slot)
    assert pair.writer.check(slot, ids) is None


@pytest.mark.parametrize("widths", [(12, 4), (96, 32)])
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_shard_gets_its_rows_of_every_chunk(
    kernels: ModuleType, shard: int, widths: tuple[int, int]
) -> None:
    layout = RingLayout(*widths, dtype="float32", num_shards=3)
    pair = Pair(kernels, layout, shard)
    slots = [pair.owner.allocate(n) for n in (8, 2)]
    ids = token_ids(10)
    features, states = random_rows(10, layout)
    # Rows 0-2, 3-5 and 6-7 of the first sample, one row and none of the second.
    for begin, end in ((0, 2), (2, 7), (7, 8)):
        rows = slice(begin, end)
        batch = [BatchRows(slots[0], begin, 0, end - begin)]
        pair.write(batch, features[rows], states[rows], ids[rows], None)
    pair.write([BatchRows(slots[1], 0, 8, 2)], features, states, ids, None)
    pair.assert_equal(*slots)
    pair.writer.close()
    pair.owner.close()


def test_wide_rows_of_bfloat16_are_looked_at_to_their_end(kernels: ModuleType) -> None:
    width, states = 2500, torch.zeros(3, 4, device=DEVICE)
    features = torch.ones(3, width, dtype=torch.bfloat16, device=DEVICE)
    features[1, -1] = float("inf")
    meta = torch.tensor([[0, 3, 0, 0, 5, 3, 0, 1, 1, 3, 0, 2 * width]], device=DEVICE)
    payload = torch.zeros(2 * (width + 4) + 1, dtype=torch.bfloat16, device=DEVICE)
    totals = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    table = torch.zeros(1, 1, 8, dtype=torch.int64, device=DEVICE)
    kernels.publish(meta, 3, features, states, None, None, payload, totals, table, 0)
    assert totals.tolist() == [[1, 0, 0]]
    assert torch.equal(payload[: 2 * width].view(2, width), features[1:])
    assert payload[2 * width :].tolist() == [0.0] * 9
