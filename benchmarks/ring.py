"""The ring: what a writer process and a reader process move through it.

    python -m benchmarks.ring                    both on one GPU
    python -m benchmarks.ring --reader-gpu 1     the reader on another, over NVLink

Samples of 4,096 tokens of an 8B-sized target (five captured layers and the last states, each 4,096
wide, bfloat16) go into the ring in chunks, as prefill delivers them, and are copied out by another
process, many at once in flight, as they are in a run. Beside it, in the same run, the same bytes
are copied into a plain buffer and out again in one process: to the reader's GPU where that is
another. Both figures count every byte once. Median, 20th and 80th percentile of the rounds. Writes
`benchmarks/results/ring.json`, or `ring_two_gpus.json`.

`--device cpu --tokens 64` only shows that the script works.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record
from splitserve.messages import SlotRef
from splitserve.transport.ring import (
    BatchRows,
    RingAddress,
    RingLayout,
    RingOwner,
    RingReader,
    RingWriter,
)

LAYOUT = RingLayout(num_context_features=5 * 4096, hidden_size=4096, dtype="bfloat16")
CHUNK_TOKENS = 8192
"""Of a prefill: of one long sample a part, of short ones several."""
WAIT_SECONDS = 120.0


def main() -> None:
    options = parse_options()
    layout, device = LAYOUT, options.device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    names = visible.split(",")
    if options.reader_gpu >= len(names):
        names = [str(number) for number in range(options.reader_gpu + 1)]
    gpus = names[:1] if device == "cuda" else []
    owner = RingOwner.create(options.slots * layout.slot_bytes(options.tokens), layout, gpus)
    # A process that has used CUDA cannot be forked.
    context = multiprocessing.get_context("spawn")
    sides: list[tuple[Any, Connection]] = []
    for work in (write_samples, read_samples):
        here, there = context.Pipe()
        if device == "cuda":
            own = names[options.reader_gpu] if work is read_samples else names[0]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys((own, names[0])))
        process = context.Process(
            target=work, args=(there, owner.address, device, options.tokens), daemon=True
        )
        process.start()
        there.close()
        sides.append((process, here))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible if "," in visible else ",".join(names)
    (_, writer), (_, reader) = sides
    for pipe in (writer, reader):
        assert receive(pipe) == "ready"
    move(owner, writer, reader, options.slots, options.tokens)
    sample_bytes = options.tokens * bytes_per_token(layout)
    ring = [
        options.samples
        * sample_bytes
        / move(owner, writer, reader, options.samples, options.tokens)
        for _ in range(options.rounds)
    ]
    for process, pipe in sides:
        pipe.send(None)
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    owner.close()
    plain = [
        options.samples
        * sample_bytes
        / copy_plainly(options.samples, options.tokens, device, options.reader_gpu)
        for _ in range(options.rounds + 1)
    ][1:]
    figures = {
        **percentiles("ring", ring),
        **percentiles("peer_copy" if options.reader_gpu else "device_copy", plain),
        "bytes_per_token": bytes_per_token(layout),
        "tokens_per_sample": options.tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "samples_per_round": options.samples,
        "samples_in_flight": options.slots,
        "rounds": options.rounds,
        "ring_on": device,
    }
    write_record("ring_two_gpus" if options.reader_gpu else "ring", figures, folder=options.out)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=200, help="samples of a round")
    parser.add_argument("--slots", type=int, default=48, help="samples that the ring holds")
    parser.add_argument("--reader-gpu", type=int, default=0, help="GPU of the reader")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of the record")
    return parser.parse_args()


def bytes_per_token(layout: RingLayout) -> int:
    """Payload of one token."""
    width = layout.num_context_features + layout.hidden_size
    return width * layout.torch_dtype.itemsize


def percentiles(name: str, bytes_per_second: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile in GB/s."""
    rates = torch.tensor(bytes_per_second, dtype=torch.float64) / 1e9
    low, middle, high = torch.quantile(rates, torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return {
        f"{name}_gb_per_s": round(middle, 2),
        f"{name}_p20_gb_per_s": round(low, 2),
        f"{name}_p80_gb_per_s": round(high, 2),
    }


# --- the ring -------------------------------------------------------------------------------------


def move(
    owner: RingOwner, writer: Connection, reader: Connection, num_samples: int, num_tokens: int
) -> float:
    """Seconds from handing out the first slot to the end of the last copy out of the ring."""
    started = time.perf_counter()
    in_flight: deque[SlotRef] = deque()
    handed_out = finished = 0
    while finished < num_samples:
        while handed_out < num_samples and (slot := owner.allocate(num_tokens)) is not None:
            for pipe in (writer, reader):
                pipe.send(slot)
            in_flight.append(slot)
            handed_out += 1
        assert receive(reader) == "done"
        owner.free(in_flight.popleft())
        finished += 1
    return time.perf_counter() - started


def write_samples(pipe: Connection, address: RingAddress, device: str, num_tokens: int) -> None:
    """The target's side: chunks of a prefill, none of them waited for."""
    writer = RingWriter.attach(address)
    features, states = source(num_tokens, device)
    together = max(1, CHUNK_TOKENS // num_tokens)
    features, states = (t.repeat(together, 1) for t in (features, states))
    positions = torch.arange(num_tokens, device=device).repeat(together)
    token_ids = positions.clone()
    pipe.send("ready")
    while (slot := receive(pipe)) is not None:
        slots = [slot]
        while len(slots) < together and pipe.poll() and (slot := receive(pipe)) is not None:
            slots.append(slot)
        for first in range(0, num_tokens, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, num_tokens)
            batch = [
                BatchRows(slot, first, first + number * num_tokens, last - first)
                for number, slot in enumerate(slots)
            ]
            rows = slice(0, len(slots) * num_tokens)
            writer.write_batch(
                batch, features[rows], states[rows], token_ids[rows], positions[rows]
            )
        if slot is None:
            break
    writer.close()


def read_samples(pipe: Connection, address: RingAddress, device: str, num_tokens: int) -> None:
    """The trainer's side: each sample is copied out before its slot is given back."""
    reader = RingReader.attach(address, device)
    features, states = (torch.empty_like(t) for t in source(num_tokens, device))
    expected = torch.arange(num_tokens)
    pipe.send("ready")
    copying: deque[tuple[SlotRef, Any]] = deque()
    while True:
        if (not copying or pipe.poll()) and (slot := receive(pipe)) is not None:
            deadline = time.monotonic() + WAIT_SECONDS
            while (reason := reader.check(slot, expected)) == "partial_capture":
                assert time.monotonic() < deadline, f"no complete sample in {WAIT_SECONDS} s"
            assert reason is None, reason
            sample = reader.read(slot)
            features.copy_(sample.features, non_blocking=True)
            states.copy_(sample.target_states, non_blocking=True)
            del sample
            copying.append((slot, mark(device)))
        elif not copying:
            break
        while copying and has_passed(copying[0][1]):
            copying.popleft()
            pipe.send("done")
    synchronize(device)
    whole = source(num_tokens, device)
    assert torch.equal(features, whole[0]) and torch.equal(states, whole[1]), "other values"
    reader.close()


def mark(device: str) -> Any:
    """A point in the device's work; None where copies have ended when they return."""
    if device == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def has_passed(event: Any) -> bool:
    """Whether the device has come to that point."""
    return event is None or event.query()


def receive(pipe: Connection) -> Any:
    """The next message; an error after WAIT_SECONDS."""
    assert pipe.poll(WAIT_SECONDS), f"the other process said nothing in {WAIT_SECONDS} s"
    return pipe.recv()


# --- what it is compared with ---------------------------------------------------------------------


def copy_plainly(num_samples: int, num_tokens: int, device: str, reader_gpu: int) -> float:
    """Seconds for the same bytes into a plain buffer and out again, or to another GPU."""
    tensors = source(num_tokens, device)
    place = f"cuda:{reader_gpu}" if reader_gpu else device
    buffers, copies = ([torch.empty_like(t, device=place) for t in tensors] for _ in range(2))
    synchronize(device, reader_gpu)
    started = time.perf_counter()
    for _ in range(num_samples):
        for tensor, buffer, copy in zip(tensors, buffers, copies, strict=True):
            buffer.copy_(tensor)
            if not reader_gpu:
                copy.copy_(buffer)
    synchronize(device, reader_gpu)
    return time.perf_counter() - started


def source(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same features [T, K*H] and states [T, H] in every process."""
    generator = torch.Generator(device).manual_seed(1)
    features, states = (
        torch.randn(num_tokens, width, generator=generator, device=device).to(LAYOUT.torch_dtype)
        for width in (LAYOUT.num_context_features, LAYOUT.hidden_size)
    )
    return features, states


def synchronize(device: str, number: int = 0) -> None:
    """Wait for a GPU, if there is any, and for the first one."""
    if device == "cuda":
        for index in {0, number}:
            torch.cuda.synchronize(index)


if __name__ == "__main__":
    main()
