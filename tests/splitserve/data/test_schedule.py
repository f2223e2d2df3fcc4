from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.data.schedule import SampleNames, SampleSchedule, rank_share

sizes = st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 12))


def schedule(
    num: int, batch: int, steps: int, seed: int = 3, replay: float = 0.0
) -> SampleSchedule:
    return SampleSchedule((f"p{i}/0" for i in range(num)), batch, steps, seed, replay)


def epoch_order(plan: SampleSchedule, epoch: int) -> tuple[str, ...]:
    return tuple(plan.sample_at(epoch, place) for place in range(plan.num_samples))


@given(sizes)
def test_every_epoch_holds_every_sample_once(size: tuple[int, int, int]) -> None:
    num, batch, steps = size
    plan = schedule(num, batch, steps)
    stream = list(itertools.chain.from_iterable(plan.batch(s) for s in range(steps)))
    assert len(stream) == batch * steps
    for epoch, chunk in itertools.groupby(stream, key=lambda item: item[0]):
        names = [name for _, name in chunk]
        assert tuple(names) == epoch_order(plan, epoch)[: len(names)]
        assert sorted(epoch_order(plan, epoch)) == sorted(f"p{i}/0" for i in range(num))
    assert [epoch for epoch, _ in stream] == [i // num for i in range(len(stream))]


@given(sizes, st.randoms(use_true_random=False))
def test_batches_depend_on_nothing_but_the_arguments(
    size: tuple[int, int, int], order: random.Random
) -> None:
    num, batch, steps = size
    first = [schedule(num, batch, steps).batch(s) for s in range(steps)]
    names = [f"p{i}/0" for i in range(num)]
    order.shuffle(names)
    asked = list(range(steps))
    order.shuffle(asked)
    again = SampleSchedule(names, batch, steps, 3)
    assert {s: again.batch(s) for s in asked} == dict(enumerate(first))


def test_seed_and_epoch_change_the_order() -> None:
    plan = schedule(30, 4, 100)
    assert epoch_order(plan, 0) != epoch_order(plan, 1)
    assert epoch_order(plan, 0) != epoch_order(schedule(30, 4, 100, seed=4), 0)
    assert [name for _, name in plan.batch(0)] == list(epoch_order(plan, 0)[:4])


def test_order_is_the_same_on_every_machine() -> None:
    assert "".join(epoch_order(SampleSchedule("abcdef", 2, 1, 7), 0)) == "ebfcda"


class Stored:
    """Names of a store, which are numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def name_of(self, place: int) -> str:
        return f"row/c{place}"

    def place_of(self, name: str) -> int | None:
        return int(name[5:]) if name.startswith("row/c") else None


def test_stored_samples_take_part_like_named_ones() -> None:
    names = SampleNames(["p1/0", "p0/0"], Stored(5))
    assert [names[i] for i in range(7)] == ["p0/0", "p1/0", *(f"row/c{i}" for i in range(5))]
    plan = SampleSchedule(names, 3, 20, 1, 0.4)
    assert sorted(epoch_order(plan, 3)) == sorted(names[i] for i in range(7))
    for name in epoch_order(plan, 0):
        step, place = plan.next_place(name, 4) or (-1, -1)
        assert plan.batch(step)[place][1] == name


def test_a_hundred_million_samples_take_no_memory_and_no_time() -> None:
    started = time.monotonic()
    plan = SampleSchedule(SampleNames((), Stored(10**8)), 512, 10**6, 1)
    for step in (0, 10**5, 10**6 - 1):
        for place, (_, name) in enumerate(plan.batch(step)):
            assert plan.next_place(name, step) == (step, place)
    assert time.monotonic() - started < 5


@given(sizes, st.integers(0, 14), st.sampled_from([0.0, 0.5, 0.9]))
def test_next_place_is_the_first_in_a_batch_with_the_sample(
    size: tuple[int, int, int], step: int, replay: float
) -> None:
    num, batch, steps = size
    plan = schedule(num, batch, steps, replay=replay)
    for name in epoch_order(plan, 0):
        uses = [
            (s, place)
            for s in range(step, steps)
            for place, (_, other) in enumerate(plan.batch(s))
            if other == name
        ]
        assert plan.next_place(name, step) == (uses[0] if uses else None)


@given(sizes, st.sampled_from([0.25, 0.5, 0.75, 0.95]))
def test_replay_spreads_the_first_pass_over_more_steps(
    size: tuple[int, int, int], replay: float
) -> None:
    num, batch, _ = size
    new = max(1, round(batch * (1 - replay)))
    first = 1 + max(0, -(-(num - batch) // new))
    plan = schedule(num, batch, first + 2 * num, replay=replay)
    seen: list[str] = []
    for step in range(first):
        items = plan.batch(step)
        fresh = [name for epoch, name in items if epoch == 0]
        again = [name for epoch, name in items if epoch != 0]
        assert len(fresh) == min(new if step else batch, num - len(seen))
        assert len(again) == min(batch - len(fresh), len(seen))
        assert set(again) <= set(seen) and len(set(again)) == len(again)
        seen += fresh
    assert tuple(seen) == epoch_order(plan, 0)
    rest = [item for step in range(first, first + num) for item in plan.batch(step)]
    assert [epoch for epoch, _ in rest] == [1 + i // num for i in range(len(rest))]
    assert [name for _, name in rest[:num]] == list(epoch_order(plan, 1))
    # No sample is visited twice under the same number, by which its anchors are drawn.
    visits = [item for step in range(plan.num_steps) for item in plan.batch(step)]
    assert len(set(visits)) == len(visits)


@given(st.integers(0, 13))
def test_rank_shares_partition_the_batch(size: int) -> None:
    batch = list(range(size))
    for world in (1, 2, 3):
        shares = [rank_share(batch, rank, world) for rank in range(world)]
        assert sorted(itertools.chain.from_iterable(shares)) == batch
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert rank_share(batch, 1, 3) == batch[1::3]


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_that_do_not_exist(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        rank_share([1], rank, world)


@pytest.mark.parametrize(
    ("names", "batch", "steps", "needle"),
    [
        ([], 1, 1, "data.prompts"),
        (["a", "b", "a"], 1, 1, "'a'"),
        (["a"], 0, 1, "train.global_batch_size"),
        (["a"], 1, 0, "train.steps"),
    ],
)
def test_bad_arguments(names: list[str], batch: int, steps: int, needle: str) -> None:
    with pytest.raises(ValueError, match=needle):
        SampleSchedule(names, batch, steps, 0)


def test_steps_and_samples_that_do_not_exist() -> None:
    plan = schedule(3, 2, 4)
    for step in (-1, 4):
        with pytest.raises(ValueError, match=r"0 \.\.\. 3"):
            plan.batch(step)
    with pytest.raises(ValueError, match="'other'"):
        plan.next_place("other", 0)
