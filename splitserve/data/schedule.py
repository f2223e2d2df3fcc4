"""Which samples make up which optimizer step.

The schedule is a pure function of the sample ids, the batch size and the seed. It is fixed before
anything is generated and never depends on what arrives when, nor on how many ranks there are; so
a resumed run, or one with other ranks, trains on the same batches.

A sample that is dropped later keeps its place and contributes nothing to its batches, which are
smaller for it; it is counted, and no other sample moves. Filling the gap with another sample
would make batches depend on when the drop became known.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dspark.anchors import counter_rng

T = TypeVar("T")

_KEPT_EPOCHS = 4


@dataclass(frozen=True, slots=True)
class _Epoch:
    order: tuple[str, ...]
    place: dict[str, int]
    """Where in `order` a sample is."""


class SampleSchedule:
    """Epochs in which every sample occurs once, cut into batches that may straddle two epochs.

    With `replay`, the first pass over the samples is spread over more steps: its batches take a few
    samples that are new and fill up with such that were trained on before, so that trainers need
    not wait for answers. Later epochs are as without.

    Args:
        sample_ids: every sample of the run, in any order.
        global_batch_size: samples per optimizer step over all ranks.
        num_steps: optimizer steps of the run.
        seed: of the run.
        replay: share of a batch of the first pass that was trained on before, 0 to below 1.

    Raises:
        ValueError: no samples, a sample twice, or a number out of range.
    """

    def __init__(
        self,
        sample_ids: Iterable[str],
        global_batch_size: int,
        num_steps: int,
        seed: int,
        replay: float = 0.0,
    ) -> None:
        self._sample_ids = tuple(sorted(sample_ids))
        self._seed = seed
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self.global_batch_size = global_batch_size
        self.num_steps = num_steps
        if not self._sample_ids:
            raise ValueError(
                "data.prompts: there are no samples to train on; give more prompts or a smaller "
                "data.held_out_fraction"
            )
        for first, second in itertools.pairwise(self._sample_ids):
            if first == second:
                raise ValueError(f"sample {first!r} is scheduled twice; ids are allowed once")
        for name, value in (("global_batch_size", global_batch_size), ("steps", num_steps)):
            if value < 1:
                raise ValueError(f"train.{name}: {value} is not positive; give at least 1")
        if not 0.0 <= replay < 1.0:
            raise ValueError(
                f"train.replay: {replay} is not usable; allowed: 0 to below 1; 0 trains on every "
                "sample once before any again"
            )
        self._first_pass: tuple[tuple[tuple[int, str], ...], ...] = ()
        self._first_pass_uses: dict[str, list[tuple[int, int]]] = {}
        if replay:
            self._plan_first_pass(max(1, round(global_batch_size * (1.0 - replay))))

    def _plan_first_pass(self, new_per_step: int) -> None:
        """Batches until every sample was new once; the first batch is all new."""
        order, size = self.epoch_order(0), self.global_batch_size
        batches: list[tuple[tuple[int, str], ...]] = []
        known = 0
        while known < len(order) and len(batches) < self.num_steps:
            step = len(batches)
            new = order[known : known + (new_per_step if step else size)]
            rng = counter_rng("replay", self._seed, step)
            places: list[int] = []
            if known:
                count = min(known, size - len(new))
                places = sorted(rng.choice(known, count, replace=False).tolist())
            # A visit needs a number of its own, which the anchors are drawn by.
            batches.append(
                tuple((0, sample_id) for sample_id in new)
                + tuple((-1 - step, order[place]) for place in places)
            )
            known += len(new)
            for place, (_, sample_id) in enumerate(batches[-1]):
                self._first_pass_uses.setdefault(sample_id, []).append((step, place))
        self._first_pass = tuple(batches)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self._sample_ids)

    def epoch_order(self, epoch: int) -> tuple[str, ...]:
        """Every sample once, in the order in which that epoch trains on them.

        Epoch 0's is also the order in which responses are best generated.
        """
        return self._epoch(epoch).order

    def batch(self, step: int) -> tuple[tuple[int, str], ...]:
        """The (epoch, sample id) pairs of one optimizer step, over all ranks.

        The epoch of a sample that is replayed within the first pass is a negative number.

        Raises:
            ValueError: the step is not one of the run's.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not in 0 ... {self.num_steps - 1}")
        if step < len(self._first_pass):
            return self._first_pass[step]
        first = self._position(step)
        return tuple(
            (epoch, self.epoch_order(epoch)[place])
            for epoch, place in (
                divmod(position, self.num_samples)
                for position in range(first, first + self.global_batch_size)
            )
        )

    def next_place(self, sample_id: str, step: int) -> tuple[int, int] | None:
        """Where the sample is trained on next, from this step on: the step, and the place in its
        batch; None when no step does.

        Raises:
            ValueError: the schedule does not have that sample.
        """
        uses = self._first_pass_uses.get(sample_id, ())
        if (index := bisect.bisect_left(uses, (step, 0))) < len(uses):
            return uses[index]
        step = max(step, len(self._first_pass))
        start = self._position(step)
        epoch, offset = divmod(start, self.num_samples)
        place = self._place(sample_id, epoch)
        if place < offset:
            epoch += 1
            place = self._place(sample_id, epoch)
        ahead, place = divmod(epoch * self.num_samples + place - start, self.global_batch_size)
        return (step + ahead, place) if step + ahead < self.num_steps else None

    def _position(self, step: int) -> int:
        """How far into the epochs, laid end to end, a step after the first pass begins."""
        position = (step - len(self._first_pass)) * self.global_batch_size
        return position + (self.num_samples if self._first_pass else 0)

    def _place(self, sample_id: str, epoch: int) -> int:
        try:
            return self._epoch(epoch).place[sample_id]
        except KeyError:
            raise ValueError(f"sample {sample_id!r} is not in the schedule") from None

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            order = tuple(sorted(self._sample_ids, key=lambda s: _rank(s, epoch, self._seed)))
            found = _Epoch(order, {sample_id: i for i, sample_id in enumerate(order)})
            self._epochs[epoch] = found
            if len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(epoch)
        return found


def rank_share(batch: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """What one of `world_size` ranks takes of a batch: every sample goes to exactly one rank.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0 ... {world_size - 1}")
    return batch[rank::world_size]


def _rank(sample_id: str, epoch: int, seed: int) -> bytes:
    """A keyed hash instead of a generator's stream: one sample more or less moves no other."""
    key = f"schedule/{seed}/{epoch}/{sample_id}".encode()
    return hashlib.blake2b(key, digest_size=16).digest()
