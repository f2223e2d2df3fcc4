"""Over how many GPUs a model can be split: what SGLang asserts while it starts, told before.

Source: SGLang 0.5.23, srt/models/{llama,qwen3,dflash,qwen3_next}.py, srt/layers/linear.py and
srt/layers/moe/fused_moe_triton/layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEADS = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
OTHER_SPLITS = frozenset(
    {
        "attn_cp_size", "dp_size", "enable_dp_attention", "ep_num_redundant_experts",
        "moe_a2a_backend", "moe_dp_size", "pp_size",
    }
)  # fmt: skip
"""Arguments of SGLang under which other numbers have to divide; nothing is said of these."""


def uneven(config: Mapping[str, Any], tp: int) -> list[str]:
    """What of a model's config.json does not split over so many GPUs; empty if all of it does.

    Fields that are not there are not asked for.
    """
    found = [name for name in _HEADS if (number := _count(config, name)) and number % tp]
    heads = _count(config, "num_key_value_heads")
    # Latent attention has one KV head for all, and fewer heads than GPUs are copied.
    if heads and not config.get("kv_lora_rank") and heads % tp and tp % heads:
        found.append("num_key_value_heads")
    if not num_experts(config) and "quantization_config" not in config:
        width = _count(config, "intermediate_size")
        found += ["intermediate_size"] if width and width % tp else []
    return [f"{name}={config[name]}" for name in found]


def allowed_splits(config: Mapping[str, Any]) -> list[int]:
    """The numbers of GPUs that a model can be split over, ascending."""
    most = _count(config, "num_attention_heads") or 1
    return [tp for tp in range(1, most + 1) if not uneven(config, tp)]


def uneven_experts(config: Mapping[str, Any], tp: int, ep: int) -> list[str]:
    """What does not split where whole experts are dealt over `ep` of `tp` GPUs."""
    if tp % ep:
        return ["the GPUs"]
    number, width = num_experts(config), _count(config, "moe_intermediate_size")
    if number % ep:
        return [f"{number} experts"]
    if number and width and width % (tp // ep):
        return [f"moe_intermediate_size={width}"]
    return []


def allowed_deals(config: Mapping[str, Any], tp: int) -> list[int]:
    """The numbers of GPUs that experts can be dealt over, of `tp` in all, ascending."""
    return [ep for ep in range(1, tp + 1) if not uneven_experts(config, tp, ep)]


def num_experts(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 in a dense model."""
    return next((number for name in _EXPERTS if (number := _count(config, name)) > 1), 0)


def listed(numbers: list[int]) -> str:
    """For a message."""
    return ", ".join(map(str, numbers)) or "none"


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
