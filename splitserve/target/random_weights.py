"""A complete model folder whose weights are drawn, not trained: for measuring and for tests.

Run as `python -m splitserve.target.random_weights FOLDER SEED DEVICE`, it draws the weights of the
config.json in FOLDER, so that a process that starts others never opens a GPU itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from splitserve.errors import UserError
from splitserve.target.byte_tokenizer import byte_tokenizer
from splitserve.target.cache import default_cache_dir, make_once
from splitserve.target.tensors import FIELD, TensorSpec, checkpoint_tensors

# Raised whenever the same config and seed would give other weights.
FORMAT_VERSION = 1
SHARD_BYTES = 2**31
WRITERS = 4
"""Shards in the making at once."""
_PIECE = 2**26
"""Numbers drawn at once: 256 MiB of float32, however large the tensor."""


def random_target(config: Mapping[str, Any], seed: int, cache_dir: Path | None = None) -> Path:
    """The folder of a model of that config.json with random weights, drawn once.

    The same config and seed give the same weights on the same kind of device (CPU or GPU).

    Raises:
        ValueError: the config lacks a field or asks for an unknown architecture, the byte-level
            tokenizer does not fit its vocabulary, or the disk has no room.
    """
    tensors = checkpoint_tensors(config)
    tokenizer = byte_tokenizer(_context_length(config))
    if config["vocab_size"] <= len(tokenizer):
        raise UserError(
            f"{FIELD}.vocab_size",
            config["vocab_size"],
            f"more than the {len(tokenizer)} tokens of the byte-level tokenizer",
            "raise it; the draft needs a row that no text uses, too",
        )
    text = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(f"{FORMAT_VERSION} {seed} {text}".encode()).hexdigest()
    marker = {"format": FORMAT_VERSION, "random_config": dict(config), "random_seed": seed}
    cache = cache_dir or default_cache_dir()

    def build(_work: Path, folder: Path) -> dict[str, str]:
        _check_room(cache, sum(t.num_bytes for t in tensors))
        folder.mkdir()
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        _write_json(folder / "config.json", {**config, **ids, "dtype": "bfloat16"})
        _write_json(folder / "generation_config.json", ids)
        tokenizer.save_pretrained(folder)
        # Counted without opening the GPU here.
        device = "cuda" if torch.cuda.device_count() else "cpu"
        (draw_apart if device == "cuda" else draw_weights)(folder, seed, device)
        return {"drawn_on": device, "torch": version("torch")}

    return make_once(f"random-{config.get('model_type')}-{digest[:12]}", marker, build, cache)


def draw_weights(folder: Path, seed: int, device: str) -> None:
    """Write the safetensors shards and their index for the config.json in `folder`.

    Tensors go to the disk in pieces as they are drawn: no tensor is ever in memory as a whole.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shards = _shards(checkpoint_tensors(config))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    def write(name: str, shard: Sequence[TensorSpec]) -> None:
        _write_shard(folder / name, shard, seed, device)

    with ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as writers:
        list(writers.map(write, names, shards))
    places = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    size = sum(spec.num_bytes for shard in shards for spec in shard)
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": places},
    )


def draw_apart(folder: Path, seed: int, device: str) -> None:
    """`draw_weights` in a process of its own.

    Raises:
        RuntimeError: that process failed; shows the end of what it said.
    """
    command = [sys.executable, "-m", __name__, str(folder), str(seed), device]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(
            f"drawing the target's weights on {device} failed: {result.stderr.strip()[-600:]}"
        )


def _write_shard(path: Path, shard: Sequence[TensorSpec], seed: int, device: str) -> None:
    """One safetensors file: the header's length, the header, the tensors without gaps.

    `safetensors.save_file` wants all tensors at once and copies their bytes: three times slower
    and, for the largest tensors, gigabytes more.
    """
    # Wider numbers first: each tensor then begins at a multiple of its numbers' size.
    shard = sorted(shard, key=lambda spec: not spec.float32)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in shard:
        header[spec.name] = {
            "dtype": "F32" if spec.float32 else "BF16",
            "shape": spec.shape,
            "data_offsets": [offset, offset + spec.num_bytes],
        }
        offset += spec.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, len(text).to_bytes(8, "little") + text)
        for spec in shard:
            for piece in pieces(spec, seed, device):
                _write_all(file, piece.view(torch.uint8).numpy().data)


def _write_all(file: Any, content: bytes | memoryview) -> None:
    """Linux writes 2 GiB at most in one call, and fewer where the disk fills."""
    view = memoryview(content)
    while len(view):
        view = view[file.write(view) :]


def pieces(spec: TensorSpec, seed: int, device: str = "cpu") -> Iterator[torch.Tensor]:
    """A tensor's numbers in their order, in flat pieces on the CPU, of the type it is stored in.

    What they are follows from the seed, its name and the kind of device, not from other tensors.
    """
    digest = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)
    dtype = torch.float32 if spec.float32 else torch.bfloat16
    left = math.prod(spec.shape)
    while left:
        count = min(left, _PIECE)
        yield _numbers(spec, count, generator).to(dtype).cpu()
        left -= count


def _numbers(spec: TensorSpec, count: int, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if spec.kind == "ones":
        return torch.ones(count, device=device)
    if spec.kind == "normal":
        return torch.randn(count, generator=generator, device=device).mul_(spec.std)
    uniform = torch.rand(count, generator=generator, device=device)
    if spec.kind == "log_decay":
        return (1 + 15 * uniform).log()
    assert spec.kind == "time_bias", spec.kind
    # The inverse of softplus of a step that is log-uniform from 0.001 to 0.1, as in Mamba.
    step = (math.log(0.001) + math.log(100) * uniform).exp()
    return step + (-torch.expm1(-step)).log()


def _shards(tensors: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensors:
        if shards[-1] and size + spec.num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards


def _context_length(config: Mapping[str, Any]) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        raise UserError(
            f"{FIELD}.max_position_embeddings", length, "an integer, 1 or more", "set it"
        )
    return length


def _check_room(cache: Path, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    # Tokenizer and config are small, but a disk should not be filled to its last block either.
    if free < needed + 2**28:
        raise ValueError(
            f"the cache folder {str(cache)!r} has {free / 1e9:.1f} GB free; allowed: "
            f"{needed / 1e9:.1f} GB and a little more for the random target's weights; make room, "
            "or set SPLITSERVE_CACHE to another folder"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    draw_weights(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
