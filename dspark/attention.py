"""What block rows may look at: their anchor's context and their own block, and nothing else.

Shapes: B sequence, S context slot, A anchor, G block position; keys are [context S | own rows A*G].
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
"""Rows and keys of a tile of the sparse mask."""

Visible: TypeAlias = torch.Tensor | BlockMask
"""A bool tensor [B, A, S] of the context slots that an anchor's rows see, or `block_mask`."""


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: Visible
) -> torch.Tensor:
    """Grouped-query attention of [B, n, T, d] over [B, n_kv, S+T, d], masked, [B, n, T, d].

    Args:
        mask: from `attention_mask`, or a `BlockMask` inside a compiled function.
    """
    if isinstance(mask, BlockMask):
        return flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)
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


def block_mask(
    context_start_BA: torch.Tensor, anchors_BA: torch.Tensor, num_slots: int, block_size: int
) -> BlockMask:
    """The same mask, sparse: tiles that no row sees are not computed.

    Which tiles those are follows from the anchors by a few comparisons, without a dense mask and
    without waiting for the device. The fewest tiles remain where anchors ascend along A.

    Args:
        context_start_BA, anchors_BA: int64, as for `context_mask`, on the device to compute on.
    """
    num_anchors = anchors_BA.shape[1]
    rows = num_anchors * block_size
    keys = num_slots + rows
    of_tile, own_first, own_last, low, high = _tiles(
        num_anchors, block_size, num_slots, anchors_BA.device
    )
    # Extremes over the anchors of each tile of rows, [B, tiles of rows, 1].
    starts, ends = context_start_BA[:, of_tile], anchors_BA[:, of_tile]
    # Empty context has no first slot that could bound a tile from above.
    first = torch.where(ends > starts, starts, num_slots).amin(2, keepdim=True)
    seen = (low < ends.amax(2, keepdim=True)) & (high > first)
    whole = (low >= starts.amax(2, keepdim=True)) & (high <= ends.amin(2, keepdim=True))
    own = (low < own_last) & (high > own_first)
    some = (seen & ~whole) | own
    full = whole & ~own

    def mask_mod(
        batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        block = row // block_size
        context = (key >= context_start_BA[batch, block]) & (key < anchors_BA[batch, block])
        return context | ((key >= num_slots) & ((key - num_slots) // block_size == block))

    return BlockMask.from_kv_blocks(
        *_ordered(some), *_ordered(full), TILE, mask_mod, seq_lengths=(rows, keys)
    )


@cache
def _tiles(
    num_anchors: int, block_size: int, num_slots: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """What does not depend on the anchors' places.

    Returns:
        the anchors of each tile of rows [tiles, n], the last repeated; bounds of the own keys that
        its rows see, each [tiles, 1]; bounds of every tile of keys, each [1, tiles].
    """
    rows = num_anchors * block_size
    first_row = torch.arange(0, rows, TILE, device=device).unsqueeze(1)
    first = first_row // block_size
    last = (first_row + TILE - 1).clamp(max=rows - 1) // block_size
    width = (TILE - 1) // block_size + 2
    of_tile = torch.minimum(first + torch.arange(width, device=device), last)
    low = torch.arange(0, num_slots + rows, TILE, device=device).unsqueeze(0)
    own_first = num_slots + first * block_size
    own_last = num_slots + (last + 1) * block_size
    return of_tile, own_first, own_last, low, low + TILE


def _ordered(tiles_BQK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of tiles of keys per tile of rows, and their indices, those that count first."""
    count = tiles_BQK.sum(2, dtype=torch.int32).unsqueeze(1)
    order = tiles_BQK.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    return count, order.to(torch.int32).unsqueeze(1).contiguous()
