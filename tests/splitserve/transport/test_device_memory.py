"""The book-keeping of GPU memory, with a runtime whose GPUs are host memory.

What CUDA itself does is tested on a GPU: the other files here, with SPLITSERVE_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from enum import IntEnum

import pytest
import torch
from transport_testing import LAYOUT, random_rows, token_ids

from splitserve.transport import memory
from splitserve.transport.memory import DeviceMemory, DeviceMemoryError, HostMemory
from splitserve.transport.ring import RingLayout, RingOwner, RingReader, RingWriter
from splitserve.transport.weights import DraftExchange


class Errors(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2


class Handle:
    """64 bytes at a fixed address, as cuda-bindings has them."""

    def __init__(self) -> None:
        self.content = ctypes.create_string_buffer(memory.HANDLE_BYTES)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.content)


class FakeRuntime:
    """The calls that the transport makes; notes them with the GPU that was current."""

    cudaError_t = Errors
    cudaIpcMemHandle_t = Handle
    cudaIpcMemLazyEnablePeerAccess = 1
    cudaHostRegisterPortable = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.blocks: dict[int, ctypes.Array] = {}
        self.mapped: list[int] = []
        self.pinned: dict[int, int] = {}
        self.full_gpu = -1
        self._current = threading.local()

    def _note(self, name: str) -> int:
        self.calls.append((name, self._current.index))
        return self._current.index

    def cudaSetDevice(self, index: int):  # noqa: N802
        self._current.index = index
        return (Errors.cudaSuccess,)

    def cudaMalloc(self, num_bytes: int):  # noqa: N802
        if self._note("malloc") == self.full_gpu:
            return Errors.cudaErrorMemoryAllocation, None
        block = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return Errors.cudaSuccess, ctypes.addressof(block)

    def cudaFree(self, pointer: int):  # noqa: N802
        self._note("free")
        del self.blocks[pointer]
        return (Errors.cudaSuccess,)

    def cudaIpcGetMemHandle(self, pointer: int):  # noqa: N802
        self._note("export")
        handle = Handle()
        handle.content[:8] = pointer.to_bytes(8, "little")
        return Errors.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int):  # noqa: N802
        assert flags == self.cudaIpcMemLazyEnablePeerAccess
        self._note("open")
        pointer = int.from_bytes(handle.content[:8], "little")
        assert pointer in self.blocks and pointer not in self.mapped
        self.mapped.append(pointer)
        return Errors.cudaSuccess, pointer

    def cudaIpcCloseMemHandle(self, pointer: int):  # noqa: N802
        self._note("close")
        self.mapped.remove(pointer)
        return (Errors.cudaSuccess,)

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int):  # noqa: N802
        assert flags == self.cudaHostRegisterPortable
        if self._note("pin") == self.full_gpu:
            return (Errors.cudaErrorMemoryAllocation,)
        self.pinned[pointer] = num_bytes
        return (Errors.cudaSuccess,)

    def cudaHostUnregister(self, pointer: int):  # noqa: N802
        self._note("unpin")
        del self.pinned[pointer]
        return (Errors.cudaSuccess,)

    def cudaDeviceSynchronize(self):  # noqa: N802
        self._note("wait")
        return (Errors.cudaSuccess,)

    def cudaGetLastError(self):  # noqa: N802
        self._note("clear")
        return (Errors.cudaErrorMemoryAllocation,)

    def cudaGetErrorString(self, error: Errors):  # noqa: N802
        return Errors.cudaSuccess, b"out of memory"


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()

    def tensor(pointer: int, num_bytes: int, _index: int) -> torch.Tensor:
        return torch.frombuffer(
            (ctypes.c_char * num_bytes).from_address(pointer), dtype=torch.uint8
        )

    monkeypatch.setattr(memory, "_runtime", lambda: fake)
    monkeypatch.setattr(memory, "_device_tensor", tensor)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-7")
    return fake


@pytest.fixture
def foreign(monkeypatch):
    """Memory counts as another process's: otherwise it is never opened."""
    monkeypatch.setattr(memory, "_allocated", {})

    def forget() -> None:
        memory._allocated.clear()

    return forget


def test_a_ring_on_two_gpus_is_filled_put_together_and_given_back(runtime) -> None:
    layout = RingLayout(12, 4, "float32", num_shards=2)
    owner = RingOwner.create(1 << 16, layout, ("GPU-7", "4"))
    assert [s.gpu for s in owner.address.segments] == ["GPU-7", "4"]
    assert [gpu for name, gpu in runtime.calls if name == "malloc"] == [1, 0]
    assert all(len(b) == memory.GRANULE_BYTES for b in runtime.blocks.values())
    owner.allocate(3)
    slot = owner.allocate(7)
    features, states = random_rows(7, layout)
    features, states = features.cpu(), states.cpu()
    for shard in range(2):
        writer = RingWriter.attach(owner.address, shard)
        writer.write_rows(slot, 0, features, states, token_ids(7))
        writer.close()
    reader = RingReader.attach(owner.address)
    assert reader.check(slot, token_ids(7)) is None
    read = reader.read(slot)
    assert torch.equal(read.features, features)
    assert torch.equal(read.target_states, states)
    reader.close()
    owner.close()
    owner.close()
    assert not runtime.blocks
    assert not memory._allocated


def test_looking_at_headers_starts_up_no_gpu(runtime, foreign) -> None:
    owner = RingOwner.create(1 << 16, LAYOUT, ("4",))
    foreign()
    slot = owner.allocate(3)
    runtime.calls.clear()
    reader = RingReader.attach(owner.address)
    assert reader.check(slot) == "partial_capture"
    assert reader.rows_written(slot) == 0
    reader.close()
    assert not runtime.calls


def test_memory_is_opened_once_and_closed_by_the_last_after_waiting(runtime, foreign) -> None:
    owned = DeviceMemory.allocate("GPU-7", 100)
    foreign()
    first, second = DeviceMemory.open(owned.segment), DeviceMemory.open(owned.segment)
    first.bytes[3] = 9
    assert int(second.bytes[3]) == 9
    assert first.bytes.shape == (100,)
    runtime.calls.clear()
    first.close()
    first.close()
    assert not runtime.calls
    second.close()
    assert runtime.calls == [("wait", 1), ("close", 1)]
    assert not runtime.mapped


def test_a_full_gpu_is_told_and_leaves_nothing_behind(runtime) -> None:
    runtime.full_gpu = 1
    layout = RingLayout(12, 4, "float32", num_shards=2)
    with pytest.raises(DeviceMemoryError, match="on GPU GPU-7: cudaErrorMemoryAllocation: out of"):
        RingOwner.create(1 << 16, layout, ("4", "GPU-7"))
    assert ("clear", 1) in runtime.calls
    assert not runtime.blocks
    assert not memory._allocated


@pytest.mark.parametrize("closed", [True, False])
def test_pinned_memory_is_unpinned_before_it_goes(runtime, closed: bool) -> None:
    host = HostMemory.create("test", 3 * mmap.PAGESIZE)
    pointer = host.bytes.data_ptr()
    assert host.register(torch.device("cuda", 1), 2 * mmap.PAGESIZE)
    assert host.register(torch.device("cuda", 1), 2 * mmap.PAGESIZE)
    assert runtime.pinned == {pointer: 2 * mmap.PAGESIZE}
    if closed:
        host.close()
        host.close()
    del host
    assert not runtime.pinned
    assert runtime.calls == [("pin", 1), ("wait", 1), ("unpin", 1)]


def test_memory_that_cannot_be_pinned_is_told_once_and_works(runtime, caplog) -> None:
    runtime.full_gpu = 0
    host = HostMemory.create("test", mmap.PAGESIZE)
    assert not host.register(torch.device("cuda", 0), mmap.PAGESIZE)
    assert "waits for the GPU instead" in caplog.text
    host.bytes[5] = 7
    host.close()
    assert ("unpin", 0) not in runtime.calls


def test_a_draft_on_a_gpu_is_handed_over_and_given_back(runtime) -> None:
    owner = DraftExchange.create([("w", (3, 5), "bfloat16"), ("b", (5,), "float32")], "4")
    side = DraftExchange.attach(owner.address)
    tensors = {"w": torch.randn(3, 5).bfloat16(), "b": torch.randn(5)}
    side.put(1, tensors)
    found = DraftExchange.attach(owner.address, "cpu").get(1)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    side.close()
    owner.close()
    owner.close()
    assert not runtime.blocks
