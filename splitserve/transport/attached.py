"""The ring's memory as any process on it sees it: headers, and the rows of each shard.

Shapes: T tokens of a sample, t rows of it in one shard, K captured layers, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitserve.messages import SlotRef
from splitserve.transport.layout import (
    FLAG_FAILED,
    FLAG_GAP,
    FLAG_POSITIONS,
    FLAG_WIDTH,
    HEADER_BYTES,
    HEADER_WORDS,
    RingAddress,
    SlotHeader,
    stamp_of,
    token_checksum,
)
from splitserve.transport.memory import DeviceMemory, HostMemory


class StaleSlotError(RuntimeError):
    """The place in the ring has been given to another sample since."""


class RowWidthError(ValueError):
    """Rows of another width than the ring's: wrong number of layers, or another target."""


@dataclass(frozen=True, slots=True)
class SampleStates:
    """A sample's states: views of the ring where it allows that, else copies.

    Views are valid until the slot is freed or the ring is closed, so that whoever works on them
    on a GPU reports the slot as done only after that work has ended. Copies are in the order of
    the stream that was current; the slot must stay until they have ended.
    """

    features: torch.Tensor
    """[T, K*H]"""
    target_states: torch.Tensor
    """[T, H], after the final norm."""


class RingMemory:
    """Header table and payload. GPU memory is opened when it is first needed.

    So a process that only looks at headers starts up no GPU.
    """

    def __init__(
        self, address: RingAddress, host: HostMemory, segments: list[DeviceMemory] | None = None
    ) -> None:
        self.address, self.layout = address, address.layout
        self.host = host
        self.num_slots = self.layout.num_slots(address.capacity_bytes)
        self.table_bytes = self.layout.table_bytes(address.capacity_bytes)
        self._segments: dict[int, DeviceMemory] = dict(enumerate(segments or []))

    @property
    def on_device(self) -> bool:
        """Whether the payload is in GPU memory."""
        return bool(self.address.segments)

    def table(self) -> torch.Tensor:
        """The headers, int64 [num_slots, num_shards, 8]."""
        shape = self.num_slots, self.layout.num_shards, HEADER_WORDS
        num_bytes = self.num_slots * self.layout.num_shards * HEADER_BYTES
        return self.host.bytes[:num_bytes].view(torch.int64).view(shape)

    def payload(self, shard: int) -> torch.Tensor:
        """The shard's payload, uint8 [capacity_bytes]."""
        capacity = self.address.capacity_bytes
        if not self.on_device:
            start = self.table_bytes + shard * capacity
            return self.host.bytes[start : start + capacity]
        if shard not in self._segments:
            self._segments[shard] = DeviceMemory.open(self.address.segments[shard])
        return self._segments[shard].bytes[:capacity]

    def header_offset(self, slot: SlotRef, shard: int) -> int:
        """Bytes from the table's start to the shard's header of the slot."""
        return (slot.index * self.layout.num_shards + shard) * HEADER_BYTES

    def header(self, slot: SlotRef, shard: int) -> SlotHeader:
        """The shard's header; raises StaleSlotError if it is not this allocation's."""
        end = slot.offset + slot.num_bytes
        if not (0 <= slot.index < self.num_slots and end <= self.address.capacity_bytes):
            raise StaleSlotError(
                f"slot {slot} lies outside a ring of {self.num_slots} slots and "
                f"{self.address.capacity_bytes} bytes"
            )
        header = SlotHeader.unpack_from(self.host.buffer, self.header_offset(slot, shard))
        if header.stamp != stamp_of(slot.generation) or header.num_tokens != slot.num_tokens:
            raise StaleSlotError(
                f"slot {slot.index} is not the one of generation {slot.generation} with "
                f"{slot.num_tokens} tokens anymore"
            )
        return header

    def headers(self, slot: SlotRef) -> list[SlotHeader]:
        """Every shard's header; raises StaleSlotError."""
        return [self.header(slot, shard) for shard in range(self.layout.num_shards)]

    def places(self, slot: SlotRef) -> tuple[int, int]:
        """Where in a shard's payload the sample's features and its states begin, counted in
        numbers of the ring's type."""
        size = self.layout.torch_dtype.itemsize
        states_offset = slot.offset + self.layout.features_bytes(slot.num_tokens)
        return slot.offset // size, states_offset // size

    def views(self, slot: SlotRef, shard: int) -> SampleStates:
        """The shard's rows of the sample, [t, K*H] and [t, H], over the slot's memory."""
        layout = self.layout
        first, last = layout.shard_rows(slot.num_tokens, shard)
        payload, size = self.payload(shard), layout.torch_dtype.itemsize

        def rows(place: int, width: int) -> torch.Tensor:
            begin, end = place * size, (place + (last - first) * width) * size
            return payload[begin:end].view(layout.torch_dtype).view(last - first, width)

        features, states = self.places(slot)
        return SampleStates(
            features=rows(features, layout.num_context_features),
            target_states=rows(states, layout.hidden_size),
        )

    def close(self) -> None:
        """Let go of all of it; see `HostMemory.close` and `DeviceMemory.close`."""
        for segment in self._segments.values():
            segment.close()
        self._segments = {}
        self.host.close()


class Attached:
    """A process that works on a ring owned by another."""

    def __init__(self, address: RingAddress) -> None:
        self._memory = RingMemory(address, HostMemory.attach(address.path))
        self.address, self.layout = address, address.layout

    def close(self) -> None:
        """Let go of the memory.

        Views of a host ring stay valid; those of a ring on a GPU must not be used anymore.
        """
        self._memory.close()

    def rows_written(self, slot: SlotRef) -> int:
        """Rows of the sample that every shard's writer has seen in order. Raises StaleSlotError."""
        return min(header.rows_written for header in self._memory.headers(slot))

    def check(self, slot: SlotRef, token_ids: torch.Tensor | None = None) -> str | None:
        """None for a complete, finite slot, else the reason why it is not.

        With token ids [T], the rows must also be those of these tokens. "partial_capture" may
        still become None while writes to a ring on a GPU are under way; another reason stays until
        the sample is written anew. Never waits for a GPU.
        """
        try:
            headers = self._memory.headers(slot)
        except StaleSlotError:
            return "stale_slot"
        flags = 0
        for header in headers:
            flags |= header.flags
        if flags & FLAG_WIDTH:
            return "engine_error: captured rows have another width: wrong layers or another target"
        if flags & FLAG_FAILED:
            return "engine_error: the capture hook failed; its traceback is in the engine's log"
        if flags & FLAG_POSITIONS:
            return "engine_error: captured rows are at other positions than their prefix says"
        if flags & FLAG_GAP or any(h.rows_written != slot.num_tokens for h in headers):
            return "partial_capture"
        if token_ids is not None:
            checksum = token_checksum(token_ids)
            if any(header.token_checksum != checksum for header in headers):
                return "engine_error: captured rows belong to other tokens"
        if any(header.nonfinite_rows for header in headers):
            return "nonfinite"
        return None
