"""One side of a transport test in a process of its own.

    python transport_process.py ROLE ADDRESS [SLOT SHARD]

Prints "ready" once its work is under way, and ends when its input does. Roles: write (a whole
sample), die (half a sample, then SIGKILL), read (waits for the sample, compares it), put (a version
of tensors), own (makes a ring, prints its address, then SIGKILL).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from transport_testing import DEVICE, LAYOUT, make_owner, random_rows, settle, token_ids

from splitserve.messages import SlotRef
from splitserve.transport.ring import RingAddress, RingReader, RingWriter
from splitserve.transport.weights import DraftExchange, ExchangeAddress

WAIT_SECONDS = 60.0
TENSORS = (
    ("a.weight", (300, 7), "bfloat16"),
    ("a.bias", (7,), "float32"),
    ("scale", (), "float32"),
)


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version, on the tested device."""
    return {
        name: torch.full(shape, version + number / 4, dtype=getattr(torch, dtype), device=DEVICE)
        for number, (name, shape, dtype) in enumerate(TENSORS)
    }


def write(address: str, slot: SlotRef, shard: int, *, die: bool) -> None:
    ring = RingAddress.from_json(address)
    writer = RingWriter.attach(ring, shard)
    features, states = random_rows(slot.num_tokens, ring.layout)
    ids = token_ids(slot.num_tokens)
    cut = slot.num_tokens // 2
    writer.write_rows(slot, 0, features[:cut], states[:cut], ids[:cut])
    if die:
        settle()
        os.kill(os.getpid(), signal.SIGKILL)
    writer.write_rows(slot, cut, features[cut:], states[cut:], ids[cut:])
    # Not waited for: whoever sees a complete header may read.
    print("ready", flush=True)
    sys.stdin.read()
    writer.close()


def read(address: str, slot: SlotRef) -> None:
    ring = RingAddress.from_json(address)
    reader = RingReader.attach(ring, DEVICE)
    ids = token_ids(slot.num_tokens)
    deadline = time.monotonic() + WAIT_SECONDS
    while reason := reader.check(slot, ids):
        assert reason == "partial_capture", reason
        assert time.monotonic() < deadline, f"{reader.rows_written(slot)} rows in {WAIT_SECONDS} s"
        time.sleep(0.001)
    states = reader.read(slot)
    features, target_states = random_rows(slot.num_tokens, ring.layout)
    assert torch.equal(states.features, features)
    assert torch.equal(states.target_states, target_states)
    del states
    reader.close()
    print("ready", flush=True)


def main() -> None:
    role, *arguments = sys.argv[1:]
    if role == "own":
        owner = make_owner(1 << 20, LAYOUT)
        owner.allocate(4)
        print(owner.address.to_json(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif role == "put":
        exchange = DraftExchange.attach(ExchangeAddress.from_json(arguments[0]))
        exchange.put(3, tensors_of(3))
        print("ready", flush=True)
        sys.stdin.read()
        exchange.close()
    else:
        address, slot, shard = arguments
        reference = SlotRef(*json.loads(slot))
        if role == "read":
            read(address, reference)
        else:
            write(address, reference, int(shard), die=role == "die")


if __name__ == "__main__":
    main()
