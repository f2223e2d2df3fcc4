"""Documents of tokens: cut to a length, assigned to rows, counted by length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from splitserve.data.refusal import Reason, RowRefused
from splitserve.errors import UserError


@dataclass(frozen=True, slots=True)
class Document:
    """One row of data as tokens.

    token_ids is int64 [S]; loss_mask is bool [S].
    """

    id: str
    domain: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    num_whole: int
    """Tokens before anything was cut off."""
    num_whole_supervised: int
    """Supervised tokens before anything was cut off."""

    @property
    def truncated(self) -> bool:
        return len(self.token_ids) < self.num_whole


def supervised_spans(loss_mask: np.ndarray) -> np.ndarray:
    """Begin and end of each run of supervised tokens.

    With the mask 0 1 1 0 1 they are (1, 3) and (4, 5).

    Args:
        loss_mask: bool [S].

    Returns:
        int64 [N, 2], ascending.
    """
    padded = np.zeros(len(loss_mask) + 2, dtype=np.int8)
    padded[1:-1] = loss_mask
    return np.flatnonzero(np.diff(padded)).reshape(-1, 2)


def num_anchor_places(loss_mask: np.ndarray) -> int:
    """Positions p of a document where p and p+1 are both supervised; loss_mask is bool [S]."""
    return int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))


def limit(
    name: str, domain: str, token_ids: np.ndarray, loss_mask: np.ndarray, max_tokens: int
) -> Document:
    """A document of at most `max_tokens`, of which something can be learned.

    What is too long loses its end. The cut falls behind the last supervised span that fits whole;
    only where none does, it goes through a span.

    Args:
        token_ids: int64 [S].
        loss_mask: bool [S].

    Raises:
        RowRefused: no_anchor or prompt_too_long.
    """
    assert len(token_ids) == len(loss_mask), f"{name}: {len(token_ids)} ids, {len(loss_mask)} mask"
    supervised = int(np.count_nonzero(loss_mask))
    if not num_anchor_places(loss_mask):
        raise RowRefused(
            Reason.NO_ANCHOR,
            f"{supervised} of {len(token_ids)} tokens are supervised, no two of them neighbours",
            token_ids=token_ids.tolist(),
            loss_mask=loss_mask.tolist(),
        )
    stop = len(token_ids)
    if stop > max_tokens:
        spans = supervised_spans(loss_mask)
        # A single token has no anchor, so a cut behind it alone would leave nothing to learn.
        fits = spans[(spans[:, 1] <= max_tokens)]
        whole = bool((fits[:, 1] - fits[:, 0] >= 2).any())
        stop = int(fits[-1, 1]) if whole else max_tokens
        if not num_anchor_places(loss_mask[:stop]):
            raise RowRefused(
                Reason.PROMPT_TOO_LONG,
                f"no two supervised tokens lie within the first {max_tokens} of "
                f"{len(token_ids)} (data.max_tokens)",
                token_ids=token_ids.tolist(),
                loss_mask=loss_mask.tolist(),
            )
    return Document(name, domain, token_ids[:stop], loss_mask[:stop], len(token_ids), supervised)


def assign_rows(
    lengths: Sequence[int], row_tokens: int, max_documents: int
) -> list[tuple[int, ...]]:
    """Which documents share a row of `row_tokens`, each document whole and in one row.

    Longest first, and each into the row that it fills best: with lengths 2 5 3 4 4 and rows of 8,
    the rows are (1, 2), (3, 4), (0,). The outcome follows from the lengths and their order alone.

    Args:
        lengths: tokens of each document.
        max_documents: the most that share a row, 1 or more.

    Returns:
        the rows, each as indices into `lengths`.

    Raises:
        UserError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []
    """Free tokens and number of every row that takes more, ascending."""
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[index]
        if size > row_tokens:
            raise UserError(
                "train.row_tokens",
                row_tokens,
                f"{size} or more, the length of the longest sample",
                "raise it, or lower data.max_tokens",
            )
        place = bisect_left(open_rows, (size, 0))
        if place < len(open_rows):
            free, row = open_rows.pop(place)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(index)
        free -= size
        if free and len(rows[row]) < max_documents:
            insort(open_rows, (free, row))
    return [tuple(row) for row in rows]


def bucket_edges(max_tokens: int, smallest: int = 128) -> tuple[int, ...]:
    """Upper ends of length buckets, doubling up to `max_tokens`: 128 256 512 ... max_tokens."""
    edges = [min(smallest, max_tokens)]
    while edges[-1] < max_tokens:
        edges.append(min(2 * edges[-1], max_tokens))
    return tuple(edges)
