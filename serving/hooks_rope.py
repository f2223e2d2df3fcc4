"""What lies between a layer's q, k and v and its attention, in one launch at verification.

SGLang 0.5.23 takes three there for Qwen3 (norms, rotation, store) and two for Llama, and
FlashAttention copies the queries on top. `serving.kernels.rope_store` takes one, and its queries
are contiguous. A DSpark draft has a kernel of its own for the first two; it is left as it is.

Only verification with the FlashAttention backend and a plain pool is served: that backend does not
look at keys and values that it need not store. Everything else goes to SGLang as before, and all
does once the kernel has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from serving.hooks_kernels import LOG_MARK, SayOnce

FORWARDS = (
    "sglang.srt.models.qwen3.Qwen3Attention.forward",
    "sglang.srt.models.llama.LlamaAttention.forward",
)
CLASSES = ("Qwen3Attention", "LlamaAttention")
"""Subclasses do other things in between."""
MAX_TOKENS = 128

logger = logging.getLogger("serving.kernels")


def register(register_hook: Callable[..., None], kind: Any) -> None:
    """Hook the attention of Qwen3 and Llama layers."""
    hook = RopeStore()
    for target in FORWARDS:
        register_hook(target, hook.around_forward, kind.AROUND)


def refusal(layer: Any, batch: Any) -> str:
    """Why a layer's verification keeps SGLang's kernels; empty if it does not."""
    backend = attention_backend()
    rotary = layer.rotary_emb
    named = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
    norms = [norm for norm in named if norm is not None]
    for bad, why in (
        (type(layer).__name__ not in CLASSES, f"a {type(layer).__name__}"),
        (type(backend).__name__ != "FlashAttentionBackend", f"{type(backend).__name__}"),
        (not is_plain_store(batch), "a pool that is not plain"),
        (is_deterministic(), "deterministic inference"),
        (layer.attn.is_cross_attention, "an encoder"),
        (not rotary.is_neox_style, "interleaved rotation"),
        (not rotates_by_table(rotary), f"a {type(rotary).__name__}"),
        (len(norms) == 1, "a norm of queries or of keys alone"),
        (any(type(norm).__name__ != "RMSNorm" for norm in norms), "another norm"),
        (any(norm.cast_x_before_out_mul for norm in norms), "a norm that rounds first"),
        (any(norm.variance_size_override is not None for norm in norms), "a norm of a part"),
        (len({norm.variance_epsilon for norm in norms}) > 1, "norms of two kinds"),
    ):
        if bad:
            return why
    return ""


class RopeStore:
    """The hook's state in one scheduler process."""

    def __init__(self) -> None:
        self.failed = False
        self._say = SayOnce()

    def around_forward(
        self,
        original: Callable[..., Any],
        layer: Any,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
    ) -> Any:
        """Instead of the forward of a layer's attention."""
        if (
            not self.failed
            and not torch.compiler.is_compiling()
            and forward_batch.forward_mode.is_target_verify()
            # A quantized layer may be given values and scales.
            and isinstance(hidden_states, torch.Tensor)
            and 0 < hidden_states.shape[0] <= MAX_TOKENS
        ):
            try:
                q = self._queries(layer, positions, hidden_states, forward_batch)
            except Exception as error:
                # SGLang's kernels then store the same keys and values again.
                self.failed = True
                logger.exception("%srope is left out: %s", LOG_MARK, error)
            else:
                if q is not None:
                    out = layer.attn(q, None, None, forward_batch, save_kv_cache=False)
                    return layer.o_proj(out)[0]
        return original(layer, positions, hidden_states, forward_batch)

    def _queries(
        self, layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, batch: Any
    ) -> torch.Tensor | None:
        """Rotated queries, [tokens, H * D], with keys and values stored; None if not served."""
        if why := refusal(layer, batch):
            self._say(f"rope stays as it is for {why}")
            return None
        from serving.kernels import rope_store

        pool = attention_backend().token_to_kv_pool
        pools = (
            pool.get_key_buffer(layer.attn.layer_id),
            pool.get_value_buffer(layer.attn.layer_id),
        )
        norms, eps = None, 0.0
        if (q_norm := getattr(layer, "q_norm", None)) is not None:
            norms = (q_norm.weight, layer.k_norm.weight)
            eps = q_norm.variance_epsilon
        qkv, _ = layer.qkv_proj(hidden_states)
        cos_sin = layer.rotary_emb.cos_sin_cache
        if why := rope_store.refusal(qkv, *pools, cos_sin, norms):
            self._say(f"rope stays as it is: {why}")
            return None
        slots = batch.out_cache_loc
        if not len(slots) == len(positions) == len(qkv):
            self._say("rope stays as it is for rows without a slot")
            return None
        q = rope_store.rope_store(qkv, *pools, slots, positions, cos_sin, norms=norms, eps=eps)
        self._say(f"rope is active for {type(layer).__name__}")
        return q


def attention_backend() -> Any:
    """Of the forward that runs."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()


def is_plain_store(batch: Any) -> bool:
    """Whether SGLang itself would store from a kernel that rotates."""
    from sglang.srt.models.utils import enable_fused_set_kv_buffer

    pool = attention_backend().token_to_kv_pool
    return (
        type(pool).__name__ == "MHATokenToKVPool"
        and not pool.is_quantized_kv_cache
        and pool.store_dtype == pool.dtype
        and bool(enable_fused_set_kv_buffer(batch))
    )


def is_deterministic() -> bool:
    """Whether SGLang takes other norms so that results repeat, or match a trainer's."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec

    return bool(
        envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()
        or get_exec().deterministic.rl_on_policy_target is not None
    )


def rotates_by_table(rotary: Any) -> bool:
    """Whether it rotates whole heads by its table and by nothing else."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and not rotary.use_fallback_kernel
        and not rotary._force_native
        and rotary.rotary_dim == rotary.head_size
    )
