"""The account of rows: used, or dropped under a named reason.

Nothing here needs torch: processes that tokenize read this module and stay small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from splitserve.data.length import Document
from splitserve.data.refusal import ZERO_MASK, RowRefused

if TYPE_CHECKING:
    from splitserve.data.samples import Sample


def preview(
    token_ids: Sequence[int],
    loss_mask: Sequence[bool],
    decode: Callable[[Sequence[int]], str],
    limit: int = 400,
) -> str:
    """The text of a row with its supervised parts in [[ ]], its middle left out where too long."""
    parts: list[str] = []
    start = 0
    mask = [*loss_mask, *([False] * (len(token_ids) - len(loss_mask)))]
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or mask[end] != mask[start]:
            text = decode(token_ids[start:end])
            parts.append(f"[[{text}]]" if mask[start] else text)
            start = end
    whole = "".join(parts)
    if len(whole) <= limit:
        return whole
    half = limit // 2
    return f"{whole[:half]} ... {whole[-half:]}"


class DropReport:
    """Where every row went: used, or dropped under a named reason.

    Holds counts and one example for each reason, so that its size does not depend on the rows.
    """

    def __init__(self) -> None:
        self.num_used = 0
        """Rows that are trained on."""
        self.num_truncated = 0
        """Rows that are trained on with their end cut off."""
        self.num_tokens = 0
        """Tokens of the rows in use."""
        self.num_supervised = 0
        """Supervised tokens of the rows in use."""
        self.num_whole_supervised = 0
        """Supervised tokens that these rows had before they were cut."""
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, tuple[str, str, RowRefused | None]] = {}

    def use(self, sample: Sample | Document) -> None:
        """Count a sample that is trained on."""
        self.num_used += 1
        self.num_truncated += sample.truncated
        self.num_tokens += len(sample.token_ids)
        supervised = int(np.count_nonzero(sample.loss_mask))
        self.num_supervised += supervised
        whole = sample.num_whole_supervised if isinstance(sample, Document) else supervised
        self.num_whole_supervised += whole

    def drop(self, sample_id: str, why: RowRefused | str, detail: str = "") -> None:
        """Count a row that is not trained on, under a refusal's reason or under a name."""
        reason, refused = (why.reason.value, why) if isinstance(why, RowRefused) else (why, None)
        assert reason, f"{sample_id} is dropped without a reason"
        self._dropped[reason] += 1
        self._examples.setdefault(
            reason, (sample_id, refused.detail if refused else detail, refused)
        )

    def add(self, other: DropReport) -> None:
        """Take in the account of further rows; earlier examples stay."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._dropped.update(other._dropped)
        self._examples = {**other._examples, **self._examples}

    @property
    def num_rows(self) -> int:
        """Rows counted so far."""
        return self.num_used + self.num_dropped

    @property
    def num_dropped(self) -> int:
        """Rows that are not trained on."""
        return sum(self._dropped.values())

    @property
    def num_zero_mask(self) -> int:
        """Dropped rows of which no token, or no two neighbours, would have been supervised."""
        return sum(self._dropped[reason.value] for reason in ZERO_MASK)

    @property
    def supervised_kept(self) -> float:
        """The share of the supervised tokens of the rows in use that was not cut off."""
        return self.num_supervised / self.num_whole_supervised if self.num_whole_supervised else 1.0

    @property
    def reasons(self) -> dict[str, int]:
        """Dropped rows by reason, the most frequent first."""
        return dict(sorted(self._dropped.items(), key=lambda item: (-item[1], item[0])))

    def to_dict(self) -> dict[str, Any]:
        """The whole account, ready for JSON."""
        return {
            "rows": self.num_rows,
            "used": self.num_used,
            "truncated": self.num_truncated,
            "tokens": self.num_tokens,
            "supervised_tokens": self.num_supervised,
            "supervised_tokens_before_cuts": self.num_whole_supervised,
            "dropped": self.reasons,
            "examples": {
                reason: {"sample_id": sample_id, "detail": detail}
                for reason, (sample_id, detail, _) in sorted(self._examples.items())
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DropReport:
        """The account that `to_dict` has written, without the previews.

        Raises:
            KeyError, TypeError, ValueError: it is no such account.
        """
        report = cls()
        keys = ("used", "truncated", "tokens", "supervised_tokens", "supervised_tokens_before_cuts")
        for name, key in zip(_COUNTS, keys, strict=True):
            setattr(report, name, int(values[key]))
        report._dropped.update({str(k): int(v) for k, v in values["dropped"].items()})
        report._examples = {
            reason: (example["sample_id"], example["detail"], None)
            for reason, example in values["examples"].items()
        }
        if report.num_rows != values["rows"] or report._examples.keys() != report._dropped.keys():
            raise ValueError(f"{report.num_rows} rows are accounted for, of {values['rows']}")
        return report

    def check(
        self,
        *,
        max_drop_fraction: float,
        max_zero_mask_fraction: float = 1.0,
        decode: Callable[[Sequence[int]], str] | None = None,
        field: str = "data.prompts",
    ) -> None:
        """Refuse to go on with too few rows.

        Args:
            max_drop_fraction: the largest allowed share of dropped rows.
            max_zero_mask_fraction: the largest allowed share of rows with nothing to supervise.
            decode: token ids to text, for a preview of one row with its supervised parts marked.
            field: the setting that names the rows.

        Raises:
            ValueError: no row is used, or too many are dropped; shows reasons and examples.
        """
        if not self.num_rows:
            raise ValueError(f"{field}: there are no rows; give a source with some")
        if not self.num_used:
            raise ValueError(
                f"{field}: all {self.num_rows} rows were dropped, so no sample has two "
                f"supervised tokens next to each other and nothing can be trained on: "
                f"{self._explanation(decode)}; look at the preview: a wrong chat template, too "
                "small a data.max_tokens or max_new_tokens, or answers that end at once"
            )
        if self.num_zero_mask > max_zero_mask_fraction * self.num_rows:
            raise ValueError(
                f"data.max_zero_mask_fraction: {self.num_zero_mask} of {self.num_rows} rows have "
                f"nothing to supervise, at most {max_zero_mask_fraction:g} of them may be so: "
                f"{self._explanation(decode)}; correct the rows or the chat template, or raise "
                "the limit"
            )
        if self.num_dropped > max_drop_fraction * self.num_rows:
            raise ValueError(
                f"data.max_drop_fraction: {self.num_dropped} of {self.num_rows} rows were "
                f"dropped, at most {max_drop_fraction:g} of them may be: "
                f"{self._explanation(decode)}; correct the rows or raise the limit"
            )

    def _explanation(self, decode: Callable[[Sequence[int]], str] | None) -> str:
        parts = []
        for reason, count in self.reasons.items():
            sample_id, detail, refused = self._examples[reason]
            part = f"{reason} {count} (for example {sample_id}: {detail}"
            if refused is not None and refused.token_ids and decode is not None:
                part += f"; preview: {preview(refused.token_ids, refused.loss_mask, decode)!r}"
            parts.append(part + ")")
        return ", ".join(parts)


_COUNTS = (
    "num_used",
    "num_truncated",
    "num_tokens",
    "num_supervised",
    "num_whole_supervised",
)
