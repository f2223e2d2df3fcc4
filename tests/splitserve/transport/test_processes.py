"""Several processes on one ring or one exchange buffer, and deaths among them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from transport_process import TENSORS, tensors_of
from transport_testing import DEVICE, LAYOUT, attach_reader, gpu_ids, make_owner, token_ids

from splitserve.messages import SlotRef
from splitserve.transport.memory import DeviceMemoryError
from splitserve.transport.ring import RingAddress, RingOwner, RingReader
from splitserve.transport.weights import DraftExchange

SCRIPT = Path(__file__).with_name("transport_process.py")
ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 120
NUM_TOKENS = 4097


@contextmanager
def side(role: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of that role; its input ends with the block, and it must end well then."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    try:
        yield process
        process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (-signal.SIGKILL if role in ("die", "own") else 0)


def ring_side(role: str, owner: RingOwner, slot: SlotRef, shard: int = 0):
    """A process on the ring."""
    return side(role, owner.address.to_json(), json.dumps(astuple(slot)), str(shard))


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize("num_shards", [1, 2])
def test_writers_and_a_reader_in_processes_of_their_own(num_shards: int) -> None:
    layout = replace(LAYOUT, num_shards=num_shards)
    owner = make_owner(layout.slot_bytes(NUM_TOKENS) * 2, layout)
    owner.allocate(NUM_TOKENS // 2)
    slot = owner.allocate(NUM_TOKENS)
    with ring_side("read", owner, slot) as reader, ring_side("write", owner, slot) as first:
        if num_shards == 2:
            wait_ready(first)
            assert RingReader.attach(owner.address).check(slot) == "partial_capture"
            with ring_side("write", owner, slot, shard=1) as second:
                wait_ready(second)
                wait_ready(reader)
        else:
            wait_ready(reader)
    # Who owns the memory still has it after the others have gone.
    states = attach_reader(owner).read(slot)
    assert states.features.isfinite().all()
    owner.free(slot)
    owner.close()


def test_a_killed_writer_leaves_a_partial_slot_that_another_fills_anew() -> None:
    owner = make_owner(LAYOUT.slot_bytes(NUM_TOKENS))
    slot = owner.allocate(NUM_TOKENS)
    reader = RingReader.attach(owner.address)
    with ring_side("die", owner, slot):
        pass
    assert reader.rows_written(slot) == NUM_TOKENS // 2
    assert reader.check(slot) == "partial_capture"
    with ring_side("write", owner, slot) as writer, ring_side("read", owner, slot) as other:
        wait_ready(writer)
        wait_ready(other)
    assert reader.check(slot, token_ids(NUM_TOKENS)) is None
    owner.close()


def test_the_ring_has_no_name_and_is_gone_with_its_owner() -> None:
    with side("own") as process:
        assert process.stdout is not None
        address = RingAddress.from_json(process.stdout.readline())
    assert not [name for name in os.listdir("/dev/shm") if "splitserve" in name]
    with pytest.raises(OSError):
        RingReader.attach(address)


def test_a_draft_put_by_another_process_is_there() -> None:
    exchange = DraftExchange.create(TENSORS, *gpu_ids(1))
    assert exchange.version == -1
    with side("put", exchange.address.to_json()) as process:
        wait_ready(process)
        tensors = exchange.get(3)
        assert tensors is not None
        for name, expected in tensors_of(3).items():
            assert torch.equal(tensors[name], expected)
        assert exchange.still(3)
    assert exchange.version == 3
    exchange.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="is about machines without a GPU")
def test_gpu_memory_without_a_gpu_is_one_clear_error(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceMemoryError, match="cannot use GPU 0: cudaError"):
            RingOwner.create(1 << 20, LAYOUT, ("0",))
        with pytest.raises(DeviceMemoryError, match="cannot use GPU 0: cudaError"):
            DraftExchange.create(TENSORS, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-12")
    with pytest.raises(DeviceMemoryError, match=r"'5' is not among .*'4,GPU-12'"):
        RingOwner.create(1 << 20, LAYOUT, ("5",))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceMemoryError, match="pip install cuda-bindings"):
        RingOwner.create(1 << 20, LAYOUT, ("4",))
