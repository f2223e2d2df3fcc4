"""Attention for SGLang's `torch_native` backend on a CPU: the same sums with fewer calls.

SGLang's own loops run some ten small operations per request and layer; with tens of requests that
is most of a step. Here a decode step is one gather and one attention call per layer for the whole
batch, and a prefill gathers once per layer. Whatever is out of the ordinary (cross attention,
sliding windows, encoders) goes to SGLang's own code.
Source: SGLang 0.5.23, srt/layers/attention/torch_native_backend.py.

Shapes: B requests, L longest sequence, N rows of a forward pass, h query heads, k key heads, d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_PLAN = "_splitserve_plan"


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What all layers of one decode step share."""

    seq_lens: torch.Tensor
    """The batch's own tensor, to recognise it."""
    tokens: torch.Tensor
    """int64 [B*L], cache rows; past a sequence's end its first row again."""
    mask: torch.Tensor
    """bool [B, 1, 1, L], true where a row belongs to the sequence."""


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """What all layers of one prefill share."""

    seq_lens: torch.Tensor
    tokens: torch.Tensor
    """int64 [sum of sequence lengths], cache rows of all sequences, one after another."""
    requests: list[tuple[int, int]]
    """Per request: new rows, all rows."""
    masks: list[torch.Tensor | None]
    """Per request: bool [new rows, all rows], or None where there is no prefix."""


def plan_forward(_result: None, backend: Any, forward_batch: Any) -> None:
    """Prepare one forward pass; runs after the backend's own `init_forward_metadata`."""
    plan: DecodePlan | ExtendPlan | None = None
    if forward_batch.encoder_lens is None and forward_batch.seq_lens_cpu is not None:
        lengths = [int(n) for n in forward_batch.seq_lens_cpu]
        table = backend.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            plan = plan_decode(table, rows, forward_batch.seq_lens, lengths)
        elif forward_batch.extend_seq_lens_cpu is not None:
            new = [int(n) for n in forward_batch.extend_seq_lens_cpu]
            plan = plan_extend(table, rows, forward_batch.seq_lens, lengths, new)
    setattr(backend, _PLAN, plan)


def plan_decode(
    table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, lengths: list[int]
) -> DecodePlan:
    """From req_to_token [R, C], its rows int64 [B] and the sequences' lengths [B]."""
    longest = max(lengths)
    tokens = table[:, :longest].index_select(0, rows).long()
    inside = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    # Rows past the end are masked, but 0 * NaN of a foreign row would still be NaN.
    tokens = torch.where(inside, tokens, tokens[:, :1])
    return DecodePlan(seq_lens, tokens.flatten(), inside[:, None, None, :])


def plan_extend(
    table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
    new: list[int],
) -> ExtendPlan:
    """As `plan_decode`, with the number of new rows of each sequence."""
    tokens = [table[row, :length] for row, length in zip(rows.tolist(), lengths, strict=True)]
    masks = []
    for added, length in zip(new, lengths, strict=True):
        causal = torch.ones(added, length, dtype=torch.bool).tril(length - added)
        masks.append(causal if added != length else None)
    requests = list(zip(new, lengths, strict=True))
    return ExtendPlan(seq_lens, torch.cat(tokens).long(), requests, masks)


def decode_attention(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """One query row per request: query and output [B, h, d], caches [C, k, d]."""
    plan = getattr(backend, _PLAN, None)
    if not isinstance(plan, DecodePlan) or not _ordinary(plan, seq_lens, query, k_cache, options):
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            encoder_lens,
            **options,
        )
    num_requests, num_heads, _ = query.shape
    num_kv_heads = k_cache.shape[1]
    # The query heads of one key head become rows of one small attention: no copy of the keys.
    grouped = query.view(num_requests, num_kv_heads, num_heads // num_kv_heads, -1)
    attended = scaled_dot_product_attention(
        grouped,
        _gather(k_cache, plan.tokens, num_requests),
        _gather(v_cache, plan.tokens, num_requests),
        attn_mask=plan.mask,
        scale=options.get("scaling"),
    )
    return output.copy_(attended.reshape(output.shape))


def extend_attention(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *lens: Any,
    **options: Any,
) -> torch.Tensor:
    """New rows after each request's prefix: query and output [N, h, d], caches [C, k, d]."""
    plan = getattr(backend, _PLAN, None)
    if (
        not isinstance(plan, ExtendPlan)
        or not options.get("causal")
        or not _ordinary(plan, seq_lens, query, k_cache, options)
    ):
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            *lens,
            **options,
        )
    keys, values = _gather(k_cache, plan.tokens, 1), _gather(v_cache, plan.tokens, 1)
    start_query = start_key = 0
    for (num_new, num_all), mask in zip(plan.requests, plan.masks, strict=True):
        mine = slice(start_query, start_query + num_new)
        seen = slice(start_key, start_key + num_all)
        attended = scaled_dot_product_attention(
            query[mine].transpose(0, 1)[None],
            keys[:, :, seen],
            values[:, :, seen],
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.get("scaling"),
            enable_gqa=True,
        )
        output[mine] = attended[0].transpose(0, 1)
        start_query, start_key = mine.stop, seen.stop
    return output


def _ordinary(
    plan: DecodePlan | ExtendPlan,
    seq_lens: torch.Tensor,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    options: dict[str, Any],
) -> bool:
    window = options.get("sliding_window_size")
    return (
        plan.seq_lens is seq_lens
        and not options.get("is_cross_attn")
        and (window is None or window < 0)
        and query.dtype == k_cache.dtype
    )


def _gather(cache: torch.Tensor, tokens: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Cache rows [C, k, d] of the tokens, as [num_sequences, k, rows, d]."""
    _, num_heads, head_dim = cache.shape
    # index_select over flat rows is several times faster than indexing with a tensor.
    rows = cache.view(cache.shape[0], -1).index_select(0, tokens)
    return rows.view(num_sequences, -1, num_heads, head_dim).transpose(1, 2)
