"""What a ring looks like: a table of slot headers, and one payload per shard.

A header has 8 int64 words. The ring's owner writes the first two, which say whose slot it is; the
writer of that shard writes the other six in one piece, which say what has arrived. These are
worked out wherever the rows are, on a GPU too, and end in a seal over themselves: words of another
allocation, or a half of them, count as nothing.
"""

from __future__ import annotations

import json
import mmap as mmap_module
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Any

import torch

from splitserve.transport.memory import DeviceSegment

HEADER_BYTES = 64
HEADER_WORDS = 8
FIRST_WRITER_WORD = 2
ALIGNMENT_BYTES = 64
MAX_SLOTS = 65536

FLAG_GAP = 1
FLAG_FAILED = 2
FLAG_WIDTH = 4
FLAG_POSITIONS = 8

_HEADER = struct.Struct("<8q")
_OWNER = struct.Struct("<2q")
assert _HEADER.size == HEADER_BYTES, _HEADER.size

NUM_SUMS = 3
"""Of a writer: rows that are not finite, rows at wrong positions, token checksum."""

_STAMP = 0x5350 << 48
_MASK = 2**64 - 1
SEAL_FACTORS = (
    0x1E3779B97F4A7C15,
    0x3F58476D1CE4E5B9,
    0x14D049BB133111EB,
    0x5851F42D4C957F2D,
    0x2545F4914F6CDD1D,
)
"""Odd numbers; the seal is the sum of the words before it, each times its factor, in int64."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """One shard's header of a slot."""

    stamp: int
    """`stamp_of` the slot's generation; 0 if the slot is not handed out."""
    num_tokens: int
    rows_written: int = 0
    """Rows of the sample that have passed the shard's writer in order."""
    nonfinite_rows: int = 0
    flags: int = 0
    token_checksum: int = 0
    """`token_checksum` of the token ids whose rows have passed."""

    @classmethod
    def unpack_from(cls, buffer: memoryview | mmap, offset: int) -> SlotHeader:
        """Read the header at `offset` bytes."""
        stamp, num_tokens, writer_stamp, *words, seal = _HEADER.unpack_from(buffer, offset)
        if writer_stamp != stamp or seal != seal_of((writer_stamp, *words)):
            return cls(stamp, num_tokens)
        return cls(stamp, num_tokens, *words)


def pack_owner(buffer: memoryview | mmap, offset: int, generation: int, num_tokens: int) -> None:
    """Write the owner's words of the header at `offset` bytes; generation 0 for nobody's slot."""
    _OWNER.pack_into(buffer, offset, stamp_of(generation) if generation else 0, num_tokens)


def stamp_of(generation: int) -> int:
    """The word that marks a header as one of that allocation."""
    return _STAMP | generation


def seal_of(words: Sequence[int]) -> int:
    """The seal over the writer's other five words."""
    total = sum(word * factor for word, factor in zip(words, SEAL_FACTORS, strict=True)) & _MASK
    return total - 2**64 if total >= 2**63 else total


def checksum_terms(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Token ids [n] and their positions in the sample [n] as summands [n] of a checksum, int64.

    The sum, in wrapping int64, depends on the order of the tokens and not on that of the
    summands: chunks may be added up, on any device.
    """
    weights = positions.to(torch.int64) * SEAL_FACTORS[0] + SEAL_FACTORS[1]
    # Linear in the position, the sum would not notice every exchange of three tokens.
    weights = (weights ^ (weights >> 31)) * SEAL_FACTORS[2]
    weights = (weights ^ (weights >> 29)) | 1
    return (token_ids.to(torch.int64) + 1) * weights


def token_checksum(token_ids: torch.Tensor, start_row: int = 0) -> int:
    """Checksum of token ids [n] at positions `start_row`.. of their sample. Waits for a GPU."""
    positions = torch.arange(start_row, start_row + len(token_ids), device=token_ids.device)
    return int(checksum_terms(token_ids, positions).sum())


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The widths and the type of the rows; the same for every process on a ring.

    Of a sample of T tokens, shard r holds rows r*ceil(T/num_shards) up to those of the next: its
    features, then its states, at the same place in every shard's payload.

    Raises ValueError for a number below 1 or an unknown dtype.
    """

    num_context_features: int
    """Captured layers times hidden size."""
    hidden_size: int
    dtype: str = "bfloat16"
    num_shards: int = 1
    """Writers that each hold a part of every sample: the target's tensor-parallel ranks."""

    def __post_init__(self) -> None:
        for name in ("num_context_features", "hidden_size", "num_shards"):
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

    def shard_rows(self, num_tokens: int, shard: int) -> tuple[int, int]:
        """First row that the shard holds of a sample, and one past its last."""
        share = -(-num_tokens // self.num_shards)
        return min(shard * share, num_tokens), min((shard + 1) * share, num_tokens)

    def features_bytes(self, num_tokens: int) -> int:
        """Bytes of a sample's feature block in one shard, padded to the alignment."""
        return self._block_bytes(num_tokens, self.num_context_features)

    def states_bytes(self, num_tokens: int) -> int:
        """Bytes of a sample's target-state block in one shard, padded to the alignment."""
        return self._block_bytes(num_tokens, self.hidden_size)

    def slot_bytes(self, num_tokens: int) -> int:
        """Bytes that a sample takes in each shard."""
        return self.features_bytes(num_tokens) + self.states_bytes(num_tokens)

    def num_slots(self, capacity_bytes: int) -> int:
        """Rows of the header table of a ring with that many bytes in each shard."""
        return min(MAX_SLOTS, capacity_bytes // self.slot_bytes(1))

    def table_bytes(self, capacity_bytes: int) -> int:
        """Bytes of the header table: whole pages, so that it can be pinned."""
        headers = self.num_slots(capacity_bytes) * self.num_shards * HEADER_BYTES
        return _round_up(headers, mmap_module.PAGESIZE)

    def _block_bytes(self, num_tokens: int, width: int) -> int:
        share = -(-num_tokens // self.num_shards)
        return _round_up(share * width * self.torch_dtype.itemsize, ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class RingAddress:
    """Everything that another process needs in order to attach to a ring.

    Raises ValueError unless there are as many segments as shards, or none.
    """

    path: str
    """The file with the header table and, for a ring on the host, the payload after it."""
    layout: RingLayout
    capacity_bytes: int
    """Payload bytes of each shard."""
    segments: tuple[DeviceSegment, ...] = ()
    """GPU memory of each shard; none for a ring on the host."""

    def __post_init__(self) -> None:
        if self.segments and len(self.segments) != self.layout.num_shards:
            raise ValueError(
                f"RingAddress.segments has {len(self.segments)} entries; allowed: one for each of "
                f"{self.layout.num_shards} shards, or none; name one GPU per shard"
            )

    def to_json(self) -> str:
        """One line of text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RingAddress:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["layout"] = RingLayout(**fields["layout"])
            fields["segments"] = tuple(DeviceSegment(**s) for s in fields["segments"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not the address of a ring ({error}): {text}") from error


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
