"""One ring beside each target engine, used as if they were one.

A slot names its ring, so what is written by one engine is read by any trainer rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import SlotRef
from splitserve.transport.layout import RingAddress, RingLayout
from splitserve.transport.ring import RingOwner, RingReader, SampleStates


class Rings:
    """The owner of every ring. Slots come from the emptiest ring that has room."""

    def __init__(self, rings: Sequence[RingOwner]) -> None:
        self._rings = tuple(rings)

    @classmethod
    def create(
        cls, capacity_bytes: int, layout: RingLayout, groups: Sequence[Sequence[str]]
    ) -> Rings:
        """One ring for each engine.

        Args:
            capacity_bytes: of each shard of each ring.
            groups: for each engine the ids of its GPUs; an empty group keeps its ring on the host.

        Raises:
            ValueError: not even a sample of one token fits, or there is not one GPU per shard.
            DeviceMemoryError: the GPU memory is not to be had.
        """
        rings: list[RingOwner] = []
        try:
            for number, gpus in enumerate(groups):
                rings.append(RingOwner.create(capacity_bytes, layout, gpus, number=number))
        except BaseException:
            for ring in rings:
                ring.close()
            raise
        return cls(rings)

    @property
    def addresses(self) -> tuple[RingAddress, ...]:
        """How others attach, by engine."""
        return tuple(ring.address for ring in self._rings)

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes of one shard of every ring together."""
        return sum(ring.capacity_bytes for ring in self._rings)

    @property
    def used_bytes(self) -> int:
        """Bytes of one shard of every ring that are handed out."""
        return sum(ring.used_bytes for ring in self._rings)

    def allocate(self, num_tokens: int) -> SlotRef | None:
        """A slot for a sample of that many tokens; None while no ring has room.

        Raises ValueError for a sample that could not fit an empty ring either.
        """
        for ring in sorted(self._rings, key=lambda ring: ring.used_bytes):
            if (slot := ring.allocate(num_tokens)) is not None:
                return slot
        return None

    def free(self, slot: SlotRef) -> None:
        """Take a slot back. Raises ValueError if it is not handed out (anymore)."""
        self._rings[slot.ring].free(slot)

    def close(self) -> None:
        """Let go of the memory; no process may work on a ring anymore."""
        for ring in self._rings:
            ring.close()


class RingReaders:
    """Reads slots of every ring, on one device."""

    def __init__(self, readers: Sequence[RingReader]) -> None:
        self._readers = tuple(readers)

    @classmethod
    def attach(cls, addresses: Sequence[RingAddress], device: str) -> RingReaders:
        """Map the rings at `Rings.addresses`, to read on that device."""
        return cls([RingReader.attach(address, device) for address in addresses])

    def read(self, slot: SlotRef) -> SampleStates:
        """See `RingReader.read`."""
        return self._readers[slot.ring].read(slot)

    def close(self) -> None:
        """Let go of the rings."""
        for reader in self._readers:
            reader.close()
