"""Drafts handed to whoever measures them, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from dspark.checkpoint import save_draft
from dspark.config import DraftConfig
from splitserve.messages import SnapshotReady
from splitserve.train.streams import HostCopy, Mark, SideStream
from splitserve.transport.weights import DraftExchange


class SnapshotWriter:
    """Writes one snapshot at a time in a thread of its own, and says when it is there.

    Args:
        send: takes the `SnapshotReady`; called from the thread.
        exchange: gets the weights first, at the step as version; None without one.
    """

    def __init__(
        self,
        send: Callable[[SnapshotReady], None],
        config: DraftConfig,
        device: str,
        exchange: DraftExchange | None = None,
    ) -> None:
        self._send, self._config, self._device = send, config, device
        self._exchange = exchange
        self._stream = SideStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None

    def begin(self, step: int, folder: Path, state: dict[str, torch.Tensor]) -> None:
        """Write the draft of that step; waits for an earlier one only.

        Args:
            state: weights of its own, which nobody changes; what is under way to them on the
                current stream is waited for.

        Raises:
            ValueError: as `join`, of the earlier snapshot.
        """
        self.join()
        self._writing = self._thread.submit(self._write, step, folder, state, Mark(self._device))

    def check(self) -> None:
        """Raise what a snapshot that has ended failed with, as `join` does; waits for none."""
        if self._writing is not None and self._writing.done():
            self.join()

    def join(self) -> None:
        """Wait until the snapshot is there.

        Raises:
            ValueError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            raise ValueError(
                f"{error}; free space, then go on from the last checkpoint with resume=true"
            ) from error

    def _write(self, step: int, folder: Path, state: dict[str, torch.Tensor], mark: Mark) -> None:
        with self._stream.current():
            mark.hold()
            if self._exchange is not None:
                served = {
                    name: state[name].to(getattr(torch, dtype))
                    for name, _, dtype in self._exchange.address.tensors
                }
                self._exchange.put(step, served)
            copies = {name: HostCopy(value) for name, value in state.items()}
            on_host = {name: copy.wait() for name, copy in copies.items()}
        save_draft(folder, self._config, on_host)
        self._send(SnapshotReady(step, str(folder)))
