"""What block rows may look at: their anchor's context and their own block, and nothing else.

Shapes: B sequence, S context slot, A anchor, G block position; T = A*G block rows; n query heads,
n_kv heads of keys and values, d head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F


class ContextBounds(NamedTuple):
    """The context that an anchor's rows see, from a document's first slot up to the anchor."""

    start_BA: torch.Tensor
    """int64 slots."""
    end_BA: torch.Tensor
    """int64 slots; equal to the start for an anchor that sees no context."""


Visible: TypeAlias = torch.Tensor | ContextBounds
"""A bool tensor [B, A, S] of the context slots that an anchor's rows see, or their bounds."""
KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def attend(
    queries: torch.Tensor, context: KeysValues, own: KeysValues, mask: Visible
) -> torch.Tensor:
    """Grouped-query attention of block rows [B, n, T, d] over the context and their own block.

    Args:
        context: keys and values, each [B, n_kv, S, d].
        own: those of the block rows themselves, each [B, n_kv, T, d].
        mask: from `attention_mask`, or bounds, which only the Triton kernels take.
    """
    if isinstance(mask, ContextBounds):
        out, _ = block_attention(queries, *context, *own, *mask)
        return out
    keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys = keys.repeat_interleave(groups, dim=1)
        values = values.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def context_mask(
    context_start_BA: torch.Tensor, anchors_BA: torch.Tensor, num_slots: int
) -> torch.Tensor:
    """The slots from a document's first one up to its anchor, bool [B, A, S].

    Args:
        context_start_BA, anchors_BA: int64 slots; equal for an anchor that sees no context.
    """
    slots_S = torch.arange(num_slots, device=anchors_BA.device)
    return (slots_S >= context_start_BA.unsqueeze(2)) & (slots_S < anchors_BA.unsqueeze(2))


def attention_mask(context_mask_BAS: torch.Tensor, block_size: int) -> torch.Tensor:
    """Which of [context S | own rows A*G] each row sees: bool [B, 1, A*G, S + A*G].

    Rows see the context slots of their anchor and all rows of their own block, in both directions.

    For one sequence with two anchors, G = 2 and S = 3, anchor 0 seeing slot 0, anchor 1 slots 0, 1:

        1 0 0 | 1 1 0 0
        1 0 0 | 1 1 0 0
        1 1 0 | 0 0 1 1
        1 1 0 | 0 0 1 1
    """
    batch, anchors, _ = context_mask_BAS.shape
    rows = anchors * block_size
    context = context_mask_BAS.repeat_interleave(block_size, dim=1)
    block_of_row = torch.arange(rows, device=context_mask_BAS.device) // block_size
    own = (block_of_row.unsqueeze(0) == block_of_row.unsqueeze(1)).expand(batch, rows, rows)
    return torch.cat([context, own], dim=2).unsqueeze(1)


# --- the kernels as operators, which torch.compile leaves whole -----------------------------------


@torch.library.custom_op("dspark::block_attention", mutates_args=())
def block_attention(
    queries: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    context_start: torch.Tensor,
    context_end: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by Triton kernels, and each row's log-sum-exp, as `block_attention.forward`."""
    from dspark.block_attention import forward

    context, own = (context_keys, context_values), (own_keys, own_values)
    return forward(queries, context, own, (context_start, context_end))


@block_attention.register_fake
def _(
    queries: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    context_start: torch.Tensor,
    context_end: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = queries.shape
    kv_heads = context_keys.shape[1]
    lse = queries.new_empty(batch, kv_heads, rows, heads // kv_heads, dtype=torch.float32)
    return rows_side_by_side(queries), lse


@torch.library.custom_op("dspark::block_attention_backward", mutates_args=())
def _block_attention_backward(
    grad_out: torch.Tensor,
    queries: torch.Tensor,
    context_keys: torch.Tensor,
    context_values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    context_start: torch.Tensor,
    context_end: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from dspark.block_attention import backward

    context, own = (context_keys, context_values), (own_keys, own_values)
    bounds = context_start, context_end
    grads = backward(grad_out, queries, context, own, bounds, out, lse)
    return grads[0], *grads[1], *grads[2]


@_block_attention_backward.register_fake
def _(
    grad_out: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, context_keys, context_values, own_keys, own_values = map(
        rows_side_by_side, tensors[:5]
    )
    return queries, context_keys, context_values, own_keys, own_values


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(
    ctx: Any, grad_out: torch.Tensor, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return *_block_attention_backward(grad_out, *ctx.saved_tensors), None, None


block_attention.register_autograd(_gradients, setup_context=_keep)


def rows_side_by_side(like: torch.Tensor) -> torch.Tensor:
    """Memory for [B, n, T, d] in which the heads of a position lie side by side."""
    batch, heads, rows, width = like.shape
    return like.new_empty(batch, rows, heads, width).transpose(1, 2)
