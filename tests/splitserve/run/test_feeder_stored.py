"""The flow of samples that come from a store: read as they are needed, and let go again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_feeder import LAYOUT, PROMPT, FakeEngine, accept, drain, items_of

from splitserve.data.account import DropReport
from splitserve.data.length import Document
from splitserve.data.schedule import SampleNames, SampleSchedule
from splitserve.data.store import open_or_build
from splitserve.data.stored import StoredSamples
from splitserve.messages import Generate, Sampling, Teach
from splitserve.run.entry import Entry, State
from splitserve.run.feeder import Feeder
from splitserve.transport.rings import Rings

SIZE = 7
MASK = np.array([0, 1, 1, 0, 0, 1, 1], dtype=bool)
SPANS = ((1, 3), (5, 7))


def stored_samples(folder: Path, count: int) -> StoredSamples:
    """Documents of seven tokens, all with the same id and each with a token of its own."""

    def build() -> tuple[Iterable[Document], DropReport]:
        report = DropReport()

        def documents() -> Iterator[Document]:
            for i in range(count):
                ids = np.arange(SIZE, dtype=np.int64)
                ids[0] = 100 + i
                one = Document("row", "chat", ids, MASK, SIZE, 4)
                report.use(one)
                yield one

        return documents(), report

    return StoredSamples(open_or_build(folder, "", build)[0])


@pytest.fixture
def rings() -> Iterator[list[Rings]]:
    made: list[Rings] = []
    yield made
    for ring in made:
        ring.close()


def make_feeder(
    rings: list[Rings],
    stored: StoredSamples,
    *,
    prompts: int = 0,
    slots: int = 12,
    ranks: int = 2,
    batch: int = 4,
    steps: int = 30,
    first_step: int = 0,
    replay: float = 0.0,
    in_flight: int = 3,
) -> Feeder:
    ring = Rings.create(slots * LAYOUT.slot_bytes(SIZE), LAYOUT, [()])
    rings.append(ring)
    names = [f"p{i}/0" for i in range(prompts)]
    return Feeder(
        [Entry(name, "math", PROMPT, Sampling()) for name in names],
        SampleSchedule(SampleNames(names, stored), batch, steps, 5, replay),
        ring,
        num_ranks=ranks,
        micro_batch_size=1,
        max_in_flight=in_flight,
        accept=accept,
        first_step=first_step,
        stored=stored,
    )


@pytest.mark.parametrize("slots", [9, 12, 200])
@pytest.mark.parametrize("prompts", [0, 20])
@pytest.mark.parametrize("replay", [0.0, 0.5])
def test_every_batch_is_the_schedules_and_memory_is_the_rings(
    tmp_path: Path, rings: list[Rings], slots: int, prompts: int, replay: float
) -> None:
    feeder = make_feeder(
        rings, stored_samples(tmp_path, 60), prompts=prompts, slots=slots, replay=replay
    )
    engine = FakeEngine(feeder)
    most = 0
    for step in range(feeder.schedule.num_steps):
        shares: list[tuple[int, str]] = []
        for rank in range(2):
            while (batch := feeder.batch(rank, step)) is None:
                assert feeder.engine_is_needed()
                engine.turn()
                most = max(most, len(feeder.entries))
            for item in items_of(batch):
                shares.append((item.epoch, item.sample_id))
                if item.sample_id.startswith("row"):
                    assert item.token_ids[0] == 100 + int(item.sample_id.removeprefix("row/c"))
                    assert item.supervised == SPANS
        for rank in range(2):
            feeder.step_done(rank, step)
        assert sorted(shares) == sorted(feeder.schedule.batch(step))
    # In the ring, in flight, in a batch that is asked for, and one that finds no room.
    assert most <= prompts + slots + 3 + 4 + 1
    assert set(engine.num_generated) <= {f"p{i}/0" for i in range(prompts)}
    assert (feeder.counters.evicted > 0) == (slots < 200)
    for _ in range(20):
        engine.turn()
    assert not feeder.engine_is_needed() and not feeder.in_flight


def test_counts_are_those_of_all_samples(tmp_path: Path, rings: list[Rings]) -> None:
    feeder = make_feeder(rings, stored_samples(tmp_path, 40), prompts=5, slots=9)
    engine = FakeEngine(feeder)
    assert feeder.num_samples == 45
    for _ in range(50):
        engine.turn()
        assert feeder.count(*State) == 45
        held = len(feeder.entries)
        for state in State:
            known = sum(entry.state is state for entry in feeder.entries.values())
            unread = 45 - held if state is State.ANSWERED else 0
            assert feeder.count(state) == known + unread


def test_a_resumed_run_reads_from_its_step_on(tmp_path: Path, rings: list[Rings]) -> None:
    stored = stored_samples(tmp_path, 60)
    whole = make_feeder(rings, stored)
    drained = drain(whole, FakeEngine(whole), 2)
    resumed = make_feeder(rings, stored, first_step=11)
    (first, *_) = resumed.requests()
    assert isinstance(first, Teach)
    assert first.sample_id in {name for _, name in resumed.schedule.batch(11)}
    engine = FakeEngine(resumed, seed=3)
    engine.held = [first, *_]
    for rank in range(2):
        while (batch := resumed.batch(rank, 11)) is None:
            engine.turn()
        assert [(i.epoch, i.sample_id) for i in items_of(batch)] == drained[11][rank]


def test_an_engine_that_dies_and_one_that_spoils(tmp_path: Path, rings: list[Rings]) -> None:
    feeder = make_feeder(rings, stored_samples(tmp_path, 30), slots=9)
    engine = FakeEngine(feeder)
    bad = feeder.schedule.batch(1)[2][1]
    engine.spoiled.add(bad)
    for _ in range(4):
        engine.turn()
    lost = [r.request_id if isinstance(r, Generate) else r.sample_id for r in engine.held]
    engine.held.clear()
    feeder.engine_lost(lost)
    given = drain(feeder, engine, 2)
    assert dict(feeder.counters.dropped) == {"nonfinite": 1}
    names = [name for shares in given for share in shares for _, name in share]
    wanted = [name for s in range(30) for _, name in feeder.schedule.batch(s) if name != bad]
    assert sorted(names) == sorted(wanted)


def test_more_samples_than_uses_are_not_read(tmp_path: Path, rings: list[Rings]) -> None:
    feeder = make_feeder(rings, stored_samples(tmp_path, 20_000), steps=40, slots=12)
    engine = FakeEngine(feeder)
    started = time.monotonic()
    drain(feeder, engine, 2)
    assert feeder.counters.taught == 160
    assert len(feeder.entries) <= 12
    assert not feeder.engine_is_needed()
    assert time.monotonic() - started < 10


def test_names_are_numbers_and_back(tmp_path: Path) -> None:
    stored = stored_samples(tmp_path, 3)
    assert [stored.name_of(i) for i in range(3)] == ["row/c0", "row/c1", "row/c2"]
    assert [stored.place_of(f"row/c{i}") for i in range(4)] == [0, 1, 2, None]
    for other in ("row/0", "other/c1", "c1", "row/c", "row/c-1", "row/c01"):
        assert stored.place_of(other) is None
        with pytest.raises(KeyError):
            stored.sample(other)
    assert stored.sample("row/c2").supervised == SPANS
