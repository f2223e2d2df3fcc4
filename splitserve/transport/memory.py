"""Memory that processes share: an anonymous file on the host, plain allocations on GPUs.

Host memory comes from `memfd_create`, so it has no name: when its last holder dies, however it
dies, nothing is left behind. Other processes of the same user open it as `/proc/<pid>/fd/<n>`.
GPU memory is a plain allocation of one process, which others open by its CUDA IPC handle. It stays
valid for as long as the process that allocated it lives, whatever happens to the others.

GPUs go by id strings, those of the owner's CUDA_VISIBLE_DEVICES. Every process may see other GPUs
in another order; it finds its own index of a GPU as the id's place in its own variable.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HANDLE_BYTES = 64
# The driver packs smaller allocations together, and then an IPC handle shows the whole pack.
GRANULE_BYTES = 2 * 2**20

logger = logging.getLogger("splitserve.transport")


class DeviceMemoryError(RuntimeError):
    """GPU memory could not be allocated, shared or opened."""


class HostMemory:
    """A shared mapping of an anonymous file. Made by `create` or `attach`."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.path = path
        self.num_bytes = os.fstat(descriptor).st_size
        self.buffer = mmap.mmap(descriptor, self.num_bytes)
        self._descriptor = -1
        self._unregister: weakref.finalize | None = None
        # Memory that is first touched in inference mode must stay writable outside of it.
        with torch.inference_mode(False):
            self._bytes: torch.Tensor | None = torch.frombuffer(self.buffer, dtype=torch.uint8)

    @classmethod
    def create(cls, name: str, num_bytes: int) -> HostMemory:
        """Zeroed memory; its pages take room only once they are written."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        memory = cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")
        memory._descriptor = descriptor
        return memory

    @classmethod
    def attach(cls, path: str) -> HostMemory:
        """Map the memory at another process's `path`; OSError if that process is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, path)
        finally:
            os.close(descriptor)

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, uint8 [num_bytes]."""
        assert self._bytes is not None, f"{self.path} is closed"
        return self._bytes

    def register(self, device: torch.device, num_bytes: int) -> bool:
        """Pin the first bytes, so that copies from that GPU need not wait; whether it worked."""
        if self._unregister is not None:
            return True
        assert num_bytes % mmap.PAGESIZE == 0, f"{num_bytes} bytes are not whole pages"
        index, pointer = _index(device), self.bytes.data_ptr()

        def register(runtime: Any) -> None:
            call, flags = runtime.cudaHostRegister, runtime.cudaHostRegisterPortable
            _checked(runtime, "pin shared memory", call, pointer, num_bytes, flags)

        try:
            _on_device(index, register)
        except DeviceMemoryError as error:
            logger.warning("%s; every write to the ring waits for the GPU instead", error)
            return False
        # CUDA would go on writing to these pages, whatever is mapped at their place later.
        self._unregister = weakref.finalize(self, _unregister, index, pointer)
        self._unregister.atexit = False
        return True

    def close(self) -> None:
        """Let go of it. While a tensor looks into it, the mapping lasts as long as that tensor."""
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        self._bytes = None
        with contextlib.suppress(BufferError):
            self.buffer.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True, slots=True)
class DeviceSegment:
    """Where a piece of GPU memory lies and how another process opens it."""

    gpu: str
    """Id of the GPU, as in the owner's CUDA_VISIBLE_DEVICES."""
    handle: str
    """CUDA IPC handle, hexadecimal."""
    num_bytes: int


class DeviceMemory:
    """Shared memory of one GPU. Made by `allocate` or `open`."""

    def __init__(self, segment: DeviceSegment, index: int, pointer: int) -> None:
        self.segment = segment
        self._index, self._pointer = index, pointer
        self._bytes: torch.Tensor | None = None
        self._open = True

    @classmethod
    def allocate(cls, gpu: str, num_bytes: int) -> DeviceMemory:
        """New memory on that GPU, with whatever was in it before.

        Raises DeviceMemoryError without cuda-bindings, without the GPU or without enough memory.
        """
        index = local_gpu_index(gpu)
        granules = -(-num_bytes // GRANULE_BYTES)

        def allocate(runtime: Any) -> tuple[int, bytes]:
            what = f"allocate {num_bytes} bytes on GPU {gpu}"
            size = granules * GRANULE_BYTES
            pointer = int(_checked(runtime, what, runtime.cudaMalloc, size))
            what = f"share memory of GPU {gpu}"
            try:
                handle = _checked(runtime, what, runtime.cudaIpcGetMemHandle, pointer)
            except DeviceMemoryError:
                runtime.cudaFree(pointer)
                raise
            return pointer, ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)

        pointer, handle = _on_device(index, allocate)
        memory = cls(DeviceSegment(gpu, handle.hex(), num_bytes), index, pointer)
        with _lock:
            _allocated[memory.segment.handle] = pointer
        return memory

    @classmethod
    def open(cls, segment: DeviceSegment) -> DeviceMemory:
        """The memory of another process, or of this one, on a GPU that this process sees.

        Raises DeviceMemoryError without cuda-bindings, without the GPU or when its owner is gone.
        """
        index = local_gpu_index(segment.gpu)
        with _lock:
            if segment.handle in _allocated:
                # CUDA refuses to open a handle in the process that it comes from.
                return cls(segment, index, _allocated[segment.handle])
            pointer, count = _opened.get(segment.handle, (0, 0))
            if not count:
                pointer = _on_device(index, lambda runtime: _open(runtime, segment))
            _opened[segment.handle] = pointer, count + 1
        return cls(segment, index, pointer)

    @property
    def bytes(self) -> torch.Tensor:
        """All of it, uint8 [num_bytes] on this process's index of the GPU."""
        assert self._open, f"memory of GPU {self.segment.gpu} is closed"
        if self._bytes is None:
            self._bytes = _device_tensor(self._pointer, self.segment.num_bytes, self._index)
        return self._bytes

    def close(self) -> None:
        """Wait for the GPU and let go; tensors made from the memory must not be used anymore."""
        if not self._open:
            return
        self._open, self._bytes = False, None
        handle, pointer = self.segment.handle, self._pointer
        with _lock:
            if handle not in _opened:
                # Memory of this very process; its owner frees it.
                return
            count = _opened[handle][1] - 1
            if count:
                _opened[handle] = pointer, count
                return
            del _opened[handle]

        def close(runtime: Any) -> None:
            _checked(runtime, "wait for the GPU", runtime.cudaDeviceSynchronize)
            _checked(runtime, "close shared memory", runtime.cudaIpcCloseMemHandle, pointer)

        _on_device(self._index, close)

    def free(self) -> None:
        """Give memory that this process allocated back; no other process may use it anymore."""
        with _lock:
            pointer = _allocated.pop(self.segment.handle, None)
        if pointer is None:
            return
        self._open, self._bytes = False, None
        what = f"free memory of GPU {self.segment.gpu}"
        _on_device(self._index, lambda runtime: _checked(runtime, what, runtime.cudaFree, pointer))


def local_gpu_index(gpu: str) -> int:
    """This process's CUDA index of the GPU with that id.

    Raises DeviceMemoryError if the process does not see it.
    """
    visible = os.environ.get(VISIBLE_DEVICES)
    ids = [] if visible is None else [name.strip() for name in visible.split(",")]
    if visible is None and gpu.isdecimal():
        return int(gpu)
    if gpu not in ids:
        raise DeviceMemoryError(
            f"GPU {gpu!r} is not among this process's {VISIBLE_DEVICES}={visible!r}; name GPUs by "
            "the ids of that variable, and start the process with every GPU that it needs"
        )
    return ids.index(gpu)


class _DeviceArray:
    """What torch wants to see of memory that it did not allocate."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 2,
        }


def _device_tensor(pointer: int, num_bytes: int, index: int) -> torch.Tensor:
    # Memory that is first touched in inference mode must stay writable outside of it.
    with torch.inference_mode(False):
        array = _DeviceArray(pointer, num_bytes)
        return torch.as_tensor(array, device=torch.device("cuda", index))


# A process cannot open what it allocated itself, and opens what others allocated once only.
_lock = threading.Lock()
_allocated: dict[str, int] = {}
_opened: dict[str, tuple[int, int]] = {}


def _unregister(index: int, pointer: int) -> None:
    """Unpin host memory once nothing is under way to it."""

    def unregister(runtime: Any) -> None:
        _checked(runtime, "wait for the GPU", runtime.cudaDeviceSynchronize)
        _checked(runtime, "unpin shared memory", runtime.cudaHostUnregister, pointer)

    _on_device(index, unregister)


def _open(runtime: Any, segment: DeviceSegment) -> int:
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(int(handle.getPtr()), bytes.fromhex(segment.handle), HANDLE_BYTES)
    what = f"open shared memory of GPU {segment.gpu}"
    flags = runtime.cudaIpcMemLazyEnablePeerAccess
    return int(_checked(runtime, what, runtime.cudaIpcOpenMemHandle, handle, flags))


def _runtime() -> Any:
    """CUDA's runtime interface."""
    # Imported here: a machine without GPUs need not have it.
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceMemoryError(
            f"shared GPU memory needs the package cuda-bindings ({error}): pip install "
            "cuda-bindings, or keep the ring in host memory"
        ) from error
    return runtime


def _on_device(index: int, work: Callable[[Any], Any]) -> Any:
    """Do the work with that GPU current.

    The current GPU belongs to a thread. In a thread of its own nothing has to be put back, which
    would start up a GPU that this process otherwise leaves alone.
    """
    runtime = _runtime()

    def run() -> Any:
        _checked(runtime, f"use GPU {index}", runtime.cudaSetDevice, index)
        return work(runtime)

    with ThreadPoolExecutor(1, thread_name_prefix="cuda-memory") as executor:
        return executor.submit(run).result()


def _checked(runtime: Any, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result; DeviceMemoryError, saying what was tried, if it failed."""
    error, *results = function(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        # Otherwise torch would report it as its own.
        runtime.cudaGetLastError()
        text = runtime.cudaGetErrorString(error)[1].decode()
        raise DeviceMemoryError(f"cannot {what}: {error.name}: {text}")
    return results[0] if results else None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
