"""Our decode attention in place of FlashAttention's, in the steps of DSPARK at small batch.

SGLang 0.5.23 runs a DSPARK target's verification and its draft's block in the same way: forward
mode TARGET_VERIFY, hence `FlashAttentionBackend.forward_extend`, with the same number of query
tokens for each request (`max_seq_len_q` of the metadata: the verify window, or for the draft one
less) and with lengths that include them. The draft's layers are ENCODER_ONLY unless its
configuration says otherwise, and then see their whole block. The lengths and the page table are
fixed buffers where the step is captured, fresh tensors where it is not; rows that only pad a graph
have the length of their query tokens and one more.

FlashAttention takes four launches there: it copies the queries out of q, k and v, schedules,
attends, and merges. `serving.kernels.decode_attention` takes two. What it does not serve, which
`refusal` tells, goes to SGLang as before, and everything does once the kernel has failed: a graph
runner makes its first calls without a graph, so that a failure is seen there and not in a replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from serving.hooks_kernels import LOG_MARK, SayOnce

FORWARD = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend"
MAX_REQUESTS = 8
"""With more, FlashAttention has enough to do to fill the GPU."""


logger = logging.getLogger("serving.kernels")


def register(register_hook: Callable[..., None], kind: Any) -> None:
    """Hook the attention of SGLang's FlashAttention backend."""
    register_hook(FORWARD, DecodeAttention().around_forward, kind.AROUND)


def refusal(backend: Any, layer: Any, batch: Any, num_tokens: int, keywords: dict[str, Any]) -> str:
    """Why a layer's verification keeps SGLang's attention; empty if it does not.

    Args:
        batch: the ForwardBatch. num_tokens: query tokens.
        keywords: of the call, beyond queries, keys and values.
    """
    metadata = backend.forward_metadata
    window = layer.sliding_window_size
    given = [name for name, value in keywords.items() if value is not None and value is not False]
    for bad, why in (
        (backend.topk > 1, "a tree of drafts"),
        (backend.use_mla, "latent attention"),
        (bool(given), f"an attention with {', '.join(given)}"),
        (backend.is_encoder_decoder or layer.is_cross_attention, "an encoder"),
        (backend.use_sliding_window_kv_pool, "a sliding-window pool"),
        (window is not None and window > -1, "a sliding window"),
        (backend.local_attn_builder is not None, "local attention"),
        (layer.logit_cap > 0, "capped logits"),
        (backend.num_splits != 0, "deterministic inference"),
        (backend.fa_skip_kv_cache, "no KV cache"),
        (backend._kv_shard_pool is not None, "a sharded pool"),
        (backend.attn_cp_size > 1, "context parallelism"),
        (backend.kv_index_translator.is_translating, "a translated pool"),
        (
            getattr(batch.spec_info, "ragged_verify_layout", None) is not None,
            "ragged verify windows",
        ),
        (metadata.image_token_ranges is not None, "image masks"),
        (metadata.swa_spec_metadata is not None, "a sliding window"),
        (metadata.page_table.dtype != torch.int32, "no int32 page table"),
        (metadata.page_table.stride(-1) != 1, "a page table that is not contiguous"),
    ):
        if bad:
            return why
    requests = metadata.cache_seqlens_int32.shape[0]
    if requests > MAX_REQUESTS:
        return f"more than {MAX_REQUESTS} requests"
    if num_tokens != requests * metadata.max_seq_len_q:
        return "rows that belong to no request"
    return ""


class DecodeAttention:
    """The hook's state in one scheduler process."""

    def __init__(self) -> None:
        self.failed = False
        self._say = SayOnce()

    def around_forward(
        self,
        original: Callable[..., Any],
        backend: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **keywords: Any,
    ) -> Any:
        """Instead of `forward_extend`."""
        if not self.failed and forward_batch.forward_mode.is_target_verify():
            try:
                out = self._attend(backend, q, k, v, layer, forward_batch, save_kv_cache, keywords)
            except Exception as error:
                self.failed = True
                logger.exception("%sdecode attention is left out: %s", LOG_MARK, error)
            else:
                if out is not None:
                    return out
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **keywords)

    def _attend(
        self,
        backend: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        batch: Any,
        save_kv_cache: bool,
        keywords: dict[str, Any],
    ) -> torch.Tensor | None:
        """What `forward_extend` gives, [tokens, H * D]; None where it is not served."""
        if why := refusal(backend, layer, batch, q.shape[0], keywords):
            self._say(f"attention stays as it is for {why}")
            return None
        from serving.kernels import decode_attention

        metadata = backend.forward_metadata
        # A slice of q, k and v side by side is not copied.
        q_THD = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        # Waits for the layer's pool where it is still being filled, as SGLang does.
        k_pool, v_pool = backend.get_paged_mha_kv_cache(layer)
        requests = metadata.cache_seqlens_int32.shape[0]
        if why := decode_attention.refusal(q_THD, k_pool, v_pool, requests):
            self._say(f"attention stays as it is: {why}")
            return None
        if save_kv_cache and k is not None:
            save(backend, layer, batch, k, v)
        given = getattr(batch, "_attn_output", None)
        out_THD = decode_attention.decode_attention(
            q_THD,
            k_pool,
            v_pool,
            metadata.page_table,
            metadata.cache_seqlens_int32,
            causal=is_causal(layer),
            scale=layer.scaling,
            out_THD=None if given is None else given.view(q_THD.shape),
        )
        rows = f"{metadata.max_seq_len_q} query tokens a request"
        self._say(f"decode attention is active, {'' if is_causal(layer) else 'not '}causal, {rows}")
        return out_THD.view(len(q_THD), -1)


def save(backend: Any, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor | None) -> None:
    """Store keys and values in the pool, as `forward_extend` does."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_kv_buffer(
        layer,
        KVWriteLoc.for_layer(batch, layer, swa_loc=backend.forward_metadata.swa_out_cache_loc),
        k,
        v,
        layer.k_scale,
        layer.v_scale,
    )


def is_causal(layer: Any) -> bool:
    """Whether a query sees no later one."""
    return layer.attn_type.name not in ("ENCODER_ONLY", "DECODER_BIDIRECTIONAL")
