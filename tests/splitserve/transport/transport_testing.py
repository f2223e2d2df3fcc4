"""What the transport tests share. SPLITSERVE_TEST_DEVICE=cuda runs them on rings in GPU memory."""

from __future__ import annotations

import os

import torch

from splitserve.transport.ring import RingLayout, RingOwner, RingReader, RingWriter

DEVICE = os.environ.get("SPLITSERVE_TEST_DEVICE", "cpu")
LAYOUT = RingLayout(num_context_features=12, hidden_size=4, dtype="float32")


def gpu_ids(num_shards: int) -> tuple[str, ...]:
    """A GPU for each shard, the same one again where there are fewer; none on the CPU."""
    if DEVICE == "cpu":
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return tuple(ids[shard % len(ids)] for shard in range(num_shards))


def make_owner(capacity_bytes: int, layout: RingLayout = LAYOUT) -> RingOwner:
    """A ring on the tested device."""
    return RingOwner.create(capacity_bytes, layout, gpu_ids(layout.num_shards))


def attach_writers(owner: RingOwner) -> list[RingWriter]:
    """A writer for every shard."""
    return [RingWriter.attach(owner.address, s) for s in range(owner.layout.num_shards)]


def attach_reader(owner: RingOwner) -> RingReader:
    """A reader on the tested device."""
    return RingReader.attach(owner.address, DEVICE)


def random_rows(
    num_rows: int, layout: RingLayout = LAYOUT, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [n, K*H] and states [n, H] on the tested device."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, layout.num_context_features, generator=generator)
    states = torch.randn(num_rows, layout.hidden_size, generator=generator)
    return tuple(t.to(layout.torch_dtype).to(DEVICE) for t in (features, states))


def token_ids(num_rows: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [n], int64 on the host."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, 150_000, (num_rows,), generator=generator)


def settle() -> None:
    """Let everything that was written arrive."""
    if DEVICE != "cpu":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
