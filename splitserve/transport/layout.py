"""What a slot of the ring looks like: a header, the context features, the target states."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

import torch

HEADER_BYTES = 64
ALIGNMENT_BYTES = 64
MAGIC = 0x53505453_52494E47
FLAG_GAP = 1
FLAG_FAILED = 2
FLAG_WIDTH = 4

_HEADER = struct.Struct("<QQQQQQQQ")
assert _HEADER.size == HEADER_BYTES, _HEADER.size

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True)
class SlotHeader:
    """The first bytes of a slot; owner and writer fill it, the reader checks it."""

    magic: int
    generation: int
    num_tokens: int
    rows_written: int = 0
    nonfinite_rows: int = 0
    flags: int = 0
    token_crc: int = 0
    """CRC-32 of the token ids (int64) whose rows have arrived, in order."""

    def pack_into(self, buffer: memoryview | mmap, offset: int) -> None:
        """Write the header at `offset` bytes."""
        _HEADER.pack_into(
            buffer,
            offset,
            self.magic,
            self.generation,
            self.num_tokens,
            self.rows_written,
            self.nonfinite_rows,
            self.flags,
            self.token_crc,
            0,
        )

    @classmethod
    def unpack_from(cls, buffer: memoryview | mmap, offset: int) -> SlotHeader:
        """Read the header at `offset` bytes."""
        return cls(*_HEADER.unpack_from(buffer, offset)[:7])


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The widths and the type of the rows; the same for every process on a ring.

    Raises ValueError for a width below 1 or an unknown dtype.
    """

    num_context_features: int
    """Captured layers times hidden size."""
    hidden_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("num_context_features", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"RingLayout.{name} is {getattr(self, name)}; allowed: 1 or more; "
                    "take it from the target's configuration"
                )
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"RingLayout.dtype is {self.dtype!r}; allowed: {', '.join(_DTYPES)}; "
                "set target.dtype to one of them"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The rows' type."""
        return _DTYPES[self.dtype]

    def features_bytes(self, num_tokens: int) -> int:
        """Bytes of the feature block of a slot, padded to the alignment."""
        return _align(num_tokens * self.num_context_features * self.torch_dtype.itemsize)

    def states_bytes(self, num_tokens: int) -> int:
        """Bytes of the target-state block of a slot, padded to the alignment."""
        return _align(num_tokens * self.hidden_size * self.torch_dtype.itemsize)

    def slot_bytes(self, num_tokens: int) -> int:
        """Bytes of a whole slot for a sample of that many tokens."""
        return HEADER_BYTES + self.features_bytes(num_tokens) + self.states_bytes(num_tokens)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
