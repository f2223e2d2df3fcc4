"""Every tensor of a checkpoint, by the names that SGLang loads, from the model's config.json.

Shapes follow the fields of the config alone. Scales are those of a fresh network whose residual
stream keeps its size over any depth: matrices 1/sqrt(inputs), what is added to the stream smaller
by sqrt(2 * layers), norms 1. The lm_head is drawn wider, so that the model prefers some tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from splitserve.errors import UserError
from splitserve.target.info import kda_layers

LOGIT_SPREAD = 4.0
"""Standard deviation of the logits. At 1, all tokens of a large vocabulary are nearly as likely."""
FIELD = "target.random_config"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint and how it is drawn."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    """Of the normal distribution, where `kind` is "normal"."""
    kind: str = "normal"
    """normal, ones, log_decay (KDA's A_log) or time_bias (KDA's dt_bias)."""
    float32: bool = False
    """Kept in float32, as SGLang keeps it; else bfloat16."""

    @property
    def num_bytes(self) -> int:
        """Size in the checkpoint."""
        return math.prod(self.shape) * (4 if self.float32 else 2)


def checkpoint_tensors(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors of the model that a config.json describes, in the order of its layers.

    Raises:
        ValueError: an architecture that is not known here, a field that is missing, or one that
            asks for what the model's own code does not do.
    """
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in _LAYERS:
        raise UserError(
            f"{FIELD}.architectures",
            config.get("architectures"),
            " or ".join(f"[{name}]" for name in _LAYERS),
            "describe one of these, or set target.path to a model folder",
        )
    return list(_model(_Fields(config), *_LAYERS[architecture]))


class _Fields:
    """Typed access to a config.json; nothing is taken for granted."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def size(self, name: str) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{FIELD}.{name}", value, "an integer, 1 or more", "set it")
        return value

    def get(self, name: str, allowed: tuple[Any, ...]) -> Any:
        value = self._config.get(name)
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise UserError(f"{FIELD}.{name}", value, choices, "set it to one of these")
        return value

    def optional_size(self, name: str) -> int:
        """0 where the field is 0, null or not there."""
        return self.size(name) if self._config.get(name) else 0

    def is_kda(self, layer: int) -> bool:
        """Whether a Bailing layer is of linear attention; a bad grouping of layers is refused."""
        groups, depth = self._config.get("layer_group_size"), self.size("num_hidden_layers")
        if isinstance(groups, list):
            good, allowed = len(groups) == depth, f"a number, or a list of {depth} entries"
        else:
            group = self.size("layer_group_size")
            good, allowed = depth % group == 0, f"a divisor of num_hidden_layers={depth}"
        if not good:
            raise UserError(f"{FIELD}.layer_group_size", groups, allowed, "correct either")
        return layer in kda_layers(self._config)


_Layer = Callable[[_Fields, int, str], Iterator[TensorSpec]]


def _linear(name: str, outputs: int, inputs: int, **settings: Any) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (outputs, inputs), inputs**-0.5, **settings)


def _norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (width,), kind="ones")


def _into_stream(f: _Fields, name: str, inputs: int) -> TensorSpec:
    """A matrix whose output is added to the residual stream, as two in every layer are."""
    std = (2 * inputs * f.size("num_hidden_layers")) ** -0.5
    return TensorSpec(f"{name}.weight", (f.size("hidden_size"), inputs), std)


def _model(f: _Fields, embedding: str, layer_tensors: _Layer) -> Iterator[TensorSpec]:
    hidden, rows = f.size("hidden_size"), f.size("vocab_size")
    tied = f.get("tie_word_embeddings", (False, True))
    head_std = LOGIT_SPREAD * hidden**-0.5
    yield TensorSpec(f"{embedding}.weight", (rows, hidden), head_std if tied else 1.0)
    for layer in range(f.size("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        yield _norm(f"{prefix}.input_layernorm", hidden)
        yield from layer_tensors(f, layer, prefix)
        yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    yield _norm("model.norm", hidden)
    if not tied:
        yield TensorSpec("lm_head.weight", (rows, hidden), head_std)


def _mlp(f: _Fields, prefix: str, inner: int) -> Iterator[TensorSpec]:
    hidden = f.size("hidden_size")
    yield _linear(f"{prefix}.gate_proj", inner, hidden)
    yield _linear(f"{prefix}.up_proj", inner, hidden)
    yield _into_stream(f, f"{prefix}.down_proj", inner)


def _qwen3_layer(f: _Fields, layer: int, prefix: str) -> Iterator[TensorSpec]:
    """Source: SGLang 0.5.23, srt/models/qwen3.py, load_weights."""
    f.get("attention_bias", (False, None))
    hidden, width = f.size("hidden_size"), f.size("head_dim")
    queries, keys = f.size("num_attention_heads"), f.size("num_key_value_heads")
    attention = f"{prefix}.self_attn"
    yield _linear(f"{attention}.q_proj", queries * width, hidden)
    yield _linear(f"{attention}.k_proj", keys * width, hidden)
    yield _linear(f"{attention}.v_proj", keys * width, hidden)
    yield _into_stream(f, f"{attention}.o_proj", queries * width)
    yield _norm(f"{attention}.q_norm", width)
    yield _norm(f"{attention}.k_norm", width)
    yield from _mlp(f, f"{prefix}.mlp", f.size("intermediate_size"))


def _bailing_v3_layer(f: _Fields, layer: int, prefix: str) -> Iterator[TensorSpec]:
    """Source: SGLang 0.5.23, srt/models/bailing_moe_v3.py, load_weights."""
    # Its ModelConfig takes 128 whatever the config says.
    f.get("head_dim", (128,))
    f.get("full_attention_type", ("mla", None))
    f.get("num_nextn_predict_layers", (0, None))
    f.get("multi_gate", (False, None))
    if f.is_kda(layer):
        yield from _kda(f, f"{prefix}.attention")
    else:
        yield from _mla(f, f"{prefix}.attention")
    if layer < f.optional_size("first_k_dense_replace") or f.size("num_experts") == 1:
        yield from _mlp(f, f"{prefix}.mlp", f.size("intermediate_size"))
    else:
        yield from _moe(f, f"{prefix}.mlp")


def _kda(f: _Fields, prefix: str) -> Iterator[TensorSpec]:
    """Kimi delta attention; its gates are drawn so that heads forget at different rates."""
    hidden, heads, width = f.size("hidden_size"), f.size("num_attention_heads"), f.size("head_dim")
    kernel = f.size("short_conv_kernel_size")
    inner = heads * width
    for name in ("q_proj", "k_proj", "v_proj"):
        yield _linear(f"{prefix}.{name}", inner, hidden)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield TensorSpec(f"{prefix}.{name}.weight", (inner, 1, kernel), kernel**-0.5, float32=True)
    yield _linear(f"{prefix}.b_proj", heads, hidden)
    if f.get("no_kda_lora", (False, True)):
        yield _linear(f"{prefix}.f_proj", inner, hidden)
        yield _linear(f"{prefix}.g_proj", inner, hidden)
    else:
        for gate in ("f", "g"):
            yield _linear(f"{prefix}.{gate}_a_proj", width, hidden)
            yield _linear(f"{prefix}.{gate}_b_proj", inner, width)
    yield TensorSpec(f"{prefix}.A_log", (heads,), kind="log_decay", float32=True)
    yield TensorSpec(f"{prefix}.dt_bias", (inner,), kind="time_bias", float32=True)
    yield _norm(f"{prefix}.o_norm", width)
    yield _into_stream(f, f"{prefix}.o_proj", inner)


def _mla(f: _Fields, prefix: str) -> Iterator[TensorSpec]:
    """Multi-head latent attention with the output gate that the config asks for."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    plain, turned = f.size("qk_nope_head_dim"), f.size("qk_rope_head_dim")
    values, latent = f.size("v_head_dim"), f.size("kv_lora_rank")
    if rank := f.optional_size("q_lora_rank"):
        yield _linear(f"{prefix}.q_a_proj", rank, hidden)
        yield _norm(f"{prefix}.q_a_layernorm", rank)
        yield _linear(f"{prefix}.q_b_proj", heads * (plain + turned), rank)
    else:
        yield _linear(f"{prefix}.q_proj", heads * (plain + turned), hidden)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa", latent + turned, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", latent)
    yield _linear(f"{prefix}.kv_b_proj", heads * (plain + values), latent)
    kinds = ("head_wise", "element_wise", None)
    if gate := f.get("gated_attention_proj_granularity_type", kinds):
        yield _linear(f"{prefix}.g_proj", heads * (1 if gate == "head_wise" else values), hidden)
    yield _into_stream(f, f"{prefix}.dense", heads * values)


def _moe(f: _Fields, prefix: str) -> Iterator[TensorSpec]:
    hidden, experts = f.size("hidden_size"), f.size("num_experts")
    inner = f.size("moe_intermediate_size")
    wide = f.get("router_dtype", ("fp32", "bf16", None)) != "bf16"
    yield _linear(f"{prefix}.gate", experts, hidden, float32=wide)
    if f.get("moe_router_enable_expert_bias", (False, True)):
        yield TensorSpec(f"{prefix}.gate.expert_bias", (experts,), 0.01, float32=True)
    for expert in range(experts):
        yield from _mlp(f, f"{prefix}.experts.{expert}", inner)
    if shared := f.optional_size("num_shared_experts"):
        width = f.optional_size("moe_shared_expert_intermediate_size") or shared * inner
        yield from _mlp(f, f"{prefix}.shared_experts", width)


_LAYERS: dict[str, tuple[str, _Layer]] = {
    "Qwen3ForCausalLM": ("model.embed_tokens", _qwen3_layer),
    "BailingMoeV3ForCausalLM": ("model.word_embeddings", _bailing_v3_layer),
}
