"""One sample of a run, where it is on its way, and what is counted of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from splitserve.data.samples import Sample
from splitserve.messages import Sampling, SlotRef


class State(Enum):
    """Where a sample is."""

    UNANSWERED = "unanswered"
    GENERATING = "generating"
    ANSWERED = "answered"
    TEACHING = "teaching"
    READY = "ready"
    DROPPED = "dropped"


SETTLED = (State.READY, State.DROPPED)
"""Nothing is to be had from the engine."""


@dataclass
class Entry:
    """One sample of the run: a prompt under one sampling setting, or a conversation."""

    sample_id: str
    domain: str
    prompt_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    state: State = State.UNANSWERED
    token_ids: tuple[int, ...] = ()
    """Prompt and response, once the response is known."""
    supervised: tuple[tuple[int, int], ...] = ()
    """Begin and end of every run of tokens that is learned from, once the response is known."""
    stored: bool = False
    """It came with its answers and can be read again."""
    draft_step: int = -1
    """Of the draft that the response was speculated with; -1 where there was none."""
    slot: SlotRef | None = None
    leases: int = 0
    """Batches out there that read the slot."""
    attempts: int = 0
    reason: str = ""

    @classmethod
    def of_stored(cls, sample: Sample) -> Entry:
        """The entry of a sample that needs no answer."""
        return cls(
            sample.sample_id,
            sample.domain,
            state=State.ANSWERED,
            token_ids=sample.token_ids,
            supervised=sample.supervised,
            stored=True,
        )


@dataclass
class FeederCounters:
    """What the feeder has seen, for the display and the report."""

    generated: int = 0
    generated_tokens: int = 0
    taught: int = 0
    taught_tokens: int = 0
    evicted: int = 0
    retried: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    aged: int = 0
    """Samples in batches whose response came from an engine with a draft."""
    age_steps: int = 0
    """Optimizer steps between that draft and the batch, summed over these samples."""

    def take_draft_age(self) -> dict[str, float]:
        """For the metrics file: the mean age since the last call, in steps; nothing without any."""
        if not self.aged:
            return {}
        mean = self.age_steps / self.aged
        self.aged = self.age_steps = 0
        return {"draft_age_steps": mean}
