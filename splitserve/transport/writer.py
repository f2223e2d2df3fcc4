"""The writing side of the ring: one writer per shard, beside the target.

On a GPU nothing here waits for it: rows, sums over them and finally the header are all work on the
current stream. The header comes last, so whoever sees a complete one may read the rows.

Shapes: n rows of a batch, R samples in it, K captured layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from splitserve.messages import SlotRef
from splitserve.transport.attached import Attached, RowWidthError, StaleSlotError
from splitserve.transport.layout import (
    FIRST_WRITER_WORD,
    FLAG_FAILED,
    FLAG_GAP,
    FLAG_POSITIONS,
    FLAG_WIDTH,
    NUM_SUMS,
    SEAL_FACTORS,
    RingAddress,
    checksum_terms,
    stamp_of,
)


class BatchRows(NamedTuple):
    """Which rows of a batch belong to which rows of a sample."""

    slot: SlotRef
    start_row: int
    """Row of the sample that the first one is."""
    first_row: int
    """Row of the batch where they begin."""
    num_rows: int


@dataclass
class _Progress:
    """What this writer knows of a slot."""

    generation: int
    num_rows: int = 0
    flags: int = 0
    sums: torch.Tensor | None = None
    """int64 [NUM_SUMS], where the rows were."""


class RingWriter(Attached):
    """Fills its shard of slots, as prefill chunks arrive.

    One writer at a time fills a shard, and a sample's chunks go through the same one.
    """

    def __init__(self, address: RingAddress, shard: int) -> None:
        if not 0 <= shard < address.layout.num_shards:
            raise ValueError(
                f"shard {shard} of a ring of {address.layout.num_shards}; allowed: 0 to "
                f"{address.layout.num_shards - 1}; make the ring for the tensor-parallel size"
            )
        super().__init__(address)
        self.shard = shard
        self._progress: dict[int, _Progress] = {}
        self._pinned: bool | None = None
        self._totals: torch.Tensor | None = None
        """int64 [slots, NUM_SUMS] on the GPU, kept by the kernels."""

    @classmethod
    def attach(cls, address: RingAddress, shard: int = 0) -> RingWriter:
        """Map the ring at `RingOwner.address`.

        Raises OSError if its owner is gone and ValueError for a shard that the ring has not.
        """
        return cls(address, shard)

    def write_rows(
        self,
        slot: SlotRef,
        start_row: int,
        features: torch.Tensor,
        states: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """Write rows `start_row`.. of a sample: features [n, K*H], states [n, H], token ids [n].

        As `write_batch`, for one sample. Raises StaleSlotError, too.
        """
        rows = BatchRows(slot, start_row, 0, features.shape[0])
        if self.write_batch([rows], features, states, token_ids):
            raise StaleSlotError(f"slot {slot} is another sample's by now")

    @torch.no_grad()
    def write_batch(
        self,
        batch: Sequence[BatchRows],
        features: torch.Tensor,
        states: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> list[SlotRef]:
        """Write this shard's part of the rows of several samples, each in a slot of its own.

        Rows of a sample come in order; `start_row` 0 starts over, as after a retraction. Anything
        else than the next row marks the slot as partial until then. Rows of the batch that no
        entry names are left out. With everything on a GPU, no call here waits for it.

        Args:
            batch: which rows go where.
            features: [n, K*H], any floating type.
            states: [n, H], the same.
            token_ids: [n], integers; without them `check` cannot compare tokens.
            positions: [n], integers, each row's position in its sample according to the target;
                a difference from what `batch` says spoils the slot.

        Returns:
            The slots left out because they are another sample's by now.

        Raises:
            RowWidthError: for other widths than the ring's.
            ValueError: for rows outside the batch or the sample, or a slot named twice.
        """
        num_rows = features.shape[0]
        self._check_shapes(features, states)
        if len({rows.slot.index for rows in batch}) != len(batch):
            raise ValueError("a slot may occur only once in a batch")
        found, stale = [], []
        for rows in batch:
            _check_range(rows, num_rows)
            try:
                self._memory.header(rows.slot, self.shard)
            except StaleSlotError:
                stale.append(rows.slot)
            else:
                found.append(rows)
        if found:
            for rows in found:
                self._advance(rows)
            # The kernel takes numbers side by side.
            dense = features.stride(1) == 1 and states.stride(1) == 1
            on_device = self._memory.on_device and features.is_cuda and dense
            if on_device and self._is_pinned(features.device):
                self._write_by_kernel(found, features, states, token_ids, positions)
            else:
                for rows in found:
                    self._copy(rows, features, states)
                sums = _sums(found, features, states, token_ids, positions)
                self._publish([rows.slot for rows in found], sums)
        return stale

    def fail(self, slot: SlotRef, error: Exception) -> None:
        """Mark the slot as spoilt by an error of its writer. Raises StaleSlotError."""
        self._memory.header(slot, self.shard)
        progress = self._progress_of(slot)
        progress.flags |= FLAG_WIDTH if isinstance(error, RowWidthError) else FLAG_FAILED
        # On a GPU in stream order as well, after the headers that are still under way.
        on_device = self._memory.on_device
        device = self._memory.payload(self.shard).device if on_device else torch.device("cpu")
        self._publish([slot], torch.zeros(NUM_SUMS, 1, dtype=torch.int64, device=device))

    def _check_shapes(self, features: torch.Tensor, states: torch.Tensor) -> None:
        layout, num_rows = self.layout, features.shape[0]
        widths = layout.num_context_features, layout.hidden_size
        if features.shape != (num_rows, widths[0]) or states.shape != (num_rows, widths[1]):
            raise RowWidthError(
                f"captured features {tuple(features.shape)} and states {tuple(states.shape)} do "
                f"not fit the ring's widths {widths[0]} and {widths[1]}: wrong layer count or "
                "wrong target"
            )

    def _progress_of(self, slot: SlotRef) -> _Progress:
        progress = self._progress.get(slot.index)
        if progress is None or progress.generation != slot.generation:
            progress = self._progress[slot.index] = _Progress(slot.generation)
        return progress

    def _advance(self, rows: BatchRows) -> None:
        if rows.start_row == 0:
            self._progress.pop(rows.slot.index, None)
        progress = self._progress_of(rows.slot)
        if rows.start_row != progress.num_rows:
            progress.flags |= FLAG_GAP
        progress.num_rows = rows.start_row + rows.num_rows

    def _copy(self, rows: BatchRows, features: torch.Tensor, states: torch.Tensor) -> None:
        """Copy those of the rows that this shard holds."""
        first, last, into_first = self._held(rows)
        if first == last:
            return
        views = self._memory.views(rows.slot, self.shard)
        into = slice(into_first, into_first + last - first)
        source = slice(rows.first_row + first, rows.first_row + last)
        # From a GPU to the host, or back, the header must not overtake the rows.
        asynchronous = features.is_cuda and self._memory.on_device
        views.features[into].copy_(features[source], non_blocking=asynchronous)
        views.target_states[into].copy_(states[source], non_blocking=asynchronous)

    def _held(self, rows: BatchRows) -> tuple[int, int, int]:
        """First and last but one of the rows that this shard holds, counted from the first of
        them all, and the shard's own row of the first one."""
        shard_first, shard_last = self.layout.shard_rows(rows.slot.num_tokens, self.shard)
        first = max(shard_first, rows.start_row)
        last = max(first, min(shard_last, rows.start_row + rows.num_rows))
        return first - rows.start_row, last - rows.start_row, first - shard_first

    def _write_by_kernel(
        self,
        batch: Sequence[BatchRows],
        features: torch.Tensor,
        states: torch.Tensor,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        """What `_copy`, `_sums` and `_publish` do, in two launches."""
        from splitserve.transport import kernels

        device = features.device
        if self._totals is None:
            shape = (self._memory.num_slots, NUM_SUMS)
            self._totals = torch.zeros(shape, dtype=torch.int64, device=device)
        meta = _upload(torch.tensor(self._meta(batch)), device)
        kernels.publish(
            meta,
            max(1, *(rows.num_rows for rows in batch)),
            features,
            states,
            None if token_ids is None else token_ids.to(device).contiguous(),
            None if positions is None else positions.to(device).contiguous(),
            self._numbers(),
            self._totals,
            self._memory.table(),
            self.shard,
        )

    def _meta(self, batch: Sequence[BatchRows]) -> list[list[int]]:
        """The rows of `kernels.META_WORDS` for each sample."""
        found = []
        for rows in batch:
            slot, start_row, first_row, num_rows = rows
            known = self._progress_of(slot)
            stamp = stamp_of(slot.generation)
            place = [first_row, num_rows, start_row, slot.index]
            state = [stamp, known.num_rows, known.flags, int(start_row == 0)]
            first, last, into = self._held(rows)
            features, states = self._memory.places(slot)
            layout = self.layout
            held = [
                first,
                last,
                features + into * layout.num_context_features,
                states + into * layout.hidden_size,
            ]
            found.append([*place, *state, *held])
        return found

    def _numbers(self) -> torch.Tensor:
        """The shard's payload in the ring's type."""
        payload, dtype = self._memory.payload(self.shard), self.layout.torch_dtype
        return payload[: len(payload) // dtype.itemsize * dtype.itemsize].view(dtype)

    def _publish(self, slots: Sequence[SlotRef], sums: torch.Tensor) -> None:
        """Add sums int64 [NUM_SUMS, R] to those of the slots, and write their headers."""
        device = sums.device
        progress = [self._progress_of(slot) for slot in slots]
        zero = torch.zeros(NUM_SUMS, dtype=torch.int64, device=device)
        before = [zero if p.sums is None else p.sums.to(device) for p in progress]
        sums = sums + torch.stack(before, dim=1)
        for column, known in enumerate(progress):
            known.sums = sums[:, column]
        known_words = [
            [stamp_of(p.generation) for p in progress],
            [p.num_rows for p in progress],
            [p.flags for p in progress],
        ]
        flat = [word for words in known_words for word in words]
        uploaded = _upload(torch.tensor([*flat, *SEAL_FACTORS]), device)
        stamps, num_rows, flags = uploaded[: len(flat)].view(3, -1).unbind()
        factors = uploaded[len(flat) :]
        nonfinite, misplaced, checksums = sums.unbind()
        flags = flags + (misplaced > 0) * FLAG_POSITIONS
        words = torch.stack([stamps, num_rows, nonfinite, flags, checksums], dim=1)
        words = torch.cat([words, (words * factors).sum(1, keepdim=True)], dim=1)  # [R, 6]
        if not self._memory.on_device:
            words = words.cpu()
        table = self._memory.table()
        asynchronous = words.is_cuda and self._is_pinned(device)
        for row, slot in enumerate(slots):
            header = table[slot.index, self.shard, FIRST_WRITER_WORD:]
            header.copy_(words[row], non_blocking=asynchronous)

    def _is_pinned(self, device: torch.device) -> bool:
        if self._pinned is None:
            self._pinned = self._memory.host.register(device, self._memory.table_bytes)
        return self._pinned


def _check_range(rows: BatchRows, batch_rows: int) -> None:
    _slot, start_row, first_row, num_rows = rows
    if start_row < 0 or num_rows < 0 or start_row + num_rows > rows.slot.num_tokens:
        raise ValueError(
            f"rows {start_row}..{start_row + num_rows} lie outside a slot of "
            f"{rows.slot.num_tokens} tokens"
        )
    if first_row < 0 or first_row + num_rows > batch_rows:
        raise ValueError(
            f"rows {first_row}..{first_row + num_rows} lie outside a batch of {batch_rows} rows"
        )


def _sums(
    batch: Sequence[BatchRows],
    features: torch.Tensor,
    states: torch.Tensor,
    token_ids: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """What is to be known of each sample's rows, int64 [NUM_SUMS, R], without waiting for it."""
    device, num_rows = features.device, features.shape[0]
    expected = torch.zeros(num_rows, dtype=torch.int64)
    for rows in batch:
        last = rows.first_row + rows.num_rows
        expected[rows.first_row : last] = torch.arange(
            rows.start_row, rows.start_row + rows.num_rows
        )
    bounds = [rows.first_row for rows in batch] + [rows.first_row + rows.num_rows for rows in batch]
    uploaded = _upload(torch.cat([torch.tensor(bounds), expected]), device)
    firsts, lasts = uploaded[: len(bounds)].view(2, -1).unbind()
    expected = uploaded[len(bounds) :]
    # A sum is finite only if every term is, and needs no mask of the block's size; in float32
    # the finite values of a bfloat16 row cannot overflow unless they are garbage anyway.
    finite = features.sum(1, dtype=torch.float32).isfinite()
    finite &= states.sum(1, dtype=torch.float32).isfinite()
    none = torch.zeros_like(expected)
    terms = [~finite, none, none]
    if positions is not None:
        terms[1] = positions.to(device) != expected
    if token_ids is not None:
        terms[2] = checksum_terms(token_ids.to(device), expected)
    # Differences of running sums: wrapping int64 keeps them exact.
    running = pad(torch.stack([term.to(torch.int64) for term in terms]).cumsum(1), (1, 0))
    return running.index_select(1, lasts) - running.index_select(1, firsts)


def _upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host numbers on the device, in stream order."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
