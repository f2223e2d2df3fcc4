"""The sparse mask of block rows, tile by tile, against the dense one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from dspark.attention import TILE, attention_mask, block_mask, context_mask

CASES = {
    # slots, block size, documents as (start, anchors)
    "one document": (256, 7, [(0, [3, 5, 90, 130, 200, 255])]),
    "anchors over several tiles": (384, 7, [(0, list(range(1, 384, 8)))]),
    "packed": (300, 5, [(0, list(range(2, 90, 3))), (90, list(range(91, 250, 2))), (260, [299])]),
    "absent anchors": (200, 4, [(0, [10, 150]), (0, [0] * 50)]),
    "no context": (128, 3, [(0, [0]), (64, [64, 65])]),
    "slots that are no tiles": (77, 16, [(0, [5, 70]), (71, [72, 76])]),
    "one row a block": (130, 1, [(0, list(range(130)))]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sparse_mask_equals_the_dense_one(case):
    slots, block, documents = case
    starts = torch.tensor([[s for s, places in documents for _ in places]] * 2)
    anchors = torch.tensor([[p for _, places in documents for p in places]] * 2)
    # A second sequence whose anchors lie elsewhere.
    starts[1], anchors[1] = 0, anchors[1].clamp(max=slots // 2)
    dense = attention_mask(context_mask(starts, anchors, slots), block)
    sparse = block_mask(starts, anchors, slots, block)
    rows, keys = dense.shape[2:]
    exact = create_mask(sparse.mask_mod, 2, 1, rows, keys, device="cpu")
    assert torch.equal(exact, dense)
    some = listed_tiles(sparse.kv_num_blocks, sparse.kv_indices)
    full = listed_tiles(sparse.full_kv_num_blocks, sparse.full_kv_indices)
    # What is seen is listed, once; what is listed as full is seen whole.
    assert not (some & full).any()
    assert ((some | full) | ~tiles_of(dense, fill=False).any(3)).all()
    assert (tiles_of(dense, fill=True).all(3) | ~full).all()


def tiles_of(dense, *, fill):
    """The mask's entries by tile, [B, tiles of rows, tiles of keys, TILE*TILE]."""
    rows, keys = dense.shape[2:]
    whole = torch.full((2, -(-rows // TILE) * TILE, -(-keys // TILE) * TILE), fill)
    whole[:, :rows, :keys] = dense[:, 0]
    return whole.unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE)).transpose(2, 3).flatten(3)


def listed_tiles(count, indices):
    """Bool [B, tiles of rows, tiles of keys] from the lists that the kernel walks."""
    listed = torch.zeros(indices[:, 0].shape, dtype=torch.bool)
    for place, number in [
        ((b, q), int(n)) for b, r in enumerate(count[:, 0]) for q, n in enumerate(r)
    ]:
        listed[place][indices[:, 0][place][:number].long()] = True
    return listed


def test_sparse_mask_leaves_out_what_lies_after_the_anchors():
    anchors = torch.arange(0, 4096, 8).unsqueeze(0)
    sparse = block_mask(torch.zeros_like(anchors), anchors, 4096, 7)
    computed = int(sparse.kv_num_blocks.sum() + sparse.full_kv_num_blocks.sum())
    # Half of the context, a diagonal, and the own block's tiles beside the diagonal.
    assert computed < 0.5 * 28 * 32 + 28 * 5
