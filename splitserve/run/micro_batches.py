"""How the samples of an optimizer step are shared out over ranks and forward passes."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.data.length import assign_rows
from splitserve.data.schedule import rank_share
from splitserve.messages import BatchItem

MicroBatches = tuple[tuple[BatchItem, ...], ...]


def share_out(
    items: Sequence[BatchItem], *, num_ranks: int, micro_batch_size: int, row_tokens: int
) -> list[MicroBatches]:
    """Each rank's micro-batches: as many on every rank, at least one, some of them empty.

    Args:
        items: the samples of the step over all ranks, in the schedule's order.
        micro_batch_size: samples of a micro-batch at most.
        row_tokens: 0 deals samples to the ranks, which pad them; those of like length share a
            micro-batch. Above, the samples are packed into rows of so many tokens and the rows are
            dealt, so that they are the same for any number of ranks.

    Raises:
        UserError: a sample is longer than a row.
    """
    shares: list[list[tuple[BatchItem, ...]]]
    if row_tokens:
        sizes = [len(item.token_ids) for item in items]
        rows = assign_rows(sizes, row_tokens, micro_batch_size)
        filled = [tuple(items[i] for i in row) for row in rows]
        shares = [list(rank_share(filled, rank, num_ranks)) for rank in range(num_ranks)]
    else:
        ordered = sorted(items, key=lambda item: len(item.token_ids))
        shares = [
            [
                tuple(share[first : first + micro_batch_size])
                for first in range(0, len(share), micro_batch_size)
            ]
            for share in (rank_share(ordered, rank, num_ranks) for rank in range(num_ranks))
        ]
    count = max(1, *map(len, shares))
    return [(*share, *((),) * (count - len(share))) for share in shares]
