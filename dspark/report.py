"""Accept length and what belongs to it, counted round by round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

ALL = "all"
"""The name under which the sums over every domain are reported."""


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-and-verify round of one request, cut at the request's end."""

    num_accepted_drafts: int
    """Drafts that stand, those beyond the end of the response not counted."""
    num_tokens: int
    """Tokens committed: the drafts that stand and, unless the response ended before it, the
    target's own token."""


@dataclass
class DomainCounts:
    """Sums over the rounds of one domain."""

    block_size: int
    num_requests: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    reached: list[int] = field(default_factory=list)
    """Rounds in which draft position k was judged: everything before it had been accepted."""
    accepted: list[int] = field(default_factory=list)
    """Rounds in which draft position k was accepted."""
    histogram: list[int] = field(default_factory=list)
    """Rounds by accepted drafts, 0 ... G."""

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * self.block_size
        self.accepted = self.accepted or [0] * self.block_size
        self.histogram = self.histogram or [0] * (self.block_size + 1)

    def add(self, rounds: Sequence[Round]) -> None:
        """Count one request."""
        self.num_requests += 1
        for item in rounds:
            count = item.num_accepted_drafts
            self.num_rounds += 1
            self.num_tokens += item.num_tokens
            self.histogram[count] += 1
            # A round that the end cut off says nothing about the positions behind the cut.
            judged = count + 1 if item.num_tokens > count else count
            for k in range(min(judged, self.block_size)):
                self.reached[k] += 1
                self.accepted[k] += k < count

    def merge(self, other: DomainCounts) -> None:
        """Add another domain's sums."""
        self.num_requests += other.num_requests
        self.num_rounds += other.num_rounds
        self.num_tokens += other.num_tokens
        for mine, theirs in (
            (self.reached, other.reached),
            (self.accepted, other.accepted),
            (self.histogram, other.histogram),
        ):
            for k, value in enumerate(theirs):
                mine[k] += value

    def to_dict(self) -> dict[str, Any]:
        """Counts and the figures formed from them.

        `accept_length` is tokens per round, bonus token included: 1.0 at the least, up to the one
        round in which the response ends. `alpha[k]` is the share of rounds that accepted position
        k among those that reached it, None where none did.
        """
        return {
            "accept_length": self.num_tokens / self.num_rounds if self.num_rounds else 1.0,
            "alpha": [
                a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)
            ],
            "histogram": self.histogram,
            "reached": self.reached,
            "num_requests": self.num_requests,
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
        }


@dataclass
class AcceptReport:
    """Accept length per domain, with everything that it depends on.

    `settings` holds temperature, rule, max_new_tokens and whatever names the draft; `timings` the
    seconds spent on drafting and on verifying.
    """

    block_size: int
    settings: dict[str, Any]
    domains: dict[str, DomainCounts] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    def add(self, domain: str, rounds: Iterable[Round]) -> None:
        """Count one finished request."""
        counts = self.domains.setdefault(domain, DomainCounts(self.block_size))
        counts.add(list(rounds))

    @property
    def total(self) -> DomainCounts:
        """The sums over all domains."""
        total = DomainCounts(self.block_size)
        for counts in self.domains.values():
            total.merge(counts)
        return total

    @property
    def accept_length(self) -> float:
        """Over all domains."""
        return float(self.total.to_dict()["accept_length"])

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; the sums over all domains are under "all"."""
        domains = {name: counts.to_dict() for name, counts in sorted(self.domains.items())}
        return {
            "block_size": self.block_size,
            "settings": dict(self.settings),
            "timings": dict(self.timings),
            "domains": {ALL: self.total.to_dict(), **domains},
        }
