"""Which samples make up which optimizer step.

The schedule is a pure function of the samples' names, the batch size and the seed. It is fixed
before anything is generated and never depends on what arrives when, nor on how many ranks there
are; so a resumed run, or one with other ranks, trains on the same batches. It is computed where it
is asked for: a run with more samples needs no more memory.

A sample that is dropped later keeps its place and contributes nothing to its batches, which are
smaller for it; it is counted, and no other sample moves. Filling the gap with another sample
would make batches depend on when the drop became known.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from dspark.anchors import counter_rng
from splitserve.data.permutation import Permutation

T = TypeVar("T")

_KEPT_EPOCHS = 4


class StoredNames(Protocol):
    """Names that are made from numbers and back, as `splitserve.data.stored` has them."""

    def __len__(self) -> int: ...

    def name_of(self, place: int) -> str:
        """The name of the sample with that number."""

    def place_of(self, name: str) -> int | None:
        """The number of the sample with that name; None where it is another's."""


class SampleNames:
    """Every sample of a run with a number: first those named one by one, then a store's.

    Args:
        held: names in any order; their numbers follow from the names.
        stored: further samples, whose names are not held in memory.

    Raises:
        ValueError: no samples, or a name twice.
    """

    def __init__(self, held: Iterable[str] = (), stored: StoredNames | None = None) -> None:
        self._held = tuple(sorted(held))
        self._stored = stored
        for first, second in itertools.pairwise(self._held):
            if first == second:
                raise ValueError(f"sample {first!r} is scheduled twice; ids are allowed once")
        self._numbers = {name: number for number, name in enumerate(self._held)}
        if not len(self):
            raise ValueError(
                "data.prompts, data.conversations: there are no samples to train on; give more "
                "rows or a smaller data.held_out_fraction"
            )

    def __len__(self) -> int:
        return len(self._held) + (0 if self._stored is None else len(self._stored))

    def __getitem__(self, number: int) -> str:
        if number < len(self._held):
            return self._held[number]
        assert self._stored is not None, f"sample {number} of {len(self._held)}"
        return self._stored.name_of(number - len(self._held))

    def number_of(self, name: str) -> int:
        """The number of a sample.

        Raises:
            ValueError: there is no sample of that name.
        """
        number = self._numbers.get(name)
        if number is None and self._stored is not None:
            place = self._stored.place_of(name)
            number = None if place is None else len(self._held) + place
        if number is None:
            raise ValueError(f"sample {name!r} is not in the schedule")
        return number


class SampleSchedule:
    """Epochs in which every sample occurs once, cut into batches that may straddle two epochs.

    With `replay`, the first pass over the samples is spread over more steps: its batches take a few
    samples that are new and fill up with such that were trained on before, so that trainers need
    not wait for answers. Later epochs are as without. Where each sample is replayed is held in
    memory: 24 bytes for every sample that fills a batch up.

    Args:
        samples: every sample of the run; names are taken in any order.
        global_batch_size: samples per optimizer step over all ranks.
        num_steps: optimizer steps of the run.
        seed: of the run.
        replay: share of a batch of the first pass that was trained on before, 0 to below 1.

    Raises:
        ValueError: no samples, a sample twice, or a number out of range.
    """

    def __init__(
        self,
        samples: SampleNames | Iterable[str],
        global_batch_size: int,
        num_steps: int,
        seed: int,
        replay: float = 0.0,
    ) -> None:
        self.names = samples if isinstance(samples, SampleNames) else SampleNames(samples)
        self.num_samples = len(self.names)
        """Samples in an epoch."""
        self._seed = seed
        self._orders: OrderedDict[int, Permutation] = OrderedDict()
        self.global_batch_size = global_batch_size
        self.num_steps = num_steps
        for name, value in (("global_batch_size", global_batch_size), ("steps", num_steps)):
            if value < 1:
                raise ValueError(f"train.{name}: {value} is not positive; give at least 1")
        if not 0.0 <= replay < 1.0:
            raise ValueError(
                f"train.replay: {replay} is not usable; allowed: 0 to below 1; 0 trains on every "
                "sample once before any again"
            )
        self._new_per_step = max(1, round(global_batch_size * (1.0 - replay)))
        self._first_steps = 0
        """Steps of the first pass where it is spread; the first of them is all new."""
        if replay:
            left = max(0, self.num_samples - global_batch_size)
            self._first_steps = min(num_steps, 1 + -(-left // self._new_per_step))
        self._replayed, self._replays = self._index_replays()

    # --- the first pass, spread over more steps --------------------------------------------------

    def _num_known(self, step: int) -> int:
        """Samples that were new before a step of the first pass."""
        if step == 0:
            return 0
        return min(self.num_samples, self.global_batch_size + (step - 1) * self._new_per_step)

    def _replay_places(self, step: int) -> list[int]:
        """Places in epoch 0 of the samples that fill the batch up, ascending."""
        known = self._num_known(step)
        count = min(known, self.global_batch_size - (self._num_known(step + 1) - known))
        if not count:
            return []
        rng = counter_rng("replay", self._seed, step)
        return sorted(rng.choice(known, count, replace=False).tolist())

    def _index_replays(self) -> tuple[np.ndarray, np.ndarray]:
        """Places in epoch 0 that are replayed, ascending, and the step and place of each replay."""
        replayed, replays = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
        for step in range(self._first_steps):
            places = self._replay_places(step)
            first = self._num_known(step + 1) - self._num_known(step)
            uses = np.full((len(places), 2), step, dtype=np.int64)
            uses[:, 1] = np.arange(first, first + len(places))
            replayed.append(np.array(places, dtype=np.int64))
            replays.append(uses)
        places_of_all = np.concatenate(replayed)
        order = np.argsort(places_of_all, kind="stable")
        return places_of_all[order], np.concatenate(replays)[order]

    def _first_batch(self, step: int) -> tuple[tuple[int, str], ...]:
        new = range(self._num_known(step), self._num_known(step + 1))
        # A visit needs a number of its own, which the anchors are drawn by.
        visits = [*((0, p) for p in new), *((-1 - step, p) for p in self._replay_places(step))]
        return tuple((epoch, self.sample_at(0, place)) for epoch, place in visits)

    def _first_use(self, place: int, step: int) -> tuple[int, int] | None:
        """The first use, from a step on and in the first pass, of the sample at a place."""
        size = self.global_batch_size
        ahead, offset = divmod(place - size, self._new_per_step)
        new = (0, place) if place < size else (1 + ahead, offset)
        if step <= new[0] < self._first_steps:
            return new
        low, high = np.searchsorted(self._replayed, (place, place + 1))
        found = low + np.searchsorted(self._replays[low:high, 0], step)
        return tuple(self._replays[found].tolist()) if found < high else None

    # --- all steps -------------------------------------------------------------------------------

    def sample_at(self, epoch: int, place: int) -> str:
        """The sample that an epoch trains on at a place, 0 to num_samples - 1.

        Epoch 0's order is also the one in which responses are best generated.
        """
        return self.names[self._order(epoch)[place]]

    def batch(self, step: int) -> tuple[tuple[int, str], ...]:
        """The (epoch, sample id) pairs of one optimizer step, over all ranks.

        The epoch of a sample that is replayed within the first pass is a negative number.

        Raises:
            ValueError: the step is not one of the run's.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not in 0 ... {self.num_steps - 1}")
        if step < self._first_steps:
            return self._first_batch(step)
        first = self._position(step)
        return tuple(
            (epoch, self.sample_at(epoch, place))
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
        number = self.names.number_of(sample_id)
        if step < self._first_steps:
            use = self._first_use(self._order(0).place_of(number), step)
            if use is not None:
                return use
        step = max(step, self._first_steps)
        start = self._position(step)
        epoch, offset = divmod(start, self.num_samples)
        place = self._order(epoch).place_of(number)
        if place < offset:
            epoch += 1
            place = self._order(epoch).place_of(number)
        ahead, place = divmod(epoch * self.num_samples + place - start, self.global_batch_size)
        return (step + ahead, place) if step + ahead < self.num_steps else None

    def _position(self, step: int) -> int:
        """How far into the epochs, laid end to end, a step after the first pass begins."""
        position = (step - self._first_steps) * self.global_batch_size
        return position + (self.num_samples if self._first_steps else 0)

    def _order(self, epoch: int) -> Permutation:
        found = self._orders.get(epoch)
        if found is None:
            found = Permutation(self.num_samples, f"schedule/{self._seed}/{epoch}")
            self._orders[epoch] = found
            if len(self._orders) > _KEPT_EPOCHS:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return found


def rank_share(batch: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """What one of `world_size` ranks takes of a batch: every sample goes to exactly one rank.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0 ... {world_size - 1}")
    return batch[rank::world_size]
