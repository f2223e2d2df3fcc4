"""Rotary position embedding, inherited from the target with whatever scaling it uses."""

from __future__ import annotations

import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.config import DraftConfig


def inverse_frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """float32 inverse frequencies [rotary_dim / 2] and the factor on cos and sin.

    Raises:
        ValueError: a rope type that transformers does not know.
    """
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_type={kind!r} is not known; allowed: default, {', '.join(ROPE_INIT_FUNCTIONS)}; "
            "use a target with one of these"
        )
    # Some of these functions copy between devices, which fails while a draft is built on "meta".
    with torch.device("cpu"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](Qwen3Config(**config.to_hf()), device="cpu")
    return frequencies.float(), float(factor)


class RotaryTable:
    """Cosines and sines by absolute position, computed in float32."""

    def __init__(self, config: DraftConfig) -> None:
        self._frequencies, self._factor = inverse_frequencies(config)

    def to(self, device: torch.device) -> None:
        """Move to where positions will lie; "meta", which has no values, is left out."""
        if device.type != "meta":
            self._frequencies = self._frequencies.to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 cos and sin, each [B, 1, T, rotary_dim], for int64 positions [B, T]."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
        return angles.cos() * self._factor, angles.sin() * self._factor


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim of the last axis, halves paired (neox style).

    x is [B, heads, T, head_dim]; cos and sin are float32 [B, 1, T, rotary_dim]. The rotation is
    done in float32, as it is served, and rounded once to the type of x.
    """
    width = cos.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return turned if not passed.shape[-1] else torch.cat([turned, passed], dim=-1)
