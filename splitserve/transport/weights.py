"""The draft's weights on their way from the trainers to the target engine.

One buffer holds one version of every tensor. Trainer rank 0 puts, the target's ranks get; a
sequence number, odd while the tensors change, tells a reader whether what it has copied was whole.
The buffer lies in anonymous shared memory of the host or on one GPU, and its owner outlives both
sides.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from splitserve.transport.memory import DeviceMemory, DeviceSegment, HostMemory

TensorEntry = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype ("bfloat16"), of one tensor."""

NO_VERSION = -1
ALIGNMENT_BYTES = 256
HEADER_BYTES = mmap.PAGESIZE
_HEADER = struct.Struct("<2q")


@dataclass(frozen=True, slots=True)
class ExchangeAddress:
    """Everything that another process needs in order to attach to the buffer.

    Raises ValueError for no tensors, a name twice or an unknown dtype.
    """

    path: str
    """The file with the header and, for a buffer on the host, the tensors after it."""
    tensors: tuple[TensorEntry, ...]
    """In the order in which they lie in the buffer."""
    segment: DeviceSegment | None = None
    """The GPU memory; None for a buffer on the host."""

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"an exchange buffer for the tensors {names}; allowed: one or more, with different "
                "names; list the draft's parameters"
            )
        for name, _, dtype in self.tensors:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise ValueError(
                    f"tensor {name!r} has dtype {dtype!r}; allowed: torch's names, such as "
                    "bfloat16; correct the list of tensors"
                )

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, each padded to the alignment."""
        return sum(_padded_bytes(entry) for entry in self.tensors)

    def to_json(self) -> str:
        """One line of text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExchangeAddress:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["tensors"] = tuple(
                (name, tuple(shape), dtype) for name, shape, dtype in fields["tensors"]
            )
            if fields["segment"] is not None:
                fields["segment"] = DeviceSegment(**fields["segment"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not the address of an exchange buffer ({error}): {text}") from error


class DraftExchange:
    """The buffer as one process sees it. Made by `create` in its owner, elsewhere by `attach`.

    One process puts at a time; any number may get.
    """

    def __init__(
        self,
        address: ExchangeAddress,
        host: HostMemory,
        segment: DeviceMemory | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.address = address
        self._host, self._segment, self._device = host, segment, device
        self._owned = segment
        self._seen = (NO_VERSION, 0)
        """Version and sequence number that `get` has seen last."""

    @classmethod
    def create(cls, tensors: Iterable[TensorEntry], gpu: str = "") -> DraftExchange:
        """Make a buffer that holds no version.

        Args:
            tensors: name, shape and dtype of each, in any order that stays.
            gpu: id as in this process's CUDA_VISIBLE_DEVICES; empty keeps it on the host.

        Raises:
            ValueError: impossible tensors.
            DeviceMemoryError: the GPU memory is not to be had.
        """
        entries = tuple((name, tuple(shape), dtype) for name, shape, dtype in tensors)
        num_bytes = ExchangeAddress("", entries).num_bytes
        segment = DeviceMemory.allocate(gpu, num_bytes) if gpu else None
        host = HostMemory.create("splitserve-draft", HEADER_BYTES + (0 if gpu else num_bytes))
        address = ExchangeAddress(host.path, entries, segment.segment if segment else None)
        exchange = cls(address, host, segment)
        exchange._set(0, NO_VERSION)
        return exchange

    @classmethod
    def attach(
        cls, address: ExchangeAddress, device: str | torch.device | None = None
    ) -> DraftExchange:
        """Map the buffer at another process's `address`; OSError if that process is gone.

        `get` gives tensors on `device`, by default wherever the buffer lies.
        """
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        return cls(address, HostMemory.attach(address.path), device=wanted)

    @property
    def version(self) -> int:
        """The version that the buffer holds; -1 while it holds none or it is being changed."""
        sequence, version = self._header()
        return NO_VERSION if sequence % 2 else version

    @torch.no_grad()
    def put(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every tensor; the version counts once the copies have ended.

        Copies on the current stream of each tensor's GPU and waits for it. If it fails or this
        process dies meanwhile, the buffer holds no version.

        Raises:
            ValueError: a version below 0, or tensors of other names, shapes or dtypes.
        """
        if version < 0:
            raise ValueError(f"version {version} of a draft; allowed: 0 or more; count its steps")
        self._check(tensors)
        sequence, _ = self._header()
        # Odd, also after a writer that died in between.
        sequence += 1 if sequence % 2 == 0 else 2
        self._set(sequence, NO_VERSION)
        views = self._views()
        for name, view in views.items():
            view.copy_(tensors[name], non_blocking=view.is_cuda and tensors[name].is_cuda)
        places = [tensor.device for group in (views, tensors) for tensor in group.values()]
        for device in {place for place in places if place.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._set(sequence + 1, version)

    def get(self, version: int) -> dict[str, torch.Tensor] | None:
        """That version's tensors by name, in the buffer's order; None if another or none is there.

        On the buffer's own device they are views, which the next `put` changes; on another one
        they are copies on its current stream. Either way, copy what is needed, wait for the copy,
        and believe it only if `still(version)`.
        """
        sequence, held = self._header()
        if sequence % 2 or held != version:
            return None
        self._seen = version, sequence
        views = self._views()
        if self._device is None:
            return views
        return {
            name: view.to(self._device, non_blocking=view.is_cuda and self._device.type == "cuda")
            for name, view in views.items()
        }

    def still(self, version: int) -> bool:
        """Whether the tensors that the last `get` gave are still that version's, unchanged."""
        return self._seen == (version, self._header()[0])

    def close(self) -> None:
        """Let go of the memory; what the owner took on a GPU is gone with that, so it closes last.

        Views on a GPU must not be used anymore. Idempotent.
        """
        if self._owned is not None:
            self._owned.free()
        elif self._segment is not None:
            self._segment.close()
        self._segment = None
        self._host.close()

    def _header(self) -> tuple[int, int]:
        """Sequence number and version."""
        sequence, version = _HEADER.unpack_from(self._host.buffer, 0)
        return sequence, version

    def _set(self, sequence: int, version: int) -> None:
        _HEADER.pack_into(self._host.buffer, 0, sequence, version)

    def _views(self) -> dict[str, torch.Tensor]:
        memory = self._bytes()
        views, offset = {}, 0
        for entry in self.address.tensors:
            name, shape, dtype = entry
            flat = memory[offset : offset + _num_bytes(entry)]
            views[name] = flat.view(getattr(torch, dtype)).view(shape)
            offset += _padded_bytes(entry)
        return views

    def _bytes(self) -> torch.Tensor:
        if self.address.segment is None:
            return self._host.bytes[HEADER_BYTES:]
        if self._segment is None:
            self._segment = DeviceMemory.open(self.address.segment)
        return self._segment.bytes

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        wrong = [f"{name}: not expected" for name in tensors.keys() - self._names()]
        for name, shape, dtype in self.address.tensors:
            tensor = tensors.get(name)
            if tensor is None:
                wrong.append(f"{name}: missing")
            elif (tuple(tensor.shape), tensor.dtype) != (shape, getattr(torch, dtype)):
                found = str(tensor.dtype).removeprefix("torch.")
                wrong.append(f"{name}: {found} {tuple(tensor.shape)} instead of {dtype} {shape}")
        if wrong:
            raise ValueError(
                f"these tensors are not those of the exchange buffer: {'; '.join(sorted(wrong))}; "
                "make the buffer from the draft that is trained"
            )

    def _names(self) -> set[str]:
        return {name for name, _, _ in self.address.tensors}


def _num_bytes(entry: TensorEntry) -> int:
    _, shape, dtype = entry
    return math.prod(shape) * getattr(torch, dtype).itemsize


def _padded_bytes(entry: TensorEntry) -> int:
    return -(-_num_bytes(entry) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
