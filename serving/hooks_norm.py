"""RMSNorms with a residual, inside the products around them.

SGLang launches one before each attention and each MLP: 82 in a step of an 8B target and its draft,
each of a few microseconds in which eight multiprocessors of 132 work and no weight is read. Here
the product before it (`o_proj`, `down_proj`) adds the residual, and the one behind it (`qkv_proj`,
`gate_up_proj`) scales its sums; `serving.kernels.skinny_linear` says how.

SGLang's layers run as they are. What `o_proj` gives then stands for the norm's result: a tensor
with a mark. It comes to the norm, whose hook passes it on together with the new residual, and to
the next product, which knows the mark. A product that cannot take it gets the norm's result, made
from the mark, and from then on the product before it is left alone. If a mark ever is not used, so
that something else took the tensor, the forward runs again without any of this, for good.

Served are verifications of few rows, by plain layers of Qwen3 and Llama targets and of DSpark
drafts on one rank. The first norm and the last of a model stay: the last feeds the lm_head through
SGLang's logits processor. What a draft captures is the residual behind a norm, as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from serving.hooks_kernels import LOG_MARK, SayOnce

MODELS = (
    "sglang.srt.models.qwen3.Qwen3Model.forward",
    "sglang.srt.models.llama.LlamaModel.forward",
    "sglang.srt.models.dflash.DFlashDraftModel.forward",
)
NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_cuda"
LAYERS = {
    "Qwen3DecoderLayer": ("Qwen3Attention", "Qwen2MLP"),
    "LlamaDecoderLayer": ("LlamaAttention", "LlamaMLP"),
    "DFlashDecoderLayer": ("DFlashAttention", "DFlashMLP"),
}
"""With their attention and MLP. Subclasses do other things in between."""
LINEARS = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear")
"""One with LoRA is of another class."""
MAX_ROWS = 16
SAVES = 1.5
"""Microseconds of a norm's launch and of the gaps around it, for each of the two products."""
_MARK = "splitserve_normed"

logger = logging.getLogger("serving.kernels")


@dataclass
class Mark:
    """On a tensor that stands for the result of a norm."""

    norm: Any
    normed: Any
    """Of `serving.kernels.skinny_linear`."""
    source: tuple[int, int]
    """The product that made it, and for how many rows at most."""
    used: bool = False


@dataclass
class Behind:
    """What follows a product: the residual it is added to, and the norm."""

    residual: torch.Tensor
    norm: Any
    source: tuple[int, int]


class Norms:
    """The hooks' state in one scheduler process."""

    def __init__(self) -> None:
        self.failed = False
        self._norms: dict[int, Any] = {}
        """By the product before it; empty outside of a forward that is served."""
        self._all: set[int] = set()
        self._residual: torch.Tensor | None = None
        self._marks: list[Mark] = []
        self._refused: set[tuple[int, int]] = set()
        self._say = SayOnce()

    def register(self, register_hook: Callable[..., None], kind: Any) -> None:
        for target in MODELS:
            register_hook(target, self.around_model, kind.AROUND)
        register_hook(NORM, self.around_norm, kind.AROUND)

    def around_model(
        self,
        original: Callable[..., Any],
        model: Any,
        input_ids: Any,
        positions: torch.Tensor,
        forward_batch: Any,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Around the forward of a model: its layers' products may take norms in."""
        given = (model, input_ids, positions, forward_batch, *args)
        if (
            torch.compiler.is_compiling()
            or self.failed
            or self._norms
            or not forward_batch.forward_mode.is_target_verify()
            or positions.dim() != 1
            or not 0 < positions.shape[0] <= MAX_ROWS
        ):
            return original(*given, **keywords)
        layers = list(model.layers[getattr(model, "start_layer", 0) : end_layer(model)])
        if why := refusal(layers):
            self._say(f"norms stay as they are for {why}")
            return original(*given, **keywords)
        self._norms = norms_behind(layers)
        self._all = {id(layers[0].input_layernorm), *map(id, self._norms.values())}
        try:
            out = original(*given, **keywords)
        finally:
            marks, self._marks = self._marks, []
            self._norms, self._all, self._residual = {}, set(), None
        if all(mark.used for mark in marks):
            if marks:
                self._say(f"norm is active for {type(layers[0]).__name__}, {len(marks)} norms")
            return out
        self.failed = True
        logger.error("%snorm is left out: a product's result went elsewhere", LOG_MARK)
        return original(*given, **keywords)

    def around_norm(
        self,
        original: Callable[..., Any],
        norm: Any,
        x: Any,
        residual: Any = None,
        post_residual_addition: Any = None,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        """Instead of RMSNorm.forward_cuda."""
        mark = self.mark_of(x)
        if mark is None:
            result = original(norm, x, residual, post_residual_addition, *args, **keywords)
            if id(norm) in self._all:
                self._residual = x if residual is None else result[1]
            return result
        self._residual = h = mark.normed.h
        if mark.norm is norm and post_residual_addition is None:
            return x, h
        mark.used = True
        if post_residual_addition is not None:
            self._residual = h = h + post_residual_addition
        return original(norm, h), h

    # --- for the products -------------------------------------------------------------------------

    def mark_of(self, x: Any) -> Mark | None:
        """What x stands for; None for a plain tensor."""
        return getattr(x, _MARK, None) if self._norms else None

    def behind(self, product: Any, rows: int) -> Behind | None:
        """What follows a layer's product of so many rows, if that is to be part of it."""
        norm = self._norms.get(id(product))
        source = (id(product), 8 if rows <= 8 else MAX_ROWS)
        if norm is None or self._residual is None or source in self._refused:
            return None
        return Behind(self._residual, norm, source)

    def mark(self, y: torch.Tensor, normed: Any, behind: Behind) -> None:
        """Let y stand for the norm's result."""
        made = Mark(behind.norm, normed, behind.source)
        self._marks.append(made)
        setattr(y, _MARK, made)

    def result(self, x: Any, mark: Mark | None) -> Any:
        """x as the norm gives it, for what knows no marks; none will be made there again."""
        if mark is None:
            return x
        mark.used = True
        self._refused.add(mark.source)
        self._say(f"norm is left out where the product behind is SGLang's, {len(x)} rows")
        normed = mark.normed
        return (normed.h.float() * normed.rstd() * normed.gain.float()).to(x.dtype)


def end_layer(model: Any) -> int:
    """Of this pipeline rank."""
    return int(getattr(model, "end_layer", len(model.layers)))


def norms_behind(layers: list[Any]) -> dict[int, Any]:
    """The norm that follows each product, by the product's id; none follows the last one."""
    norms = {}
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        norms[id(layer.self_attn.o_proj)] = layer.post_attention_layernorm
        if after is not None:
            norms[id(layer.mlp.down_proj)] = after.input_layernorm
    return norms


def refusal(layers: list[Any]) -> str:
    """Why a model's norms stay SGLang's; empty if they do not."""
    if not layers:
        return "no layers"
    if num_ranks() > 1:
        return "several ranks"
    if is_deterministic():
        return "deterministic inference"
    return next(filter(None, map(layer_refusal, layers)), "")


def layer_refusal(layer: Any) -> str:
    """Why a layer is not served; empty if it is."""
    parts = LAYERS.get(type(layer).__name__)
    if parts is None:
        return f"a {type(layer).__name__}"
    inner = (layer.self_attn, layer.mlp)
    if tuple(type(part).__name__ for part in inner) != parts:
        return " and ".join(f"a {type(part).__name__}" for part in inner)
    if any(getattr(layer, name, None) is not None for name in ("attention_conv", "mlp_conv")):
        return "convolutions"
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        for bad, why in (
            (type(norm).__name__ != "RMSNorm", f"a {type(norm).__name__}"),
            (norm.weight.dtype != torch.bfloat16, f"norms in {norm.weight.dtype}"),
            (norm.cast_x_before_out_mul, "a norm that rounds first"),
            (norm.variance_size_override is not None, "a norm of a part"),
            (norm.fp32_residual or norm.override_orig_dtype is not None, "a float32 residual"),
        ):
            if bad:
                return why
    for product in (inner[0].qkv_proj, inner[0].o_proj, inner[1].gate_up_proj, inner[1].down_proj):
        for bad, why in (
            (type(product).__name__ not in LINEARS, f"a {type(product).__name__}"),
            (
                type(product.quant_method).__name__ != "UnquantizedLinearMethod",
                f"{type(product.quant_method).__name__}",
            ),
            (product.skip_bias_add, "a bias that is added later"),
        ):
            if bad:
                return why
    return ""


def num_ranks() -> int:
    """That split a layer, or hold other rows of it."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_size)


def is_deterministic() -> bool:
    """Whether SGLang takes other norms so that results repeat, or match a trainer's."""
    from serving.hooks_linear import is_batch_invariant
    from serving.hooks_rope import is_deterministic

    return is_deterministic() or is_batch_invariant()
