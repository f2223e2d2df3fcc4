"""bfloat16 matrix products with weights laid out for oneDNN once, instead of at every call.

The products are the same bit for bit; a small batch spends about half as long on them. It costs a
second copy of the weights in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
LM_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
_PACKED = "_splitserve_packed_weight"
# oneDNN chooses its layout for this many rows; decode batches are about that size.
_TYPICAL_ROWS = 32
# Longer inputs gain nothing from the small-batch layout.
_MOST_ROWS = 256


def is_supported() -> bool:
    """True if this torch can multiply bfloat16 with packed weights on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., in] times the layer's weight [out, in], transposed."""
    if not _fits(layer.weight, x):
        return original(method, layer, x, bias)
    return _multiply(layer, x, bias)


def lm_head_logits(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: torch.nn.Module,
    embedding_bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """hidden_states [N, H] times the lm_head [V, H], transposed."""
    plain = not processor.use_fp32_lm_head and not hasattr(lm_head, "set_lora")
    weight = getattr(lm_head, "weight", None)
    if not plain or weight is None or not _fits(weight, hidden_states):
        return original(processor, hidden_states, lm_head, embedding_bias, **options)
    return _multiply(lm_head, hidden_states, None)


def _fits(weight: torch.Tensor, x: torch.Tensor) -> bool:
    return (
        weight.dtype == x.dtype == torch.bfloat16
        and weight.ndim == 2
        and not weight.is_mkldnn
        and 0 < x.numel() // x.shape[-1] <= _MOST_ROWS
    )


def _multiply(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = layer.weight
    # A weight update in place or by replacement must not meet a stale copy.
    key = (weight.data_ptr(), weight._version)
    held = layer.__dict__.get(_PACKED)
    if held is None or held[0] != key:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
        held = layer.__dict__[_PACKED] = (key, packed)
    return torch.ops.mkldnn._linear_pointwise(x, held[1], bias, "none", [], "")
