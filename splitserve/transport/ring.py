"""The ring: anonymous shared memory in which samples wait between the target and the trainer.

The memory comes from `memfd_create`, so it has no name: when its last holder dies, however it
dies, nothing is left behind. Other processes of the same user open it as `/proc/<pid>/fd/<n>`.
One process owns the ring and alone allocates; the target engine writes rows, trainer ranks read.

Shapes: T tokens of a sample, n rows of one prefill chunk, K captured layers, H hidden size.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from bisect import bisect_left
from dataclasses import dataclass

import torch

from splitserve.messages import SlotRef
from splitserve.transport.layout import (
    ALIGNMENT_BYTES,
    FLAG_FAILED,
    FLAG_GAP,
    FLAG_WIDTH,
    HEADER_BYTES,
    MAGIC,
    RingLayout,
    SlotHeader,
)

__all__ = [
    "HEADER_BYTES",
    "RingLayout",
    "RingOwner",
    "RingReader",
    "RingWriter",
    "RowWidthError",
    "SampleStates",
    "StaleSlotError",
    "token_checksum",
]


class StaleSlotError(RuntimeError):
    """The place in the ring has been given to another sample since."""


class RowWidthError(ValueError):
    """Rows of another width than the ring's: wrong number of layers, or another target."""


@dataclass(frozen=True, slots=True)
class SampleStates:
    """A sample's states, as views of the ring: valid only until its slot is freed."""

    features: torch.Tensor
    """[T, K*H]"""
    target_states: torch.Tensor
    """[T, H], after the final norm."""


def token_checksum(token_ids: torch.Tensor, start: int = 0) -> int:
    """CRC-32 of int64 token ids [n]; `start` is the checksum of what came before them."""
    return zlib.crc32(token_ids.to("cpu", torch.int64).contiguous().numpy().tobytes(), start)


class _Mapping:
    """A shared mapping of the whole ring."""

    def __init__(self, descriptor: int, layout: RingLayout) -> None:
        self.layout = layout
        self.capacity_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.capacity_bytes)

    def header(self, slot: SlotRef) -> SlotHeader:
        """The slot's header; raises StaleSlotError if it is not this allocation's."""
        if slot.offset + slot.num_bytes > self.capacity_bytes:
            raise StaleSlotError(f"slot {slot} lies outside a ring of {self.capacity_bytes} bytes")
        header = SlotHeader.unpack_from(self._map, slot.offset)
        if header.magic != MAGIC or header.generation != slot.generation:
            raise StaleSlotError(
                f"slot at byte {slot.offset} holds generation {header.generation}, "
                f"asked for {slot.generation}"
            )
        if header.num_tokens != slot.num_tokens:
            raise StaleSlotError(
                f"slot at byte {slot.offset} is for {header.num_tokens} tokens, "
                f"asked for {slot.num_tokens}"
            )
        return header

    def put_header(self, slot: SlotRef, header: SlotHeader) -> None:
        header.pack_into(self._map, slot.offset)

    def views(self, slot: SlotRef) -> SampleStates:
        """Tensors [T, K*H] and [T, H] over the slot's memory."""
        layout, num_tokens = self.layout, slot.num_tokens
        features_start = slot.offset + HEADER_BYTES
        states_start = features_start + layout.features_bytes(num_tokens)
        return SampleStates(
            features=self._tensor(features_start, num_tokens, layout.num_context_features),
            target_states=self._tensor(states_start, num_tokens, layout.hidden_size),
        )

    def _tensor(self, start: int, num_rows: int, num_columns: int) -> torch.Tensor:
        flat = torch.frombuffer(
            self._map,
            dtype=self.layout.torch_dtype,
            count=num_rows * num_columns,
            offset=start,
        )
        return flat.view(num_rows, num_columns)

    def close(self) -> None:
        # While a tensor looks into the mapping it cannot be closed; it goes with that tensor.
        with contextlib.suppress(BufferError):
            self._map.close()


class RingOwner:
    """Creates the ring and hands out its space, first fit, neighbours merged when freed."""

    def __init__(self, descriptor: int, layout: RingLayout) -> None:
        self._descriptor = descriptor
        self._mapping = _Mapping(descriptor, layout)
        self.layout = layout
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._holes: list[tuple[int, int]] = [(0, self._mapping.capacity_bytes)]
        self._slots: dict[int, SlotRef] = {}
        self._next_generation = 1

    @classmethod
    def create(cls, capacity_bytes: int, layout: RingLayout) -> RingOwner:
        """Make a ring of `capacity_bytes`; pages take memory only once they are written.

        Raises ValueError if not even a sample of one token fits.
        """
        capacity_bytes -= capacity_bytes % ALIGNMENT_BYTES
        if capacity_bytes < layout.slot_bytes(1):
            raise ValueError(
                f"layout.ring_bytes is {capacity_bytes}; one token alone needs "
                f"{layout.slot_bytes(1)} bytes; allowed: room for several whole samples"
            )
        descriptor = os.memfd_create("splitserve-ring", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, capacity_bytes)
        return cls(descriptor, layout)

    @property
    def capacity_bytes(self) -> int:
        """Size of the ring."""
        return self._mapping.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out; possibly in several holes."""
        return sum(size for _, size in self._holes)

    @property
    def used_bytes(self) -> int:
        """Bytes handed out."""
        return self.capacity_bytes - self.free_bytes

    def allocate(self, num_tokens: int) -> SlotRef | None:
        """A slot for a sample of that many tokens, or None while no hole is large enough.

        Raises ValueError for a sample that could not fit an empty ring either.
        """
        if num_tokens < 1:
            raise ValueError(f"a slot is for 1 token or more, asked for {num_tokens}")
        num_bytes = self.layout.slot_bytes(num_tokens)
        if num_bytes > self.capacity_bytes:
            raise ValueError(
                f"layout.ring_bytes is {self.capacity_bytes}; a sample of {num_tokens} tokens "
                f"needs {num_bytes}; raise layout.ring_bytes or lower data.max_tokens"
            )
        for index, (offset, size) in enumerate(self._holes):
            if size < num_bytes:
                continue
            if size == num_bytes:
                del self._holes[index]
            else:
                self._holes[index] = (offset + num_bytes, size - num_bytes)
            slot = SlotRef(offset, num_bytes, self._next_generation, num_tokens)
            self._next_generation += 1
            self._slots[offset] = slot
            self._mapping.put_header(slot, SlotHeader(MAGIC, slot.generation, num_tokens))
            return slot
        return None

    def free(self, slot: SlotRef) -> None:
        """Take a slot back. Raises ValueError if it is not handed out (anymore)."""
        if self._slots.get(slot.offset) != slot:
            raise ValueError(
                f"slot {slot} is not handed out: freed twice, or not a slot of this ring"
            )
        del self._slots[slot.offset]
        # Whoever still holds this reference must not take later content for its own.
        self._mapping.put_header(slot, SlotHeader(0, 0, 0))
        index = bisect_left(self._holes, (slot.offset, 0))
        start, end = slot.offset, slot.offset + slot.num_bytes
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end - start))

    def close(self) -> None:
        """Let go of the memory; it is gone when every other process has, too."""
        if self._descriptor >= 0:
            self._mapping.close()
            os.close(self._descriptor)
            self._descriptor = -1


class _Attached:
    """A process that works on a ring owned by another."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping = mapping
        self.layout = mapping.layout

    @staticmethod
    def _map(path: str, layout: RingLayout) -> _Mapping:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _Mapping(descriptor, layout)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the mapping; tensors made from it stay valid."""
        self._mapping.close()


class RingWriter(_Attached):
    """Fills slots row by row, as prefill chunks arrive."""

    @classmethod
    def attach(cls, path: str, layout: RingLayout) -> RingWriter:
        """Map the ring at `RingOwner.path`; OSError if its owner is gone."""
        return cls(cls._map(path, layout))

    def begin(self, slot: SlotRef) -> None:
        """Forget what the slot has received so far. Raises StaleSlotError."""
        self._mapping.header(slot)
        self._mapping.put_header(slot, SlotHeader(MAGIC, slot.generation, slot.num_tokens))

    def write_rows(
        self,
        slot: SlotRef,
        start_row: int,
        features: torch.Tensor,
        states: torch.Tensor,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """Copy rows `start_row`.. of features [n, K*H], states [n, H] (and token ids [n]).

        Rows come in order; `start_row` 0 starts over, as after a retraction. Anything else than
        the next row marks the slot as partial until then. Raises StaleSlotError, and ValueError
        for rows that do not belong into the slot.
        """
        layout = self.layout
        num_rows = features.shape[0]
        if features.shape != (num_rows, layout.num_context_features) or states.shape != (
            num_rows,
            layout.hidden_size,
        ):
            raise RowWidthError(
                f"captured features {tuple(features.shape)} and states {tuple(states.shape)} do "
                f"not fit the ring's widths {layout.num_context_features} and "
                f"{layout.hidden_size}: wrong layer count or wrong target"
            )
        if start_row < 0 or start_row + num_rows > slot.num_tokens:
            raise ValueError(
                f"rows {start_row}..{start_row + num_rows} lie outside a slot of "
                f"{slot.num_tokens} tokens"
            )
        if start_row == 0:
            self.begin(slot)
        header = self._mapping.header(slot)
        if start_row != header.rows_written:
            header.flags |= FLAG_GAP
        views = self._mapping.views(slot)
        features_in = views.features[start_row : start_row + num_rows].copy_(features)
        states_in = views.target_states[start_row : start_row + num_rows].copy_(states)
        # A sum is finite only if every term is, and needs no mask of the block's size; in float32
        # the finite values of a bfloat16 row cannot overflow unless they are garbage anyway.
        finite = (features_in.sum(1, dtype=torch.float32).isfinite()) & (
            states_in.sum(1, dtype=torch.float32).isfinite()
        )
        header.nonfinite_rows += num_rows - int(finite.sum())
        header.rows_written = start_row + num_rows
        if token_ids is not None:
            header.token_crc = token_checksum(token_ids, header.token_crc)
        self._mapping.put_header(slot, header)

    def fail(self, slot: SlotRef, error: Exception) -> None:
        """Mark the slot as spoilt by an error of its writer."""
        header = self._mapping.header(slot)
        header.flags |= FLAG_WIDTH if isinstance(error, RowWidthError) else FLAG_FAILED
        self._mapping.put_header(slot, header)

    def rows_written(self, slot: SlotRef) -> int:
        """Rows that have arrived in order. Raises StaleSlotError."""
        return self._mapping.header(slot).rows_written

    def check(self, slot: SlotRef, token_ids: torch.Tensor | None = None) -> str | None:
        """None for a complete, finite slot, else the reason why it is not.

        With token ids [T], the rows must also be those of these tokens.
        """
        try:
            header = self._mapping.header(slot)
        except StaleSlotError:
            return "stale_slot"
        if header.flags & FLAG_WIDTH:
            return "engine_error: captured rows have another width: wrong layers or another target"
        if header.flags & FLAG_FAILED:
            return "engine_error: the capture hook failed; its traceback is in the engine's log"
        if header.flags & FLAG_GAP or header.rows_written != slot.num_tokens:
            return "partial_capture"
        if token_ids is not None and token_checksum(token_ids) != header.token_crc:
            return "engine_error: captured rows belong to other tokens"
        if header.nonfinite_rows:
            return "nonfinite"
        return None


class RingReader(_Attached):
    """Reads complete slots without a copy."""

    @classmethod
    def attach(cls, path: str, layout: RingLayout) -> RingReader:
        """Map the ring at `RingOwner.path`; OSError if its owner is gone."""
        return cls(cls._map(path, layout))

    def read(self, slot: SlotRef) -> SampleStates:
        """Views of the slot's rows, features [T, K*H] and target states [T, H].

        Raises StaleSlotError if the slot is another sample's by now, and ValueError if it is
        incomplete or marked as spoilt.
        """
        header = self._mapping.header(slot)
        if header.rows_written != slot.num_tokens or header.flags:
            raise ValueError(
                f"slot {slot} has {header.rows_written} of {slot.num_tokens} rows, flags "
                f"{header.flags}: only a slot reported as taught may be read"
            )
        return self._mapping.views(slot)
