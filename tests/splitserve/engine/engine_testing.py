"""What the engine tests share: a spec for the tiny target, and transformers' answer."""

from __future__ import annotations

import torch

from splitserve.engine.base import EngineSpec
from splitserve.transport.ring import RingOwner

LAYER_IDS = (0, 1, 2)
NUM_LAYERS, HIDDEN_SIZE, VOCAB_SIZE = 4, 64, 320


def make_spec(target: str, ring: RingOwner, **changes: object) -> EngineSpec:
    """A spec for the tiny target: short context, chunks of 16 tokens."""
    fields: dict[str, object] = {
        "target_path": target,
        "layer_ids": LAYER_IDS,
        "ring": ring.address,
        "dtype": "float32",
        "context_length": 96,
        "chunked_prefill_size": 16,
        "max_running_requests": 8,
        "num_threads": 1,
        "mixed_chunk": True,
        "prefill_together": 3,
    }
    return EngineSpec(**(fields | changes))


@torch.no_grad()
def reference_states(
    model: torch.nn.Module, token_ids: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [T, K*H] and target states [T, H] by transformers."""
    output = model.model(torch.tensor([token_ids]), output_hidden_states=True)
    features = torch.cat([output.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)
    return features, output.last_hidden_state[0]


def tokens(num_tokens: int, seed: int) -> tuple[int, ...]:
    """A random sequence without the end token."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCAB_SIZE, (num_tokens,), generator=generator).tolist())
