"""Batches on their way to the device: laid out on the host, their states copied ahead of use.

What a step divides its loss by follows from its layouts alone, so these are made for the whole step
at once. The states, which are large, are copied for a few micro-batches ahead only, also those of
the next step, while the device works on the current ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from dspark.batch import BatchLayout, TrainingBatch, TrainingSample, batch_denominators, lay_out
from dspark.flops import StepSize, necessary_flops
from splitserve.messages import Batch, BatchItem
from splitserve.train.spec import TrainerSpec
from splitserve.train.streams import Mark, SideStream, used_here
from splitserve.transport.rings import RingReaders

MICRO_BATCHES_AHEAD = 1
"""Whose states are copied while the device works on others."""
PAD_MULTIPLE = 32
"""Sequences with a row of their own are padded to a multiple of this, so that few shapes occur."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step whose micro-batches come from `Prefetcher.take`, in order."""

    step: int
    num_micro_batches: int
    weights: torch.Tensor
    """float64 [2] on the CPU: this rank's part of the window's weights, terms and confidence."""
    last: bool
    """No step of the run follows."""
    flops: float = 0.0
    """What this rank cannot do without in it, see `dspark.flops`."""


class Prefetcher:
    """Turns the batches of a rank into micro-batches on its device.

    Args:
        ring: where the states are; read on the rank's device.
    """

    def __init__(self, spec: TrainerSpec, ring: RingReaders) -> None:
        self._spec, self._ring = spec, ring
        self._stream = SideStream(spec.device)
        self._laid_out: deque[tuple[int | None, Sequence[BatchItem], BatchLayout]] = deque()
        """Micro-batches without their states; the last one of a step bears its number."""
        self._copied: deque[tuple[TrainingBatch, Mark]] = deque()
        self._in_use: TrainingBatch | None = None
        self._free: deque[tuple[TrainingBatch, Mark]] = deque()
        """Rows whose memory takes the next states, each with the end of the work on them. A host
        that is far ahead of its GPU would otherwise take memory for a whole step."""
        self._reading: deque[tuple[int, Mark]] = deque()
        """Steps that have no micro-batch left to be copied, each with the end of its copies."""

    def add(self, batch: Batch) -> StepPlan:
        """Lay a batch out. Waits for nothing."""
        weights = torch.zeros(2, dtype=torch.float64)
        flops = 0.0
        count = len(batch.micro_batches)
        for number, items in enumerate(batch.micro_batches, 1):
            layout = lay_out(
                [_sample(item) for item in items],
                num_anchors=self._spec.train.num_anchors,
                block_size=self._spec.draft.block_size,
                seed=self._spec.seed,
                pad_multiple=PAD_MULTIPLE,
                row_tokens=self._spec.row_tokens,
                max_documents=self._spec.train.micro_batch_size,
            )
            weights += torch.stack(batch_denominators(layout, self._spec.objective))
            size = StepSize.of(layout, sum(len(item.token_ids) for item in items))
            flops += sum(necessary_flops(self._spec.draft, size).values())
            self._laid_out.append((batch.step if number == count else None, items, layout))
        return StepPlan(batch.step, count, weights, batch.last, flops)

    def copy_ahead(self) -> None:
        """Begin to copy the states of the next micro-batches that are laid out."""
        while self._laid_out and len(self._copied) < MICRO_BATCHES_AHEAD:
            self._copy()

    def take(self) -> TrainingBatch:
        """The next micro-batch; the device waits for its copies if it has to, the host does not.

        All work on the one before it has been given to the current stream by now.
        """
        if self._in_use is not None and self._spec.row_tokens:
            self._free.append((self._in_use, Mark(self._spec.device)))
        if not self._copied:
            self._copy()
        self._in_use, mark = self._copied.popleft()
        mark.hold()
        used_here(getattr(self._in_use, f.name) for f in fields(self._in_use))
        return self._in_use

    def let_go(self) -> list[int]:
        """Steps whose slots are not read anymore, each said once."""
        free = []
        while self._reading and self._reading[0][1].passed():
            free.append(self._reading.popleft()[0])
        return free

    def _copy(self) -> None:
        step, items, layout = self._laid_out.popleft()
        spec = self._spec
        with self._stream.current():
            if self._free:
                old, work = self._free.popleft()
                work.hold()
                into = old.features_BSF, old.target_states_BSD
            else:
                into = layout.empty_states(
                    spec.draft.num_context_features,
                    spec.draft.hidden_size,
                    getattr(torch, spec.train.dtype),
                    spec.device,
                )
            batch = layout.with_states(self._states(items), into)
            mark = Mark(spec.device)
        self._copied.append((batch, mark))
        if step is not None:
            self._reading.append((step, mark))

    def _states(self, items: Sequence[BatchItem]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for item in items:
            states = self._ring.read(item.slot)
            yield states.features, states.target_states


def _sample(item: BatchItem) -> TrainingSample:
    loss_mask = torch.zeros(len(item.token_ids), dtype=torch.bool)
    for begin, end in item.supervised:
        loss_mask[begin:end] = True
    return TrainingSample(item.sample_id, item.epoch, torch.tensor(item.token_ids), loss_mask)
