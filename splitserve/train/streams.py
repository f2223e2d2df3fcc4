"""Work of a GPU beside its main stream, and values that the host reads later.

All that knows of CUDA's streams and events is here. On the CPU everything is done at once, so the
same order of calls serves both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch


class Mark:
    """A point in the work of the stream that is current when the mark is made."""

    def __init__(self, device: str) -> None:
        self._event: torch.cuda.Event | None = None
        if device != "cpu":
            self._event = torch.cuda.Event()
            self._event.record()

    def passed(self) -> bool:
        """Whether all work before the mark has ended."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Make the host wait until it has."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self) -> None:
        """Make the stream that is current now wait until it has; the host goes on."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class SideStream:
    """A second stream of a GPU."""

    def __init__(self, device: str) -> None:
        self._stream = None if device == "cpu" else torch.cuda.Stream(device)

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Within this context, work goes to the side stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of another stream's tensors until this stream's work so far has ended.

    The allocator would give it away again, in the order of the stream that it was taken on, once
    no name holds the tensor.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


class HostCopy:
    """A tensor on its way to the host, read once it has arrived.

    It goes to pinned memory: while a copy to other memory is under way, the driver lets no thread
    give work to the GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
        self._mark = Mark(tensor.device.type)

    def wait(self) -> torch.Tensor:
        """The copy; waits for the work that gives it, and for none that came later."""
        self._mark.wait()
        return self._values
