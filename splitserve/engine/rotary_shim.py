"""Rotary embedding in plain torch, under the name by which SGLang asks vLLM for it.

On a CPU without SGLang's own CPU kernels, its `RotaryEmbedding` imports
`vllm._custom_ops.rotary_embedding`. This module offers that one function, so that vLLM need not be
installed. Source: SGLang 0.5.23, srt/layers/rotary_embedding/base.py.

Shapes: N tokens, h heads, d head size, r rotated share of it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import torch

MODULE = "vllm._custom_ops"


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate query [N, h*d] and key [N, h*d] (or [N, h, d]) in place.

    positions: int64 [N]; cos_sin_cache [P, r], cosines first; is_neox pairs element i with
    i + r/2, otherwise 2i with 2i+1.
    """
    cos_sin = cos_sin_cache.index_select(0, positions.flatten())
    half = cos_sin.shape[-1] // 2
    # The rotation is linear, so both halves come out of one product each way.
    cos = cos_sin[:, None, :half].to(query.dtype)
    sin = cos_sin[:, None, half:].to(query.dtype)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(tensor.shape[0], -1, head_size)
        if is_neox:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        else:
            first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        rotated = second * cos
        rotated.addcmul_(first, sin)
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.copy_(rotated)


def install() -> bool:
    """Put the function under its name, unless vLLM itself is there; True if it was put."""
    if "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None:
        return False
    package, module = types.ModuleType("vllm"), types.ModuleType(MODULE)
    for item in (package, module):
        # Without a spec, importlib.util.find_spec("vllm") raises instead of answering.
        item.__spec__ = importlib.machinery.ModuleSpec(item.__name__, None)
    package.__path__ = []
    vars(package)["_custom_ops"] = module
    vars(module)["rotary_embedding"] = rotary_embedding
    sys.modules["vllm"], sys.modules[MODULE] = package, module
    return True
