"""The transformers engine, and the engine role around it."""

from __future__ import annotations

import queue

import pytest
import torch
from engine_testing import make_spec, reference_states, tokens

from splitserve.engine import worker
from splitserve.engine.base import EngineError
from splitserve.engine.selfcheck import check_capture
from splitserve.engine.transformers_engine import TransformersEngine, draw_token
from splitserve.messages import (
    EngineReady,
    Generate,
    Generated,
    NeedBatch,
    Rejected,
    Sampling,
    Stop,
    Taught,
    Teach,
)
from splitserve.transport.ring import RingOwner, RingReader


class FakeChannel:
    """A channel whose other end is the test."""

    def __init__(self, *messages: object) -> None:
        self.state = ""
        self.sent: list[object] = []
        self._inbox: queue.Queue[object] = queue.Queue()
        self._num_answers = sum(isinstance(m, Generate | Teach) for m in messages)
        for message in messages:
            self._inbox.put(message)

    def send(self, message: object) -> None:
        self.sent.append(message)
        if len(self.sent) == self._num_answers + 1:
            self._inbox.put(Stop())

    def receive(self, timeout_seconds: float | None = None) -> object | None:
        try:
            return self._inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return None


def test_the_role_checks_serves_and_stops(
    tiny_target: str, ring: RingOwner, reference, monkeypatch
) -> None:
    monkeypatch.setattr(
        worker,
        "_selfcheck",
        lambda engine, spec: check_capture(engine, reference.lm_head.weight.detach()),
    )
    ids = tokens(30, seed=1)
    slot = ring.allocate(30)
    channel = FakeChannel(
        Teach("s", ids, slot),
        Generate("g", ids[:6], Sampling(0.0, max_new_tokens=7)),
        Teach("bad", (10**6,), slot),
    )
    worker.run(channel, make_spec(tiny_target, ring, kind="transformers"))
    ready, *results = channel.sent
    assert isinstance(ready, EngineReady)
    assert ready.info["engine"] == "transformers"
    assert ready.info["selfcheck_difference"] < 1e-5
    assert results[0] == Taught("s", slot)
    assert isinstance(results[1], Generated)
    assert isinstance(results[2], Rejected) and "engine_error" in results[2].reason
    ring.free(slot)


def test_a_message_for_someone_else_ends_the_role(tiny_target: str, ring: RingOwner) -> None:
    spec = make_spec(tiny_target, ring, kind="transformers", selfcheck=False)
    with pytest.raises(EngineError, match="not for it"):
        worker.run(FakeChannel(NeedBatch(0, 0)), spec)


def test_states_are_those_of_transformers(tiny_target: str, ring: RingOwner, reference) -> None:
    results: queue.Queue[object] = queue.Queue()
    engine = TransformersEngine(make_spec(tiny_target, ring, kind="transformers"), results.put)
    ids = tokens(20, seed=2)
    slot = ring.allocate(20)
    engine.submit(Teach("s", ids, slot))
    assert results.get(timeout=30) == Taught("s", slot)
    read = RingReader.attach(ring.address).read(slot)
    features, states = reference_states(reference, ids)
    torch.testing.assert_close(read.features, features)
    torch.testing.assert_close(read.target_states, states)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        engine.submit(Generate(name, ids, Sampling(1.0, max_new_tokens=12, seed=seed)))
    first, same, other = (results.get(timeout=30).output_ids for _ in range(3))
    assert first == same != other
    engine.close()
    ring.free(slot)


def test_the_self_check_stays_within_the_targets_positions(
    tiny_target: str, ring: RingOwner, reference
) -> None:
    spec = make_spec(
        tiny_target, ring, kind="transformers", context_length=700, chunked_prefill_size=400
    )
    results: queue.Queue[object] = queue.Queue()
    engine = TransformersEngine(spec, results.put)
    try:
        found = check_capture(engine, reference.lm_head.weight.detach())
    finally:
        engine.close()
    assert found["selfcheck_tokens"] == reference.config.max_position_embeddings


def test_the_last_layer_is_refused(tiny_target: str, ring: RingOwner) -> None:
    spec = make_spec(tiny_target, ring, kind="transformers", layer_ids=(0, 1, 3))
    with pytest.raises(ValueError, match="allowed: 0 to 2"):
        TransformersEngine(spec, print)


def test_drawing_respects_temperature_top_k_and_top_p() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)

    def seen(sampling: Sampling) -> set[int]:
        return {draw_token(logits, sampling, generator) for _ in range(300)}

    assert seen(Sampling(0.0)) == {1}
    assert seen(Sampling(1.0)) == {0, 1, 2, 3}
    assert seen(Sampling(1.0, top_k=2)) == {1, 3}
    assert seen(Sampling(1.0, top_p=0.8)) == {1, 2, 3}
