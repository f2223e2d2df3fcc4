"""What documents are like, gathered in one pass and in memory that does not grow with them."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections import Counter
from typing import Any

import numpy as np

from splitserve.data.length import Document, bucket_edges, num_anchor_places

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)


class DataStats:
    """Lengths, supervised share, domains, duplicates and expected anchors.

    Digests of the documents, by which duplicates are found, go to a temporary file: 16 bytes a
    document.

    Args:
        max_tokens: longest document.
        num_anchors: blocks that training draws from a document.
    """

    def __init__(self, max_tokens: int, num_anchors: int) -> None:
        self._max_tokens = max_tokens
        self._num_anchors = num_anchors
        self._lengths = np.zeros(max_tokens + 1, dtype=np.int64)
        """Documents of each length."""
        self._documents: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._supervised: Counter[str] = Counter()
        self._anchors = 0
        self._places = 0
        self._digests = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the object

    def add(self, document: Document) -> None:
        """Take in one document."""
        ids, mask = document.token_ids, document.loss_mask
        self._lengths[len(ids)] += 1
        self._documents[document.domain] += 1
        self._tokens[document.domain] += len(ids)
        self._supervised[document.domain] += int(np.count_nonzero(mask))
        places = num_anchor_places(mask)
        self._places += places
        self._anchors += min(places, self._num_anchors)
        first = int(np.argmax(mask))
        pair = array("Q", (_digest(ids), _digest(ids[:first])))
        self._digests.write(pair.tobytes())

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; lengths are in tokens, shares from 0 to 1."""
        count = int(self._lengths.sum())
        tokens, supervised = sum(self._tokens.values()), sum(self._supervised.values())
        whole, prompts = self._num_duplicates()
        edges = bucket_edges(self._max_tokens)
        places = np.searchsorted(edges, np.arange(self._max_tokens + 1))
        buckets = np.bincount(places, weights=self._lengths, minlength=len(edges))
        return {
            "documents": count,
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens if tokens else 0.0,
            "length_quantiles": {f"{q:g}": self._quantile(q) for q in QUANTILES},
            "length_buckets": {
                str(edge): int(n) for edge, n in zip(edges, buckets, strict=True) if n
            },
            "domains": {
                name: {
                    "documents": number,
                    "tokens": self._tokens[name],
                    "supervised_tokens": self._supervised[name],
                }
                for name, number in self._documents.most_common()
            },
            "duplicate_documents": whole,
            "duplicate_prompts": prompts,
            "anchor_places": self._places,
            "expected_anchors": self._anchors,
            "expected_anchors_per_document": self._anchors / count if count else 0.0,
        }

    def _quantile(self, share: float) -> int:
        """The smallest length that this share of the documents does not exceed."""
        total = int(self._lengths.sum())
        if not total:
            return 0
        return int(np.searchsorted(np.cumsum(self._lengths), max(1, int(np.ceil(share * total)))))

    def _num_duplicates(self) -> tuple[int, int]:
        """Documents, and prompts, that are there already."""
        self._digests.flush()
        if not self._digests.tell():
            return 0, 0
        pairs = np.memmap(self._digests, dtype=np.uint64, mode="r").reshape(-1, 2)
        return tuple(  # type: ignore[return-value]
            len(pairs) - len(np.unique(pairs[:, column])) for column in (0, 1)
        )


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
