"""A Hugging Face causal LM as the decoder needs it: explicit masks, captured layers, no surprises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class TargetModel:
    """The frozen target on one device.

    Raises:
        ValueError: the target has layers other than plain full attention, for which the decoder's
            explicit masks would not hold.
    """

    def __init__(
        self,
        folder: str | Path,
        layer_ids: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        self.model = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
            .to(device)
            .eval()
            .requires_grad_(False)
        )
        refuse_other_attention(self.model.config)
        self.device = torch.device(device)
        self.dtype = dtype
        self.layer_ids = layer_ids
        self._captured: dict[int, torch.Tensor] = {}
        layers = self.model.base_model.layers
        for layer_id in layer_ids:
            layers[layer_id].register_forward_hook(self._capture(layer_id))

    def _capture(self, layer_id: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def embedding(self) -> torch.Tensor:
        """[V, D]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, D]."""
        return self.model.get_output_embeddings().weight

    def new_cache(self) -> DynamicCache:
        """An empty K/V cache."""
        return DynamicCache()

    @torch.no_grad()
    def forward(
        self,
        input_ids_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_BTS: torch.Tensor,
        cache: DynamicCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run T new tokens per row and append them to the cache.

        Args:
            mask_BTS: bool, True where a new token may look; S counts the cache's slots and then
                the T new ones.

        Returns:
            states [B, T, D] after the final norm, and context features [B, T, K*D].
        """
        output = self.model.base_model(
            input_ids=input_ids_BT,
            position_ids=positions_BT,
            attention_mask=mask_BTS.unsqueeze(1),
            past_key_values=cache,
            use_cache=True,
        )
        features = torch.cat([self._captured[layer] for layer in self.layer_ids], dim=-1)
        return output.last_hidden_state, features


def refuse_other_attention(config: Any) -> None:
    """Refuse sliding-window and recurrent layers.

    Raises:
        ValueError: names the layer types found.
    """
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        types.add("sliding_attention")
    other = types - {"full_attention"}
    if other:
        raise ValueError(
            f"target: layers of type {', '.join(sorted(other))} cannot be decoded by the embedded "
            "decoder; allowed: full attention; measure such a target in the serving engine"
        )
