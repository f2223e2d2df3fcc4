"""Where blocks begin in training, and what their rows are to predict.

Anchors depend on (seed, epoch, sample) alone: the same at any rank count and after any resume.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def counter_rng(*key: object) -> np.random.Generator:
    """A Philox generator keyed by everything in `key`; equal keys give equal streams."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_anchors(
    loss_mask_S: torch.Tensor, num_anchors: int, *, seed: int, epoch: int, sample_id: str
) -> torch.Tensor:
    """Anchor positions of one document, drawn without replacement.

    A position p can be an anchor where the tokens p and p+1 are both supervised.

    Args:
        loss_mask_S: bool [S].
        num_anchors: how many to draw; all valid ones where there are fewer.

    Returns:
        int64 [A], ascending, A <= num_anchors; empty where no two neighbours are supervised.
    """
    mask = loss_mask_S.numpy()
    valid = np.flatnonzero(mask[:-1] & mask[1:])
    if len(valid) > num_anchors:
        rng = counter_rng("anchors", seed, epoch, sample_id)
        valid = np.sort(rng.choice(valid, num_anchors, replace=False))
    return torch.from_numpy(valid.astype(np.int64))


def block_labels(
    token_ids_S: torch.Tensor,
    loss_mask_S: torch.Tensor,
    anchors_A: torch.Tensor,
    block_size: int,
    ends_A: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that each block row is to predict, and whether it counts.

    Row g of the block at p predicts the token p+1+g. Labels count while they stay inside the
    document and everything from p+1 on is supervised. With tokens 10 11 12 13 14, mask 0 1 1 0 1,
    anchor 1 and three rows, the labels are 12 13 14 and only the first counts.

    Args:
        ends_A: int64, where the document of each anchor ends; by default where the sequence does.

    Returns:
        labels int64 [A, G] (0 where there is none) and valid bool [A, G].
    """
    length = token_ids_S.shape[0]
    places = anchors_A.unsqueeze(1) + 1 + torch.arange(block_size)
    inside = places < (length if ends_A is None else ends_A.unsqueeze(1))
    places = places.clamp(max=length - 1)
    supervised = loss_mask_S[places] & inside
    valid = supervised.long().cumprod(dim=1).bool()
    labels = torch.where(inside, token_ids_S[places], 0)
    return labels, valid
