"""The ring: memory in which samples wait between the target and the trainer.

A table of headers lies in anonymous shared memory of the host. The states lie behind it, or, for a
ring on GPUs, in one allocation beside each of the target's tensor-parallel ranks. One process owns
the ring and alone allocates; the target engine writes rows, trainer ranks read. The owner outlives
both, so nothing is lost with one of them.

Shapes: T tokens of a sample, K captured layers, H hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from splitserve.messages import SlotRef
from splitserve.transport.attached import (
    Attached,
    RingMemory,
    RowWidthError,
    SampleStates,
    StaleSlotError,
)
from splitserve.transport.layout import (
    ALIGNMENT_BYTES,
    RingAddress,
    RingLayout,
    pack_owner,
    token_checksum,
)
from splitserve.transport.memory import DeviceMemory, DeviceMemoryError, HostMemory
from splitserve.transport.writer import BatchRows, RingWriter

__all__ = [
    "BatchRows",
    "DeviceMemoryError",
    "RingAddress",
    "RingLayout",
    "RingOwner",
    "RingReader",
    "RingWriter",
    "RowWidthError",
    "SampleStates",
    "StaleSlotError",
    "token_checksum",
]


class RingOwner:
    """Creates the ring and hands out its space, first fit, neighbours merged when freed."""

    def __init__(
        self,
        address: RingAddress,
        host: HostMemory,
        segments: list[DeviceMemory],
        number: int = 0,
    ) -> None:
        self.address, self.layout = address, address.layout
        self._number = number
        self._memory = RingMemory(address, host, segments)
        self._segments = segments
        self._holes: list[tuple[int, int]] = [(0, address.capacity_bytes)]
        self._indices = list(range(self._memory.num_slots - 1, -1, -1))
        self._slots: dict[int, SlotRef] = {}
        self._next_generation = 1

    @classmethod
    def create(
        cls,
        capacity_bytes: int,
        layout: RingLayout,
        gpus: Sequence[str] = (),
        *,
        number: int = 0,
    ) -> RingOwner:
        """Make a ring with `capacity_bytes` of payload in each shard.

        Args:
            capacity_bytes: on the host, pages take memory only once they are written; on GPUs
                all of it is taken at once.
            layout: widths, type and number of shards.
            gpus: id of each shard's GPU, as in this process's CUDA_VISIBLE_DEVICES; none keeps
                the ring on the host.
            number: which of several rings this is; its slots say so.

        Raises:
            ValueError: not even a sample of one token fits, or there is not one GPU per shard.
            DeviceMemoryError: the GPU memory is not to be had.
        """
        capacity_bytes -= capacity_bytes % ALIGNMENT_BYTES
        if capacity_bytes < layout.slot_bytes(1):
            raise ValueError(
                f"layout.ring_bytes is {capacity_bytes}; one token alone needs "
                f"{layout.slot_bytes(1)} bytes; allowed: room for several whole samples"
            )
        if gpus and len(gpus) != layout.num_shards:
            raise ValueError(
                f"a ring of {layout.num_shards} shards on the GPUs {', '.join(gpus)}; allowed: "
                "one GPU for each tensor-parallel rank of the target; correct the layout"
            )
        segments: list[DeviceMemory] = []
        try:
            for gpu in gpus:
                segments.append(DeviceMemory.allocate(gpu, capacity_bytes))
            num_bytes = layout.table_bytes(capacity_bytes)
            num_bytes += 0 if gpus else layout.num_shards * capacity_bytes
            host = HostMemory.create("splitserve-ring", num_bytes)
        except BaseException:
            for segment in segments:
                segment.free()
            raise
        address = RingAddress(
            host.path, layout, capacity_bytes, tuple(segment.segment for segment in segments)
        )
        return cls(address, host, segments, number)

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes of each shard."""
        return self.address.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of each shard that are not handed out; possibly in several holes."""
        return sum(size for _, size in self._holes)

    @property
    def used_bytes(self) -> int:
        """Bytes of each shard that are handed out."""
        return self.capacity_bytes - self.free_bytes

    def allocate(self, num_tokens: int) -> SlotRef | None:
        """A slot for a sample of that many tokens.

        None while no hole is large enough or the header table is full. Raises ValueError for a
        sample that could not fit an empty ring either.
        """
        if num_tokens < 1:
            raise ValueError(f"a slot is for 1 token or more, asked for {num_tokens}")
        num_bytes = self.layout.slot_bytes(num_tokens)
        if num_bytes > self.capacity_bytes:
            raise ValueError(
                f"layout.ring_bytes is {self.capacity_bytes}; a sample of {num_tokens} tokens "
                f"needs {num_bytes}; raise layout.ring_bytes or lower data.max_tokens"
            )
        if not self._indices:
            return None
        for number, (offset, size) in enumerate(self._holes):
            if size < num_bytes:
                continue
            if size == num_bytes:
                del self._holes[number]
            else:
                self._holes[number] = (offset + num_bytes, size - num_bytes)
            index = self._indices.pop()
            slot = SlotRef(
                index, offset, num_bytes, self._next_generation, num_tokens, self._number
            )
            self._next_generation += 1
            self._slots[index] = slot
            self._stamp(slot, slot.generation)
            return slot
        return None

    def free(self, slot: SlotRef) -> None:
        """Take a slot back. Raises ValueError if it is not handed out (anymore)."""
        if self._slots.get(slot.index) != slot:
            raise ValueError(
                f"slot {slot} is not handed out: freed twice, or not a slot of this ring"
            )
        del self._slots[slot.index]
        self._indices.append(slot.index)
        # Whoever still holds this reference must not take later content for its own.
        self._stamp(slot, 0)
        number = bisect_left(self._holes, (slot.offset, 0))
        start, end = slot.offset, slot.offset + slot.num_bytes
        if number < len(self._holes) and self._holes[number][0] == end:
            end += self._holes.pop(number)[1]
        if number > 0 and sum(self._holes[number - 1]) == start:
            number -= 1
            start = self._holes.pop(number)[0]
        self._holes.insert(number, (start, end - start))

    def close(self) -> None:
        """Let go of the memory. Idempotent.

        Memory of the host is gone when every other process has let go, too. That of GPUs is gone
        at once: no process may work on the ring anymore.
        """
        self._memory.close()
        for segment in self._segments:
            segment.free()

    def _stamp(self, slot: SlotRef, generation: int) -> None:
        for shard in range(self.layout.num_shards):
            offset = self._memory.header_offset(slot, shard)
            num_tokens = slot.num_tokens if generation else 0
            pack_owner(self._memory.host.buffer, offset, generation, num_tokens)


class RingReader(Attached):
    """Reads complete slots, without a copy where the memory is at hand."""

    def __init__(self, address: RingAddress, device: torch.device) -> None:
        super().__init__(address)
        self.device = device

    @classmethod
    def attach(cls, address: RingAddress, device: str | torch.device = "cpu") -> RingReader:
        """Map the ring at `RingOwner.address`, to read on that device.

        "cuda" without a number is the current GPU. Raises OSError if the ring's owner is gone.
        """
        wanted = torch.device(device)
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        return cls(address, wanted)

    def read(self, slot: SlotRef) -> SampleStates:
        """The sample's rows on the reader's device, features [T, K*H] and target states [T, H].

        Views of the ring where all rows lie together on that device, else copies on its current
        stream; `SampleStates` says how long each lasts. Raises StaleSlotError if the slot is
        another sample's by now, and ValueError if it is incomplete or marked as spoilt.
        """
        for header in self._memory.headers(slot):
            if header.rows_written != slot.num_tokens or header.flags:
                raise ValueError(
                    f"slot {slot} has {header.rows_written} of {slot.num_tokens} rows, flags "
                    f"{header.flags}: only a slot reported as taught may be read"
                )
        layout = self.layout
        places = {
            shard: rows
            for shard in range(layout.num_shards)
            if (rows := layout.shard_rows(slot.num_tokens, shard))[0] < rows[1]
        }
        parts = {shard: self._memory.views(slot, shard) for shard in places}
        if len(parts) == 1 and parts[0].features.device == self.device:
            return parts[0]
        widths = layout.num_context_features, layout.hidden_size
        features, states = (
            torch.empty(slot.num_tokens, width, dtype=layout.torch_dtype, device=self.device)
            for width in widths
        )
        # Between the host and a GPU the memory is not pinned, and the caller reads at once.
        asynchronous = self._memory.on_device and self.device.type == "cuda"
        for shard, (first, last) in places.items():
            part = parts[shard]
            features[first:last].copy_(part.features, non_blocking=asynchronous)
            states[first:last].copy_(part.target_states, non_blocking=asynchronous)
        return SampleStates(features, states)
