"""How much memory each GPU of a layout will need, by what is in it.

Weights, caches, rings and optimizer states are counted; what libraries and passing tensors take is
an allowance. The sums decide whether a run is begun, and how much of a GPU SGLang may take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import DraftConfig
from splitserve.errors import UserError
from splitserve.run.gpus import Gpu, Placement
from splitserve.settings import RunSettings

GIB = 2**30
ENGINE_ALLOWANCE = 3 * GIB
"""CUDA context, graphs and workspaces of a rank of the target engine."""
TRAINER_ALLOWANCE = 3 * GIB
"""CUDA context, compiled kernels' workspaces and fragmentation of a trainer rank."""
CONTEXT_BYTES = GIB // 2
"""CUDA context of a process that only reads a GPU's ring, and of the coordinator, which owns it."""
MOMENT_BYTES = 12
"""A parameter's float32 master and two moments, split over the ranks."""
LARGEST_FRACTION = 0.92
RING_FILL = 0.8
"""Of a GPU, up to which a ring without a size of its own takes what is left."""
HEADROOM = 0.08
"""Of a GPU, given to SGLang beyond what it was counted to need."""


@dataclass
class GpuNeeds:
    """What one GPU has to hold, in bytes by name."""

    gpu: Gpu
    roles: list[str] = field(default_factory=list)
    target: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.target.values()) + sum(self.train.values())


def needs(
    settings: RunSettings,
    placement: Placement,
    target_config: Mapping[str, Any],
    target_path: str,
    draft: DraftConfig,
    slot_token_bytes: int,
) -> list[GpuNeeds]:
    """What every GPU of the placement needs.

    Args:
        target_config: the text model's config.json.
        slot_token_bytes: of one token's states in the ring.
    """
    found: dict[str, GpuNeeds] = {}
    for rank, gpu in enumerate(placement.target):
        entry = found.setdefault(gpu.name, GpuNeeds(gpu))
        entry.roles.append(f"target rank {rank}")
        entry.target = _target_bytes(settings, placement.tp_size, target_config, target_path, draft)
        others = sum(other.name != gpu.name for other in placement.train)
        entry.target["contexts of readers"] = (1 + others) * CONTEXT_BYTES
        if rank == 0 and settings.speculates:
            entry.target["draft exchange"] = 2 * num_parameters(draft)
    for rank, gpu in enumerate(placement.train):
        entry = found.setdefault(gpu.name, GpuNeeds(gpu))
        entry.roles.append(f"trainer rank {rank}")
        entry.train = _train_bytes(
            settings, len(placement.train), target_config, draft, slot_token_bytes
        )
        if rank == 0:
            entry.train["copy of a snapshot"] = 2 * num_parameters(draft)
    return list(found.values())


def size_ring(found: Sequence[GpuNeeds], least: int, most: int) -> int:
    """Give every target GPU a ring of what is left on the fullest of them; returns its bytes.

    Args:
        found: needs without a ring.
        least: bytes without which the run cannot go on; `check_memory` tells if they do not fit.
        most: bytes that the samples can use.
    """
    targets = [entry for entry in found if entry.target]
    left = min(int(RING_FILL * entry.gpu.num_bytes) - entry.num_bytes for entry in targets)
    num_bytes = max(least, min(left, most))
    for entry in targets:
        entry.target["ring"] = num_bytes
    return num_bytes


def check_memory(found: Sequence[GpuNeeds]) -> None:
    """Refuse a layout that does not fit.

    Raises:
        UserError: names the GPU, what it would have to hold, and the largest part of it.
    """
    for entry in found:
        if entry.num_bytes <= LARGEST_FRACTION * entry.gpu.num_bytes:
            continue
        parts = entry.target | entry.train
        largest = max(parts, key=lambda name: parts[name])
        raise UserError(
            "layout",
            f"GPU {entry.gpu.name} ({', '.join(entry.roles)})",
            f"up to {LARGEST_FRACTION * entry.gpu.num_bytes / GIB:.1f} GiB on a {entry.gpu.model}, "
            f"needed are about {entry.num_bytes / GIB:.1f}",
            f"the largest part is {largest} ({parts[largest] / GIB:.1f} GiB): spread the halves "
            "over more GPUs, or lower layout.ring_bytes, engine.max_running_requests, "
            "data.max_tokens or train.row_tokens",
        )


def memory_fraction(settings: RunSettings, found: Sequence[GpuNeeds]) -> float:
    """SGLang's share of a GPU, 0 on the CPU: it counts what others have taken there as its own."""
    if not found or settings.engine.memory_fraction:
        return settings.engine.memory_fraction
    largest = max(e.num_bytes / e.gpu.num_bytes for e in found if e.target)
    return min(LARGEST_FRACTION, round(largest + HEADROOM, 2))


def num_parameters(draft: DraftConfig) -> int:
    """Trained parameters of a draft."""
    import torch

    from dspark.model import DSparkDraft

    with torch.device("meta"):
        return sum(p.numel() for p in DSparkDraft(draft).parameters())


def _target_bytes(
    settings: RunSettings,
    num_shards: int,
    config: Mapping[str, Any],
    path: str,
    draft: DraftConfig,
) -> dict[str, int]:
    engine = settings.engine
    weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    longest = settings.data.max_tokens + settings.draft.block_size + 1
    tokens = engine.kv_cache_tokens or engine.max_running_requests * longest
    width = draft.num_context_features + draft.hidden_size
    logits = engine.max_running_requests * (draft.block_size + 1) * draft.vocab_size
    return {
        "target weights": weights // num_shards,
        "target KV cache": tokens * kv_token_bytes(config) // num_shards,
        "served draft": 2 * num_parameters(draft) // num_shards,
        "draft KV cache": tokens
        * (4 * draft.num_hidden_layers * draft.num_key_value_heads * draft.head_dim)
        // num_shards,
        "captured states": 4 * engine.chunked_prefill_size * width,
        "logits": 3 * 4 * logits,
        "ring": settings.layout.ring_bytes,
        "engine allowance": ENGINE_ALLOWANCE,
    }


def kv_token_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a token in the target's KV cache, all layers, unsplit, two bytes a number."""
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        # One latent vector a token, and only in the layers that are not recurrent.
        group = config.get("layer_group_size")
        attending = layers // group if isinstance(group, int) and group > 0 else layers
        return 2 * attending * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return 4 * layers * int(config.get("num_key_value_heads") or heads) * size


def _train_bytes(
    settings: RunSettings,
    num_ranks: int,
    config: Mapping[str, Any],
    draft: DraftConfig,
    slot_token_bytes: int,
) -> dict[str, int]:
    train = settings.train
    parameters = num_parameters(draft)
    tokens = train.row_tokens or train.micro_batch_size * settings.data.max_tokens
    rows = train.micro_batch_size * train.num_anchors * draft.block_size
    shared = 1 if config.get("tie_word_embeddings") else 2
    # Per row and layer: inputs of the norms, of the products and of the activation, for backward.
    per_row = 2 * (8 * draft.hidden_size + 4 * draft.intermediate_size)
    return {
        "draft weights and gradients": (2 + 2 + 4) * parameters,
        "optimizer": MOMENT_BYTES * parameters // num_ranks,
        "target embedding and lm_head": 2 * shared * draft.vocab_size * draft.hidden_size,
        # One batch in work and one on its way.
        "batches of states": 2 * tokens * slot_token_bytes,
        "activations": rows * draft.num_hidden_layers * per_row
        + tokens * (2 * draft.hidden_size + 4 * draft.num_hidden_layers * draft.hidden_size),
        "trainer allowance": TRAINER_ALLOWANCE,
    }
