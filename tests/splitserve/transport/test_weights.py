"""The exchange buffer: what goes in comes out, and no half of a version is taken for a whole."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from transport_process import TENSORS, tensors_of
from transport_testing import DEVICE, gpu_ids

from splitserve.transport.memory import DeviceSegment
from splitserve.transport.weights import DraftExchange, ExchangeAddress


@pytest.fixture
def trainer():
    owner = DraftExchange.create(TENSORS, *gpu_ids(1))
    attached = DraftExchange.attach(owner.address)
    yield attached
    attached.close()
    owner.close()


@pytest.fixture
def engine(trainer: DraftExchange):
    attached = DraftExchange.attach(trainer.address)
    yield attached
    attached.close()


def test_tensors_come_back_as_views_in_order(trainer, engine) -> None:
    assert engine.version == -1
    assert engine.get(0) is None
    assert not engine.still(0)
    trainer.put(0, tensors_of(0))
    tensors = engine.get(0)
    assert list(tensors) == [name for name, _, _ in TENSORS]
    for name, expected in tensors_of(0).items():
        assert tensors[name].dtype == expected.dtype
        assert tensors[name].device.type == torch.device(DEVICE).type
        assert torch.equal(tensors[name], expected)
    trainer.put(7, tensors_of(7))
    assert torch.equal(tensors["a.weight"], tensors_of(7)["a.weight"])
    assert (engine.version, trainer.version) == (7, 7)
    assert engine.get(0) is None


def test_a_side_may_ask_for_copies_on_another_device(trainer) -> None:
    trainer.put(2, tensors_of(2))
    other = DraftExchange.attach(trainer.address, "cpu")
    tensors = other.get(2)
    for name, expected in tensors_of(2).items():
        assert torch.equal(tensors[name], expected.cpu())
    other.close()


def test_a_reader_notices_that_its_version_has_gone(trainer, engine) -> None:
    trainer.put(1, tensors_of(1))
    assert engine.get(1) is not None
    assert engine.still(1)
    assert not engine.still(2)
    # Also when the same version comes again, as after a resumed run: it may have changed halfway.
    trainer.put(1, tensors_of(5))
    assert not engine.still(1)
    assert engine.get(1) is not None
    assert engine.still(1)


def test_a_version_that_is_being_put_is_none(trainer, engine, monkeypatch) -> None:
    trainer.put(1, tensors_of(1))
    assert engine.get(1) is not None
    seen = []

    class Watching(dict):
        def __getitem__(self, name: str) -> torch.Tensor:
            seen.append((engine.version, engine.get(1), engine.get(2), engine.still(1)))
            if name == "scale":
                raise RuntimeError("the trainer dies here")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="dies here"):
        trainer.put(2, Watching(tensors_of(2)))
    assert len(seen) > 2
    assert set(seen) == {(-1, None, None, False)}
    assert (engine.version, engine.get(2)) == (-1, None)
    trainer.put(2, tensors_of(2))
    assert engine.get(2) is not None
    assert engine.still(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "scale: missing"),
        ({"b": torch.zeros(1)}, "b: not expected"),
        ({"a.bias": torch.zeros(8)}, r"a.bias: float32 \(8,\) instead of float32 \(7,\)"),
        ({"a.bias": torch.zeros(7).half()}, r"a.bias: float16 \(7,\) instead of float32"),
    ],
)
def test_other_tensors_are_refused_and_leave_the_version(trainer, engine, changes, message) -> None:
    trainer.put(1, tensors_of(1))
    tensors = {name: t for name, t in (tensors_of(2) | changes).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        trainer.put(2, tensors)
    assert engine.version == 1
    with pytest.raises(ValueError, match="0 or more"):
        trainer.put(-1, tensors_of(1))
    assert torch.equal(engine.get(1)["scale"], tensors_of(1)["scale"])


def test_an_address_survives_both_ways_of_travelling(trainer) -> None:
    on_gpu = replace(trainer.address, segment=DeviceSegment("GPU-1f", "00ff" * 32, 4096))
    for address in (trainer.address, on_gpu):
        assert ExchangeAddress.from_json(address.to_json()) == address
        assert pickle.loads(pickle.dumps(address)) == address
    with pytest.raises(ValueError, match="not the address"):
        ExchangeAddress.from_json("{}")


def test_tensors_that_cannot_be_held_are_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        DraftExchange.create([("a", (1,), "float32"), ("a", (2,), "float32")])
    with pytest.raises(ValueError, match="one or more"):
        DraftExchange.create([])
    with pytest.raises(ValueError, match="'real'"):
        DraftExchange.create([("a", (1,), "real")])
