"""A few numbers that SGLang's scheduler tells the engine process: its draft, and one proposal.

Anonymous shared memory of int64 words. The scheduler of tensor-parallel rank 0 writes, the engine
process reads once the request or the update that it waits for has been answered.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

import numpy as np

MAX_TOKENS = 64
_LOADED, _SOURCE, _REQUEST, _COUNT, _TOKENS = range(5)
_WORDS = _TOKENS + MAX_TOKENS


class DraftSource(IntEnum):
    """Where the weights of the draft came from."""

    NONE = 0
    DEVICE = 1
    FOLDER = 2


class ControlBlock:
    """The words, mapped; make one with `create`, open another process's with `attach`."""

    def __init__(self, descriptor: int, *, owned: bool) -> None:
        self._map = mmap.mmap(descriptor, _WORDS * 8)
        self._words = np.frombuffer(self._map, dtype=np.int64)
        self._descriptor = descriptor if owned else -1
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}" if owned else ""

    @classmethod
    def create(cls) -> ControlBlock:
        """Words of this process; `path` is how others open them."""
        descriptor = os.memfd_create("splitserve-control", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _WORDS * 8)
        block = cls(descriptor, owned=True)
        block._words[_LOADED] = -1
        return block

    @classmethod
    def attach(cls, path: str) -> ControlBlock:
        """Words of another process; OSError if it is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, owned=False)
        finally:
            os.close(descriptor)

    def note_draft(self, step: int, source: DraftSource) -> None:
        """The draft of that step is in place."""
        self._words[_SOURCE] = source
        self._words[_LOADED] = step

    def draft(self) -> tuple[int, DraftSource]:
        """Step of the draft in place, -1 for the one that the engine was started with."""
        return int(self._words[_LOADED]), DraftSource(int(self._words[_SOURCE]))

    def note_proposal(self, request: int, token_ids: list[int]) -> None:
        """The first window that was verified for a request: its anchor, then the drafts."""
        if self._words[_REQUEST] == request:
            return
        tokens = token_ids[:MAX_TOKENS]
        self._words[_TOKENS : _TOKENS + len(tokens)] = tokens
        self._words[_COUNT] = len(tokens)
        self._words[_REQUEST] = request

    def proposal(self, request: int) -> list[int] | None:
        """Anchor and drafts of that request's first window; None if none has come."""
        if self._words[_REQUEST] != request:
            return None
        count = int(self._words[_COUNT])
        return [int(t) for t in self._words[_TOKENS : _TOKENS + count]]

    def close(self) -> None:
        """Let go of the memory."""
        del self._words
        self._map.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
