"""The flow of samples: priorities, back-pressure, retries, and the same batches for any ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import pytest

from splitserve.data.samples import Sample
from splitserve.data.schedule import SampleSchedule
from splitserve.messages import (
    Batch,
    BatchItem,
    Generate,
    Generated,
    Rejected,
    Sampling,
    Taught,
    Teach,
)
from splitserve.run.entry import Entry, State
from splitserve.run.feeder import MAX_ATTEMPTS, Feeder
from splitserve.transport.layout import RingLayout
from splitserve.transport.rings import Rings

LAYOUT = RingLayout(num_context_features=8, hidden_size=4, dtype="bfloat16")
PROMPT = (1, 2, 3)


def accept(entry: Entry, output_ids: Sequence[int]) -> Sample | str:
    if len(output_ids) < 2:
        return "too_short"
    name, ids = entry.sample_id, (*entry.prompt_ids, *output_ids)
    mask = (False,) * len(entry.prompt_ids) + (True,) * len(output_ids)
    return Sample(name, name, entry.domain, ids, mask)


def items_of(batch: Batch) -> list[BatchItem]:
    return [item for part in batch.micro_batches for item in part]


@pytest.fixture
def rings() -> Iterator[list[Rings]]:
    made: list[Rings] = []
    yield made
    for ring in made:
        ring.close()


def make_feeder(
    rings: list[Rings],
    *,
    num_samples: int = 12,
    num_steps: int = 9,
    batch: int = 4,
    slots: int = 100,
    ranks: int = 2,
    in_flight: int = 3,
    first_step: int = 0,
    row_tokens: int = 0,
    micro_batch_size: int = 1,
) -> Feeder:
    ring = Rings.create(slots * LAYOUT.slot_bytes(len(PROMPT) + 4), LAYOUT, [()])
    rings.append(ring)
    names = [f"p{i}/0" for i in range(num_samples)]
    return Feeder(
        [Entry(name, "math", PROMPT, Sampling()) for name in names],
        SampleSchedule(names, batch, num_steps, seed=5),
        ring,
        num_ranks=ranks,
        micro_batch_size=micro_batch_size,
        row_tokens=row_tokens,
        max_in_flight=in_flight,
        accept=accept,
        first_step=first_step,
    )


class FakeEngine:
    """Answers whatever it holds in random order; can lose or spoil requests."""

    def __init__(self, feeder: Feeder, seed: int = 0) -> None:
        self.feeder, self.rng = feeder, random.Random(seed)
        self.held: list[Generate | Teach] = []
        self.output: dict[str, tuple[int, ...]] = {}
        self.num_generated: dict[str, int] = {}
        self.draft_step: dict[str, int] = {}
        self.spoiled: set[str] = set()

    def turn(self) -> None:
        self.held += self.feeder.requests()
        if not self.held:
            return
        request = self.held.pop(self.rng.randrange(len(self.held)))
        if isinstance(request, Generate):
            name = request.request_id
            self.num_generated[name] = self.num_generated.get(name, 0) + 1
            output = self.output.get(name, (7, 8, 9, 10))
            draft_step = self.draft_step.get(name, -1)
            self.feeder.generated(Generated(name, output, "stop", draft_step))
        elif request.sample_id in self.spoiled:
            self.feeder.rejected(Rejected(request.sample_id, request.slot, "nonfinite"))
        else:
            self.feeder.taught(Taught(request.sample_id, request.slot))


def drain(feeder: Feeder, engine: FakeEngine, ranks: int) -> list[list[list[tuple[int, str]]]]:
    """Train every step; what each rank was given, by step."""
    given = []
    for step in range(feeder.schedule.num_steps):
        shares: list[list[tuple[int, str]]] = []
        for rank in range(ranks):
            for _ in range(2000):
                batch = feeder.batch(rank, step)
                if batch is not None:
                    break
                engine.turn()
            assert batch is not None, f"step {step} never became complete"
            shares.append([(item.epoch, item.sample_id) for item in items_of(batch)])
        for rank in range(ranks):
            feeder.step_done(rank, step)
        given.append(shares)
    return given


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("slots", [9, 100])
def test_batches_do_not_depend_on_ranks_arrival_or_ring(
    rings: list[Rings], ranks: int, slots: int
) -> None:
    """Also with a ring that holds only two batches, where samples are taught again."""
    feeder = make_feeder(rings, ranks=ranks, slots=slots)
    given = drain(feeder, FakeEngine(feeder, seed=ranks), ranks)
    wanted = [sorted(feeder.schedule.batch(step)) for step in range(feeder.schedule.num_steps)]
    assert [sorted(item for share in shares for item in share) for shares in given] == wanted


def test_every_answer_is_paid_for_once_and_every_slot_comes_back(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, slots=9)
    engine = FakeEngine(feeder)
    drain(feeder, engine, 2)
    assert set(engine.num_generated.values()) == {1}
    assert feeder.counters.evicted > 0
    held = sum(e.slot.num_bytes for e in feeder.entries.values() if e.slot is not None)
    assert feeder.ring.used_bytes == held
    assert all(entry.leases == 0 for entry in feeder.entries.values())


def test_leased_slots_are_never_evicted(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, slots=9)
    engine = FakeEngine(feeder)
    while (batch := feeder.batch(0, 0)) is None:
        engine.turn()
    for _ in range(200):
        engine.turn()
    for item in items_of(batch):
        entry = feeder.entries[item.sample_id]
        assert entry.state is State.READY and entry.slot == item.slot


def test_no_more_in_flight_than_allowed_and_teaching_comes_first(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, in_flight=3)
    first = feeder.requests()
    assert len(first) == 3 and all(isinstance(r, Generate) for r in first)
    assert feeder.requests() == []
    assert isinstance(first[0], Generate)
    feeder.generated(Generated(first[0].request_id, (7, 8, 9), "stop"))
    (second,) = feeder.requests()
    assert isinstance(second, Teach) and second.sample_id == first[0].request_id


def test_a_useless_answer_is_dropped_under_its_reason_and_batches_shrink(
    rings: list[Rings],
) -> None:
    feeder = make_feeder(rings)
    engine = FakeEngine(feeder)
    engine.output["p3/0"] = (7,)
    given = drain(feeder, engine, 2)
    assert dict(feeder.counters.dropped) == {"too_short": 1}
    names = {name for shares in given for share in shares for _, name in share}
    assert names == set(feeder.entries) - {"p3/0"}


def test_rejected_requests_are_tried_again_then_dropped(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, num_samples=4, batch=2)
    engine = FakeEngine(feeder)
    bad = feeder.schedule.batch(0)[0][1]
    engine.spoiled.add(bad)
    for _ in range(100):
        engine.turn()
    assert feeder.entries[bad].state is State.DROPPED
    assert dict(feeder.counters.dropped) == {"nonfinite": 1}
    assert feeder.counters.retried == MAX_ATTEMPTS - 1
    assert feeder.batch(0, 0) is not None


def test_an_engine_that_dies_loses_nothing(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, in_flight=6)
    engine = FakeEngine(feeder)
    for _ in range(9):
        engine.turn()
    lost = len(engine.held)
    assert lost > 0
    held = [r.sample_id if isinstance(r, Teach) else r.request_id for r in engine.held]
    engine.held.clear()
    feeder.engine_lost(held)
    assert feeder.in_flight == 0
    drain(feeder, engine, 2)
    assert not feeder.counters.dropped


def test_stored_answers_are_not_asked_for_again(rings: list[Rings]) -> None:
    feeder = make_feeder(rings)
    for entry in feeder.entries.values():
        feeder.answer(entry, (7, 8, 9))
    engine = FakeEngine(feeder)
    drain(feeder, engine, 2)
    assert engine.num_generated == {}


def test_a_resumed_run_begins_with_the_same_batch(rings: list[Rings]) -> None:
    whole = make_feeder(rings)
    resumed = make_feeder(rings, first_step=4)
    engine = FakeEngine(resumed)
    while (batch := resumed.batch(0, 4)) is None:
        engine.turn()
    wanted = whole.schedule.batch(4)[0::2]
    assert tuple((item.epoch, item.sample_id) for item in items_of(batch)) == wanted


def test_the_engine_is_let_go_once_everything_is_in_the_ring(rings: list[Rings]) -> None:
    feeder = make_feeder(rings)
    engine = FakeEngine(feeder)
    assert feeder.engine_is_needed()
    for _ in range(200):
        engine.turn()
    assert feeder.count(State.READY) == len(feeder.entries)
    assert not feeder.engine_is_needed()


def test_the_engine_is_kept_while_the_ring_cannot_hold_everything(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, slots=9)
    engine = FakeEngine(feeder)
    for _ in range(200):
        engine.turn()
    assert feeder.engine_is_needed()


def test_micro_batches_are_as_many_on_every_rank(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, ranks=3, batch=4)
    engine = FakeEngine(feeder)
    batches = []
    for rank in range(3):
        while (batch := feeder.batch(rank, 0)) is None:
            engine.turn()
        batches.append(batch)
    assert [[len(part) for part in b.micro_batches] for b in batches] == [[1, 1], [1, 0], [1, 0]]


def test_a_rank_gets_its_steps_in_order_however_far_ahead_it_asks(
    rings: list[Rings],
) -> None:
    """Every answer is there, and with it the second batch; yet the first is not taught."""
    feeder = make_feeder(rings, ranks=1)
    engine = FakeEngine(feeder)
    second = {name for _, name in feeder.schedule.batch(1)}
    for entry in feeder.entries.values():
        feeder.answer(entry, (7, 8, 9) if entry.sample_id in second else ())
    assert feeder.counters.dropped["too_short"] == 8
    while feeder.count(State.READY) < 4:
        engine.turn()
    assert feeder.batch(0, 1) is None
    assert [b.step for b in (feeder.batch(0, 0), feeder.batch(0, 1)) if b is not None] == [0, 1]


def test_the_last_batch_says_so(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, ranks=1, num_steps=2)
    engine = FakeEngine(feeder)
    said = []
    for step in range(2):
        while (batch := feeder.batch(0, step)) is None:
            engine.turn()
        said.append(batch.last)
    assert said == [False, True]


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_hold_the_whole_batch_with_its_supervised_tokens(
    rings: list[Rings], ranks: int
) -> None:
    """Samples of 7 tokens, three of them to a row of 21."""
    feeder = make_feeder(rings, ranks=ranks, batch=5, row_tokens=22, micro_batch_size=4)
    engine = FakeEngine(feeder)
    batches = []
    for rank in range(ranks):
        while (batch := feeder.batch(rank, 0)) is None:
            engine.turn()
        batches.append(batch)
    items = [item for batch in batches for item in items_of(batch)]
    assert sorted((i.epoch, i.sample_id) for i in items) == sorted(feeder.schedule.batch(0))
    assert {item.supervised for item in items} == {((3, 7),)}
    sizes = [[len(part) for part in batch.micro_batches] for batch in batches]
    assert sizes == ([[3, 2]] if ranks == 1 else [[3], [2], [0]])


def test_the_age_of_answers_is_counted_where_a_draft_took_part(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, ranks=1, num_samples=8, batch=4, num_steps=4)
    engine = FakeEngine(feeder)
    for _, name in feeder.schedule.batch(0):
        engine.draft_step[name] = 0
    for _, name in feeder.schedule.batch(1)[:2]:
        engine.draft_step[name] = -1
    ages = []
    for step in range(4):
        while feeder.batch(0, step) is None:
            engine.turn()
        feeder.step_done(0, step)
        ages.append(feeder.counters.take_draft_age())
    assert ages[0] == {"draft_age_steps": 0.0}
    assert ages[1] == {}
    first = {name for _, name in feeder.schedule.batch(0)}
    for step in (2, 3):
        again = [name for _, name in feeder.schedule.batch(step) if name in first]
        assert ages[step] == ({"draft_age_steps": float(step)} if again else {})
    assert feeder.counters.take_draft_age() == {}


def test_counts_are_those_of_the_entries(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, slots=9)
    engine = FakeEngine(feeder)
    engine.output["p3/0"] = (7,)
    for _ in range(60):
        engine.turn()
        for state in State:
            wanted = sum(entry.state is state for entry in feeder.entries.values())
            assert feeder.count(state) == wanted
    assert feeder.count(*State) == len(feeder.entries)


def test_what_is_evicted_is_needed_later_than_what_comes_in(rings: list[Rings]) -> None:
    feeder = make_feeder(rings, num_samples=40, num_steps=30, slots=9)
    engine = FakeEngine(feeder)
    for step in range(20):
        while feeder.batch(0, step) is None or feeder.batch(1, step) is None:
            before = {e.sample_id for e in feeder.entries.values() if e.state is State.READY}
            requests = feeder.requests()
            engine.held += requests
            taught = [r.sample_id for r in requests if isinstance(r, Teach)]
            for name in before:
                if feeder.entries[name].state is not State.READY:
                    use = feeder.schedule.next_place(name, step)
                    first = min(feeder.schedule.next_place(other, step) for other in taught)
                    assert use is None or use > first
            engine.turn()
        for rank in range(2):
            feeder.step_done(rank, step)
    assert feeder.counters.evicted > 0


def test_twenty_thousand_samples_are_fed_in_seconds(rings: list[Rings]) -> None:
    """Both where all fit into the ring and where it holds two batches and a little."""
    for slots in (20_100, 600):
        started = time.monotonic()
        feeder = make_feeder(
            rings, num_samples=20_000, num_steps=100, batch=256, slots=slots, in_flight=64
        )
        engine = FakeEngine(feeder)
        drain(feeder, engine, 2)
        assert feeder.counters.taught >= 20_000
        assert (feeder.counters.evicted > 0) == (slots == 600)
        assert not feeder.engine_is_needed() or slots == 600
        assert time.monotonic() - started < 20.0, "some call walks over all samples"
