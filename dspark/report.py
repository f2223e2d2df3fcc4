"""Accept length and what belongs to it, counted round by round.

What is counted. A request's first token comes from the prefill and belongs to no round. Every
draft-and-verify round up to the end of the response counts, none after it. The round in which the
response ends (end-of-turn token or max_new_tokens) counts with its tokens up to that end: drafts
behind it are not accepted drafts, and draft positions behind it were not reached. So

    accept_length = tokens committed by rounds / rounds

which is the mean of accepted drafts + 1 wherever no round was cut. SGLang's `spec_accept_length`
divides all completion tokens, the first one included, by the same rounds; `sglang_accept_length`
is that figure over the requests that had a round.

Source: SGLang 0.5.23, srt/managers/tokenizer_manager.py, for its figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    num_drafted_requests: int = 0
    """Requests that had a round: whose first token did not end them."""
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
        self.num_drafted_requests += bool(rounds)
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

    def add_served(self, histogram: Sequence[int], num_tokens: int) -> None:
        """Count one request by what a server says of it.

        A server does not say which drafts of the last round lie beyond the response's end, so
        `accepted` and `histogram` count them all; `num_tokens` does not.

        Args:
            histogram: rounds by accepted drafts, from 0 on.
            num_tokens: tokens of the response that rounds committed.

        Raises:
            ValueError: more drafts were accepted than a block has.
        """
        if len(histogram) > self.block_size + 1:
            raise ValueError(
                f"report: the server counted {len(histogram) - 1} accepted drafts in a round; "
                f"allowed: up to block_size={self.block_size}; measure with the draft's own"
            )
        self.num_requests += 1
        self.num_drafted_requests += sum(histogram) > 0
        self.num_rounds += sum(histogram)
        self.num_tokens += num_tokens
        for count, rounds in enumerate(histogram):
            self.histogram[count] += rounds
            for k in range(min(count + 1, self.block_size)):
                self.reached[k] += rounds
                self.accepted[k] += rounds if k < count else 0

    def merge(self, other: DomainCounts) -> None:
        """Add another domain's sums."""
        self.num_requests += other.num_requests
        self.num_drafted_requests += other.num_drafted_requests
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

        `accept_length` is tokens per round, bonus token included, 1.0 where there was no round.
        `alpha[k]` is the share of rounds that accepted position
        k among those that reached it, None where none did.
        """
        rounds = self.num_rounds
        completion_tokens = self.num_tokens + self.num_drafted_requests
        return {
            "accept_length": self.num_tokens / rounds if rounds else 1.0,
            "sglang_accept_length": completion_tokens / rounds if rounds else None,
            "alpha": [
                a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)
            ],
            "histogram": self.histogram,
            "reached": self.reached,
            "accepted": self.accepted,
            "num_requests": self.num_requests,
            "num_drafted_requests": self.num_drafted_requests,
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def from_dict(cls, block_size: int, values: Mapping[str, Any]) -> DomainCounts:
        """The counts that `to_dict` gave; the figures formed from them are left out."""
        counts = cls(block_size)
        for item in fields(cls):
            if item.name != "block_size":
                value = values[item.name]
                setattr(counts, item.name, [*value] if isinstance(value, list) else value)
        return counts


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
        """Count one finished request.

        Raises:
            ValueError: the domain has the name of the sums.
        """
        self._counts(domain).add(list(rounds))

    def add_served(self, domain: str, histogram: Sequence[int], num_tokens: int) -> None:
        """Count one request by what a server says of it; see `DomainCounts.add_served`.

        Raises:
            ValueError: the domain has the name of the sums, or the counts do not fit the block.
        """
        self._counts(domain).add_served(histogram, num_tokens)

    def _counts(self, domain: str) -> DomainCounts:
        if domain == ALL:
            raise ValueError(f"domain={ALL!r} is the name of the sums over domains; rename it")
        return self.domains.setdefault(domain, DomainCounts(self.block_size))

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AcceptReport:
        """The inverse of `to_dict`."""
        size = values["block_size"]
        domains = {
            name: DomainCounts.from_dict(size, counts)
            for name, counts in values["domains"].items()
            if name != ALL
        }
        return cls(size, dict(values["settings"]), domains, dict(values["timings"]))

    def merge(self, other: AcceptReport) -> None:
        """Add the counts and times of another part of the same measurement.

        Raises:
            ValueError: it was made with another block size or under other settings.
        """
        if (self.block_size, self.settings) != (other.block_size, other.settings):
            raise ValueError(
                f"report: block_size {self.block_size} and {self.settings} cannot be merged with "
                f"{other.block_size} and {other.settings}; allowed: equal ones; report them apart"
            )
        for name, counts in other.domains.items():
            self.domains.setdefault(name, DomainCounts(self.block_size)).merge(counts)
        for name, seconds in other.timings.items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds

    def rows(self) -> list[list[str]]:
        """A heading and one row per domain, the sums last, as text for a table."""
        heading = ["domain", "accept length"]
        heading += [f"alpha_{k + 1}" for k in range(self.block_size)]
        table = [[*heading, "tokens"]]
        for name, counts in [*sorted(self.domains.items()), (ALL, self.total)]:
            figures = counts.to_dict()
            alphas = ["-" if a is None else f"{a:.2f}" for a in figures["alpha"]]
            table.append([name, f"{figures['accept_length']:.2f}", *alphas, str(counts.num_tokens)])
        return table
