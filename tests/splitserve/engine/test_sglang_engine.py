"""The real SGLang on a CPU with a tiny target: what it captures and generates, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from engine_testing import make_spec, reference_states, tokens

from serving.leftovers import _mapped
from serving.processes import descendants
from splitserve.engine import sglang_engine
from splitserve.engine.base import EngineError
from splitserve.engine.plugin import teach_rid
from splitserve.engine.selfcheck import check_capture
from splitserve.engine.sglang_engine import SGLangEngine
from splitserve.messages import Generate, Generated, Rejected, Sampling, Taught, Teach
from splitserve.transport.ring import RingOwner, RingReader, RingWriter

# float32 through other kernels and chunk boundaries; observed 4e-6 at values up to 20.
CLOSE = {"rtol": 2e-4, "atol": 1e-4}


class Answers:
    """Collects results by request name."""

    def __init__(self) -> None:
        self._results: dict[str, object] = {}
        self._arrived = threading.Condition()

    def __call__(self, result: object) -> None:
        name = result.sample_id if isinstance(result, Taught) else result.request_id
        with self._arrived:
            assert name not in self._results, f"two results for {name}"
            self._results[name] = result
            self._arrived.notify_all()

    def take(self, name: str) -> object:
        with self._arrived:
            assert self._arrived.wait_for(lambda: name in self._results, timeout=60), name
            return self._results.pop(name)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def engine(
    sglang_installed: str,
    plugin_installed: None,
    tiny_target: str,
    ring: RingOwner,
    answers: Answers,
) -> Iterator[SGLangEngine]:
    running = SGLangEngine(make_spec(tiny_target, ring), answers)
    yield running
    left = [name for pid in descendants() for name in _mapped(pid) if "sglang_loads" in name]
    left += [
        address.removeprefix("ipc://")
        for name, address in vars(running._engine.port_args).items()
        if name.endswith("_ipc_name") and address
    ]
    assert len(left) > 1 and all(os.path.exists(name) for name in left), left
    running.close()
    assert not [name for name in left if os.path.exists(name)]
    assert descendants() == [] or all("resource_tracker" in _command(p) for p in descendants())


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as handle:
        return handle.read()


def _teach(engine: SGLangEngine, ring: RingOwner, name: str, ids: tuple[int, ...]):
    slot = ring.allocate(len(ids))
    engine.submit(Teach(name, ids, slot))
    return slot


def _assert_states(ring: RingOwner, slot, model, ids: tuple[int, ...]) -> None:
    read = RingReader.attach(ring.address).read(slot)
    features, states = reference_states(model, ids)
    torch.testing.assert_close(read.features, features, **CLOSE)
    torch.testing.assert_close(read.target_states, states, **CLOSE)


def test_chunked_capture_equals_transformers(engine, answers, ring, reference) -> None:
    ids = tokens(50, seed=1)
    slot = _teach(engine, ring, "chunked", ids)
    assert answers.take("chunked") == Taught("chunked", slot)
    _assert_states(ring, slot, reference, ids)
    ring.free(slot)


def test_the_same_tokens_twice_are_captured_whole_twice(engine, answers, ring, reference) -> None:
    ids = tokens(40, seed=2)
    for name in ("once", "twice"):
        slot = _teach(engine, ring, name, ids)
        assert isinstance(answers.take(name), Taught)
        _assert_states(ring, slot, reference, ids)
        ring.free(slot)


def test_a_streamed_answer_is_the_generated_one(engine, answers) -> None:
    ids, sampling = tokens(9, seed=4), Sampling(0.0, max_new_tokens=12)
    engine.submit(Generate("plain", ids, sampling))
    generated = answers.take("plain")
    assert isinstance(generated, Generated)
    work = engine.decode(ids, sampling, "streamed")
    answer = asyncio.run_coroutine_threadsafe(work, engine._loop).result(timeout=60)
    assert generated.output_ids[: len(answer.token_ids)] == answer.token_ids
    assert answer.meta["completion_tokens"] == len(answer.arrivals) == 12
    assert answer.asked < answer.first < answer.last


def test_generating_and_teaching_at_once(engine, answers, ring, reference) -> None:
    prompts = {f"g{i}": tokens(5 + 3 * i, seed=10 + i) for i in range(6)}
    samples = {f"t{i}": tokens(20 + 7 * i, seed=20 + i) for i in range(6)}
    slots = {}
    for (prompt, ids), (name, sample) in zip(prompts.items(), samples.items(), strict=True):
        engine.submit(Generate(prompt, ids, Sampling(0.0, max_new_tokens=24)))
        slots[name] = _teach(engine, ring, name, sample)
    for name, sample in samples.items():
        assert isinstance(answers.take(name), Taught)
        _assert_states(ring, slots[name], reference, sample)
        ring.free(slots[name])
    for name, ids in prompts.items():
        result = answers.take(name)
        assert isinstance(result, Generated)
        assert result.output_ids == _greedy(reference, ids, 24)
        ended = result.output_ids[-1] == 1
        assert result.finish_reason == ("stop" if ended else "length")


@torch.no_grad()
def _greedy(model, ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    sequence = list(ids)
    while len(sequence) < len(ids) + num_tokens:
        token = int(model(torch.tensor([sequence])).logits[0, -1].argmax())
        sequence.append(token)
        if token == 1:
            break
    return tuple(sequence[len(ids) :])


def test_the_end_token_is_part_of_the_response(
    engine, answers, reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(9, seed=31)
    expected = _greedy(reference, ids, 12)
    # Whatever this target says third is declared its end of turn.
    place = expected.index(expected[2])
    monkeypatch.setattr(engine, "eos_token_ids", (expected[2],))
    engine.submit(Generate("ends", ids, Sampling(0.0, max_new_tokens=12)))
    assert answers.take("ends") == Generated("ends", expected[: place + 1], "stop")


def test_a_seed_decides_the_response_whatever_runs_beside_it(engine, answers) -> None:
    ids = tokens(8, seed=40)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        engine.submit(Generate(name, ids, Sampling(1.0, max_new_tokens=16, seed=seed)))
    first, same, other = (answers.take(name).output_ids for name in "abc")
    assert first == same
    assert first != other


def test_an_aborted_request_beside_a_good_one(engine, answers, ring, reference) -> None:
    bad, good = tokens(90, seed=50), tokens(45, seed=51)
    bad_slot = _teach(engine, ring, "bad", bad)
    good_slot = _teach(engine, ring, "good", good)
    engine._loop.call_soon_threadsafe(
        engine._engine.tokenizer_manager.abort_request, teach_rid("main", bad_slot, "bad")
    )
    result = answers.take("bad")
    if isinstance(result, Rejected):
        assert result.slot == bad_slot
        assert result.reason.startswith(("engine_error", "partial_capture"))
    else:
        _assert_states(ring, bad_slot, reference, bad)
    assert isinstance(answers.take("good"), Taught)
    _assert_states(ring, good_slot, reference, good)
    ring.free(bad_slot)
    ring.free(good_slot)


def test_requests_that_cannot_work_are_rejected_by_name(engine, answers, ring) -> None:
    # The longest sample there may be is not among them.
    slot = ring.allocate(96)
    engine.submit(Teach("longest", tokens(96, seed=62), slot))
    assert isinstance(answers.take("longest"), Taught)
    ring.free(slot)
    slot = ring.allocate(200)
    engine.submit(Teach("long", tokens(200, seed=60), slot))
    result = answers.take("long")
    assert isinstance(result, Rejected)
    assert result.slot == slot
    assert result.reason.startswith("engine_error")
    ring.free(slot)
    # A slot freed too early is somebody else's: nothing is written, nothing is claimed.
    ids = tokens(20, seed=61)
    slot = ring.allocate(20)
    ring.free(slot)
    engine.submit(Teach("freed", ids, slot))
    assert answers.take("freed") == Rejected("freed", slot, "stale_slot")


def test_the_self_check_passes(engine, reference) -> None:
    found = check_capture(engine, reference.lm_head.weight.detach())
    assert found["selfcheck_difference"] < 1e-4
    assert found["selfcheck_tokens"] > engine.spec.chunked_prefill_size
    assert engine.probe_ring.used_bytes == 0


def test_the_self_check_recognises_a_dead_hook(engine, reference, monkeypatch) -> None:
    monkeypatch.setattr(sglang_engine, "teach_rid", lambda ring, slot, name: f"unseen-{name}")
    with pytest.raises(EngineError, match="hook dead"):
        check_capture(engine, reference.lm_head.weight.detach())


def test_the_self_check_recognises_states_before_the_norm(engine, reference, monkeypatch) -> None:
    probe = engine.probe
    norm = reference.model.norm

    def unnormed(ids: tuple[int, ...], num_logprobs: int):
        slot, reason, rows, logprobs = probe(ids, num_logprobs)
        seen: list[torch.Tensor] = []
        handle = norm.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0][0]))
        features, _ = reference_states(reference, ids)
        handle.remove()
        writer = RingWriter.attach(engine.probe_ring.address)
        writer.write_rows(slot, 0, features, seen[0].detach())
        return slot, reason, rows, logprobs

    monkeypatch.setattr(engine, "probe", unnormed)
    head = reference.lm_head.weight.detach()
    with pytest.raises(EngineError, match="Pre-norm"):
        check_capture(engine, head, norm.weight.detach())


def test_the_self_check_recognises_other_weights(engine, reference) -> None:
    with pytest.raises(EngineError, match="other weights"):
        check_capture(engine, reference.lm_head.weight.detach().roll(1, 0))


def test_a_dead_scheduler_is_reported(engine) -> None:
    assert engine.failure is None
    schedulers = [pid for pid in descendants() if "sglang::scheduler" in _command(pid)]
    os.kill(schedulers[0], signal.SIGKILL)
    deadline = time.monotonic() + 15
    while engine.failure is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "scheduler died" in engine.failure
