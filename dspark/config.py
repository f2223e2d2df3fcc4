"""The draft's geometry, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEAD_TYPES = ("vanilla", "gated", "rnn")
MULTI_AXIS_ROPE = ("mrope_section", "mrope_interleaved")
"""Draft positions have one axis, along which M-RoPE is the plain embedding."""
ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")

FIXED_FIELDS = {
    "hidden_act": "silu",
    "is_causal": False,
    "sample_from_anchor": True,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
}
"""Fields that other drafts may set otherwise and that would change the arithmetic."""


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A target's config.json with the language model's part over it.

    Multimodal wrappers keep its sizes one level down, and others, such as the quantization, not.
    """
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _refuse(field: str, value: object, allowed: str, remedy: str) -> ValueError:
    return ValueError(f"draft.{field}={value!r} is not usable; allowed: {allowed}; {remedy}")


@dataclass(frozen=True)
class DraftConfig:
    """Everything that fixes the shape and the arithmetic of a draft.

    Raises:
        ValueError: a field is out of range; names it.

    Source: SGLang 0.5.23, srt/models/{dspark,dflash}.py, for names and meanings.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's embedding, unpadded as in its config.json."""
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As in transformers 5: `rope_type`, `rope_theta` and what the type asks for."""
    max_position_embeddings: int
    block_size: int
    """Tokens drafted per step, the anchor not counted."""
    target_layer_ids: tuple[int, ...]
    """Captured decoder layers, ascending; id i is the output of layer i."""
    num_target_layers: int
    mask_token_id: int
    markov_rank: int
    """0 is plain DFlash."""
    markov_head_type: str = "vanilla"
    confidence_head_with_markov: bool = True
    attention_bias: bool = False
    architecture: str = "Qwen3DSparkModel"

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "block_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise _refuse(name, getattr(self, name), "1 or more", f"raise {name}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads={self.num_attention_heads}",
                "take the target's",
            )
        if self.head_dim % 2:
            raise _refuse("head_dim", self.head_dim, "an even number", "take the target's")
        if self.rms_norm_eps <= 0.0:
            raise _refuse("rms_norm_eps", self.rms_norm_eps, "above 0", "take the target's")
        if not {"rope_type", "rope_theta"} <= self.rope_parameters.keys():
            raise _refuse(
                "rope_parameters",
                self.rope_parameters,
                "a dict with rope_type and rope_theta",
                "take the target's",
            )
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise _refuse("target_layer_ids", list(ids), "different layers, ascending", "sort them")
        if ids[-1] >= self.num_target_layers:
            raise _refuse(
                "target_layer_ids",
                list(ids),
                f"layers 0 to {self.num_target_layers - 1}",
                "name layers that the target has",
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise _refuse(
                "mask_token_id",
                self.mask_token_id,
                f"0 to {self.vocab_size - 1}",
                "choose a row of the target's embedding",
            )
        if self.markov_rank < 0:
            raise _refuse("markov_rank", self.markov_rank, "0 or more", "0 is plain DFlash")
        if self.markov_head_type not in HEAD_TYPES:
            raise _refuse(
                "markov_head_type", self.markov_head_type, ", ".join(HEAD_TYPES), "choose one"
            )
        if self.confidence_head_with_markov and self.markov_rank == 0:
            raise _refuse(
                "confidence_head_with_markov", True, "false with markov_rank=0", "switch it off"
            )
        if self.architecture not in ARCHITECTURES:
            raise _refuse("architecture", self.architecture, ", ".join(ARCHITECTURES), "choose one")

    @property
    def num_context_features(self) -> int:
        """Width of the concatenated hidden states of the captured layers, K*H."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def servable(self) -> bool:
        """Whether SGLang's DSPARK can serve the draft: it refuses one without a Markov head."""
        return self.markov_rank > 0

    @property
    def confidence_features(self) -> int:
        """Input width of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        *,
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        markov_rank: int,
        target_layer_ids: Sequence[int] = (),
        num_context_layers: int = 5,
        markov_head_type: str = "vanilla",
        confidence_head_with_markov: bool = True,
        intermediate_size: int | None = None,
        architecture: str = "Qwen3DSparkModel",
        capture_last_layer: bool = False,
    ) -> DraftConfig:
        """A draft that inherits geometry and rotary embedding from a target's config.json.

        Args:
            target_layer_ids: captured layers; empty spreads `num_context_layers` over the target.
            capture_last_layer: whether the target engine can capture the last layer's output.

        Raises:
            ValueError: layers that do not exist or cannot be captured, or a field out of range.
        """
        depth = int(target["num_hidden_layers"])
        last = depth - 1 if capture_last_layer else depth - 2
        ids = tuple(sorted(set(target_layer_ids)))
        ids = ids or spread_layers(num_context_layers, last)
        if ids[0] < 0 or ids[-1] > last:
            why = "" if capture_last_layer else "; the last layer's output cannot be captured"
            raise _refuse(
                "target_layer_ids",
                list(ids),
                f"0 to {last}{why}",
                "name other layers, or leave it empty for a spread by rule",
            )
        heads = int(target["num_attention_heads"])
        hidden = int(target["hidden_size"])
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate_size or int(target["intermediate_size"]),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or hidden // heads),
            vocab_size=int(target["vocab_size"]),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
            rope_parameters=_draft_rope(target),
            max_position_embeddings=int(target["max_position_embeddings"]),
            block_size=block_size,
            target_layer_ids=ids,
            num_target_layers=depth,
            mask_token_id=mask_token_id,
            markov_rank=markov_rank,
            markov_head_type=markov_head_type,
            confidence_head_with_markov=confidence_head_with_markov,
            architecture=architecture,
        )

    def to_hf(self) -> dict[str, Any]:
        """The complete config.json of the export; every field at the top level.

        Source: SGLang 0.5.23, srt/speculative/dspark_components/dspark_config.py and
        srt/models/dspark.py, which read some of the fields at the top level only.
        """
        rope = dict(self.rope_parameters)
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        # SGLang reads the rotary width at the top level, transformers in rope_parameters.
        partial = {k: rope[k] for k in ("partial_rotary_factor",) if k in rope}
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": FIXED_FIELDS["hidden_act"],
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else scaling,
            **partial,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "is_causal": FIXED_FIELDS["is_causal"],
            "block_size": self.block_size,
            "target_layer_ids": list(self.target_layer_ids),
            "num_target_layers": self.num_target_layers,
            "mask_token_id": self.mask_token_id,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "sample_from_anchor": FIXED_FIELDS["sample_from_anchor"],
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DraftConfig:
        """The inverse of `to_hf`.

        Raises:
            ValueError: a field is missing, out of range, or asks for another arithmetic than
                this model's.
        """
        for name, only in FIXED_FIELDS.items():
            if config.get(name, only) != only:
                raise _refuse(name, config[name], repr(only), "use a draft without this feature")
        layer_types = set(config.get("layer_types") or ())
        if layer_types - {"full_attention"}:
            raise _refuse(
                "layer_types", sorted(layer_types), "full_attention", "use a draft of such layers"
            )
        try:
            values = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
            values["target_layer_ids"] = tuple(config["target_layer_ids"])
            values["rope_parameters"] = rope_parameters_of(config)
            values["architecture"] = config["architectures"][0]
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"config.json of the draft is not complete ({error}); export the draft again"
            ) from error


def spread_layers(num_layers: int, last: int) -> tuple[int, ...]:
    """Layers 1 to `last`, evenly spread, both ends included: 5 of 28 are (1, 8, 14, 21, 28).

    The first still tells which tokens there were; the last is nearest to what the target will say.

    Raises:
        ValueError: the target has fewer layers than are asked for.
    """
    first = min(1, last)
    if last < 0 or num_layers > last - first + 1:
        raise _refuse(
            "num_context_layers",
            num_layers,
            f"1 to {max(0, last - first + 1)}",
            "capture fewer layers of so shallow a target",
        )
    if num_layers == 1:
        return (last,)
    step = (last - first) / (num_layers - 1)
    return tuple(first + int(k * step + 0.5) for k in range(num_layers))


def _draft_rope(target: Mapping[str, Any]) -> dict[str, Any]:
    """The target's rotary settings, as far as they are not about heads that the draft lacks.

    In latent attention (MLA) the rotated share of a head is a part of its own, and a target without
    positions (NoPE) may still name a base. The draft's heads are plain and rotated whole, which is
    also what SGLang's fused kernel for a draft's keys asks for.
    """
    rope = rope_parameters_of(target)
    if target.get("kv_lora_rank") is not None:
        rope.pop("partial_rotary_factor", None)
    return rope


def rope_parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a config.json, in either of transformers' two spellings.

    Raises:
        ValueError: layers of different kinds have different settings.
    """
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _refuse(
            "rope_parameters",
            rope,
            "one setting for all layers",
            "use a target whose layers share their rotary embedding",
        )
    if "rope_theta" not in rope:
        rope["rope_theta"] = config.get("rope_theta", 10000.0)
    scaling = config.get("rope_scaling")
    if scaling and "rope_type" not in rope:
        rope.update(scaling)
    kind = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_type"] = "default" if kind == "mrope" else kind
    for name in MULTI_AXIS_ROPE:
        rope.pop(name, None)
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return rope
