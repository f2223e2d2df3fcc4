"""A Hugging Face causal LM as the decoder needs it: explicit masks, captured layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class TargetModel:
    """The frozen target on one device.

    Args:
        layer_ids: captured layers, ascending; id i is the output of decoder layer i.

    Raises:
        ValueError: transformers has no model for the target, or the target has layers other than
            plain full attention, for which the decoder's explicit masks would not hold, or logits
            that are more than lm_head times state.
    """

    def __init__(
        self,
        folder: str | Path,
        layer_ids: tuple[int, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        self.model = _load(folder, dtype).to(device).eval().requires_grad_(False)
        refuse_other_attention(self.model.config)
        refuse_other_layers(self.model)
        self.device = torch.device(device)
        self.dtype = dtype
        self._check_logits()
        self._captured: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self.capture(layer_ids)

    def capture(self, layer_ids: tuple[int, ...]) -> None:
        """Capture these layers from now on, in place of those before.

        Raises:
            ValueError: a layer that the target does not have.
        """
        layers = self.model.base_model.layers
        if any(not 0 <= layer_id < len(layers) for layer_id in layer_ids):
            raise ValueError(
                f"draft: it reads the target's layers {list(layer_ids)}; allowed: 0 to "
                f"{len(layers) - 1}; measure it with the target that it was trained for"
            )
        for hook in self._hooks:
            hook.remove()
        self.layer_ids = layer_ids
        self._hooks = [layers[i].register_forward_hook(self._keep(i)) for i in layer_ids]

    @torch.no_grad()
    def _check_logits(self) -> None:
        """The decoder multiplies states by the lm_head; a scale, cap or bias would be lost."""
        ids = torch.arange(min(8, self.embedding.shape[0]), device=self.device).unsqueeze(0)
        wanted = self.model(input_ids=ids, use_cache=False).logits.float()
        states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        error = ((states @ self.lm_head.t()).float() - wanted).norm() / wanted.norm()
        # Both are the same products in the same type; what a scale or a cap changes is far larger.
        if not error < 0.01:
            raise ValueError(
                f"target: its logits differ from lm_head times final state by {float(error):.2g}; "
                "allowed: a plain lm_head, without scale, cap or bias; measure such a target in "
                "the serving engine"
            )

    def _keep(self, layer_id: int) -> Any:
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
        states = output.last_hidden_state
        captured = [self._captured.pop(layer) for layer in self.layer_ids]
        return states, torch.cat(captured, dim=-1) if captured else states[..., :0]


def _load(folder: str | Path, dtype: torch.dtype) -> Any:
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0][:300]
        raise ValueError(
            f"target: transformers cannot load {str(folder)!r} ({why}); allowed: a model that it "
            "knows; measure such a target in the serving engine"
        ) from error
    if missing := sorted(found["missing_keys"]):
        # transformers has drawn them at random: what is measured would mean nothing.
        raise ValueError(
            f"target: {str(folder)!r} lacks {len(missing)} weights, {missing[0]} for one; allowed: "
            "every weight that its config.json asks for; complete the folder"
        )
    return model


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


def refuse_other_layers(model: Any) -> None:
    """Refuse models whose decoder layers are not all attention layers, whatever the config says.

    Raises:
        ValueError: names the layers found.
    """
    layers = getattr(model.base_model, "layers", ())
    other = sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "self_attn")})
    if other or not len(layers):
        raise ValueError(
            f"target: decoder layers of {type(model).__name__} without attention: "
            f"{', '.join(other) or 'no list of layers'}; allowed: layers with self_attn; measure "
            "such a target in the serving engine"
        )
